"""Real processes: a publisher and the ranks of an engine, killed or stopped at every message.

After each, all ranks of the engine hold the old version, or all the new one, or all have failed.
Nobody waits beyond a deadline, another replica is not disturbed, and the engine gets the next
version.
"""

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.errors import FlyweightError
from flyweight.live import frames, messages
from flyweight.live.connection import Connection
from versioned_models import assign, holding, weights

CHECK, CAMPAIGN = pytest.mark.check, pytest.mark.campaign
SECONDS = LIMIT
SILENCE_SECONDS = {signal.SIGKILL: 2 * LIMIT, signal.SIGSTOP: 3.0}
LATE_SECONDS = 12
"""The time of a publish in which a rank is stopped; the others may pause for 3 s then."""
UNCOUNTED = (messages.Tick, messages.Going, messages.Welcome, messages.Agreed)
WHEN = ("before", "after")
AT_ONCE = 4


def end_at(point, signal_number, pipe):
    """Kill or stop this process at a point: before or after it sends or receives some message.

    Returns the points that were reached, such as "after Commit 0".
    """
    reached, lock = [], threading.Lock()

    def reach(when, message):
        if isinstance(message, UNCOUNTED):
            return
        kind = f"{when} {type(message).__name__}"
        with lock:
            reached.append(kind)
            is_last = point == f"{kind} {reached.count(kind) - 1}"
        if is_last:
            time.sleep(0.02)  # let go out what was sent before
            pipe.send(("ended", point))
            os.kill(os.getpid(), signal_number)
            time.sleep(0.1)  # a stop reaches another thread first

    send = Connection.send

    def counted_send(self, message, to=b""):
        reach("before", message)
        send(self, message, to)
        reach("after", message)

    def counted(decode):
        def counted_decode(frame):
            message = decode(frame)
            reach("received", message)
            return message

        return counted_decode

    Connection.send = counted_send
    frames.decode_from_replica = counted(frames.decode_from_replica)
    frames.decode_from_publisher = counted(frames.decode_from_publisher)
    return reached


class Rank:
    """A replica, or a rank of one, in this process."""

    def __init__(self, address, pool, **options):
        self.model, self._pool = weights(50), pool
        self.replica = fw.Replica(self.model, address, **options)
        self.is_over, self._update = threading.Event(), None

    def update(self, version=None):
        """Begin to wait for a version."""
        self.is_over.clear()
        self._update = self._pool.submit(
            self.replica.update, version, timeout_seconds=SECONDS, is_over=self.is_over.is_set
        )

    def held(self, *versions, should_end=False):
        """Wait for the end of the update; return the version that is held whole, or None."""
        if should_end:
            self.is_over.set()
            self.replica.wake()
        error = self._update.exception(SECONDS)
        assert error is None or isinstance(error, FlyweightError), error
        if self.replica.state == "failed":
            assert self.replica.version is None
            return None
        self.replica.check_servable()
        assert holding(self.model, versions) == self.replica.version
        return self.replica.version

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.replica.close()


def failures(ranks):
    return [str(each.replica.failure) for each in ranks]


