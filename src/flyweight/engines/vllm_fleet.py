"""Several vLLM engines at once: each has a result of its own, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, sleep

from flyweight.checks import check_seconds
from flyweight.engines.vllm_engine import VllmEngine
from flyweight.errors import FlyweightError
from flyweight.lifecycle.states import State
from flyweight.live import Publisher
from flyweight.ports import UpdateReport

_LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class EngineUpdate:
    """How the update of one of several engines ended."""

    name: str
    report: UpdateReport | None = None
    error: FlyweightError | None = None
    """Why it failed; None if it holds the version."""
    state: State | None = None
    """The state of the engine afterwards; None if it is not known."""
    pause_seconds: float = 0.0
    """How long it answered no requests."""


def update_all(
    engines: Sequence[VllmEngine],
    version: int | None = None,
    *,
    timeout_seconds: float = 60.0,
    on_end: Callable[[EngineUpdate], None] = lambda result: None,
) -> list[EngineUpdate]:
    """Update engines at the same time, each on its own; return how each one ended, in order.

    on_end: called with each result as it is there.
    """
    check_seconds("timeout_seconds", timeout_seconds)

    def update(engine: VllmEngine) -> EngineUpdate:
        try:
            report, error = engine.update(version, timeout_seconds=timeout_seconds), None
        except FlyweightError as failure:
            report, error = None, failure
        paused = 0.0 if report is None else engine.operations.pause_seconds
        result = EngineUpdate(engine.name, report, error, engine.state, paused)
        on_end(result)
        return result

    if not engines:
        return []
    with ThreadPoolExecutor(len(engines), "flyweight-update") as threads:
        try:
            return list(threads.map(update, engines))
        except BaseException:  # Ctrl-C: what is being loaded is loaded whole, the rest ends
            for engine in engines:
                engine.cancel()
            raise


def publish_to(
    engines: Sequence[VllmEngine],
    publisher: Publisher,
    version: int,
    *,
    timeout_seconds: float = 60.0,
) -> list[EngineUpdate]:
    """Publish the model as it is now, and update engines to it; return how each one ended.

    Every rank of the publisher calls this: rank 0 with the engines, the others with none. An engine
    that fails, or is gone, does not delay the others. The model may change once this returns.
    """
    if not engines:
        publisher.publish(version, timeout_seconds=timeout_seconds)
        return []
    deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
    ended: list[EngineUpdate] = []

    def is_ready() -> bool:
        waiting, over = set(publisher.waiting), {each.name for each in ended}
        return all(each.name in over or each.name in waiting for each in engines)

    with ThreadPoolExecutor(1, "flyweight-publish") as thread:
        updating = thread.submit(
            update_all, engines, version, timeout_seconds=timeout_seconds, on_end=ended.append
        )
        try:
            while not is_ready() and monotonic() < deadline:
                sleep(_LOOK_SECONDS)
            publisher.publish(version, timeout_seconds=max(deadline - monotonic(), 1.0))
        except BaseException:
            for engine in engines:
                engine.cancel()
            raise
        return updating.result()
