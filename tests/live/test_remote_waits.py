"""Replicas of other hosts that wait for each other, and who is late if one of them hangs."""

import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from flyweight.live import messages, reconnect
from flyweight.live.fetch import STAGING_SLOTS
from flyweight.live.member import MemberRound
from flyweight.live.running_round import RunningRound
from flyweight.live.sources import Sources
from live_rounds import SECONDS, call_before, moved_clock
from netns import fleet
from peers import FakeReplica
from remote_processes import MIB, PART_BYTES, TOKEN, Actor, Engine, Remote, TrainerRank
from versioned_models import holds, weights

LATE_SECONDS = 12.0
"""How long a source rank may fill no bucket where one is late; the others may pause for 3 s."""


class Held:
    """Something that a test keeps waiting."""

    def __init__(self):
        self._is_free, self.is_waiting = threading.Event(), threading.Event()

    def wait(self):
        self.is_waiting.set()
        assert self._is_free.wait(LIMIT)

    @contextmanager
    def until_the_end(self):
        try:
            yield self
        finally:
            self._is_free.set()


def test_a_replica_that_hangs_after_its_last_bucket_is_given_up(trainer, threads, monkeypatch):
    """It waits for nobody, though it has no bucket to read or to unpack."""

    def load(named):
        assert len(dict(named)) == len(weights(0))
        held.wait()

    passed = moved_clock(monkeypatch)
    with Held().until_the_end() as held:
        publisher = trainer(weights(1), bucket_bytes=1 << 14)
        target = weights(2)
        replicas = [
            publisher.replica(load, "stuck", framework="numpy"),
            publisher.replica(target, "right"),
        ]
        updates = [threads.submit(each.update, timeout_seconds=LIMIT) for each in replicas]
        until(lambda: len(publisher.waiting) == 2)
        publish = threads.submit(publisher.publish, 1, num_replicas=2)
        assert held.is_waiting.wait(LIMIT)
        assert updates[1].result(LIMIT).version == 1
        passed[0] = 2 * LIMIT
        report = publish.result(LIMIT)
    assert [each.name for each in report.failed] == ["stuck"]
    assert "late" in str(report.failed[0].error)
    assert updates[0].exception(LIMIT) is not None
    assert holds(target, 1)


def asking(publisher, threads, num_replicas):
    """Return replicas that wait for a version, their weights, and what their updates return."""
    targets = [weights(2) for _ in range(num_replicas)]
    replicas = [publisher.replica(each, f"{n}") for n, each in enumerate(targets)]
    updates = []
    for n, each in enumerate(replicas):
        updates.append(threads.submit(each.update, timeout_seconds=LIMIT))
        until(lambda n=n: len(publisher.waiting) > n)
    return replicas, targets, updates


def test_a_replica_that_leaves_before_the_round_begins_fails_no_other(
    trainer, threads, monkeypatch
):
    publisher = trainer(weights(1))
    replicas, targets, updates = asking(publisher, threads, 3)

    def leave():
        replicas[0].close()
        until(lambda: len(publisher.replicas) == 2)

    call_before(monkeypatch, Sources, "offer", leave)
    report = publisher.publish(1, num_replicas=3)
    assert [each.name for each in report.failed] == ["0"]
    assert isinstance(updates[0].exception(LIMIT), fw.FlyweightError)
    assert [each.result(LIMIT).version for each in updates[1:]] == [1, 1]
    assert all(holds(each, 1) for each in targets[1:])


def test_what_a_replica_says_of_a_round_before_it_begins_is_ignored(trainer, threads, monkeypatch):
    """Numbers of rounds are easy to guess, and the others do not know of this one yet."""
    publisher = trainer(weights(1))
    replicas, targets, updates = asking(publisher, threads, 2)

    def guess():
        said = len(heard)
        replicas[0]._publisher.connection.send(messages.Has(1, 0, None))
        until(lambda: len(heard) > said)

    heard = []
    call_before(monkeypatch, MemberRound, "receive", lambda: heard.append(None))
    call_before(monkeypatch, RunningRound, "run", guess)
    assert publisher.publish(1, num_replicas=2).failed == ()
    assert [each.result(LIMIT).version for each in updates] == [1, 1]
    assert all(holds(each, 1) for each in targets)


