"""Roll: the replicas that are connected, what each wants, and whether it waits for a version.

What replicas say is heard in the wire's thread, and their death in the door's; both
keep this roll. Rounds are run elsewhere: they take replicas from here and give them back.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from time import monotonic

from flyweight.digest import DigestKind
from flyweight.errors import (
    FlyweightError,
    PeerFailed,
    PeerLost,
    PeerRefused,
    TransferTimeout,
)
from flyweight.events import emit
from flyweight.forks import call_in_child
from flyweight.host import birth_of
from flyweight.live.address import Claim
from flyweight.live.connection import BEATS, Wire
from flyweight.live.lanes import HOST, Offers
from flyweight.live.messages import (
    Agreed,
    Ask,
    Block,
    Bye,
    Copied,
    Copy,
    Denied,
    Done,
    Emptied,
    Fault,
    FromReplica,
    Hello,
    Kept,
    Message,
    News,
    Refusal,
    ReplicaNews,
    Tick,
    Want,
    Welcome,
    Withdraw,
    decode_from_replica,
)
from flyweight.live.round import Part, Round
from flyweight.live.source import Region, Stock
from flyweight.transports.fd_passing import FdServer

_MAX_AGREEMENTS = 15
_WATCHER_SECONDS = 5.0
"""How long a watcher, who is not told what silence is allowed, may be silent at least."""
_LISTENER_SECONDS = 2.0


@dataclass(frozen=True, eq=False)
class Agreement:
    """What a replica gets, and where it wants it."""

    copies: tuple[Copy, ...]
    sinks: Sequence[Block]
    nbytes: int
    devices: frozenset[str]
    """The GPUs that the replica's process sees."""

    @cached_property
    def places(self) -> set[str]:
        return {sink.place for sink in self.sinks}

    def digest_kind(self, stock: Stock) -> DigestKind:
        """Return how both sides digest: as a GPU can, unless neither has anything on one.

        Of files the digests for GPUs are known without reading them.
        """
        return "xxh3" if stock.is_on_host and self.places <= {HOST} else "words"

    def regions(self, kind: DigestKind) -> tuple[Region, ...]:
        """Return what each copy reads, to be digested that way."""
        if kind not in self._regions:
            self._regions[kind] = tuple(
                Region(copy.source, copy.source_offset, copy.shape, kind) for copy in self.copies
            )
        return self._regions[kind]

    @cached_property
    def _regions(self) -> dict[DigestKind, tuple[Region, ...]]:
        return {}


@dataclass(eq=False)
class Peer:
    """A replica, as far as it is known."""

    id: bytes
    hello: Hello
    heard: float
    agreement: Agreement | None = None
    ask: Ask | None = None
    round: Round | None = None
    searched: int = 0
    """The ask for which the store was looked through."""
    is_busy: bool = False
    """True while a round has it, or is about to."""
    taken: int = 0
    """The ask that the round answers, withdrawn or not."""
    lists: int = 0
    """The number of the lists that it was sent last."""
    version: int | None = None
    state: str = "joined"
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    lanes: tuple[Offers, dict[int, str]] | None = None
    sent: object = None
    """Which lists it was sent last, so that they are not sent again."""

    @property
    def name(self) -> str:
        return self.hello.name


