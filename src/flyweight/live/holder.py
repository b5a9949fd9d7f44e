"""Holder: serves the offers of one process. It is passive: readers ask, a thread answers each.

A trainer's rank, a replica that lets others fetch from it, and a relay are all holders.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from logging import getLogger
from time import monotonic

from flyweight.cuda import driver
from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    PlanError,
    SpecError,
    TransportError,
)
from flyweight.events import announce
from flyweight.live.buckets import NUM_SLOTS
from flyweight.live.messages import (
    MESSAGES,
    Announced,
    Available,
    Cancel,
    Current,
    Data,
    Declined,
    Done,
    Fill,
    Filled,
    Join,
    Later,
    Layout,
    Lease,
    Leased,
    Look,
    Mistrust,
    News,
    NotYet,
    Pack,
    Packed,
    Planned,
    Post,
    Posted,
    Pull,
    Read,
    Release,
    Released,
    Ringed,
    Share,
    Shared,
    Staged,
    Superseded,
    TakeRing,
    Wait,
    Want,
    Watch,
    Welcome,
)
from flyweight.live.offer import Copies, Offer, Served
from flyweight.live.plan import Plan, Plans, Wanted
from flyweight.live.publish_id import PublishId
from flyweight.live.ring import Ring
from flyweight.live.shelf import Shelf
from flyweight.memory import Bytes
from flyweight.transports.address import (
    Endpoint,
    TcpAddress,
    listening,
    listening_tcp,
    this_host,
)
from flyweight.transports.channel import Channel, Frame, Message
from flyweight.transports.door import Door
from flyweight.transports.nixl import NixlServer, Window, nixl_here
from flyweight.transports.segments import Segment, map_segment
from flyweight.transports.tls import Tls
from flyweight.transports.wire import FOREVER

_SEND_SECONDS = 20.0
_MOST_SECONDS = 60.0
"""No request keeps its thread for longer, whatever the reader asks for; `Wait` watches it."""
_MOST_BYTES = 64 << 20
_MOST_SHARED = 64
_PARTING_SECONDS = 1.0
MAX_CONNECTIONS = 2048
_log = getLogger("flyweight.live")


@dataclass(frozen=True, eq=False)
class Holding:
    """What a holder serves: the versions of one session of a trainer."""

    session: str
    plans: Plans
    ranks: tuple[Endpoint, ...] = ()
    """Where the trainer's ranks are; empty if this holder is another reader."""


