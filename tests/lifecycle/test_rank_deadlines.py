"""Ranks that try until their deadline say how it went after it, and are still heard."""

import time

from fakes import FakeRendezvousStore
from flyweight.errors import TransferTimeout
from flyweight.lifecycle.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous

SECONDS = 1.0
LATE_SECONDS = 0.3


def test_who_says_just_after_the_deadline_that_it_failed_is_heard(threads):
    """Else the first would take it for dead, and every rank would fail instead of going on."""
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
