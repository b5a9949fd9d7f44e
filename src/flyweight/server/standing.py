"""Standing: how a replica stands at this moment, as it is and in words."""

from __future__ import annotations

from flyweight.errors import FlyweightError
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.replica_status import ABSENT, ReplicaStatus
from flyweight.lifecycle.states import State

_STANDS_STILL = (
    State.PAUSED,
    State.CLEARING,
    State.CLEARED,
    State.UPDATING,
    State.VERIFYING,
)


def standing(control: Control) -> ReplicaStatus:
    """Return how a replica stands; a cell that tells nothing is a failed replica."""
    try:
        control.cell.check_current()
        return control.status()
    except FlyweightError as error:
        return ReplicaStatus(
            name=control.name,
            state=State.FAILED,
            version=None,
            percent=0.0,
            reason=str(error),
            ranks=(),
            operation=None,
        )


def is_well(status: ReplicaStatus) -> bool:
    """True if a replica serves, stands still because it was asked to, or is at work on it."""
    return status.state not in (State.FAILED, ABSENT)


def is_still(status: ReplicaStatus) -> bool:
    """True if no request runs on any rank and none can start."""
    return bool(status.ranks) and all(rank.state in _STANDS_STILL for rank in status.ranks)


def words(status: ReplicaStatus) -> str:
    """Return how a replica stands as one line for people, as `updating, 43 %`."""
    if not is_well(status):
        return f"{status.state.lower()}: {status.reason}"
    version = "no version" if status.version is None else f"version {status.version}"
    gone = [each.went_back_from for each in status.ranks if each.went_back_from is not None]
    version += f", back from {gone[0]}" if gone else ""
    absent = sorted({tag for rank in status.ranks for tag in rank.absent})
    running = sum(rank.num_running for rank in status.ranks)
    count = sum(rank.state == status.state for rank in status.ranks)
    where = "" if count == len(status.ranks) else f" on {count} of {len(status.ranks)} ranks"
    texts: dict[str, str] = {
        State.SERVING: f"serving {version}",
        State.PAUSING: f"pausing{where}, {running} requests run",
        State.PAUSED: f"paused{where or f' at {version}'}",
        State.CLEARING: f"clearing{where}",
        State.CLEARED: f"cleared{where}, without {' and '.join(absent)}",
        State.UPDATING: f"updating{where}, {status.percent:.0f} %",
        State.VERIFYING: f"verifying{where}, {status.percent:.0f} %",
    }
    return texts[status.state]
