"""NIXL: readers on other hosts pull memory by RDMA, from where it lies into their own segments.

NIXL runs in processes of its own (`nixl_process`), one that serves and one that pulls. The end of
such a process is the only fence: NIXL's own calls leave transfers behind that still write. So a
pull that fails or is late ends its process, and its memory is not used again before that is dead.
What was pulled counts only by its digests, or by a lease that still runs.

It was never run on RDMA hardware. Over TCP, with FLYWEIGHT_NIXL=tcp, it passes the tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from heapq import nlargest
from itertools import count
from operator import attrgetter
from time import monotonic
from typing import NamedTuple

from flyweight.errors import (
    FlyweightError,
    MissingDependency,
    PeerLost,
    SpecError,
    TransferTimeout,
    TransportError,
    error_named,
)
from flyweight.forks import call_in_child
from flyweight.host import reason
from flyweight.memory import Bytes
from flyweight.transports import nixl_process
from flyweight.transports.channel import Message, Refused
from flyweight.transports.nixl_process import (
    NIXL_INSTALL,
    Done,
    Know,
    Pull,
    Register,
    Start,
    control_channel,
)
from flyweight.transports.segments import Segment

SLOT_BYTES, NUM_SLOTS = 4 << 20, 2
"""What does not lie in segments is packed into slots: each reader's connection has two."""
_PIECE_BYTES = 64 << 10
"""Smaller parts are packed too: many pieces are slower than a copy."""
_MOST_SEGMENTS, _MOST_WINDOWS = 32, 64
_ANSWER_SECONDS, _END_SECONDS = 10.0, 1.0
_REGISTERED_BYTES = 1 << 30
"""A process registers so many bytes in a second, at least."""
_MIN_VERSION = 1, 5, 1
_RDMA = "/sys/class/infiniband"
_NAMES = "PATH", "LD_LIBRARY_PATH", "LANG", "TZ", "CUDA_VISIBLE_DEVICES"
_PREFIXES = "UCX_", "NIXL_", "LC_"


# Whether this host can use it.


def rdma_devices() -> tuple[str, ...]:
    """Return the names of this host's RDMA devices."""
    try:
        return tuple(sorted(os.listdir(_RDMA)))
    except OSError:
        return ()


def nixl_version() -> str:
    """Return the version of NIXL that is installed; "" if there is none that can be used."""
    for package in ("nixl-cu12", "nixl-cu13"):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
            if found and tuple(map(int, found.groups())) >= _MIN_VERSION:
                return version
    return ""


def check_nixl() -> None:
    """Raise unless this host can pull by NIXL, and let others pull."""
    if not nixl_version():
        raise MissingDependency(f"transport 'rdma' needs NIXL; {NIXL_INSTALL}")
    if not _is_over_tcp() and not rdma_devices():
        raise TransportError(
            f"transport 'rdma' needs an RDMA device, and {_RDMA} has none; use transport='auto', "
            f"or set FLYWEIGHT_NIXL=tcp on both hosts to try NIXL over TCP"
        )


def nixl_here() -> str:
    """Return what both hosts need to use NIXL: its version, and what it goes over; "" if none."""
    try:
        check_nixl()
    except (MissingDependency, TransportError):
        return ""
    return f"{nixl_version()} {'tcp' if _is_over_tcp() else 'rdma'}"


def _is_over_tcp() -> bool:
    found = os.environ.get("FLYWEIGHT_NIXL", "")
    if found not in ("", "tcp"):
        raise SpecError(f"FLYWEIGHT_NIXL is {found!r}, expected 'tcp' or nothing")
    return found == "tcp"


