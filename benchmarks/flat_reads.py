"""Flat reads of one run of bytes between two processes: what a network round is measured against.

Plain sockets, and NIXL on TCP if its package is installed. Nothing is packed, checked or committed.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

STREAMS = 2
_PIECE_BYTES = 4 << 20
_DESCRIPTOR_BYTES = 16 << 20
_REQUEST = struct.Struct("<QQ")
_PUMP_SECONDS = 0.0002
_UCX = {
    # On a machine with a GPU, NIXL makes no agent unless UCX can copy to it.
    "UCX_TLS": "tcp,cuda_copy" if os.path.exists("/dev/nvidiactl") else "tcp",
    "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k",
    # With two copies of libibverbs in a process, that process crashes when it ends.
    "UCX_MODULES": "^ib,ib_mlx5,ib_efa,ib_mlx5_gda",
    "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal",
}  # fmt: skip


def parts(nbytes: int, num_streams: int) -> list[tuple[int, int]]:
    """Return the start and the length of each stream's part."""
    cuts = [nbytes * i // num_streams // 8 * 8 for i in range(num_streams)] + [nbytes]
    return [(low, high - low) for low, high in itertools.pairwise(cuts)]


def together(work: list[Callable[[], object]], timeout_seconds: float) -> None:
    """Run functions at once, each in a thread, and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a flat read took longer than {timeout_seconds:.0f} s")


def serve_sockets(memory: np.ndarray, ip: str) -> int:
    """Send parts of the memory to all who ask, in threads; return the port."""
    server = socket.create_server((ip, 0))
    view = memoryview(memory)

    def answer(link: socket.socket) -> None:
        with link:
            while len(request := link.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
                start, length = _REQUEST.unpack(request)
                link.sendall(view[start : start + length])

    def accept() -> None:
        while True:
            link, _ = server.accept()
            threading.Thread(target=answer, args=(link,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


class SocketReader:
    """Reads all of a served memory over several sockets."""

    def __init__(self, memory: np.ndarray, ip: str, port: int, timeout_seconds: float) -> None:
        self._view, self._timeout_seconds = memoryview(memory), timeout_seconds
        self._links = [socket.create_connection((ip, port), timeout_seconds) for _ in range(STREAMS)]  # fmt: skip

    def read(self) -> None:
        work = zip(self._links, parts(len(self._view), STREAMS), strict=True)
        together([lambda a=link, b=part: self._read(a, *b) for link, part in work], self._timeout_seconds)  # fmt: skip

    def _read(self, link: socket.socket, start: int, length: int) -> None:
        link.sendall(_REQUEST.pack(start, length))
        end = start + length
        while start < end:
            got = link.recv_into(self._view[start : min(end, start + _PIECE_BYTES)])
            if not got:
                raise ConnectionError("the source closed a flat read")
            start += got


def nixl() -> Any:
    """Return NIXL's module, or None if it is not installed."""
    logging.disable(logging.INFO)  # it prints each agent
    for name in ("nixl_cu12._api", "nixl_cu13._api", "nixl._api"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def nixl_package() -> str:
    """Return the name under which NIXL's version is known."""
    found = nixl()
    return "nixl" if found is None else found.__name__.partition(".")[0].replace("_", "-")


def _agents(memory: np.ndarray, role: str) -> list[Any]:
    """Return one agent for each stream, which know the memory."""
    found, before = nixl(), dict(os.environ)
    os.environ.update({name: value for name, value in _UCX.items() if name not in before})
    try:
        config = found.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agents = [found.nixl_agent(f"{role}{i}-{os.getpid()}", config) for i in range(STREAMS)]
    finally:
        os.environ.clear()
        os.environ.update(before)
    for agent in agents:
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agents


class NixlServer:
    """Serves a memory by NIXL while it is pumped."""

    def __init__(self, memory: np.ndarray) -> None:
        self._agents = _agents(memory, "source")
        self.description = [each.get_agent_metadata() for each in self._agents], memory.ctypes.data
        self._is_stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Pump, so that reads make progress: a target on TCP is not passive."""
        self._is_stopped.clear()
        self._threads = [threading.Thread(target=self._pump, args=(each,), daemon=True) for each in self._agents]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _pump(self, agent: Any) -> None:
        while not self._is_stopped.wait(_PUMP_SECONDS):
            agent.get_new_notifs()

    def stop(self) -> None:
        self._is_stopped.set()
        for thread in self._threads:
            thread.join(5)


class NixlReader:
    """Reads all of a served memory, with one agent or with one for each stream."""

    def __init__(
        self, memory: np.ndarray, served: tuple[list[bytes], int], timeout_seconds: float
    ) -> None:
        self._timeout_seconds = timeout_seconds
        texts, self._address = served
        self._memory, self._agents = memory, _agents(memory, "reader")
        peers = zip(self._agents, texts, strict=True)
        self._peers = [agent.add_remote_agent(text) for agent, text in peers]
        self._handles = {num: self._planned(num) for num in (1, STREAMS)}

    def _planned(self, num_agents: int) -> list[tuple[Any, Any]]:
        """Return agents, and for each the handle of the read that it does."""
        found = []
        for agent, peer, (start, length) in zip(
            self._agents, self._peers, parts(self._memory.nbytes, num_agents), strict=False
        ):
            starts = range(start, start + length, _DESCRIPTOR_BYTES)
            rows = [(at, min(_DESCRIPTOR_BYTES, start + length - at), 0) for at in starts]
            ours, theirs = (
                agent.get_xfer_descs([(base + at, size, gpu) for at, size, gpu in rows], "DRAM")
                for base in (self._memory.ctypes.data, self._address)
            )
            found.append((agent, agent.initialize_xfer("READ", ours, theirs, peer)))
        return found

    def read(self, num_agents: int) -> None:
        work = self._handles[num_agents]
        together([lambda a=agent, b=handle: self._read(a, b) for agent, handle in work], self._timeout_seconds)  # fmt: skip

    def _read(self, agent: Any, handle: Any) -> None:
        deadline, state = time.monotonic() + self._timeout_seconds, agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_PUMP_SECONDS)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise ConnectionError(f"NIXL's read ended as {state}")
