"""Every way in which several ranks that load files can be cut off: one version or none, never two.

The operations and the weights are the real ones. The ranks' exchange is replaced by one that loses
answers, or a rank, at each step.
"""

import threading
from itertools import chain, combinations

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import FlyweightError, LifecycleError, PeerLost
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.lifecycle.weights import StoredWeights
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous


class Died(BaseException):
    """This rank's process is killed here."""


class Hub:
    """Exchanges the answers of all ranks; at one of them, some ranks hear nothing."""

    def __init__(self, num_ranks, *, fault_at=None, deaf=(), dies=None):
        self.num_ranks, self._fault_at, self._deaf, self._dies = num_ranks, fault_at, deaf, dies
        self._changed, self._said, self._heard = threading.Condition(), {}, {}
        self.num_done = 0
        """How many exchanges there were."""
        self.gone = set()

    def leave(self, rank):
        with self._changed:
            self.gone.add(rank)
            self._changed.notify_all()

    def exchange(self, rank, mine):
        with self._changed:
            number, is_fault = self.num_done, self.num_done == self._fault_at
            if is_fault and self._dies == rank and not self._deaf:  # before it has answered
                self.gone.add(rank)
                self._changed.notify_all()
                raise Died
            self._said[rank] = mine
            if len(self._said) == self.num_ranks:
                self._heard[number] = [self._said[each] for each in range(self.num_ranks)]
                self._said, self.num_done = {}, number + 1
                self._changed.notify_all()
            done = self._changed.wait_for(lambda: number in self._heard or self.gone, LIMIT)
            assert done, f"rank {rank} waits for ever for {mine}"
            if number not in self._heard:
                self._said.pop(rank, None)
                raise PeerLost("a rank is gone")
            if is_fault and self._dies == rank:
                self.gone.add(rank)
                self._changed.notify_all()
                raise Died
            if is_fault and rank in self._deaf:
                raise PeerLost("the answers did not arrive")
            return self._heard[number]


class HubAgreement(RankAgreement):
    """The ranks' agreement, through a hub."""

    def __init__(self, hub, rank):
        super().__init__(Rendezvous())
        self.num_ranks, self._hub, self._rank = hub.num_ranks, hub, rank

    def _exchange(self, mine, deadline):
        return self._hub.exchange(self._rank, mine)


class Engine:
    """The ranks of an engine, in threads."""

    def __init__(self, num_ranks, run, threads):
        self._threads, self.ranks = threads, range(num_ranks)
        self.models = [{"w": np.zeros(4)} for _ in self.ranks]
        self.operations = []
        for rank in self.ranks:
            weights = StoredWeights(self.models[rank], run)
            agreement = HubAgreement(Hub(num_ranks), rank)
            self.operations.append(Operations(ModelEngine(self.models[rank]), weights, agreement))

    def update(self, hub, **options):
        """Update on all ranks; return what each raised."""
        for each in self.operations:
            each._steps.ranks._hub = hub

        def update(rank):
            try:
                self.operations[rank].update(timeout_seconds=LIMIT, **options)
            except Died:
                return "died"
            except FlyweightError as error:
                return error
            finally:
                hub.leave(rank)  # whoever still waits for its answer waits in vain

        futures = [self._threads.submit(update, rank) for rank in self.ranks]
        return [future.result(LIMIT) for future in futures]

    def check(self, *, dead=(), is_whole=True):
        """Check that all living ranks serve one version, or none does; return the version."""
        alive = [rank for rank in self.ranks if rank not in dead]
        found = [(self.operations[rank].state, self.operations[rank].version) for rank in alive]
        for rank, (state, version) in zip(alive, found, strict=True):
            assert (state is State.SERVING) == (version is not None), found
            if version is not None:
                assert (self.models[rank]["w"] == version).all(), (rank, version)
        served = {version for _, version in found}
        assert len(served - {None}) <= 1, found
        if is_whole:
            assert len(served) == 1, found
        return max((each for each in served if each is not None), default=None)


