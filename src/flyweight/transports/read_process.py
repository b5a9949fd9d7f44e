"""The process in which an engine serves reads: how it is started, and what it does.

    python -m flyweight.transports.read_process ENGINE ADDRESS

Its standard input is a socket to the process that started it, and it ends when that one closes it
or dies. Its environment has no variables but those that it needs: readers can read its memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from time import monotonic, thread_time

import msgspec

from flyweight.errors import FlyweightError, PeerLost, TransferTimeout, TransportError
from flyweight.host import reason
from flyweight.memory import Buffer, bytes_of
from flyweight.transports.mooncake_reads import MooncakeSource
from flyweight.transports.nixl_reads import NixlSource
from flyweight.transports.read_messages import MAX_MESSAGE_BYTES, Failed, Forget, Serve, Served

_NAMES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("UCX_", "NIXL_", "MC_", "LC_")
_END_SECONDS = 5.0
_PUMP_SECONDS, _IDLE_SECONDS = 0.0002, 0.004
_LOOK_SECONDS, _WORK_SHARE = 0.02, 0.25
"""Bytes are moved if the process takes more than this share of a core: less is idle pumping."""
_PR_SET_PDEATHSIG = 1
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_ANSWERS: msgspec.json.Decoder[Served | Failed] = msgspec.json.Decoder(Served | Failed)
_REQUESTS: msgspec.json.Decoder[Serve | Forget] = msgspec.json.Decoder(Serve | Forget)


class ReadProcess:
    """The process, as the one that starts it sees it."""

    def __init__(self, engine: str, address: str) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._engine, self._trouble = engine, ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_started = threading.Event()
        words = [sys.executable, "-m", __spec__.name, engine, address]
        # The kernel ends the process with the thread that started it, so that thread waits.
        self._thread = threading.Thread(
            target=self._keep, args=(words, theirs), name="flyweight-reads", daemon=True
        )
        self._thread.start()
        self._is_started.wait(_END_SECONDS)

    def _keep(self, words: list[str], theirs: socket.socket) -> None:
        try:
            with theirs:
                self._popen = subprocess.Popen(  # noqa: S603
                    words,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # an interrupt at the terminal is not for it
                )
        except OSError as cause:
            self._trouble = f": {reason(cause)}"
        finally:
            self._is_started.set()
        if self._popen is not None:
            self._popen.wait()

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    @property
    def has_ended(self) -> bool:
        closing = select.poll()
        closing.register(self.control, select.POLLRDHUP)
        return bool(closing.poll(0))

    def ask(self, request: Serve | Forget, fd: int | None, seconds: float) -> Served | Failed:
        """Send a request, with a file if it needs one, and return the answer."""
        deadline = monotonic() + seconds
        readable = select.poll()
        readable.register(self.control, select.POLLIN)
        try:
            self.control.setblocking(False)
            fds = [] if fd is None else [fd]
            socket.send_fds(self.control, [msgspec.json.encode(request)], fds)
            is_answered = bool(readable.poll(1000 * max(deadline - monotonic(), 0)))
            data = self.control.recv(MAX_MESSAGE_BYTES) if is_answered else b""
            if data:
                return _ANSWERS.decode(data)
        except OSError as cause:
            raise PeerLost(f"the process of {self._engine} {self._end}") from cause
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise TransportError(f"the process of {self._engine} sent no answer: {cause}") from None
        if not is_answered:
            raise TransferTimeout(f"the process of {self._engine} did not answer in {seconds:g} s")
        raise PeerLost(f"the process of {self._engine} {self._end}")

    @property
    def _end(self) -> str:
        """How the process ended, in words."""
        self._thread.join(_END_SECONDS)
        if self._popen is None:
            return f"did not start{self._trouble}"
        code = self._popen.returncode
        if code is None:
            return "closed its connection"
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def close(self, *, by_force: bool = False) -> int | None:
        """End the process and return its exit code."""
        self.control.close()
        if not by_force:
            self._thread.join(_END_SECONDS)
        if self._popen is not None and self._thread.is_alive():
            self._popen.kill()  # SIGKILL also ends a process that is stopped
        self._thread.join(_END_SECONDS)
        return self._popen.returncode if self._popen is not None else None


def _environment() -> dict[str, str]:
    """Return the variables that the process needs, and no others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    path = os.pathsep.join(each for each in sys.path if each)
    return {**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


class _Files:
    """The files that this process serves, where they are mapped, until they are forgotten."""

    def __init__(self, source: NixlSource | MooncakeSource) -> None:
        self._source = source
        self._served: dict[int, tuple[Buffer, object]] = {}

    def serve(self, request: Serve, fd: int) -> Served:
        flags, size, at = mmap.MAP_SHARED | mmap.MAP_POPULATE, request.nbytes, request.offset
        try:
            data = mmap.mmap(fd, size, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=at)
        except PermissionError:  # it is sealed against writers, which only RDMA cards object to
            data = mmap.mmap(fd, size, flags, mmap.PROT_READ, offset=at)
        buffer = Buffer.of(bytes_of(data))
        registered, key = self._source.register(buffer.address, buffer.nbytes)
        self._served[request.slot] = buffer, registered
        return Served(buffer.address, key, self._source.connection)

    def forget(self, slot: int) -> None:
        """Free a file's memory, and leave zeros at its address.

        Unmapped memory would end this process if a reader still reads there. What such a reader
        gets is refused by it: the file's word was cleared before.
        """
        buffer, registered = self._served.pop(slot)
        self._source.forget(registered)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        where, size = ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.nbytes)
        found = libc.mmap(where, size, mmap.PROT_READ, flags, -1, ctypes.c_long(0))
        if found != buffer.address:
            raise TransportError(f"a file's memory is not freed: {os.strerror(ctypes.get_errno())}")
        _FORGOTTEN.append(buffer)


