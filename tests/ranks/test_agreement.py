"""What the ranks of one engine tell each other: all hear the same, or know that they did not."""

import time

import pytest

from child_processes import LIMIT, until
from fakes import FakeRendezvousStore
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.ranks import agreement
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous


@pytest.fixture
def ranks():
    store = FakeRendezvousStore()
    made = [RankAgreement(Rendezvous(rank, 2, store, "pair")) for rank in range(2)]
    yield made
    for each in made:
        each.close()


def soon(seconds=LIMIT):
    return time.monotonic() + seconds


def answers(futures):
    """Return what each rank heard, or raised."""
    return [future.exception(LIMIT) or future.result() for future in list(futures)]


def test_all_ranks_hear_the_facts_of_all(ranks, threads):
    heard = answers(threads.submit(r.agree, "pause", soon(), number=n) for n, r in enumerate(ranks))
    assert [[each["number"] for each in said] for said in heard] == [[0, 1], [0, 1]]


def test_a_rank_waits_for_one_that_gives_way(ranks, threads):
    pausing = threads.submit(ranks[0].agree, "pause", soon())
    with pytest.raises(LifecycleError, match="different things"):
        ranks[1].exchange("follow", soon())
    assert len(ranks[1].agree("pause", soon())) == len(pausing.result(LIMIT)) == 2


def test_a_rank_that_reports_its_failure_just_after_the_deadline_is_heard(
    ranks, threads, monkeypatch
):
    """Else rank 0 would take it for dead, and every rank would fail instead of going on."""
    monkeypatch.setattr(agreement, "_LATE_SECONDS", LIMIT)
    answers(threads.submit(each.agree, "update", soon()) for each in ranks)
    deadline, nothing = soon(0), TransferTimeout("no version came")
    early = threads.submit(ranks[0].agree, "update", deadline)
    heard = answers([threads.submit(ranks[1].agree, "update", deadline, nothing), early])
    assert [type(each) for each in heard] == [TransferTimeout, TransferTimeout]
    assert "rank 1: TransferTimeout: no version came" in str(heard[1])


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_was_lost_between_two_agreements_can_come_back(threads, lost):
    """Also if another one has answered already when the coordinator hears of it."""
    store = FakeRendezvousStore()

    def started(rank):
        return RankAgreement(Rendezvous(rank, 3, store, "three"))

    ranks = [started(rank) for rank in range(3)]
    for _ in range(3):
        futures = [threads.submit(each.agree, "update", soon()) for each in ranks]
        assert [len(each) for each in answers(futures)] == [3, 3, 3]
        for connection in ranks[lost]._group._connections.values():
            connection.channel.close()  # as a process that dies does
        ranks[lost] = started(lost)
        early, *others = [each for rank, each in enumerate(ranks) if rank] + [ranks[0]]
        futures = [threads.submit(early.agree, "update", soon())]
        if early is not ranks[lost] and lost:
            until(lambda: ranks[0]._group._ready(1, 0))  # its answer has come to rank 0
        futures += [threads.submit(each.agree, "update", soon()) for each in others]
        assert [len(each) for each in answers(futures)] == [3, 3, 3]
    for each in ranks:
        each.close()
