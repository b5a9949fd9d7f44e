"""A connection between two ranks: its messages, and what has come through it.

The channel's `Refused` tells of a fault, and `Ended` is the last message of a rank that leaves.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field

from flyweight.errors import FlyweightError, PeerFailed, PeerLost, TransportError, error_named
from flyweight.spec.strict_json import Json, parse_json
from flyweight.transports.channel import Channel, Ended, Message, Messages, Refused


class Arrived(Message, frozen=True):
    """The first message to the coordinator: which rank has connected."""

    rank: int


class Step(Message, frozen=True):
    """What a rank says in a step. The frame carries the number of the step."""

    what: str
    body: bytes
    """JSON: a state to be saved may contain larger integers than msgpack can."""


class Tick(Message, frozen=True):
    """The work of a rank goes on."""


TICK, ENDED = Tick(), Ended("this rank leaves")
MESSAGES = Messages(Arrived, Step, Tick)


@dataclass(eq=False)
class Connection:
    """A connection to one rank, and what it said that nobody has asked for yet."""

    channel: Channel
    inbox: deque[tuple[int, str, Json]] = field(default_factory=deque)
    """The number of a step, its name, and what the rank said in it."""
    heard: float = 0.0
    """When the last message came."""
    has_left: bool = False

    @property
    def is_usable(self) -> bool:
        """False once it is closed: its end was heard, or this process is a forked child."""
        return self.channel.wire.fileno() >= 0

    def say(self, number: int, what: str, body: Json, deadline: float) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        self.channel.send(Step(what, data), deadline, number=number)

    def hear(self) -> TransportError | None:
        """Take the message that comes; return the fault that it means, or its absence."""
        try:
            frame = self.channel.next_frame()
            frame.close()
            match frame.message:
                case Refused(kind, text):
                    fault = error_named(kind, text)
                    return fault if isinstance(fault, TransportError) else PeerFailed(text)
                case Ended():
                    self.has_left = True
                case Step(what, body):
                    self.inbox.append((frame.number, what, parse_json(body, "message")))
        except FlyweightError as error:
            self.channel.close()
            if isinstance(error, TransportError):
                return None if self.has_left else error
            return PeerLost(f"{self.channel.peer} sent no message: {error}")
        return None
