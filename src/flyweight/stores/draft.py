"""Drafts: files written under a hidden name, durable first and then visible at once.

Also what clears away the drafts of writers that died, and removes what was committed. The umask
says who may read the files, as for every other writer of checkpoints.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from flyweight.errors import FormatError
from flyweight.memory import STAGING, Bytes, page_memory
from flyweight.stores.local import PAGE, refused
from flyweight.worker_threads import run_on_threads

_LARGE_BYTES = 1 << 20
_PROBE_EVERY = 64
_FAST_RATE = 1.5e9  # bytes per second and thread, about half of what pages at hand take
_BOUNCE_BYTES = 4 << 20
_CACHE_PAGE = max(PAGE, mmap.PAGESIZE)
_HIDDEN = re.compile(r"\.(draft|trash)-.+-[0-9a-f]{8}-[0-9a-f]{16}")
_FOREIGN_SECONDS = 24 * 3600
_TURN_SECONDS = 30.0  # a turn is some unlinks, links and a sync: milliseconds
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)


class LocalDraft:
    """Files written under a hidden name beside their place.

    Whole (`into=False`): the hidden directory itself becomes `place`, which must not
    exist; two writers of one place both write, and the second to commit is refused. Other
    processes may write files of their own into it as members, of the draft of that `name`; they
    flush, and only the one who made the draft commits.
    Into (`into=True`): the files appear one by one in a directory, after the files in `stale`
    are gone; if a name is taken by another, nothing goes and nothing appears. Writers of one
    directory take turns at that, and `stale` is walked in the turn: what lists names only then
    finds what the last writer left.
    """

    _is_over = True

    def __init__(
        self, place: str | os.PathLike[str], *, into: bool = False, member_of: str | None = None
    ) -> None:
        self._place, self._into = Path(place), into
        self._is_member = member_of is not None
        self.stale: Iterable[str] = ()
        self.is_handed_over = False
        """True once a member's files are the committer's to keep or remove."""
        self._fds: dict[str, int] = {}
        self._direct_fds: dict[str, int] = {}
        self._buffered: set[str] = set()
        self._num_large, self._cached_rate = 0, 0.0
        self._lock = threading.Lock()
        self._parent = self._place if into else self._place.parent
        self._work, self._work_fd = self._parent / (member_of or self._hidden_name()), -1
        self._pid, self._is_over = os.getpid(), False
        try:
            if self._is_member:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                self._work_fd = os.open(self._work, flags)
                return
            if self._parent.exists() and not self._parent.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            _make_directories(self._parent)
            if not into and os.path.lexists(self._place):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            sweep(self._parent)
            self._begin()
        except BaseException as cause:
            self.abort()
            if isinstance(cause, OSError):
                raise refused(cause, f"cannot write {self.place!r}") from cause
            raise

    @property
    def place(self) -> str:
        return str(self._place)

    @property
    def name(self) -> str:
        """The hidden name, by which other processes can join as members."""
        return self._work.name

    def _hidden_name(self) -> str:
        return f".draft-{self._place.name or 'files'}-{_host()}-{secrets.token_hex(8)}"

    def _begin(self) -> None:
        """Make the hidden directory and hold the lock that tells sweepers its writer lives.

        A sweeper may come between the two and take the directory for a dead writer's: then
        begin again. A file system without locks does without; it has no sweepers either.
        """
        for _ in range(100):
            self._work.mkdir()
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                self._work_fd = os.open(self._work, flags)
                try:
                    fcntl.flock(self._work_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as cause:
                    if cause.errno not in _NO_LOCKS:
                        raise
                if self._work.exists():
                    return
            except (BlockingIOError, FileNotFoundError):
                pass
            self._close_work()
            self._work = self._parent / self._hidden_name()
        raise OSError(errno.EAGAIN, "a hundred drafts were swept away as they were made")

    def reserve(self, name: str, nbytes: int) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fds[name] = os.open(self._work / name, flags, 0o666)
            if nbytes:
                os.posix_fallocate(self._fds[name], 0, nbytes)
        except OSError as cause:
            free = shutil.disk_usage(self._parent).free
            text = f"cannot reserve {nbytes} bytes for {name!r} in {str(self._parent)!r}"
            raise refused(cause, f"{text} ({free} bytes free)") from cause

    def write(self, name: str, offset: int, data: Bytes) -> None:
        # Whole pages can go past the page cache, the ragged ends go through it: no page is
        # written both ways.
        head = -offset % _CACHE_PAGE
        body = (len(data) - head) // _CACHE_PAGE * _CACHE_PAGE
        try:
            if len(data) < _LARGE_BYTES:
                _write_all(self._fds[name], offset, data)
            elif self._is_cache_slow() and self._write_direct(
                name, offset + head, data[head : head + body]
            ):
                _write_all(self._fds[name], offset, data[:head])
                _write_all(self._fds[name], offset + head + body, data[head + body :])
            else:
                self._write_cached(name, offset, data)
        except OSError as cause:
            raise refused(cause, f"cannot write {name!r} of {self.place!r}") from cause

    def _is_cache_slow(self) -> bool:
        """True if writing past the page cache is the better way at the moment.

        Pages that the cache has to be given first, on a virtual machine by the host even, cost
        more than the disk; pages at hand cost less than going past it. So one write in a while
        goes through the cache, and its speed tells.
        """
        with self._lock:
            self._num_large += 1
            return self._num_large % _PROBE_EVERY != 1 and self._cached_rate < _FAST_RATE

    def _write_cached(self, name: str, offset: int, data: Bytes) -> None:
        started = time.perf_counter()
        _write_all(self._fds[name], offset, data)
        self._cached_rate = len(data) / (time.perf_counter() - started)
        if _sync_file_range is not None:  # start the disk now; else it all waits for the fsync
            _sync_file_range(self._fds[name], offset, len(data), 2)

    def _write_direct(self, name: str, offset: int, data: Bytes) -> bool:
        """Write whole pages unbuffered; False if this file system cannot."""
        with self._lock:
            if name in self._buffered:
                return False
            if name not in self._direct_fds:
                try:
                    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT
                    self._direct_fds[name] = os.open(self._work / name, flags)
                except OSError:
                    self._buffered.add(name)
                    return False
            fd = self._direct_fds[name]
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
            with self._lock:  # other threads may be writing by it still: it is closed at the end
                self._buffered.add(name)
            return False

    def can_go_direct(self, name: str) -> bool:
        """Try whether this file system takes unbuffered writes, on the first page of a file."""
        return self._write_direct(name, 0, page_memory(_CACHE_PAGE))

    def flush(self) -> None:
        """Make all that was written durable, under its hidden name still."""
        try:
            left, stop = list(self._fds.values()), threading.Event()

            def sync() -> None:
                with suppress(IndexError):
                    while not stop.is_set():
                        os.fsync(left.pop())

            run_on_threads(sync, min(4, max(1, len(left))), "flyweight-sync", stop)
            os.fsync(self._work_fd)
        except OSError as cause:
            raise refused(cause, f"cannot make {self.place!r} durable") from cause

    def commit(self) -> None:
        assert not self._is_member
        self.flush()
        try:
            if self._into:
                with _turn(self._parent):
                    stale = set(self.stale)
                    fresh = self._fds.keys() - stale
                    if any(os.path.lexists(self._parent / name) for name in fresh):
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                    # First all that is old goes, so that no reader ever finds old and new together.
                    for name in stale:
                        (self._parent / name).unlink(missing_ok=True)
                    sync_directory(self._parent)
                    for name in self._fds:
                        _appear(self._work / name, self._parent / name)
            else:
                os.rename(self._work, self._place)  # refuses a place that is not empty
            sync_directory(self._parent)
        except OSError as cause:
            if cause.errno == errno.ENOTEMPTY:
                cause = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            raise refused(cause, f"cannot commit {self.place!r}") from cause

    def has_appeared(self) -> bool:
        """True if the files that were written here are those at the draft's place by now."""
        try:
            return (
                all(
                    os.path.samestat(os.fstat(fd), os.stat(self._place / name))
                    for name, fd in self._fds.items()
                )
                and self._place.is_dir()
            )
        except OSError:
            return False

    def abort(self) -> None:
        """Remove what is under the hidden name; after a commit there is nothing. Safe to repeat."""
        if not self._is_over:
            _in_spite_of_interrupts(self._discard)
            self._is_over = True

    def _discard(self) -> None:
        for fds in (self._fds, self._direct_fds):
            for name, fd in fds.items():
                fds[name] = -1
                if fd >= 0:
                    os.close(fd)
        if os.getpid() != self._pid:
            pass  # a forked child has a copy of this object; the draft is its parent's
        elif not self._is_member:
            for _ in range(5):  # a member may have made a file in it meanwhile
                shutil.rmtree(self._work, ignore_errors=True)
                if not self._work.exists():
                    break
                time.sleep(0.02)
        elif not self.is_handed_over:
            # The one who made the draft may be removing it: leave nothing in its way.
            for name in self._fds:
                with suppress(OSError):
                    (self._work / name).unlink(missing_ok=True)
        self._close_work()

    def _close_work(self) -> None:
        fd, self._work_fd = self._work_fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LocalDraft:
        return self

    def __exit__(self, *raised: object) -> None:
        self.abort()

    def __del__(self) -> None:
        self.abort()  # Ctrl-C may come before `with` has the draft, or as it leaves


