"""CUDA IPC: processes of one host map each other's device memory, without a copy.

The driver exports memory of cudaMalloc as a handle of 64 bytes, a whole allocation at a
time. It exports mapped memory (torch's expandable segments) as files, which an `FdServer`
passes on. An FdServer also passes on a register of the standing offers, from which readers
see a release or a death at once; without it, they see them when the driver does.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from msgspec.structs import replace

from flyweight.cuda import driver
from flyweight.digest import Words
from flyweight.errors import HandleGone, TransportError
from flyweight.memory import Buffer
from flyweight.memory_table import Integers
from flyweight.spec.strict_json import MAX_NUMBER, Number
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.offer_register import MAX_OFFERS, OfferRegister, read_register

_Text = Annotated[str, msgspec.Meta(max_length=64)]


class ExportedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that stands for mapped memory: its key at the FdServer, and the memory's size."""

    key: str
    nbytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_NUMBER)]


class CudaIpcHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="cuda_ipc", forbid_unknown_fields=True
):
    """Names bytes of an allocation. It arrives from another process, so it checks itself."""

    session: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    """The transport that offers it: numbers and keys of another one mean nothing."""
    pid: Number
    slot: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFERS)]
    number: Number
    """The register has this number in this slot until the offer is released."""
    register: _Text
    """The register's key at the FdServer, or ""."""
    device: _Text
    allocation: int
    """Unique in its process, also among allocations at the same address at different times."""
    offset: Number
    nbytes: Number
    allocation_bytes: Number
    ipc: bytes = b""
    pieces: tuple[ExportedFile, ...] = ()

    def __post_init__(self) -> None:
        end, total = self.offset + self.nbytes, sum(piece.nbytes for piece in self.pieces)
        if end > self.allocation_bytes or (self.pieces and total != self.allocation_bytes):
            raise TransportError(
                f"handle speaks of bytes {self.offset}..{end} and pieces of {total} bytes, "
                f"its allocation has {self.allocation_bytes}"
            )
        if self.nbytes and (len(self.ipc) == driver.IPC_BYTES) == bool(self.pieces):
            raise TransportError(
                f"handle with {len(self.ipc)} bytes for the driver and {len(self.pieces)} pieces; "
                f"it has {driver.IPC_BYTES} bytes or some pieces"
            )

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for handles of the same mapping."""
        return self.session, self.allocation, self.ipc, self.pieces


@dataclass(eq=False)
class _Mapping:
    """Memory of another process that is mapped here, and the open handles in it."""

    device: int
    start: int
    pieces: tuple[ExportedFile, ...]
    users: set[CudaIpcHandle] = field(default_factory=set)

    def close(self) -> None:
        if self.pieces:
            driver.unmap(self.device, self.start, [piece.nbytes for piece in self.pieces])
        else:
            driver.close_ipc(self.device, self.start)


class CudaIpcTransport:
    """Offers device memory, and opens that of other processes.

    Mapped memory, such as torch's expandable segments, needs an FdServer on the offering side
    and an FdConnection on the opening side.
    """

    def __init__(
        self, *, fd_server: FdServer | None = None, fd_connection: FdConnection | None = None
    ) -> None:
        self._fd_server, self._fd_connection = fd_server, fd_connection
        self._session = secrets.token_hex(8)
        self._offers: dict[int, tuple[Buffer, list[int]]] = {}
        """Each offered buffer, and the allocations that are exported as files for it."""
        self._number = 0
        self._exports: dict[int, ExportedFile] = {}
        self._num_uses: Counter[int] = Counter()
        """How many offers need each exported file."""
        self._register = OfferRegister(self._session, fd_server)
        self._mappings: dict[tuple[object, ...], _Mapping] = {}
        self._registers: dict[str, Words] = {}
        self._lock = threading.RLock()
        _transports[self._session] = self

    # The side that offers.

    def offer(self, buffer: Buffer) -> CudaIpcHandle:
        if buffer.device is None:
            raise TransportError(
                f"buffer of {buffer.nbytes} bytes is the host's memory; CUDA IPC shows a device's"
            )
        with self._lock:
            found: list[driver.Allocation] = []
            exports: list[int] = []
            for each in _allocations(buffer):
                if why := self._refusal(each):
                    raise TransportError(why)
                found.append(each)
            try:
                handle = self._handle(buffer, buffer.device, found, exports)
            except TransportError:
                self._unexport(exports)
                raise
            self._offers[handle.number] = buffer, exports
            return handle

    def refusal(self, buffer: Buffer) -> str:
        """Return why other processes cannot map a buffer, with the remedy; "" if they can."""
        try:
            return next(filter(None, map(self._refusal, _allocations(buffer))), "")
        except TransportError as error:  # the driver does not know this memory
            return str(error)

    def _refusal(self, found: driver.Allocation) -> str:
        setting = "PYTORCH_CUDA_ALLOC_CONF"
        if found.can_ipc:
            return ""
        if found.is_managed:
            why = "managed memory; allocate it with cudaMalloc"
        elif found.is_pooled:
            why = f"a stream-ordered pool (cudaMallocAsync) has them; {setting}=backend:native"
        elif not found.can_export:
            why = f"mapped without a file to export; {setting}=expandable_segments:False"
        elif self._fd_server is None:
            why = (
                f"mapped (expandable segments), which takes an FdServer, and there is none; "
                f"{setting}=expandable_segments:False"
            )
        else:
            return ""
        return f"{found.nbytes} bytes at {found.start:#x} cannot be shown to other processes: {why}"

    def _handle(
        self,
        buffer: Buffer,
        device: int,
        found: Sequence[driver.Allocation],
        exports: list[int],
    ) -> CudaIpcHandle:
        """Export the allocations of a buffer, and enter the offer into the register.

        exports: takes the allocations for which files are used.
        """
        ipc = b""
        files: tuple[ExportedFile, ...] = ()
        if found and found[0].can_ipc:
            ipc = driver.ipc_handle(device, found[0].start)
        else:
            files = tuple(self._export(device, each, exports) for each in found)
        low, high = buffer.span if buffer.nbytes else (0, 0)
        self._number += 1
        slot = self._register.enter(self._number)
        return CudaIpcHandle(
            session=self._session,
            pid=os.getpid(),
            slot=slot,
            number=self._number,
            register=self._register.key,
            device=driver.uuid(device),
            allocation=found[0].number if found else 0,
            offset=low - found[0].start if found else 0,
            nbytes=high - low,
            allocation_bytes=sum(each.nbytes for each in found),
            ipc=ipc,
            pieces=files,
        )

    def _export(self, device: int, found: driver.Allocation, exports: list[int]) -> ExportedFile:
        """Offer a file for mapped memory, unless it is offered already, and count its use."""
        assert self._fd_server is not None
        if found.number not in self._exports:
            try:
                fd = driver.export_fd(device, found.start)
            except TransportError as error:
                error.note(f"{len(self._exports)} files are exported already; see ulimit -n")
                raise
            self._exports[found.number] = ExportedFile(self._fd_server.offer(fd), found.nbytes)
        self._num_uses[found.number] += 1
        exports.append(found.number)
        return self._exports[found.number]

    def _unexport(self, exports: Sequence[int]) -> None:
        for number in exports:
            assert self._fd_server is not None
            self._num_uses[number] -= 1
            if not self._num_uses[number]:
                del self._num_uses[number]
                self._fd_server.release(self._exports.pop(number).key)

    def release(self, handle: CudaIpcHandle) -> None:
        with self._lock:
            if handle.session != self._session or handle.number not in self._offers:
                return
            self._register.remove(handle.slot)
            self._unexport(self._offers.pop(handle.number)[1])

    # The side that reads.

    def open(self, handle: CudaIpcHandle) -> Buffer:
        owner = _transports.get(handle.session)
        if owner is not None and handle.pid == os.getpid():
            return owner._own(handle)
        with self._lock:
            self._check_offered(handle)
            device = driver.device_named(handle.device)
            if device is None:
                raise TransportError(
                    f"handle is of device {handle.device!r}, which is none of the "
                    f"{driver.num_devices()} that this process sees; see CUDA_VISIBLE_DEVICES"
                )
            if not handle.nbytes:
                return _read_only(0, 0, None, device)
            if handle.place not in self._mappings:
                self._mappings[handle.place] = self._mapped(device, handle)
            mapping = self._mappings[handle.place]
            mapping.users.add(handle)
            return _read_only(mapping.start + handle.offset, handle.nbytes, mapping, device)

    def _own(self, handle: CudaIpcHandle) -> Buffer:
        with self._lock:
            buffer, _ = self._offers.get(handle.number, (None, ()))
        if buffer is None:
            raise HandleGone(f"offer {handle.number} of this process was released")
        return _read_only(buffer.span[0], handle.nbytes, buffer.owner, buffer.device)

    def _check_offered(self, handle: CudaIpcHandle) -> None:
        """Raise HandleGone if the offering process is gone, or its register lacks the offer.

        Without a register or a connection to it, only the driver can tell.
        """
        if self._fd_connection is None or not handle.register:
            return
        what = f"offer {handle.number} of process {handle.pid}"
        if not self._fd_connection.is_open:
            raise HandleGone(f"{what} is gone with that process")
        if handle.session not in self._registers:
            register = read_register(self._fd_connection, handle.register)
            self._registers[handle.session] = register
        register = self._registers[handle.session]
        if register[0] != int(handle.session, 16):
            raise HandleGone(f"{what} is of session {handle.session!r}, which is over")
        if register[handle.slot] != handle.number:
            raise HandleGone(f"{what} was released")

    def _mapped(self, device: int, handle: CudaIpcHandle) -> _Mapping:
        fds: list[int] = []
        try:
            if not handle.pieces:
                return _Mapping(device, driver.open_ipc(device, handle.ipc), ())
            if self._fd_connection is None:
                raise TransportError(
                    f"handle of {len(handle.pieces)} files, and no connection to fetch them"
                )
            for piece in handle.pieces:
                fds.append(self._fd_connection.fetch(piece.key))
            sizes = [piece.nbytes for piece in handle.pieces]
            start = driver.map_fds(device, list(zip(fds, sizes, strict=True)))
            return _Mapping(device, start, handle.pieces)
        except TransportError as error:
            self._check_offered(handle)
            error.note(f"offer {handle.number} of process {handle.pid}, {handle.nbytes} bytes")
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def close_handle(self, handle: CudaIpcHandle) -> None:
        with self._lock:
            mapping = self._mappings.get(handle.place)
            if mapping is not None:
                mapping.users.discard(handle)
                if not mapping.users:
                    del self._mappings[handle.place]
                    mapping.close()

    def close(self) -> None:
        with self._lock:
            for _, exports in self._offers.values():
                self._unexport(exports)
            self._offers.clear()
            self._register.close()
            self._registers.clear()
            for mapping in self._mappings.values():
                with suppress(TransportError):  # a broken context cannot unmap, and need not
                    mapping.close()
            self._mappings.clear()


def _allocations(buffer: Buffer) -> Iterator[driver.Allocation]:
    """Yield the allocations of a buffer: several where memory is mapped in parts."""
    if buffer.nbytes:
        assert buffer.device is not None
        at, high = buffer.span
        while at < high:
            found = driver.allocation_at(buffer.device, at)
            yield found
            if found.can_ipc:
                return  # it was allocated as one
            at = found.start + found.nbytes


def allocations_of(device: int, low: Integers, high: Integers) -> Integers:
    """Return the number of the allocation that each block lies in.

    Where a framework maps memory in parts, allocations that share a block count as one.
    """
    order = np.argsort(low, kind="stable")
    starts, ends = low[order], np.maximum.accumulate(high[order])
    found = np.empty(len(low), np.int64)
    number = first = 0
    while first < len(order):
        end, last = int(starts[first]), first
        while last == first or ends[last - 1] > end:
            allocation = driver.allocation_at(device, end)
            end = allocation.start + allocation.nbytes
            last = int(np.searchsorted(starts, end))
        found[order[first:last]] = number
        number, first = number + 1, last
    return found


_transports: WeakValueDictionary[str, CudaIpcTransport] = WeakValueDictionary()


def _read_only(address: int, nbytes: int, owner: object, device: int | None) -> Buffer:
    return replace(Buffer.flat_at(address, nbytes, owner, device=device), is_writable=False)
