"""NIXL: its package, UCX's settings, and agents that end when they are told to.

An agent that is dropped closes its sockets, and from then on nothing writes to its memory. NIXL's
other calls stop nothing: after `release_xfer_handle`, `remove_remote_agent` and
`deregister_memory` many MiB still arrive. So `Agent.close` checks that the agent is really gone.
An agent listens on a port of its own without authentication and lets everybody who reaches it read
all memory of its process. `add_remote_agent` gives foreign bytes to a C++ parser: they must come
from a peer that has proved the token.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import importlib.util
import logging
import os
import secrets
import socket
import struct
import weakref
from contextlib import suppress
from functools import cache
from time import monotonic, sleep
from typing import Any

from flyweight.errors import MissingDependency, PeerLost, TransportError
from flyweight.forks import call_in_child
from flyweight.transports.network_engines import NIXL_INSTALL, rdma_devices, variables

_MODULES = ("nixl_cu12", "nixl_cu13")
_SIOCGIFADDR = 0x8915
PAUSE_SECONDS = 0.0002
"""The pause between two looks at a read: without one they are several times slower."""
HOST, DEVICE = "DRAM", "VRAM"
"""NIXL's words for memory of the host and of a CUDA device."""


class UnfencedRead(TransportError):
    """A read that cannot be ended: its bytes may still arrive in the memory that it reads into."""


def ucx_settings(*, has_rdma: bool, has_gpu: bool, interface: str = "") -> dict[str, str]:
    """Return the environment that UCX needs, for a machine with or without RDMA and a GPU.

    interface: on TCP, the only network interface to listen on; all of them by default.
    """
    settings = {
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
        "UCX_HANDLE_ERRORS": "none",  # by default it prints a backtrace, or waits for a debugger
        # A reader sends nothing, so only keepalives tell it of a link that was cut.
        "UCX_TCP_USER_TIMEOUT": "3s",
        "UCX_TCP_KEEPIDLE": "1s",
        "UCX_TCP_KEEPINTVL": "1s",
        "UCX_TCP_KEEPCNT": "3",
        # Segments of 8 KiB, the default, are three times as slow.
        "UCX_TCP_TX_SEG_SIZE": "256k",
        "UCX_TCP_RX_SEG_SIZE": "256k",
    }
    if not has_rdma:
        settings["UCX_TLS"] = "tcp,cuda_copy" if has_gpu else "tcp"
        # The wheel's own libibverbs beside the system's ends a process with SIGSEGV at its exit.
        settings["UCX_MODULES"] = "^ib,ib_mlx5,ib_efa,ib_mlx5_gda"
        if interface:
            settings["UCX_NET_DEVICES"] = interface
    return settings


def settings_here(address: str = "") -> dict[str, str]:
    """Return UCX's settings for this machine.

    address: on TCP, the address of this host that peers use; UCX then listens only there.
    """
    return ucx_settings(
        has_rdma=bool(rdma_devices()),
        has_gpu=os.path.exists("/dev/nvidiactl"),
        interface=_interface_of(address) if address else "",
    )


def _interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return "lo" if address.startswith("127.") else ""


@cache
def _package() -> tuple[Any, tuple[type[Exception], ...]]:
    """Import NIXL once; return its API, and the exceptions that it raises."""
    name = next((each for each in _MODULES if importlib.util.find_spec(each)), "")
    if not name:
        raise MissingDependency(f"network engine 'nixl' needs NIXL; {NIXL_INSTALL}")
    raises = logging.raiseExceptions
    try:
        api = importlib.import_module(f"{name}._api")
        bindings = importlib.import_module(f"{name}._bindings")
    except ImportError as cause:
        raise MissingDependency(f"{name} cannot be imported: {cause}; {NIXL_INSTALL}") from cause
    finally:
        logging.raiseExceptions = raises  # NIXL changes it for the whole process
    kinds = [each for each in vars(bindings).values() if isinstance(each, type)]
    return api, (RuntimeError, *(each for each in kinds if issubclass(each, Exception)))


