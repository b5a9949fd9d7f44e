"""VllmWorkers: the workers inside one vLLM, as they are seen from outside: by their status.

vLLM's own errors have no types and name no worker, so the status says how an update ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Event
from time import monotonic
from typing import Any

from flyweight.engines.vllm_control import VllmControl
from flyweight.errors import (
    Busy,
    FlyweightError,
    LifecycleError,
    PeerFailed,
    PeerLost,
    TransferTimeout,
    VersionError,
    error_named,
)
from flyweight.ports import UpdateReport

CALL_SECONDS = 10.0
"""The time for a call that does not wait for requests or weights."""
_CANCEL_SECONDS = 2.0
LEAST_SECONDS = 1.0
"""The time for a call that begins at a deadline: a busy vLLM may take as long to answer."""
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.005, 0.25
"""How soon workers are asked for their status, at first and then at the most."""
_ENDS = ("done", "kept", "failed")
_ANSWER_SECONDS = 15.0
"""How much longer than its own deadline a load may take to answer."""


class VllmWorkers:
    """The workers of one vLLM, and the update that they are at."""

    def __init__(self, control: VllmControl) -> None:
        self._control = control
        self.status: list[dict[str, Any]] = []
        """What each worker said last."""
        self.are_lost = False
        """True if vLLM could not be reached at the last look, or was restarted before it."""
        self.look()
        self._boots = self._boots_now()
        self._woken = Event()
        self.num_engines = self._count_engines()
        """How many data parallel engines there are; the status is of the first one's workers."""

    def _count_engines(self) -> int:
        found = self._control.num_engines(monotonic() + CALL_SECONDS)
        balancing = self.status[0]["balancing"]
        if balancing == "hybrid":
            raise LifecycleError(
                f"vLLM at {self._control.place} is one of several servers for {found} data "
                f"parallel engines, and which of them it has is not known; use one server for all "
                f"of them, or one for each (--data-parallel-external-lb)"
            )
        return found if balancing == "internal" else 1

    def look(
        self, seconds: float = CALL_SECONDS, *, deadline: float | None = None
    ) -> list[dict[str, Any]]:
        """Ask all workers for their status, in this time, and not long after the deadline."""
        if deadline is not None:
            seconds = max(min(seconds, deadline - monotonic()), LEAST_SECONDS)
        self.are_lost = False
        try:
            self.status = self._control.status(monotonic() + seconds)
        except PeerLost:
            self.are_lost = True
            raise
        return self.status

    @property
    def held(self) -> int | None:
        """The version that all workers hold; None if they do not agree."""
        found = {each["held"] for each in self.status}
        held = found.pop()
        return held if not found and type(held) is int else None

    @property
    def session(self) -> str:
        return str(self.status[0].get("session", ""))

    @property
    def step(self) -> str:
        """What the first worker is at: 'waiting', 'staged', 'loading', or how its update ended."""
        return str(self.status[0]["state"])

    @property
    def progress(self) -> float:
        """How much of its update is received, from 0 to 1."""
        found = [float(each.get("progress", 0.0)) for each in self.status]
        return sum(found) / len(found)

    @property
    def are_whole(self) -> bool:
        """False if an update has failed, or was never finished, and left the weights as they are.

        If its controller was killed, the weights may be whole and have the name of the version
        before.
        """
        return all(each["is_whole"] and not each["is_open"] for each in self.status)

    def wake(self) -> None:
        """Have `stage` look at once whether its wait is over."""
        self._woken.set()

    def check_same(self) -> None:
        """Raise PeerLost if vLLM was restarted since the last look."""
        if (boots := self._boots_now()) != self._boots:
            self.are_lost, self.num_engines = True, self._count_engines()
            self._boots = boots
            raise PeerLost(
                f"vLLM at {self._control.place} was restarted, and serves the weights that it was "
                f"started with"
            )

    def _boots_now(self) -> list[str]:
        return [str(each["boot"]) for each in self.status]

    def stage(
        self, request: Mapping[str, Any], deadline: float, is_over: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        """Begin an update, and return the status of all workers once they have staged it.

        They may also have kept the version that they hold.
        """
        self.look(deadline=deadline)
        self.check_same()
        update, seconds = request["update"], _FIRST_LOOK_SECONDS
        left = max(deadline - monotonic(), 0.001)
        call = min(deadline, monotonic() + CALL_SECONDS)
        self._control.begin({**request, "timeout_seconds": left}, call)
        while True:
            found = self.look(deadline=deadline)
            self.check_same()
            self._raise_failure(update)
            if any(each.get("update") != update for each in found):
                raise Busy(
                    f"another VllmEngine has begun an update of vLLM at {self._control.place}; "
                    f"this one ended before vLLM was paused"
                )
            states = {str(each["state"]) for each in found}
            if states in ({"staged"}, {"kept"}):
                versions = {each["version"] for each in found}
                if len(versions) > 1:
                    raise VersionError(f"the workers of vLLM have staged versions {versions}")
                return found
            if monotonic() >= deadline or is_over():
                raise TransferTimeout(
                    f"no version came for vLLM at {self._control.place}: its workers are "
                    f"{', '.join(sorted(states))}"
                )
            self._woken.wait(min(seconds, max(deadline - monotonic(), 0.001)))
            self._woken.clear()
            seconds = min(1.5 * seconds, _LOOK_SECONDS)

    def cancel(self, update: str) -> None:
        """End an update that is not loaded yet, in all workers, and wait until it has ended.

        A worker that still waits for a version would not agree with one that requests the next.
        """
        deadline = monotonic() + _CANCEL_SECONDS
        is_sent = False
        while any(
            each.get("update") == update and each["state"] not in _ENDS
            for each in self.look(_CANCEL_SECONDS)
        ):
            if not is_sent:
                self._control.begin({"cancel": update}, deadline)
                is_sent = True
            if monotonic() >= deadline:
                raise TransferTimeout(f"update {update} did not end in {_CANCEL_SECONDS:g} s")
            self._woken.wait(_FIRST_LOOK_SECONDS)

    def load(self, update: str, version: int, deadline: float) -> None:
        """Load what is staged, in all workers, and name its version; vLLM is paused.

        The calls that start and finish an update are always made in pairs: vLLM's workers refuse
        another one, and an error of several workers breaks the order of vLLM's answers.
        """
        deadline = max(deadline, monotonic() + CALL_SECONDS) + _ANSWER_SECONDS
        if any(each["is_open"] for each in self.status):  # its VllmEngine was killed
            self._control.finish(None, deadline)
        failure: Exception | None = None
        try:
            self._control.load(update, deadline)
        except Exception as error:  # the workers know more
            failure = error
        found, end = self.look(), (update, "done", version)
        wrong = [
            each
            for each in found
            if (each.get("update"), each["state"], each.get("version")) != end
        ]
        if wrong and any(each["is_open"] for each in found):
            self._control.finish(None, deadline)
        self._raise_failure(update)
        if failure is not None:
            raise own_error(failure) from failure
        if wrong:
            raise VersionError(f"workers of vLLM ended an update to {version} with {wrong[0]}")
        self._control.finish(str(version), deadline)

    def _raise_failure(self, update: str) -> None:
        """Raise the error of the first worker whose update has failed."""
        for each in self.status:
            if each.get("update") == update and each["state"] == "failed":
                error = error_named(str(each["error"]), str(each["text"]))
                if len(self.status) > 1:
                    error.note(f"worker {each['rank']} of vLLM's {len(self.status)}")
                raise error

    def report(self) -> UpdateReport:
        """Return one report from those of all workers: all bytes, and the slowest times."""
        found = [UpdateReport(**each["report"]) for each in self.status]
        ways = {way for each in found for way in each.transport.split("+")}
        return UpdateReport(
            version=found[0].version,
            parent=found[0].parent,
            nbytes=self.num_engines * sum(each.nbytes for each in found),
            seconds=max(each.seconds for each in found),
            wait_seconds=max(each.wait_seconds for each in found),
            fetch_seconds=max(each.fetch_seconds for each in found),
            drain_seconds=max(each.drain_seconds for each in found),
            copy_seconds=max(each.copy_seconds for each in found),
            verify_seconds=max(each.verify_seconds for each in found),
            transport="+".join(sorted(ways)),
            verified=found[0].verified,
        )


def own_error(error: BaseException) -> FlyweightError:
    """Return an error as one of ours; vLLM raises anything."""
    if isinstance(error, FlyweightError):
        return error
    return PeerFailed(f"{type(error).__name__}: {error}")
