"""What the ranks of one engine tell each other: all hear the same, or know that they did not."""

import pytest

from child_processes import LIMIT
from fakes import FakeRendezvousStore
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.ranks import agreement, group
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous
from moved_clock import Clock


@pytest.fixture
def ranks(threads):
    store = FakeRendezvousStore()
    made = [RankAgreement(Rendezvous(rank, 2, store, "pair")) for rank in range(2)]
    yield made
    for parting in [threads.submit(each.close) for each in made]:
        parting.result(LIMIT)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The time that ranks which have met go by."""
    clock = Clock()
    for module in (agreement, group):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


def answers(futures):
    """Return what each rank heard, or raised."""
    return [future.exception(LIMIT) or future.result() for future in list(futures)]


def test_all_ranks_hear_the_facts_of_all(ranks, threads, clock):
    deadline = clock.now + LIMIT
    heard = answers(
        threads.submit(r.agree, "pause", deadline, number=n) for n, r in enumerate(ranks)
    )
    assert [[each["number"] for each in said] for said in heard] == [[0, 1], [0, 1]]


def test_an_error_of_one_rank_is_raised_on_all(ranks, threads, clock):
    deadline, error = clock.now + LIMIT, TransferTimeout("a request never ends")
    own, other = answers(
        threads.submit(each.agree, "pause", deadline, failure)
        for each, failure in zip(ranks, (error, None), strict=True)
    )
    assert own is error
    assert isinstance(other, TransferTimeout)
    assert "rank 0: TransferTimeout: a request never ends" in str(other)


def test_ranks_that_are_at_different_things_name_both(ranks, threads, clock):
    deadline = clock.now + LIMIT
    heard = answers(
        threads.submit(each.exchange, what, deadline)
        for each, what in zip(ranks, ("pause", "clear"), strict=True)
    )
    assert [type(each) for each in heard] == [LifecycleError, LifecycleError]
    assert all("rank 0 'pause', rank 1 'clear'" in str(each) for each in heard)


def test_a_rank_waits_for_one_that_gives_way(ranks, threads, clock):
    deadline = clock.now + LIMIT
    pausing = threads.submit(ranks[0].agree, "pause", deadline)
    with pytest.raises(LifecycleError, match="different things"):
        ranks[1].exchange("follow", deadline)
    assert len(ranks[1].agree("pause", deadline)) == len(pausing.result(LIMIT)) == 2


def test_a_rank_that_reports_its_failure_just_after_the_deadline_is_heard(ranks, threads, clock):
    """Else rank 0 would take it for dead, and every rank would fail instead of going on."""
    first, second = ranks
    answers(threads.submit(each.agree, "update", clock.now + LIMIT) for each in ranks)
    deadline, nothing = clock.now + 1, TransferTimeout("no version came")
    early = threads.submit(first.agree, "update", deadline)
    clock.is_looked_at()  # by the first, which waits
    clock.now = deadline + 0.3
    clock.is_looked_at()
    heard = answers([threads.submit(second.agree, "update", deadline, nothing), early])
    assert [type(each) for each in heard] == [TransferTimeout, TransferTimeout]
    assert "rank 1: TransferTimeout: no version came" in str(heard[1])
