"""FastDeploy's int32 status cells in /dev/shm, read and written under their old names.

A cell is opened as a plain file: the resource tracker of `multiprocessing.shared_memory` would
remove a segment that other processes use. The other side never signals a change, so waits poll
every millisecond. A result never overwrites another request than its own (`settle`); between its
look and its write, about 100 ns, a plain write of a foreign process can still be lost.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Protocol

from flyweight.checks import check_seconds
from flyweight.errors import LifecycleError, SpecError, StoreError, TransferTimeout
from flyweight.host import exposure

MODEL_WEIGHTS = "model_weights_status"
KV_CACHE = "kv_cache_status"
PREFIX_TREE = "prefix_tree_status"
LIVE_SIGNAL = "worker_healthy_live_signal"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the directory of the old names

_NBYTES = 4
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_POLL_SECONDS = 0.001
_CHECK_SECONDS = 0.5
"""How often a wait checks that the cell's path still leads to it."""


class LegacyStatus(IntEnum):
    """The numbers in an old cell: two states, and a request for each of them."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


REQUESTS = (LegacyStatus.UPDATING, LegacyStatus.CLEARING)


class StatusCell(Protocol):
    """A status cell as FastDeploy sees it: `LegacyCell`, or FastDeploy's own wrapper of one."""

    @property
    def value(self) -> Any:
        """An array of one number, to be read and set."""


class LegacyCell:
    """An old cell, mapped into memory. `value[0]` is its number, as in FastDeploy's wrapper.

    Args:
        name: which cell, for example `MODEL_WEIGHTS`.
        id: the engine's id, which ends the file name; FastDeploy uses a pid or a port.
        directory: where the cells are.

    Raises StoreError if the cell does not exist; `create` makes it.
    """

    def __init__(self, name: str, id: int | str, *, directory: str = SHARED_MEMORY) -> None:
        self.path = _path(name, id, directory)
        try:
            file = os.open(self.path, _OPEN_FLAGS)
        except OSError as cause:
            raise StoreError(
                cause.errno, f"cannot open cell {str(self.path)!r}: {cause.strerror}"
            ) from cause
        try:
            self._stat = found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != _NBYTES:
                raise LifecycleError(
                    f"{str(self.path)!r} has {found.st_size} bytes, an int32 has {_NBYTES}; it is "
                    f"no status cell"
                )
            if whose := exposure(found, bits=0o022):
                raise LifecycleError(
                    f"cell {str(self.path)!r} {whose}; expected user {os.geteuid()} and mode 600"
                )
            self._memory = mmap.mmap(file, _NBYTES)
        finally:
            os.close(file)
        self.value = memoryview(self._memory).cast("i")

    @classmethod
    def create(
        cls,
        name: str,
        id: int | str,
        status: LegacyStatus = LegacyStatus.NORMAL,
        *,
        directory: str = SHARED_MEMORY,
    ) -> LegacyCell:
        """Open a cell, and make it with `status` if there is none.

        A cell that exists may be in use, so it keeps its number.
        """
        path = _path(name, id, directory)
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, status.to_bytes(_NBYTES, "little", signed=True))
                with suppress(FileExistsError):
                    os.link(draft, path)  # nobody may see a file of less than four bytes
            finally:
                os.close(file)
                draft.unlink(missing_ok=True)
        except OSError as cause:
            raise StoreError(
                cause.errno, f"cannot make cell {str(path)!r}: {cause.strerror}"
            ) from cause
        return cls(name, id, directory=directory)

    @property
    def status(self) -> LegacyStatus:
        """The cell's number; raises LifecycleError if it is none of the four."""
        return status_of(self)

    def ask(self, request: LegacyStatus) -> None:
        """Write a request, UPDATING or CLEARING. The server's side calls this."""
        if request not in REQUESTS:
            raise SpecError(f"{request!r} is no request; ask for UPDATING or CLEARING")
        self.value[0] = request

    def check_current(self) -> None:
        """Raise LifecycleError if the cell's path leads to another file, or to none."""
        found = None
        with suppress(OSError):
            found = os.stat(self.path)
        if found is None or not os.path.samestat(found, self._stat):
            raise LifecycleError(
                f"cell {str(self.path)!r} was {'removed' if found is None else 'replaced'} while "
                f"it was in use; attach again"
            )

    def wait(self, is_done: Callable[[LegacyStatus], bool], timeout_seconds: float) -> LegacyStatus:
        """Wait until `is_done(status)`, and return the status; raise TransferTimeout."""
        return wait_for(self, is_done, check_seconds("timeout_seconds", timeout_seconds))

    def close(self) -> None:
        """Unmap the cell, which stays for other processes. Safe to repeat."""
        self.value.release()
        self._memory.close()

    def __enter__(self) -> LegacyCell:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _path(name: str, id: int | str, directory: str) -> Path:
    whole = f"{name}.{id}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", whole):
        raise SpecError(f"a cell named {whole!r}; letters, digits, '_', '.' and '-' make a name")
    return Path(directory) / whole


def status_of(cell: StatusCell) -> LegacyStatus:
    """Return a cell's status; raise LifecycleError for a number that is none."""
    number = int(cell.value[0])
    try:
        return LegacyStatus(number)
    except ValueError as cause:
        known = ", ".join(f"{each.name} {each.value}" for each in LegacyStatus)
        raise LifecycleError(f"a status cell says {number}, expected {known}") from cause


def settle(cell: StatusCell, result: LegacyStatus, *, of: LegacyStatus) -> bool:
    """Write the result of a request; return False if the cell has another request by now.

    There is no number for a failure. After a failed update write CLEARED: NORMAL would tell the
    caller that the new version is served.
    """
    if status_of(cell) in {*REQUESTS} - {of}:
        return False
    cell.value[0] = int(result)
    return True


def wait_for(
    cell: StatusCell, is_done: Callable[[LegacyStatus], bool], seconds: float | None
) -> LegacyStatus:
    """Wait until `is_done(status)`; with `seconds` None, as long as the cell's path leads to it."""
    deadline = None if seconds is None else monotonic() + seconds
    check_at = monotonic() + _CHECK_SECONDS
    while not is_done(status := status_of(cell)):
        now = monotonic()
        if deadline is not None and now >= deadline:
            raise TransferTimeout(f"the status cell still says {status.name} after {seconds:g} s")
        if now >= check_at:
            check_at = now + _CHECK_SECONDS
            if isinstance(cell, LegacyCell):
                cell.check_current()
        sleep(_POLL_SECONDS)
    return status


def write_live_signal(id: int | str, rank: int) -> bool:
    """Write the time into a rank's int32 of FastDeploy's live signal; False if there is none.

    The engine's health check counts a worker as dead once this time is 30 s old.
    """
    try:
        file = os.open(_path(LIVE_SIGNAL, id, SHARED_MEMORY), _OPEN_FLAGS)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(file)
        is_signal = stat.S_ISREG(found.st_mode) and not exposure(found, bits=0o022)
        if not is_signal or found.st_size < _NBYTES * (rank + 1):
            return False
        os.pwrite(file, struct.pack("<i", int(time())), _NBYTES * rank)
        return True
    finally:
        os.close(file)
