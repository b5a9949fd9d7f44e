"""Cell files: how a status cell comes to be where its path says, and who may write what of it.

A cell is made whole beside its place and linked there; one that does not fit is replaced only
by a process that has locked all of it, so a live engine's cell is never taken away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from uuid import UUID

from flyweight.errors import LifecycleError, StoreError
from flyweight.host import boot_id, exposure

PROTOCOL = 2
HEADER = struct.Struct("<8sIIQ16s")  # magic, protocol, ranks, epoch, the boot it is of
REPLACE_SECONDS, RETRY_SECONDS = 0.5, 0.01
"""For how long a lock may be that of a process which replaces the cell; how often to look."""
_MAGIC = b"FLYWCELL"
_TRIES = 1000
_LIVES = 1 << 62
"""Where the bytes begin that stand for lives; a file may be locked far beyond its end."""
_LOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37  # Linux; not every build of Python names them


@dataclass(frozen=True)
class CellFile:
    """The place of a cell, and what it should be."""

    path: Path
    num_ranks: int
    nbytes: int

    def opened(self) -> int:
        """Return the file, made whole and private if there is none.

        A cell that does not fit is replaced if nobody has a claim on it, else refused.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        deadline = monotonic() + REPLACE_SECONDS
        for _ in range(_TRIES):
            try:
                file = os.open(self.path, flags)
            except FileNotFoundError:
                self._make()
                continue
            except OSError as cause:
                raise StoreError(
                    cause.errno, f"status cell {str(self.path)!r}: {cause.strerror}"
                ) from cause
            try:
                self._check_cell(file)
                misfit = self._misfit(file)
                if misfit is None:
                    return file
                if locked(file, 0, 0):
                    # Who holds the lock of the very file that is there is the one to replace it.
                    if self.leads_to(file):
                        self._make(should_replace=True)
                elif monotonic() > deadline and self.leads_to(file):
                    raise LifecycleError(
                        f"{str(self.path)!r} {misfit}, and is in use; choose another path"
                    )
                else:
                    sleep(RETRY_SECONDS)  # another may be replacing it just now
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        raise LifecycleError(f"status cell {str(self.path)!r} is made and removed again and again")

    def _make(self, *, should_replace: bool = False) -> None:
        """Put an empty cell there, whole, unless another process was quicker."""
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, self.nbytes)
                epoch = secrets.randbits(63)
                os.pwrite(file, HEADER.pack(_MAGIC, PROTOCOL, self.num_ranks, epoch, _boot()), 0)
                if should_replace:
                    os.rename(draft, self.path)
                else:
                    with suppress(FileExistsError):
                        os.link(draft, self.path)
            finally:
                os.close(file)
                draft.unlink(missing_ok=True)
        except OSError as cause:
            raise StoreError(
                cause.errno, f"cannot make status cell {str(self.path)!r}: {cause.strerror}"
            ) from cause

    def _check_cell(self, file: int) -> None:
        """Raise unless the file is a status cell, and only the user's."""
        found = os.fstat(file)
        if whose := exposure(found):
            raise LifecycleError(
                f"{str(self.path)!r} {whose}; a status cell is of user {os.geteuid()} with mode 600"
            )
        is_file = stat.S_ISREG(found.st_mode)
        if not is_file or os.pread(file, len(_MAGIC), 0) != _MAGIC:
            raise LifecycleError(f"{str(self.path)!r} is no status cell; choose another path")

    def _misfit(self, file: int) -> str | None:
        """Return what keeps a cell from being this one, or None."""
        head, nbytes = os.pread(file, HEADER.size, 0), os.fstat(file).st_size
        if len(head) < HEADER.size:
            return f"has {nbytes} bytes, a cell of {self.num_ranks} ranks {self.nbytes}"
        _, protocol, num_ranks, _, boot = HEADER.unpack(head)
        if protocol != PROTOCOL:
            return f"has protocol {protocol}, this is {PROTOCOL}"
        if num_ranks != self.num_ranks:
            return f"is for {num_ranks} ranks, expected {self.num_ranks}"
        if nbytes != self.nbytes:
            return f"has {nbytes} bytes, a cell of {num_ranks} ranks {self.nbytes}"
        if boot != _boot():
            return "is from before this machine's start, or another machine's"
        return None

    def check_current(self, file: int) -> None:
        """Raise unless an open cell is the one that the path leads to."""
        try:
            found = os.stat(self.path)
        except OSError as cause:
            raise LifecycleError(
                f"status cell {str(self.path)!r} was removed under its users: {cause.strerror}"
            ) from cause
        if not is_same_file(found, os.fstat(file)):
            raise LifecycleError(
                f"status cell {str(self.path)!r} was replaced by another run; attach again"
            )

    def leads_to(self, file: int) -> bool:
        try:
            return is_same_file(os.stat(self.path), os.fstat(file))
        except FileNotFoundError:
            return False

    def claimed(self, lock: int, number: int) -> bool:
        """Lock one byte of a cell, by a file that is open for that only; False if another has it.

        The lock is the open file's: a forked child must let go of it from the first.
        """
        deadline = monotonic() + REPLACE_SECONDS
        while not (is_locked := locked(lock, number, 1)) and self.leads_to(lock):
            if monotonic() > deadline:
                break
            sleep(RETRY_SECONDS)  # who wants to replace the cell locks all of it for a moment
        return is_locked


def begun_life(lock: int) -> int:
    """Return the number of a life that lasts as long as the open file, however that ends.

    A lock on a claim's byte says that somebody has it, and not who: until a rank that has started
    again says something, the last words of the one before it would be those of a living rank.
    """
    while not locked(lock, _LIVES + (number := monotonic_ns()), 1):
        pass  # another rank began in the same nanosecond
    return number


def is_living(file: int, number: int) -> bool:
    """True while the process lives that began a life of this number; neither waits nor locks.

    The kernel answers for every process that it runs, whatever its number is, and to whom.
    """
    if not 0 < number < _LIVES:
        return False
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LIVES + number, 1, 0)
    try:
        kind, _, _, nbytes, _ = _LOCK.unpack(fcntl.fcntl(file, _F_OFD_GETLK, asked))
    except OSError as cause:
        raise _not_locked(cause) from cause
    # Who replaces a cell locks all of it, to no end: that is nobody's life.
    return bool(kind != fcntl.F_UNLCK and nbytes == 1)


def locked(file: int, offset: int, nbytes: int) -> bool:
    """Lock some bytes, all of them for 0; False if another open file has a lock there.

    The lock is the open file's, so a forked child that closes its copy does not end it.
    """
    lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, nbytes, 0)
    try:
        fcntl.fcntl(file, _F_OFD_SETLK, lock)
    except OSError as cause:
        if cause.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise _not_locked(cause) from cause
    return True


def _not_locked(cause: OSError) -> StoreError:
    return StoreError(cause.errno, f"cannot lock a status cell: {cause.strerror}")


def is_same_file(a: os.stat_result, b: os.stat_result) -> bool:
    """True if two looks were at one file, whatever its name."""
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def _boot() -> bytes:
    with suppress(ValueError):
        return UUID(boot_id()).bytes
    return bytes(16)
