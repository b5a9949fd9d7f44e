"""ReplicaStatus: the status of a replica, combined from the records of its ranks.

Everything comes from the records in the status cell and from the kernel, which knows the
processes that run. A controller that is killed and restarted reports the same status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from flyweight.lifecycle.cell import RankFacts, RankRecord
from flyweight.lifecycle.states import State

ABSENT = "ABSENT"
"""The state of a replica none of whose ranks has started yet."""
_WORST_FIRST = (
    State.FAILED,
    State.CLEARED,
    State.CLEARING,
    State.UPDATING,
    State.VERIFYING,
    State.PAUSING,
    State.PAUSED,
    State.SERVING,
)
_IN_A_ROUND = (State.UPDATING, State.VERIFYING)

Ending = Literal["running", "done", "failed"]
RankRecords = Sequence[RankRecord | None]


class RankStatus(RankFacts, frozen=True, kw_only=True):
    """The status of one rank: what its worker tells, and whether its process runs."""

    rank: int
    life: int
    """A new number for each start of the rank, also if the pid repeats."""
    state: str


class Operation(msgspec.Struct, kw_only=True):
    """A request to a replica, and its result."""

    id: str
    replica: str
    signal: str
    version: int | None = None
    ending: Ending = "running"
    error: str = ""
    reason: str = ""
    started: float = 0.0
    """Start time in seconds since 1970."""
    seconds: float = 0.0


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a replica and its ranks."""

    name: str
    state: str
    version: int | None
    percent: float
    reason: str
    ranks: tuple[RankStatus, ...]
    operation: Operation | None
    """The operation that is running, or None."""

    @property
    def is_serving(self) -> bool:
        return self.state == State.SERVING


def replica_status(
    name: str, records: RankRecords, operation: Operation | None = None
) -> ReplicaStatus:
    """Combine the records of all ranks into the status of the replica."""
    ranks = tuple(_rank_status(rank, record) for rank, record in enumerate(records))
    state, reason = _state_and_reason(ranks)
    versions = {each.version for each in ranks}
    return ReplicaStatus(
        name=name,
        state=state,
        version=versions.pop() if len(versions) == 1 and state != State.FAILED else None,
        percent=min((each.percent for each in ranks if each.state in _IN_A_ROUND), default=0.0),
        reason=reason,
        ranks=ranks,
        operation=operation,
    )


def _rank_status(rank: int, record: RankRecord | None) -> RankStatus:
    known = RankRecord() if record is None else record
    facts = {name: getattr(known, name) for name in RankFacts.__struct_fields__}
    state: str = known.state
    if record is None:
        state = ABSENT
    elif not record.is_alive:
        state, reason = State.FAILED, why_gone(record, record.started)
        facts.update(version=None, went_back_from=None, reason=reason)
    return RankStatus(rank=rank, life=known.started, state=state, **facts)


def why_gone(record: RankRecord | None, life: int | None) -> str:
    """Return why a rank is gone; `life` is the life of the process that had to answer."""
    if record is None or life is None:
        return "it has never started"
    if record.started != life:
        return f"process {record.pid} has taken its place"
    if record.is_listening:
        return f"process {record.pid} died"
    reason = f": {record.reason}" if record.reason else ""
    return f"its worker in process {record.pid} was closed{reason}"


def _state_and_reason(ranks: Sequence[RankStatus]) -> tuple[str, str]:
    """Return the state of the replica, and the reason if it is not well."""
    if all(each.state == ABSENT for each in ranks):
        return ABSENT, f"none of its {len(ranks)} ranks has started yet"
    for each in ranks:
        if not each.is_alive:
            what = " has not started yet" if each.state == ABSENT else f": {each.reason}"
            return State.FAILED, f"rank {each.rank}{what}"
    state = next(state for state in _WORST_FIRST if any(each.state == state for each in ranks))
    versions = sorted({-1 if each.version is None else each.version for each in ranks})
    if state is State.SERVING and len(versions) > 1:
        return State.FAILED, f"its ranks hold versions {versions}"
    reasons = (f"rank {each.rank}: {each.reason}" for each in ranks if each.reason)
    return state, next(reasons, "")
