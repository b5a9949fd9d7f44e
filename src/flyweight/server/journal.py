"""The journal: the rounds, operations and faults of a fleet, found by comparing statuses.

It has no threads and no lock: the fleet feeds it one status at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import time
from typing import Any

import msgspec

from flyweight.lifecycle.replica_status import Operation, ReplicaStatus
from flyweight.lifecycle.states import State

MAX_ROUNDS, MAX_OPERATIONS, MAX_FAULTS = 100, 50, 50


class Round(msgspec.Struct, kw_only=True):
    """A round that a replica's ranks have finished."""

    replica: str
    version: int | None
    num_ranks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    gb_per_second: float = 0.0
    time: float | None
    """When its end was seen, in seconds since 1970; None if that was before this server."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An operation or a replica that failed."""

    time: float
    replica: str
    operation: str
    error: str
    reason: str


@dataclass
class _LastSeen:
    """The last status of one replica, to find what has changed since."""

    status: dict[str, Any] = field(default_factory=dict)
    operation: Operation | None = None
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Per rank: which start of its process, and how many rounds that has finished."""
    round: Round | None = None
    finished: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """Per rank that has finished `round`: bytes, seconds, seconds of pause."""


class Journal:
    """What has happened to the replicas of these names, in limited length."""

    def __init__(self, names: Iterable[str]) -> None:
        self._seen = {name: _LastSeen() for name in names}
        self._rounds: deque[Round] = deque(maxlen=MAX_ROUNDS)
        self._operations: deque[Operation] = deque(maxlen=MAX_OPERATIONS)
        self._faults: deque[Fault] = deque(maxlen=MAX_FAULTS)
        self.endings: Counter[tuple[str, str, str]] = Counter()
        """How many operations have ended, by replica, signal and ending."""

    def snapshot(self) -> dict[str, Any]:
        """Return the last statuses and the journal, newest last, as JSON types."""
        snapshot: dict[str, Any] = msgspec.to_builtins(
            {
                "replicas": [seen.status for seen in self._seen.values()],
                "rounds": list(self._rounds),
                "operations": list(self._operations),
                "faults": list(self._faults),
            }
        )
        return snapshot

    def record_status(self, status: ReplicaStatus) -> bool:
        """Record what a status shows to have happened; return whether it differs from the last."""
        seen, as_json = self._seen[status.name], msgspec.to_builtins(status)
        if as_json == seen.status:
            return False
        self._record_rounds(seen, status)
        if status.state == State.FAILED and status.reason != seen.status.get("reason"):
            self._record_fault(status.name, "", str(State.FAILED), status.reason)
        if seen.operation is not None:
            self.record_operation(seen.operation)
        seen.status, seen.operation = as_json, status.operation
        return True

    def record_operation(self, operation: Operation) -> bool:
        """Record an operation that was started and has ended, once; return whether it is new."""
        has_ended = operation.started and operation.ending != "running"
        if not has_ended or any(each is operation for each in self._operations):
            return False
        self._operations.append(operation)
        self.endings[operation.replica, operation.signal, operation.ending] += 1
        if operation.error:
            self._record_fault(operation.replica, operation.id, operation.error, operation.reason)
        return True

    def _record_fault(self, replica: str, operation: str, error: str, reason: str) -> None:
        last = next((each for each in reversed(self._faults) if each.replica == replica), None)
        # A step that fails is reported twice: by its operation, and by the state it leaves.
        if last is None or time() - last.time >= 1 or reason not in last.reason:
            self._faults.append(
                Fault(time=time(), replica=replica, operation=operation, error=error, reason=reason)
            )

    def _record_rounds(self, seen: _LastSeen, status: ReplicaStatus) -> None:
        """Record rounds that ranks have finished; ranks that finish one apart share an entry."""
        ended = time() if seen.status else None
        for each in status.ranks:
            if not each.is_alive:
                continue
            life, count = seen.counts.get(each.rank, (each.life, 0))
            has_grown = each.num_rounds > (count if life == each.life else 0)
            seen.counts[each.rank] = (each.life, each.num_rounds)
            if not has_grown and each.rank not in seen.finished:
                continue
            is_other = seen.round is None or seen.round.version != each.version
            if has_grown and (is_other or each.rank in seen.finished):
                seen.round = Round(replica=status.name, version=each.version, time=ended)
                self._rounds.append(seen.round)
                seen.finished = {}
            elif is_other:
                continue
            seen.finished[each.rank] = (each.nbytes, each.round_seconds, each.pause_seconds)
        if seen.round is not None and seen.finished:
            nbytes, seconds, pauses = zip(*seen.finished.values(), strict=True)
            seen.round.num_ranks = len(seen.finished)
            seen.round.nbytes = sum(nbytes)
            seen.round.seconds, seen.round.pause_seconds = max(seconds), max(pauses)
            seen.round.gb_per_second = sum(nbytes) / 1e9 / max(*seconds, 1e-9)
