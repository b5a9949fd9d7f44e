"""Two ranks of an engine, in processes, with a trainer or a rank killed or stopped in an update.

Afterwards both hold one version or both have failed, nothing hangs, and the next publisher serves
them again.
"""

import os
import signal
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from fakes import FileRendezvousStore
from flyweight.errors import FlyweightError
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.live import replica as replicas
from flyweight.live.fallback import StoredIncoming
from flyweight.live.holder import Conversation
from flyweight.live.incoming import Incoming
from flyweight.live.shelf import Shelf
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous

CHECK, CAMPAIGN = pytest.mark.check, pytest.mark.campaign
OLD, NEW, NONE = ("SERVING", 1, 1.0), ("SERVING", 2, 2.0), ("FAILED", None, None)
LAYOUT = fw.ModelLayout.from_json(
    '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"0": "tp"}}]}'
)


class Engine(fw.ModelEngine):
    """Calls `pausing` when it has paused, before the first write."""

    def pausing(self):
        """Do nothing."""

    def drop_cache(self):
        self.pausing()


def strike(owner, name, when, blow, number=0):
    """Send this process a signal before or after its nth call of a function."""
    function, calls = getattr(owner, name), []

    def struck(*arguments, **options):
        is_it = len(calls) == number
        calls.append(name)
        if is_it and when == "before":
            os.kill(os.getpid(), blow)
        found = function(*arguments, **options)
        if is_it and when == "after":
            os.kill(os.getpid(), blow)
        return found

    setattr(owner, name, struck)


def engine_rank(address, directory, rank, pipe):
    """A rank that updates whenever the test says so, and tells what it holds then."""
    model = {"w": np.zeros((4, 1024))}
    engine = Engine(model)
    ranks = RankAgreement(Rendezvous(rank, 2, FileRendezvousStore(f"{directory}/ranks"), "engine"))
    replica = fw.Replica(
        model,
        address,
        name="engine",
        rank=rank,
        world_size=2,
        layout=LAYOUT,
        fallback=[f"{directory}/run"],
    )
    operations = Operations(engine, replica, ranks)
    replicas.COPY_SECONDS = LIMIT / 3  # or the time of the update, if that is longer
    pipe.send("ready")

    def stop():
        pipe.send("paused")
        pipe.recv()

    while (word := pipe.recv()) != "end":
        match word:
            case "wait in the pause":
                engine.pausing = stop
                continue
            case where, when, blow:
                owner, name = STEPS[where]
                strike(engine if owner is Engine else owner, name, when, blow)
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


def trainer(address, pipe):
    """Publish 1; then 2, and die at a step of that if the test names one."""
    model = {"w": np.full((8, 1024), 1.0)}
    with fw.Publisher(model, address) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        step = pipe.recv()
        if step is not None:
            (owner, name), when, number = POINTS[step[0]], *step[1:]
            strike(owner, name, when, signal.SIGKILL, number)
        model["w"][...] = 2
        publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT)
        pipe.recv()


class Ranks:
    """The ranks of an engine, in processes."""

    def __init__(self, stack, address, directory):
        self._stack, self._address, self._directory = stack, address, str(directory)
        self.children = [self.started(rank) for rank in range(2)]

    def started(self, rank):
        child = Child(engine_rank, self._address, self._directory, rank)
        self._stack.enter_context(child)
        assert child.told() == "ready"
        return child

    def begin_update(self, seconds=LIMIT):
        for child in self.children:
            child.send(seconds)

    def told(self):
        """Return what each rank holds after its update."""
        return [child.told() for child in self.children]

    def check_served_again(self, address):
        """Have another publisher serve the engine, also a rank that was started again."""
        with fw.Publisher({"w": np.full((8, 1024), 3.0)}, address, keep="memory") as publisher:
            publisher.publish(3)
            self.begin_update()
            told = self.told()
            assert [each for each, _ in told] == [("SERVING", 3, 3.0)] * 2, told


