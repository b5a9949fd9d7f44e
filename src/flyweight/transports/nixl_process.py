"""The process in which NIXL runs: what it is asked, and what it does.

    python -m flyweight.transports.nixl_process serve|pull

Its standard input is a socket to the process that started it, with which it ends. NIXL listens
without authentication, anybody who reaches its port can read and write all memory of its process,
and a peer that leaves in the middle of a transfer may abort it. So nothing is in this process but
the segments that are pulled from or into, and no variables but those that it needs.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from flyweight.errors import FlyweightError, MissingDependency, PeerLost, TransportError
from flyweight.memory import Bytes, bytes_of
from flyweight.transports.channel import Channel, Frame, Message, Messages
from flyweight.transports.wire import FOREVER, Wire

NIXL_INSTALL = "pip install --no-deps nixl-cu12==1.5.1"
"""Without --no-deps pip installs torch with CUDA, which NIXL does not need."""
_MODULES = ("nixl_cu12", "nixl_cu13")
_HOST_MEMORY = "DRAM"
_PULLING_SECONDS, _SERVING_SECONDS = 0.0002, 0.002
"""The pause between two looks. Without one, transfers on TCP are several times slower."""
_DRAIN_SECONDS = 0.3
_PR_SET_PDEATHSIG = 1


class Start(Message, frozen=True):
    """Answer once NIXL can be used."""


class Register(Message, frozen=True):
    """Map the open file that comes with this, and let NIXL use it."""

    nbytes: int


class Know(Message, frozen=True):
    """Take in the key of another process's memory."""

    key: bytes


class Pull(Message, frozen=True):
    """Bring pieces of a peer's memory here, one behind the other."""

    peer: str
    pieces: Sequence[tuple[int, int]]
    """Address and number of bytes."""
    into: int


class Done(Message, frozen=True):
    """From the process. The fields that the request asks for are set."""

    address: int = 0
    """Where the file is mapped in the process."""
    key: bytes = b""
    """What peers need to pull from it."""
    peer: str = ""
    """Whose key it was."""


def control_channel(connection: socket.socket, *, is_starter: bool) -> Channel:
    """Return the channel of a process, or of the one that starts it: nobody else has the ends."""
    channel = Channel(Wire(connection), "NIXL", Messages(Start, Register, Know, Pull, Done))
    channel.authenticate(b"", is_reader=is_starter)
    return channel


