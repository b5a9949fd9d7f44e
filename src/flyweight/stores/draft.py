"""Drafts: files written to a hidden directory, made durable, and then visible all at once.

A directory per version is renamed as one. Old engines look for fixed names in a directory of
their own, so there the old files go first, and then each new file gets its name.

This file also clears away the drafts of writers that died, and removes committed directories.
The umask decides who may read the files, as for every other writer of checkpoints.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from flyweight.errors import FormatError
from flyweight.memory import Bytes
from flyweight.stores.draft_file import CacheProbe, DraftFile
from flyweight.stores.local import refused, store_errors
from flyweight.worker_threads import run_on_threads

_HIDDEN = re.compile(r"\.(draft|trash)-.+-[0-9a-f]{8}-[0-9a-f]{16}")
_FOREIGN_SECONDS = 24 * 3600
TURN_SECONDS = 30.0  # a turn is some unlinks, links and a sync: milliseconds
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)


class LocalDraft:
    """Files in a hidden directory, which a commit renames to `place`.

    Two writers of one place both write, and the second to commit is refused. Other processes may
    write files of their own into a draft, as members of the draft with that `name`; they flush,
    and only the process that made the draft commits it.

    Args:
        place: The directory that the commit makes; it must not exist.
        member_of: The name of another process's draft of that place, to join it.
        probe: Decides which writes go past the page cache.
    """

    _is_over = True
    _is_new = True
    """Whether the commit makes the directory; if not, it is there, and the hidden one in it."""

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        member_of: str | None = None,
        probe: CacheProbe | None = None,
    ) -> None:
        self._place, self._is_member = Path(place), member_of is not None
        self._parent = self._place.parent if self._is_new else self._place
        self._probe = probe or CacheProbe()
        self.is_handed_over = False
        """True once a member's files are the committer's to keep or remove."""
        self._files: dict[str, DraftFile] = {}
        self._work, self._work_fd = self._parent / (member_of or self._hidden_name()), -1
        self._pid, self._is_over = os.getpid(), False
        try:
            if self._is_member:
                self._work_fd = _open_directory(self._work)
                return
            if self._parent.exists() and not self._parent.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            _make_directories(self._parent)
            if self._is_new and os.path.lexists(self._place):
                raise _name_taken()
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
            with suppress(BlockingIOError, FileNotFoundError):
                self._work_fd = _open_directory(self._work)
                _lock_directory(self._work_fd)
                if self._work.exists():
                    return
            self._close_work()
            self._work = self._parent / self._hidden_name()
        raise OSError(errno.EAGAIN, "a hundred drafts were swept away as they were made")

    def reserve(self, name: str, nbytes: int) -> None:
        try:
            self._files[name] = DraftFile(self._work / name)
            if nbytes:
                os.posix_fallocate(self._files[name].fd, 0, nbytes)
        except OSError as cause:
            free = shutil.disk_usage(self._parent).free
            text = f"cannot reserve {nbytes} bytes for {name!r} in {str(self._parent)!r}"
            raise refused(cause, f"{text} ({free} bytes free)") from cause

    def write(self, name: str, offset: int, data: Bytes) -> None:
        with store_errors(f"cannot write {name!r} of {self.place!r}"):
            self._files[name].write(offset, data, self._probe)

    def can_go_direct(self, name: str) -> bool:
        """Try whether this file system takes unbuffered writes, on the first page of a file."""
        return self._files[name].can_go_direct()

    def flush(self) -> None:
        """Make all that was written durable, still under its hidden name."""

        def sync(fds: Iterator[int]) -> None:
            for fd in fds:
                os.fsync(fd)

        with store_errors(f"cannot make {self.place!r} durable"):
            run_on_threads([file.fd for file in self._files.values()], sync, 4, "flyweight-sync")
            os.fsync(self._work_fd)

    def commit(self) -> None:
        assert not self._is_member
        self.flush()
        try:
            self._appear()
            _sync_directory(self._parent)
        except OSError as cause:
            if cause.errno == errno.ENOTEMPTY:
                cause = _name_taken()
            raise refused(cause, f"cannot commit {self.place!r}") from cause

    def _appear(self) -> None:
        os.rename(self._work, self._place)  # refuses a place that is not empty

    def has_appeared(self) -> bool:
        """True if the files at the draft's place are those that were written here."""
        try:
            return self._place.is_dir() and all(
                os.path.samestat(os.fstat(file.fd), os.stat(self._place / name))
                for name, file in self._files.items()
            )
        except OSError:
            return False

    def abort(self) -> None:
        """Remove what is under the hidden name; after a commit there is nothing. Safe to repeat."""
        if not self._is_over:
            _in_spite_of_interrupts(self._discard)
            self._is_over = True

    def _discard(self) -> None:
        for file in self._files.values():
            file.close()
        if os.getpid() != self._pid:
            pass  # a forked child has a copy of this object; the draft is its parent's
        elif not self._is_member:
            for _ in range(5):  # a member may have made a file in it meanwhile
                shutil.rmtree(self._work, ignore_errors=True)
                if not self._work.exists():
                    break
                time.sleep(0.02)
        elif not self.is_handed_over:
            # The process that made the draft may be removing it: leave nothing in its way.
            for name in self._files:
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