def run_trials(trial, victims):
    """Run a trial for each victim, some at once; return what each returns."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda victim: trial(*victim), victims))


def check_ends(points, found, expected):
    """Check the version that an engine held after an end at each point, where that is known."""
    for point, (version, _) in zip(points, found, strict=True):
        assert version in expected.get(point, {1, 2, None}), point


# The publisher.


def publisher_that_ends(address, point, signal_number, options, pipe):
    pipe.recv()
    model = weights(1)
    silence_seconds = SILENCE_SECONDS[signal_number]
    with fw.Publisher(model, address, silence_seconds=silence_seconds, **options) as publisher:
        publisher.publish(1, num_replicas=2, timeout_seconds=SECONDS)
        pipe.send(("first", None))
        pipe.recv()
        reached = end_at(point, signal_number, pipe)
        assign(model, 2)
        publisher.publish(2, num_replicas=2, timeout_seconds=SECONDS)
        pipe.send(("second", reached))
        pipe.recv()
        assign(model, 3)
        publisher.publish(3, num_replicas=2, timeout_seconds=SECONDS)


def end_a_publisher(address, child, signal_number):
    """Return the version that the engine holds then, and the points if it did not end."""
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        child.send("start")
        ranks = [
            stack.enter_context(Rank(address, pool, name="engine", rank=rank, num_ranks=2))
            for rank in range(2)
        ]
        other = stack.enter_context(Rank(address, pool, name="other"))
        everyone = [*ranks, other]
        for each in everyone:
            each.update()
        assert child.told()[0] == "first"
        assert [each.held(1) for each in everyone] == [1, 1, 1], failures(everyone)
        for each in everyone:
            each.update()
        child.send("go on")
        how, reached = child.told()
        if how == "second":
            assert [each.held(2) for each in everyone] == [2, 2, 2]
            return 2, reached
        if signal_number == signal.SIGKILL:
            child.join()
        else:  # wait until its silence is noticed
            until(lambda: not any(each.replica.is_connected for each in everyone))
        versions = [each.held(1, 2, should_end=True) for each in everyone]
        assert versions[0] == versions[1], reached
        if signal_number == signal.SIGSTOP:
            for each in everyone:
                each.update()  # it may still wait for requests
            child.go_on()
            assert child.told()[0] == "second"
            found = [each.held(1, 2, should_end=True) for each in everyone]
            assert found[0] == found[1], reached
            child.send("go on")
        for each in everyone:
            each.update(3)
        if signal_number == signal.SIGKILL:
            publisher = stack.enter_context(fw.Publisher(weights(3), address))
            publisher.publish(3, num_replicas=2, timeout_seconds=SECONDS)
        assert [each.held(3) for each in everyone] == [3, 3, 3], failures(everyone)
        return versions[0], []


def numbered(reached):
    """Return the points of an undisturbed run, as `end_at` takes them."""
    counts = Counter(reached)
    return [f"{kind} {number}" for kind in counts for number in range(counts[kind])]


# Nobody writes or commits unless a rank was told so, and what one was told holds for all. A message
# that was sent may still be lost with the process. All replicas commit in any order, but those of
# the engine one after the other. The other one writes at once, and may be told to commit before the
# engine is told to write.
PUBLISHER_ENDS = {
    **{f"{when} Begin {number}": {1} for when in WHEN for number in range(3)},
    "before Write 0": {1},
    "before Write 1": {1, None},
    "after Write 1": {1, None},
    "before Commit 0": {1, None},
    "before Commit 2": {2, None},
    "after Commit 2": {2, None},
}
"""Which versions an engine may hold after the end of its publisher at a point."""


@pytest.mark.parametrize(
    ("signal_number", "options", "points"),
    [
        pytest.param(
            signal.SIGKILL, {}, ["before Begin 0", "after Write 1", "after Commit 2"],
            id="kill", marks=CHECK,
        ),
        pytest.param(signal.SIGSTOP, {}, ["after Write 1"], id="stop", marks=CHECK),
        *(
            pytest.param(number, options, None, marks=CAMPAIGN)
            for number in (signal.SIGKILL, signal.SIGSTOP)
            for options in ({}, {"hold": True})
        ),
    ],
)  # fmt: skip
def test_a_publisher_that_ends_at_a_message_leaves_one_version(
    tmp_path, signal_number, options, points
):
    """points: where it ends; None for all."""

    def start(point):
        address = f"unix:{tmp_path}/{point.replace(' ', '-')}"
        child = Child(publisher_that_ends, address, point, signal_number, options)
        return address, stack.enter_context(child), signal_number

    with ExitStack() as stack:
        if points is None:
            _, reached = end_a_publisher(*start("none"))
            points = numbered(reached)
            assert PUBLISHER_ENDS.keys() <= {*points}
        found = run_trials(end_a_publisher, [start(point) for point in points])
    check_ends(points, found, PUBLISHER_ENDS)


# A rank of the engine.


def rank_that_ends(address, rank, point, signal_number, pipe):
    pipe.recv()
    model = weights(60)
    replica = fw.Replica(model, address, name="engine", rank=rank, num_ranks=2)
    replica.update(timeout_seconds=SECONDS)
    pipe.recv()
    reached = end_at(point, signal_number, pipe)
    # One that was stopped before it asked waits for a version that has been published.
    first_seconds = SECONDS if signal_number == signal.SIGKILL else 1.5 * LATE_SECONDS
    for version, seconds in ((2, first_seconds), (3, SECONDS)):
        try:
            replica.update(version, timeout_seconds=seconds)
        except FlyweightError as error:
            reached.append(str(error))
        pipe.send(("updated", (replica.state, replica.version, holding(model, (1, 2, 3)), reached)))
        if pipe.recv() == "end":
            return


def end_a_rank(address, rank, child, restarted, signal_number):
    """Return the version that the engine holds then, and the points if it did not end."""
    model, is_killed = weights(1), signal_number == signal.SIGKILL
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        publisher = stack.enter_context(fw.Publisher(model, address, silence_seconds=2 * LIMIT))
        sibling, other = (
            stack.enter_context(Rank(address, pool, **options))
            for options in ({"name": "engine", "rank": 1 - rank, "num_ranks": 2}, {"name": "other"})
        )
        child.send("start")
        for each in (sibling, other):
            each.update()
        publisher.publish(1, num_replicas=2, timeout_seconds=SECONDS)
        assert [sibling.held(1), other.held(1)] == [1, 1], failures([sibling, other])
        child.send("go on")
        for each in (sibling, other):
            each.update(2)
        until(lambda: "other" in publisher.waiting)
        until(lambda: "engine" in publisher.waiting or child.has_told)
        assign(model, 2)
        report = publisher.publish(2, timeout_seconds=SECONDS if is_killed else LATE_SECONDS)
        assert other.held(2) == 2
        for failed in report.failed:
            assert failed.name == "engine"
            assert f"rank {rank}" in str(failed.error)
        how, ended = child.told()
        version = sibling.held(1, 2, should_end=True)
        if how == "updated":
            child.send("end")
            return version, ended[-1]
        if is_killed:
            child.join()
            restarted.send("start")
        else:
            until(lambda: child.is_stopped)
            child.go_on()
            _, (state, held, whole, texts) = child.told()
            assert held == version, (ended, texts)
            assert (state, whole) == ("ready", version) if version else state == "failed"
            child.send("go on")
        assign(model, 3)
        for each in (sibling, other):
            each.update(3)
        report = publisher.publish(3, num_replicas=2, timeout_seconds=SECONDS)
        assert report.failed == ()
        assert [sibling.held(3), other.held(3)] == [3, 3]
        if not is_killed:
            _, (*found, _) = child.told()
            assert found == ["ready", 3, 3]
        return version, []


RANK_ENDS = {
    "before Ask 0": {1},
    "before Drained 0": {1},
    "received Write 0": {None},
    "before Done 0": {None},
    "received Commit 0": {2},
}
"""Which version an engine holds after the end of one of its ranks at a point."""


@pytest.mark.parametrize(
    ("signal_number", "rank", "points"),
    [
        pytest.param(signal.SIGKILL, 0, [*RANK_ENDS], id="kill-0", marks=CHECK),
        pytest.param(signal.SIGKILL, 1, ["before Done 0"], id="kill-1", marks=CHECK),
        pytest.param(signal.SIGSTOP, 1, ["received Write 0"], id="stop-1", marks=CHECK),
        *(
            pytest.param(number, rank, None, marks=CAMPAIGN)
            for number in (signal.SIGKILL, signal.SIGSTOP)
            for rank in (0, 1)
        ),
    ],
)
def test_a_rank_that_ends_at_a_message_leaves_one_version(tmp_path, signal_number, rank, points):
    """points: where it ends; None for all."""

    def start(point):
        address = f"unix:{tmp_path}/{point.replace(' ', '-')}"
        children = [
            stack.enter_context(Child(rank_that_ends, address, rank, each, signal_number))
            for each in (point, "none")
        ]
        return address, rank, *children, signal_number

    with ExitStack() as stack:
        if points is None:
            version, reached = end_a_rank(*start("none"))
            assert version == 2
            points = numbered(reached)
            assert RANK_ENDS.keys() <= {*points}
        found = run_trials(end_a_rank, [start(point) for point in points])
    check_ends(points, found, RANK_ENDS)
