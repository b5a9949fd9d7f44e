"""The steps of an engine of several ranks: all of them take one, or none does."""

import threading
import time
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from fakes import FakeRendezvousStore
from faulty_engines import KV_CACHE, FaultyEngine
from flyweight.errors import Busy, LifecycleError, PeerLost, SpecError, TransferTimeout
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State, Tag
from flyweight.ranks import agreement
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous, join_group
from versioned_models import assign, holds, weights


class SlowWeights:
    """A replica whose copies wait while a test holds them."""

    def __init__(self, replica):
        self._replica = replica
        self.has_begun, self.may_copy = threading.Event(), threading.Event()
        self.may_copy.set()

    def __getattr__(self, name):
        return getattr(self._replica, name)

    def take(self, options):
        def hold(found):
            options.before(found)
            self.has_begun.set()
            assert self.may_copy.wait(LIMIT)

        return self._replica.take(replace(options, before=hold))


class Pair:
    """Two ranks of one replica, in threads."""

    def __init__(self, stack, address, threads, **options):
        self._threads, store = threads, FakeRendezvousStore()
        self.trainer = weights(0)
        self.publisher = stack.enter_context(fw.Publisher(self.trainer, address, **options))
        self.models = [weights(0), weights(0)]
        self.engines = [FaultyEngine(model) for model in self.models]
        self.ranks = [RankAgreement(Rendezvous(rank, 2, store, "pair")) for rank in range(2)]
        self.operations, self.replicas, self.weights = [], [], []
        for rank, model in enumerate(self.models):
            engine, ranks = self.engines[rank], self.ranks[rank]
            replica = fw.Replica(model, address, name="pair", rank=rank, world_size=2)
            self.replicas.append(stack.enter_context(replica))
            self.weights.append(SlowWeights(self.replicas[-1]))
            self.operations.append(Operations(engine, self.weights[-1], ranks))
        stack.callback(self.part)

    def part(self):
        """Have both ranks leave at once: each waits a while for the other to leave too."""
        for future in [self._threads.submit(ranks.close) for ranks in self.ranks]:
            future.result(LIMIT)

    def both(self, work):
        """Have both ranks do something at once; return what each raised, before a hang."""
        return [future.exception(LIMIT) for future in [self.one(work, rank) for rank in range(2)]]

    def one(self, work, rank):
        return self._threads.submit(work, self.operations[rank])

    @contextmanager
    def held(self, rank, step="drop_cache"):
        """Have a step of one rank's engine last to the end of the block; yields whether it began."""
        began, may_end = threading.Event(), threading.Event()

        def hold(*args):
            began.set()
            assert may_end.wait(LIMIT)

        setattr(self.engines[rank], step, hold)
        try:
            yield began
        finally:
            delattr(self.engines[rank], step)
            may_end.set()

    @contextmanager
    def request(self, rank):
        """A request that runs on one rank to the end of the block."""
        began, may_end = threading.Event(), threading.Event()

        def answer(_):
            with self.engines[rank].request(LIMIT):
                began.set()
                assert may_end.wait(LIMIT)

        future = self.one(answer, rank)
        assert began.wait(LIMIT)
        try:
            yield
        finally:
            may_end.set()
            future.result(LIMIT)

    def publish(self, version, **options):
        assign(self.trainer, version)
        self.publisher.publish(version, **options)

    def update(self, version):
        self.publish(version)
        return self.both(lambda operations: operations.update(version, timeout_seconds=3 * LIMIT))

    @property
    def states(self):
        return [operations.state for operations in self.operations]

    @property
    def versions(self):
        return [operations.version for operations in self.operations]


@pytest.fixture
def pair(address, threads):
    with ExitStack() as stack:
        found = Pair(stack, address, threads, keep="memory")
        assert found.update(1) == [None, None]
        assert found.states == [State.SERVING, State.SERVING]
        yield found


@pytest.fixture
def patient(monkeypatch):
    """Let ranks hear each other's last words after a deadline, however slow the machine is."""
    monkeypatch.setattr(agreement, "_LATE_SECONDS", LIMIT)


def test_ranks_take_a_version_together(pair):
    assert pair.update(2) == [None, None]
    assert pair.versions == [2, 2]
    assert all(holds(model, 2) for model in pair.models)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_prepare_keeps_all_at_the_old_version_at_once(pair, rank):
    """C24: the reason reaches every rank, and none was touched."""
    pair.engines[rank].faults = {"drop_cache": RuntimeError("on purpose")}
    raised = pair.update(2)
    assert all("drop_cache" in str(each) for each in raised)
    assert pair.states == [State.SERVING, State.SERVING]
    assert pair.versions == [1, 1]
    assert all(holds(model, 1) for model in pair.models)
    pair.engines[rank].faults = {}
    assert pair.update(3) == [None, None]
    assert pair.versions == [3, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_memory_does_not_come_back_does_not_leave_the_other_waiting(pair, rank):
    """C24: on every rank; peers do not wait for their deadline, which comes after a hang."""
    assert pair.both(lambda operations: operations.clear()) == [None, None]
    pair.engines[rank].faults = {"restore_weights": MemoryError("on purpose")}
    raised = pair.update(2)
    assert all("restore_weights" in str(each) for each in raised)
    assert State.SERVING not in pair.states
    pair.engines[rank].faults = {}
    assert pair.both(lambda operations: operations.restore()) == [None, None]
    assert pair.update(3) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]
    assert pair.versions == [3, 3]


