"""The engine's states and signals, and the table that decides what each signal does. Pure.

`TABLE` covers every pair of a state and a signal. Users send the signals in `OUTSIDE`; the
other signals report how a step ended. `Condition` adds what is `absent` (weights, cache): an
engine serves only while nothing is absent. PAUSED and CLEARED are the same row of the table:
CLEARED means that something is absent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from flyweight.checks import one_of
from flyweight.errors import Busy, LifecycleError


class State(str, Enum):
    """The state of an engine. It accepts requests in SERVING and finishes them in PAUSING."""

    SERVING = "SERVING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    CLEARING = "CLEARING"
    CLEARED = "CLEARED"
    UPDATING = "UPDATING"
    VERIFYING = "VERIFYING"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value


class Tag(str, Enum):
    """Memory that an engine needs to serve and can release: weights, key-value cache."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"

    @classmethod
    def _missing_(cls, value: object) -> Tag | None:
        return cls.WEIGHTS if value == "weight" else None  # FastDeploy's spelling

    def __str__(self) -> str:
        return self.value


class Signal(str, Enum):
    """An event that changes the state of an engine."""

    # Sent by users and controllers.
    PAUSE = "PAUSE"
    RESUME = "RESUME"
    CLEAR = "CLEAR"
    RESTORE = "RESTORE"
    UPDATE = "UPDATE"
    # How a step ended.
    DRAINED = "DRAINED"
    STUCK = "STUCK"
    EMPTIED = "EMPTIED"
    FILLED = "FILLED"
    COMMITTED = "COMMITTED"
    KEPT = "KEPT"
    FAULT = "FAULT"

    def __str__(self) -> str:
        return self.value


OUTSIDE = (Signal.PAUSE, Signal.RESUME, Signal.CLEAR, Signal.RESTORE, Signal.UPDATE)
ALL_TAGS = frozenset(Tag)


def tags_named(names: Iterable[str]) -> tuple[Tag, ...]:
    """Return the tags with these names, without repeats; raise SpecError for an unknown name."""
    return tuple(dict.fromkeys(one_of(Tag, name, "tag") for name in names))


class Outcome(Enum):
    """What a signal does when it does not lead to one fixed state."""

    STAY = "the state does not change"
    REST = "PAUSED, or CLEARED while something is absent"
    BUSY = "refused while a step runs"
    NO = "refused"


_STAY, _REST, _BUSY, _NO = Outcome.STAY, Outcome.REST, Outcome.BUSY, Outcome.NO

_COLUMNS = tuple(Signal)
_ROWS: Mapping[State, tuple[State | Outcome, ...]] = {
    #                 PAUSE          RESUME         CLEAR           RESTORE  UPDATE
    #                 DRAINED  STUCK  EMPTIED  FILLED  COMMITTED  KEPT  FAULT
    State.SERVING: (
        State.PAUSING, _STAY, _NO, _STAY, _NO,
        _NO, _NO, _NO, _NO, _NO, _NO, State.FAILED,
    ),
    State.PAUSING: (
        _BUSY, _BUSY, _BUSY, _BUSY, _BUSY,
        _REST, State.SERVING, _NO, _NO, _NO, _NO, State.FAILED,
    ),
    State.PAUSED: (
        _STAY, State.SERVING, State.CLEARING, _STAY, State.UPDATING,
        _NO, _NO, _NO, _NO, _NO, _NO, State.FAILED,
    ),
    State.CLEARING: (
        _BUSY, _BUSY, _BUSY, _BUSY, _BUSY,
        _NO, _NO, _REST, _NO, _NO, _NO, State.FAILED,
    ),
    State.CLEARED: (
        _STAY, _NO, State.CLEARING, _REST, State.UPDATING,
        _NO, _NO, _NO, _NO, _NO, _NO, State.FAILED,
    ),
    State.UPDATING: (
        _BUSY, _BUSY, _BUSY, _BUSY, _BUSY,
        _NO, _NO, _NO, State.VERIFYING, _NO, _REST, State.FAILED,
    ),
    State.VERIFYING: (
        _BUSY, _BUSY, _BUSY, _BUSY, _BUSY,
        _NO, _NO, _NO, _NO, _REST, _REST, State.FAILED,
    ),
    State.FAILED: (
        _STAY, _NO, State.CLEARING, _STAY, State.UPDATING,
        _NO, _NO, _NO, _NO, _NO, _NO, State.FAILED,
    ),
}  # fmt: skip

TABLE: Mapping[tuple[State, Signal], State | Outcome] = {
    (state, signal): outcome
    for state, row in _ROWS.items()
    for signal, outcome in zip(_COLUMNS, row, strict=True)
}


def accepted(state: State) -> list[Signal]:
    """Return the signals of `OUTSIDE` that a state accepts."""
    return [signal for signal in OUTSIDE if TABLE[state, signal] not in (_NO, _BUSY)]


def needed(signal: Signal) -> list[State]:
    """Return the states that accept a signal."""
    return [state for state in State if TABLE[state, signal] not in (_NO, _BUSY)]


@dataclass(frozen=True)
class Condition:
    """A state, and the tags that are absent: released, or not loaded yet."""

    state: State = State.CLEARED
    absent: frozenset[Tag] = frozenset({Tag.WEIGHTS})

    def after(self, signal: Signal, absent: Collection[Tag] | None = None) -> Condition:
        """Return the condition after a signal; raise LifecycleError if the state refuses it.

        `absent` replaces the set of absent tags; None keeps it.
        """
        outcome = TABLE[self.state, signal]
        here = self if absent is None else replace(self, absent=frozenset(absent))
        if outcome is _BUSY:
            raise Busy(
                f"signal {signal} needs state {_words(needed(signal))}, engine is {self.state}: "
                f"wait until that ends"
            )
        if outcome is _NO:
            raise LifecycleError(self._refusal(signal))
        state = self.state if isinstance(outcome, Outcome) else outcome
        if outcome is _REST or state in (State.PAUSED, State.CLEARED):
            state = State.CLEARED if here.absent else State.PAUSED
        if state is State.SERVING and here.absent:
            raise LifecycleError(self._refusal(signal))
        return replace(here, state=state)

    def _refusal(self, signal: Signal) -> str:
        text = f"signal {signal} needs state {_words(needed(signal))}, engine is {self.state}"
        if self.absent:
            text += f" without {' and '.join(sorted(self.absent))}"
        if signal not in OUTSIDE:
            return text
        return f"{text}; it accepts {_words(accepted(self.state))}: send {self._remedy(signal)}"

    def _remedy(self, signal: Signal) -> str:
        """Return the signals to send so that the refused one is accepted."""
        if self.state is State.SERVING:
            return f"PAUSE, then {signal}"
        if self.state is State.FAILED or Tag.WEIGHTS in self.absent:
            first = "UPDATE" if Tag.KV_CACHE not in self.absent else "RESTORE, then UPDATE"
            return f"{first}, then {signal}"
        return f"RESTORE, then {signal}"


def _words(items: Collection[Enum]) -> str:
    *head, last = (str(each) for each in items)
    return f"{', '.join(head)} or {last}" if head else last
