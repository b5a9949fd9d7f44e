"""Legacy cells: FastDeploy's int32 words in /dev/shm, read and written under their old names.

Opened as plain files: `multiprocessing.shared_memory` would have its tracker remove a
segment that others use. Nobody on the other side rings a bell, so waits look every
millisecond. A result never replaces another request than its own (`settle`); against a foreign
process's plain write some 100 ns between look and write remain. Our own cells have none.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Protocol

import msgspec

from flyweight.checks import check_seconds
from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    SpecError,
    StoreError,
    TransferTimeout,
)
from flyweight.host import exposure
from flyweight.lifecycle.cell import Cell, Request
from flyweight.lifecycle.cell_file import is_same_file
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag

MODEL_WEIGHTS = "model_weights_status"
KV_CACHE = "kv_cache_status"
PREFIX_TREE = "prefix_tree_status"
LIVE_SIGNAL = "worker_healthy_live_signal"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the old names are

_NBYTES = 4
_POLL_SECONDS = 0.001
_LOOK_SECONDS = 0.5
"""How often who waits looks whether the cell is still the one its name leads to."""
_ANSWER_SECONDS = 300.0


class LegacyStatus(IntEnum):
    """What an old cell says: two states at rest, and a request for each of them."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


_REQUESTS = (LegacyStatus.UPDATING, LegacyStatus.CLEARING)


class StatusWord(Protocol):
    """A word that others see: ours, or FastDeploy's own wrapper of one."""

    @property
    def value(self) -> Any:
        """An array of one number, to be read and set."""


