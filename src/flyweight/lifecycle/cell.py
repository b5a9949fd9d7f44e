"""Status cells: a file by which a replica's ranks and whoever controls them tell each other.

One word has one writer. The request is the controller's, each slot is its rank's; every
record is written beside the one that holds and shown by a counter, so a writer that is
killed half-way leaves the last whole record. Who waits sleeps on a counter (futex). The
bell is rung by all and holds nothing: it only wakes whoever looks at all the slots.
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
from flyweight.lifecycle.cell_file import HEADER, CellFile, begun_life, is_living
from flyweight.lifecycle.states import Signal, State, Tag

MAX_RANKS = 4096
_BELL = 60
_REQUEST = 64
_RECORD_BYTES = 2048
_SLOT_BYTES = 8 + 2 * _RECORD_BYTES
_RECORD = struct.Struct("<III")  # the counter it goes with, how long, CRC-32
_MAX_WORDS_BYTES = 700
_TRIES = 1000
_LOOK_SECONDS = 0.1
"""How often who waits for a process looks whether it lives."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the controller asks of all ranks."""

    number: int
    signal: Signal
    version: int | None = None
    tags: tuple[Tag, ...] = ()
    may_drain: bool = True
    """Whether an engine that serves is paused for it; otherwise it refuses."""
    must_verify: bool = False
    """Whether an update from a source without checksums is refused."""
    should_abort: bool = False
    """Whether requests that run are ended rather than finished."""
    timeout_seconds: float = 60.0
    deadline: float = inf
    """When it is too late to begin, by the machine's monotonic clock, which is one for all."""
    should_resume: bool = False
    """Whether to serve afterwards; after a pause, to go on as before."""