@pytest.fixture
def run(tmp_path):
    """Snapshots: version 1."""
    fw.save({"w": np.full(4, 1.0)}, tmp_path / "run", version=1)
    return tmp_path / "run"


def save(run, version):
    fw.save({"w": np.full(4, float(version))}, run, version=version)


def subsets(ranks):
    """Return all subsets but the empty one."""
    return chain.from_iterable(combinations(ranks, size) for size in range(1, len(ranks) + 1))


@pytest.fixture
def newer(run, threads):
    """A function that loads version 2 with a fault, and how many exchanges that takes."""

    def made(num_ranks, *, broken=None, **fault):
        engine = Engine(num_ranks, run, threads)
        for path in run.glob("v0000000002"):
            path.rename(run.parent / "away")
        assert engine.update(Hub(num_ranks)) == [None] * num_ranks
        path = run.parent / "away"
        path.rename(run / "v0000000002") if path.exists() else save(run, 2)
        if broken is not None:
            engine.operations[broken[0]]._steps._engine.drop_cache = broken[1]
        hub = Hub(num_ranks, **fault)
        return engine, hub, engine.update(hub)

    return made


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_load_that_loses_answers_leaves_one_version_and_is_healed(newer, num_ranks):
    engine, hub, raised = newer(num_ranks)
    assert (raised, engine.check()) == ([None] * num_ranks, 2)
    assert hub.num_done == 4  # update, found, drained, loaded
    ends = set()
    for fault_at in range(hub.num_done):
        for deaf in subsets(range(num_ranks)):
            engine, _, raised = newer(num_ranks, fault_at=fault_at, deaf=deaf)
            assert all(raised[rank] is not None for rank in deaf), (fault_at, deaf)
            ends.add(engine.check(is_whole=len(deaf) == num_ranks))
            assert engine.update(Hub(num_ranks)) == [None] * num_ranks
            assert engine.check() == 2
    assert ends == {1, 2, None}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_without_weights_that_loses_answers_is_healed_with_the_others(
    run, threads, num_ranks
):
    """The others hold the version that it loads: they drain with it, and do not serve without it."""
    for fault_at in range(4):
        for deaf in subsets(range(num_ranks)):
            engine = Engine(num_ranks, run, threads)
            assert engine.update(Hub(num_ranks)) == [None] * num_ranks
            engine.operations[1].fail(LifecycleError("started again"))
            engine.operations[1]._weights.forget("started again")
            engine.update(Hub(num_ranks, fault_at=fault_at, deaf=deaf))
            states = [each.state for each in engine.operations]
            if fault_at in (2, 3):  # drained or loaded: a deaf rank knows nothing of the others
                assert [states[rank] for rank in deaf] == [State.FAILED] * len(deaf), fault_at
            assert engine.update(Hub(num_ranks)) == [None] * num_ranks
            assert engine.check() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_drain_for_a_snapshot_leaves_all_at_the_old_version(newer, rank):
    def refuse():
        raise RuntimeError("a request never ends")

    engine, _, raised = newer(2, broken=(rank, refuse))
    assert all("a request never ends" in str(each) for each in raised)
    assert engine.check() == 1
    del engine.operations[rank]._steps._engine.drop_cache
    assert engine.update(Hub(2)) == [None, None]
    assert engine.check() == 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_killed_in_a_load_leaves_the_others_one_version(newer, num_ranks):
    for fault_at in range(4):
        for dies in range(num_ranks):
            others = [rank for rank in range(num_ranks) if rank != dies]
            for deaf in [(), *subsets(others)]:
                engine, _, raised = newer(num_ranks, fault_at=fault_at, deaf=deaf, dies=dies)
                assert raised[dies] == "died"
                version = engine.check(dead={dies}, is_whole=len(deaf) in (0, len(others)))
                if deaf == ():
                    assert all(isinstance(raised[rank], FlyweightError) for rank in others)
                    assert version in ((1,) if fault_at == 1 else (None,)), fault_at
