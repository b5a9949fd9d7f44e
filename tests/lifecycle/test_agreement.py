"""What the ranks of one engine agree on: which publisher's version they hold, and who failed."""

import time
from contextlib import ExitStack

import flyweight as fw
from fakes import FakeRendezvousStore
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.lifecycle.agreement import RankAgreement
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.ranks.rendezvous import Rendezvous
from versioned_models import holds, weights

SECONDS, LATE_SECONDS = 1.0, 0.3


def published(stack, address, version, like):
    """Open a publisher that holds a version, whose bytes are those of another number."""
    stack.enter_context(fw.Publisher(weights(like), address, hold=True)).publish(version)


class Engine:
    """Two ranks of one engine, each with a publisher of its own or both with one."""

    def __init__(self, stack, addresses, threads):
        store, self._threads = FakeRendezvousStore(), threads
        self.models = [weights(0), weights(0)]
        self.engines = [ModelEngine(model) for model in self.models]
        self.ranks = [RankAgreement(Rendezvous(rank, 2, store, "engine")) for rank in range(2)]
        replicas = [
            stack.enter_context(fw.Replica(model, address))
            for model, address in zip(self.models, addresses, strict=True)
        ]
        self.machines = [
            Operations(*each) for each in zip(self.engines, replicas, self.ranks, strict=True)
        ]
        stack.callback(self._part)

    def _part(self):
        for future in [self._threads.submit(ranks.close) for ranks in self.ranks]:
            future.result(10)

    def update(self, version):
        """Have both ranks take a version; return what each raised."""
        futures = [
            self._threads.submit(operations.update, version, timeout_seconds=20)
            for operations in self.machines
        ]
        return [future.exception(30) for future in futures]

    def answers(self):
        """Return the ranks that answer a request."""
        found = []
        for rank, engine in enumerate(self.engines):
            try:
                with engine.request(0):
                    found.append(rank)
            except LifecycleError:
                pass
        return found


def test_ranks_with_one_version_of_one_publisher_serve(address, threads):
    with ExitStack() as stack:
        published(stack, address, 5, like=1)
        engine = Engine(stack, [address, address], threads)
        assert engine.update(5) == [None, None]
        assert engine.answers() == [0, 1]
        assert all(holds(model, 1) for model in engine.models)


def test_ranks_with_one_version_of_two_publishers_do_not_serve(tmp_path, threads):
    """Each rank verified what it took; only the publishers' sessions tell that it is no one model."""
    addresses = [f"unix:{tmp_path}/{name}" for name in "ab"]
    with ExitStack() as stack:
        for like, address in enumerate(addresses, 1):
            published(stack, address, 5, like=like)
        engine = Engine(stack, addresses, threads)
        raised = engine.update(5)
        assert all("hold version 5 of different sources" in str(each) for each in raised)
        assert [operations.state for operations in engine.machines] == [State.FAILED, State.FAILED]
        assert [operations.version for operations in engine.machines] == [None, None]
        assert engine.answers() == []


def test_a_rank_that_reports_its_failure_just_after_the_deadline_is_heard(threads):
    """Else rank 0 would take it for dead, and every rank would fail instead of going on."""
    store = FakeRendezvousStore()
    first, second = ranks = [RankAgreement(Rendezvous(rank, 2, store, "pair")) for rank in range(2)]

    def decide(waits_seconds):
        """Have both decide by one deadline, the second so much after it; return how late it was."""
        deadline = time.monotonic() + SECONDS
        early = threads.submit(first.prepared, None, deadline)
        time.sleep(max(deadline + waits_seconds - time.monotonic(), 0))
        late = time.monotonic() - deadline
        nothing = TransferTimeout("no version came")
        return late, [second.prepared(nothing, deadline), early.result(10)]

    try:
        for _ in range(5):  # again if this machine was so busy that it spoke later still
            decide(-SECONDS)  # so that they have met
            late, verdicts = decide(LATE_SECONDS)
            if late < LATE_SECONDS + 0.1:
                break
        for verdict in verdicts:
            assert not verdict.is_lost, verdict
            assert verdict.is_kept
            assert "rank 1: TransferTimeout: no version came" in verdict.text
    finally:
        for parting in [threads.submit(each.close) for each in ranks]:
            parting.result(10)
