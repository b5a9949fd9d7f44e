"""Ranks: how the ranks of one replica decide together, so that none serves what another does not.

Each says what it holds or why it does not, the first one decides, and all hear the same
verdict. A rank that dies, or says nothing, ends it for all: whoever does not hear a
verdict takes it that there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

from flyweight.errors import FlyweightError, TransportError
from flyweight.ports import Seat
from flyweight.spec.manifest import Json
from flyweight.transports.group import Group
from flyweight.transports.meeting import meet


@dataclass(frozen=True)
class Verdict:
    """What the ranks decided."""

    is_agreed: bool = False
    is_kept: bool = False
    """True if every rank still holds what it held: nobody touched anything."""
    catch_up: int | None = None
    """The version that those who are behind should take first."""
    text: str = ""


class Ranks:
    """This rank, and the others; alone unless it was given a seat."""

    def __init__(self, seat: Seat | None = None) -> None:
        self.seat = Seat(0, 1) if seat is None else seat
        self._group: Group | None = None

    def agreed(
        self,
        what: str,
        version: int | None,
        error: FlyweightError | None,
        deadline: float,
        session: str = "",
    ) -> Verdict:
        """Return what all ranks decide; every rank must call this for the same thing."""
        mine: Json = {
            "what": what,
            "version": version,
            "session": session,
            "error": "" if error is None else f"{type(error).__name__}: {error}",
        }
        if self.seat.num_ranks == 1:
            return _decided([mine])
        try:
            group = self._met(max(deadline - monotonic(), 0.1))
            said = group.gather("hold", mine)
            told: Any = group.broadcast("verdict", _verdict_record(said) if said else None)
        except TransportError as fault:
            self.close()
            return Verdict(text=f"the ranks did not decide: {fault}")
        return Verdict(**told)

    def _met(self, timeout_seconds: float) -> Group:
        if self._group is None:
            self._group = meet(self.seat, timeout_seconds=timeout_seconds)
        return self._group

    def close(self) -> None:
        """Part from the others, who hear of it when they wait for this rank. Safe to repeat."""
        if self._group is not None:
            group, self._group = self._group, None
            group.close()


def _verdict_record(said: list[Any]) -> dict[str, Any]:
    verdict = _decided(said)
    return {
        "is_agreed": verdict.is_agreed,
        "is_kept": verdict.is_kept,
        "catch_up": verdict.catch_up,
        "text": verdict.text,
    }


def _decided(said: list[Any]) -> Verdict:
    """Decide, from what each rank says."""
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(said) if each["error"]]
    versions = [each["version"] for each in said]
    is_whole = None not in versions and len(set(versions)) == 1
    if errors:
        return Verdict(is_kept=is_whole or set(versions) == {None}, text=errors[0])
    if {each["what"] for each in said} != {said[0]["what"]}:
        asked = ", ".join(f"rank {rank} {each['what']}" for rank, each in enumerate(said))
        return Verdict(text=f"the ranks were asked for different things: {asked}")
    if None in versions:
        return Verdict(text=f"rank {versions.index(None)} holds no whole version")
    if not is_whole:
        return Verdict(catch_up=max(versions), text=f"the ranks hold versions {versions}")
    if len({each["session"] for each in said}) > 1:
        return Verdict(text=f"the ranks hold version {versions[0]} of different publishers")
    return Verdict(is_agreed=True)