class Roll:
    """Answers replicas; `changed` guards all that is in it."""

    def __init__(
        self,
        claim: Claim,
        door: FdServer,
        stock: Callable[[], Stock],
        *,
        asked: Callable[[Peer], None],
        silence_seconds: float,
    ) -> None:
        self._claim, self._door, self._stock = claim, door, stock
        self._asked, self._silence_seconds = asked, silence_seconds
        self.session = secrets.token_hex(8)
        self.changed = threading.Condition(threading.RLock())
        self.peers: dict[bytes, Peer] = {}
        self.version: int | None = None
        self.is_broken = False
        self._watchers: dict[bytes, float] = {}
        self._agreements: dict[Want, Agreement] = {}
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a listener that never returns must not keep the process from its end.
        self._announcer = threading.Thread(
            target=self._announce_all, name="flyweight-events", daemon=True
        )
        self._news = News(None, 0, "idle", 0, 0.0, "", ())
        self._wire = Wire(
            claim.address.endpoint,
            is_publisher=True,
            hear=self._hear,
            beat=self._beat,
            beat_seconds=silence_seconds / BEATS,
            unreachable=self._unreachable,
            broken=self._break,
        )
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        """Have no lock, in a forked child, of whose holder did not come along."""
        self.changed = threading.Condition(threading.RLock())

    def start(self, version: int | None) -> None:
        """Answer from now on; `version` is there already."""
        self.version = version
        self._news = News(version, 0, "idle", 0, 0.0, "", ())
        self._announcer.start()
        self._wire.start()

    def announce(self, kind: str, **fields: int | float | str | None) -> None:
        """Emit in a thread of its own: what a listener raises must not end the wire's."""
        self._events.put(partial(emit, kind, **fields))

    def _announce_all(self) -> None:
        while (event := self._events.get()) is not None:
            with suppress(Exception):  # whatever a listener raises is its own
                event()

    def send(self, peer: bytes, message: Message) -> None:
        self._wire.send(message, peer)

    def spin(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Hear replicas in the caller's thread, for a moment in which they are due to speak."""
        return self._wire.spin(is_done, seconds)

    def waiting(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.ask is not None and not peer.is_busy]

    def deny(self, peer: Peer, version: int) -> None:
        """Tell a replica that what it asks for will never come."""
        assert peer.ask is not None
        ask, peer.ask = peer.ask, None  # before it hears so, and asks for something else
        text = (
            f"version {ask.version} was asked for; the publisher is past it, at {version}, and "
            f"does not hold it"
        )
        self.send(peer.id, Denied(ask.ask, "VersionError", text))

    def confirm(self, peer: Peer, ask: Ask) -> None:
        """Tell a replica that what it has is what it asks for."""
        with self.changed:
            if peer.ask is ask:
                peer.ask, peer.state = None, "ready"
                self.send(peer.id, Kept(ask.ask))

    def keep(self, peer: Peer) -> None:
        """Keep a replica that asks for a round."""
        assert peer.ask is not None
        peer.is_busy, peer.taken = True, peer.ask.ask

    def take(self, peers: Sequence[Peer], round_: Round) -> None:
        """Give replicas to a round, which hears what they say until they are taken back."""
        with self.changed:
            for peer in peers:
                peer.round, peer.state = round_, "updating"
                if peer.id not in self.peers:
                    round_.lose(peer.id, PeerLost(f"replica {peer.name!r} is gone"))

    def take_back(self, peer: Peer) -> None:
        """Let a replica ask again, after a round or after none."""
        with self.changed:
            part = None if peer.round is None else peer.round.part_of(peer.id)
            if part is not None and part.is_begun:
                peer.state = "ready" if part.is_committed else "failed"
                peer.error = "" if part.error is None else str(part.error)
                peer.nbytes, peer.seconds = part.nbytes, part.seconds
                if part.is_committed:
                    peer.version = part.begin.version
                if peer.ask is not None and peer.ask.ask == part.begin.ask:
                    peer.ask = None
            if part is None or not part.is_committed:
                peer.sent = None  # who knows what it has of the lists
            peer.round, peer.is_busy = None, False
            self.changed.notify_all()

    def fail(self, peer: Peer, error: FlyweightError) -> None:
        """Tell a replica that it cannot be served, before a round of it began."""
        with self.changed:
            if peer.ask is not None:
                self.send(peer.id, Denied(peer.ask.ask, type(error).__name__, str(error)))
                peer.ask, peer.error = None, str(error)

    def tell(
        self, round_: int, version: int | None, state: str, parts: Sequence[Part], seconds: float
    ) -> None:
        """Tell watchers how things stand."""
        nbytes = sum(part.nbytes for part in parts)
        ways = "+".join(sorted({part.begin.strategy for part in parts}))
        self._news = News(version, round_, state, nbytes, seconds, ways, ())
        self._pass_on_news()

    def close(self) -> None:
        with self.changed:
            for id in (*self.peers, *self._watchers):
                self.send(id, Bye("the publisher was closed"))
            self.peers.clear()
        self._wire.close()
        self._events.put(None)
        if self._announcer.ident is not None:
            self._announcer.join(_LISTENER_SECONDS)

    # What replicas say.

    def _hear(self, id: bytes, frame: bytes) -> None:
        try:
            message = decode_from_replica(frame)
        except FlyweightError as error:
            self.send(id, _refusal(error))
            self._lose(id, error)
            return
        with self.changed:
            if id in self._watchers:
                self._watchers[id] = monotonic()
                if isinstance(message, Bye):
                    del self._watchers[id]
            elif isinstance(message, Hello):
                self._greet(id, message)
            elif id in self.peers:
                self.peers[id].heard = monotonic()
                self._answer(self.peers[id], message)
            elif not isinstance(message, (Bye, Tick)):
                self.send(id, _refusal(PeerRefused("say hello first")))
            self.changed.notify_all()

    def _greet(self, id: bytes, hello: Hello) -> None:
        if not secrets.compare_digest(hello.token.encode(), self._claim.token.encode()):
            self.send(id, _refusal(PeerRefused(f"{self._claim.address} has another token")))
            return
        if hello.is_watcher:
            self._watchers[id] = monotonic()
            self._pass_on_news()
            return
        self.peers[id] = Peer(id, hello, monotonic())
        stock = self._stock()
        self.send(
            id,
            Welcome(
                self.session,
                *(birth_of() or (os.getpid(), 0)),
                stock.tensors,
                dict(stock.manifest.tied),
                self._silence_seconds,
                self.version,
            ),
        )

    def _answer(self, peer: Peer, message: FromReplica) -> None:
        match message:
            case Want():
                self._agree(peer, message)
            case Ask():
                if peer.agreement is None:
                    self.send(peer.id, _refusal(PeerRefused("say what you want first")))
                    return
                peer.ask, peer.state = message, "asking"
                if not peer.is_busy:
                    self._asked(peer)
            case Withdraw(ask=ask):
                if peer.ask is not None and peer.ask.ask == ask:
                    peer.ask = None
                    peer.state = "joined" if peer.version is None else "ready"
            case Emptied() | Copied() | Done() | Fault():
                if peer.round is not None:
                    peer.round.hear(peer.id, message)
            case Bye(text=text):
                self._lose(peer.id, PeerLost(f"replica {peer.name!r} went: {text}"))
            case _:
                pass

    def _agree(self, peer: Peer, want: Want) -> None:
        stock = self._stock()
        if want not in self._agreements:
            try:
                copies = stock.agree(want)
            except FlyweightError as error:
                self.send(peer.id, _refusal(error))
                self._lose(peer.id, error)
                return
            total = sum(stock.nbytes_of(copy) for copy in copies)
            self._agreements = dict(list(self._agreements.items())[-_MAX_AGREEMENTS:])
            self._agreements[want] = Agreement(copies, want.blocks, total, frozenset(want.devices))
        # Most replicas want the same, and to plan for many tensors takes a while.
        peer.agreement = self._agreements[want]
        nbytes = peer.agreement.nbytes
        peer.lanes = peer.sent = None
        self.send(peer.id, Agreed(stock.sources, peer.agreement.copies))
        self.announce("replica.joined", name=peer.name, pid=peer.hello.pid, nbytes=nbytes)
        self._pass_on_news()

    # How they go.

    def _break(self) -> None:
        """The wire has ended by an error of ours: nobody may go on waiting for it."""
        self.is_broken = True
        with self.changed:
            for id in list(self.peers):
                self._lose(id, PeerFailed("the publisher's wire has ended by an error"))
            self.changed.notify_all()
        self._door.close()  # then replicas notice, and look for another publisher

    def hung_up(self, line: str) -> None:
        """The door says that a process is gone."""
        with self.changed:
            for peer in list(self.peers.values()):
                if peer.hello.line == line:
                    self._lose(
                        peer.id,
                        PeerLost(f"replica {peer.name!r}, process {peer.hello.pid}, is gone"),
                    )

    def _unreachable(self, id: bytes) -> None:
        self._lose(id, PeerLost("nobody takes messages any more"))

    def _lose(self, id: bytes, error: FlyweightError) -> None:
        with self.changed:
            self._watchers.pop(id, None)
            peer = self.peers.pop(id, None)
            if peer is None:
                return
            peer.ask = None
            if peer.round is not None:
                peer.round.lose(id, error)
            self.announce("replica.lost", name=peer.name, pid=peer.hello.pid, error=str(error))
            self._pass_on_news()
            self.changed.notify_all()

    def _beat(self, now: float) -> None:
        with self.changed:
            awake = self._wire.awake_since
            for peer in list(self.peers.values()):
                if now - max(peer.heard, awake) > self._silence_seconds:
                    text = f"replica {peer.name!r} was silent for {self._silence_seconds:g} s"
                    self.send(peer.id, Bye(text))
                    self._lose(peer.id, TransferTimeout(text))
                else:
                    self.send(peer.id, Tick())
            for id, heard in list(self._watchers.items()):
                if now - max(heard, awake) > max(self._silence_seconds, _WATCHER_SECONDS):
                    del self._watchers[id]
            self._pass_on_news()

    def _pass_on_news(self) -> None:
        if not self._watchers:
            return
        with self.changed:
            replicas = tuple(
                ReplicaNews(
                    peer.name,
                    peer.hello.pid,
                    peer.state,
                    peer.version,
                    peer.nbytes,
                    peer.seconds,
                    peer.error,
                )
                for peer in self.peers.values()
                if peer.agreement is not None
            )
            now = self._news
            news = News(
                now.version, now.round, now.state, now.nbytes, now.seconds, now.strategy, replicas
            )
            for id in list(self._watchers):  # one that is gone is forgotten meanwhile
                self.send(id, news)


def _refusal(error: FlyweightError) -> Refusal:
    return Refusal(type(error).__name__, str(error))
