"""Steps that the ranks of an engine or of a trainer take together, or none of them.

All ranks hear the answers of all, so they decide alike. A rank that hears no answers knows nothing
of what the others decided. After that the group is closed, and the next step meets anew, so that a
rank that was started again can come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    PeerFailed,
    PeerLost,
    TransportError,
    error_named,
)
from flyweight.ranks.group import VERDICT_SECONDS, Group, RankLeft
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.spec.strict_json import Json

YIELD_SECONDS = 0.001
"""How long to wait before asking again a rank that gives way."""
Answer = dict[str, Any]
Facts = dict[str, Json]
_LATE_SECONDS = 0.75
"""How long an agreement listens after the deadline: ranks that time out send their error then."""


class Ranks:
    """Takes steps together with the other ranks, over connections that stay; alone without any."""

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        self._rendezvous = Rendezvous() if rendezvous is None else rendezvous
        self.rank, self.num_ranks = self._rendezvous.rank, self._rendezvous.num_ranks
        self._group: Group | None = None
        self._turn = threading.Lock()

    def step(
        self, what: str, work: Callable[[], object], deadline: float, **facts: Callable[[], Json]
    ) -> list[Answer]:
        """Do this rank's work, and return the facts of all ranks once all have done theirs.

        Every rank must call this for the same `what` and with about the same deadline. Raises on
        every rank, if it fails on one: this rank's own error, or else the first of another. A rank
        that is not there at the deadline, or ends before, is named by the others' errors.
        `facts` are called after the work.
        """
        error: FlyweightError | None = None
        mine: Facts = {}
        with self._in_turn(what, deadline):
            group = self._join(deadline)  # before the work: then all hear of its end
            group.wait_for_fault(0)
            try:
                work()
                mine = {name: fact() for name, fact in facts.items()}
            except FlyweightError as failure:
                error = failure
            except Exception as cause:  # of the user's own code
                error = LifecycleError(f"this rank could not {what}: {cause!r}")
                error.__cause__ = cause
            try:
                said = self._said(group, _answer(what, error, mine), deadline)
            except TransportError:
                if error is None:
                    raise
                raise error from error.__cause__
        raise_first(said, error)
        _raise_mixed(said)
        return [{name: each[name] for name in facts} for each in said]

    def renew(self) -> None:
        """Have the next step meet anew if a rank was lost since the last one.

        To be called before the first step of what the ranks do together. In later steps a rank that
        was lost is an error at once, also if it was started again.
        """
        if not self.is_met:
            self._part()

    @property
    def is_met(self) -> bool:
        """True if the ranks are connected, as far as it is known."""
        return self._group is not None and not self._group.is_over

    @property
    def files(self) -> list[int]:
        """The open files to poll in the work of a step that waits long, besides its own."""
        return [] if self._group is None else self._group.files

    def look(self) -> None:
        """Raise if another rank was lost or has failed; call it when one of `files` is readable."""
        if self._group is not None:
            self._group.wait_for_fault(0)

    def close(self) -> None:
        """Leave; ranks that wait for this one fail. Safe to repeat, and in a signal handler."""
        group = self._group
        if group is not None and group.close(PeerFailed(f"rank {self.rank} has left")):
            self._group = None

    @contextmanager
    def _in_turn(self, what: str, end: float) -> Iterator[None]:
        """One thread at a time; what is raised in the block ends the group, for all its ranks."""
        if not self._turn.acquire(timeout=max(end - monotonic(), 0)):
            raise PeerLost("this rank still waits for the others in another operation")
        try:
            yield
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self._part(PeerFailed(f"rank {self.rank} failed in step {what!r}: {why}"))
            raise
        finally:
            self._turn.release()

    def _join(self, end: float) -> Group:
        """Return the group of ranks, connected."""
        if self._group is None:
            if self.rank != 0:  # rank 0 tells who did not come
                end += VERDICT_SECONDS
            self._group = join_group(self._rendezvous, deadline=end)
        return self._group

    def _said(self, group: Group, mine: Answer, end: float) -> list[Any]:
        while True:
            try:
                return group.exchange(mine["what"], mine, end)
            except RankLeft:  # it was started again, or heard of one that was
                self._part()
                group = self._join(end)

    def _part(self, fault: TransportError | None = None) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close(fault)


class RankAgreement(Ranks):
    """Exchanges answers with the other ranks; meets them anew whenever one was lost."""

    def agree(
        self, what: str, deadline: float, error: FlyweightError | None = None, **facts: Json
    ) -> list[Answer]:
        """Return the facts of all ranks once all are ready for `what`. Every rank must call this.

        Ranks that are at different things repeat their answers until all are at the same one, or
        stop together as soon as the first of them reaches its deadline. Raises on every rank, if
        one has an error: this rank's own, or else that of another.
        """
        while True:
            is_last = monotonic() >= deadline
            said = self._exchange(_answer(what, error, {"is_last": is_last, **facts}), deadline)
            if len({each["what"] for each in said}) == 1:
                raise_first(said, error)
                return said
            if any(each.get("is_last") for each in said):
                _raise_mixed(said)
            sleep(YIELD_SECONDS)  # a rank that follows its source gives way

    def exchange(
        self, what: str, deadline: float, error: BaseException | None = None, **facts: Json
    ) -> list[Answer]:
        """Return the answers of all ranks, and let the caller decide. Every rank must call this.

        Raises LifecycleError if a rank is at something else.
        """
        said = self._exchange(_answer(what, error, facts), deadline)
        _raise_mixed(said)
        return said

    def _exchange(self, mine: Answer, deadline: float) -> list[Answer]:
        # A rank that tries until the deadline sends its answer after it.
        end = max(deadline, monotonic()) + _LATE_SECONDS
        try:
            with self._in_turn(mine["what"], end):
                self.renew()
                return self._said(self._join(end), mine, end)
        except TransportError as fault:
            raise PeerLost(f"the ranks did not decide: {fault}") from fault


def raise_first(said: list[Answer], own: BaseException | None = None) -> None:
    """Raise this rank's own error, or else the first one in the answers of all ranks."""
    if own is not None:
        raise own
    for rank, each in enumerate(said):
        if each["error"]:
            raise error_named(each["error"], f"rank {rank}: {each['text']}")


def _answer(what: str, error: BaseException | None, facts: Facts) -> Answer:
    kind = "" if error is None else type(error).__name__
    text = "" if error is None else f"{kind}: {error}"
    return {"what": what, "error": kind, "text": text, **facts}


def _raise_mixed(said: list[Answer]) -> None:
    """Raise an error that names what each rank is at, if that is not the same for all."""
    if len({each["what"] for each in said}) > 1:
        words = ", ".join(f"rank {rank} {each['what']!r}" for rank, each in enumerate(said))
        raise LifecycleError(
            f"the ranks were asked for different things: {words}; ask all of them for the same"
        )
