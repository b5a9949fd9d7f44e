"""Ranks: how the ranks of one replica decide together, so that none serves what another does not.

Each says what it holds or why it does not, the first one decides, and all hear the same
verdict. A rank that dies, or says nothing, ends it for all: whoever does not hear a
verdict takes it that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from flyweight.errors import FlyweightError, TransportError
from flyweight.ports import Seat
from flyweight.spec.manifest import Json
from flyweight.transports.group import Group
from flyweight.transports.meeting import meet

_LEAST_SECONDS = 0.1


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
    catch_up: int | None = None
    """The version that those who are behind should take first."""
    text: str = ""


class Ranks:
    """This rank, and the others; alone unless it was given a seat."""

    def __init__(self, seat: Seat | None = None) -> None:
        self.seat = Seat(0, 1) if seat is None else seat
        self._group: Group | None = None

    def prepared(
        self, error: FlyweightError | None, deadline: float, *, what: str = "update"
    ) -> Verdict:
        """Return whether all ranks are ready for the same thing; every rank must call this."""
        return self._decide({"what": what, "is_first": True, "error": _text(error)}, deadline)

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
        mine: dict[str, Json] = {"what": what, "is_first": False, "error": _text(error)}
        held: dict[str, Json] = {"version": version, "session": session}
        return self._decide({**mine, **held, "is_as_before": is_as_before}, deadline)

    def _decide(self, mine: dict[str, Json], deadline: float) -> Verdict:
        if self.seat.num_ranks == 1:
            return _decided([mine])
        try:
            group = self._met(max(deadline - monotonic(), _LEAST_SECONDS))
            said = group.gather("say", mine)
            told: Any = group.broadcast("verdict", asdict(_decided(said)) if said else None)
            return Verdict(**told)
        except TransportError as fault:
            self.close()
            return Verdict(is_lost=True, text=f"the ranks did not decide: {fault}")

    def _met(self, timeout_seconds: float) -> Group:
        """Return the group, with so much time for each wait."""
        if self._group is not None and self._group.has_parted:
            self.close()  # a rank heard no verdict some time ago: this decision is another
        if self._group is None:
            self._group = meet(self.seat, timeout_seconds=timeout_seconds)
        else:
            self._group.allow(timeout_seconds)
        return self._group

    def close(self) -> None:
        """Part from the others, who hear of it when they wait for this rank. Safe to repeat."""
        if self._group is not None:
            group, self._group = self._group, None
            group.part()


def _text(error: FlyweightError | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _decided(said: Sequence[Any]) -> Verdict:
    """Decide, from what each rank says."""
    asked = [f"{'to prepare' if each['is_first'] else 'for'} {each['what']!r}" for each in said]
    if len(set(asked)) > 1:
        words = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(asked))
        is_early = all(each["is_first"] for each in said)
        text = f"the ranks were asked for different things: {words}"
        return Verdict(is_mixed=True, is_kept=is_early, text=text)
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(said) if each["error"]]
    if said[0]["is_first"]:
        return Verdict(is_agreed=not errors, is_kept=True, text=errors[0] if errors else "")
    versions, sessions = ([each[name] for each in said] for name in ("version", "session"))
    if errors:
        return Verdict(is_kept=all(each["is_as_before"] for each in said), text=errors[0])
    if None in versions:
        return Verdict(text=f"rank {versions.index(None)} holds no whole version")
    if len(set(versions)) > 1:
        return Verdict(catch_up=max(versions), text=f"the ranks hold versions {versions}")
    if len(set(sessions)) > 1:
        return Verdict(text=f"the ranks hold version {versions[0]} of different sources")
    return Verdict(is_agreed=True)