POINTS = {
    "announce": (Shelf, "announce"),
    "lease": (Shelf, "lease"),
    "fill": (Conversation, "_fill"),
    "served": (Shelf, "wait_served"),
}
KILLS = {
    ("announce", "before", 0): [OLD],
    ("lease", "before", 0): [OLD],
    ("lease", "after", 1): [OLD],
    ("fill", "before", 0): [OLD],
    ("fill", "before", 1): [OLD],
    ("fill", "after", 0): [OLD],  # filled, and nobody heard of it
    ("served", "before", 0): [OLD, NEW],
}
"""What both ranks may hold after a trainer was killed there: it never breaks an engine."""


@CHECK
@pytest.mark.parametrize("point", KILLS, ids=str)
def test_a_trainer_killed_at_any_step_leaves_both_ranks_alike(tmp_path, address, point):
    with ExitStack() as stack:
        publisher = stack.enter_context(Child(trainer, address))
        ranks = Ranks(stack, address, tmp_path)
        ranks.begin_update()
        assert [each for each, _ in ranks.told()] == [OLD] * 2
        ranks.begin_update(LIMIT if point[0] == "fill" else 5.0)  # else one may wait in vain
        publisher.send(point)
        (first, _), (second, _) = ranks.told()
        assert first == second
        assert first in KILLS[point]
        publisher.join()
        ranks.check_served_again(address)


def test_a_trainer_killed_while_the_ranks_pause_costs_them_nothing(tmp_path, address):
    with ExitStack() as stack:
        publisher = stack.enter_context(Child(trainer, address))
        ranks = Ranks(stack, address, tmp_path)
        ranks.begin_update()
        assert [each for each, _ in ranks.told()] == [OLD] * 2
        for child in ranks.children:
            child.send("wait in the pause")
        ranks.begin_update()
        publisher.send(None)
        assert ranks.told() == ["paused"] * 2
        publisher.kill()
        publisher.join()
        for child in ranks.children:
            child.send("go on")
        assert [each for each, _ in ranks.told()] == [NEW] * 2


STEPS = {
    "found": (replicas.Replica, "_fetch"),
    "found files": (replicas, "stored_version"),
    "pausing": (Engine, "pausing"),
    "copy": (Incoming, "copy"),
    "load": (StoredIncoming, "copy"),
}
STRIKES = {
    ("found", "before"): OLD,
    ("found", "after"): OLD,
    ("pausing", "before"): OLD,
    ("copy", "before"): NONE,
    ("copy", "after"): NONE,
    ("found files", "before"): OLD,
    ("found files", "after"): OLD,
    ("load", "before"): NONE,
    ("load", "after"): NONE,
}
"""What the other rank holds after one was killed or stopped there, for a publisher and for files."""


@CHECK
@pytest.mark.parametrize("step", STRIKES, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_step_leaves_no_mixed_version(tmp_path, address, threads, rank, step):
    check_struck_rank(tmp_path, address, threads, rank, step, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rank", "step"),
    [
        pytest.param(rank, step, marks=CHECK if step == ("copy", "before") else CAMPAIGN)
        for rank in range(2)
        for step in STRIKES
    ],
    ids=str,
)
def test_a_rank_stopped_at_any_step_leaves_no_mixed_version(tmp_path, address, threads, rank, step):
    check_struck_rank(tmp_path, address, threads, rank, step, signal.SIGSTOP)


def check_struck_rank(tmp_path, address, threads, rank, step, blow):
    is_killed, is_from_files = blow == signal.SIGKILL, step[0] in ("found files", "load")
    model = {"w": np.full((8, 1024), 1.0)}
    with ExitStack() as stack:
        publisher = stack.enter_context(fw.Publisher(model, address))
        ranks = Ranks(stack, address, tmp_path)
        ranks.begin_update()
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        assert [each for each, _ in ranks.told()] == [OLD] * 2
        victim, other = ranks.children[rank], ranks.children[1 - rank]
        victim.send((*step, blow))
        model["w"][...] = 2
        if is_from_files:
            publisher.close()
            fw.save(model, tmp_path / "run", version=2)
        ranks.begin_update(LIMIT if is_killed else LIMIT / 3)
        if not is_from_files:
            publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT / 3)
        left, error = other.told()
        assert left == STRIKES[step], error
        publisher.close()
        if is_killed:
            victim.join()
            ranks.children[rank] = ranks.started(rank)
        else:
            until(lambda: victim.is_stopped)
            victim.go_on()
            found, error = victim.told()
            assert found == left, error
        ranks.check_served_again(address)
