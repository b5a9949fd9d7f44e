"""Members: the connected replicas, the tensors each one wants and the version it waits for.

The connection's thread handles their messages and their deaths, and changes the members under one
lock. Rounds run in other threads: they take members from here and give them back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from flyweight.errors import FlyweightError, PeerFailed, PeerLost, PeerRefused, TransferTimeout
from flyweight.forks import call_in_child
from flyweight.host import birth_of
from flyweight.live import frames, messages
from flyweight.live.address import Claim
from flyweight.live.admission import Admission
from flyweight.live.connection import HEARTBEATS, Connection
from flyweight.live.member import Member, MemberRound, refusal_of, whole_replicas
from flyweight.live.news import EventThread, Watchers
from flyweight.live.planner import Planner
from flyweight.live.report import RefusedReplicas, ReplicaReport
from flyweight.live.source_blocks import Agreement
from flyweight.live.sources import Sources
from flyweight.plans.tables import Tensors
from flyweight.transports.fd_passing import FdServer


class Members:
    """Handles the messages of replicas. `changed` guards all state."""

    def __init__(self, claim: Claim, admission: Admission, silence_seconds: float) -> None:
        self._claim, self._silence_seconds = claim, silence_seconds
        self.admission = admission
        self.changed = threading.Condition(threading.RLock())
        self.by_id: dict[bytes, Member] = {}
        self.version: int | None = None
        """The version that was published last."""
        self.has_failed = False
        """True once the connection's thread has ended by an error."""
        self._has_started = self._is_closed = False
        self._refused = RefusedReplicas()
        self.connection = Connection(
            claim.address.endpoint,
            is_publisher=True,
            on_frame=self._on_frame,
            on_heartbeat=self._on_heartbeat,
            heartbeat_seconds=silence_seconds / HEARTBEATS,
            on_unreachable=self._on_unreachable,
            on_failure=self._on_failure,
        )
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        """Replace the lock after a fork: the thread that held it does not exist in the child."""
        self.changed = threading.Condition(threading.RLock())

    def start(
        self,
        sources: Sources,
        files: FdServer,
        on_request: Callable[[Sequence[Member]], None],
    ) -> None:
        """Accept replicas from now on.

        sources: the ranks that publish.
        files: where replicas of this host get memory; closed if the connection's thread fails.
        on_request: called with the ranks of each replica that requests a version.
        """
        self._sources, self._files, self._on_request = sources, files, on_request
        self._watchers = Watchers(self.connection.send, self.version)
        self.events = EventThread()
        """Emits events in another thread."""
        plans = sources.blocks.plan, sources.engine_for
        self._planner = Planner(*plans, self._agree, self._refuse_member)
        self._has_started = True
        self.connection.start()

    # Requests and rounds.

    def waiting(self) -> list[list[Member]]:
        """Return the ranks of each replica that waits for a version: all of its ranks do."""
        return whole_replicas(each for each in self.by_id.values() if each.is_waiting)

    def replicas(self) -> list[list[Member]]:
        """Return the ranks of each replica whose ranks have all joined."""
        return whole_replicas(each for each in self.by_id.values() if each.agreement)

    def _siblings(self, member: Member) -> list[Member]:
        """Return the members that are ranks of the same replica."""
        if member.hello.num_ranks == 1:  # do not look at all others
            return [self.by_id[member.id]] if member.id in self.by_id else []
        return [each for each in self.by_id.values() if each.replica == member.replica]

    def deny(self, ranks: Sequence[Member], error: FlyweightError) -> None:
        """Tell a replica why it does not get the version that it requests."""
        with self.changed:
            for member in ranks:
                if member.request is not None:
                    # Forget it first: the replica may send another as soon as it is denied.
                    number, member.request, member.error = member.request.ask, None, str(error)
                    denied = messages.Denied(number, type(error).__name__, str(error))
                    self._send(member, denied)

    def confirm(self, ranks: Sequence[Member]) -> None:
        """Tell a replica that it already has the version that it requests."""
        with self.changed:
            if all(each.request is not None for each in ranks):
                for member in ranks:
                    assert member.request is not None
                    number, member.request = member.request.ask, None
                    member.state, member.error = "ready", ""
                    self._send(member, messages.Kept(number))

    def point_elsewhere(self, member: Member, version: int, addresses: Sequence[str]) -> None:
        """Tell a replica of one rank where else it can take the version that it requests."""
        with self.changed:
            if member.request is not None:
                number, member.request = member.request.ask, None
                self._send(member, messages.Elsewhere(number, version, tuple(addresses)))

    def reserve(self, ranks: Sequence[Member]) -> None:
        """Reserve the ranks of a replica for the round that answers their requests."""
        for member in ranks:
            assert member.request is not None
            member.request_in_round = member.request.ask

    def join_round(self, members: Sequence[MemberRound]) -> None:
        """Pass the messages of a round's members to it, until `leave_round`."""
        with self.changed:
            for progress in members:
                progress.member.round, progress.member.state = progress, "updating"
                if progress.member.id not in self.by_id:
                    progress.lose(PeerLost(f"replica {progress.member.label} is gone"))

    def leave_round(self, member: Member) -> None:
        """Let a member request versions again, after its round, or if there was none."""
        with self.changed:
            progress = member.round
            if progress is not None and progress.has_begun:
                member.state = "ready" if progress.is_committed else "failed"
                member.error = "" if progress.error is None else str(progress.error)
                member.nbytes, member.seconds = progress.agreement.nbytes, progress.seconds
                if progress.is_committed or progress.is_touched:
                    member.version = progress.begin.version if progress.is_committed else None
                if member.request is not None and member.request.ask == progress.begin.ask:
                    member.request = None
            if progress is None or not progress.is_committed:
                member.lists_sent = None  # it may not have received them
            member.round = member.request_in_round = None
            self.changed.notify_all()

    def set_state(
        self,
        round_: int,
        version: int | None,
        state: str,
        progress: Sequence[MemberRound],
        seconds: float,
    ) -> None:
        """Tell watchers what the publisher does."""
        nbytes = sum(each.agreement.nbytes for each in progress)
        lanes = "+".join(sorted({each.begin.strategy for each in progress}))
        with self.changed:
            self._watchers.news = messages.News(version, round_, state, nbytes, seconds, lanes, ())
            self._watchers.send(self.by_id.values())

    def close(self) -> None:
        """Disconnect all replicas. Safe to repeat."""
        with self.changed:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._has_started:
                self.connection.close()
                return
            followers = [each.id for each in self._sources.followers if each.id]
            for id in (*self.by_id, *self._watchers.ids, *followers):
                self.connection.send(messages.Bye("the publisher was closed"), id)
            self.by_id.clear()
        self.connection.close()
        self._planner.close()
        self.events.close()

    # Messages from replicas, in the connection's thread.

    def _send(self, member: Member, message: messages.Message) -> None:
        self.connection.send(message, member.id)

    def _on_frame(self, id: bytes, frame: memoryview) -> None:
        try:
            if not self._knows(id):
                frames.check_length(frame)
            message = frames.decode_from_replica(frame)
        except FlyweightError as error:
            self._refuse(id, error)
            return
        with self.changed:
            if id in self._watchers:
                self._watchers.seen(id)
                if isinstance(message, messages.Bye):
                    self._watchers.remove(id)
            elif isinstance(message, messages.Hello):
                self._on_hello(id, message)
            elif (follower := self._sources.follower(id)) is not None:
                self._sources.on_message(follower, message)
            elif id in self.by_id:
                self.by_id[id].last_seen = monotonic()
                self._on_message(self.by_id[id], message)
            elif not isinstance(message, (messages.Bye, messages.Tick)):
                self._refuse(id, PeerRefused("the first message must be Hello"))
            self.changed.notify_all()

    def _knows(self, id: bytes) -> bool:
        """True if a sender has shown the token."""
        with self.changed:
            return id in self.by_id or id in self._watchers or bool(self._sources.follower(id))

    def _refuse(self, id: bytes, error: FlyweightError) -> None:
        """Tell a replica why it cannot be served, and forget it."""
        self.connection.send(messages.Refusal(type(error).__name__, str(error)), id)
        self._lose(id, error)

    def _on_hello(self, id: bytes, hello: messages.Hello) -> None:
        if not self.admission.knows_token(hello):
            text = f"the publisher at {self._claim.address} has another token"
            self.connection.send(messages.Refusal("PeerRefused", text), id)
            return
        if id in self.by_id:
            self._refuse(id, PeerRefused("a connection sends one Hello, this one has sent two"))
            return
        if hello.role == "watcher":
            self._watchers.seen(id)
            self._watchers.send(self.by_id.values())
            return
        blocks = self._sources.blocks
        if hello.role == "source":
            error = self._sources.on_hello(id, hello)
        else:
            error = self._add_member(Member(id, hello, monotonic()))
        if error is not None:
            self._refuse(id, error)
            return
        welcome = messages.Welcome(
            self.admission.session,
            *(birth_of() or (os.getpid(), 0)),
            blocks.described if hello.role == "replica" else Tensors.of({}),
            dict(blocks.tied) if hello.role == "replica" else {},
            self._silence_seconds,
            self.version,
            self.admission.follows,
        )
        self.connection.send(welcome, id)

    def refuse_local(self) -> None:
        """Let replicas of this host read over the network too: a source rank is elsewhere."""
        with self.changed:
            self.admission.accept_remote_only()
            for member in list(self.by_id.values()):
                if (refusal := self.admission.refusal(member.hello)) is not None:
                    self._refuse(member.id, refusal)

    def _add_member(self, member: Member) -> FlyweightError | None:
        """Accept a replica, or a rank of one; return why it is refused."""
        hello = member.hello
        siblings = self._siblings(member)
        refusal = self.admission.refusal(hello) or refusal_of(member, siblings)
        if refusal is not None:
            return refusal
        for other in siblings:
            if other.hello.rank == hello.rank:
                text = f"replica {member.label} connected again, from the same process"
                self._refuse(other.id, PeerRefused(text))
        self.by_id[member.id] = member
        return None

    def _on_message(self, member: Member, message: frames.FromReplica) -> None:
        match message:
            case messages.Want():
                member.checks_digests = message.checks_digests
                self._planner.add(member, message)
            case messages.Ask():
                if member.agreement is None:
                    text = "a Want must come before the first Ask"
                    self._send(member, messages.Refusal("PeerRefused", text))
                    return
                member.request, member.state, member.is_searched = message, "asking", False
                member.version = message.have
                siblings = self._siblings(member)
                for ranks in whole_replicas(each for each in siblings if each.is_waiting):
                    self._on_request(ranks)
            case messages.Withdraw(ask=number):
                if member.request is not None and member.request.ask == number:
                    member.request = None
                    member.state = "joined" if member.version is None else "ready"
            case messages.Bye(text=text):
                self._lose(member.id, PeerLost(f"replica {member.label} disconnected: {text}"))
            case _:
                if member.round is not None and isinstance(message, messages.InRound):
                    member.round.receive(message)
                elif isinstance(message, messages.Fault) and message.is_touched:
                    # Its last round is over, and it cannot serve what that committed.
                    member.state, member.version, member.error = "failed", None, message.text

    # Plans, which a thread of their own makes.

    def _agree(self, member: Member, agreement: Agreement) -> None:
        with self.changed:
            if self.by_id.get(member.id) is not member:
                return  # it has gone meanwhile
            member.agreement = agreement
            member.lists_sent = None
            self._refused.forget(member.name)
            self._send(member, self._sources.blocks.agreed())
            self.changed.notify_all()
        pid = member.hello.pid
        self.events.emit("replica.joined", name=member.shown_name, pid=pid, nbytes=agreement.nbytes)
        with self.changed:
            self._watchers.send(self.by_id.values())

    def _refuse_member(self, member: Member, error: FlyweightError) -> None:
        """Tell a replica why it is refused, and the trainer with the next publish."""
        with self.changed:
            if self.by_id.get(member.id) is member:
                self._refused.add(member.refused(error))
                self._refuse(member.id, error)

    def take_refused(self) -> list[ReplicaReport]:
        """Return the replicas that were refused since the last call."""
        with self.changed:
            return self._refused.take()

    # Lost replicas.

    def _on_failure(self) -> None:
        """Let nobody wait for a connection whose thread has ended by an error."""
        self.has_failed = True
        with self.changed:
            for id in list(self.by_id):
                self._lose(id, PeerFailed("the publisher's connection has ended by an error"))
            self.changed.notify_all()
        self._files.close()  # replicas notice that, and look for another publisher
        if self.admission.data is not None:
            self.admission.data.close()

    def on_process_gone(self, line: str) -> None:
        """Lose the replica whose connection for files was closed with its process."""
        with self.changed:
            if not self._has_started:
                return  # it has not joined
            members = (each for each in self.by_id.values() if each.hello.line == line)
            gone = {each.id: f"{each.long_label}, is gone" for each in members}
            ranks = (each for each in self._sources.followers if each.line == line)
            gone |= dict.fromkeys((each.id for each in ranks), "its process is gone")
        for id, text in gone.items():
            self.connection.after_last_message(id, partial(self._lose, id, PeerLost(text)))

    def _on_unreachable(self, id: bytes, is_gone: bool) -> None:
        with self.changed:
            who = f"{self.by_id[id].long_label}," if id in self.by_id else "its process"
            self._lose(id, PeerLost(f"{who} {'is gone' if is_gone else 'accepts no messages'}"))

    def _lose(self, id: bytes, error: FlyweightError) -> None:
        with self.changed:
            self._watchers.remove(id)
            if (follower := self._sources.follower(id)) is not None:
                self._sources.lose(follower, error)
            member = self.by_id.pop(id, None)
            if member is None:
                return
            member.request = None
            if member.round is not None:
                member.round.lose(error)
            pid = member.hello.pid
            self.events.emit("replica.lost", name=member.shown_name, pid=pid, error=str(error))
            self._watchers.send(self.by_id.values())
            self.changed.notify_all()

    def _on_heartbeat(self, now: float) -> None:
        awake = self.connection.awake_since

        def check(id: bytes, last_seen: float, name: str) -> None:
            if now - max(last_seen, awake) <= self._silence_seconds:
                self.connection.send(messages.Tick(), id)
            else:
                text = f"{name} was silent for {self._silence_seconds:g} s"
                self.connection.send(messages.Bye(text), id)
                self._lose(id, TransferTimeout(text))

        with self.changed:
            for member in list(self.by_id.values()):
                check(member.id, member.last_seen, f"replica {member.label}")
            for follower in self._sources.followers:
                if follower.id:
                    check(follower.id, follower.last_seen, "it")
            self._watchers.remove_silent(now, self._silence_seconds, awake)
            self._watchers.send(self.by_id.values())
