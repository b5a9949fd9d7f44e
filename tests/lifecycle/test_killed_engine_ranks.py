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
from child_processes import Child, until
from flyweight.errors import FlyweightError
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.file_store import FileStore
from flyweight.ranks.rendezvous import Rendezvous

pytestmark = pytest.mark.check

SECONDS = 3
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
            time.sleep(0.05)  # let the message before it go out
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
        if word != "update":
            strike_at(*word)
            continue
        error = ""
        try:
            operations.update(timeout_seconds=SECONDS)
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
    with fw.Publisher(model, address, silence_seconds=1) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=10)
        pipe.recv()
        strike_at((messages.Begin, messages.Write, messages.Commit), when, number, signal.SIGKILL)
        model["w"][...] = 2
        publisher.publish(2, num_replicas=1, timeout_seconds=10)
        time.sleep(0.3)


class Engine:
    def __init__(self, stack, address, tmp_path):
        self._stack, self._address, self._directory = stack, address, str(tmp_path / "ranks")
        self.ranks = [self.started(rank) for rank in range(2)]

    def started(self, rank):
        child = Child(engine_rank, self._address, self._directory, rank)
        self._stack.enter_context(child)
        assert child.told() == "ready"
        return child

    def begin_update(self):
        for child in self.ranks:
            child.send("update")

    def told(self, seconds=3 * SECONDS):
        """Return what each rank holds after its update."""
        return [child.told(seconds) for child in self.ranks]

    def is_served_again(self, address):
        """Have another publisher serve the engine, also a rank that was started again."""
        with fw.Publisher({"w": np.full((8, 1024), 3.0)}, address, hold=True) as publisher:
            publisher.publish(3)
            self.begin_update()
            told = self.told()
            assert [each for each, _ in told] == [("SERVING", 3, 3.0)] * 2, told


POINTS = [("before", 0), *(("after", number) for number in range(6))]
"""The messages of a round with two ranks: two each of Begin, Write and Commit."""


def test_a_publisher_killed_at_any_message_leaves_both_ranks_alike(tmp_path):
    seen = set()
    for place, (when, number) in enumerate(POINTS):
        address = f"unix:{tmp_path}/p{place}"
        with ExitStack() as stack:
            publisher = stack.enter_context(Child(trainer, address, when, number))
            engine = Engine(stack, address, tmp_path / str(place))
            engine.begin_update()
            assert [each for each, _ in engine.told()] == [("SERVING", 1, 1.0)] * 2
            engine.begin_update()
            publisher.send("go on")
            (first, _), (second, _) = engine.told()
            assert first == second, (when, number, first, second)
            assert first in ALIKE
            seen.add(first[:2])
            publisher.join()
            engine.is_served_again(address)
    assert seen == {("SERVING", 1), ("SERVING", 2), ("FAILED", None)}


STEPS = [
    ("before", 0),  # not drained
    ("after", 0),  # drained
    ("before", 1),  # writing
    ("after", 1),  # done
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_killed_or_stopped_at_any_message_leaves_no_mixed_version(
    tmp_path, threads, rank, blow
):
    kinds, seen = (messages.Drained, messages.Done), set()
    for place, (when, number) in enumerate(STEPS):
        address = f"unix:{tmp_path}/p{place}"
        with ExitStack() as stack:
            model = {"w": np.full((8, 1024), 1.0)}
            publisher = fw.Publisher(model, address, silence_seconds=1)
            with publisher:
                engine = Engine(stack, address, tmp_path / str(place))
                engine.begin_update()
                publisher.publish(1, num_replicas=1, timeout_seconds=10)
                assert [each for each, _ in engine.told()] == [("SERVING", 1, 1.0)] * 2
                victim, other = engine.ranks[rank], engine.ranks[1 - rank]
                victim.send((kinds, when, number, blow))
                model["w"][...] = 2
                engine.begin_update()
                publish = threads.submit(publisher.publish, 2, num_replicas=1, timeout_seconds=5)
                left, _ = other.told(3 * SECONDS)
                assert left in ALIKE, (when, number, left)
                seen.add(left[:2])
                publish.result(10)
                if blow == signal.SIGKILL:
                    victim.join()
                    engine.ranks[rank] = engine.started(rank)
                else:
                    until(lambda: victim.is_stopped)  # noqa: B023
                    victim.go_on()
                    found, _ = victim.told(3 * SECONDS)
                    assert found == left, (when, number, found, left)
            engine.is_served_again(address)
    assert {("SERVING", 1), ("FAILED", None)} <= seen
    assert ("SERVING", 2) in seen or blow == signal.SIGKILL
