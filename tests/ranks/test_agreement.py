"""What the ranks of one engine tell each other: all hear the same, or know that they did not."""

import time

import pytest

from fakes import FakeRendezvousStore
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous

SECONDS, LATE_SECONDS = 1.0, 0.3


@pytest.fixture
def ranks(threads):
    store = FakeRendezvousStore()
    made = [RankAgreement(Rendezvous(rank, 2, store, "pair")) for rank in range(2)]
    yield made
    for parting in [threads.submit(each.close) for each in made]:
        parting.result(10)


def answers(futures):
    """Return what each rank heard, or raised."""
    return [future.exception(30) or future.result() for future in list(futures)]


def test_all_ranks_hear_the_facts_of_all(ranks, threads):
    deadline = time.monotonic() + 20
    heard = answers(
        threads.submit(r.agree, "pause", deadline, number=n) for n, r in enumerate(ranks)
    )
    assert [[each["number"] for each in said] for said in heard] == [[0, 1], [0, 1]]


def test_an_error_of_one_rank_is_raised_on_all(ranks, threads):
    deadline, error = time.monotonic() + 20, TransferTimeout("a request never ends")
    own, other = answers(
        threads.submit(each.agree, "pause", deadline, failure)
        for each, failure in zip(ranks, (error, None), strict=True)
    )
    assert own is error
    assert isinstance(other, TransferTimeout)
    assert "rank 0: TransferTimeout: a request never ends" in str(other)


def test_ranks_that_are_at_different_things_name_both(ranks, threads):
    deadline = time.monotonic() + 20
    words = "different things: rank 0 'pause', rank 1 'clear'"
    heard = answers(
        threads.submit(each.exchange, what, deadline)
        for each, what in zip(ranks, ("pause", "clear"), strict=True)
    )
    assert all(isinstance(each, LifecycleError) and words in str(each) for each in heard)


def test_a_rank_waits_for_one_that_gives_way(ranks, threads):
    deadline = time.monotonic() + 20
    pausing = threads.submit(ranks[0].agree, "pause", deadline)
    with pytest.raises(LifecycleError, match="different things"):
        ranks[1].exchange("follow", deadline)
    assert len(ranks[1].agree("pause", deadline)) == len(pausing.result(20)) == 2


def test_a_rank_that_reports_its_failure_just_after_the_deadline_is_heard(ranks, threads):
    """Else rank 0 would take it for dead, and every rank would fail instead of going on."""
    first, second = ranks

    def decide(waits_seconds):
        """Have both decide by one deadline, the second so much after it; return how late it was."""
        deadline = time.monotonic() + SECONDS
        early = threads.submit(first.agree, "update", deadline)
        time.sleep(max(deadline + waits_seconds - time.monotonic(), 0))
        late = time.monotonic() - deadline
        nothing = TransferTimeout("no version came")
        return late, answers([threads.submit(second.agree, "update", deadline, nothing), early])

    for _ in range(5):  # again if this machine was so busy that it spoke later still
        decide(-SECONDS)  # so that they have met
        late, heard = decide(LATE_SECONDS)
        if late < LATE_SECONDS + 0.1:
            break
    assert [type(each) for each in heard] == [TransferTimeout, TransferTimeout]
    assert "rank 1: TransferTimeout: no version came" in str(heard[1])