class LegacyDraft(LocalDraft):
    """Files that a commit puts into `directory`, one by one, after those of `stale` are gone.

    If a name is taken by a file that is not stale, nothing goes and nothing appears. Writers into
    one directory take turns to commit, and `stale` is called within the turn, so that it finds
    what the last writer left.
    """

    _is_new = False

    def __init__(
        self, directory: str | os.PathLike[str], *, stale: Callable[[], Iterable[str]] = tuple
    ) -> None:
        super().__init__(directory)
        self._stale = stale

    def _appear(self) -> None:
        with _turn(self._place):
            old = set(self._stale())
            if any(os.path.lexists(self._place / name) for name in self._files.keys() - old):
                raise _name_taken()
            # First all that is old goes, so that no reader ever finds old and new together.
            for name in old:
                (self._place / name).unlink(missing_ok=True)
            _sync_directory(self._place)
            for name in self._files:
                _give_name(self._work / name, self._place / name)


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: only one writer at a time replaces files in it."""
    fd, deadline = _open_directory(directory), time.monotonic() + TURN_SECONDS
    try:
        while True:
            try:
                _lock_directory(fd)
                break
            except BlockingIOError as cause:
                if time.monotonic() > deadline:
                    text = f"another save has had its lock for {TURN_SECONDS:g} s; save again"
                    raise TimeoutError(errno.ETIMEDOUT, text) from cause
                time.sleep(0.01)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it
        os.close(fd)


def _give_name(hidden: Path, place: Path) -> None:
    """Give a file its name, which must be free; by rename where there are no hard links."""
    try:
        os.link(hidden, place)
    except OSError as cause:
        if cause.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.rename(hidden, place)


def check_hidden_name(name: str) -> str:
    """Return the name of a draft that another process made; anything else raises."""
    if not _HIDDEN.fullmatch(name) or "/" in name:
        raise FormatError(f"{name[:80]!r} is not the name of a draft")
    return name


def _name_taken() -> OSError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock_directory(fd: int) -> None:
    """Take the lock or raise BlockingIOError; a file system without locks does without."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        if cause.errno not in _NO_LOCKS:
            raise


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
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable; a directory we may not open is not ours to sync."""
    try:
        fd = _open_directory(path)
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
    with store_errors(f"cannot list {str(root)!r}"):
        names = [name for name in os.listdir(root) if _HIDDEN.fullmatch(name)]
    for name in sorted(names):
        path = Path(root) / name
        with suppress(OSError):
            fd = _open_directory(path)
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

    with store_errors(f"cannot remove {str(path)!r}"):
        try:
            with suppress(FileNotFoundError):
                os.rename(path, trash)
                _sync_directory(path.parent)
        finally:
            _in_spite_of_interrupts(clear)


def _in_spite_of_interrupts(clear: Callable[[], None]) -> None:
    """Call `clear`, which may be called twice; Ctrl-C takes effect when it is done, or again."""
    try:
        clear()
    except KeyboardInterrupt:
        clear()
        raise
