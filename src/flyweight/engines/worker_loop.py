"""FastDeploy's worker loop: `check_model_weights_status` does what a status cell requests.

The cell is an old one, or `WorkerLoopCell`, which shows the requests of a status cell of ours
as the old numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import msgspec

from flyweight.checks import check_seconds
from flyweight.engines.legacy_cells import (
    REQUESTS,
    LegacyStatus,
    StatusCell,
    settle,
    status_of,
    wait_for,
)
from flyweight.errors import FlyweightError, LifecycleError, SpecError, TransferTimeout
from flyweight.lifecycle.cell import Cell, Request
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag

_RESULT_SECONDS = 300.0


class WorkerLoopCell:
    """A status cell of ours as the worker loop sees it: `value[0]` is an old number, to be read.

    Each rank has its own. A request that changes weights waits here for the loop, because only
    the loop can stop requests; other requests do not wait.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        """Show the engine state that `state` returns while there is no request."""
        self._state, self._changed = state, threading.Condition()
        self.has_loop = False
        """Whether a worker loop looks at this cell."""
        self.request: Request | None = None
        """The request that waits for the loop, or that the loop carries out."""
        self._error: FlyweightError | None = None

    @property
    def value(self) -> tuple[LegacyStatus]:
        request = self.request
        if request is not None:
            is_clear = request.signal is Signal.CLEAR
            return (LegacyStatus.CLEARING if is_clear else LegacyStatus.UPDATING,)
        is_served = self._state() is State.SERVING
        return (LegacyStatus.NORMAL if is_served else LegacyStatus.CLEARED,)

    def carry_out(self, request: Request, do: Callable[[Request], None]) -> None:
        """Let the loop, if there is one, do what changes weights; `do` the rest."""
        tags = frozenset(request.tags) or ALL_TAGS
        is_restore = request.signal is Signal.RESTORE
        is_held = is_restore and self._state() is State.SERVING
        is_weights = request.signal in (Signal.UPDATE, Signal.CLEAR, Signal.RESTORE)
        if not self.has_loop or not is_weights or Tag.WEIGHTS not in tags or is_held:
            do(request)
            return
        others = tuple(tags - {Tag.WEIGHTS}) if request.signal is not Signal.UPDATE else ()
        rest = msgspec.structs.replace(request, tags=others, should_resume=False)
        if others and is_restore:  # the engine serves with weights only once it has a cache
            do(rest)
        self._wait_for_loop(request)
        if others and not is_restore:
            do(rest)

    def _wait_for_loop(self, request: Request) -> None:
        with self._changed:
            self.request, self._error = request, None
            seconds = max(min(request.deadline - monotonic(), request.timeout_seconds), 0.0)
            is_done = self._changed.wait_for(lambda: self.request is not request, seconds)
            self.request, error = None, self._error
        if not is_done:
            raise TransferTimeout(
                f"the worker loop did not answer {request.signal} in check_model_weights_status "
                f"within {seconds:g} s"
            )
        if error is not None:
            raise error

    @contextmanager
    def answering(self, status: LegacyStatus) -> Iterator[None]:
        """Carry out in the block what `status` requests, and tell the requester how it ended."""
        request = self.request
        error: FlyweightError | None = None
        try:
            yield
            state = self._state()
            if (state is State.SERVING) is not (status is LegacyStatus.UPDATING):
                raise LifecycleError(f"the runner returned from {status.name}, engine is {state}")
        except BaseException as cause:
            error = LifecycleError(f"{type(cause).__name__}: {cause}")
            if isinstance(cause, FlyweightError):
                error = cause
            raise
        finally:
            with self._changed:
                if request is not None and self.request is request:  # else it was given up
                    self.request, self._error = None, error
                    self._changed.notify_all()


class Runner(Protocol):
    """What the worker loop calls on FastDeploy's model runner."""

    def clear_requests(self) -> None: ...

    def update_parameters(self, pid: int) -> None: ...

    def clear_parameters(self, pid: int) -> None: ...


def check_model_weights_status(
    model_weights_status: StatusCell | Cell,
    kv_cache_status: StatusCell | None,
    model_runner: Runner,
    pid: int,
    block: bool,
    *,
    timeout_seconds: float = _RESULT_SECONDS,
) -> None:
    """Carry out what the cell requests, and return once it says NORMAL or CLEARED.

    Raises what the runner raises; the cell then says CLEARED, or NORMAL if the version from
    before is served, so that the next request is accepted.

    Args:
        model_weights_status: the weights' cell: an old one, the manager's
            `model_weights_status`, or the `Cell` that the runner's manager has as its `cell`.
        kv_cache_status: the cache's cell, which gets the same request; None if there is none.
        model_runner: stops requests and calls the manager.
        pid: the engine's id, passed to the runner.
        block: stay until the cell says NORMAL, as long as the cell exists.
        timeout_seconds: how long to wait for the first rank's result of each request.
    """
    weights: StatusCell
    if isinstance(model_weights_status, Cell):
        manager = getattr(model_runner, "dynamic_weight_manager", None)
        if manager is None:
            raise SpecError(
                "the status cell is a flyweight Cell, and the runner has no "
                "dynamic_weight_manager; pass the manager's model_weights_status"
            )
        weights = manager.model_weights_status
    else:
        weights = model_weights_status
    seconds = check_seconds("timeout_seconds", timeout_seconds)
    while (status := status_of(weights)) is not LegacyStatus.NORMAL:
        if status in REQUESTS and isinstance(weights, WorkerLoopCell):
            with weights.answering(status):
                _call_runner(status, weights, kv_cache_status, model_runner, pid)
        elif status in REQUESTS:
            _call_runner(status, weights, kv_cache_status, model_runner, pid)
            _wait_for_result(status, weights, seconds)
        elif block:
            wait_for(weights, lambda now: now is not LegacyStatus.CLEARED, None)
        else:
            return


def _call_runner(
    request: LegacyStatus, weights: StatusCell, cache: StatusCell | None, runner: Runner, pid: int
) -> None:
    """Call the runner; if that fails, write what is true into the cells that this rank writes."""
    # Only the first rank writes an old cell: a late rank would overwrite the next request.
    is_first = getattr(getattr(runner, "parallel_config", None), "tensor_parallel_rank", 0) == 0
    after_failure: list[tuple[StatusCell, LegacyStatus]] = []
    if is_first and not isinstance(weights, WorkerLoopCell):
        # A manager that failed has written the result already. If it was never called, the
        # weights may be incomplete, and CLEARED says that they must not be served.
        after_failure.append((weights, LegacyStatus.CLEARED))
    if is_first and cache is not None:
        before = status_of(cache)
        after_failure.append((cache, LegacyStatus.CLEARED if before in REQUESTS else before))
        cache.value[0] = int(request)
    try:
        runner.clear_requests()
        if request is LegacyStatus.UPDATING:
            runner.update_parameters(pid)
        else:
            runner.clear_parameters(pid)
    except BaseException:
        for cell, status in after_failure:
            if status_of(cell) is request:
                cell.value[0] = int(status)
        raise


def _wait_for_result(request: LegacyStatus, weights: StatusCell, seconds: float) -> None:
    try:
        result = wait_for(weights, lambda now: now is not request, seconds)
    except TransferTimeout as error:
        settle(weights, LegacyStatus.CLEARED, of=request)  # the first rank is gone
        error.note("the first rank, which writes results, did not")
        raise
    if request is LegacyStatus.UPDATING and result is LegacyStatus.CLEARED:
        raise LifecycleError("the update failed on the rank that tells results; see its error")
