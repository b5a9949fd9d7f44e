"""CUDA IPC: processes of one host show each other a device's memory, without a copy.

What cudaMalloc gave, the driver shows by a handle of 64 bytes, a whole allocation at a
time. What is mapped piece by piece (torch's expandable segments) is shown by files, which
go through a door. With a door there is also a register of what is offered, so that
readers see a release and a death at once; without, they see them when the driver does.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from flyweight.cuda import driver
from flyweight.digest import Words
from flyweight.errors import HandleGone, TransportError
from flyweight.memory import Buffer, bytes_of, without_fork
from flyweight.transports.fd_passing import FdConnection, FdServer

FETCH_SECONDS = 5.0
_MAX_NUMBER = 2**63 - 1
_MAX_OFFERS = 1 << 20
_REGISTER_BYTES = 8 * (_MAX_OFFERS + 1)  # mostly never touched, and so not there
_MAX_TEXT = 64


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that stands for mapped memory: its key at the door, and how much it is."""

    key: str
    nbytes: int


class CudaIpcHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="cuda_ipc", forbid_unknown_fields=True
):
    """Names bytes of an allocation. It arrives from another process, so it checks itself."""

    session: str
    """Which transport offers it: numbers and keys of another one mean nothing."""
    pid: int
    slot: int
    number: int
    """The register holds this number at this slot as long as the offer stands."""
    register: str
    """The register's key at the door, or nothing."""
    device: str
    allocation: int
    """Unique in its process, also among allocations that had the same address."""
    offset: int
    nbytes: int
    allocation_bytes: int
    ipc: bytes = b""
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.pid, self.slot, self.number, self.offset, self.nbytes)
        if not all(0 <= each <= _MAX_NUMBER for each in numbers) or self.slot > _MAX_OFFERS:
            raise TransportError(f"handle with numbers {numbers}")
        if not re.fullmatch("[0-9a-f]{16}", self.session):
            raise TransportError(f"handle of session {self.session[:_MAX_TEXT]!r}, not 16 digits")
        if max(map(len, (self.register, self.device))) > _MAX_TEXT:
            raise TransportError(f"handle with a name longer than {_MAX_TEXT} characters")
        if not self.offset + self.nbytes <= self.allocation_bytes <= _MAX_NUMBER:
            raise TransportError(
                f"handle speaks of bytes {self.offset}..{self.offset + self.nbytes}, "
                f"its allocation has {self.allocation_bytes}"
            )
        if self.nbytes and (len(self.ipc) == driver.IPC_BYTES) == bool(self.pieces):
            raise TransportError(
                f"handle with {len(self.ipc)} bytes for the driver and {len(self.pieces)} pieces; "
                f"it has {driver.IPC_BYTES} bytes or some pieces"
            )
        total = sum(piece.nbytes for piece in self.pieces)
        if self.pieces and (
            total != self.allocation_bytes or min(p.nbytes for p in self.pieces) <= 0
        ):
            raise TransportError(
                f"handle with pieces of {total} bytes, its allocation has {self.allocation_bytes}"
            )

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for handles that lie in one mapping."""
        return self.session, self.allocation, self.ipc, self.pieces


@dataclass(eq=False)
class _Shown:
    """A piece of ours that lies at the door, and how many offers need it."""

    piece: Piece
    num_offers: int = 0


@dataclass(eq=False)
class _Offer:
    buffer: Buffer
    shown: list[int]


@dataclass(eq=False)
class _Mapping:
    """Memory of another process, mapped here, and the handles that were opened in it."""

    device: int
    start: int
    pieces: tuple[Piece, ...]
    users: set[CudaIpcHandle] = field(default_factory=set)

    def close(self) -> None:
        if self.pieces:
            driver.unmap(self.device, self.start, [piece.nbytes for piece in self.pieces])
        else:
            driver.close_ipc(self.device, self.start)


class CudaIpcTransport:
    """Offers memory of devices; a process that only reads needs no door, one that offers no line.

    Mapped memory, as torch's expandable segments are, needs both.
    """

    def __init__(
        self, *, fd_server: FdServer | None = None, fd_connection: FdConnection | None = None
    ) -> None:
        self._fd_server, self._fd_connection = fd_server, fd_connection
        self._session = secrets.token_hex(8)
        self._offers: dict[int, _Offer] = {}
        self._free_slots: list[int] = []
        self._num_slots = self._number = 0
        self._shown: dict[int, _Shown] = {}
        self._register: Words | None = None
        self._register_key = ""
        self._mappings: dict[tuple[object, ...], _Mapping] = {}
        self._opened: dict[CudaIpcHandle, Buffer] = {}
        self._registers: dict[str, Words] = {}
        self._lock = threading.RLock()
        _transports[self._session] = self

    # The side that offers.

    def offer(self, buffer: Buffer) -> CudaIpcHandle:
        if buffer.device is None:
            raise TransportError(
                f"buffer of {buffer.nbytes} bytes is the host's memory; CUDA IPC shows a device's"
            )
        device = buffer.device
        with self._lock:
            if not buffer.nbytes:
                return self._offered(buffer, [], 0, 0, 0)
            found = []
            for each in _allocations(buffer):
                if why := self._refusal(each):
                    raise TransportError(why)
                found.append(each)
            first, low = found[0], buffer.span[0]
            if first.can_ipc:
                ipc = driver.ipc_handle(device, first.start)
                return self._offered(
                    buffer, [], first.number, low - first.start, first.nbytes, ipc=ipc
                )
            shown: list[int] = []
            try:
                pieces = tuple(self._show(device, each, shown) for each in found)
                total = sum(piece.nbytes for piece in pieces)
                return self._offered(
                    buffer, shown, first.number, low - first.start, total, pieces=pieces
                )
            except TransportError:
                self._hide(shown)
                raise

    def refusal(self, buffer: Buffer) -> str:
        """Return why other processes cannot map a buffer, with the remedy; "" if they can."""
        try:
            return next(filter(None, map(self._refusal, _allocations(buffer))), "")
        except TransportError as error:  # the driver does not say what memory that is
            return str(error)

    def _refusal(self, found: driver.Allocation) -> str:
        text = f"{found.nbytes} bytes at {found.start:#x} cannot be shown to other processes: "
        if found.can_ipc:
            return ""
        if found.is_managed:
            return f"{text}managed memory; allocate it with cudaMalloc"
        if found.is_pooled:
            return (
                f"{text}they are of a stream-ordered pool (cudaMallocAsync); "
                f"PYTORCH_CUDA_ALLOC_CONF=backend:native"
            )
        if not found.can_export:
            return (
                f"{text}they were mapped without a handle type of POSIX files; "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        if self._fd_server is None:
            return (
                f"{text}they are mapped (expandable segments), which takes a door, and there is "
                f"none; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        return ""

    def _offered(
        self,
        buffer: Buffer,
        shown: list[int],
        allocation: int,
        offset: int,
        allocation_bytes: int,
        *,
        ipc: bytes = b"",
        pieces: tuple[Piece, ...] = (),
    ) -> CudaIpcHandle:
        """Enter an offer into the register and return its handle."""
        assert buffer.device is not None
        if not self._free_slots and self._num_slots == _MAX_OFFERS:
            raise TransportError(f"{_MAX_OFFERS} offers stand already; release some")
        low, high = buffer.span if buffer.nbytes else (0, 0)
        self._number += 1
        self._open_register()
        handle = CudaIpcHandle(
            session=self._session,
            pid=os.getpid(),
            slot=self._free_slots.pop() if self._free_slots else self._num_slots + 1,
            number=self._number,
            register=self._register_key,
            device=driver.uuid(buffer.device),
            allocation=allocation,
            offset=offset,
            nbytes=high - low,
            allocation_bytes=allocation_bytes,
            ipc=ipc,
            pieces=pieces,
        )
        self._num_slots = max(self._num_slots, handle.slot)
        self._offers[handle.number] = _Offer(buffer, shown)
        if self._register is not None:
            self._register[handle.slot] = handle.number
        return handle

    def _open_register(self) -> None:
        """Put a register at the door: the session first, then numbers of offers that stand."""
        if self._fd_server is None or self._register is not None:
            return
        fd = -1
        try:
            fd = os.memfd_create("flyweight-offers", os.MFD_CLOEXEC)
            os.ftruncate(fd, _REGISTER_BYTES)
            data = bytes_of(mmap.mmap(fd, _REGISTER_BYTES))
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise TransportError(f"no register of offers: {cause.strerror}") from cause
        finally:
            if fd >= 0:
                os.close(fd)
        without_fork(data)
        self._register = data.view(np.uint64)
        self._register[0] = int(self._session, 16)
        self._register_key = self._fd_server.offer(readable)

    def _show(self, device: int, found: driver.Allocation, shown: list[int]) -> Piece:
        """Put a file for mapped memory at the door, unless it is there, and count its use."""
        assert self._fd_server is not None
        if found.number not in self._shown:
            try:
                fd = driver.export_fd(device, found.start)
            except TransportError as error:
                error.note(f"{len(self._shown)} files are at the door already; see ulimit -n")
                raise
            self._shown[found.number] = _Shown(Piece(self._fd_server.offer(fd), found.nbytes))
        self._shown[found.number].num_offers += 1
        shown.append(found.number)
        return self._shown[found.number].piece

    def _hide(self, shown: list[int]) -> None:
        assert self._fd_server is not None or not shown
        for number in shown:
            self._shown[number].num_offers -= 1
            if not self._shown[number].num_offers and self._fd_server is not None:
                self._fd_server.release(self._shown.pop(number).piece.key)

    def release(self, handle: CudaIpcHandle) -> None:
        with self._lock:
            if handle.session != self._session or handle.number not in self._offers:
                return
            if self._register is not None:
                self._register[handle.slot] = 0
            self._free_slots.append(handle.slot)
            self._hide(self._offers.pop(handle.number).shown)

    # The side that reads.

    def open(self, handle: CudaIpcHandle) -> Buffer:
        owner = _transports.get(handle.session)
        if owner is not None and handle.pid == os.getpid():
            return owner._own(handle)
        with self._lock:
            self._check_offered(handle)
            if handle not in self._opened:
                self._opened[handle] = self._opened_buffer(handle)
            return self._opened[handle]

    def _opened_buffer(self, handle: CudaIpcHandle) -> Buffer:
        device = driver.device_named(handle.device)
        if device is None:
            raise TransportError(
                f"handle is of device {handle.device!r}, which is none of the "
                f"{driver.num_devices()} that this process sees; see CUDA_VISIBLE_DEVICES"
            )
        if not handle.nbytes:
            return _read_only(0, 0, None, device)
        mapping = self._mappings.get(handle.place)
        if mapping is None:
            mapping = self._mappings[handle.place] = self._mapped(device, handle)
        mapping.users.add(handle)
        return _read_only(mapping.start + handle.offset, handle.nbytes, mapping, device)

    def _own(self, handle: CudaIpcHandle) -> Buffer:
        with self._lock:
            offer = self._offers.get(handle.number)
        if offer is None:
            raise HandleGone(f"offer {handle.number} of this process was released")
        low = offer.buffer.span[0]
        return _read_only(low, handle.nbytes, offer.buffer.owner, offer.buffer.device)

    def _check_offered(self, handle: CudaIpcHandle) -> None:
        """Raise HandleGone if the register, or its owner, is no longer there, or has no such offer.

        Without a register or a line nothing is known, and the driver will tell.
        """
        if self._fd_connection is None or not handle.register:
            return
        what = f"offer {handle.number} of process {handle.pid}"
        if _is_gone(self._fd_connection):
            raise HandleGone(f"{what} is gone with that process")
        register = self._registers.get(handle.session)
        if register is None:
            register = self._registers[handle.session] = self._read_register(handle.register)
        if register[0] != int(handle.session, 16):
            raise HandleGone(f"{what} is of session {handle.session!r}, which is not at this door")
        if register[handle.slot] != handle.number:
            raise HandleGone(f"{what} was released")

    def _read_register(self, key: str) -> Words:
        assert self._fd_connection is not None
        fd = self._fd_connection.fetch(key, timeout_seconds=FETCH_SECONDS)
        try:
            data = bytes_of(mmap.mmap(fd, _REGISTER_BYTES, prot=mmap.PROT_READ))
        except (OSError, ValueError) as cause:
            raise TransportError(f"cannot map register {key!r}: {cause}") from cause
        finally:
            os.close(fd)
        without_fork(data)
        return data.view(np.uint64)

    def _mapped(self, device: int, handle: CudaIpcHandle) -> _Mapping:
        try:
            if not handle.pieces:
                return _Mapping(device, driver.open_ipc(device, handle.ipc), ())
            return _Mapping(device, self._map_pieces(device, handle), handle.pieces)
        except TransportError as error:
            self._check_offered(handle)
            error.note(f"offer {handle.number} of process {handle.pid}, {handle.nbytes} bytes")
            raise

    def _map_pieces(self, device: int, handle: CudaIpcHandle) -> int:
        if self._fd_connection is None:
            raise TransportError(f"handle of {len(handle.pieces)} files, and no line to a door")
        files: list[tuple[int, int]] = []
        try:
            for piece in handle.pieces:
                fd = self._fd_connection.fetch(piece.key, timeout_seconds=FETCH_SECONDS)
                files.append((fd, piece.nbytes))
            return driver.map_fds(device, files)
        finally:
            for fd, _ in files:
                os.close(fd)

    def close_handle(self, handle: CudaIpcHandle) -> None:
        with self._lock:
            mapping = self._mappings.get(handle.place)
            if self._opened.pop(handle, None) is not None and mapping is not None:
                mapping.users.discard(handle)
                if not mapping.users:
                    del self._mappings[handle.place]
                    mapping.close()

    def close(self) -> None:
        with self._lock:
            for offer in self._offers.values():
                self._hide(offer.shown)
            self._offers.clear()
            if self._register is not None and self._fd_server is not None:
                self._register[1 : self._num_slots + 1] = 0
                self._fd_server.release(self._register_key)
            self._register, self._register_key = None, ""
            self._free_slots, self._num_slots = [], 0
            self._registers.clear()
            for mapping in self._mappings.values():
                with suppress(TransportError):  # a broken context cannot unmap, and needs not
                    mapping.close()
            self._mappings.clear()
            self._opened.clear()


def _allocations(buffer: Buffer) -> Iterator[driver.Allocation]:
    """Yield what a buffer lies in: several allocations where memory is mapped piece by piece."""
    if buffer.nbytes:
        assert buffer.device is not None
        at, high = buffer.span
        while at < high:
            found = driver.allocation_at(buffer.device, at)
            yield found
            if found.can_ipc:
                return  # it was allocated as one
            at = found.start + found.nbytes


def _is_gone(line: FdConnection) -> bool:
    """True once the other process has closed or died; an answer on its way is neither."""
    if line.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(line.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


_transports: WeakValueDictionary[str, CudaIpcTransport] = WeakValueDictionary()


def _read_only(address: int, nbytes: int, owner: object, device: int | None) -> Buffer:
    return replace(Buffer.flat_at(address, nbytes, owner, device=device), is_writable=False)
