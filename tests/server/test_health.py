"""The state of a replica in one line, and whether it counts as healthy or paused."""

import pytest

from flyweight.lifecycle.replica_status import RankStatus, ReplicaStatus
from flyweight.lifecycle.states import State
from flyweight.server.health import described, is_healthy, is_paused


def replica(*states):
    """Return the status of a replica whose ranks are in these states, the worst first."""
    ranks = tuple(
        RankStatus(
            rank=n, pid=1, life=1, is_alive=True, state=state, absent=("weights",), version=7, pinned=None,
            step="", percent=43.2, num_running=2, reason="", nbytes=0, round_seconds=0,
            pause_seconds=0, num_rounds=0,
        )
        for n, state in enumerate(states)
    )  # fmt: skip
    return ReplicaStatus(
        name="e", state=states[0], version=7, percent=43.2, reason="", ranks=ranks, operation=None
    )


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([State.UPDATING], "updating, 43 %"),
        ([State.VERIFYING], "verifying, 43 %"),
        ([State.PAUSING], "pausing, 2 requests running"),
        ([State.CLEARED], "cleared, without weights"),
        ([State.PAUSED], "paused at version 7"),
        ([State.PAUSED, State.PAUSED], "paused at version 7"),
        ([State.PAUSED, State.SERVING], "paused on 1 of 2 ranks"),
        ([State.PAUSING, State.PAUSED], "pausing on 1 of 2 ranks, 4 requests running"),
        ([State.UPDATING, State.UPDATING, State.PAUSED], "updating on 2 of 3 ranks, 43 %"),
    ],
)
def test_a_replica_is_healthy_in_every_step_of_a_round(states, text):
    """C26: a health check must not kill an engine that updates."""
    status = replica(*states)
    assert is_healthy(status)
    assert described(status) == text


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([State.PAUSED], True),
        ([State.UPDATING, State.PAUSED], True),
        ([State.PAUSED, State.SERVING], False),
        ([State.CLEARED, State.PAUSING], False),
        ([State.FAILED, State.PAUSED], False),
    ],
)
def test_a_replica_is_paused_only_if_every_rank_is(states, expected):
    """C32"""
    assert is_paused(replica(*states)) is expected
