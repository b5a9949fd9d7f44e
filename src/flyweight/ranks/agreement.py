"""RankAgreement: the ranks of one engine tell each other what they are at, and agree or stop.

Every rank hears the answers of all ranks, so all decide alike. A rank that hears no answers knows
nothing: PeerLost. Ranks that are at different things repeat their answers until all are at the
same one, or stop together as soon as the first of them reaches its deadline.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import Any

from flyweight.errors import FlyweightError, LifecycleError, PeerLost, TransportError, error_named
from flyweight.ranks.group import PATIENCE, Group
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.spec.manifest import Json

YIELD_SECONDS = 0.001
"""How long to wait before asking again a rank that gives way."""
_LEAST_SECONDS = 0.1
_PARTING_SECONDS = 5.0
_LATE_SECONDS = 0.75
"""How long rank 0 listens after the deadline: ranks that time out send their error then."""


class RankAgreement:
    """Exchanges answers with the other ranks; agrees alone without a rendezvous."""

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        self._rendezvous = Rendezvous() if rendezvous is None else rendezvous
        self.num_ranks = self._rendezvous.num_ranks
        self._group: Group | None = None
        self._speaking = threading.Lock()

    def agree(
        self, what: str, deadline: float, error: FlyweightError | None = None, **facts: Json
    ) -> list[dict[str, Any]]:
        """Return the facts of all ranks once all are ready for `what`. Every rank must call this.

        Raises this rank's error, or else that of another rank, on every rank if one has an error.
        """
        while True:
            is_last = monotonic() >= deadline
            said = self._exchange({**_answer(what, error), "is_last": is_last, **facts}, deadline)
            mixed = _mixed(said)
            if mixed is None:
                raise_first(said, error)
                return said
            if any(each.get("is_last") for each in said):
                raise mixed
            sleep(YIELD_SECONDS)  # a rank that follows its source gives way

    def exchange(
        self, what: str, deadline: float, error: BaseException | None = None, **facts: Json
    ) -> list[dict[str, Any]]:
        """Return the answers of all ranks, and let the caller decide. Every rank must call this.

        Raises LifecycleError if a rank is at something else.
        """
        said = self._exchange({**_answer(what, error), **facts}, deadline)
        if (mixed := _mixed(said)) is not None:
            raise mixed
        return said

    def _exchange(self, mine: dict[str, Json], deadline: float) -> list[dict[str, Any]]:
        if self.num_ranks == 1:
            return [mine]
        seconds = self._patience(deadline)
        if not self._speaking.acquire(timeout=seconds):
            raise PeerLost(
                f"the ranks did not decide: this rank still waits for the others in another "
                f"operation after {seconds:.3g} s"
            )
        try:
            group = self._connected_group(self._patience(deadline))
            said: Any = group.broadcast("answers", group.gather("say", mine) or None)
            return list(said)
        except TransportError as fault:
            self._leave()
            raise PeerLost(f"the ranks did not decide: {fault}") from fault
        finally:
            self._speaking.release()

    def _patience(self, deadline: float) -> float:
        """Return the group's timeout for one exchange.

        A rank that tries until the deadline sends its answer after it. Rank 0 must wait for
        that answer, and the others for rank 0.
        """
        left = max(deadline - monotonic(), _LEAST_SECONDS)
        is_first = self._rendezvous.rank == 0
        return (left + _LATE_SECONDS) / PATIENCE if is_first else left + 2 * _LATE_SECONDS

    def _connected_group(self, timeout_seconds: float) -> Group:
        """Return the group of ranks, connected, with this timeout for each wait."""
        if self._group is not None and self._group.is_over:
            self._leave()  # a rank missed earlier answers, or was started again
        if self._group is None:
            self._group = join_group(self._rendezvous, timeout_seconds=timeout_seconds)
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


def raise_first(said: list[dict[str, Any]], own: BaseException | None = None) -> None:
    """Raise this rank's own error, or else the first one in the answers of all ranks."""
    if own is not None:
        raise own
    for rank, each in enumerate(said):
        if each["error"]:
            raise error_named(each["error"], f"rank {rank}: {each['text']}")


def _answer(what: str, error: BaseException | None) -> dict[str, Json]:
    kind = "" if error is None else type(error).__name__
    return {"what": what, "error": kind, "text": "" if error is None else f"{kind}: {error}"}


def _mixed(said: list[dict[str, Any]]) -> LifecycleError | None:
    """Return the error that names what each rank is at, if that is not the same for all."""
    if len({each["what"] for each in said}) == 1:
        return None
    words = ", ".join(f"rank {rank} {each['what']!r}" for rank, each in enumerate(said))
    return LifecycleError(
        f"the ranks were asked for different things: {words}; ask all of them for the same"
    )