def test_a_rank_that_refuses_to_resume_keeps_the_other_from_serving(pair):
    """C32: on all ranks or on none."""
    assert pair.both(lambda operations: operations.pause()) == [None, None]
    pair.operations[1].retire(LifecycleError("gone wrong"))
    raised = pair.both(lambda operations: operations.resume(timeout_seconds=LIMIT))
    assert all("FAILED" in str(each) for each in raised)
    assert pair.states == [State.PAUSED, State.FAILED]
    assert pair.update(2) == [None, None]
    assert pair.both(lambda operations: operations.resume(timeout_seconds=LIMIT)) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


def test_a_replica_that_does_not_know_the_other_ranks_is_refused(address):
    """It would take versions alone."""
    model = weights(0)
    ranks = RankAgreement(Rendezvous(0, 2, FakeRendezvousStore(), "pair"))
    with fw.Replica(model, address) as replica, pytest.raises(SpecError, match="world_size=2"):
        Operations(FaultyEngine(model), replica, ranks)


# One rank at something that the others are not at.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_pause_that_is_asked_of_one_rank_alone_does_not_end_the_first(pair, rank):
    """It is Busy by itself: what it said would be taken for a word on the one that runs."""
    with pair.held(rank, "pause") as is_held:
        first = [
            pair.one(lambda operations: operations.pause(timeout_seconds=LIMIT), n) for n in (0, 1)
        ]
        assert is_held.wait(LIMIT)
        second = pair.one(lambda operations: operations.pause(timeout_seconds=0.3), rank)
        assert isinstance(second.exception(LIMIT), Busy)
    assert [each.exception(LIMIT) for each in first] == [None, None]
    assert pair.states == [State.PAUSED, State.PAUSED]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", ["clear", "resume"])
def test_ranks_that_were_asked_for_different_things_stop_by_one_verdict(pair, patient, other, rank):
    """C32: when the time of the first is over; nothing has changed, on any."""
    one = pair.one(lambda operations: operations.pause(timeout_seconds=0.5), rank)
    two = pair.one(lambda operations: getattr(operations, other)(timeout_seconds=LIMIT), 1 - rank)
    raised = [one.exception(LIMIT), two.exception(LIMIT)]
    assert all("different things" in str(each) for each in raised)
    assert (pair.states, pair.versions) == ([State.SERVING] * 2, [1, 1])
    assert pair.both(lambda operations: operations.pause(timeout_seconds=LIMIT)) == [None, None]