def _environment() -> dict[str, str]:
    """Return the variables that the process needs; those of UCX that the user has set win."""
    settings = {
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
        "UCX_HANDLE_ERRORS": "none",  # by default it prints a backtrace, or waits for a debugger
        "UCX_TLS": "^tcp",  # what is named RDMA never goes over TCP by itself
    }
    if _is_over_tcp():
        settings |= {
            # On a machine with a GPU, NIXL makes no agent unless UCX can copy to it.
            "UCX_TLS": "tcp,cuda_copy" if os.path.exists("/dev/nvidiactl") else "tcp",
            # The wheel's own libibverbs beside the system's may crash.
            "UCX_MODULES": "^ib,ib_mlx5,ib_efa,ib_mlx5_gda",
            # Who pulls sends nothing, so only keepalives notice a link that was cut.
            "UCX_TCP_USER_TIMEOUT": "3s",
            "UCX_TCP_KEEPIDLE": "1s",
            "UCX_TCP_KEEPINTVL": "1s",
            "UCX_TCP_KEEPCNT": "3",
            # Segments of 8 KiB, the default, are three times as slow.
            "UCX_TCP_TX_SEG_SIZE": "256k",
            "UCX_TCP_RX_SEG_SIZE": "256k",
        }
    kept = {k: v for k, v in os.environ.items() if k in _NAMES or k.startswith(_PREFIXES)}
    path = os.pathsep.join(each for each in sys.path if each)
    return {**settings, **kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


# The process.


class _Slab(NamedTuple):
    """A segment that the process has mapped."""

    there: int
    """Its address in the process."""
    here: int
    nbytes: int
    key: bytes


class _Asked(NamedTuple):
    """A request that is on its way."""

    answer: Future[Message]
    until: float
    """A process that has not answered by then hangs."""


class _Process:
    """A process of NIXL, as the one that starts it sees it. Thread-safe."""

    def __init__(self, role: str) -> None:
        ours, theirs = socket.socketpair()
        self._channel = control_channel(ours, is_starter=True)
        self._popen: subprocess.Popen[bytes] | None = None
        self._owner, self._end_text = os.getpid(), ""
        self._is_started, self.is_dead = threading.Event(), threading.Event()
        self._asking, self._preparing = threading.Lock(), threading.RLock()
        self._numbers, self._asked = count(1), dict[int, Future[Message]]()
        self._registered: weakref.WeakKeyDictionary[Segment, _Asked] = weakref.WeakKeyDictionary()
        self._known: dict[bytes, _Asked] = {}
        # The kernel ends the process with the thread that started it, so that thread stays.
        threading.Thread(
            target=self._keep, args=(role, theirs), name="flyweight-nixl", daemon=True
        ).start()
        self._is_started.wait()
        self.starting = self.send(Start())
        """Its answer comes once NIXL can be used."""

    def _keep(self, role: str, theirs: socket.socket) -> None:
        try:
            with theirs:
                self._popen = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-m", nixl_process.__name__, role],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # an interrupt at the terminal is not for it
                )
            self._is_started.set()
            try:
                while True:
                    frame = self._channel.next_frame()
                    with self._asking:
                        asked = self._asked.pop(frame.number)
                    asked.set_result(frame.message)
            except PeerLost:  # it ends
                pass
            except (FlyweightError, KeyError):  # what no sound process sends
                self.kill()
            code = self._popen.wait()
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._end_text = f"the process of NIXL ended with {name}"
        except OSError as cause:
            self._end_text = f"the process of NIXL did not start: {reason(cause)}"
        finally:
            with self._asking:
                self.is_dead.set()
                self._channel.close()
                last, self._asked = list(self._asked.values()), {}
            self._is_started.set()
            for each in last:
                each.set_exception(PeerLost(self._end_text))

    def send(self, request: Message, file: int | None = None, nbytes: int = 0) -> _Asked:
        """Send a request, with an open file of so many bytes if it needs one."""
        until = monotonic() + _ANSWER_SECONDS + nbytes / _REGISTERED_BYTES
        asked = _Asked(Future(), until)
        with self._asking:
            if self.is_dead.is_set():
                raise PeerLost(self._end_text)
            number = next(self._numbers)
            self._asked[number] = asked.answer
            files = () if file is None else (file,)
            with suppress(TransportError):  # if it takes nothing, it ends
                self._channel.send(request, monotonic(), files, number=number)
        return asked

    def wait(self, asked: _Asked, seconds: float) -> Done:
        """Return the answer; a process that hangs is killed."""
        try:
            answer = asked.answer.result(max(min(seconds, asked.until - monotonic()), 0))
        except FutureTimeout as cause:
            if monotonic() >= asked.until:
                self.kill()
            raise TransferTimeout(f"NIXL did not answer in {seconds:.2g} s") from cause
        if isinstance(answer, Refused):
            raise error_named(answer.kind, answer.text)
        assert isinstance(answer, Done)
        return answer

    def slab(self, segment: Segment, seconds: float) -> _Slab:
        """Return where the process has a segment, which it maps and registers once."""
        with self._preparing:
            if segment not in self._registered:
                # Else it would keep memory in use that is free here, and let others read it.
                weakref.finalize(segment, self.kill).atexit = False
                asked = self.send(Register(segment.nbytes), segment.files[0], segment.nbytes)
                self._registered[segment] = asked
        found = self.wait(self._registered[segment], seconds)
        return _Slab(found.address, segment.start, segment.nbytes, found.key)

    def peer(self, key: bytes, seconds: float) -> str:
        """Return the name of the process that a key belongs to."""
        with self._preparing:
            if key not in self._known:
                self._known[key] = self.send(Know(key))
        return self.wait(self._known[key], seconds).peer

    def kill(self) -> None:
        """Kill it, without waiting for its end; do nothing in a forked child."""
        if self._popen is not None and self._owner == os.getpid():
            self._popen.kill()

    def end(self) -> bool:
        """Return True once it is dead: from then on nothing is written to what it had mapped."""
        self._channel.shut()
        if not self.is_dead.wait(_END_SECONDS):
            self.kill()  # also one that is stopped
        return self.is_dead.wait(_END_SECONDS)


