"""Cell: the shared-memory file in which a controller and a replica's ranks exchange records.

Every record has one writer: the controller writes the request, each rank its RankRecord. A
record is stored twice, and a counter shows which copy is current: a writer that is killed
half-way leaves the last complete record. Readers sleep on a counter (futex). The change
counter carries no data: every writer changes it to wake processes that watch all records.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

import msgspec

from flyweight.errors import LifecycleError, SpecError, TransferTimeout
from flyweight.forks import call_in_child, fork_lock
from flyweight.lifecycle import futex
from flyweight.lifecycle.cell_file import HEADER, CellFile, begin_life, is_life_running
from flyweight.lifecycle.states import Signal, State, Tag

MAX_RANKS = 4096
_CHANGE_OFFSET = 60
_REQUEST = 64
_RECORD_BYTES = 2048
_SLOT_BYTES = 8 + 2 * _RECORD_BYTES
_RECORD = struct.Struct("<III")  # counter, length, CRC-32
_MAX_WORDS_BYTES = 700
_TRIES = 1000
_LOOK_SECONDS = 0.1
"""How often a reader checks whether the processes it waits for still run."""
_END_SECONDS = 1.0
"""A thread that was about to sleep when `end_waits` woke the others looks again after this long."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of the controller to all ranks."""

    number: int
    signal: Signal
    version: int | None = None
    tags: tuple[Tag, ...] = ()
    may_drain: bool = True
    """Whether running requests are drained; otherwise an engine that has some refuses."""
    verify: bool = False
    """Whether an update to a version without checksums is refused."""
    should_abort: bool = False
    """Whether running requests are aborted instead of finished."""
    timeout_seconds: float = 60.0
    deadline: float = inf
    """When it is too late to begin: a reading of CLOCK_MONOTONIC, shared by all processes."""
    should_resume: bool = False
    """Whether to serve afterwards; after a pause, whether to serve as before."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's worker tells everybody."""

    pid: int = 0
    """For people only: another PID namespace, or a later process, may use the same number."""
    is_alive: bool = False
    """True while the worker runs. Never stored: readers ask the kernel."""
    absent: tuple[Tag, ...] = (Tag.WEIGHTS,)
    version: int | None = None
    """The version that is complete on all ranks."""
    pinned: int | None = None
    """The version that was requested by number; the rank does not follow newer ones."""
    step: str = ""
    percent: float = 0.0
    num_running: int = 0
    reason: str = ""
    """Why the engine is FAILED, or why it did not load the last version."""
    nbytes: int = 0
    round_seconds: float = 0.0
    pause_seconds: float = 0.0
    num_rounds: int = 0
    went_back_from: int | None = None
    """The previous version, if it was newer than this one: the trainer has restarted."""
    num_went_back: int = 0
    """How often that happened in this process."""


