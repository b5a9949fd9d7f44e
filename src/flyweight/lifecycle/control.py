"""Control: sends requests to the ranks of a replica through its status cell, and reads its status.

A controller keeps no state of its own: after a kill and a restart it finds everything in the
cell, also a request that is still running.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, TypedDict

from msgspec.structs import replace

from flyweight.checks import check_seconds, check_version
from flyweight.errors import Busy, FlyweightError, PeerLost, TransferTimeout
from flyweight.events import announce
from flyweight.lifecycle.cell import Cell, RankRecord, Request
from flyweight.lifecycle.replica_status import (
    Operation,
    RankRecords,
    ReplicaStatus,
    replica_status,
    why_gone,
)
from flyweight.lifecycle.states import Signal, tags_named

if TYPE_CHECKING:
    from typing_extensions import Unpack

ANSWER_SECONDS = 0.5
"""An operation ends at most so long after its timeout; ranks use the time to answer."""
_GRACE_SECONDS, _GRACE_SHARE = 3.5, 0.1
"""The time that several ranks need after their deadline to agree on how the operation ended.

They wait 1.5 s for late statements, notice a silent rank up to a tenth of the timeout late, need
at most 1 s to tell each other, and pause a FAILED engine within 1 s. The deadline of the ranks is
earlier than the operation's by this time, but by no more than a quarter of the timeout.
"""
_CLOSE_SECONDS = 4.0


class RequestOptions(TypedDict, total=False):
    """The fields of a Request that `Control.start` takes as keywords."""

    version: int | None
    tags: Sequence[str]
    may_drain: bool
    verify: bool
    should_abort: bool
    should_resume: bool
    timeout_seconds: float


class Control:
    """The only controller of a replica.

    Args:
        path: the replica's status cell; created if it does not exist.
        num_ranks: the number of ranks of the replica.
        name: the replica's name in status and messages; default: the file's name.
    """

    def __init__(
        self, path: str | os.PathLike[str], num_ranks: int = 1, *, name: str | None = None
    ) -> None:
        self.name = Path(path).stem if name is None else name
        self.cell = Cell(path, num_ranks)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._running: Operation | None = None
        self._waiting: threading.Thread | None = None
        self._pid = os.getpid()
        try:
            self.cell.claim(None)
            self._adopt_running_request()
        except BaseException:
            self.cell.close()
            raise

    def _adopt_running_request(self) -> None:
        """Watch the request of an earlier controller if ranks are still working on it."""
        request = self.cell.last_request()
        records = self.cell.records()
        if request is not None and any(_owes_answer(record, request) for record in records):
            self._running = self._operation(request)
            left = max(min(request.deadline - monotonic(), request.timeout_seconds), 0.0)
            self._watch_in_thread(self._running, request, records, left + _grace(left))

    def status(self) -> ReplicaStatus:
        """Return the status of the replica. Never waits."""
        with self._lock:
            operation = self._running
        return replica_status(self.name, self.cell.records(), operation)

    def start(self, request: Request | Signal, **options: Unpack[RequestOptions]) -> Operation:
        """Send a request to all ranks and return at once; raise Busy while another one runs.

        The operation ends within `timeout_seconds` + ANSWER_SECONDS, whatever the ranks do.
        Several ranks get less time, since they must agree on how it ended.

        Args:
            request: the Request to send, whose number and deadline are set here. Or only its
                signal: PAUSE, RESUME, CLEAR, RESTORE or UPDATE; then `options` are its fields.
            version: the version for UPDATE or RESTORE; None for a newer one.
            tags: what to CLEAR or RESTORE ("weights", "kv_cache"); () for all.
            may_drain: whether running requests are drained; otherwise an engine with some refuses.
            verify: refuse an update to a version without checksums.
            should_abort: abort running requests at a PAUSE.
            should_resume: serve afterwards.
            timeout_seconds: for the whole operation.
        """
        if not isinstance(request, Request):
            request = Request(number=0, signal=request)
        request = replace(request, **options)
        timeout_seconds = request.timeout_seconds
        if request.version is not None:
            check_version(request.version)
        check_seconds("timeout_seconds", timeout_seconds)
        tags = tags_named(request.tags)
        with self._lock:
            self._check_idle()
            self.cell.check_current()
            records = self.cell.records()
            gone = [n for n, record in enumerate(records) if record is None or not record.is_alive]
            if gone:
                reason = replica_status(self.name, records).reason
                raise PeerLost(f"{reason}; start the engine's ranks")
            last = self.cell.last_request()
            reserve = min(_grace(timeout_seconds), timeout_seconds / 4) if len(records) > 1 else 0.0
            taken = [0 if record is None else record.taken for record in records]
            request = replace(
                request,
                number=1 + max(0 if last is None else last.number, *taken),
                tags=tags,
                timeout_seconds=timeout_seconds - reserve,
                deadline=monotonic() + timeout_seconds - reserve,
            )
            operation = self._operation(request)
            self.cell.write_request(request)
            self._running = operation
            self._watch_in_thread(operation, request, records, timeout_seconds)
        announce("operation.started", id=operation.id, name=self.name)
        return operation

    def check_idle(self) -> None:
        """Raise Busy if an operation runs, or if a rank still works on an earlier one."""
        with self._lock:
            self._check_idle()

    def _check_idle(self) -> None:
        if self._running is not None:
            raise Busy(
                f"operation {self._running.id} of replica {self.name!r} is running; wait until it "
                f"ends",
                operation=self._running.id,
            )
        last = self.cell.last_request()
        for rank, record in enumerate(self.cell.records()):
            if last is not None and _owes_answer(record, last):
                # A new request would overwrite the one that this rank still works on.
                raise Busy(
                    f"rank {rank} of replica {self.name!r} still works on operation {_id(last)}; "
                    f"wait until it ends, or restart that rank",
                    operation=_id(last),
                )

    def wait(self, operation: Operation, timeout_seconds: float) -> Operation:
        """Wait until an operation has ended or `timeout_seconds` have passed; return it."""
        with self._ended:
            self._ended.wait_for(lambda: operation.ending != "running", timeout_seconds)
        return operation

    def _operation(self, request: Request) -> Operation:
        return Operation(
            id=_id(request),
            replica=self.name,
            signal=request.signal,
            version=request.version,
            started=time(),
        )

    def _watch_in_thread(
        self, operation: Operation, request: Request, before: RankRecords, timeout_seconds: float
    ) -> None:
        thread = threading.Thread(
            target=self._watch,
            args=(operation, request, before, timeout_seconds),
            name="flyweight-operation",
            daemon=True,
        )
        self._waiting = thread
        thread.start()

    def _watch(
        self, operation: Operation, request: Request, before: RankRecords, timeout_seconds: float
    ) -> None:
        """Record how an operation ends: all ranks answered, a rank died, or a timeout."""
        began = monotonic()
        lives = [None if record is None else record.started for record in before]
        error, reason, version = "", "", None
        try:
            records = self._answered(request, lives, timeout_seconds)
            for rank, (record, life) in enumerate(zip(records, lives, strict=True)):
                if _is_gone(record, life):
                    reason = why_gone(record, life)
                    raise PeerLost(f"rank {rank} of replica {self.name!r} is gone: {reason}")
            answers = [record for record in records if record is not None]
            version = answers[0].version
            for rank, record in enumerate(answers):
                if record.error and not error:
                    error, reason = record.error, f"rank {rank}: {record.answer}"
        except FlyweightError as failure:
            error, reason = type(failure).__name__, str(failure)
        with self._ended:
            operation.error, operation.reason = error, reason
            operation.version = operation.version if version is None else version
            operation.seconds = monotonic() - began
            operation.ending = "failed" if error else "done"
            self._running = None
            self._ended.notify_all()
        announce(
            "operation.ended", id=operation.id, name=self.name, ending=operation.ending,
            seconds=operation.seconds, reason=reason, version=operation.version,
        )  # fmt: skip

    def _answered(
        self, request: Request, lives: Sequence[int | None], timeout_seconds: float
    ) -> list[RankRecord | None]:
        """Return the records once all ranks have answered or one is gone; raise TransferTimeout."""

        def is_over(records: RankRecords) -> bool:
            return any(_is_gone(*each) for each in zip(records, lives, strict=True)) or all(
                record is not None and record.done == request.number for record in records
            )

        try:
            return self.cell.wait(is_over, timeout_seconds + ANSWER_SECONDS)
        except TransferTimeout as cause:
            records = self.cell.records()
            if is_over(records):
                return records
            silent = [
                f"rank {rank} (process {record.pid})"
                for rank, record in enumerate(records)
                if record is not None and record.done != request.number
            ]
            raise TransferTimeout(
                f"{' and '.join(silent)} of replica {self.name!r} did not answer {_id(request)} "
                f"within {timeout_seconds:g} s; check whether it is stopped or still working"
            ) from cause

    def close(self) -> None:
        """Stop controlling the replica, which keeps running. Safe to repeat."""
        if self._pid != os.getpid():
            return  # the controller belongs to the parent process
        thread = self._waiting
        if thread is not None:
            self.cell.end_waits()
            thread.join(_CLOSE_SECONDS)
        self.cell.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _grace(seconds: float) -> float:
    return _GRACE_SECONDS + _GRACE_SHARE * seconds


def _id(request: Request) -> str:
    return f"{request.signal.lower()}-{request.number}"


def _owes_answer(record: RankRecord | None, request: Request) -> bool:
    """True if a live rank has not answered; a rank that started later does not have to."""
    return record is not None and record.done != request.number and record.is_alive


def _is_gone(record: RankRecord | None, life: int | None) -> bool:
    """True if the process that had to answer has ended, or another has taken its place."""
    return record is None or record.started != life or not record.is_alive