def two_that_share(trainer, threads, held):
    """Return a replica that has a version, and one that reads the rest of it from that one later.

    The second one is held before it writes. It has eight buckets in staging, and lacks others.
    """
    publisher = trainer(weights(1, MIB), bucket_bytes=MIB // 16, timeout_seconds=LIMIT)
    first, second = (publisher.replica(weights(n, MIB), f"{n}") for n in (2, 3))
    update = threads.submit(first.update, timeout_seconds=LIMIT)
    until(lambda: publisher.waiting)
    held_update = threads.submit(second.update, timeout_seconds=LIMIT, before=lambda _: held.wait())
    until(lambda: len(publisher.waiting) == 2)
    future = threads.submit(publisher.publish, 1, num_replicas=2)
    assert update.result(LIMIT).version == 1
    return first, held_update, future


def test_a_replica_that_is_closed_waits_a_while_for_those_that_read_from_it(
    trainer, threads, monkeypatch
):
    monkeypatch.setattr(reconnect, "_READ_SECONDS", SECONDS / 3)
    with Held().until_the_end() as held:
        first, update, future = two_that_share(trainer, threads, held)
        with in_time(SECONDS / 3):
            first.close()
    assert update.result(LIMIT).version == 1  # from the trainer
    assert future.result(LIMIT).failed == ()


def test_a_replica_that_is_closed_waits_no_longer_than_others_read_from_it(
    trainer, threads, monkeypatch
):
    monkeypatch.setattr(reconnect, "_READ_SECONDS", 2 * LIMIT)
    with Held().until_the_end() as held:
        first, update, future = two_that_share(trainer, threads, held)
        closing = threads.submit(first.close)
        with pytest.raises(TimeoutError):
            closing.result(0.3)  # on a slow machine one that does not wait is not seen
    closing.result(LIMIT)
    assert update.result(LIMIT).version == 1
    assert future.result(LIMIT).failed == ()


def is_full(replica):
    """True if all slots of its staging have buckets that others may read."""
    fetches = replica._publisher.connection._fetches
    return fetches is not None and len(fetches.lent) == STAGING_SLOTS


def test_a_replica_that_is_closed_in_a_round_does_not_wait(trainer, threads, monkeypatch):
    monkeypatch.setattr(reconnect, "_READ_SECONDS", 2 * LIMIT)
    with Held().until_the_end() as held:
        publisher = trainer(weights(1, MIB), bucket_bytes=MIB // 16)
        first, second = (publisher.replica(weights(n, MIB), f"{n}") for n in (2, 3))
        updates = [
            threads.submit(each.update, timeout_seconds=LIMIT, before=lambda _: held.wait())
            for each in (first, second)
        ]
        future = threads.submit(publisher.publish, 1, num_replicas=2)
        until(lambda: is_full(first))
        closing = threads.submit(first.close)
        until(lambda: publisher.replicas == ["3"])
    closing.result(LIMIT)
    assert isinstance(updates[0].exception(LIMIT), fw.FlyweightError)
    assert updates[1].result(LIMIT).version == 1
    assert [each.name for each in future.result(LIMIT).failed] == ["2"]


@contextmanager
def two_ranks(host, other, directory, **options):
    """The two ranks of a trainer, in whose slots one bucket fits."""
    options = {"bucket_bytes": MIB, "transport": "host", "depth": 1, **options}
    options |= {"is_awaited": False}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Remote(at, TrainerRank, host.ip, rank, 2, directory, **options))
            for rank, at in enumerate((host, other))
        ]
        for each in ranks:
            each.made()
        yield ranks


def engine_at(host, address, name):
    return Remote(
        host, Engine, address, model={"w": np.zeros((2, PART_BYTES), np.uint8)}, name=name
    )


def test_a_source_rank_that_fills_no_bucket_is_named(tmp_path):
    """The replicas that wait for its buckets do not wait for each other."""
    with (
        fleet(3) as (first, (second, third, fourth)),
        two_ranks(first, second, tmp_path) as ranks,
        engine_at(third, ranks[0].address, "e0") as one,
        engine_at(fourth, ranks[0].address, "e1") as other,
    ):
        ranks[1].ask("stop_before", "Filled")
        for each in (one, other):
            each.start("update")
        until(lambda: ranks[0].ask("num_waiting") == 2)
        for each in ranks:
            each.start("publish", 1, num_replicas=2, timeout_seconds=LATE_SECONDS)
        ranks[1].stopped()
        found = ranks[0].end()
        assert found.keys() == {"e0", "e1"}
        assert all("source rank 1" in each for each in found.values()), found
        ranks[1].pass_on()
        assert [each.end().kind for each in (one, other)] == ["TransferTimeout"] * 2


HELD = 1
"""The first bucket of rank 1: with two ranks, those of rank 0 have even numbers."""


class SlowReplica(Actor):
    """A replica of the trainer's own host that holds the first slot of rank 1 for a long time."""

    def make(self, directory):
        (found,) = directory.glob("*/control")
        self._peer = FakeReplica(f"unix:{found.parent}")
        self._peer.token = TOKEN
        self._peer.join("slow")

    def update(self):
        self._peer.say(messages.Ask(1, None, None))
        begin = self._peer.hear_of(messages.Begin)
        num_buckets = PART_BYTES // MIB  # of each rank
        self._empty(begin.round, num_buckets + 1)
        for n in range(round(2.5 * LATE_SECONDS / 0.3)):  # it copies, if slowly
            time.sleep(0.3)
            self._peer.say(messages.Tick(n + 1))
        self._peer.say(messages.Emptied(begin.round, HELD))
        self._empty(begin.round, num_buckets - 1)
        self._peer.say(messages.Done(begin.round, b"", 0.0, 0.0))
        self._peer.hear_of(messages.Commit)

    def _empty(self, number, count):
        """Empty that many buckets as they come, but not the one that is held."""
        for _ in range(count):
            bucket = self._peer.hear_of(messages.Filled).bucket
            if bucket != HELD:
                self._peer.say(messages.Emptied(number, bucket))


@pytest.mark.campaign
def test_a_replica_is_not_late_while_one_of_the_trainers_host_holds_a_slot(tmp_path, monkeypatch):
    """Nor does a source rank that waits for that slot count as late."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("FLYWEIGHT_RUN_DIR", str(run))
    with (
        fleet(1) as (host, (other,)),
        two_ranks(
            host, host, tmp_path / "ranks", should_verify=False, timeout_seconds=LATE_SECONDS
        ) as ranks,
        engine_at(other, ranks[0].address, "remote") as remote,
        Remote(host, SlowReplica, run) as slow,
    ):
        for each in (slow, remote):
            each.start("update")
        for each in ranks:
            each.start("publish", 1, num_replicas=2)
        assert remote.end() == (1, "network")
        assert slow.end() is None
        assert [each.end() for each in ranks] == [{"slow": "host", "remote": "network"}] * 2
        assert remote.ask("bytes")["w"] == bytes([1]) * 2 * PART_BYTES
