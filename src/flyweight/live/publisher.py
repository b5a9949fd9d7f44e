"""Publisher: the trainer's side. It offers a version, waits for its readers, and goes on."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
from flyweight.live.catalog import Catalog, RankTable
from flyweight.live.front_store import FrontStore, OwnStore, ranks_given
from flyweight.live.holder import Holder, Holding
from flyweight.live.messages import Result
from flyweight.live.offer import RECLAIM_SECONDS, About, CopyMemory, Offer, OfferMemory
from flyweight.live.plan import Plans
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity
from flyweight.live.report import TIMEOUT_SECONDS, Publication, PublishReport
from flyweight.live.shelf import Shelf
from flyweight.live.source import PublishedFiles, PublishedModel, source_of
from flyweight.memory_table import BufferTable, Integers
from flyweight.plans.copy_table import BoxTable
from flyweight.ranks.agreement import Ranks
from flyweight.ranks.process_group import default_group, rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.transports.address import (
    Claim,
    Endpoint,
    TcpAddress,
    UnixAddress,
    check_token,
    host_facing,
    local_host_for,
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
        self._publishing, self._thread = threading.Lock(), 0
        """Held while a publish runs, and the thread of the call that began it."""
        self._is_open = True
        self.shelf = Shelf()
        self._claim: Claim | None = None
        self._front: FrontStore | None = None
        self._holder: Holder | None = None
        rendezvous = self._rendezvous(process_group, rank, world_size)
        self.rank, self.world_size = rendezvous.rank, rendezvous.num_ranks
        self._memory: OfferMemory | None = None
        self._kept: PublishId | None = None
        """What is offered between two publishes."""
        self._last_version: int | None = None
        self._parent: int | None = None
        self._ranks = Ranks()
        try:
            self._meet(rendezvous, token, tls, deadline)
            if isinstance(self._source, PublishedFiles):
                self._offer_files(self._source)
        except BaseException:
            self._free("the publisher could not be made")
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
        self._model.check_whole()
        found = ranks_given(process_group, rank, world_size)
        if found is None:
            has_group = self._model.model.has_layout and default_group() is not None
            found = rendezvous_of(None) if has_group else Rendezvous()
        self._model.check_ranks(found)
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
        if rank == 0:
            secret = self._open_front(token, tls)
        else:
            me = Identity(f"rank {rank} of the trainer", token=token or "", tls=tls)
            self._front = front = FrontStore(place, me)
            secret = front.token(deadline)
        if rendezvous.num_ranks > 1:
            if rendezvous.store is None:
                store = OwnStore(self.shelf) if rank == 0 else front
                rendezvous = replace(rendezvous, store=store, group="publisher")
            self._ranks = Ranks(replace(rendezvous, token=secret, host=host_facing(place)))
        if rank:
            self._holder = self._opened(secret, tls, rank)
        holder = self._holder
        assert holder is not None
        options = f"keep={self._keep!r}, verify={self._verify}, address={str(place)!r}"
        said = self._ranks.step(
            "meet",
            lambda: None,
            deadline,
            table=lambda: msgspec.to_builtins(self._source.table(rank)),
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
        tables = [msgspec.convert(each["table"], RankTable) for each in said]
        catalog, blocks = Catalog.joined(tables)
        self._blocks: Integers = blocks[rank]
        endpoints = tuple(msgspec.convert(each["endpoint"], Endpoint) for each in said)
        self._holding = Holding(str(said[0]["session"]), Plans(catalog), endpoints)
        holder.start(self._holding)

    def _offer_files(self, source: PublishedFiles) -> None:
        """Let replicas take the version that is in files, until `withdraw` or `close`."""
        id = PublishId(self._holding.session, source.version)
        self._memory = source.read()
        self.shelf.offer(Offer(id, self._memory, until=None, should_verify=self._verify))
        self.shelf.announce(id, source.about)
        self._kept, self._parent, self._last_version = id, source.version, source.version

    @property
    def _model(self) -> PublishedModel:
        assert isinstance(self._source, PublishedModel)
        return self._source

    def _open_front(self, token: str | None, tls: Tls | None) -> str:
        """Claim the address, listen there, and return the token."""
        if isinstance(self._place, UnixAddress):
            self._claim = Claim(self._place, token)
            secret = self._claim.token
        else:
            secret = check_token(token)
        self._holder = self._opened(secret, tls, 0)
        if isinstance(self._place, TcpAddress):
            port = int(self._holder.endpoint.remote.rpartition(":")[2])
            host = self._holder.endpoint.remote.rpartition(":")[0].strip("[]")
            self._place = TcpAddress(host, port)
        return secret

    def _opened(self, secret: str, tls: Tls | None, rank: int) -> Holder:
        place = self._place
        if isinstance(place, UnixAddress):
            return Holder(self.shelf, secret, local=place.socket_of(rank))
        # Another rank listens where it reaches rank 0 from: readers reach it there too.
        front = os.uname().nodename if place.is_any else place.host
        host = place.host if rank == 0 else local_host_for(front)
        remote = TcpAddress(host, place.port if rank == 0 else 0)
        return Holder(self.shelf, secret, remote=remote, tls=tls)

    @property
    def version(self) -> int | None:
        """The version that was published last; None before the first."""
        return self._parent

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
        if isinstance(self._source, PublishedFiles):
            raise SpecError("the source is files, which replicas take without a publish")
        timeout = self._timeout_seconds
        if timeout_seconds is not None:
            timeout = check_seconds("timeout_seconds", timeout_seconds)
        version, deadline = check_version(version), monotonic() + timeout
        if type(num_replicas) is not int or num_replicas < 0:
            raise SpecError(f"num_replicas is {num_replicas!r}, expected a whole number from 0")
        if background and self._keep == "in_place":
            raise SpecError(
                "background=True with keep='in_place': the memory may not change when it returns; "
                "publish in the foreground, and call withdraw before the next step"
            )
        publication = Publication(version)
        self._acquire(deadline)
        try:
            if background:
                self._check_next(version)
            self._thread = 0 if background else threading.get_ident()

            def run() -> None:
                try:
                    publication.run(lambda: self._publish(publication, num_replicas, deadline))
                finally:
                    self._publishing.release()

            if background:
                threading.Thread(target=run, name="flyweight-publish", daemon=True).start()
                return publication
        except BaseException:
            self._publishing.release()
            raise
        run()
        self._end_call()
        return publication.wait(0)

    def _publish(
        self, publication: Publication, num_replicas: int, deadline: float
    ) -> PublishReport:
        version, started = publication.version, monotonic()
        self._ranks.renew()
        said = self._ranks.step(
            "publish",
            lambda: self._prepare(version, deadline),
            deadline,
            version=lambda: version,
            next=lambda: self._next_version,
            seconds=lambda: deadline - monotonic(),
            values=lambda: dict(self._model.model.manifest.values),
        )
        if {each["version"] for each in said} != {version}:
            raise VersionError(f"the ranks publish versions {[each['version'] for each in said]}")
        if version < (least := max(int(each["next"]) for each in said)):
            raise VersionError(f"version {version} was offered by a rank before; take {least}")
        seconds = min(float(each["seconds"]) for each in said)
        deadline = monotonic() + seconds
        id = PublishId(self._holding.session, version)
        values = {k: v for each in reversed(said) for k, v in each["values"].items()}
        self._last_version = version  # used up: no other content ever gets this number
        results: list[Result] = []
        pending: list[str] = []

        def serve() -> None:
            if self.rank == 0:
                self.shelf.announce(id, About(self._parent, values))
                if self._keep is None or num_replicas:
                    done, missing = self.shelf.wait_served(id, num_replicas, deadline)
                    results.extend(done)
                    pending.extend(missing)

        with self.shelf.publishing(), self._offered(id, deadline) as digest_seconds:
            if self._keep is not None:  # to withdraw the last one had a time of its own
                deadline = monotonic() + seconds
            if self._keep == "memory":
                publication.copied()

            def report() -> Any:
                seconds = monotonic() - started
                found = PublishReport(
                    version, seconds, digest_seconds, tuple(results), tuple(pending)
                )
                return msgspec.to_builtins(found)

            said = self._ranks.step("serve", serve, deadline, report=report)
        self._parent = version
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

    @property
    def _next_version(self) -> int:
        return 0 if self._last_version is None else self._last_version + 1

    def _check_next(self, version: int) -> None:
        if self._last_version is not None and version <= self._last_version:
            raise VersionError(
                f"version {version} does not follow {self._last_version}, which was offered; take "
                f"{self._next_version}, versions only grow"
            )

    def _prepare(self, version: int, deadline: float) -> None:
        """Check the version and the model; nothing that is offered has changed yet."""
        self._check_next(version)
        if self._model.refresh():
            self._memory = None
        for device in self._model.devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))

    @contextmanager
    def _offered(self, id: PublishId, deadline: float) -> Iterator[float]:
        """Offer the model on all ranks; yield the seconds that digests took.

        On every way out, what does not stay is withdrawn on this rank, and all its leases have
        ended: the caller may change the model.
        """
        spent, end = [0.0], deadline + self._promised_seconds

        def offer() -> None:
            self._withdraw_kept()
            memory = self._memory = self._memory or self._new_memory()
            if isinstance(memory, CopyMemory):
                memory.refresh(end, self._row_names, should_verify=self._verify)
            until = deadline if self._keep is None else None
            made = Offer(
                id,
                memory,
                until=until,
                should_verify=self._verify,
                least_seconds=self._promised_seconds,
            )
            digesting = monotonic()
            for plan in self._holding.plans:
                if self.rank in plan.streams:
                    made.digests(plan, self.rank, end)
            spent[0] = monotonic() - digesting
            self.shelf.offer(made)

        is_published = False
        try:
            self._ranks.step("offer", offer, end)
            yield spent[0]
            is_published = True
        finally:
            if is_published and self._keep is not None:
                self._kept = id
            else:
                self.shelf.reclaim(id, deadline if is_published else monotonic())

    def _new_memory(self) -> OfferMemory:
        table: BufferTable = self._model.memory.take(self._blocks)
        if self._keep == "memory":
            return CopyMemory(self.rank, table)
        return OfferMemory.of_model(self.rank, table)

    @property
    def _row_names(self) -> list[str]:
        names, boxes = self._model.names, self._model.boxes
        tensor = BoxTable(boxes.tensor, boxes.offset, boxes.shape).tensor[self._blocks]
        return [names[n] for n in tensor.tolist()]

    def withdraw(self, *, timeout_seconds: float | None = None) -> None:
        """Offer nothing from now on; the model may change when this returns.

        Waits for replicas that read, which have ten seconds, or the publisher's timeout if that is
        less. Does nothing if nothing is offered.

        timeout_seconds: how long to wait for a publish that runs.
        """
        timeout = self._timeout_seconds
        if timeout_seconds is not None:
            timeout = check_seconds("timeout_seconds", timeout_seconds)
        self._acquire(monotonic() + timeout)
        try:
            self._thread = threading.get_ident()
            self._withdraw_kept()
        finally:
            self._publishing.release()
            self._end_call()

    def _acquire(self, deadline: float) -> None:
        """Wait for the end of another call; the caller releases `_publishing`."""
        self._check_open()
        if not self._publishing.acquire(timeout=max(deadline - monotonic(), 0)):
            raise TransferTimeout("the last publish is still under way")
        try:
            self._check_open()
        except BaseException:
            self._publishing.release()
            raise

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise TransportError(
                f"this publisher belongs to process {self._process}; a child process makes its own"
            )
        if not self._is_open:
            raise TransportError(f"the publisher at {self.address} is closed")

    def _end_call(self) -> None:
        """Close what a signal handler wanted to close in the middle of the call."""
        is_interrupted, self._thread = self._thread < 0, 0
        if is_interrupted:
            self._free("the publisher was closed")

    def close(self) -> None:
        """End all leases, and tell replicas that no version comes from here any more. Repeatable.

        In a signal handler that interrupts `publish`, returns at once: `publish` ends, and closes.
        """
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        self.shelf.stop()
        if self._thread == threading.get_ident() and self._publishing.locked():
            self._thread = -1  # it cannot wait for the call that it interrupts
            return
        is_over = self._publishing.acquire(timeout=_CLOSE_SECONDS)
        self._free("the publisher was closed")
        if is_over:
            self._publishing.release()

    def _free(self, why: str) -> None:
        self._is_open = False
        if self._kept is not None:
            self.shelf.reclaim(self._kept, monotonic())
        if self._holder is not None:
            self._holder.close(why)
        self._ranks.close()
        if self._front is not None:
            self._front.close()
        if self._claim is not None:
            self._claim.close()
        self._memory = None

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