class Holder:
    """Listens from the start; readers that join wait until it has a holding."""

    def __init__(
        self,
        shelf: Shelf,
        token: str,
        *,
        local: str = "",
        remote: TcpAddress | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Listen for readers on this host, and at `remote` for those of any host.

        local: the path of a Unix socket; by default a name in no file system.
        """
        self.shelf = shelf
        self.holding: Holding | None = None
        self._process = os.getpid()
        path = local or f"@flyweight-{secrets.token_hex(12)}"
        servers, place = [listening(path)], ""
        self._file = _file_at(path)
        self.nixl: NixlServer | None = None
        try:
            if remote is not None:
                server, found = listening_tcp(remote)
                servers.append(server)
                named = TcpAddress(os.uname().nodename, found.port) if found.is_any else found
                place = named.place
                if tls is None and nixl_here():  # NIXL encrypts nothing
                    self.nixl = NixlServer()
            self._door = Door(servers, token, MESSAGES, tls)
        except BaseException:
            for each in servers:
                each.close()
            raise
        self.endpoint = Endpoint(this_host(), path, place)
        self._threads: set[threading.Thread] = set()
        self._rings: dict[tuple[int, int], Ring] = {}
        self._making_ring = threading.Lock()
        self._door.open(self._admit)

    def start(self, holding: Holding) -> None:
        """Begin to answer, or go on with another session: readers of the last must come again."""
        is_first, self.holding = self.holding is None, holding
        if is_first:
            self.shelf.ring()
        else:
            self.shelf.end_conversations("its session has ended; connect again")

    def ring(self, device: int, number: int) -> Ring:
        """Return a ring of a device, which is made when it is first needed."""
        with self._making_ring:
            if (device, number) not in self._rings:
                self._rings[device, number] = Ring(device)
            return self._rings[device, number]

    def _admit(self, channel: Channel) -> None:
        def serve() -> None:
            try:
                Conversation(self, channel).run()
            except OSError as error:  # no file is free
                channel.end(str(error))
            finally:
                channel.close()

        self._threads = {each for each in self._threads if each.is_alive()}
        if len(self._threads) >= MAX_CONNECTIONS:
            channel.end(f"{MAX_CONNECTIONS} readers are connected")
            return
        thread = threading.Thread(target=serve, name="flyweight-reader", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            channel.end(str(error))
        else:
            self._threads.add(thread)

    def close(self, why: str) -> None:
        """End all conversations. Does nothing in a forked child, which holds nothing open."""
        if os.getpid() != self._process:
            return
        self._door.close()
        self.shelf.end_conversations(why)
        deadline = monotonic() + _PARTING_SECONDS
        for each in list(self._threads):  # none may run while the interpreter ends
            each.join(max(deadline - monotonic(), 0))
        if self.nixl is not None:
            self.nixl.close()
        for ring in self._rings.values():
            ring.close()
        path = self.endpoint.local
        if self._file is not None and _file_at(path) == self._file:  # else it is of another holder
            with suppress(OSError):
                os.unlink(path)


def _file_at(path: str) -> tuple[int, int] | None:
    """Return the file that a socket has; None for a name in no file system."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Conversation:
    """One reader's connection, from its first message to its end."""

    def __init__(self, holder: Holder, channel: Channel) -> None:
        self._holder, self._shelf, self._channel = holder, holder.shelf, channel
        self._reader, self._bell = self._shelf.enter(channel)
        self._holding: Holding | None = None
        self._join_said: Join | None = None
        """Who the reader is; None for connections for bytes, and for those that only watch."""
        self._is_member = False
        """True once the reader has said what it takes; listeners know of it then."""
        self._plans: dict[str, Plan] = {}
        self._lease: tuple[Served, int] | None = None
        self._shared: list[Bytes] = []
        self._window: Window | None = None
        """What this reader can pull."""
        self._prepared: dict[tuple[str, int, int], tuple[object, Copies]] = {}
        self._ring: Ring | None = None
        """The ring that is this reader's while its lease lasts."""
        self._shown: News | None = None
        """What this reader saw last, if it watches."""
        self._told: PublishId | None = None

    def run(self) -> None:
        channel, why = self._channel, ""
        number = 0
        try:
            while True:
                if not channel.wire.has_input(self._bell, deadline=FOREVER):
                    self._push()
                    continue
                frame = channel.next_frame()
                number = frame.number
                try:
                    self._answer(frame)
                finally:
                    frame.close()
        except PeerLost as error:
            why = str(error)
        except HandleGone as error:
            why = str(error)
            channel.end(why)
        except FlyweightError as error:
            why = str(error)
            channel.refuse(error, number)
        except Exception as error:  # a fault of ours: the reader and the log learn of it
            _log.exception("the conversation with %s failed", channel.peer)
            why = f"its holder failed: {error!r}"
            channel.end(why)
        finally:
            self._shelf.lose(self._reader)
            self._tell_listeners("replica.lost", error=why)
            for _, copies in self._prepared.values():
                copies.close()
            self._close_window()

    def _tell_listeners(self, kind: str, **fields: int | float | str) -> None:
        """Announce what a replica did, once the shelf knows of it."""
        if self._is_member and (me := self._join_said) is not None:
            announce(kind, name=me.name, rank=me.rank, pid=me.pid, **fields)

    def _push(self) -> None:
        """Say what is new to a reader that asked for nothing."""
        self._hear_bell()
        if self._shown is not None and (news := self._shelf.news()) != self._shown:
            self._shown = news
            self._send(news, 0)
        newest = self._shelf.newest
        if self._holding is not None and newest is not None and newest != self._told:
            self._told = newest
            self._send(Announced(newest), 0)

    def _hear_bell(self) -> None:
        """Take the ring of the bell; raise HandleGone if this connection must end."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if (text := self._shelf.ending(self._reader)) is not None:
            raise HandleGone(text)

    def _answer(self, frame: Frame) -> None:
        """Answer a request; number 0 asks for no answer."""
        try:
            answer = self._answer_to(frame.message, frame)
        except FlyweightError as error:  # the reader asked for what there is not
            if self._channel.has_failed or self._shelf.ending(self._reader):
                raise
            if isinstance(error, PlanError):
                self._shelf.refuse(self._reader, f"PlanError: {error}")
            if frame.number:
                self._channel.refuse(error, frame.number)
        else:
            if answer is not None and frame.number:
                self._send(answer, frame.number)

    def _answer_to(self, message: Message, frame: Frame) -> Message | None:
        match message:
            case Join():
                return self._join(message)
            case Want():
                return self._plan(message)
            case Wait():
                return self._wait(message)
            case Lease():
                self._give_lease(message, frame.number)
                return None
            case Read():
                self._give_bytes(message, frame.number)
                return None
            case Share():
                return self._share(message, frame)
            case Fill():
                return self._fill(message)
            case TakeRing():
                self._take_ring(message, frame.number)
                return None
            case Pack():
                return self._pack(message)
            case Release():
                return self._release(message, is_proof=frame.number > 0)
            case Look():
                return Posted(self._shelf.look(message.key, min(message.seconds, _MOST_SECONDS)))
            case Watch():
                self._shown = self._shelf.watch(self._reader)
                return self._shown
            case Declined():
                self._shelf.refuse(self._reader, message.text)
                return Planned("")
            case Post() | Staged() | Mistrust() | Done() | Cancel():
                self._note(message)
                return None
        name = type(message).__name__
        raise TransportError(f"{self._channel.peer} sent {name}, which a holder sends")

    def _send(self, message: Message, number: int, files: tuple[int, ...] = ()) -> None:
        self._channel.send(message, monotonic() + _SEND_SECONDS, files, number=number)

    def _note(self, message: Post | Staged | Mistrust | Done | Cancel) -> None:
        """Take what needs no answer; a `Cancel` that comes late means nothing."""
        match message:
            case Post():
                self._shelf.post(message.key, message.text)
            case Staged():
                self._shelf.staged(self._reader, message.id)
            case Mistrust():
                self._shelf.mistrust(self._reader, message.id, message.place)
            case Done():
                self._shelf.done(self._reader, message.id, message.result)
                found = message.result
                self._tell_listeners(
                    "serve.done",
                    version=message.id.version,
                    nbytes=found.nbytes,
                    seconds=found.seconds,
                    transport=found.transport,
                    error=found.error,
                )

    def _join(self, join: Join) -> Welcome:
        if self._holding is not None:
            raise TransportError(f"{self._channel.peer} has joined already")
        if not self._shelf.wait_for(lambda: self._holder.holding is not None, _MOST_SECONDS):
            raise HandleGone("this holder has nothing yet; come again")
        holding, known = self._holder.holding, join.session
        assert holding is not None
        if known not in ("", holding.session):
            raise HandleGone(f"this holder serves session {holding.session[:6]}, not {known[:6]}")
        if join.num_ranks < 1 or not 0 <= join.rank < join.num_ranks:
            raise SpecError(f"{self._channel.peer} is rank {join.rank} of {join.num_ranks}")
        self._holding, self._told = holding, self._shelf.newest
        self._channel.peer = f"reader {join.name!r} rank {join.rank}"
        if not known:  # others are connections for bytes, of a reader that has joined before
            self._shelf.join(self._reader, join)
            self._join_said = join
        table = None if known else holding.plans.catalog.table
        nixl = self._holder.nixl
        return Welcome(
            holding.session,
            table,
            self._holder.endpoint,
            holding.ranks,
            self._shelf.newest,
            "" if nixl is None else nixl.way,
        )

    def _joined(self) -> Holding:
        if self._holding is None:
            raise TransportError(f"{self._channel.peer} has not joined")
        if self._holding is not self._holder.holding:
            raise HandleGone("this holder's session has ended; connect again")
        return self._holding

    def _plan(self, want: Want) -> Planned:
        holding = self._joined()
        plan = holding.plans.planned(Wanted.received(want, holding.plans.catalog))
        self._plans[plan.kind] = plan
        if not self._is_member:
            self._is_member = True
            self._tell_listeners("replica.joined", nbytes=plan.nbytes)
        return Planned(plan.kind)

    def _planned(self, kind: str) -> Plan:
        if kind not in self._plans:
            raise SpecError(f"{self._channel.peer} has not said which boxes it wants")
        return self._plans[kind]

    def _wait(self, wait: Wait) -> Available | Current | NotYet | Superseded:
        self._joined()
        kind, deadline = next(iter(self._plans), ""), monotonic() + wait.seconds
        self._planned(kind)
        counted = self._shelf.waiting(self._reader, kind, wait) if wait.seconds else nullcontext()
        with counted:
            while True:
                found = self._shelf.answer(self._reader, kind, wait)
                if found is not None:
                    if isinstance(found, Available):
                        self._told = found.id
                    return found
                # In time, or the reader cancels, or it is gone.
                if monotonic() >= deadline or self._channel.wire.has_input(
                    self._bell, deadline=deadline
                ):
                    return self._shelf.nothing_new(wait.have)
                self._hear_bell()

    def _give_lease(self, lease: Lease, number: int) -> None:
        self._joined()
        rank, plans = lease.rank, [self._planned(kind) for kind in lease.kinds]
        for plan in plans:
            if rank not in plan.streams:
                raise SpecError(f"readers of kind {plan.kind} read nothing from rank {rank}")
        deadline = monotonic() + min(lease.seconds, _MOST_SECONDS)
        offer = self._shelf.lease(lease.id, self._reader, deadline)
        self._lease = offer, rank
        try:
            found = [offer.digests(plan, rank, deadline) for plan in plans]
            self._shelf.check_lease(lease.id, self._reader)  # else they are of what came later
        except BaseException:
            self._lease = None
            self._shelf.drop_lease(self._reader)
            raise
        layout, mapped, files = "", None, tuple[int, ...]()
        places = offer.mappable(rank) if lease.can_map and self._channel.wire.is_local else None
        if places is not None:
            self._shelf.maps(self._reader, lease.id)
            placed, table = places
            layout = placed.layout
            if layout not in lease.layouts:
                files = tuple(file for each in placed.segments for file in each.files)
                handles = (
                    each.nbytes if isinstance(each, Segment) else each.handle
                    for each in placed.segments
                )
                mapped = Layout(tuple(handles), placed.table(table))
        if lease.can_pull:
            self._open_window(offer.segments(rank), (deadline - monotonic()) / 2)
        digests, overflows = tuple(each for each, _ in found), tuple(each for _, each in found)
        seconds = offer.lease_seconds
        self._send(
            Leased(lease.id, rank, seconds, digests, overflows, layout, mapped), number, files
        )

    def _open_window(self, segments: Sequence[Segment], seconds: float) -> None:
        """Let the reader pull what it has leased, if NIXL can be used; else it reads."""
        try:
            if self._window is None and self._holder.nixl is not None:
                self._window = Window(self._holder.nixl)
            if self._window is not None:
                self._window.cover(segments, seconds)
        except FlyweightError as error:
            self._close_window()
            _log.warning("%s cannot pull by NIXL: %s", self._channel.peer, error)

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def _leased(self) -> tuple[Served, int]:
        if self._lease is None:
            raise HandleGone(f"{self._channel.peer} has no lease here")
        self._shelf.check_lease(self._lease[0].id, self._reader)
        return self._lease

    def _give_bytes(self, read: Read, number: int) -> None:
        (offer, rank), plan = self._leased(), self._planned(read.kind)
        start, stop = read.start, read.start + read.nbytes
        total = plan.streams[rank].total if rank in plan.streams else 0
        if not 0 <= start < stop <= total or read.nbytes > _MOST_BYTES:
            raise SpecError(f"bytes {start} to {stop} are not a range of the stream")
        arrived = offer.arrived_bytes(plan, rank, start, stop, min(read.seconds, _MOST_SECONDS))
        if arrived is not None:
            self._send(Later(arrived), number)
            return
        parts = offer.parts(plan, rank, start, stop)
        if read.slot is not None and self._window is not None:
            keys, pieces = self._window.place(parts, read.slot)
            self._channel.sent_bytes += read.nbytes
            self._send(Pull(keys, pieces), number)
            return
        self._channel.send(Data(), monotonic() + _SEND_SECONDS, number=number, parts=parts)

    def _share(self, share: Share, frame: Frame) -> Shared:
        if len(frame.files) != 1 or len(self._shared) >= _MOST_SHARED:
            raise SpecError(
                f"{len(frame.files)} files came with memory to share, and {len(self._shared)} of "
                f"at most {_MOST_SHARED} were shared before"
            )
        self._shared.append(map_segment(frame.files[0], nbytes=share.nbytes, is_writable=True))
        return Shared(len(self._shared) - 1)

    def _fill(self, fill: Fill) -> Filled:
        """Write the whole stream of a kind into memory that the reader has shared."""
        (offer, rank), plan = self._leased(), self._planned(fill.kind)
        if not 0 <= fill.memory < len(self._shared) or rank not in plan.streams:
            raise SpecError(f"memory {fill.memory} of {len(self._shared)} cannot be filled")
        memory, nbytes = self._shared[fill.memory], plan.streams[rank].total
        if not 0 <= fill.at <= len(memory) - nbytes:
            raise SpecError(
                f"{nbytes} bytes at {fill.at} do not fit into memory of {len(memory)} bytes"
            )
        copies = self._copies(
            (fill.kind, fill.memory, -1),
            offer,
            lambda: offer.copies(plan, rank, memory[fill.at : fill.at + nbytes]),
        )
        copies.start(should_digest=False)(monotonic() + fill.seconds)
        return Filled()

    def _copies(
        self, key: tuple[str, int, int], offer: Served, make: Callable[[], Copies]
    ) -> Copies:
        """Return copies that are prepared once for the same memory."""
        source, copies = self._prepared.get(key, (None, None))
        if copies is None or source is not offer.memory:
            if copies is not None:
                copies.close()
            copies = make()
            self._prepared[key] = offer.memory, copies
        return copies

    def _take_ring(self, take: TakeRing, number: int) -> None:
        self._leased()
        device = driver.device_named(take.device)
        if device is None:
            raise SpecError(f"this holder sees no device {take.device!r}")
        deadline = monotonic() + min(take.seconds, _MOST_SECONDS)
        number_of_ring = self._shelf.take_ring(device, self._reader, deadline)
        self._ring = self._holder.ring(device, number_of_ring)
        self._ring.take(self._reader)
        self._send(Ringed(self._ring.segment.handle), number, tuple(self._ring.segment.files))

    def _pack(self, pack: Pack) -> Packed:
        (offer, rank), plan, ring = self._leased(), self._planned(pack.kind), self._ring
        buckets = plan.streams[rank].buckets if rank in plan.streams else []
        if ring is None or not isinstance(offer, Offer) or not 0 <= pack.bucket < len(buckets):
            raise SpecError(f"bucket {pack.bucket} of {len(buckets)} cannot be packed")
        slot, deadline = pack.bucket % NUM_SLOTS, monotonic() + pack.seconds
        copies = self._copies(
            (pack.kind, slot, pack.bucket),
            offer,
            lambda: offer.bucket(plan, rank, pack.bucket, ring.slot(slot)),
        )
        ring.pack(self._reader, lambda: copies.start(should_digest=False)(deadline))
        return Packed()

    def _release(self, release: Release, *, is_proof: bool) -> Released:
        offer, _ = self._leased()
        self._lease = None
        try:
            if is_proof:
                offer.confirm(min(release.seconds, _MOST_SECONDS))
        finally:
            self._shelf.release(offer.id, self._reader)
        return Released(offer.id)