class _Agent:
    """NIXL's agent, and the transfers that it has begun."""

    def __init__(self) -> None:
        name = next((each for each in _MODULES if importlib.util.find_spec(each)), "")
        if not name:
            raise MissingDependency(f"NIXL is not installed; {NIXL_INSTALL}")
        try:
            api = importlib.import_module(f"{name}._api")
            bindings = importlib.import_module(f"{name}._bindings")
        except ImportError as cause:
            raise MissingDependency(f"{name} cannot be imported: {cause}; {NIXL_INSTALL}") from None
        kinds = [each for each in vars(bindings).values() if isinstance(each, type)]
        known = (each for each in kinds if issubclass(each, Exception))
        self.errors: tuple[type[Exception], ...] = RuntimeError, OSError, ValueError, *known
        try:
            # Its own thread would take a whole core.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            name = f"flyweight-{os.getpid()}-{os.urandom(8).hex()}"
            self._nixl: Any = api.nixl_agent(name, config)
        except self.errors as cause:
            raise TransportError(f"NIXL makes no agent: {type(cause).__name__} {cause}") from None
        self._mapped: list[Bytes] = []
        self.pulls: dict[int, Any] = {}
        """Transfers, by the number of their request."""

    def register(self, request: Register, file: int) -> Done:
        try:
            data = mmap.mmap(file, request.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except PermissionError:  # sealed against writers, which RDMA cards may object to
            rights = mmap.PROT_READ
            data = mmap.mmap(file, request.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, rights)
        self._mapped.append(mapped := bytes_of(data))
        address = mapped.__array_interface__["data"][0]
        rows = [(address, request.nbytes, 0, "")]
        registered = self._nixl.register_memory(rows, _HOST_MEMORY)
        key = self._nixl.get_partial_agent_metadata(registered, True, ["UCX"])
        return Done(address, bytes(key))

    def know(self, request: Know) -> Done:
        peer: bytes | str = self._nixl.add_remote_agent(request.key)
        name = peer.decode(errors="replace") if isinstance(peer, bytes) else peer
        return Done(peer=name)

    def pull(self, request: Pull, number: int) -> None:
        into, here = request.into, []
        for _, nbytes in request.pieces:
            here.append((into, nbytes, 0))
            into += nbytes
        there = [(address, nbytes, 0) for address, nbytes in request.pieces]
        local, remote = (self._nixl.get_xfer_descs(each, _HOST_MEMORY) for each in (here, there))
        transfer = self._nixl.initialize_xfer("READ", local, remote, request.peer)
        self.pulls[number] = transfer
        if self._nixl.transfer(transfer) == "ERR":
            raise PeerLost("NIXL could not begin a transfer")

    def go_on(self) -> dict[int, str]:
        """Answer peers for a moment, and go on with all transfers; return how some have ended."""
        with suppress(*self.errors):  # a peer is gone; which one does not matter
            self._nixl.get_new_notifs()
        ended = {}
        for number, transfer in list(self.pulls.items()):
            try:
                state = self._nixl.check_xfer_state(transfer)
            except self.errors as cause:
                state = f"{type(cause).__name__} {cause}"
            if state == "DONE":
                self._nixl.release_xfer_handle(transfer)
            if state != "PROC":
                ended[number] = state
                del self.pulls[number]
        return ended


def _answer(agent: _Agent, frame: Frame) -> Done | None:
    """Do what is asked; return None if the answer comes later."""
    match frame.message:
        case Register() as request:
            return agent.register(request, frame.files[0])
        case Know() as request:
            return agent.know(request)
        case Pull() as request:
            agent.pull(request, frame.number)
            return None
    return Done()


def _run(agent: _Agent, channel: Channel, *, is_server: bool) -> None:
    """Do what comes, until the other end is closed or a transfer fails: it may still write then."""
    while True:
        for number, state in agent.go_on().items():
            if state != "DONE":
                channel.refuse(PeerLost(f"NIXL's transfer ended with {state}"), number)
                return
            channel.send(Done(), FOREVER, number=number)
        pause = _SERVING_SECONDS if is_server else None  # over TCP, a server must be pumped
        wait = _PULLING_SECONDS if agent.pulls else pause
        if not select.select([channel.wire], [], [], wait)[0]:
            continue
        frame = channel.next_frame()
        try:
            found = _answer(agent, frame)
        except PeerLost as error:
            channel.refuse(error, frame.number)
        except agent.errors as cause:
            text = f"NIXL refused {type(frame.message).__name__}: {type(cause).__name__} {cause}"
            channel.refuse(PeerLost(text[:1000]), frame.number)
        else:
            if found is not None:
                channel.send(found, FOREVER, number=frame.number)
        finally:
            frame.close()


def main() -> None:
    """Run until the other end of the standard input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would have the weights
    channel = control_channel(socket.socket(fileno=os.dup(0)), is_starter=False)
    try:
        agent = _Agent()
    except FlyweightError as error:
        channel.refuse(error, channel.next_frame().number)
        return
    with suppress(TransportError):  # the process that started this one is gone
        _run(agent, channel, is_server=sys.argv[1] == "serve")
    end = monotonic() + _DRAIN_SECONDS
    while agent.pulls and monotonic() < end:  # one that is cut off may abort the peer's process
        agent.go_on()
    os._exit(0)  # what UCX does at its end takes long, and may crash


if __name__ == "__main__":
    main()
