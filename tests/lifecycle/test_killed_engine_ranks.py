"""Two ranks of an engine, in processes, with a publisher or a rank killed or stopped in a round.

Afterwards both hold one version or both have failed, nothing hangs, and the next publisher serves
them again.
"""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.errors import FlyweightError
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.file_store import FileStore
from flyweight.ranks.rendezvous import Rendezvous

CHECK, CAMPAIGN = pytest.mark.check, pytest.mark.campaign
ALIKE = [("SERVING", 1, 1.0), ("SERVING", 2, 2.0), ("FAILED", None, None)]
LAYOUT = fw.ModelLayout.from_json(
    '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"0": "tp"}}]}'
)


def strike_at(kinds, when, number, blow):
    """Send this process a signal before or after its nth message of these kinds."""
    send, sent = Connection.send, 0

    def counted(self, message, to=b""):
        nonlocal sent
        is_it = isinstance(message, kinds)
        sent += is_it
        if is_it and (when, number) == ("before", sent - 1):
            time.sleep(0.05)  # let the message before it go out; any step may be struck at
            os.kill(os.getpid(), blow)
        send(self, message, to)
        if is_it and (when, number) == ("after", sent - 1):
            time.sleep(0.05)
            os.kill(os.getpid(), blow)

    Connection.send = counted


def engine_rank(address, directory, rank, pipe):
    """A rank that updates whenever the test says so, and tells what it holds then."""
    model = {"w": np.zeros((4, 1024))}
    engine = fw.ModelEngine(model)
    ranks = RankAgreement(Rendezvous(rank, 2, FileStore(Path(directory)), "engine"))
    replica = fw.Replica(model, address, name="engine", rank=rank, num_ranks=2, layout=LAYOUT)
    operations = Operations(engine, replica, ranks)
    pipe.send("ready")
    while (word := pipe.recv()) != "end":
        if not isinstance(word, float):
            strike_at(*word)
            continue
        error = ""
        try:
            operations.update(timeout_seconds=word)
        except FlyweightError as failure:
            error = f"{type(failure).__name__}: {failure}"
        values = set(model["w"].ravel().tolist())
        value = values.pop() if len(values) == 1 else "mixed"
        is_served = operations.state is State.SERVING
        told = str(operations.state), operations.version, value if is_served else None
        pipe.send((told, error))


def trainer(address, when, number, pipe):
    """A publisher that dies at its nth Begin, Write or Commit of version 2."""
    model = {"w": np.full((8, 1024), 1.0)}
    with fw.Publisher(model, address, silence_seconds=LIMIT) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        pipe.recv()
        strike_at((messages.Begin, messages.Write, messages.Commit), when, number, signal.SIGKILL)
        model["w"][...] = 2
        publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT)
        time.sleep(LIMIT)  # it is killed


class Engine:
    def __init__(self, stack, address, tmp_path):
        self._stack, self._address, self._directory = stack, address, str(tmp_path / "ranks")
        self.ranks = [self.started(rank) for rank in range(2)]

    def started(self, rank):
        child = Child(engine_rank, self._address, self._directory, rank)
        self._stack.enter_context(child)
        assert child.told() == "ready"
        return child

    def begin_update(self, seconds=LIMIT):
        for child in self.ranks:
            child.send(seconds)

    def told(self):
        """Return what each rank holds after its update."""
        return [child.told() for child in self.ranks]

    def is_served_again(self, address):
        """Have another publisher serve the engine, also a rank that was started again."""
        with fw.Publisher({"w": np.full((8, 1024), 3.0)}, address, hold=True) as publisher:
            publisher.publish(3)
            self.begin_update()
            told = self.told()
            assert [each for each, _ in told] == [("SERVING", 3, 3.0)] * 2, told


OLD, NEW, NONE = ALIKE
POINTS = {
    ("before", 0): [OLD],  # no Begin
    ("after", 0): [OLD],
    ("after", 1): [OLD],  # two of Begin
    ("after", 2): [OLD, NONE],  # one of Write, which may still be on its way
    ("after", 3): [OLD, NONE],
    ("after", 4): [NEW, NONE],  # one of Commit
    ("after", 5): [NEW, NONE],
}
"""The messages of a round with two ranks, and what both ranks may then hold."""


@pytest.mark.check
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_publisher_killed_at_any_message_leaves_both_ranks_alike(tmp_path, address, point):
    with ExitStack() as stack:
        publisher = stack.enter_context(Child(trainer, address, *point))
        engine = Engine(stack, address, tmp_path)
        engine.begin_update()
        assert [each for each, _ in engine.told()] == [OLD] * 2
        # Without a Begin, both of them or one waits in vain.
        engine.begin_update(5.0 if POINTS[point] == [OLD] else LIMIT)
        publisher.send("go on")
        (first, _), (second, _) = engine.told()
        assert first == second
        assert first in POINTS[point]
        publisher.kill()  # it has struck itself, unless both ranks gave up before it began
        publisher.join()
        engine.is_served_again(address)


STEPS = {
    ("before", 0): [OLD],  # not drained
    ("after", 0): [OLD, NONE],  # drained
    ("before", 1): [NONE],  # writing
    ("after", 1): [NEW, NONE],  # done
}
"""The messages of a rank, and what the other rank may then hold."""


@pytest.mark.check
@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_message_leaves_no_mixed_version(
    tmp_path, address, threads, rank, step
):
    check_struck_rank(tmp_path, address, threads, rank, step, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rank", "step"),
    [
        pytest.param(rank, step, marks=CHECK if step == ("before", rank) else CAMPAIGN)
        for rank in range(2)
        for step in STEPS
    ],
    ids=str,
)
def test_a_rank_stopped_at_any_message_leaves_no_mixed_version(
    tmp_path, address, threads, rank, step
):
    check_struck_rank(tmp_path, address, threads, rank, step, signal.SIGSTOP)


def check_struck_rank(tmp_path, address, threads, rank, step, blow):
    kinds = messages.Drained, messages.Done
    is_killed = blow == signal.SIGKILL
    model = {"w": np.full((8, 1024), 1.0)}
    with ExitStack() as stack:
        # A stopped rank is noticed by its silence alone; others must never be silent for so long.
        with fw.Publisher(model, address, silence_seconds=LIMIT if is_killed else 8) as publisher:
            engine = Engine(stack, address, tmp_path)
            engine.begin_update()
            publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
            assert [each for each, _ in engine.told()] == [OLD] * 2
            victim, other = engine.ranks[rank], engine.ranks[1 - rank]
            victim.send((kinds, *step, blow))
            model["w"][...] = 2
            engine.begin_update()
            publish = threads.submit(publisher.publish, 2, num_replicas=1, timeout_seconds=LIMIT)
            left, _ = other.told()
            assert left in STEPS[step]
            publish.result(LIMIT)
            if is_killed:
                victim.join()
                engine.ranks[rank] = engine.started(rank)
            else:
                until(lambda: victim.is_stopped)
                victim.go_on()
                found, _ = victim.told()
                assert found == left
        engine.is_served_again(address)
