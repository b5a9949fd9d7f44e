"""HeldVersion: the version that one rank of an engine holds, or why it holds none. Pure state.

EMPTY, READY or FAILED ──begin_write──► UPDATING ──commit──► READY
                                           └──────fail─────► FAILED

An update that fails before its first write changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from flyweight.errors import FlyweightError, VersionError
from flyweight.live.publish_id import PublishId


class ReplicaState(str, Enum):
    EMPTY = "EMPTY"
    READY = "READY"
    UPDATING = "UPDATING"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value


_Now = tuple[ReplicaState, PublishId | None, FlyweightError | None]


class HeldVersion:
    """Any thread may read it while one changes it: state, id and failure are one value."""

    def __init__(self, is_current: Callable[[], bool]) -> None:
        """Hold nothing yet; `is_current` says whether the tensors are those of the last update."""
        self._is_current = is_current
        self._last: _Now = ReplicaState.EMPTY, None, None

    @property
    def state(self) -> ReplicaState:
        return self._now()[0]

    @property
    def id(self) -> PublishId | None:
        """The complete version that the model holds; None while it is being overwritten."""
        return self._now()[1]

    @property
    def taken(self) -> PublishId | None:
        """The same without a look at the tensors, which takes milliseconds for very many."""
        return self._last[1]

    @property
    def failure(self) -> FlyweightError | None:
        """Why there is no version; None if there is one, or never was."""
        return self._now()[2]

    def _now(self) -> _Now:
        """Return what is held now: nothing, if its tensors are no longer the model's."""
        id = self._last[1]
        if id is None or self._is_current():
            return self._last
        text = f"tensors of the model were replaced, or have moved, since {id} was taken"
        return ReplicaState.EMPTY, None, VersionError(f"{text}; update again")

    def begin_write(self) -> None:
        """Hold no version from now on, until `commit`."""
        self._last = ReplicaState.UPDATING, None, None

    def commit(self, id: PublishId) -> None:
        """Hold a version; hold nothing if `forget` was called after the write had begun."""
        state, _, reason = self._last
        assert state is ReplicaState.UPDATING, f"{id} is committed, and the replica is {state}"
        if reason is None:
            self._last = ReplicaState.READY, id, None
        else:
            self._last = ReplicaState.EMPTY, None, reason

    def fail(self, error: FlyweightError) -> None:
        """End an update by an error; hold nothing if it came after the first write."""
        if self._last[0] is ReplicaState.UPDATING:
            self._last = ReplicaState.FAILED, None, error

    def forget(self, reason: str) -> None:
        """Hold nothing: the memory was freed, or others wrote to it.

        While an update writes, it is still that update which ends the state UPDATING.
        """
        is_updating = self._last[0] is ReplicaState.UPDATING
        state = ReplicaState.UPDATING if is_updating else ReplicaState.EMPTY
        self._last = state, None, VersionError(reason)

    def forget_if_moved(self) -> None:
        """Hold nothing for good if the tensors were replaced; call it before they are adopted."""
        self._last = self._now()

    def check_servable(self, name: str) -> None:
        """Raise VersionError, with the replica's name, unless a complete version is held."""
        state, _, failure = self._now()
        if state is not ReplicaState.READY:
            is_updating = state is ReplicaState.UPDATING
            why = failure or ("it is being overwritten" if is_updating else "it never took one")
            raise VersionError(f"replica {name!r} is {state} and holds no whole version: {why}")