class _Nixl:
    """A process that is started when it is needed, and again if it has ended."""

    _role = ""

    def __init__(self) -> None:
        self.way = nixl_here()
        """What the other host needs too."""
        self.is_fenced = True
        """False if a process did not end, so that it may still write to segments."""
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._trouble: FlyweightError | None = None
        """Why NIXL cannot be used here."""
        self._is_closed = False
        call_in_child(self._leave_in_child)

    def _leave_in_child(self) -> None:
        self._lock, self._process, self._is_closed = threading.Lock(), None, True

    def running(self, seconds: float = _ANSWER_SECONDS) -> _Process:
        """Return the process; raise why there can be none, or that it still starts."""
        with self._lock:
            if self._is_closed:
                raise TransportError("NIXL is not used here any more")
            if self._trouble is not None:
                raise type(self._trouble)(str(self._trouble))
            if self._process is None or self._process.is_dead.is_set():
                self._process = _Process(self._role)
            process = self._process
        try:
            process.wait(process.starting, seconds)
        except (MissingDependency, TransportError) as error:
            if not isinstance(error, (PeerLost, TransferTimeout)):
                self._trouble = error  # the process says that it will never work
            raise
        return process

    def close(self) -> None:
        """End the process. Safe to repeat."""
        self._is_closed = True
        if self._process is not None and not self._process.end():
            self.is_fenced = False


class NixlServer(_Nixl):
    """Lets others pull segments of this process, through windows."""

    _role = "serve"

    def __init__(self) -> None:
        super().__init__()
        self._idle: list[Segment] = []
        """Memory for slots."""
        self._num_windows = 0

    def lend(self) -> Segment:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._num_windows >= _MOST_WINDOWS:
                raise TransportError(f"{_MOST_WINDOWS} readers pull by NIXL already")
            slots = Segment.allocate(NUM_SLOTS * SLOT_BYTES, is_writable_by_readers=True)
            self._num_windows += 1
            return slots

    def give_back(self, slots: Segment) -> None:
        with self._lock:
            self._idle.append(slots)


