"""HeldVersion: the complete version that a replica's model holds, or why it holds none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from flyweight.errors import FlyweightError, VersionError

State = Literal["empty", "ready", "updating", "failed"]
REPLACED = "tensors of the model were replaced, or have moved,"


class HeldVersion:
    """Changes with each update; a version is held only as long as its tensors are the model's."""

    def __init__(self, is_current: Callable[[], bool]) -> None:
        """Hold nothing yet; `is_current` says whether the tensors are those of the last update."""
        self._is_current = is_current
        self._version: int | None = None
        self._session = ""
        self._state: State = "empty"
        self._failure: FlyweightError | None = None
        self.num_taken = 0
        """How many updates have succeeded."""
        self.loaded: int | None = None
        """The version that others have written to the model since, if it is known."""

    @property
    def version(self) -> int | None:
        return None if self._moved() else self._version

    @property
    def state(self) -> State:
        return "empty" if self._moved() else self._state

    @property
    def failure(self) -> FlyweightError | None:
        """Why there is no version; None if there is one, or never was."""
        return self._moved() or self._failure

    @property
    def session(self) -> str:
        """The publisher that the version came from; empty without a version."""
        return self._session if self._version is not None else ""

    @property
    def is_updating(self) -> bool:
        """True from the first write of an update to its end."""
        return self._state == "updating"

    def _moved(self) -> VersionError | None:
        """Return an error if the tensors that hold the version are no longer the model's."""
        version = self._version
        if version is None or self._is_current():
            return None
        return VersionError(f"{REPLACED} since version {version} was taken; update again")

    def take(self, version: int, session: str) -> None:
        """Hold a version that was committed."""
        self.num_taken += 1
        self._version, self._session = version, session
        self._state, self._failure = "ready", None

    def touch(self) -> None:
        """Hold nothing while the weights are overwritten."""
        self._state, self._version, self.loaded = "updating", None, None

    def fail(self, error: FlyweightError) -> None:
        """Hold nothing: an update has ended by an error after the first write."""
        self._state, self._failure = "failed", error

    def forget(self, reason: str, loaded: int | None = None) -> None:
        """Hold nothing, for a reason that is no failed update; `loaded` is what others wrote."""
        self._version, self._state, self.loaded = None, "empty", loaded
        self._failure = VersionError(reason)

    def forget_if_moved(self) -> None:
        if (moved := self._moved()) is not None:
            self.forget(str(moved))

    def check_servable(self, name: str) -> None:
        """Raise VersionError, with the replica's name, unless a complete version is held."""
        if (state := self.state) != "ready":
            why = self.failure or "it never took one"
            text = f"replica {name!r} is {state} and holds no whole version: {why}"
            raise VersionError(text)