def test_a_time_that_ran_out_is_no_fault_of_what_the_ranks_decide_next(threads, monkeypatch):
    """The time of rank 1 alone ran out, some time ago; rank 2 hears of it from rank 0."""
    store, groups = FakeRendezvousStore(), {}

    def joined(rendezvous, **options):
        return groups.setdefault(rendezvous.rank, join_group(rendezvous, **options))

    monkeypatch.setattr("flyweight.ranks.agreement.join_group", joined)
    ranks = [RankAgreement(Rendezvous(rank, 3, store, "three")) for rank in range(3)]

    def all_agree():
        futures = [threads.submit(each.agree, "pause", time.monotonic() + 20) for each in ranks]
        return [len(future.result(LIMIT)) for future in futures]

    assert all_agree() == [3, 3, 3]
    monkeypatch.undo()
    with pytest.raises(PeerLost):
        ranks[1].agree("resume", time.monotonic() + 0.1)
    until(lambda: groups[0].is_over)
    assert all_agree() == [3, 3, 3]
    for parting in [threads.submit(each.close) for each in ranks]:
        parting.result(LIMIT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hears_nobody_does_not_wait_for_the_others_to_leave(pair, rank):
    """They know nothing of it, and its controller does not wait for that."""
    with in_time(0.1), pytest.raises(PeerLost):
        pair.ranks[rank].agree("pause", time.monotonic() + 0.1)


def test_a_restore_that_one_rank_is_not_at_brings_nothing_back(pair):
    assert pair.both(lambda operations: operations.clear(KV_CACHE)) == [None, None]
    calls = len(pair.engines[0].calls)
    lone = pair.one(lambda operations: operations.restore(timeout_seconds=0.1), 0)
    assert "did not decide" in str(lone.exception(LIMIT))
    assert "restore_cache" not in pair.engines[0].calls[calls:]
    assert Tag.KV_CACHE in pair.operations[0].condition.absent


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cache_that_one_rank_lacks_keeps_the_other_from_serving(pair, rank):
    assert pair.both(lambda operations: operations.clear(KV_CACHE)) == [None, None]
    pair.engines[rank].faults = {"restore_cache": MemoryError("on purpose")}
    raised = pair.both(lambda operations: operations.restore(timeout_seconds=LIMIT))
    assert all("restore_cache" in str(each) for each in raised)
    assert State.SERVING not in pair.states
    pair.engines[rank].faults = {}
    assert pair.both(lambda operations: operations.restore(timeout_seconds=LIMIT)) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


def test_a_pause_that_should_resume_brings_ranks_that_stand_apart_together(pair):
    pair.engines[1].faults = {"resume": RuntimeError("on purpose")}
    assert isinstance(pair.update(2)[1], LifecycleError)
    assert pair.states == [State.SERVING, State.PAUSED]
    pair.engines[1].faults = {}
    aborted = pair.both(lambda operations: operations.pause(should_abort=True, should_resume=True))
    assert aborted == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


def test_a_pause_that_should_resume_stays_on_all_ranks_where_one_was_paused_by_hand(pair):
    pair.operations[1].is_paused_by_hand = True  # as a worker does that takes over
    paused = pair.both(lambda operations: operations.pause(should_abort=True, should_resume=True))
    assert paused == [None, None]
    assert pair.states == [State.PAUSED, State.PAUSED]
    assert all(operations.is_paused_by_hand for operations in pair.operations)
    assert pair.both(lambda operations: operations.resume()) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_one_rank_has_no_turn_for_ends_on_the_other_too(pair, rank, monkeypatch):
    """The pause that has the turn there drains for long; the other rank joins it afterwards."""
    monkeypatch.setattr("flyweight.lifecycle.operations.ROUND_SECONDS", 0.5)  # for its turn

    def follow(operations):
        return operations.follow(timeout_seconds=LIMIT, is_over=lambda: False)

    pair.publish(2)
    pair.both(lambda operations: operations.update(timeout_seconds=LIMIT))  # no pin
    with pair.request(rank):
        pauses = [pair.one(lambda operations: operations.pause(timeout_seconds=LIMIT), rank)]
        until(lambda: pair.states[rank] is State.PAUSING)
        pair.publish(3)
        raised = pair.both(follow)
        assert [type(each) for each in raised] == [Busy, Busy]
        assert all("pause is running" in str(each) for each in raised)
        assert pair.states[1 - rank] is State.SERVING
        pauses.append(
            pair.one(lambda operations: operations.pause(timeout_seconds=LIMIT), 1 - rank)
        )
    assert [each.exception(LIMIT) for each in pauses] == [None, None]
    assert (pair.states, pair.versions) == ([State.PAUSED] * 2, [2, 2])


def test_an_engine_that_must_stop_waits_for_what_one_rank_is_at_alone(pair):
    """Nothing may be left serving because something else ran."""
    with pair.held(1) as is_held:
        lone = pair.one(lambda operations: operations.clear(timeout_seconds=LIMIT), 1)
        assert is_held.wait(LIMIT)
        retired = pair.one(lambda operations: operations.retire(LifecycleError("gone wrong")), 1)
        other = pair.one(lambda operations: operations.clear(timeout_seconds=LIMIT), 0)
        assert not wait([retired], 0.3).done  # a slow machine retires later: not seen, never red
    assert [each.exception(LIMIT) for each in (lone, other, retired)] == [None] * 3
    assert pair.states == [State.CLEARED, State.FAILED]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pause_that_one_rank_has_no_time_for_leaves_all_serving(pair, patient, rank):
    """C32: the rank that drained at once hears why, and does not take the other for lost."""
    with pair.request(rank):
        raised = pair.both(lambda operations: operations.pause(timeout_seconds=0.6))
        assert isinstance(raised[rank], TransferTimeout)
        assert "still running" in str(raised[1 - rank])
        assert pair.states == [State.SERVING, State.SERVING]
    assert pair.both(lambda operations: operations.pause(timeout_seconds=LIMIT)) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_all_ranks_are_in_is_not_ended_by_what_they_refuse_meanwhile(pair, rank):
    """One rank has drained and waits for the other, which is not ready to copy."""
    slow = pair.weights[rank]
    slow.has_begun.clear()
    slow.may_copy.clear()
    pair.publish(2)
    updates = [
        pair.one(lambda operations: operations.update(2, timeout_seconds=LIMIT), n) for n in (0, 1)
    ]
    assert slow.has_begun.wait(LIMIT)
    until(lambda: pair.states[1 - rank] is State.UPDATING)
    assert holds(pair.models[1 - rank], 1)  # nothing is written before both have drained
    for seconds in (0.3, 0.1):
        raised = pair.both(lambda operations: operations.pause(timeout_seconds=seconds))  # noqa: B023
        assert [type(each) for each in raised] == [Busy, Busy]
    only = pair.one(lambda operations: operations.pause(timeout_seconds=0.1), rank)
    assert isinstance(only.exception(LIMIT), Busy)
    slow.may_copy.set()
    assert [update.exception(LIMIT) for update in updates] == [None, None]
    assert (pair.states, pair.versions) == ([State.SERVING] * 2, [2, 2])
