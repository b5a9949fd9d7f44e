"""A register of a transport's standing offers, in memory that readers map.

A reader sees in it that an offer was released, without asking the process that offered.
Word 0 is the session of the transport; every other word is a slot, which has the number of
an offer, or 0.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from flyweight.digest import Words
from flyweight.errors import TransportError
from flyweight.memory import bytes_of, without_fork
from flyweight.transports.fd_passing import FdConnection, FdServer

MAX_OFFERS = 1 << 20
_REGISTER_BYTES = 8 * (MAX_OFFERS + 1)  # mostly never touched, so the system provides no memory


class OfferRegister:
    """The offering side. Without an FdServer it only hands out slots. Not thread-safe."""

    def __init__(self, session: str, fd_server: FdServer | None) -> None:
        self._session, self._fd_server = session, fd_server
        self._words: Words | None = None
        self.key = ""
        """The register's key at the FdServer; "" as long as there is no register."""
        self._free_slots: list[int] = []
        self._num_slots = 0

    def enter(self, number: int) -> int:
        """Return a slot that has the number of an offer from now on."""
        if not self._free_slots and self._num_slots == MAX_OFFERS:
            raise TransportError(f"there are {MAX_OFFERS} offers already; release some")
        if self._fd_server is not None and self._words is None:
            self._open(self._fd_server)
        slot = self._free_slots.pop() if self._free_slots else self._num_slots + 1
        self._num_slots = max(self._num_slots, slot)
        if self._words is not None:
            self._words[slot] = number
        return slot

    def remove(self, slot: int) -> None:
        if self._words is not None:
            self._words[slot] = 0
        self._free_slots.append(slot)

    def _open(self, fd_server: FdServer) -> None:
        fd = -1
        try:
            fd = os.memfd_create("flyweight-offers", os.MFD_CLOEXEC)
            os.ftruncate(fd, _REGISTER_BYTES)
            words = _mapped(fd, mmap.PROT_READ | mmap.PROT_WRITE)
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise TransportError(f"no register of offers: {cause.strerror}") from cause
        finally:
            if fd >= 0:
                os.close(fd)
        words[0] = int(self._session, 16)
        self._words, self.key = words, fd_server.offer(readable)

    def close(self) -> None:
        """Remove every offer and the register. Safe to repeat."""
        if self._words is not None and self._fd_server is not None:
            self._words[1 : self._num_slots + 1] = 0
            self._fd_server.release(self.key)
        self._words, self.key = None, ""
        self._free_slots, self._num_slots = [], 0


def read_register(connection: FdConnection, key: str) -> Words:
    """Map the register that another process offers under a key."""
    fd = connection.fetch(key)
    try:
        return _mapped(fd, mmap.PROT_READ)
    except (OSError, ValueError) as cause:
        raise TransportError(f"cannot map register {key!r}: {cause}") from cause
    finally:
        os.close(fd)


def _mapped(fd: int, prot: int) -> Words:
    data = bytes_of(mmap.mmap(fd, _REGISTER_BYTES, prot=prot))
    without_fork(data)
    return data.view(np.uint64)
