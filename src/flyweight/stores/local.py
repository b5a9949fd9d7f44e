"""Local directories: reads ranges of files in the cheapest way that works.

A range that is in the page cache is mapped and shown where it lies. Any other range is read
past the cache (O_DIRECT), which on fast disks beats the kernel's read-ahead. Where neither
works, reads are plain. If another process truncates a file while it is mapped, reading it
raises SIGBUS; committed files are never rewritten, and sizes are checked before each mapping.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from flyweight.errors import FormatError, SpecError, StoreError
from flyweight.host import opened
from flyweight.memory import Bytes, bytes_of, page_memory
from flyweight.ports import WINDOW_SLACK

PAGE = WINDOW_SLACK // 2
_MAX_BUFFERS = 1024  # IOV_MAX of Linux
_LIBC = ctypes.CDLL(None)


def refused(cause: OSError, text: str) -> StoreError:
    """Return an error of the operating system as a StoreError with the same errno."""
    error = StoreError(f"{text}: {cause.strerror or cause}")
    error.errno = cause.errno
    return error


@contextmanager
def store_errors(text: str) -> Iterator[None]:
    """Raise errors of the operating system as StoreErrors that begin with `text`."""
    try:
        yield
    except OSError as cause:
        raise refused(cause, text) from cause


def as_path(path: object) -> Path:
    """Return a path that the operating system accepts; raise SpecError for anything else."""
    if not isinstance(path, (str, os.PathLike)):
        raise SpecError(f"path is a {type(path).__name__}, expected text or a path")
    text = os.fspath(path)
    if not isinstance(text, str) or "\0" in text or not text:
        raise SpecError(f"path {text[:80]!r} is not a path; expected text without null characters")
    return Path(text)


class OpenFile:
    """An open file, and a second descriptor past the page cache where the file system has that."""

    def __init__(self, fd: int, *, may_direct: bool = True) -> None:
        self.fd, self._direct_fd, self.may_direct = fd, -1, may_direct
        self._lock = threading.Lock()

    def direct_fd(self, flags: int) -> int:
        """Return the second descriptor, opened with these flags; -1 if there can be none."""
        with self._lock:
            if self.may_direct and self._direct_fd < 0:
                try:
                    # Through the open descriptor: the path may lead to another file by now.
                    path = f"/proc/self/fd/{self.fd}"
                    self._direct_fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
                except OSError:
                    self.may_direct = False
            return self._direct_fd if self.may_direct else -1

    def close(self) -> None:
        fds, self.fd, self._direct_fd = (self.fd, self._direct_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class _StoredFile(OpenFile):
    """A file, its size when it was opened, and the ways of reading it that work."""

    def __init__(self, path: Path, *, unbuffered: bool) -> None:
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe of that name would wait for its writer.
            fd = opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as cause:
            hint = "; raise the limit, ulimit -n" if cause.errno == errno.EMFILE else ""
            raise refused(cause, f"cannot open {str(path)!r}{hint}") from cause
        super().__init__(fd, may_direct=unbuffered)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FormatError(f"{str(path)!r} is not a regular file")
        self.size = status.st_size
        self.may_map = hasattr(os, "RWF_NOWAIT")

    def is_in_place(self) -> bool:
        """True if the path still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except OSError:
            return False

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """True if the window's first, middle and last byte can be read without the disk."""
        if not self.may_map or not nbytes:
            return False
        places = (0, nbytes // 2, nbytes - 1)
        try:
            # A read that must not wait starts the kernel's read-ahead if the page is missing, so
            # it is tried only where mincore reports the page. For a file of another user mincore
            # reports every page: then the read alone decides.
            return self._is_resident(offset, nbytes, places) and all(
                os.preadv(self.fd, [bytearray(1)], offset + at, os.RWF_NOWAIT) == 1 for at in places
            )
        except BlockingIOError:
            return False
        except OSError:  # this file system cannot say: a network mount, FUSE
            self.may_map = False
            return False

    def _is_resident(self, offset: int, nbytes: int, places: Sequence[int]) -> bool:
        """True if these bytes of the window are in the page cache, or the kernel cannot say."""
        size, one, flags = mmap.PAGESIZE, ctypes.c_size_t(1), ctypes.c_ubyte(1)
        with self.mapped(offset, nbytes) as mapping:
            start = np.frombuffer(mapping, np.uint8).ctypes.data + len(mapping) - nbytes
            for at in places:
                page = ctypes.c_void_p((start + at) // size * size)
                if not _LIBC.mincore(page, one, ctypes.byref(flags)) and not flags.value & 1:
                    return False
        return True

    def mapped(self, offset: int, nbytes: int) -> mmap.mmap:
        """Map the window; the mapping starts at the page below `offset`."""
        self._check_size(offset + nbytes)
        below = offset % mmap.ALLOCATIONGRANULARITY
        return mmap.mmap(
            self.fd, below + nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - below
        )

    def read(self, offset: int, nbytes: int, staging: Bytes, *, unbuffered: bool = True) -> Bytes:
        """Read the window into `staging` and return the part that is the window."""
        with store_errors(f"cannot read {str(self.path)!r}"):
            if unbuffered and (fd := self.direct_fd(os.O_RDONLY)) >= 0:
                below = offset % PAGE
                reach = -(-(below + nbytes) // PAGE) * PAGE
                try:
                    self._fill(fd, offset - below, staging[:reach], below + nbytes)
                    return staging[below : below + nbytes]
                except OSError as cause:
                    if cause.errno != errno.EINVAL:
                        raise
                    self.may_direct = False
            self._fill(self.fd, offset, staging[:nbytes], nbytes)
            return staging[:nbytes]

    def read_into(self, offset: int, goals: Sequence[Bytes]) -> None:
        """Read a range into several buffers, as many per call as the system allows."""
        with store_errors(f"cannot read {str(self.path)!r}"):
            for start in range(0, len(goals), _MAX_BUFFERS):
                some = goals[start : start + _MAX_BUFFERS]
                wanted = sum(map(len, some))
                if os.preadv(self.fd, [memoryview(goal) for goal in some], offset) != wanted:
                    at = offset  # cut short by a signal or the end of the file: one by one
                    for goal in some:
                        self._fill(self.fd, at, goal, len(goal))
                        at += len(goal)
                offset += wanted

    def _fill(self, fd: int, offset: int, into: Bytes, needed: int) -> None:
        """Read until `needed` bytes are there; the file may end inside the last page."""
        view, done = memoryview(into), 0
        while done < needed:
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                self._check_size(offset + needed)
                raise FormatError(f"{str(self.path)!r} gave no bytes at {offset + done}")
            done += count

    def _check_size(self, needed: int) -> None:
        size = os.fstat(self.fd).st_size
        if size < needed:
            raise FormatError(
                f"{str(self.path)!r} has {size} bytes, {self.size} when it was opened; "
                f"byte {needed} is wanted"
            )


class LocalStore:
    """The files of one directory, opened when first used and kept open until `close`."""

    def __init__(self, root: str | os.PathLike[str], *, unbuffered: bool = True) -> None:
        self._root, self._unbuffered = Path(root), unbuffered
        self._files: dict[str, _StoredFile] = {}
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        return str(self._root)

    def names(self) -> list[str]:
        with store_errors(f"cannot list {self.place!r}"), os.scandir(self._root) as entries:
            return sorted(entry.name for entry in entries if not entry.is_dir())

    def size(self, name: str) -> int:
        return self._file(name).size

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        into = np.empty(nbytes, np.uint8)
        return self._file(name).read(offset, nbytes, into, unbuffered=False).tobytes()

    @contextmanager
    def window(
        self, name: str, offset: int, nbytes: int, staging: Bytes, *, may_map: bool = True
    ) -> Iterator[Bytes]:
        file = self._file(name)
        if not nbytes:
            yield staging[:0]
            return
        if not (is_cached := file.is_cached(offset, nbytes)) or not may_map:
            yield file.read(offset, nbytes, staging, unbuffered=not is_cached and self._unbuffered)
            return
        try:
            mapping = file.mapped(offset, nbytes)
        except OSError:  # no room for a mapping, or a file system without them
            yield file.read(offset, nbytes, staging, unbuffered=False)
            return
        try:
            yield bytes_of(mapping)[len(mapping) - nbytes :]
        finally:
            with suppress(BufferError):  # a view is still alive; the mapping goes with it
                mapping.close()

    def share_reads(self) -> None:
        self._unbuffered = False

    def is_cached(self, name: str, offset: int, nbytes: int) -> bool:
        return self._file(name).is_cached(offset, nbytes)

    def read_into(self, name: str, offset: int, goals: Sequence[Bytes]) -> None:
        self._file(name).read_into(offset, goals)

    def replaced(self) -> list[str]:
        """Return the names that now belong to other files than those that are open here."""
        with self._lock:
            return sorted(name for name, file in self._files.items() if not file.is_in_place())

    def ways(self, name: str) -> dict[str, bool]:
        """Try which ways of reading work, on a file of at least a page."""
        file = self._file(name)
        file.is_cached(0, 1)
        file.read(0, PAGE, page_memory(PAGE))
        return {"mapped_reads": file.may_map, "unbuffered_reads": file.may_direct}

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def __del__(self) -> None:
        self.close()  # the garbage collector does not close descriptors

    def _file(self, name: str) -> _StoredFile:
        with self._lock:
            if name not in self._files:
                path = self._root / name
                self._files[name] = _StoredFile(path, unbuffered=self._unbuffered)
            return self._files[name]
