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
from functools import partial
from logging import getLogger
from time import monotonic

import numpy as np

from flyweight.cuda import driver
from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    SpecError,
    TransferTimeout,
    TransportError,
)
from flyweight.events import announce
from flyweight.live import messages
from flyweight.live.buckets import NUM_SLOTS
from flyweight.live.offer import Offer, Served
from flyweight.live.plan import Plan, Plans, Wanted
from flyweight.live.publish_id import PublishId
from flyweight.live.ring import Ring
from flyweight.live.rows import RowCopies
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
            self._door = Door(servers, token, messages.MESSAGES, tls)
        except BaseException:
            for each in servers:
                each.close()
            raise
        self.endpoint = Endpoint(this_host(), path, place)
        self._threads: set[threading.Thread] = set()
        self._door.open(self._admit)

    def start(self, holding: Holding) -> None:
        """Begin to answer, or go on with another session: readers of the last must come again."""
        with self.shelf.changing():
            is_first, self.holding = self.holding is None, holding
        if not is_first:
            self.shelf.end_conversations("its session has ended; connect again")

    def _admit(self, channel: Channel) -> None:
        def serve() -> None:
            try:
                Conversation(self, channel).run()
            except OSError as error:  # no file is free
                channel.end(str(error))
            finally:
                channel.close()

        self._threads = {each for each in self._threads if each.is_alive()}
        thread = threading.Thread(target=serve, name="flyweight-reader", daemon=True)
        try:
            if len(self._threads) >= MAX_CONNECTIONS:
                raise RuntimeError(f"{MAX_CONNECTIONS} readers are connected")
            thread.start()
            self._threads.add(thread)
        except RuntimeError as error:  # or the system gives no more threads
            channel.end(str(error))

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
        self.shelf.close_rings()
        path = self.endpoint.local
        if self._file is not None and _file_at(path) == self._file:  # else it is of another holder
            with suppress(OSError):
                os.unlink(path)


