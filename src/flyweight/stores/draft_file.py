"""Writing one file fast: through the page cache or past it, whichever is faster at the moment."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from pathlib import Path

from flyweight.memory import STAGING, Bytes, page_memory
from flyweight.stores.local import PAGE, OpenFile

_LARGE_BYTES = 1 << 20
_PROBE_EVERY = 64
FAST_RATE = 1.5e9  # bytes per second and thread, about half of what pages at hand take
_BOUNCE_BYTES = 4 << 20
_CACHE_PAGE = max(PAGE, mmap.PAGESIZE)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class CacheProbe:
    """Decides whether large writes go through the page cache or past it.

    Pages that the kernel, or on a virtual machine even the host, has to find first cost more than
    the disk; pages at hand cost less than writing past them. So one write in a while goes through
    the cache, and its speed decides.
    """

    def __init__(self) -> None:
        self._num_asked, self._rate = 0, 0.0
        self._lock = threading.Lock()

    def is_slow(self) -> bool:
        with self._lock:
            self._num_asked += 1
            return self._num_asked % _PROBE_EVERY != 1 and self._rate < FAST_RATE

    def measured(self, nbytes: int, seconds: float) -> None:
        self._rate = nbytes / seconds


class DraftFile(OpenFile):
    """A file of a draft, written through the page cache or past it."""

    def __init__(self, path: Path) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def write(self, offset: int, data: Bytes, probe: CacheProbe) -> None:
        if len(data) < _LARGE_BYTES:
            _write_all(self.fd, offset, data)
            return
        # Whole pages can go past the page cache, the ragged ends go through it: no page is
        # written both ways.
        head = -offset % _CACHE_PAGE
        end = head + (len(data) - head) // _CACHE_PAGE * _CACHE_PAGE
        if probe.is_slow() and self._write_direct(offset + head, data[head:end]):
            _write_all(self.fd, offset, data[:head])
            _write_all(self.fd, offset + end, data[end:])
            return
        started = time.perf_counter()
        _write_all(self.fd, offset, data)
        probe.measured(len(data), time.perf_counter() - started)
        if _sync_file_range is not None:  # start the disk now; else it all waits for the fsync
            _sync_file_range(self.fd, ctypes.c_int64(offset), ctypes.c_int64(len(data)), 2)

    def can_go_direct(self) -> bool:
        """Try an unbuffered write, on the first page."""
        return self._write_direct(0, page_memory(_CACHE_PAGE))

    def _write_direct(self, offset: int, data: Bytes) -> bool:
        """Write whole pages unbuffered; False if this file system cannot."""
        if (fd := self.direct_fd(os.O_WRONLY)) < 0:
            return False
        try:
            if data.ctypes.data % PAGE == 0:
                _write_all(fd, offset, data)
                return True
            with STAGING.lend(min(len(data), _BOUNCE_BYTES)) as bounce:
                for start in range(0, len(data), len(bounce)):
                    some = data[start : start + len(bounce)]
                    bounce[: len(some)] = some
                    _write_all(fd, offset + start, bounce[: len(some)])
            return True
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
            self.may_direct = False  # `close` closes the descriptor: other threads may use it
            return False


def _write_all(fd: int, offset: int, data: Bytes) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