class RankRecord(
    RankFacts, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The state of one rank, written by its worker."""

    started: int = 0
    """The life of the process (see cell_file): when it claimed the rank, in nanoseconds."""
    state: State = State.CLEARED
    is_paused_by_hand: bool = False
    """True between a pause and a resume by a user; survives a restart."""
    taken: int = 0
    """The number of the last request that it started."""
    done: int = 0
    """The number of the last request that it answered."""
    error: str = ""
    """The error type of the last answer, or ""."""
    answer: str = ""
    """The error text of the last answer."""
    is_listening: bool = True
    """False once its worker has ended, even if the process runs on."""


RecordT = TypeVar("RecordT", Request, RankRecord)
_KIND_NAMES = {Request: "request", RankRecord: "rank record"}


class _DoubleRecord(Generic[RecordT]):
    """A counter and two copies of a record; the counter selects the current copy."""

    def __init__(self, memory: mmap.mmap, address: int, offset: int, kind: type[RecordT]) -> None:
        self._memory, self._offset = memory, offset
        self._words = memoryview(memory)[offset : offset + 4].cast("I")
        self.address = address + offset
        self._kind: type[RecordT] = kind

    @property
    def count(self) -> int:
        return self._words[0]

    def read(self) -> tuple[RecordT | None, int]:
        """Return the current record, or None, and its counter."""
        for _ in range(_TRIES):
            count = self.count
            start = self._start(count)
            data = self._memory[start : start + _RECORD_BYTES]
            # The record repeats its counter: other CPUs may see the stores in another order.
            number, length, crc = _RECORD.unpack_from(data)
            body = data[_RECORD.size : _RECORD.size + length]
            is_whole = len(body) == length and crc == _crc(number, body)
            is_new = not any((number, length, crc))  # never written
            if count == self.count == number and (is_whole or is_new):
                return self._decoded(body), count
        raise LifecycleError(
            f"a {_KIND_NAMES[self._kind]} in the status cell is damaged; stop all processes that "
            f"use the cell and remove its file"
        )

    def _decoded(self, body: bytes) -> RecordT | None:
        if not body:
            return None
        try:
            return msgspec.msgpack.decode(body, type=self._kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise LifecycleError(
                f"the status cell has no readable {_KIND_NAMES[self._kind]}: {cause}"
            ) from cause

    def _start(self, count: int) -> int:
        return self._offset + 8 + (count & 1) * _RECORD_BYTES

    def write(self, record: RecordT) -> None:
        """Show another record. For this word's one writer, one thread at a time."""
        body = msgspec.msgpack.encode(record)
        count = (self.count + 1) & 0xFFFFFFFF
        data = _RECORD.pack(count, len(body), _crc(count, body)) + body
        assert len(data) <= _RECORD_BYTES
        start = self._start(count)
        self._memory[start : start + len(data)] = data
        self._words[0] = count
        futex.wake(self.address)

    def close(self) -> None:
        self._words.release()


def _crc(number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(number.to_bytes(4, "little")))


class Cell:
    """The status cell of a replica, mapped into memory. The file outlives its processes.

    Args:
        path: the file; created if it does not exist.
        num_ranks: the number of ranks of the replica.
    """

    def __init__(self, path: str | os.PathLike[str], num_ranks: int = 1) -> None:
        if type(num_ranks) is not int or not 1 <= num_ranks <= MAX_RANKS:
            raise SpecError(f"num_ranks is {num_ranks!r}, expected 1 to {MAX_RANKS}")
        futex.check_supported()
        self.path, self.num_ranks = Path(path).absolute(), num_ranks
        self._place = CellFile(self.path, num_ranks, _size(num_ranks))
        self._lock = threading.Lock()
        self._claims: list[int] = []
        self._lives: dict[int, int] = {}
        self._file = self._place.opened()
        try:
            self._memory = mmap.mmap(self._file, self._place.nbytes)
            self.epoch: int = HEADER.unpack_from(self._memory)[3]
        except BaseException:
            os.close(self._file)
            raise
        place = ctypes.c_char.from_buffer(self._memory)
        address = ctypes.addressof(place)
        del place  # a reference would prevent closing the mapping
        self._change_address = address + _CHANGE_OFFSET
        change = memoryview(self._memory)[_CHANGE_OFFSET : _CHANGE_OFFSET + 4]
        self._change_counter = change.cast("I")
        self._request = _DoubleRecord(self._memory, address, _REQUEST, Request)
        first = _REQUEST + _SLOT_BYTES
        self._records = [
            _DoubleRecord(self._memory, address, first + rank * _SLOT_BYTES, RankRecord)
            for rank in range(num_ranks)
        ]
        self._is_open, self._is_over = True, False
        call_in_child(self._close_files)

    def check_current(self) -> None:
        """Raise LifecycleError unless the path still leads to the mapped file."""
        self._check_open()
        self._place.check_current(self._file)

    # One writer for each record.

    def claim(self, rank: int | None) -> None:
        """Become the only writer of a rank's record, or with None of the request.

        The claim ends with the process, also if it is killed.
        """
        offset, who = (1 + rank, f"rank {rank}") if rank is not None else (0, "the controller")
        if rank is not None and not 0 <= rank < self.num_ranks:
            raise SpecError(f"rank is {rank}, the cell has ranks 0 to {self.num_ranks - 1}")
        with fork_lock:
            file = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)
            self._claims.append(file)
        if not self._place.claimed(file, offset):
            self._claims.remove(file)
            os.close(file)
            self.check_current()
            raise LifecycleError(
                f"status cell {str(self.path)!r} has {who} already"
                f"{self._claimant(rank)}; stop that one, or use another cell"
            )
        if rank is not None:
            self._lives[rank] = begin_life(file)
        self.check_current()

    def _claimant(self, rank: int | None) -> str:
        record = None if rank is None else self.record(rank)
        return f", process {record.pid}" if record is not None and record.is_alive else ""

    # Reading and writing.

    def _check_open(self) -> None:
        if not self._is_open:
            raise LifecycleError(f"status cell {str(self.path)!r} was closed here")

    def request(self) -> Request | None:
        """Return the last request, or None."""
        self._check_open()
        return self._request.read()[0]

    def last_request(self) -> Request | None:
        """Return the last request, or None if there is none or it cannot be read."""
        try:
            return self.request()
        except LifecycleError:
            return None

    def write_request(self, request: Request) -> None:
        """Write a request to all ranks. Only the controller calls this."""
        self._check_open()
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as cause:
            raise SpecError(f"ranks could not read this request: {cause}") from cause
        with self._lock:
            self._request.write(request)
        self._wake_readers()

    def record(self, rank: int) -> RankRecord | None:
        """Return the record of a rank, or None if it has never started."""
        self._check_open()
        record = self._records[rank].read()[0]
        if record is None:
            return None
        is_alive = record.is_listening and is_life_running(self._file, record.started)
        return msgspec.structs.replace(record, is_alive=is_alive)

    def records(self) -> list[RankRecord | None]:
        return [self.record(rank) for rank in range(self.num_ranks)]

    def write_record(self, rank: int, record: RankRecord) -> None:
        """Write a rank's record. Only that rank calls this."""
        self._check_open()
        with self._lock:
            life = self._lives.get(rank, record.started)
            self._records[rank].write(_to_write(record, life))
        self._wake_readers()

    def _wake_readers(self) -> None:
        # Any new value will do: readers only compare it.
        self._change_counter[0] = secrets.randbits(32)
        futex.wake(self._change_address)

    def next_request(self, after: int, timeout_seconds: float) -> Request | None:
        """Wait for a request with a number above `after`; return None if there is none in time."""
        self._check_open()
        deadline = monotonic() + timeout_seconds
        while True:
            request, count = self._request.read()
            if request is not None and request.number > after:
                return request
            left = deadline - monotonic()
            if left <= 0 or self._is_over:
                return None
            futex.sleep_while(self._request.address, count, min(left, _END_SECONDS))

    def wait(
        self,
        is_so: Callable[[Sequence[RankRecord | None]], bool],
        timeout_seconds: float,
        what: str = "an answer",
    ) -> list[RankRecord | None]:
        """Wait until `is_so(records)` and return the records; raise TransferTimeout.

        Checks at every change and ten times a second: a dead process never signals its futex.
        """
        deadline = monotonic() + timeout_seconds
        while True:
            bell = self._change_counter[0]
            records = self.records()
            if is_so(records):
                return records
            left = deadline - monotonic()
            if left <= 0 or self._is_over:
                raise TransferTimeout(f"{what} did not come within {timeout_seconds:g} s")
            futex.sleep_while(self._change_address, bell, min(left, _LOOK_SECONDS))

    def wait_change(self, seen: int, timeout_seconds: float) -> int:
        """Wait until the change counter differs from `seen`, or until the timeout; return it."""
        if self._is_over or not self._is_open:
            return seen
        futex.sleep_while(self._change_address, seen, timeout_seconds)
        return self._change_counter[0]

    def end_waits(self) -> None:
        """End every wait on this object at once, in all threads."""
        self._is_over = True
        if self._is_open:
            futex.wake(self._request.address)
            futex.wake(self._change_address)

    def close(self) -> None:
        """Close the mapping; the file stays. Safe to repeat."""
        if self._is_open:
            self._is_open = False
            self._request.close()
            for words in self._records:
                words.close()
            self._change_counter.release()
            self._close_files()
            self._memory.close()

    def _close_files(self) -> None:
        """Close the files in a forked child; the parent keeps its claims and records."""
        self._is_open = False
        for file in self._claims:
            os.close(file)
        self._claims = []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _size(num_ranks: int) -> int:
    return _REQUEST + (1 + num_ranks) * _SLOT_BYTES


def _to_write(record: RankRecord, life: int) -> RankRecord:
    """Return the record as it is stored: with its life, and texts that fit."""
    answer, reason = _shortened(record.answer), _shortened(record.reason)
    return msgspec.structs.replace(
        record, started=life, answer=answer, reason=reason, is_alive=False
    )


def _shortened(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= _MAX_WORDS_BYTES:
        return data.decode()
    return data[: _MAX_WORDS_BYTES - 3].decode(errors="ignore") + "…"