class Slot(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a rank says of itself, and whether it is there to say it."""

    pid: int = 0
    """For people: in another PID namespace it is somebody else's, and so it is once it ended."""
    started: int = 0
    """When the rank was claimed, in nanoseconds: the number of its life, which the cell enters."""
    state: State = State.CLEARED
    absent: tuple[Tag, ...] = (Tag.WEIGHTS,)
    version: int | None = None
    """The version that is whole, on this rank and all others."""
    pinned: int | None = None
    """The version that was asked for by its number: newer ones are not followed."""
    is_paused_by_hand: bool = False
    """True if it was asked to pause, and not to resume since: a restart does not change that."""
    taken: int = 0
    """The number of the last request that it began to work on."""
    done: int = 0
    """The number of the last request that it answered."""
    error: str = ""
    """How the last request ended: the error's name, or nothing."""
    answer: str = ""
    """The error's words."""
    reason: str = ""
    """Why the engine is FAILED, or why it did not take the last version; in words."""
    is_listening: bool = True
    """False once its worker has ended, though its process may go on."""
    step: str = ""
    percent: float = 0.0
    num_running: int = 0
    nbytes: int = 0
    round_seconds: float = 0.0
    pause_seconds: float = 0.0
    num_rounds: int = 0
    went_back_from: int | None = None
    """The version before, if it was newer than this one: a trainer has started again."""
    num_went_back: int = 0
    """How often that happened to this process."""
    is_alive: bool = False
    """True while somebody is there to do what is asked. Never written: who reads looks it up."""


RecordT = TypeVar("RecordT", Request, Slot)


class _Words(Generic[RecordT]):
    """A counter and two records, of which it tells the one that holds."""

    def __init__(self, memory: mmap.mmap, address: int, offset: int, kind: type[RecordT]) -> None:
        self._memory, self._offset = memory, offset
        self._words = memoryview(memory)[offset : offset + 4].cast("I")
        self.address = address + offset
        self._kind: type[RecordT] = kind

    @property
    def count(self) -> int:
        return self._words[0]

    def read(self) -> tuple[RecordT | None, int]:
        """Return the record that holds, and the counter it goes with."""
        for _ in range(_TRIES):
            count = self.count
            data = self._half(count)
            # The counter stands in the record too: memory of other processors keeps no order.
            number, length, crc = _RECORD.unpack_from(data)
            body = data[_RECORD.size : _RECORD.size + length]
            is_whole = len(body) == length and crc == _crc(number, body)
            is_new = not any((number, length, crc))  # nothing was ever written
            if count == self.count == number and (is_whole or is_new):
                return self._decoded(body), count
        raise LifecycleError(
            f"a {self._kind.__name__.lower()} of the status cell is damaged; stop all who use the "
            f"cell and remove its file"
        )

    def _decoded(self, body: bytes) -> RecordT | None:
        if not body:
            return None
        try:
            return msgspec.msgpack.decode(body, type=self._kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise LifecycleError(
                f"the status cell holds no {self._kind.__name__.lower()}: {cause}"
            ) from cause

    def _half(self, count: int) -> bytes:
        start = self._offset + 8 + (count & 1) * _RECORD_BYTES
        return self._memory[start : start + _RECORD_BYTES]

    def write(self, record: RecordT) -> None:
        """Show another record. For this word's one writer, one thread at a time."""
        body = msgspec.msgpack.encode(record)
        count = (self.count + 1) & 0xFFFFFFFF
        data = _RECORD.pack(count, len(body), _crc(count, body)) + body
        assert len(data) <= _RECORD_BYTES
        start = self._offset + 8 + (count & 1) * _RECORD_BYTES
        self._memory[start : start + len(data)] = data
        self._words[0] = count
        futex.wake(self.address)

    def close(self) -> None:
        self._words.release()


def _crc(number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(number.to_bytes(4, "little")))


class Cell:
    """A replica's status cell, mapped. Made by whoever comes first; outlives all who use it."""

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
        del place  # it would keep the mapping from being closed
        self._bell_address = address + _BELL
        self._bell_words = memoryview(self._memory)[_BELL : _BELL + 4].cast("I")
        self._request = _Words(self._memory, address, _REQUEST, Request)
        first = _REQUEST + _SLOT_BYTES
        self._slots = [
            _Words(self._memory, address, first + rank * _SLOT_BYTES, Slot)
            for rank in range(num_ranks)
        ]
        self._is_open, self._is_over = True, False
        call_in_child(self._close_files)

    def check_current(self) -> None:
        """Raise unless the cell that is mapped is the one that the path leads to."""
        self._check_open()
        self._place.check_current(self._file)

    # Who writes what.

    def claim(self, rank: int | None) -> None:
        """Become the one writer of a rank's slot, or with None of the request.

        The claim ends with the process, however that does.
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
            self._lives[rank] = begun_life(file)
        self.check_current()

    def _claimant(self, rank: int | None) -> str:
        slot = None if rank is None else self.slot(rank)
        return f", process {slot.pid}" if slot is not None and slot.is_alive else ""

    # Reading and writing.

    def _check_open(self) -> None:
        if not self._is_open:
            raise LifecycleError(f"status cell {str(self.path)!r} was closed here")

    def request(self) -> Request | None:
        """Return what was asked last, or None if nothing was yet."""
        self._check_open()
        return self._request.read()[0]

    def last_request(self) -> Request | None:
        """Return what was asked last, or None if that cannot be read: who comes anew goes on."""
        try:
            return self.request()
        except LifecycleError:
            return None

    def ask(self, request: Request) -> None:
        """Ask something of all ranks. For the controller only."""
        self._check_open()
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as cause:
            raise SpecError(f"no request that ranks could read: {cause}") from cause
        with self._lock:
            self._request.write(request)
        self._ring()

    def slot(self, rank: int) -> Slot | None:
        """Return what a rank says of itself, or None if it never came."""
        self._check_open()
        slot = self._slots[rank].read()[0]
        if slot is None:
            return None
        is_alive = slot.is_listening and is_living(self._file, slot.started)
        return msgspec.structs.replace(slot, is_alive=is_alive)

    def slots(self) -> list[Slot | None]:
        return [self.slot(rank) for rank in range(self.num_ranks)]

    def tell(self, rank: int, slot: Slot) -> None:
        """Show a rank's slot. For that rank only."""
        self._check_open()
        with self._lock:
            life = self._lives.get(rank, slot.started)
            self._slots[rank].write(_entered(slot, life))
        self._ring()

    def _ring(self) -> None:
        # Any other number will do: it says that something changed, never what.
        self._bell_words[0] = secrets.randbits(32)
        futex.wake(self._bell_address)

    def next_request(self, after: int, timeout_seconds: float) -> Request | None:
        """Sleep until there is a request of a later number than `after`; None if none comes."""
        self._check_open()
        deadline = monotonic() + timeout_seconds
        while True:
            request, count = self._request.read()
            if request is not None and request.number > after:
                return request
            left = deadline - monotonic()
            if left <= 0 or self._is_over:
                return None
            futex.sleep_while(self._request.address, count, left)

    def wait(
        self,
        is_so: Callable[[Sequence[Slot | None]], bool],
        timeout_seconds: float,
        what: str = "an answer",
    ) -> list[Slot | None]:
        """Sleep until something is so of the slots, and return them; raise TransferTimeout.

        Looked at again at every ring, and ten times a second since the dead ring no bell.
        """
        deadline = monotonic() + timeout_seconds
        while True:
            bell = self._bell_words[0]
            slots = self.slots()
            if is_so(slots):
                return slots
            left = deadline - monotonic()
            if left <= 0 or self._is_over:
                raise TransferTimeout(f"{what} did not come within {timeout_seconds:g} s")
            futex.sleep_while(self._bell_address, bell, min(left, _LOOK_SECONDS))

    def wait_change(self, seen: int, timeout_seconds: float) -> int:
        """Sleep until the bell is another than `seen`, or for that long; return what it is."""
        if self._is_over or not self._is_open:
            return seen
        futex.sleep_while(self._bell_address, seen, timeout_seconds)
        return self._bell_words[0]

    def end_waits(self) -> None:
        """Have every wait of this object, in whichever thread, end at once."""
        self._is_over = True
        if self._is_open:
            futex.wake(self._request.address)
            futex.wake(self._bell_address)

    def close(self) -> None:
        """Let go of the cell; the file stays for the others. Safe to repeat."""
        if self._is_open:
            self._is_open = False
            self._request.close()
            for words in self._slots:
                words.close()
            self._bell_words.release()
            self._close_files()
            self._memory.close()

    def _close_files(self) -> None:
        """Close the files; claims of a forked child's parent stay the parent's, and its words."""
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


def _entered(slot: Slot, life: int) -> Slot:
    """Return the slot as it is written: of a life, with words that fit."""
    answer, reason = _cut(slot.answer), _cut(slot.reason)
    return msgspec.structs.replace(slot, started=life, answer=answer, reason=reason, is_alive=False)


def _cut(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= _MAX_WORDS_BYTES:
        return data.decode()
    return data[: _MAX_WORDS_BYTES - 3].decode(errors="ignore") + "…"
