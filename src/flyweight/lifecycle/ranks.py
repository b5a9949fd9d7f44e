"""Ranks: how the ranks of one replica decide together, so that none serves what another does not.

Each says what it holds or why it does not, the first one decides, and all hear the same
verdict. A rank that dies, or says nothing, ends it for all: whoever does not hear a
verdict takes it that there is none. A rank that does not begin says so too (`refuse`), from a
thread beside the one whose operation runs; only in a round that all are in it must not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from flyweight.errors import Busy, FlyweightError, LifecycleError, TransportError
from flyweight.ports import Seat
from flyweight.spec.manifest import Json
from flyweight.transports.group import PATIENCE, Group
from flyweight.transports.meeting import meet

YIELD_SECONDS = 0.001
"""How long to wait for one who gives way, before looking again."""
_LEAST_SECONDS = 0.1
_LATE_SECONDS = 0.75
"""What the first rank listens beyond the deadline: whoever does not succeed says so then."""


@dataclass(frozen=True)
class Verdict:
    """What the ranks decided."""

    is_agreed: bool = False
    is_kept: bool = False
    """True if every rank still holds what it held: nobody touched anything."""
    is_lost: bool = False
    """True if a rank died or said nothing: what it does is not known."""
    is_mixed: bool = False
    """True if the ranks were asked for different things."""
    is_busy: bool = False
    """True if a rank did not begin, since it is at something else."""
    catch_up: int | None = None
    """The version that those who are behind should take first."""
    text: str = ""

    @property
    def refusal(self) -> LifecycleError:
        """What to raise where it was not agreed."""
        return Busy(self.text) if self.is_busy else LifecycleError(self.text)


class Ranks:
    """This rank, and the others; alone unless it was given a seat."""

    def __init__(self, seat: Seat | None = None) -> None:
        self.seat = Seat(0, 1) if seat is None else seat
        self._group: Group | None = None
        self._alone = threading.Lock()
        self._is_bound = False

    @property
    def is_bound(self) -> bool:
        """True in a round that all ranks are prepared for, and have not decided the end of."""
        return self._is_bound

    def prepared(
        self,
        error: FlyweightError | None,
        deadline: float,
        *,
        what: str = "update",
        is_round: bool = False,
    ) -> Verdict:
        """Return whether all ranks are ready for the same thing; every rank must call this.

        In a round `agreed` follows if they are, and until then nobody else may speak for a rank.
        """
        return self._decide(_said(what, error), deadline, binds=is_round)

    def agreed(
        self,
        version: int | None,
        session: str,
        error: FlyweightError | None,
        deadline: float,
        *,
        what: str = "update",
        is_as_before: bool = False,
    ) -> Verdict:
        """Return what all ranks decide of what they hold; every rank must call this.

        `is_as_before` says that this rank still holds what was committed last.
        """
        held: dict[str, Json] = {"version": version, "session": session}
        mine = _said(what, error, is_first=False)
        return self._decide({**mine, **held, "is_as_before": is_as_before}, deadline)

    def refuse(self, busy: Busy, deadline: float, *, what: str, is_first: bool = True) -> None:
        """Have ranks that wait for this one to take part hear at once that it does not.

        For any thread. Ranks that are in a round together refuse each by itself: what one of
        them said meanwhile would be taken for its word on the round.
        """
        if self.seat.num_ranks == 1:
            return
        mine = _said(what, busy, is_first=is_first)
        mine |= {"version": None, "session": "", "is_as_before": True}
        while self._decide(mine, deadline, is_beside=True).is_mixed and monotonic() < deadline:
            sleep(YIELD_SECONDS)  # for the thread whose operation runs to speak as well

    def loosen(self) -> None:
        """Be in no round any more, however it ended."""
        self._is_bound = False

    def _decide(
        self,
        mine: dict[str, Json],
        deadline: float,
        *,
        binds: bool = False,
        is_beside: bool = False,
    ) -> Verdict:
        if self.seat.num_ranks == 1:
            return _decided([mine])
        # One thread at a time: the others take what a rank says next for its answer to them.
        if not self._alone.acquire(timeout=max(deadline - monotonic(), _LEAST_SECONDS)):
            return Verdict(is_mixed=True, is_kept=True, text="this rank is at something else")
        try:
            if is_beside and self._is_bound:
                return Verdict(is_kept=True)
            verdict = self._heard(mine, deadline)
            if not is_beside:
                self._is_bound = (binds and verdict.is_agreed) or verdict.catch_up is not None
            return verdict
        finally:
            self._alone.release()

    def _heard(self, mine: dict[str, Json], deadline: float) -> Verdict:
        try:
            group = self._met(self._patience(deadline))
            said = group.gather("say", mine)
            told: Any = group.broadcast("verdict", asdict(_decided(said)) if said else None)
            return Verdict(**told)
        except TransportError as fault:
            self._part()
            return Verdict(is_lost=True, text=f"the ranks did not decide: {fault}")

    def _patience(self, deadline: float) -> float:
        """Return how long to wait for the others, in the group's terms.

        Who tries until the deadline has to be heard after it: by the first rank, and then by
        all who wait for the first.
        """
        left = max(deadline - monotonic(), _LEAST_SECONDS)
        is_first = self.seat.rank == 0
        return (left + _LATE_SECONDS) / PATIENCE if is_first else left + 2 * _LATE_SECONDS

    def _met(self, timeout_seconds: float) -> Group:
        """Return the group, with so much time for each wait."""
        if self._group is not None and self._group.has_parted:
            self._part()  # a rank heard no verdict some time ago: this decision is another
        if self._group is None:
            self._group = meet(self.seat, timeout_seconds=timeout_seconds)
        else:
            self._group.allow(timeout_seconds)
        return self._group

    def close(self) -> None:
        """Part from the others, who hear of it when they wait for this rank. Safe to repeat."""
        self._part()

    def _part(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.part()


def _said(what: str, error: FlyweightError | None, *, is_first: bool = True) -> dict[str, Json]:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    return {"what": what, "is_first": is_first, "error": text, "is_busy": isinstance(error, Busy)}


def _decided(said: Sequence[Any]) -> Verdict:
    """Decide, from what each rank says."""
    asked = [f"{'to prepare' if each['is_first'] else 'for'} {each['what']!r}" for each in said]
    if len(set(asked)) > 1:
        words = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(asked))
        is_early = all(each["is_first"] for each in said)
        text = f"the ranks were asked for different things: {words}"
        return Verdict(is_mixed=True, is_kept=is_early, text=text)
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(said) if each["error"]]
    is_busy = next((bool(each["is_busy"]) for each in said if each["error"]), False)
    if said[0]["is_first"]:
        text = errors[0] if errors else ""
        return Verdict(is_agreed=not errors, is_kept=True, is_busy=is_busy, text=text)
    versions, sessions = ([each[name] for each in said] for name in ("version", "session"))
    if errors:
        is_kept = all(each["is_as_before"] for each in said)
        return Verdict(is_kept=is_kept, is_busy=is_busy, text=errors[0])
    if None in versions:
        return Verdict(text=f"rank {versions.index(None)} holds no whole version")
    if len(set(versions)) > 1:
        return Verdict(catch_up=max(versions), text=f"the ranks hold versions {versions}")
    if len(set(sessions)) > 1:
        return Verdict(text=f"the ranks hold version {versions[0]} of different sources")
    return Verdict(is_agreed=True)