class LegacyCell:
    """One old word, mapped. `value[0]` is the number itself, as old wrappers have it."""

    def __init__(self, name: str, id: int | str, *, directory: str = SHARED_MEMORY) -> None:
        """Attach to a cell that is there; raise StoreError if none is."""
        self.path = _path(name, id, directory)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(self.path, flags)
        except OSError as cause:
            raise StoreError(
                cause.errno, f"cannot open cell {str(self.path)!r}: {cause.strerror}"
            ) from cause
        try:
            _check_word(self.path, os.fstat(self._file))
            self._memory = mmap.mmap(self._file, _NBYTES)
        except BaseException:
            os.close(self._file)
            raise
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
        """Attach to a cell, which is made with `status` if there is none.

        One that is there may be in use: it stays, and says what it said.
        """
        path = _path(name, id, directory)
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, status.to_bytes(_NBYTES, "little", signed=True))
                with suppress(FileExistsError):
                    os.link(draft, path)  # whole at once: half a word would be refused
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
        return status_of(self)

    def ask(self, request: LegacyStatus) -> None:
        """Ask for something. For the server's side."""
        if request not in _REQUESTS:
            raise SpecError(f"{request!r} is no request; ask for UPDATING or CLEARING")
        self.value[0] = request

    def check_current(self) -> None:
        """Raise if the cell's name leads elsewhere by now: then nobody hears this one."""
        found = None
        with suppress(OSError):
            found = os.stat(self.path)
        if found is None or not is_same_file(found, os.fstat(self._file)):
            raise LifecycleError(
                f"cell {str(self.path)!r} was {'removed' if found is None else 'replaced'} under "
                f"its users; attach again"
            )

    def wait(self, is_so: Callable[[LegacyStatus], bool], timeout_seconds: float) -> LegacyStatus:
        """Wait until something is so of the status, and return it; raise TransferTimeout."""
        return _wait(self, is_so, check_seconds("timeout_seconds", timeout_seconds))

    def close(self) -> None:
        """Let go of the cell, which stays for the others. Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
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


def _check_word(path: Path, found: os.stat_result) -> None:
    """Raise unless a file is one word, and nobody else can write it."""
    if not stat.S_ISREG(found.st_mode) or found.st_size != _NBYTES:
        raise LifecycleError(
            f"cell {str(path)!r} has {found.st_size} bytes, an int32 has {_NBYTES}; it is "
            f"something else"
        )
    if whose := exposure(found, bits=0o022):
        raise LifecycleError(
            f"cell {str(path)!r} {whose}; expected user {os.geteuid()} and mode 600"
        )


def status_of(cell: StatusWord) -> LegacyStatus:
    """Return what a cell says; raise LifecycleError for a number that means nothing."""
    number = int(cell.value[0])
    try:
        return LegacyStatus(number)
    except ValueError as cause:
        known = ", ".join(f"{each.name} {each.value}" for each in LegacyStatus)
        raise LifecycleError(f"a status cell says {number}, expected {known}") from cause


def settle(cell: StatusWord, result: LegacyStatus, *, of: LegacyStatus) -> bool:
    """Write how a request ended; False if the cell asks for something else by now.

    A failure has no number of its own. CLEARED is written after an update that failed: NORMAL
    would tell whoever asked for it that the new version is served.
    """
    if status_of(cell) in {*_REQUESTS} - {of}:
        return False
    cell.value[0] = int(result)
    return True


def _wait(
    cell: StatusWord, is_so: Callable[[LegacyStatus], bool], seconds: float | None
) -> LegacyStatus:
    """Wait until something is so; without a time as long as the cell is the one that is named."""
    deadline = None if seconds is None else monotonic() + seconds
    look_at = monotonic() + _LOOK_SECONDS
    while not is_so(status := status_of(cell)):
        now = monotonic()
        if deadline is not None and now >= deadline:
            raise TransferTimeout(f"the status cell still says {status.name} after {seconds:g} s")
        if now >= look_at:
            look_at = now + _LOOK_SECONDS
            if isinstance(cell, LegacyCell):
                cell.check_current()
        sleep(_POLL_SECONDS)
    return status


def tell_alive(id: int | str, rank: int, *, directory: str = SHARED_MEMORY) -> bool:
    """Write the time into a rank's word of FastDeploy's live signal; False if there is none.

    The engine's health check counts a worker as dead once that word is 30 s old.
    """
    path = _path(LIVE_SIGNAL, id, directory)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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


class LoopWord:
    """A status cell of ours, as the word that FastDeploy's worker loop looks at.

    Each rank has its own. A request for weights waits here for the loop, which alone can stop
    requests; other requests do not need it.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        """Say what `state` says while nothing is asked for."""
        self._state, self._changed = state, threading.Condition()
        self.is_watched = False
        """Whether a worker loop looks at it."""
        self._request: Request | None = None
        self._error: FlyweightError | None = None

    @property
    def value(self) -> LoopWord:
        return self

    @property
    def is_asked(self) -> bool:
        """True while a request waits for the loop, or is being done by it."""
        return self._request is not None

    @property
    def version(self) -> int | None:
        """The version that is asked for at this moment, if it is asked for by its number."""
        request = self._request
        return None if request is None else request.version

    def __getitem__(self, index: int) -> int:
        request = self._request
        if request is not None:
            return _asked(request)
        return LegacyStatus.NORMAL if self._state() is State.SERVING else LegacyStatus.CLEARED

    def __setitem__(self, index: int, status: int) -> None:
        """Tell how the request ended; it failed if that is not the state it asked for."""
        with self._changed:
            if self._request is None:
                return
            is_update = _asked(self._request) is LegacyStatus.UPDATING
            is_done = status == (LegacyStatus.NORMAL if is_update else LegacyStatus.CLEARED)
            if not is_done and self._error is None:
                self._error = LifecycleError("the worker loop did not do it; see its log")
            self._request = None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Keep why the request is about to fail."""
        with self._changed:
            if self._request is not None and self._error is None:
                told = error if isinstance(error, FlyweightError) else None
                self._error = told or LifecycleError(f"{type(error).__name__}: {error}")

    def carry_out(self, request: Request, do: Callable[[Request], None]) -> None:
        """Have the loop do what changes weights, if there is one, and `do` the rest."""
        tags = frozenset(request.tags) or ALL_TAGS
        is_restore = request.signal is Signal.RESTORE
        is_held = is_restore and self._state() is State.SERVING
        is_weights = request.signal in (Signal.UPDATE, Signal.CLEAR, Signal.RESTORE)
        if not self.is_watched or not is_weights or Tag.WEIGHTS not in tags or is_held:
            do(request)
            return
        others = tuple(tags - {Tag.WEIGHTS}) if request.signal is not Signal.UPDATE else ()
        rest = msgspec.structs.replace(request, tags=others, should_resume=False)
        if others and is_restore:  # the engine serves with weights only once it has a cache
            do(rest)
        self._handed(request)
        if others and not is_restore:
            do(rest)

    def _handed(self, request: Request) -> None:
        with self._changed:
            self._request, self._error = request, None
            seconds = max(min(request.deadline - monotonic(), request.timeout_seconds), 0.0)
            is_told = self._changed.wait_for(lambda: self._request is not request, seconds)
            self._request, error = None, self._error
        if not is_told:
            raise TransferTimeout(
                f"the worker loop did not answer {request.signal} in check_model_weights_status "
                f"within {seconds:g} s"
            )
        if error is not None:
            raise error


def _asked(request: Request) -> LegacyStatus:
    is_clear = request.signal is Signal.CLEAR
    return LegacyStatus.CLEARING if is_clear else LegacyStatus.UPDATING


class Runner(Protocol):
    """What FastDeploy's model runner does for its worker loop."""

    def clear_requests(self) -> None: ...

    def update_parameters(self, pid: int) -> None: ...

    def clear_parameters(self, pid: int) -> None: ...


