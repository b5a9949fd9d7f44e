"""RankAgreement: the ranks of one replica decide together, so that all serve the same version.

Each rank sends a statement (the version it holds, or an error), rank 0 decides, and all
ranks receive the same verdict. If a rank dies or is silent, nothing is agreed; a rank that
receives no verdict assumes that there is none. Ranks that work on different requests repeat
their statement until all work on the same one. The first rank that reaches its deadline marks
its statement as the last, and all ranks stop with that verdict.
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
"""How long to wait before asking again a rank that gives way."""
_LEAST_SECONDS = 0.1
_PARTING_SECONDS = 5.0
_LATE_SECONDS = 0.75
"""How long rank 0 listens after the deadline: ranks that time out send their error then."""


@dataclass(frozen=True)
class Verdict:
    """What the ranks decided."""

    is_agreed: bool = False
    is_kept: bool = False
    """True if no rank has written anything: each still holds its committed version."""
    is_lost: bool = False
    """True if a rank died or was silent: its weights are unknown."""
    is_mixed: bool = False
    """True if the ranks work on different requests."""
    is_over: bool = False
    """True if `is_mixed` and one rank has reached its deadline, so nobody repeats."""
    was_paused: bool = False
    """True if a user paused one of the ranks before."""
    may_keep: bool = False
    """True if the version that is held answers the request on at least one rank."""
    catch_up: int | None = None
    """The newest version among the ranks; ranks with an older one load it."""
    text: str = ""


class RankAgreement:
    """Exchanges statements with the other ranks; decides alone without a rendezvous."""

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
        is_requested: bool = True,
        was_paused: bool = False,
        may_keep: bool = False,
    ) -> Verdict:
        """Return whether all ranks are ready for the same operation. Every rank must call this.

        `is_requested` is False for a rank that follows its source: it does not repeat itself.
        """
        is_last = is_requested and monotonic() >= deadline
        mine = _statement(what, error, is_last=is_last)
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
        """Return whether all ranks hold the same version. Every rank must call this.

        `is_as_before` is True if this rank still holds the version that was committed last.
        """
        held: dict[str, Json] = {"version": version, "session": session}
        mine = _statement(what, error, is_first=False, is_last=monotonic() >= deadline)
        return self._decide({**mine, **held, "is_as_before": is_as_before}, deadline)

    def report_busy(self, busy: Busy, deadline: float, *, what: str) -> None:
        """Tell the other ranks that this rank cannot join an update, because it is busy.

        Only the follow thread calls this. It holds the source of weights, so the operation that
        runs is not an update, and its statements cannot be confused with this one. If that
        operation is exchanging statements now, send nothing: the others learn its purpose.
        """
        if self.rendezvous.num_ranks > 1 and self._speaking.acquire(blocking=False):
            try:
                self._exchange(_statement(what, busy), deadline)
            finally:
                self._speaking.release()

    def _decide(self, mine: dict[str, Json], deadline: float) -> Verdict:
        if self.rendezvous.num_ranks == 1:
            return _verdict([mine])
        with self._speaking:
            return self._exchange(mine, deadline)

    def _exchange(self, mine: dict[str, Json], deadline: float) -> Verdict:
        try:
            group = self._connected_group(self._patience(deadline))
            said = group.gather("say", mine)
            decided: Any = group.broadcast("verdict", asdict(_verdict(said)) if said else None)
            return Verdict(**decided)
        except TransportError as fault:
            self._leave()
            return Verdict(is_lost=True, text=f"the ranks did not decide: {fault}")

    def _patience(self, deadline: float) -> float:
        """Return the group's timeout for one exchange.

        A rank that tries until the deadline sends its statement after it. Rank 0 must wait for
        that statement, and the others for rank 0.
        """
        left = max(deadline - monotonic(), _LEAST_SECONDS)
        is_first = self.rendezvous.rank == 0
        return (left + _LATE_SECONDS) / PATIENCE if is_first else left + 2 * _LATE_SECONDS

    def _connected_group(self, timeout_seconds: float) -> Group:
        """Return the group of ranks, connected, with this timeout for each wait."""
        if self._group is not None and self._group.can_rejoin:
            self._leave()  # a rank missed an earlier verdict; start over with a new group
        if self._group is None:
            self._group = join_group(self.rendezvous, timeout_seconds=timeout_seconds)
        else:
            self._group.set_timeout(timeout_seconds)
        return self._group

    def close(self) -> None:
        """Leave the group; ranks that wait for this one learn of it. Safe to repeat."""
        parting = self._leave()
        if parting is not None:
            parting.join(_PARTING_SECONDS)

    def _leave(self) -> threading.Thread | None:
        """Leave the group in a thread, since leaving waits a while for the other ranks."""
        if self._group is None:
            return None
        group, self._group = self._group, None
        parting = threading.Thread(target=group.leave, name="flyweight-parting", daemon=True)
        parting.start()
        return parting


def _statement(
    what: str, error: FlyweightError | None, *, is_first: bool = True, is_last: bool = False
) -> dict[str, Json]:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    return {"what": what, "is_first": is_first, "is_last": is_last, "error": text}


def _verdict(said: Sequence[Any]) -> Verdict:
    """Decide from the statements of all ranks. Pure."""
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
