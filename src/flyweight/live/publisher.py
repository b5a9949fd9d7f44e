"""Publisher: the trainer's side. It offers a version, waits for its readers, and goes on."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import Any, Literal, get_args, overload

import msgspec

from flyweight.checks import check_seconds, check_version
from flyweight.cuda import driver
from flyweight.errors import (
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live.catalog import Catalog
from flyweight.live.front_store import FrontStore, holder_at, ranks_given
from flyweight.live.holder import Holding
from flyweight.live.messages import Available, CatalogTable, Result
from flyweight.live.offer import RECLAIM_SECONDS, CopyMemory, Offer, OfferMemory
from flyweight.live.plan import Plans
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity
from flyweight.live.report import TIMEOUT_SECONDS, Publication, PublishReport
from flyweight.live.shelf import Shelf
from flyweight.live.source import PublishedFiles, PublishedModel, source_of
from flyweight.memory_table import Integers
from flyweight.ranks.agreement import Ranks
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous, RendezvousStore
from flyweight.transports.address import (
    Claim,
    Endpoint,
    TcpAddress,
    UnixAddress,
    check_token,
    host_facing,
    parse_address,
)
from flyweight.transports.tls import Tls

Keep = Literal["memory", "in_place"]
_CLOSE_SECONDS = 5.0


class Publisher:
    """Publishes the versions of a model at an address, until it is closed."""

    def __init__(
        self,
        source: object,
        address: str,
        *,
        keep: Keep | None = None,
        verify: bool = True,
        token: str | None = None,
        tls: Tls | None = None,
        version: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        process_group: object = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Listen at an address. A model's tensors are not read before the first `publish`.

        If several ranks hold the model together, each of them makes a publisher at the same
        address, and all of them call `publish`. Nothing is gathered: replicas read from all ranks.

        source: a model, or a dict of tensors. Or an opened snapshot or checkpoint, which is read
            into shared memory; replicas can take it at once, without `publish`.
        address: `unix:DIRECTORY`, for replicas on this host; the directory is made if it does not
            exist. Or `tcp://HOST:PORT`, for replicas on any host, which must have the `token`.
            HOST is this host, or that of rank 0; 0.0.0.0 means all of its interfaces. Port 0 means
            any free one, which `address` then names.
        keep: what replicas can take between two publishes. None: nothing. 'memory': a copy in
            shared memory, and `publish` returns once it is made. 'in_place': the model's own
            memory, until `withdraw` or the next `publish`; do not write to it before.
        verify: compute digests, which replicas compare before they commit a version.
        token: the secret that replicas must have; at a `unix:` address by default a random one in a
            file that only this user can read. It is never sent: take 16 random characters or more.
        tls: certificates that encrypt everything that goes to other hosts.
        version: the number of an opened checkpoint that has none, or by which it is to be known.
        timeout_seconds: the time for ranks to meet, and by default for `publish`.
        process_group: a process group of torch or Paddle whose ranks hold the model together. The
            default group is used if the model has DTensors, dist tensors or `Sharded` tensors.
        rank, world_size: which of how many ranks this is, without a process group.
        """
        if keep not in (None, *get_args(Keep)):
            raise SpecError(f"keep is {keep!r}, not None, 'memory' or 'in_place'")
        self._keep, self._verify = keep, verify
        self._timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        deadline = monotonic() + self._timeout_seconds
        self._place, self._process = parse_address(address), os.getpid()
        if isinstance(self._place, TcpAddress) and token is None:
            raise SpecError(f"a publisher at {address} needs a token that replicas have: token=")
        self._source = source_of(source, version)
        if isinstance(self._source, PublishedFiles) and keep is not None:
            raise SpecError(f"keep={keep!r} is for models; replicas can take files at any time")
        self._calling, self._thread = threading.Lock(), 0
        """Held by the call that runs; the thread that began the last one, 0 if it left it."""
        self._is_open = True
        self.shelf = Shelf()
        self._opened = ExitStack()
        """Closes what was opened, the last first."""
        rendezvous = self._rendezvous(process_group, rank, world_size)
        self.rank, self.world_size = rendezvous.rank, rendezvous.num_ranks
        self._memory: OfferMemory | None = None
        self._kept: PublishId | None = None
        """What is offered between two publishes."""
        self.version: int | None = None
        """The version that was published last; None before the first."""
        self._next_version = 0
        self._ranks = Ranks()
        try:
            self._meet(rendezvous, token, tls, deadline)
            if isinstance(self._source, PublishedFiles):
                self._offer_files(self._source)
        except BaseException:
            self._is_open = False
            self._free()
            raise

    def _rendezvous(
        self, process_group: object, rank: int | None, world_size: int | None
    ) -> Rendezvous:
        """Return which rank this is; the store of ranks without a process group comes later."""
        if isinstance(self._source, PublishedFiles):
            if process_group is not None or world_size not in (None, 1):
                raise SpecError(
                    "an opened checkpoint is whole, so one publisher serves it; make it on one "
                    "rank, without process_group= and world_size="
                )
            return Rendezvous()
        found = ranks_given(process_group, rank, world_size)
        if found is None:
            found = rendezvous_of() if self._source.model.has_layout else Rendezvous()
        self._source.check_ranks(found)
        if found.num_ranks > 1 and isinstance(self._place, TcpAddress) and not self._place.port:
            raise SpecError(
                f"{found.num_ranks} ranks meet at {self._place}, and port 0 is another one for "
                f"each of them; choose a port"
            )
        return found

    def _meet(
        self, rendezvous: Rendezvous, token: str | None, tls: Tls | None, deadline: float
    ) -> None:
        """Listen, and learn what the other ranks hold, which all make a publisher now."""
        place, rank = self._place, rendezvous.rank
        store: RendezvousStore = self.shelf
        if rank:
            me = Identity(f"rank {rank} of the trainer", token=token or "", tls=tls)
            store = front = FrontStore(place, me)
            self._opened.callback(front.close)
            secret = front.token(deadline)
        elif isinstance(place, UnixAddress):
            claim = Claim(place, token)
            self._opened.callback(claim.close)
            secret = claim.token
        else:
            secret = check_token(token)
        if rendezvous.num_ranks > 1:
            if rendezvous.store is None:
                rendezvous = replace(rendezvous, store=store, group="publisher")
            self._ranks = Ranks(replace(rendezvous, token=secret, host=host_facing(place)))
            self._opened.callback(self._ranks.close)
        holder, self._place = holder_at(place, self.shelf, secret, tls, rank)
        self._opened.callback(holder.close, "the publisher was closed")
        options = f"keep={self._keep!r}, verify={self._verify}, address={str(place)!r}"
        said = self._ranks.step(
            "meet",
            lambda: None,
            deadline,
            table=lambda: msgspec.to_builtins(self._source.catalog(rank).table),
            values=lambda: dict(self._source.values),
            endpoint=lambda: msgspec.to_builtins(holder.endpoint),
            session=lambda: secrets.token_hex(8),
            options=lambda: options,
        )
        for other, each in enumerate(said):
            if each["options"] != said[0]["options"]:
                raise SpecError(
                    f"publishers of one model need the same options: rank 0 has "
                    f"{said[0]['options']}, rank {other} {each['options']}"
                )
        tables = [msgspec.convert(each["table"], CatalogTable) for each in said]
        held = [Catalog.received(each) for each in tables]
        catalog, blocks = Catalog.joined(held, [each["values"] for each in said])
        self._blocks: Integers = blocks[rank]
        endpoints = tuple(msgspec.convert(each["endpoint"], Endpoint) for each in said)
        self._holding = Holding(str(said[0]["session"]), Plans(catalog), endpoints)
        holder.start(self._holding)

    def _offer_files(self, source: PublishedFiles) -> None:
        """Let replicas take the version that is in files, until `withdraw` or `close`."""
        id = PublishId(self._holding.session, source.version)
        self.shelf.offer(Offer(id, source.read(), should_verify=self._verify))
        self.shelf.announce(Available(id, source.parent, dict(source.values)))
        self._kept, self.version = id, source.version

    @property
    def address(self) -> str:
        """The address, with its directory as an absolute path, or its real port."""
        return str(self._place)

    @property
    def replicas(self) -> list[str]:
        """The names of the connected replicas; empty on ranks other than 0."""
        return self.shelf.replicas() if self.rank == 0 else []

    @property
    def waiting(self) -> list[str]:
        """The names of the replicas that wait for a version; empty on ranks other than 0."""
        return self.shelf.waiting_names() if self.rank == 0 else []

    @overload
    def publish(
        self,
        version: int,
        *,
        background: Literal[False] = False,
        num_replicas: int = 0,
        timeout_seconds: float | None = None,
    ) -> PublishReport: ...

    @overload
    def publish(
        self,
        version: int,
        *,
        background: Literal[True],
        num_replicas: int = 0,
        timeout_seconds: float | None = None,
    ) -> Publication: ...

    def publish(
        self,
        version: int,
        *,
        background: bool = False,
        num_replicas: int = 0,
        timeout_seconds: float | None = None,
    ) -> PublishReport | Publication:
        """Offer the model as it is now, and return a report once replicas have taken it.

        This waits for the replicas that wait for a version. One that has fetched all of it to its
        own host is in the report as pending: it needs the trainer no more. If several ranks hold
        the model, all of them call this with the same version, and get the same report.

        version: the number of the version, greater than the last one, which is used up even if
            this raises.
        background: return a `Publication` at once, and publish in another thread.
        num_replicas: wait until so many replicas have committed the version; rank 0's counts.
        timeout_seconds: after this long, leases end, and replicas that are not done fail or go on
            with what they have fetched; by default the publisher's own.

        Errors of replicas are in the report. Raises VersionError if the version does not follow the
        last one or the ranks publish different ones, TransferTimeout if ranks do not come in time,
        and PeerLost if a rank is gone.

        Do not write to the model until the call returns, or with `background` until
        `Publication.wait_copied` returns. Digests detect a write between the digest and the copy of
        a tensor; they cannot detect a training step that is half-way through before both.
        """
        source = self._source
        if isinstance(source, PublishedFiles):
            raise SpecError("the source is files, which replicas take without a publish")
        version, deadline = check_version(version), self._deadline(timeout_seconds)
        if type(num_replicas) is not int or num_replicas < 0:
            raise SpecError(f"num_replicas is {num_replicas!r}, expected a whole number from 0")
        if background and self._keep == "in_place":
            raise SpecError(
                "background=True with keep='in_place': the memory may not change when it returns; "
                "publish in the foreground, and call withdraw before the next step"
            )
        publication = Publication(version)

        def run() -> None:
            try:
                publication.run(lambda: self._publish(source, publication, num_replicas, deadline))
            finally:
                self._end_call()

        self._begin_call(deadline)
        if not background:
            run()
            return publication.wait(0)
        try:
            self._check_next(version)
            self._thread = 0  # `close` in this one waits for the other
            threading.Thread(target=run, name="flyweight-publish", daemon=True).start()
        except BaseException:
            self._end_call()
            raise
        return publication

    def _publish(
        self, source: PublishedModel, publication: Publication, num_replicas: int, deadline: float
    ) -> PublishReport:
        """Take all steps, on all ranks.

        On every way out, what does not stay is withdrawn on this rank, and all its leases have
        ended: the caller may change the model.
        """
        version, started = publication.version, monotonic()
        self._ranks.renew()
        said = self._ranks.step(
            "publish",
            lambda: self._prepare(source, version, deadline),
            deadline,
            version=lambda: version,
            next=lambda: self._next_version,
            seconds=lambda: deadline - monotonic(),
            values=lambda: dict(source.values),
        )
        if {each["version"] for each in said} != {version}:
            raise VersionError(f"the ranks publish versions {[each['version'] for each in said]}")
        if version < (least := max(int(each["next"]) for each in said)):
            raise VersionError(f"version {version} was offered by a rank before; take {least}")
        seconds = min(float(each["seconds"]) for each in said)
        deadline = monotonic() + seconds
        end, digest_seconds = deadline + self._promised_seconds, 0.0
        id = PublishId(self._holding.session, version)
        values = {k: v for each in reversed(said) for k, v in each["values"].items()}
        self._next_version = version + 1  # used up: no other content ever gets this number
        served: tuple[list[Result], list[str]] = [], []

        def offer() -> None:
            nonlocal digest_seconds
            self._withdraw_kept()
            made = Offer(
                id,
                self._copied(source, end),
                until=deadline if self._keep is None else None,
                should_verify=self._verify,
                least_seconds=self._promised_seconds,
            )
            digesting = monotonic()
            made.digest(self._holding.plans, end)
            digest_seconds = monotonic() - digesting
            self.shelf.offer(made)

        def serve() -> None:
            nonlocal served
            if self.rank == 0:
                self.shelf.announce(Available(id, self.version, values))
                if self._keep is None or num_replicas:
                    served = self.shelf.wait_served(id, num_replicas, deadline)

        def report() -> Any:
            spent = monotonic() - started, digest_seconds
            return msgspec.to_builtins(
                PublishReport(version, *spent, tuple(served[0]), tuple(served[1]))
            )

        is_published = False
        with self.shelf.publishing():
            try:
                self._ranks.step("offer", offer, end)
                if self._keep is not None:  # to withdraw the last one had a time of its own
                    deadline = monotonic() + seconds
                if self._keep == "memory":
                    publication.copied()
                said = self._ranks.step("serve", serve, deadline, report=report)
                is_published = True
            finally:
                if is_published and self._keep is not None:
                    self._kept = id
                else:
                    self.shelf.reclaim(id, deadline if is_published else monotonic())
        self.version = version
        return msgspec.convert(said[0]["report"], PublishReport)

    @property
    def _promised_seconds(self) -> float:
        """How long a lease of what is kept lasts at least, so how long withdrawing may take."""
        return min(RECLAIM_SECONDS, self._timeout_seconds)

    def _withdraw_kept(self) -> None:
        """Let nobody read memory that is to change."""
        if self._kept is not None:
            self.shelf.reclaim(self._kept, monotonic() + self._promised_seconds)
            self._kept = None

    def _check_next(self, version: int) -> None:
        if version < self._next_version:
            raise VersionError(
                f"version {version} does not follow {self._next_version - 1}, which was offered; "
                f"take {self._next_version}, versions only grow"
            )

    def _prepare(self, source: PublishedModel, version: int, deadline: float) -> None:
        """Check the version and the model; nothing that is offered has changed yet."""
        self._check_next(version)
        if source.refresh():
            self._memory = None
        for device in source.memory.devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))

    def _copied(self, source: PublishedModel, deadline: float) -> OfferMemory:
        """Return the memory to offer: the model's own, or that of a copy made now."""
        if self._memory is None:
            table = source.memory.take(self._blocks)
            if self._keep == "memory":
                names = [source.names[n] for n in source.boxes.tensor[self._blocks].tolist()]
                self._memory = CopyMemory(self.rank, table, names)
            else:
                self._memory = OfferMemory.of_model(self.rank, table)
        if isinstance(self._memory, CopyMemory):
            self._memory.refresh(deadline, should_verify=self._verify)
        return self._memory

    def withdraw(self, *, timeout_seconds: float | None = None) -> None:
        """Offer nothing from now on; the model may change when this returns.

        Waits for replicas that read, which have ten seconds, or the publisher's timeout if that is
        less. Does nothing if nothing is offered.

        timeout_seconds: how long to wait for a publish that runs.
        """
        self._begin_call(self._deadline(timeout_seconds))
        try:
            self._withdraw_kept()
        finally:
            self._end_call()

    def _deadline(self, timeout_seconds: float | None) -> float:
        if timeout_seconds is None:
            return monotonic() + self._timeout_seconds
        return monotonic() + check_seconds("timeout_seconds", timeout_seconds)

    def _begin_call(self, deadline: float) -> None:
        """Wait for the end of another call; `_end_call` ends this one."""
        self._check_open()
        if not self._calling.acquire(timeout=max(deadline - monotonic(), 0)):
            raise TransferTimeout("the last publish is still under way")
        self._thread = threading.get_ident()
        if not self._is_open:
            self._end_call()
            self._check_open()

    def _end_call(self) -> None:
        """Let the next call begin; close what a signal handler wanted to close in the middle."""
        self._calling.release()
        if not self._is_open:
            self._free()

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise TransportError(
                f"this publisher belongs to process {self._process}; a child process makes its own"
            )
        if not self._is_open:
            raise TransportError(f"the publisher at {self.address} is closed")

    def close(self) -> None:
        """End all leases, and tell replicas that no version comes from here any more. Repeatable.

        In a signal handler that interrupts `publish`, returns at once: `publish` ends, and closes.
        """
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        self.shelf.stop()
        # It cannot wait for a call that it interrupts, which frees everything when it ends.
        if not (self._calling.locked() and self._thread == threading.get_ident()):
            self._free()

    def _free(self) -> None:
        """Withdraw and close everything, at the end of the call that runs. Repeatable."""
        is_over = self._calling.acquire(timeout=_CLOSE_SECONDS)
        try:
            if self._kept is not None:
                self.shelf.reclaim(self._kept, monotonic())
            self._opened.close()
            self._memory = None
        finally:
            if is_over:
                self._calling.release()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
