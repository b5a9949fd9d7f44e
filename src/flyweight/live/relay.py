"""Relay: follows a publisher, and serves what it takes to the engines of its host.

It stages all whole tensors in shared memory, which engines of any kind map, so each version crosses
the network once per host. It needs no framework: the publisher says which tensors there are.
"""

from __future__ import annotations

import os
import threading
import weakref
from time import monotonic

import numpy as np

from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    PeerRefused,
    TransferTimeout,
)
from flyweight.events import announce
from flyweight.live.catalog import Catalog, Devices
from flyweight.live.front_store import holder_at
from flyweight.live.holder import Holder, Holding
from flyweight.live.incoming import Incoming
from flyweight.live.link import Link
from flyweight.live.messages import Available, Done, Result, Wait
from flyweight.live.offer import RECLAIM_SECONDS, Offer, OfferMemory
from flyweight.live.plan import Plan, Plans, Wanted
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, seconds_for_holder
from flyweight.live.report import TIMEOUT_SECONDS
from flyweight.live.session import Session, Ways
from flyweight.live.shelf import Shelf
from flyweight.memory_table import BufferTable
from flyweight.plans.copy_table import BoxTable
from flyweight.transports.address import Claim, TcpAddress, UnixAddress, parse_address
from flyweight.transports.tls import Tls

_RETRY_SECONDS = 0.1


class WholeTensors:
    """Wants all tensors of a trainer, as they are."""

    devices: list[int] = []  # noqa: RUF012 - never changed
    verified = "received"
    unused: tuple[str, ...] = ()
    live = None

    def choose(self, catalog: Catalog) -> Wanted:
        boxes = catalog.whole
        devices = Devices(("",), np.zeros(len(boxes), np.int64))
        return Wanted(boxes, np.full(len(boxes), -1), devices, "xxh3")

    def is_current(self) -> bool:
        return True


class Relay:
    """Runs in one thread; `stop` ends it from another."""

    def __init__(
        self,
        address: str,
        on: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        name: str | None = None,
        staging_bytes: int | None = None,
    ) -> None:
        """Remember whom to follow and where to serve; `run` does so.

        address: the publisher's address.
        on: the address for engines, which connect to it as to a publisher.
        token: the publisher's token, which engines then need too.
        name: its name at the publisher; by default "relay" with the host and the process id.
        staging_bytes: the most memory that it may take; by default half of what is free.
        """
        self._on, self._token, self._tls = parse_address(on), token, tls
        place = parse_address(address)
        if tls is not None and TcpAddress in (type(place), type(self._on)):
            _ = tls.holder  # it serves other hosts, also the relays that fetch from it
        found = f"relay {os.uname().nodename}:{os.getpid()}" if name is None else name
        me = Identity(found, token=token or "", tls=tls)
        self._link = Link(place, me, Ways(transport="filled", staging_bytes=staging_bytes))
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)
        self._stopped = threading.Event()
        self._shelf = Shelf()
        """What engines read: the memory that is staged."""
        self._served: Session | None = None
        self._offered: PublishId | None = None
        self.holder: Holder | None = None
        """Where engines connect, while it runs."""

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopped.set()
        os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        """Follow and serve until `stop`, also if the publisher is restarted, with any tensors.

        Updates that fail are announced. Raises what cannot get better by waiting: PeerRefused for
        a wrong token, and what keeps it from serving at its address.
        """
        claim = Claim(self._on, self._token) if isinstance(self._on, UnixAddress) else None
        try:
            while not self._stopped.is_set():
                try:
                    self._link.connect(WholeTensors(), monotonic() + TIMEOUT_SECONDS)
                    if self._served is not None and self._served is self._link.session:
                        self._take_next(self._served)
                except PeerRefused:
                    raise
                except FlyweightError as error:  # the next version may come whole
                    if not isinstance(error, (TransferTimeout, PeerLost, HandleGone)):
                        found = {"name": self._link.me.name, "version": None}
                        announce("update.failed", **found, error=str(error))
                    if not isinstance(error, TransferTimeout):
                        self._stopped.wait(_RETRY_SECONDS)
                if (session := self._link.session) is not None and session is not self._served:
                    self._serve(session, session.me.token if claim is None else claim.token)
        finally:
            why = f"{self._link.me.name!r} was stopped"
            if self.holder is not None:
                self.holder.close(why)
            self.holder = None
            self._link.close(why)
            if claim is not None:
                claim.close()

    def _serve(self, session: Session, token: str) -> None:
        """Let engines take what the publisher has from now on."""
        if self._offered is not None and self._offered.session != session.id:
            self._withdraw()
        plan, catalog = session.plan, _catalog_of(session.catalog, session.plan)
        self._plans = Plans(catalog)
        if self.holder is None:
            self.holder, self._on = holder_at(self._on, self._shelf, token, self._tls)
        self.holder.start(Holding(session.id, self._plans, (self.holder.endpoint,)))
        self._served = session
        found = {"address": self.address, "name": self._link.me.name}
        announce("relay.serving", **found, num_tensors=len(catalog.tensors), nbytes=plan.nbytes)

    @property
    def address(self) -> str:
        """Where engines connect, with its real port once it serves."""
        return str(self._on)

    def _take_next(self, session: Session) -> None:
        deadline = monotonic() + TIMEOUT_SECONDS
        wait = Wait(None, None, self._offered, False, seconds_for_holder(deadline))
        available = session.front.wait(wait, deadline, self._bell, self._stopped.is_set)
        if not isinstance(available, Available):
            return
        self._withdraw()
        id, name, started = available.id, self._link.me.name, monotonic()
        incoming = Incoming(session, id)
        try:
            if not incoming.open(available, started + TIMEOUT_SECONDS):
                return
            self._offer(incoming)
            seconds, nbytes = monotonic() - started, incoming.nbytes
            result = Result(name, os.getpid(), nbytes, seconds, transport=incoming.transport)
        except FlyweightError as error:
            text = f"{type(error).__name__}: {error}"
            incoming.tell(Done(id, Result(name, os.getpid(), error=text)))
            raise
        finally:
            incoming.close()
        incoming.tell(Done(id, result))
        announce("update.done", name=name, version=id.version, nbytes=nbytes, seconds=seconds)

    def _offer(self, incoming: Incoming) -> None:
        """Let engines lease what was staged, where it lies."""
        tables = [incoming.arrived[rank].rows for rank in incoming.session.plan.streams]
        memory = OfferMemory.of_model(0, BufferTable.joined(tables))
        offer = Offer(incoming.id, memory, should_verify=incoming.is_verified)
        offer.digest(self._plans, monotonic() + TIMEOUT_SECONDS)
        self._shelf.offer(offer)
        self._shelf.announce(incoming.about)
        self._offered = incoming.id

    def _withdraw(self) -> None:
        """Let no engine read what is staged, since the next version needs its memory."""
        if self._offered is not None:
            self._shelf.reclaim(self._offered, monotonic() + RECLAIM_SECONDS)
            self._offered = None


def _catalog_of(catalog: Catalog, plan: Plan) -> Catalog:
    """Return what a relay has: each row that it stages is a block of its own."""
    streams = list(plan.streams.values())
    blocks = BoxTable(
        np.concatenate([each.tensor for each in streams]),
        np.concatenate([each.sink_offset for each in streams]),
        np.concatenate([each.shape for each in streams]),
    )
    zeros = np.zeros(len(blocks), np.int64)
    return Catalog(catalog.tensors, catalog.tied, blocks, zeros, Devices(("",), zeros))