class Agent:
    """One of NIXL's agents. Not thread-safe.

    A failed call raises PeerLost without NIXL's own exception: its traceback would keep the agent
    alive, and with it the transfers that `close` has to end.
    """

    def __init__(self, *, address: str = "") -> None:
        self.name = f"flyweight-{os.getpid()}-{secrets.token_hex(8)}"
        self._transfers: dict[int, Any] = {}
        self._num_transfers = 0
        trouble = ""
        with variables(settings_here(address)):
            api, self._errors = _package()
            try:
                config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self._agent: Any = api.nixl_agent(self.name, config)
                if "UCX" not in self._agent.backends:
                    trouble = "it has no plugin for UCX"
            except self._errors as cause:
                trouble = f"{type(cause).__name__}: {cause}"
        if trouble:
            self._agent = None
            raise TransportError(f"NIXL makes no agent here: {trouble}")
        call_in_child(self._leave_in_child)

    def _leave_in_child(self) -> None:
        """Never end the agent in a forked child: that would write to the parent's sockets."""
        if self._agent is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent.agent))
            for transfer in self._transfers.values():
                transfer._released = True
            self._transfers.clear()
            self._agent = None

    def register(self, address: int, nbytes: int, device: int | None = None) -> Any:
        """Register memory; return what `forget` and `describe` take."""
        kind = HOST if device is None else DEVICE
        rows = [(address, nbytes, device or 0, "")]
        return self._call("register_memory", rows, kind)

    def forget(self, registered: Any) -> None:
        """Deregister memory. On TCP this stops no reader that knows its address."""
        self._call("deregister_memory", registered)

    def describe(self, registered: Any, *, with_connection: bool) -> bytes:
        """Return what another agent needs to read that memory, or to connect as well."""
        found = self._call("get_partial_agent_metadata", registered, with_connection, ["UCX"])
        return bytes(found)

    def know(self, description: bytes) -> str:
        """Take in what another agent's `describe` returned; return that agent's name."""
        name: bytes | str = self._call("add_remote_agent", description)
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def pump(self) -> None:
        """Answer readers for a moment. On TCP nothing is answered without it."""
        with suppress(PeerLost):  # a reader is gone; which one does not matter here
            self._call("get_new_notifs")

    def start_read(
        self, peer: str, remote: int, local: int, nbytes: int, device: int | None = None
    ) -> int:
        """Start to read a peer's memory; return a number for `is_done`."""
        kind = HOST if device is None else DEVICE
        into = self._call("get_xfer_descs", [(local, nbytes, device or 0)], kind)
        there = self._call("get_xfer_descs", [(remote, nbytes, 0)], HOST)
        self._num_transfers += 1
        number = self._num_transfers
        self._transfers[number] = self._call("initialize_xfer", "READ", into, there, peer)
        self._check(self._call("transfer", self._transfers[number]))
        return number

    def is_done(self, number: int) -> bool:
        """Go on with all reads; return True, once, if this one has ended well."""
        state = self._check(self._call("check_xfer_state", self._transfers[number]))
        if state != "DONE":
            return False
        self._call("release_xfer_handle", self._transfers.pop(number))
        return True

    def drain(self, seconds: float) -> None:
        """Wait for reads in flight, as long as one ends within `seconds`.

        One that is cut off aborts the process at the other end, about every fourth time.
        """
        deadline = monotonic() + seconds
        with suppress(PeerLost):
            while self._transfers and monotonic() < deadline:
                if self.is_done(next(iter(self._transfers))):
                    deadline = monotonic() + seconds
                else:
                    sleep(PAUSE_SECONDS)

    def _check(self, state: str) -> str:
        if state == "ERR":
            raise PeerLost(f"a read by NIXL agent {self.name!r} failed")
        return state

    def _call(self, name: str, *args: Any) -> Any:
        if self._agent is None:
            raise PeerLost(f"NIXL agent {self.name!r} was closed")
        try:
            return getattr(self._agent, name)(*args)
        except self._errors as cause:
            trouble = f"{type(cause).__name__} {cause}"
        raise PeerLost(f"NIXL's {name} failed: {trouble}")

    def close(self) -> None:
        """End every transfer: afterwards not one byte arrives. Safe to repeat.

        Raise UnfencedRead if that cannot be said.
        """
        if self._agent is None:
            return
        gone = weakref.ref(self._agent.agent)
        while self._transfers:
            _, transfer = self._transfers.popitem()
            with suppress(*self._errors):  # an active transfer may refuse; the agent's end ends it
                transfer.release()
            transfer._released, transfer._agent = True, None
            del transfer
        self._agent.agent = None
        self._agent = None
        if gone() is not None:
            gc.collect()
        if gone() is not None:
            raise UnfencedRead(
                f"NIXL agent {self.name!r} does not end, so its memory may still be written; "
                f"restart this process"
            )