def check_hidden_name(name: str) -> str:
    """Return the name of a draft that another process made; anything else raises."""
    if not _HIDDEN.fullmatch(name) or "/" in name:
        raise FormatError(f"{name[:80]!r} is not the name of a draft")
    return name


def _write_all(fd: int, offset: int, data: Bytes) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _load_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call that starts writing without waiting, where there is one."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_file_range = _load_sync_file_range()


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: of all writers into it one takes away and puts in at a time.

    A file system without locks does without.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as cause:
                if time.monotonic() > deadline:
                    text = f"another save has had its lock for {_TURN_SECONDS:g} s; save again"
                    raise TimeoutError(errno.ETIMEDOUT, text) from cause
                time.sleep(0.01)
            except OSError as cause:
                if cause.errno not in _NO_LOCKS:
                    raise
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it
        os.close(fd)


def _appear(hidden: Path, place: Path) -> None:
    """Give a file its name, which must be free; by rename where there are no hard links."""
    try:
        os.link(hidden, place)
    except OSError as cause:
        if cause.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.rename(hidden, place)


def _host() -> str:
    """Return eight digits for this machine: locks may not be seen from another."""
    return f"{xxhash.xxh3_64_intdigest(platform.node().encode()) >> 32:08x}"


def _make_directories(path: Path) -> None:
    """Make a directory and those above it, each durable before the next."""
    if path.is_dir():
        return
    _make_directories(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; a directory we may not open is not ours to sync."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(root: str | os.PathLike[str]) -> list[str]:
    """Remove the hidden directories of writers that died, and return their names.

    A writer that lives holds a lock. Locks are not seen across machines everywhere, so what
    another machine left is removed only after a day.
    """
    gone = []
    try:
        names = [name for name in os.listdir(root) if _HIDDEN.fullmatch(name)]
    except OSError as cause:
        raise refused(cause, f"cannot list {str(root)!r}") from cause
    for name in sorted(names):
        path = Path(root) / name
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                is_ours = f"-{_host()}-" in name
                if not is_ours and time.time() - os.fstat(fd).st_mtime < _FOREIGN_SECONDS:
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                gone.append(name)
            finally:
                os.close(fd)
    return gone


def remove(path: Path) -> None:
    """Remove a directory so that at no moment it is there and not whole; gone already is fine."""
    trash = path.parent / f".trash-{path.name}-{_host()}-{secrets.token_hex(8)}"

    def clear() -> None:
        with suppress(FileNotFoundError):
            trash.unlink() if trash.is_symlink() else shutil.rmtree(trash)

    try:
        try:
            with suppress(FileNotFoundError):
                os.rename(path, trash)
                sync_directory(path.parent)
        finally:
            _in_spite_of_interrupts(clear)
    except OSError as cause:
        raise refused(cause, f"cannot remove {str(path)!r}") from cause


def _in_spite_of_interrupts(clear: Callable[[], None]) -> None:
    """Call `clear`, which may be called twice; Ctrl-C takes effect when it is done, or again."""
    try:
        clear()
    except KeyboardInterrupt:
        clear()
        raise