class Window:
    """What one reader can pull: segments from where they are, and two slots for the rest."""

    def __init__(self, server: NixlServer) -> None:
        self._server, self._slots = server, server.lend()
        self._slabs: list[_Slab] = []
        """The first one is that of the slots."""

    def cover(self, segments: Sequence[Segment], seconds: float) -> None:
        """Let segments be pulled from where they are; raise if NIXL cannot be used in time."""
        end, process = monotonic() + seconds, self._server.running(seconds)
        self._slabs = [process.slab(self._slots, end - monotonic())]
        for each in nlargest(_MOST_SEGMENTS, segments, attrgetter("nbytes")):
            with suppress(PeerLost):  # NIXL does not take it: it is packed
                self._slabs.append(process.slab(each, end - monotonic()))

    def place(
        self, parts: Sequence[Bytes], slot: int
    ) -> tuple[tuple[bytes, ...], tuple[tuple[int, int], ...]]:
        """Return keys, and addresses and sizes, by which bytes can be pulled one after another.

        slot: where to pack what does not lie in a segment; the reader does not pull from it now.
        """
        nbytes = sum(map(len, parts))
        if not 0 <= slot < NUM_SLOTS or nbytes > SLOT_BYTES:
            raise SpecError(f"{nbytes} bytes for slot {slot}; {NUM_SLOTS} have {SLOT_BYTES} each")
        found: list[tuple[_Slab, int, int]] = []
        packed = slot * SLOT_BYTES
        for part in parts:
            address, size = part.__array_interface__["data"][0], len(part)
            slab = self._slab_of(address, size)
            if slab is None:
                slab, address = self._slabs[0], self._slots.start + packed
                self._slots.bytes[packed : packed + size] = part
                packed += size
            address += slab.there - slab.here
            if found and found[-1][0] is slab and sum(found[-1][1:]) == address:
                _, address, before = found.pop()
                size += before
            found.append((slab, address, size))
        keys = {slab.key for slab, _, _ in found}
        return tuple(keys), tuple((address, size) for _, address, size in found)

    def _slab_of(self, address: int, nbytes: int) -> _Slab | None:
        if nbytes >= _PIECE_BYTES:
            for each in self._slabs[1:]:
                if each.here <= address and address + nbytes <= each.here + each.nbytes:
                    return each
        return None

    def close(self) -> None:
        """Let another reader have the slots."""
        self._server.give_back(self._slots)


class NixlPuller(_Nixl):
    """Pulls from memory of other hosts into segments that can be written. Thread-safe."""

    _role = "pull"

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        with suppress(FlyweightError):
            self.running(0)

    def pull(
        self,
        keys: Sequence[bytes],
        pieces: Sequence[tuple[int, int]],
        into: Segment,
        start: int,
        stop: int,
        *,
        stall_seconds: float,
        deadline: float,
    ) -> None:
        """Fill bytes of a segment with pieces of a peer's memory, one after another.

        If this raises, the process is dead and nothing arrives any more, or `is_fenced` is False.
        """
        process = self.running((deadline - monotonic()) / 2)
        try:
            here = process.slab(into, deadline - monotonic()).there + start
            peers = {process.peer(key, deadline - monotonic()) for key in keys}
            nbytes = sum(size for _, size in pieces)
            if len(peers) != 1 or nbytes != stop - start:
                raise TransportError(
                    f"{nbytes} bytes of {len(peers)} processes are to be pulled, not "
                    f"{stop - start} of one"
                )
            asked = process.send(Pull(peers.pop(), pieces, here))
            process.wait(asked, min(stall_seconds, deadline - monotonic()))
        except BaseException:
            if not process.end():
                self.is_fenced = False
            raise
