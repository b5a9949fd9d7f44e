"""Publisher: offers each new version of a model to the replicas that ask for one.

Whoever calls `publish` runs the round; the roll hears replicas at any time. A
trainer's memory is read only while its lease lasts: until `publish` returns, or
until `Lease.wait_copied` does. Between publishes a replica gets what is held in
shared memory or rests in a store, if anything is, and else waits for the next.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from time import monotonic, perf_counter
from typing import Literal, overload

from flyweight.adapters.identity import Identity
from flyweight.adapters.model import adapt
from flyweight.checks import check_seconds, check_version
from flyweight.cuda import driver
from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerLost,
    PlanError,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
    listed,
)
from flyweight.events import emit
from flyweight.formats.stored import Stored
from flyweight.live.address import Address, Claim
from flyweight.live.conductor import Conductor
from flyweight.live.copies import Copiers
from flyweight.live.lanes import (
    MAPPED,
    Offers,
    Ring,
    Strategy,
    Transports,
)
from flyweight.live.late import Late
from flyweight.live.members import Peer, Roll
from flyweight.live.published_version import (
    Edition,
    Options,
    at_once,
    failed_report,
    no_release,
    report_of,
)
from flyweight.live.report import TIMEOUT_SECONDS, Lease, PublishReport, ReplicaReport
from flyweight.live.round import Round
from flyweight.live.source import Held, Stock
from flyweight.transports.cuda_ipc import CudaIpcTransport
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.shared_memory import SharedMemoryTransport
from flyweight.verbs.find import PathLike

SILENCE_SECONDS = 15.0
_CLOSE_SECONDS = 5.0


class Publisher:
    """Publishes a model's versions at an address until it is closed."""

    def __init__(
        self,
        source: object,
        address: str,
        *,
        hold: bool = False,
        store: PathLike | None = None,
        strategy: Strategy = "auto",
        bucket_bytes: int | None = None,
        depth: int | None = None,
        should_verify: bool = True,
        version: int | None = None,
        token: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Listen at `address`; a model is not read before the first `publish`.

        With `hold`, one copy of the last version stays in shared memory for replicas that come
        late; with a `store`, they get its newest snapshot. An opened snapshot as the `source` is
        there for whoever asks, as `version` if it has no number itself. A replica that makes no
        progress for `timeout_seconds` in a round is given up.
        """
        self._options = Options(
            hold=hold,
            store=store,
            strategy=strategy,
            bucket_bytes=bucket_bytes,
            depth=depth,
            should_verify=should_verify,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
        )
        version = None if version is None else check_version(version)
        self._thing, self._copiers = source, Copiers()
        self._stored = source if isinstance(source, Stored) else None
        self._stock = Stock.of(self._stored or adapt(source), self._copiers)
        self._identity = None if self._stored else Identity(source)
        self._publishing = threading.Lock()
        self._held: tuple[Held, Offers] | None = None
        self._pid = os.getpid()
        self._roll: Roll | None = None
        self._is_open = True
        with ExitStack() as stack:
            claim = Claim(Address.parse(address), token)
            stack.callback(claim.close)
            door = FdServer(claim.address.door, token=claim.token, on_hangup=self._hung_up)
            stack.callback(door.close)
            self._transports = Transports(
                SharedMemoryTransport(fd_server=door), CudaIpcTransport(fd_server=door)
            )
            stack.callback(self._transports.close)
            stack.callback(self._copiers.close)
            self._offers = Offers(self._stock, self._transports)
            self._ring = Ring(self._transports, bucket_bytes=bucket_bytes, depth=depth)
            stack.callback(self._ring.close)
            self._roll = Roll(
                claim,
                door,
                lambda: self._stock,
                asked=self._asked,
                silence_seconds=silence_seconds,
            )
            stack.callback(self._roll.close)
            self._conductor = Conductor(self._roll, self._options)
            self._late = Late(
                self._roll,
                self._conductor,
                self._options,
                self._transports,
                stock=lambda: self._stock,
                copiers=self._copiers,
            )
            number = None
            if self._stored is not None:
                self._late.standing = self._edition_of(self._stored, version)
                number = self._late.standing.version
            self._roll.start(number)
            self._address = str(claim.address)
            self._closing = stack.pop_all()

    @property
    def version(self) -> int | None:
        """The version published last."""
        return self._on.version

    @property
    def address(self) -> str:
        return self._address

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that are connected."""
        with self._on.changed:
            return [peer.name for peer in self._on.peers.values() if peer.agreement]

    @property
    def _on(self) -> Roll:
        assert self._roll is not None
        return self._roll

    def _edition_of(self, stored: Stored, version: int | None) -> Edition:
        """Return an opened snapshot as whoever asks may take it."""
        number = stored.manifest.version if version is None else version
        number = 0 if number is None else number
        parent, values = stored.manifest.parent, stored.manifest.values
        if not self._options.hold:
            return Edition(number, parent, self._stock, self._offers, "snapshot", values)
        held, offers = self._hold()
        held.refill(monotonic() + self._options.timeout_seconds)
        return Edition(number, parent, held.stock, offers, "held", values, {})

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
    ) -> Lease: ...

    def publish(
        self,
        version: int,
        *,
        background: bool = False,
        num_replicas: int = 0,
        timeout_seconds: float | None = None,
    ) -> PublishReport | Lease:
        """Give the model as it is now to every replica that waits for it.

        Returns once each has it, or has come to another end that the report tells. `num_replicas`
        waits until so many ask. No thread may write the model from the call until it returns; in
        the background it returns at once with a lease, and none may before `wait_copied`. Digests
        find a write between a tensor's digest and its copy, not a step that is half-way through.
        """
        timeout = self._options.timeout_seconds
        if timeout_seconds is not None:
            timeout = check_seconds("timeout_seconds", timeout_seconds)
        deadline = monotonic() + timeout
        peers: list[Peer] = []
        lease = Lease(check_version(version))
        self._check_open()
        if not self._publishing.acquire(timeout=max(timeout, 0)):
            raise TransferTimeout(f"the publish before is still under way after {timeout:g} s")
        try:
            self._check_next(version)
            peers = self._gather(version, num_replicas, deadline)
            self._refresh()  # afterwards: the model may change while replicas are waited for
            self._settle(deadline)
            if background:
                threading.Thread(
                    target=self._publish,
                    args=(lease, peers, timeout),
                    name="flyweight-publish",
                    daemon=True,
                ).start()
                return lease
        except BaseException:
            self._late.give_back(peers)
            self._publishing.release()
            raise
        self._publish(lease, peers, timeout)
        return lease.wait(0)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise TransportError(
                f"this publisher is of process {self._pid}; a child makes one of its own"
            )
        if not self._is_open:
            raise TransportError(f"the publisher at {self.address} is closed")
        if self._on.is_broken:
            raise TransportError(
                f"the wire of the publisher at {self.address} has ended by an error, which its "
                f"thread told; close it and make another"
            )

    def _check_next(self, version: int) -> None:
        self._check_open()
        if self._stored is not None:
            raise SpecError("the source is a snapshot: it is there for whoever asks")
        last = self._on.version
        if last is not None and version <= last:
            raise VersionError(
                f"version {version} does not follow {last}, which was published last; versions "
                f"only grow"
            )

    def _refresh(self) -> None:
        """Look whether the model still is the one that was offered."""
        if self._identity is None or not self._identity.is_same():
            found = Identity(self._thing)
            stock = Stock.of(adapt(self._thing), self._copiers)
            if stock.is_like(self._stock) and stock.lies_like(self._stock):
                self._stock.manifest, self._identity = stock.manifest, found
                return
            if not stock.is_like(self._stock):
                raise PlanError(
                    "the model has other tensors than when its publisher was made; make a new one"
                )
            offers = Offers(stock, self._transports)
            self._offers.close()
            self._ring.close()
            self._stock, self._offers, self._identity = stock, offers, found
            if self._held is not None:
                self._held[0].take_from(stock)
            with self._on.changed:  # what was told of the old ones would keep them
                for peer in self._on.peers.values():
                    peer.lanes = peer.sent = None

    def _settle(self, deadline: float) -> None:
        """Wait for what still writes the weights, on any stream of a device."""
        for device in self._stock.devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))

    def _gather(self, version: int, num_replicas: int, deadline: float) -> list[Peer]:
        """Take the replicas that wait for this version, and tell those that wait in vain."""
        roll = self._on
        with roll.changed:
            while True:
                for peer in roll.waiting():
                    wanted = None if peer.ask is None else peer.ask.version
                    if wanted is not None and wanted < version:
                        roll.deny(peer, version)
                peers = [
                    peer
                    for peer in roll.waiting()
                    if peer.ask is not None and peer.ask.version in (None, version)
                ]
                self._check_open()
                left = deadline - monotonic()
                if len(peers) >= num_replicas:
                    break
                if left <= 0:
                    raise TransferTimeout(
                        f"{len(peers)} of {num_replicas} replicas asked for version {version} "
                        f"in time; {len(self.replicas)} are connected"
                    )
                roll.changed.wait(left)
            for peer in peers:
                self._on.keep(peer)
            return peers

    def _publish(self, lease: Lease, peers: list[Peer], timeout: float) -> None:
        """Run the rounds of one publish, and let everybody know how they ended."""
        try:
            lease.end(lambda: self._rounds(lease, peers, timeout))
        finally:
            try:
                self._late.give_back(peers)
            finally:
                self._publishing.release()

    def _rounds(self, lease: Lease, peers: list[Peer], timeout: float) -> PublishReport:
        version, parent, started = lease.version, self._on.version, perf_counter()
        values = self._stock.manifest.values
        live = Edition(version, parent, self._stock, self._offers, "published", values)
        held = self._refill(version, parent, timeout) if self._options.hold else None
        failed: list[ReplicaReport] = []
        near: list[Peer] = []
        far: list[Peer] = []
        for peer in peers:
            try:
                # What is held is there anyway, and stays; only a device can be nearer.
                if held is None or self._is_near(live, peer):
                    self._conductor.lanes(live, peer)
                    near.append(peer)
                else:
                    self._conductor.lanes(held, peer)
                    far.append(peer)
            except FlyweightError as error:  # it cannot be reached as was asked; others can
                self._on.fail(peer, error)
                failed.append(failed_report(peer, error))
        if not near:
            lease.release()
        rounds: list[Round] = []
        for edition, takers in ((live, near), (held, far)):
            if edition is not None and takers:
                release = lease.release if edition is live else no_release
                rounds.append(
                    self._conductor.round_of(
                        edition, takers, self._ring, timeout, admit=at_once, on_release=release
                    )
                )
                self._on.version = version
                self._on.tell(rounds[-1].number, version, "publishing", rounds[-1].parts, 0.0)
                self._run(rounds[-1], parent, is_held=held is not None)
        self._on.version = version
        parts = [part for each in rounds for part in each.parts]
        digest_seconds = sum(each.digest_seconds for each in rounds)
        digest_seconds += 0.0 if held is None else held.digest_seconds
        report = report_of(version, parts, failed, perf_counter() - started, digest_seconds)
        self._on.tell(self._conductor.last, version, "idle", parts, report.seconds)
        emit(
            "publish.done",
            version=version,
            nbytes=report.nbytes,
            seconds=report.seconds,
            num_replicas=len(report.replicas),
            num_failed=len(report.failed),
            strategy="+".join(sorted({each.strategy for each in report.replicas})),
        )
        return report

    def _run(self, round_: Round, parent: int | None, *, is_held: bool) -> None:
        """Run a round; one that ends by an error of ours, with nobody served, published nothing."""
        try:
            self._conductor.run(round_)
        except BaseException:
            if not is_held and not any(part.is_committed for part in round_.parts):
                self._on.version = parent
            raise

    def _is_near(self, live: Edition, peer: Peer) -> bool:
        """True if a replica reads all of the model where it lies, on a device."""
        if not self._stock.devices:
            return False
        return set(self._conductor.lanes(live, peer).values()) == {MAPPED}

    def _hold(self) -> tuple[Held, Offers]:
        if self._held is None:
            held = Held(self._stock, self._transports.host, self._copiers)
            self._held = held, Offers(held.stock, self._transports)
        return self._held

    def _refill(self, version: int, parent: int | None, timeout: float) -> Edition:
        """Put the model into the copy that is held, once nobody reads that any more."""
        deadline, stock = monotonic() + timeout, self._stock
        wholes = stock.wholes if self._options.should_verify else []
        started = perf_counter()
        before = stock.digests(wholes, deadline)
        spent = perf_counter() - started
        self._late.clear(version, timeout)
        held, offers = self._hold()
        held.refill(deadline)
        started = perf_counter()
        # On a device the model is looked at once more: the copy's digest would take much longer.
        after = (held.stock if stock.is_on_host else stock).digests(wholes, deadline)
        spent += perf_counter() - started
        if after != before:
            changed = {each.block for each in wholes if after[each] != before[each]}
            names = sorted({stock.blocks[number].name for number in changed})
            raise DigestMismatch(
                f"{len(names)} tensors changed while version {version} was copied: "
                f"{listed(names)}; a trainer steps after publish, or after wait_copied"
            )
        edition = Edition(
            version,
            parent,
            held.stock,
            offers,
            "held",
            stock.manifest.values,
            after if stock.is_on_host else {},
            spent,
        )
        with self._on.changed:
            self._late.standing, self._on.version = edition, version
            self._late.give_back(())  # who asked meanwhile need not wait for those who take part
        return edition

    def _asked(self, peer: Peer) -> None:
        self._late.serve(peer)

    def _hung_up(self, line: str) -> None:
        if self._roll is not None:
            self._roll.hung_up(line)

    def close(self) -> None:
        """Say goodbye to all replicas and give everything back. Safe to repeat."""
        if not self._is_open or self._pid != os.getpid():
            return
        self._is_open = False
        self._late.end()
        self._conductor.end()
        with self._on.changed:
            self._on.changed.notify_all()  # who gathers replicas need not go on
        # A round has deadlines of its own; what is not over by then is cut, and freed after it.
        deadline = monotonic() + self._options.timeout_seconds
        is_over = self._publishing.acquire(timeout=self._options.timeout_seconds)
        if not self._late.join(deadline) or not is_over:
            self._conductor.cut(PeerLost("the publisher was closed"))
            if not is_over:
                self._publishing.acquire(timeout=_CLOSE_SECONDS)
            self._late.join(monotonic() + _CLOSE_SECONDS)
        self._offers.close()
        if self._held is not None:
            self._held[1].close()
        self._closing.close()
        self._held = self._late.standing = None  # views of segments keep their memory

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
