"""CellFile: create, check, replace and lock the file of a status cell.

A cell is written completely under a temporary name and then linked to its path. A cell that
does not fit is replaced only by a process that has locked all of it, so the cell of a running
engine is never replaced.
"""

from __future__ import annotations

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
from flyweight.host import boot_id, exposure, locked, locked_bytes

PROTOCOL = 2
HEADER = struct.Struct("<8sIIQ16s")  # magic, protocol, ranks, epoch, boot id
REPLACE_SECONDS, RETRY_SECONDS = 0.5, 0.01
"""How long to wait for a process that may be replacing the cell; how often to look."""
_MAGIC = b"FLYWCELL"
_TRIES = 1000
_LIVES = 1 << 62
"""Offset of the bytes that processes lock to show that they run; far beyond the file's end."""


@dataclass(frozen=True)
class CellFile:
    """The path of a cell, and the size and number of ranks that it must have."""

    path: Path
    num_ranks: int
    nbytes: int

    def opened(self) -> int:
        """Open the cell and return its file descriptor; create the cell if there is none.

        A cell that does not fit is replaced if no process has locked it, else LifecycleError.
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
                    # Only the holder of the lock on the current file may replace it.
                    if self.leads_to(file):
                        self._make(should_replace=True)
                elif monotonic() > deadline and self.leads_to(file):
                    raise LifecycleError(
                        f"{str(self.path)!r} {misfit}, and is in use; choose another path"
                    )
                else:
                    sleep(RETRY_SECONDS)  # another process may be replacing it
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        raise LifecycleError(f"status cell {str(self.path)!r} is created and removed repeatedly")

    def _make(self, *, should_replace: bool = False) -> None:
        """Create an empty cell at the path, unless another process has created one."""
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
                cause.errno, f"cannot create status cell {str(self.path)!r}: {cause.strerror}"
            ) from cause

    def _check_cell(self, file: int) -> None:
        """Raise unless the file is a status cell that only this user can access."""
        found = os.fstat(file)
        if whose := exposure(found):
            raise LifecycleError(
                f"{str(self.path)!r} {whose}; a status cell belongs to user {os.geteuid()} and has "
                f"mode 600"
            )
        is_file = stat.S_ISREG(found.st_mode)
        if not is_file or os.pread(file, len(_MAGIC), 0) != _MAGIC:
            raise LifecycleError(f"{str(self.path)!r} is not a status cell; choose another path")

    def _misfit(self, file: int) -> str | None:
        """Return why the file does not fit, or None if it fits."""
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
        """Raise unless the path still leads to this open file."""
        if self.leads_to(file):
            return
        is_there = os.path.exists(self.path)
        what = (
            "was replaced by another run; attach again" if is_there else "was removed while in use"
        )
        raise LifecycleError(f"status cell {str(self.path)!r} {what}")

    def leads_to(self, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(file))
        except OSError:
            return False

    def claimed(self, lock: int, number: int) -> bool:
        """Lock one byte of the cell through `lock`; return False if another process holds it.

        The lock belongs to the open file description, so a forked child must close its copy.
        """
        deadline = monotonic() + REPLACE_SECONDS
        while not (is_locked := locked(lock, number, 1)) and self.leads_to(lock):
            if monotonic() > deadline:
                break
            sleep(RETRY_SECONDS)  # a process that replaces the cell locks all of it briefly
        return is_locked


def begin_life(lock: int) -> int:
    """Lock a byte of its own for this process and return the byte's number, the process's life.

    The lock on a rank's byte shows that some process holds the rank, but not which one: between
    the restart of a rank and its first record, the old record would look like a live one.
    """
    while not locked(lock, _LIVES + (number := monotonic_ns()), 1):
        pass  # another rank started in the same nanosecond
    return number


def is_life_running(file: int, number: int) -> bool:
    """True while the process that holds this life runs."""
    if not 0 < number < _LIVES:
        return False
    # A process that replaces a cell locks all of it, which is not a life.
    return locked_bytes(file, _LIVES + number) == 1


def _boot() -> bytes:
    with suppress(ValueError):
        return UUID(boot_id()).bytes
    return bytes(16)
