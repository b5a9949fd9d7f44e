"""Flat reads of one run of bytes between two processes, by plain sockets.

What updates over the network are measured against: nothing is packed, checked or committed.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

STREAMS = 2
_PIECE_BYTES = 4 << 20
_REQUEST = struct.Struct("<QQ")


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
