"""VllmEngine: a running vLLM as an engine, and the source of its weights.

It is outside of vLLM, or beside it in the same process. Inside, `vllm_worker.py` is the replica:
each worker of vLLM reads from the publisher, and the workers commit together. `VllmEngine` says
when: it begins an update, pauses vLLM once all workers have staged the version, has them load it,
names the version to vLLM, and resumes. vLLM is never resumed after an update that failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import fields
from secrets import token_hex
from time import monotonic

from flyweight.checks import check_text, check_version
from flyweight.engines.vllm_control import InFlight, LlmControl, control_for
from flyweight.engines.vllm_plugin import BACKEND
from flyweight.engines.vllm_workers import CALL_SECONDS, LEAST_SECONDS, VllmWorkers, own_error
from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    PeerFailed,
    SpecError,
    TransferTimeout,
    listed,
)
from flyweight.events import announce
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.ports import Engine, EngineHooks, UpdateOptions, UpdateReport, Weights
from flyweight.transports.address import parse_address
from flyweight.transports.tls import Tls

_CANCEL_SECONDS = 0.1
"""How soon a pause that waits for requests ends when its update is cancelled."""
_IN_FLIGHT = ("wait", "abort", "keep")
_TLS = tuple(each.name for each in fields(Tls))


class VllmEngine(EngineHooks):
    """One vLLM: a server, an `LLM` or an `AsyncLLM`, started with the backend 'flyweight'."""

    num_ranks = 1
    """vLLM's own workers are ranks of one replica; this is the only rank that controls them."""

    def __init__(
        self,
        server: object,
        address: str,
        *,
        name: str | None = None,
        in_flight: InFlight = "wait",
        staging_bytes: int | None = None,
        should_check_fit: bool = True,
        token_file: str | None = None,
        tls: Mapping[str, str | bool] | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect to a vLLM; it goes on serving.

        server: `http://HOST:PORT` of a server, or an `LLM` or an `AsyncLLM` of this process.
        address: the publisher's address, as vLLM's workers reach it.
        name: the name of the replica in reports; by default the address of the server.
        in_flight: what happens to requests that run when an update begins. 'wait' finishes them,
            'abort' ends them, 'keep' freezes them: they go on with the new weights, after their
            caches were computed anew, and vLLM reports which tokens came from which version.
        staging_bytes: the most memory that each worker takes for what it receives and checks before
            vLLM is paused; by default all workers together take half of what is free. What the
            trainer shares with this host is copied before the pause as far as it fits, and the rest
            during the pause; all else must fit.
        should_check_fit: whether names and shapes are tried on a copy of the model without memory
            before vLLM is touched.
        token_file: a file on the host of vLLM with the publisher's token, if that is at a tcp
            address. The token itself is never sent to vLLM.
        tls: the options of `fw.Tls`, with paths of files on the host of vLLM, if the publisher
            encrypts: `{"authority": PATH}`, with "certificate" and "key" if it demands them.
        api_key: the key of the server; by default the variable VLLM_API_KEY.

        Raises MissingDependency if vLLM lacks a call that updates need, LifecycleError if it runs
        without the backend, and TransportError if it does not answer.
        """
        parse_address(address)
        check_text("name", name)
        if in_flight not in _IN_FLIGHT:
            raise SpecError(f"in_flight is {in_flight!r}, not one of {', '.join(_IN_FLIGHT)}")
        if staging_bytes is not None and (type(staging_bytes) is not int or staging_bytes < 0):
            raise SpecError(f"staging_bytes is {staging_bytes!r}, expected a whole number from 0")
        if unknown := [each for each in tls or () if each not in _TLS]:
            raise SpecError(f"tls has {listed(unknown)}; it may have {', '.join(_TLS)}")
        self._control = control_for(server, api_key)
        self.name = f"vllm {self._control.place}" if name is None else name
        self._in_flight: InFlight = in_flight
        self._how = {
            "address": address,
            "name": self.name,
            "staging_bytes": staging_bytes,
            "should_check_fit": should_check_fit,
            "token_file": token_file,
            "tls": None if tls is None else dict(tls),
        }
        self._failure: FlyweightError | None = None
        """Why vLLM must not be resumed: an update has failed after it touched the weights."""
        self._version: int | None = None
        self._session = ""
        self._report: UpdateReport | None = None
        self._operations: Operations | None = None
        self._is_updating = self._is_cancelled = False
        self._has_loaded = False
        """True if a version was loaded since the last pause; then resuming asks no worker again."""
        self._has_updated = False
        """True once vLLM serves versions, so that the weights of its start are wrong."""
        deadline = monotonic() + CALL_SECONDS
        self._control.check(deadline)
        try:
            self._workers = VllmWorkers(self._control)
        except PeerFailed as error:
            option = f"--weight-transfer-config '{json.dumps({'backend': BACKEND})}'"
            raise LifecycleError(
                f"vLLM at {self._control.place} does not use the weight transfer backend "
                f"{BACKEND!r}; start it with {option} ({error})"
            ) from error
        held = self._workers.held
        if held is not None and self._control.version(deadline) == str(held):
            self._version, self._session = held, self._workers.session  # another VllmEngine's work

    # The engine.

    @property
    def is_paused(self) -> bool:
        """True if vLLM runs no requests at this moment."""
        return self._control.is_paused(monotonic() + CALL_SECONDS)

    @property
    def num_running(self) -> int:
        return self._control.num_running(monotonic() + CALL_SECONDS)

    def pause(self, deadline: float) -> None:
        """Pause vLLM and clear its caches; what happens to requests, `in_flight` says."""
        self._has_loaded = False
        left = deadline - monotonic()
        if left <= 0:
            if self._in_flight == "wait" and (running := self.num_running):
                raise TransferTimeout(f"{running} requests were still running at the deadline")
            deadline = monotonic() + CALL_SECONDS
        if isinstance(self._control, LlmControl):  # it runs in this thread only
            self._control.pause(self._in_flight, deadline)
        else:
            self._pause_in_thread(deadline)

    def _pause_in_thread(self, deadline: float) -> None:
        """Pause, unless the update is cancelled: then vLLM's answer is not waited for.

        The pause may wait for requests that run for long.
        """
        paused: Future[None] = Future()

        def pause() -> None:
            try:
                self._control.pause(self._in_flight, deadline)
                paused.set_result(None)
            except BaseException as error:
                paused.set_exception(error)

        threading.Thread(target=pause, name="flyweight-pause", daemon=True).start()
        while True:
            try:
                return paused.result(_CANCEL_SECONDS)
            except FutureTimeout:
                if paused.done():
                    raise
                if self._is_cancelled:
                    raise TransferTimeout("the update was cancelled while requests ran") from None

    def resume(self, version: int | None) -> None:
        """Let vLLM serve again; raise LifecycleError if its weights are not whole."""
        failure: object = self._failure
        if failure is None and not self._has_loaded:
            self._workers.look()
            if not self._workers.are_whole:
                failure = "an update by another VllmEngine was not completed"
        if failure is not None:
            raise LifecycleError(
                f"vLLM at {self._control.place} is not resumed: its weights are not whole since an "
                f"update failed; update it again ({failure})"
            )
        self._control.resume(monotonic() + CALL_SECONDS)

    def drop_cache(self) -> None:
        """Do nothing: the pause has cleared all caches."""

    def abort_requests(self) -> None:
        """End the requests that run; vLLM is then paused."""
        self._control.pause("abort", monotonic() + CALL_SECONDS)

    def release_weights(self) -> None:
        raise LifecycleError(
            "the memory of vLLM is not released by Flyweight: vLLM serves as soon as it wakes up, "
            "before weights are loaded; use vLLM's own /sleep while nothing is sent to it"
        )

    release_cache = release_weights

    def restore_weights(self) -> None:
        """Do nothing: the memory was never released."""

    # The source of its weights.

    @property
    def version(self) -> int | None:
        """The version that vLLM holds; None before the first, and after an update that failed."""
        return self._version

    @property
    def session(self) -> str:
        return self._session

    @property
    def progress(self) -> float:
        return self._workers.progress

    @property
    def step(self) -> str:
        """What the first worker is at in its update: 'waiting', 'staged', 'loading', or its end."""
        return self._workers.step

    @property
    def failure(self) -> FlyweightError | None:
        """Why vLLM's weights are not whole; None if they are."""
        return self._failure

    def forget(self, reason: str) -> None:
        self._version = None

    def wake(self) -> None:
        self._workers.wake()

    def take(self, options: UpdateOptions) -> UpdateReport:
        """Have vLLM's workers take a version; `options.before` must pause vLLM.

        Raises what ended the update. After an error that touched the weights, vLLM is not resumed
        until an update succeeds.
        """
        deadline = monotonic() + options.timeout_seconds
        update, workers = token_hex(8), self._workers
        request = {
            **self._how,
            "update": update,
            "num_engines": workers.num_engines,
            "version": options.version,
            "held": self._version,
            "may_keep": options.may_keep,
            "verify": options.verify,
        }
        try:
            staged = workers.stage(request, deadline, options.is_over)
            if staged[0]["state"] == "kept":
                return self._report or workers.report()
            version = int(staged[0]["version"])
            if options.before is not None:
                options.before(version)
            self._check_paused(options, max(deadline, monotonic() + LEAST_SECONDS))
        except BaseException as error:
            self._end_early(error, update)
            raise
        try:
            self._failure, self._version = PeerFailed("its weights are being written"), None
            workers.load(update, version, deadline)
        except Exception as error:
            self._failure = own_error(error)
            with self._announced_errors():  # a worker that did not load keeps what it has staged
                workers.cancel(update)
            raise self._failure from error
        self._failure, self._version, self._session = None, version, workers.session
        self._has_loaded = self._has_updated = True
        report = self._report = workers.report()
        done = {"version": version, "nbytes": report.nbytes, "seconds": report.seconds}
        announce("update.done", name=self.name, **done)
        return report

    def _check_paused(self, options: UpdateOptions, deadline: float) -> None:
        """Raise unless the staged version may be loaded now."""
        if options.is_over():
            raise TransferTimeout("the update was cancelled before vLLM's weights were touched")
        if not self._control.is_paused(min(deadline, monotonic() + CALL_SECONDS)):
            raise LifecycleError(
                f"vLLM at {self._control.place} is not paused, and an update would break the "
                f"requests that run; pause it first"
            )

    def _end_early(self, error: BaseException, update: str) -> None:
        """End an update that has touched nothing."""
        are_lost, lost = self._workers.are_lost, self._version
        if are_lost:
            if lost is not None and isinstance(error, FlyweightError):
                error.note(f"it no longer holds version {lost}")
            self._version, self._report, self._failure = None, None, None
        with self._announced_errors():
            self._workers.cancel(update)
            if are_lost and self._has_updated:  # it was restarted, with the weights of its start
                self._control.pause("abort", monotonic() + CALL_SECONDS)

    @contextmanager
    def _announced_errors(self) -> Iterator[None]:
        """Announce an error and go on: the one that ended the update counts."""
        try:
            yield
        except FlyweightError as failure:
            announce("update.failed", name=self.name, version=None, error=str(failure))

    def update(
        self, version: int | None = None, *, timeout_seconds: float = 60.0
    ) -> UpdateReport | None:
        """Update vLLM to a version, or to one newer than it holds, and have it serve that.

        For scripts. An engine that a `Worker` controls gets its updates from there.
        """
        if version is not None:
            check_version(version)
        self._is_updating = True
        try:
            return self.operations.update(
                version, timeout_seconds=timeout_seconds, is_over=lambda: self._is_cancelled
            )
        finally:
            self._is_updating = self._is_cancelled = False

    def cancel(self) -> None:
        """End an `update` in another thread that has not begun to load; vLLM serves on."""
        self._is_cancelled = self._is_updating
        self.wake()

    @property
    def operations(self) -> Operations:
        """The life cycle of this engine: pause, update, resume, and its state."""
        if self._operations is None:
            self._operations = Operations(self, self, is_serving=not self.is_paused)
        return self._operations

    @property
    def state(self) -> State | None:
        """The state of the engine's own `operations`; None before they were used."""
        return None if self._operations is None else self._operations.state


_ENGINE: type[Engine] = VllmEngine  # mypy checks the ports
_WEIGHTS: type[Weights] = VllmEngine