_FORGOTTEN: list[Buffer] = []
"""Addresses that readers may still use; they must not be unmapped, and take no memory."""


def _answer(files: _Files, control: socket.socket) -> bool:
    """Answer one request; return False at the end of the connection."""
    data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
    if not data:
        return False
    answer: Served | Failed = Served(0, b"")
    try:
        request = _REQUESTS.decode(data)
        if isinstance(request, Serve):
            answer = files.serve(request, fds[0])
        else:
            files.forget(request.slot)
    except (FlyweightError, OSError, ValueError) as error:
        answer = Failed(type(error).__name__, str(error)[:1000])
    finally:
        for fd in fds:
            os.close(fd)
    control.send(msgspec.json.encode(answer))
    return True


def _serve_until_closed(source: NixlSource | MooncakeSource, control: socket.socket) -> None:
    files, pause = _Files(source), _IDLE_SECONDS
    looked_at, used_before = monotonic(), thread_time()
    while True:
        source.pump()
        now = monotonic()
        if now - looked_at > _LOOK_SECONDS:
            used = thread_time()
            is_busy = used - used_before > _WORK_SHARE * (now - looked_at)
            pause = _PUMP_SECONDS if is_busy else _IDLE_SECONDS
            looked_at, used_before = now, used
        if select.select([control], [], [], pause)[0] and not _answer(files, control):
            return


def main() -> None:
    """Serve files until the other end of the standard input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would have the weights
    control = socket.socket(fileno=os.dup(0))
    engine, address = sys.argv[1:]
    try:
        source = NixlSource(address) if engine == "nixl" else MooncakeSource(address)
    except FlyweightError as error:
        control.recv(MAX_MESSAGE_BYTES)
        control.send(msgspec.json.encode(Failed(type(error).__name__, str(error)[:1000])))
        return
    try:
        with suppress(ConnectionError):  # the process that started this one is gone
            _serve_until_closed(source, control)
    finally:
        source.close()


if __name__ == "__main__":
    main()