def check_model_weights_status(
    model_weights_status: StatusWord | Cell,
    kv_cache_status: StatusWord | None,
    model_runner: Runner,
    pid: int,
    block: bool,
    *,
    timeout_seconds: float = _ANSWER_SECONDS,
) -> None:
    """Do what the weights' cell asks for, and return once it says NORMAL, or CLEARED.

    With `block` stay until it says NORMAL, as long as the cell is there. What the runner raises
    is raised, with the cell back at what is true, so that the next request is heard; the rank that
    writes results is given `timeout_seconds` for each. The cell is an old one, or one of ours that
    the runner's manager has as its `cell`.
    """
    weights = _word(model_weights_status, model_runner)
    seconds = check_seconds("timeout_seconds", timeout_seconds)
    while (status := status_of(weights)) is not LegacyStatus.NORMAL:
        if status in _REQUESTS:
            _answer(
                weights, kv_cache_status, model_runner, pid=pid, request=status, seconds=seconds
            )
        elif block:
            _wait(weights, lambda now: now is not LegacyStatus.CLEARED, None)
        else:
            return


def _word(cell: StatusWord | Cell, runner: Runner) -> StatusWord:
    if not isinstance(cell, Cell):
        return cell
    manager = getattr(runner, "dynamic_weight_manager", None)
    if manager is None:
        raise SpecError(
            "a status cell of flyweight was passed, and the runner has no dynamic_weight_manager; "
            "pass the manager's model_weights_status"
        )
    word: StatusWord = manager.model_weights_status
    return word


def _answer(
    weights: StatusWord,
    cache: StatusWord | None,
    runner: Runner,
    *,
    pid: int,
    request: LegacyStatus,
    seconds: float,
) -> None:
    """Have the runner do what is asked, and wait until the first rank has said so."""
    # One word, one writer: a late rank would ask again, or fail, for what is over already.
    is_first = getattr(getattr(runner, "parallel_config", None), "tensor_parallel_rank", 0) == 0
    tells = is_first or isinstance(weights, LoopWord)  # of which each rank has its own
    cache_before = LegacyStatus.CLEARED
    if cache is not None and is_first:
        found = status_of(cache)
        cache_before = LegacyStatus.CLEARED if found in _REQUESTS else found
        cache.value[0] = int(request)
    try:
        runner.clear_requests()
        if request is LegacyStatus.UPDATING:
            runner.update_parameters(pid)
        else:
            runner.clear_parameters(pid)
    except BaseException as error:
        if isinstance(weights, LoopWord):
            weights.fail(error)
        # A manager that failed has told what is true already. If it was never reached, nothing
        # is known to be whole, and CLEARED is what may not be served.
        if tells and status_of(weights) is request:
            settle(weights, LegacyStatus.CLEARED, of=request)
        if is_first and cache is not None and status_of(cache) is request:
            settle(cache, cache_before, of=request)
        raise
    try:
        result = _wait(weights, lambda now: now is not request, seconds)
    except TransferTimeout as error:
        settle(weights, LegacyStatus.CLEARED, of=request)  # whoever should tell is gone
        error.note("the first rank, which tells results, did not")
        raise
    if request is LegacyStatus.UPDATING and result is LegacyStatus.CLEARED:
        raise LifecycleError("the update failed on the rank that tells results; see its error")