def _file_at(path: str) -> tuple[int, int] | None:
    """Return the file that a socket has; None for a name in no file system."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


class Conversation:
    """One reader's connection, from its first message to its end."""

    def __init__(self, holder: Holder, channel: Channel) -> None:
        self._holder, self._shelf, self._channel = holder, holder.shelf, channel
        self._me = self._shelf.enter(channel)
        self._reader = self._me.number
        self._holding: Holding | None = None
        """What the holder served when the reader joined."""
        self._plans: dict[str, Plan] = {}
        """By kind; listeners know of a reader once it has one."""
        self._rank = 0
        """The source rank that was leased last."""
        self._window: Window | None = None
        """What this reader can pull."""
        self._prepared: dict[tuple[str, int], tuple[object, object, RowCopies]] = {}
        """By kind and bucket: copies, and the memories that they are from and to."""
        self._ring: Ring | None = None
        self._shown: messages.News | None = None
        """What this reader saw last, if it watches."""
        self._announced: PublishId | None = None

    def run(self) -> None:
        channel, number, why = self._channel, 0, ""
        try:
            while True:
                if not channel.wire.has_input(self._me.bell, deadline=FOREVER):
                    self._push()
                    continue
                frame = channel.next_frame()
                number = frame.number
                try:
                    self._answer(frame)
                finally:
                    frame.close()
        except FlyweightError as error:
            why = str(error)
            if isinstance(error, HandleGone):
                channel.end(why)
            elif not isinstance(error, PeerLost):
                channel.refuse(error, number)
        except Exception as error:  # a fault of ours: the reader and the log learn of it
            _log.exception("the conversation with %s failed", channel.peer)
            why = f"its holder failed: {error!r}"
            channel.end(why)
        finally:
            self._shelf.lose(self._reader)
            self._tell_listeners("replica.lost", error=why)
            for *_, copies in self._prepared.values():
                copies.close()
            self._close_window()

    def _tell_listeners(self, kind: str, **fields: int | float | str) -> None:
        """Announce what a replica did, once the shelf knows of it."""
        if self._plans and (me := self._me.replica) is not None:
            announce(kind, name=me.name, rank=me.rank, pid=me.pid, **fields)

    def _push(self) -> None:
        """Say what is new to a reader that asked for nothing."""
        self._hear_bell()
        if self._me.is_watching and (news := self._shelf.news()) != self._shown:
            self._shown = news
            self._send(news)
        newest = self._shelf.newest
        if self._holding is not None and newest is not None and newest != self._announced:
            self._announced = newest
            self._send(messages.Announced(newest))

    def _hear_bell(self) -> None:
        """Take the ring of the bell; raise HandleGone if this connection must end."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._me.bell)
        if self._me.ending:
            raise HandleGone(self._me.ending)

    def _answer(self, frame: Frame) -> None:
        """Answer a request; number 0 asks for no answer."""
        try:
            answer = self._answer_to(frame.message, frame)
        except FlyweightError as error:  # the reader asked for what there is not
            if self._channel.has_failed:
                raise
            if frame.number:  # else what comes next may matter still, as how an update ended
                if self._me.ending:
                    raise
                self._channel.refuse(error, frame.number)
        else:
            if answer is not None and frame.number:
                self._send(answer, frame.number)

    def _send(
        self,
        message: Message,
        number: int = 0,
        files: Sequence[int] = (),
        parts: Sequence[Bytes] = (),
    ) -> None:
        deadline = monotonic() + _SEND_SECONDS
        self._channel.send(message, deadline, files, number=number, parts=parts)

    def _answer_to(self, message: Message, frame: Frame) -> Message | None:
        """Return the answer; None if it is sent already, or there is none."""
        match message:
            case messages.Join():
                return self._join(message)
            case messages.Want():
                return self._plan(message)
            case messages.Declined():
                self._shelf.refuse(self._reader, message.text)
                return messages.Confirmed()
            case messages.Wait():
                return self._wait(message)
            case messages.Lease():
                self._give_lease(message, frame.number)
            case messages.Read():
                self._give_bytes(message, frame.number)
            case messages.Fill():
                return self._fill(message, frame.files)
            case messages.TakeRing():
                self._take_ring(message, frame.number)
            case messages.Pack():
                return self._pack(message)
            case messages.Release():
                return self._release(message, is_proof=frame.number > 0)
            case messages.Post(key, str(text)):
                self._shelf.set(key, text, FOREVER)
            case messages.Post(key):
                return messages.Post(key, self._shelf.get(key, FOREVER))
            case messages.Watch():
                self._me.is_watching = True  # before it looks, so that no change is missed
                self._shown = self._shelf.news()
                return self._shown
            case messages.Staged() | messages.Done():
                self._note(message)
            case messages.Cancel():  # which comes late: the wait that it was for is over
                pass
            case _:
                name = type(message).__name__
                raise TransportError(f"{self._channel.peer} sent {name}, which a holder sends")
        return None

    def _note(self, message: messages.Staged | messages.Done) -> None:
        self._shelf.note(self._reader, message)
        if isinstance(message, messages.Done):
            found = message.result
            self._tell_listeners(
                "serve.done",
                version=message.id.version,
                nbytes=found.nbytes,
                seconds=found.seconds,
                transport=found.transport,
                error=found.error,
            )

    def _join(self, join: messages.Join) -> Message:
        if self._holding is not None:
            raise TransportError(f"{self._channel.peer} has joined already")
        deadline = monotonic() + _MOST_SECONDS
        self._shelf.wait_until(lambda: self._holder.holding is not None, deadline)
        holding, known = self._holder.holding, join.session
        if holding is None:
            raise HandleGone("this holder has nothing yet; come again")
        if known not in ("", holding.session):
            raise HandleGone(f"this holder serves session {holding.session[:6]}, not {known[:6]}")
        if join.num_ranks < 1 or not 0 <= join.rank < join.num_ranks:
            raise SpecError(f"{self._channel.peer} is rank {join.rank} of {join.num_ranks}")
        self._holding, self._announced = holding, self._shelf.newest
        self._channel.peer = f"reader {join.name!r} rank {join.rank}"
        if not known:  # others are connections for bytes, of a reader that has joined before
            self._shelf.join(self._reader, join)
        return messages.Welcome(
            holding.session,
            None if known else holding.plans.catalog.table,
            self._holder.endpoint,
            holding.ranks,
            self._shelf.newest,
            "" if self._holder.nixl is None else self._holder.nixl.way,
        )

    def _joined(self) -> Holding:
        if self._holding is None:
            raise TransportError(f"{self._channel.peer} has not joined")
        if self._holding is not self._holder.holding:
            raise HandleGone("this holder's session has ended; connect again")
        return self._holding

    def _plan(self, want: messages.Want) -> Message:
        plans, is_first = self._joined().plans, not self._plans
        plan = plans.planned(Wanted.received(want, plans.catalog))
        self._plans[plan.kind] = plan
        if is_first:
            self._tell_listeners("replica.joined", nbytes=plan.nbytes)
        return messages.Planned(plan.kind)

    def _planned(self, kind: str, rank: int | None = None) -> Plan:
        """Return the plan of a kind; raise SpecError unless it reads something from a rank."""
        if kind not in self._plans:
            raise SpecError(f"{self._channel.peer} has not said which boxes it wants")
        if rank is not None and rank not in self._plans[kind].streams:
            raise SpecError(f"readers of kind {kind} read nothing from rank {rank}")
        return self._plans[kind]

    def _wait(self, wait: messages.Wait) -> Message:
        self._joined()
        if self._me.replica is None:
            raise TransportError("this connection has joined for bytes, and waits for no version")
        kind, deadline = next(iter(self._plans), ""), monotonic() + wait.seconds
        self._planned(kind)
        counted = self._shelf.waiting(self._reader, kind, wait) if wait.seconds else nullcontext()
        with counted:
            while (found := self._shelf.answer(self._reader, kind, wait)) is None:
                has_input = self._channel.wire.has_input(self._me.bell, deadline=deadline)
                if has_input or monotonic() >= deadline:  # it cancels, or is gone
                    break
                self._hear_bell()
        # A version may have been announced to it until it did not count any more.
        found = found or self._shelf.answer(self._reader, kind, wait)
        if found is None:
            is_newest = wait.have is not None and wait.have == self._shelf.newest
            why = f"{wait.have} is the newest" if is_newest else "there is no version"
            raise TransferTimeout(
                f"{why}, and no other came in time; publish one, or give update a longer "
                f"timeout_seconds"
            )
        if isinstance(found, messages.Available):
            self._announced = found.id
        return found

    def _give_lease(self, lease: messages.Lease, number: int) -> None:
        self._joined()
        rank, plans = lease.rank, [self._planned(kind, lease.rank) for kind in lease.kinds]
        deadline = monotonic() + min(lease.seconds, _MOST_SECONDS)
        offer = self._shelf.lease(lease.id, self._reader, deadline)
        self._rank = rank
        try:
            found = [offer.digests(plan, rank, deadline) for plan in plans]
            self._shelf.leased(self._reader)  # else they are of what came later
        except BaseException:
            with self._shelf.changing():
                self._shelf.leases.lose(self._reader)
            raise
        layout, mapped, files = "", None, list[int]()
        places = offer.mappable(rank) if lease.can_map and self._channel.wire.is_local else None
        if places is not None:
            if self._me.replica is not None and lease.id == self._shelf.newest:
                with self._shelf.changing():  # others cannot fetch it from this reader
                    self._shelf.tracker.maps(self._reader)
            placed, table = places
            layout = placed.layout
            if layout not in lease.layouts:
                files = [file for each in placed.segments for file in each.files]
                handles = (
                    each.nbytes if isinstance(each, Segment) else each.handle
                    for each in placed.segments
                )
                mapped = messages.Layout(tuple(handles), placed.table(table))
        if lease.can_pull:
            self._open_window(offer.segments(rank), (deadline - monotonic()) / 2)
        digests, overflows = tuple(each for each, _ in found), tuple(each for _, each in found)
        seconds = offer.lease_seconds
        leased = messages.Leased(lease.id, rank, seconds, digests, overflows, layout, mapped)
        self._send(leased, number, files)

    def _open_window(self, segments: Sequence[Segment], seconds: float) -> None:
        """Let the reader pull what it has leased, if NIXL can be used; else it reads."""
        try:
            if self._holder.nixl is not None:
                self._window = self._window or Window(self._holder.nixl)
                self._window.cover(segments, seconds)
        except FlyweightError as error:
            self._close_window()
            _log.warning("%s cannot pull by NIXL: %s", self._channel.peer, error)

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def _leased(self, kind: str) -> tuple[Served, Plan, int]:
        """Return the offer that is leased, the plan of a kind, and the rank."""
        return self._shelf.leased(self._reader), self._planned(kind, self._rank), self._rank

    def _give_bytes(self, read: messages.Read, number: int) -> None:
        offer, plan, rank = self._leased(read.kind)
        start, stop = read.start, read.start + read.nbytes
        if not 0 <= start < stop <= plan.streams[rank].total or read.nbytes > _MOST_BYTES:
            raise SpecError(f"bytes {start} to {stop} are not a range of the stream")
        arrived = offer.arrived_bytes(plan, rank, start, stop, min(read.seconds, _MOST_SECONDS))
        if arrived is not None:
            self._send(messages.Later(arrived), number)
            return
        parts = offer.parts(plan, rank, start, stop)
        if read.slot is not None and self._window is not None:
            keys, pieces = self._window.place(parts, read.slot)
            self._channel.sent_bytes += read.nbytes
            self._send(messages.Pull(keys, pieces), number)
        else:
            self._send(messages.Data(), number, parts=parts)

    def _fill(self, fill: messages.Fill, files: Sequence[int]) -> Message:
        """Write the whole stream of a kind into memory of the reader."""
        offer, plan, rank = self._leased(fill.kind)
        total = plan.streams[rank].total
        _, memory, _ = self._prepared.get((fill.kind, -1), (None, None, None))
        if files:
            memory = map_segment(files[0], nbytes=fill.nbytes, is_writable=True)
        if len(files) > 1 or not isinstance(memory, np.ndarray) or len(memory) < total:
            raise SpecError(
                f"{total} bytes do not fit into memory of {fill.nbytes} bytes, for which "
                f"{len(files)} files came"
            )
        where = memory[:total]
        copies = self._copies(
            (fill.kind, -1), offer.memory, memory, lambda: offer.copies(plan, rank, where)
        )
        copies.start(should_digest=False)(monotonic() + fill.seconds)
        return messages.Confirmed()

    def _copies(
        self, key: tuple[str, int], source: object, sink: object, make: Callable[[], RowCopies]
    ) -> RowCopies:
        """Return copies from one memory to another, prepared once for the same two."""
        known = self._prepared.get(key)
        if known is not None and known[0] is source and known[1] is sink:
            return known[2]
        if known is not None:
            known[2].close()
            del self._prepared[key]
        self._prepared[key] = source, sink, make()
        return self._prepared[key][2]

    def _take_ring(self, take: messages.TakeRing, number: int) -> None:
        self._shelf.leased(self._reader)
        device = driver.device_named(take.device)
        if device is None:
            raise SpecError(f"this holder sees no device {take.device!r}")
        deadline = monotonic() + min(take.seconds, _MOST_SECONDS)
        self._ring = self._shelf.take_ring(device, self._reader, deadline)
        segment = self._ring.open()
        self._send(messages.Ringed(segment.handle), number, segment.files)

    def _pack(self, pack: messages.Pack) -> Message:
        (offer, plan, rank), ring = self._leased(pack.kind), self._ring
        buckets = plan.streams[rank].buckets
        if ring is None or not isinstance(offer, Offer) or not 0 <= pack.bucket < len(buckets):
            raise SpecError(f"bucket {pack.bucket} of {len(buckets)} cannot be packed")
        slot, deadline = ring.slot(pack.bucket % NUM_SLOTS), monotonic() + pack.seconds
        make = partial(offer.bucket, plan, rank, pack.bucket, slot)
        copies = self._copies((pack.kind, pack.bucket), offer.memory, ring, make)
        ring.pack(self._reader, lambda: copies.start(should_digest=False)(deadline))
        return messages.Confirmed()

    def _release(self, release: messages.Release, *, is_proof: bool) -> Message:
        offer = self._shelf.leased(self._reader)
        try:
            if is_proof:  # the reader asks whether the lease ran until now
                offer.confirm(min(release.seconds, _MOST_SECONDS))
        finally:
            with self._shelf.changing():
                self._shelf.leases.release(offer.id, self._reader)
        return messages.Confirmed()
