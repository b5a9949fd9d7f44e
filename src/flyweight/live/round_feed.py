"""Feed: what a publisher says while a replica takes a round from it.

Each wait is given as long as the first: who makes progress is never late.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from flyweight.errors import FlyweightError, TransportError, error_named
from flyweight.live.intake import Intake
from flyweight.live.messages import Abort, Commit, Copied, Emptied, Filled, Going
from flyweight.live.subscriber import Subscriber

_REASON_SECONDS = 1.0


class Link:
    """A connection on which all is agreed."""

    def __init__(
        self, subscriber: Subscriber, intake: Intake, session: str, unused: tuple[str, ...]
    ) -> None:
        self.subscriber, self.intake, self.session = subscriber, intake, session
        self.unused = unused

    def close(self) -> None:
        self.intake.close()
        self.intake.transports.close()
        self.subscriber.close()


class RoundFeed:
    """What the publisher says in a round; each wait is given as long as the first."""

    def __init__(
        self,
        subscriber: Subscriber,
        round_: int,
        timeout_seconds: float,
        spin_seconds: float,
        *,
        touch: Callable[[], None],
        advance: Callable[[int], None],
    ) -> None:
        self._subscriber, self._round, self._spin_seconds = subscriber, round_, spin_seconds
        self._timeout_seconds, self.is_aborted = timeout_seconds, False
        self.touch, self.advance = touch, advance

    @property
    def deadline(self) -> float:
        return monotonic() + self._timeout_seconds

    def check_alive(self) -> None:
        """Raise if the publisher went, or gave the round up, before anything was taken."""
        self._subscriber.check_open(self._round)

    def message(self, what: str) -> Filled | Commit:
        """Return the next message of this round; raise what the publisher aborts it with."""
        deadline = self.deadline
        while True:
            message = self._subscriber.next(deadline, what, spin_seconds=self._spin_seconds)
            match message:
                case Filled(round=number) | Commit(round=number) if number == self._round:
                    return message
                case Abort(round=number, kind=kind, text=text) if number == self._round:
                    self.is_aborted = True
                    raise error_named(kind, text)
                case Going(round=number) if number == self._round:
                    deadline = self.deadline
                case _:
                    continue

    def abort(self) -> FlyweightError | None:
        """Return why the publisher gave this round up, if it says so soon."""
        deadline = monotonic() + _REASON_SECONDS
        try:
            while True:
                message = self._subscriber.next(deadline, "a reason")
                if isinstance(message, Abort) and message.round == self._round:
                    return error_named(message.kind, message.text)
        except TransportError:
            return None

    def next(self) -> int:
        message = self.message("a bucket")
        if not isinstance(message, Filled):
            raise TransportError("the publisher commits a round that is not over")
        return message.bucket

    def emptied(self, bucket: int) -> None:
        self._subscriber.send(Emptied(self._round, bucket))

    def copied(self) -> None:
        self._subscriber.send(Copied(self._round))
