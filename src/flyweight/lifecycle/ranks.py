"""Ranks: how the ranks of one replica decide together, so that none serves what another does not.

Each says what it holds or why it does not, the first one decides, and all hear the same
verdict. A rank that dies, or says nothing, ends it for all: whoever does not hear a
verdict takes it that there is none. What is asked for is repeated until all ranks are at it;
the first whose time is over says that this is its last word, and all stop by that verdict.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from flyweight.errors import Busy, FlyweightError, TransportError
from flyweight.ranks.group import PATIENCE, Group
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.spec.manifest import Json

YIELD_SECONDS = 0.001
"""How long to wait for one who gives way, before looking again."""
_LEAST_SECONDS = 0.1
_PARTING_SECONDS = 5.0
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
    is_over: bool = False
    """True if so, and one of them will not repeat what it was asked for: its time is over."""
    was_paused: bool = False
    """True if one of them was paused by hand before."""
    may_keep: bool = False
    """True if what is held would be enough for one of them."""
    catch_up: int | None = None
    """The version that those who are behind should take first."""
    text: str = ""


class Ranks:
    """This rank, and the others; alone unless it was given a rendezvous."""

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        self.rendezvous = Rendezvous() if rendezvous is None else rendezvous
        self._group: Group | None = None
        self._speaking = threading.Lock()

    def prepared(
        self,
        error: FlyweightError | None,
        deadline: float,
        *,
        what: str = "update",
        is_asked: bool = True,
        was_paused: bool = False,
        may_keep: bool = False,
    ) -> Verdict:
        """Return whether all ranks are ready for the same thing; every rank must call this.

        Where it `is_asked` for, ranks that were asked for different things repeat it until then.
        """
        is_last = is_asked and monotonic() >= deadline
        mine = _said(what, error, is_last=is_last)
        return self._decide({**mine, "was_paused": was_paused, "may_keep": may_keep}, deadline)

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
        mine = _said(what, error, is_first=False, is_last=monotonic() >= deadline)
        return self._decide({**mine, **held, "is_as_before": is_as_before}, deadline)

    def excuse(self, busy: Busy, deadline: float, *, what: str) -> None:
        """Say that this rank takes no part in a round, beside the operation that keeps it from it.

        For who follows only, in a thread of its own: while it has the source of weights, that
        operation is no update, whose words these could be taken for. Nothing is said while that
        operation speaks: the others hear what it is for.
        """
        if self.rendezvous.num_ranks > 1 and self._speaking.acquire(blocking=False):
            try:
                self._heard(_said(what, busy), deadline)
            finally:
                self._speaking.release()

    def _decide(self, mine: dict[str, Json], deadline: float) -> Verdict:
        if self.rendezvous.num_ranks == 1:
            return _decided([mine])
        with self._speaking:
            return self._heard(mine, deadline)

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
        is_first = self.rendezvous.rank == 0
        return (left + _LATE_SECONDS) / PATIENCE if is_first else left + 2 * _LATE_SECONDS

    def _met(self, timeout_seconds: float) -> Group:
        """Return the group, with so much time for each wait."""
        if self._group is not None and self._group.can_rejoin:
            self._part()  # a rank heard no verdict some time ago: this decision is another
        if self._group is None:
            self._group = join_group(self.rendezvous, timeout_seconds=timeout_seconds)
        else:
            self._group.set_timeout(timeout_seconds)
        return self._group

    def close(self) -> None:
        """Part from the others, who hear of it when they wait for this rank. Safe to repeat."""
        parting = self._part()
        if parting is not None:
            parting.join(_PARTING_SECONDS)

    def _part(self) -> threading.Thread | None:
        """Leave the group, in a thread of its own: it waits a while for the others to leave."""
        if self._group is None:
            return None
        group, self._group = self._group, None
        parting = threading.Thread(target=group.leave, name="flyweight-parting", daemon=True)
        parting.start()
        return parting


def _said(
    what: str, error: FlyweightError | None, *, is_first: bool = True, is_last: bool = False
) -> dict[str, Json]:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    return {"what": what, "is_first": is_first, "is_last": is_last, "error": text}


def _decided(said: Sequence[Any]) -> Verdict:
    """Decide, from what each rank says."""
    asked = [f"{'to prepare' if each['is_first'] else 'for'} {each['what']!r}" for each in said]
    if len(set(asked)) > 1:
        words = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(asked))
        is_early = all(each["is_first"] for each in said)
        text = f"the ranks were asked for different things: {words}"
        is_over = any(each["is_last"] for each in said)
        return Verdict(is_mixed=True, is_kept=is_early, is_over=is_over, text=text)
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(said) if each["error"]]
    if said[0]["is_first"]:
        was_paused, may_keep = (
            any(each.get(name, False) for each in said) for name in ("was_paused", "may_keep")
        )
        return Verdict(
            is_agreed=not errors,
            is_kept=True,
            was_paused=was_paused,
            may_keep=may_keep,
            text=errors[0] if errors else "",
        )
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
