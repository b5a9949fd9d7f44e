"""VllmEngine: a running vLLM as an engine, and the source of its weights.

It is outside of vLLM, or beside it in the same process. Inside, `vllm_worker.py` is the replica:
each worker of vLLM reads from the publisher, and the workers commit together. `VllmEngine` says
when: it begins an update, pauses vLLM once all workers have staged the version, has them load it,
names the version to vLLM, and resumes. vLLM is never resumed after an update that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex
from threading import Event
from time import monotonic, perf_counter
from typing import Any

from flyweight.checks import check_seconds, check_text, check_version
from flyweight.engines.vllm_control import InFlight, control_for
from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    PeerFailed,
    PeerLost,
    SpecError,
    TransferTimeout,
    VersionError,
    error_named,
)
from flyweight.events import announce
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.live.tcp_address import parse_address
from flyweight.ports import Engine, EngineHooks, UpdateOptions, UpdateReport, Weights

STAGING_BYTES = 1 << 30
_CALL_SECONDS = 10.0
"""The time for a call that does not wait for requests or weights."""
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.005, 0.25
"""How soon workers are asked for their status, at first and then at the most."""
_ANSWER_SECONDS = 15.0
"""How much longer than its own deadline a load may take to answer."""
_ENDS = ("done", "kept", "failed")
_IN_FLIGHT = ("wait", "abort", "keep")


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
        staging_bytes: int = STAGING_BYTES,
        should_check_fit: bool = True,
        token_file: str | None = None,
        server_key_file: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect to a vLLM; it goes on serving.

        server: `http://HOST:PORT` of a server, or an `LLM` or an `AsyncLLM` of this process.
        address: the publisher's address, as vLLM's workers reach it.
        name: the name of the replica in reports; by default the address of the server.
        in_flight: what happens to requests that run when an update begins. 'wait' finishes them,
            'abort' ends them, 'keep' freezes them: they go on with the new weights, after their
            caches were computed anew, and vLLM reports which tokens came from which version.
        staging_bytes: how much of a version each worker receives and checks before vLLM is paused.
            The rest is received while it is paused.
        should_check_fit: whether names and shapes are tried on a copy of the model without memory
            before vLLM is touched.
        token_file, server_key_file: files on the host of vLLM with the publisher's token, and with
            its public key, if it is at a tcp address. The token itself is never sent to vLLM.
        api_key: the key of the server; by default the variable VLLM_API_KEY.

        Raises MissingDependency if vLLM lacks a call that updates need, LifecycleError if it runs
        without the backend, and TransportError if it does not answer.
        """
        parse_address(address)
        check_text("name", name)
        if in_flight not in _IN_FLIGHT:
            raise SpecError(f"in_flight is {in_flight!r}, not one of {', '.join(_IN_FLIGHT)}")
        if type(staging_bytes) is not int or staging_bytes < 0:
            raise SpecError(f"staging_bytes is {staging_bytes!r}, expected a whole number from 0")
        self._control = control_for(server, api_key)
        self.name = f"vllm {self._control.place}" if name is None else name
        self._in_flight: InFlight = in_flight
        self._how = {
            "address": address,
            "name": self.name,
            "staging_bytes": staging_bytes,
            "should_check_fit": should_check_fit,
            "token_file": token_file,
            "server_key_file": server_key_file,
        }
        self._woken = Event()
        self._failure: FlyweightError | None = None
        """Why vLLM must not be resumed: an update has failed after it touched the weights."""
        self._version: int | None = None
        self._session = ""
        self._report: UpdateReport | None = None
        self._status: list[dict[str, Any]] = []
        self._operations: Operations | None = None
        deadline = monotonic() + _CALL_SECONDS
        self._control.check(deadline)
        self._boots = self._boots_of(self._look(deadline))
        self._adopt(self._control.version(deadline))

    def _adopt(self, text: str) -> None:
        """Hold the version that an earlier VllmEngine has loaded, if the workers know it."""
        held = {each["held"] for each in self._status}
        if len(held) == 1 and text == str(found := held.pop()) and type(found) is int:
            self._version, self._session = found, str(self._status[0].get("session", ""))

    # The engine.

    @property
    def is_paused(self) -> bool:
        """True if vLLM runs no requests at this moment."""
        return self._control.is_paused(monotonic() + _CALL_SECONDS)

    @property
    def num_running(self) -> int:
        return self._control.num_running(monotonic() + _CALL_SECONDS)

    def pause(self, deadline: float) -> None:
        """Pause vLLM and clear its caches; what happens to requests, `in_flight` says."""
        left = deadline - monotonic()
        if left <= 0:
            if self._in_flight == "wait" and (running := self.num_running):
                raise TransferTimeout(f"{running} requests were still running at the deadline")
            deadline = monotonic() + _CALL_SECONDS
        self._control.pause(self._in_flight, deadline)

    def resume(self, version: int | None) -> None:
        """Let vLLM serve again; raise LifecycleError if its weights are not whole."""
        if self._failure is not None:
            raise LifecycleError(
                f"vLLM at {self._control.place} is not resumed: its weights are not whole since an "
                f"update failed; update it again ({self._failure})"
            )
        self._control.resume(monotonic() + _CALL_SECONDS)

    def drop_cache(self) -> None:
        """Do nothing: the pause has cleared all caches."""

    def abort_requests(self) -> None:
        """End the requests that run; vLLM is then paused."""
        self._control.pause("abort", monotonic() + _CALL_SECONDS)

    def release_weights(self) -> None:
        raise LifecycleError(
            "the memory of vLLM's weights is not released by Flyweight: vLLM serves as soon as it "
            "wakes up, before weights are loaded; use vLLM's own /sleep while nothing is sent to it"
        )

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
        found = [float(each.get("progress", 0.0)) for each in self._status]
        return sum(found) / len(found) if found else 0.0

    @property
    def failure(self) -> FlyweightError | None:
        """Why vLLM's weights are not whole; None if they are."""
        return self._failure

    def forget(self, reason: str) -> None:
        self._version = None

    def wake(self) -> None:
        self._woken.set()

    def take(self, options: UpdateOptions) -> UpdateReport:
        """Have vLLM's workers take a version; `options.before` must pause vLLM.

        Raises what ended the update. After an error that touched the weights, vLLM is not resumed
        until an update succeeds.
        """
        started, deadline = perf_counter(), monotonic() + options.timeout_seconds
        update = token_hex(8)
        try:
            staged = self._stage(update, options, deadline)
            waited = perf_counter() - started
            if all(each["state"] == "kept" for each in staged) and self._report is not None:
                return self._report
            version = int(staged[0]["version"])
            if options.before is not None:
                options.before(version)
            if not self._control.is_paused(monotonic() + _CALL_SECONDS):
                raise LifecycleError(
                    f"vLLM at {self._control.place} is not paused, and an update would break the "
                    f"requests that run; pause it first"
                )
        except BaseException:
            self._cancel(update)
            raise
        loading = perf_counter()
        try:
            self._failure, self._version = PeerFailed("its weights are being written"), None
            self._load(update, version, deadline)
        except BaseException as error:
            self._failure = self._as_own(error)
            raise self._failure from error
        self._failure, self._version = None, version
        self._session = str(self._status[0].get("session", ""))
        self._report = _joined(self._status, perf_counter() - loading, waited)
        announce(
            "update.done", name=self.name, version=version, nbytes=self._report.nbytes,
            seconds=self._report.seconds,
        )  # fmt: skip
        return self._report

    def update(
        self, version: int | None = None, *, timeout_seconds: float = 60.0
    ) -> UpdateReport | None:
        """Update vLLM to a version, or to one newer than it holds, and have it serve that.

        For scripts. An engine that a `Worker` controls gets its updates from there.
        """
        if version is not None:
            check_version(version)
        return self.operations.update(version, timeout_seconds=timeout_seconds)

    @property
    def operations(self) -> Operations:
        """The life cycle of this engine: pause, update, resume, and its state."""
        if self._operations is None:
            self._operations = Operations(self, self, is_serving=not self.is_paused)
        return self._operations

    def _stage(self, update: str, options: UpdateOptions, deadline: float) -> list[dict[str, Any]]:
        """Begin an update, and return the status of all workers once they have staged it."""
        self._check_boots(self._look(monotonic() + _CALL_SECONDS))
        request = {
            **self._how,
            "update": update,
            "version": options.version,
            "held": self._version,
            "may_keep": options.may_keep and self._report is not None,
            "must_verify": options.must_verify,
            "timeout_seconds": max(deadline - monotonic(), 0.001),
        }
        self._control.begin(request, min(deadline, monotonic() + _CALL_SECONDS))
        seconds = _FIRST_LOOK_SECONDS
        while True:
            found = self._look(monotonic() + _CALL_SECONDS)
            self._check_boots(found)
            self._raise_failure(found, update)
            states = {each["state"] for each in found}
            if states in ({"staged"}, {"kept"}):
                versions = {each["version"] for each in found}
                if len(versions) > 1:
                    raise VersionError(f"the workers of vLLM have staged versions {versions}")
                return found
            if monotonic() >= deadline or options.is_over():
                raise TransferTimeout(
                    f"no version came for vLLM at {self._control.place}: its workers are "
                    f"{', '.join(sorted(states))}"
                )
            self._woken.wait(min(seconds, max(deadline - monotonic(), 0.001)))
            self._woken.clear()
            seconds = min(1.5 * seconds, _LOOK_SECONDS)

    def _load(self, update: str, version: int, deadline: float) -> None:
        """Load what is staged, in all workers; vLLM is paused."""
        last = max(deadline, monotonic() + _CALL_SECONDS) + _ANSWER_SECONDS
        try:
            self._control.load(update, last)
        except Exception as error:  # vLLM's text has no types; the workers know more
            self._raise_failure(self._look(monotonic() + _CALL_SECONDS), update)
            raise self._as_own(error) from error
        self._control.finish(str(version), last)
        found = self._look(monotonic() + _CALL_SECONDS)
        wrong = [each for each in found if each["state"] != "done" or each["version"] != version]
        if wrong:
            raise VersionError(f"workers of vLLM ended an update to {version} with {wrong[0]}")

    def _cancel(self, update: str) -> None:
        """Let workers that wait with a staged version go on without it."""
        # A request that can take nothing ends the one before.
        try:
            if any(each.get("update") == update for each in self._look(monotonic() + 2.0)):
                nothing = {"version": None, "held": self._version, "may_keep": True}
                self._control.begin(
                    {**self._how, **nothing, "update": "", "must_verify": False,
                     "timeout_seconds": 0.001},
                    monotonic() + 2.0,
                )  # fmt: skip
        except FlyweightError as error:
            announce("update.failed", name=self.name, version=-1, error=str(error))

    def _look(self, deadline: float) -> list[dict[str, Any]]:
        self._status = self._control.status(deadline)
        return self._status

    @staticmethod
    def _boots_of(found: Sequence[dict[str, Any]]) -> list[str]:
        return [str(each["boot"]) for each in found]

    def _check_boots(self, found: Sequence[dict[str, Any]]) -> None:
        """Raise PeerLost if vLLM was restarted since the last look; then it holds no version."""
        boots = self._boots_of(found)
        if boots != self._boots:
            self._boots, lost = boots, self._version
            self._version, self._report, self._failure = None, None, None
            raise PeerLost(
                f"vLLM at {self._control.place} was restarted, and serves the weights that it was "
                f"started with" + ("" if lost is None else f", not version {lost}")
            )

    @staticmethod
    def _raise_failure(found: Sequence[dict[str, Any]], update: str) -> None:
        """Raise the error of the first worker whose update has failed."""
        for each in found:
            if each.get("update") == update and each["state"] == "failed":
                error = error_named(str(each["error"]), str(each["text"]))
                if len(found) > 1:
                    error.note(f"worker {each['rank']} of vLLM's {len(found)}")
                raise error

    @staticmethod
    def _as_own(error: BaseException) -> FlyweightError:
        if isinstance(error, FlyweightError):
            return error
        return PeerFailed(f"{type(error).__name__}: {error}")


def _joined(workers: Sequence[dict[str, Any]], seconds: float, waited: float) -> UpdateReport:
    """Return one report from those of all workers: all bytes, and the slowest times."""
    found = [UpdateReport(**each["report"]) for each in workers]
    return UpdateReport(
        found[0].version,
        found[0].parent,
        sum(each.nbytes for each in found),
        seconds,
        waited,
        max(each.copy_seconds for each in found),
        max(each.verify_seconds for each in found),
        "+".join(sorted({each.strategy for each in found})),
        found[0].origin,
        found[0].verified,
    )


@dataclass(frozen=True)
class EngineUpdate:
    """How the update of one of several engines ended."""

    name: str
    report: UpdateReport | None = None
    error: FlyweightError | None = None
    """Why it failed; None if it holds the version."""
    state: State = State.SERVING
    """What the engine does now."""


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
        result = EngineUpdate(engine.name, report, error, engine.operations.state)
        on_end(result)
        return result

    if not engines:
        return []
    with ThreadPoolExecutor(len(engines), "flyweight-update") as threads:
        return list(threads.map(update, engines))


_ENGINE: type[Engine] = VllmEngine  # mypy checks the ports
_WEIGHTS: type[Weights] = VllmEngine
