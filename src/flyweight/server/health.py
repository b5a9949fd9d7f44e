"""Health: the state of a replica in one line, for people and for health checks."""

from __future__ import annotations

from flyweight.lifecycle.replica_status import ABSENT, ReplicaStatus
from flyweight.lifecycle.states import State

_PAUSED = (State.PAUSED, State.CLEARING, State.CLEARED, State.UPDATING, State.VERIFYING)


def is_healthy(status: ReplicaStatus) -> bool:
    """True unless the replica failed or is absent: paused and updating engines are healthy."""
    return status.state not in (State.FAILED, ABSENT)


def is_paused(status: ReplicaStatus) -> bool:
    """True if no inference request runs on any rank, and none can start."""
    return bool(status.ranks) and all(rank.state in _PAUSED for rank in status.ranks)


def described(status: ReplicaStatus) -> str:
    """Return the state of a replica as one line, such as `updating, 43 %`."""
    if not is_healthy(status):
        return f"{status.state.lower()}: {status.reason}"
    version = "no version" if status.version is None else f"version {status.version}"
    older = [each.went_back_from for each in status.ranks if each.went_back_from is not None]
    version += f", back from {older[0]}" if older else ""
    absent = sorted({tag for rank in status.ranks for tag in rank.absent})
    running = sum(rank.num_running for rank in status.ranks)
    count = sum(rank.state == status.state for rank in status.ranks)
    where = "" if count == len(status.ranks) else f" on {count} of {len(status.ranks)} ranks"
    texts: dict[str, str] = {
        State.SERVING: f"serving {version}",
        State.PAUSING: f"pausing{where}, {running} requests running",
        State.PAUSED: f"paused{where or f' at {version}'}",
        State.CLEARING: f"clearing{where}",
        State.CLEARED: f"cleared{where}, without {' and '.join(absent)}",
        State.UPDATING: f"updating{where}, {status.percent:.0f} %",
        State.VERIFYING: f"verifying{where}, {status.percent:.0f} %",
    }
    return texts[status.state]
