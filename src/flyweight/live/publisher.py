"""Publisher: offers each new version of a model to the replicas that request one.

A trainer's memory is read only until `publish` returns, or until `Lease.wait_copied` does. If
several ranks hold the model together, rank 0 leads (`leader.py`) and the others follow
(`follower.py`).
"""

from __future__ import annotations

import os
import threading
from time import monotonic
from typing import Literal, overload
from warnings import warn

import msgspec

from flyweight.checks import check_seconds, check_version
from flyweight.errors import SpecError, TransferTimeout, TransportError, VersionError
from flyweight.live.address import Address
from flyweight.live.curve_keys import CurveServer
from flyweight.live.follower import Follower
from flyweight.live.lanes import TransportChoice
from flyweight.live.leader import Leader
from flyweight.live.meeting import blocks_alone, blocks_together, holding_of, rendezvous_for
from flyweight.live.options import SILENCE_SECONDS, NetworkEngine, PublisherOptions
from flyweight.live.published_model import PublishedModel
from flyweight.live.rank_messages import Invitation
from flyweight.live.report import TIMEOUT_SECONDS, Lease, PublishReport
from flyweight.live.source_blocks import SourceBlocks
from flyweight.live.tcp_address import TcpAddress, claimed, parse_address
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.verbs.find import PathLike

_CLOSE_SECONDS = 5.0
_FAULT_SECONDS = 2.0


class Publisher:
    """Publishes the versions of a model at an address, until it is closed."""

    def __init__(
        self,
        source: object,
        address: str,
        *,
        hold: bool = False,
        store: PathLike | None = None,
        transport: TransportChoice = "auto",
        bucket_bytes: int | None = None,
        depth: int | None = None,
        should_verify: bool = True,
        version: int | None = None,
        token: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        curve: CurveServer | None = None,
        network_engine: NetworkEngine = "auto",
        process_group: object = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        strategy: TransportChoice | None = None,
    ) -> None:
        """Listen at an address. A model's tensors are not read before the first `publish`.

        If several ranks hold the model together, each of them makes a publisher at the same
        address, and all of them call `publish`. Nothing is gathered: replicas read from all ranks.

        source: a model, a dict of tensors, or an opened snapshot, which replicas can take at once.
        address: `unix:DIRECTORY`, for replicas on this host; the directory is made if it does not
            exist. Or `tcp://HOST:PORT`, for replicas on any host, which must have the `token`;
            those on this host use shared memory all the same. HOST is this host, or that of rank 0;
            0.0.0.0 means all of its interfaces. Port 0 means any free one, which `address` then
            names. Weights go over PORT, messages over another port that the system chooses.
        hold: keep a copy of the last version in shared memory, for replicas that ask between two
            publishes. All ranks must be on one host.
        store: a directory of snapshots. Replicas that ask between two publishes get the newest.
        transport: how tensors get to replicas. 'auto' maps them where that is possible; 'mapped'
            insists on it; 'bucketed' and 'host' copy them through buckets of device or host memory.
            Replicas on other hosts read buckets over the network, unless it is 'mapped'.
        bucket_bytes: the size of a bucket; by default 64 MiB on the host, 512 MiB on a device, and
            1 to 8 MiB for replicas on other hosts, each of which needs memory for 8 buckets.
        depth: the number of buckets in flight; by default 4 on the host, 2 on a device, and 8 for
            other hosts.
        should_verify: compare digests of every tensor on both sides before a version is committed.
        version: the version of a snapshot that has no number.
        token: the secret that replicas must have; at a `unix:` address by default a random one in a
            file that only this user can read. At a tcp address it is required and is never sent:
            take 16 random characters or more. Ranks with different tokens refuse each other.
        curve: keys that encrypt messages to other hosts; weights are never encrypted.
        network_engine: what brings weights to replicas on other hosts. 'auto' is 'nixl' where both
            hosts have RDMA and NIXL, else 'sockets'. A replica whose host lacks one that is named
            here is refused; 'mooncake' is used only by name.
        timeout_seconds: the time for ranks to meet, for a round between two publishes, and by
            default for `publish`.
        silence_seconds: a replica or a rank that sends nothing for this long is given up.
        process_group: a process group of torch or Paddle whose ranks hold the model together. The
            default group is used if the model has DTensors, dist tensors or `Sharded` tensors.
        rank, num_ranks: which of how many ranks this is, without a process group; for `unix:`
            addresses only.
        strategy: the deprecated name of `transport`.
        """
        if strategy is not None:
            warn("strategy= is now called transport=", DeprecationWarning, stacklevel=2)
            transport = strategy
        self._options = PublisherOptions(
            hold=hold,
            store=store,
            transport=transport,
            bucket_bytes=bucket_bytes,
            depth=depth,
            should_verify=should_verify,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            curve=curve,
            network_engine=network_engine,
        )
        number = None if version is None else check_version(version)
        self._publishing, self._thread = threading.Lock(), 0
        """Held while a publish runs, and the thread of the call that began it."""
        self._is_open, self._pid = True, os.getpid()
        place, self._model = parse_address(address), PublishedModel(source)
        if isinstance(place, TcpAddress) and token is None:
            raise SpecError(f"a publisher at {place} needs a token that replicas know: token=")
        if curve is not None and not isinstance(place, TcpAddress):
            raise SpecError(f"curve= is for tcp addresses; nothing leaves this host from {place}")
        rendezvous = rendezvous_for(self._model, place, process_group, rank, num_ranks)
        self._side: Leader | Follower
        if rendezvous.num_ranks == 1:
            blocks = blocks_alone(self._model.source)
            self._side = self._lead(place, token, blocks, number)
        else:
            self._side = self._meet(place, token, rendezvous)
        found = None if isinstance(self._side, Follower) else self._side.listens_at
        self._address = str(place if found is None else found.reachable)

    def _lead(
        self,
        address: Address | TcpAddress,
        token: str | None,
        blocks: SourceBlocks,
        version: int | None = None,
    ) -> Leader:
        claim, listen = claimed(address, token)
        return Leader(self._model, self._options, claim, blocks, version=version, listen=listen)

    def _meet(
        self, address: Address | TcpAddress, token: str | None, rendezvous: Rendezvous
    ) -> Leader | Follower:
        """Meet the other ranks, which all make a publisher now."""
        model, options = self._model, self._options
        deadline = monotonic() + options.timeout_seconds
        settings = options.common(str(address), token)
        with join_group(rendezvous, timeout_seconds=options.timeout_seconds) as group:
            holdings = group.gather_typed("describe", holding_of(model, settings))
            side: Leader | Follower
            if rendezvous.rank == 0:
                blocks = blocks_together(holdings)
                side = self._lead(address, token, blocks)
                try:
                    group.broadcast("invite", msgspec.to_builtins(side.invitation))
                    side.wait_joined(deadline, group.tick)
                    group.broadcast("joined", None)
                except BaseException:
                    side.close()
                    # A rank may have left because another one was lost, which the group tells.
                    group.wait_for_fault(_FAULT_SECONDS)
                    raise
                return side
            invitation = msgspec.convert(group.broadcast("invite", None), Invitation)
            side = Follower(
                model,
                options,
                invitation,
                rank=rendezvous.rank,
                num_ranks=rendezvous.num_ranks,
                deadline=deadline,
            )
            try:
                group.broadcast("joined", None)
            except BaseException:
                side.close()
                raise
            return side

    @property
    def version(self) -> int | None:
        """The version that was published last; None before the first."""
        return self._side.version

    @property
    def address(self) -> str:
        """The address, with its directory as an absolute path, or its real port."""
        return self._address

    @property
    def replicas(self) -> list[str]:
        """The names of the connected replicas; empty on ranks other than 0."""
        return self._side.replicas()

    @property
    def waiting(self) -> list[str]:
        """The names of the replicas that wait for a version; empty on ranks other than 0."""
        return self._side.waiting()

    @overload
    def publish(
        self,
        version: int,
        *,
        background: Literal[False] = False,
        num_replicas: int = 0,
        stays: bool = False,
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
        stays: bool = False,
        timeout_seconds: float | None = None,
    ) -> PublishReport | Lease:
        """Send the model as it is now to every replica that waits for a version.

        Returns a report once each replica has committed the version or failed. If several ranks
        hold the model, all of them call this with the same version, and get the same report.

        version: the number of the version, greater than the last one.
        background: return a `Lease` at once, and publish in another thread.
        num_replicas: first wait until this many replicas wait for the version; rank 0's counts.
        stays: after the call, replicas that ask can still take the version, from the model's own
            memory and without a copy, until `withdraw` or the next `publish`. Do not write to the
            model before one of them has returned: digests detect that, and replicas fail.
        timeout_seconds: the time to wait for the other ranks and for replicas, and as long again
            for the round, which goes on only for replicas that have just made progress; by default
            the publisher's own.

        Errors of replicas are in the report. Raises TransferTimeout if ranks or replicas do not
        come in time, VersionError if the version does not follow the last one or the ranks publish
        different ones, and PeerLost if a rank is gone: then all ranks make new publishers.

        Do not write to the model until the call returns, or with `background` until
        `Lease.wait_copied` returns. Digests detect a write between the digest and the copy of a
        tensor; they cannot detect a training step that is half-way through before both.
        """
        timeout = self._options.timeout_seconds
        if timeout_seconds is not None:
            timeout = check_seconds("timeout_seconds", timeout_seconds)
        version = check_version(version)
        if type(num_replicas) is not int or num_replicas < 0:
            raise SpecError(f"num_replicas is {num_replicas!r}, expected a whole number from 0")
        if stays:
            self._check_stays(background=background)
        lease = Lease(version, stays=stays)
        self._acquire(timeout)
        try:
            self._thread = threading.get_ident()
            self._check_next(version)
            run = self._side.begin(version, num_replicas, timeout, lambda: self._is_open)

            def publish() -> None:
                try:
                    lease.run(lambda: run(lease))
                finally:
                    self._publishing.release()

            if background:
                self._thread = 0
                thread = threading.Thread(target=publish, name="flyweight-publish", daemon=True)
                try:
                    thread.start()
                except BaseException as error:
                    self._side.give_up(version, error)
                    raise
                return lease
        except BaseException:
            self._publishing.release()
            self._end_call()
            raise
        publish()
        self._end_call()
        return lease.wait(0)

    def _check_stays(self, *, background: bool) -> None:
        """Raise SpecError if a version cannot stay available in the model's own memory."""
        if self._options.hold:
            raise SpecError(
                "stays=True is for publishers without hold=True, whose copy stays available anyway"
            )
        if background:
            raise SpecError(
                "stays=True with background=True: the lease would end while the model is still "
                "read; publish in the foreground, and call withdraw before the next step"
            )
        if isinstance(self._side, Follower) or self._side.num_ranks > 1:
            raise SpecError(
                "stays=True is for publishers of one rank; give those of several ranks hold=True, "
                "or a store"
            )

    def withdraw(self, *, timeout_seconds: float | None = None) -> None:
        """End what `publish(..., stays=True)` began: from now on the model may change.

        Waits for replicas that read the model. Those that are not done after half of the time are
        given up: they fail, and take the next version. Does nothing if no version stays.
        """
        timeout = self._options.timeout_seconds
        if timeout_seconds is not None:
            timeout = check_seconds("timeout_seconds", timeout_seconds)
        self._acquire(timeout)
        try:
            self._thread = threading.get_ident()
            if isinstance(self._side, Leader):
                self._side.withdraw(timeout)
        finally:
            self._publishing.release()
            self._end_call()

    def _acquire(self, timeout_seconds: float) -> None:
        """Wait for the end of another call; `_publishing` is released by the caller."""
        self._check_open()
        if not self._publishing.acquire(timeout=max(timeout_seconds, 0)):
            raise TransferTimeout(
                f"the last publish is still under way after {timeout_seconds:g} s"
            )

    def _end_call(self) -> None:
        """Close what a signal handler wanted to close in the middle of the call."""
        is_interrupted, self._thread = self._thread < 0, 0
        if is_interrupted:
            self._close()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise TransportError(
                f"this publisher belongs to process {self._pid}; a child process makes its own"
            )
        if not self._is_open:
            raise TransportError(f"the publisher at {self.address} is closed")
        self._side.check_open()

    def _check_next(self, version: int) -> None:
        self._check_open()
        if self._model.stored is not None:
            raise SpecError("the source is a snapshot, which replicas take without a publish")
        last = self.version
        if last is not None and version <= last:
            raise VersionError(
                f"version {version} does not follow {last}, which was published last; versions "
                f"only grow"
            )

    def close(self) -> None:
        """Disconnect all replicas and free everything. Safe to repeat.

        Rounds that run may end, for up to `timeout_seconds`; then they are aborted. In a signal
        handler that interrupts `publish`, returns at once: `publish` ends, and closes.
        """
        if not self._is_open or self._pid != os.getpid():
            return
        self._is_open = False
        self._side.stop()
        if self._thread == threading.get_ident() and self._publishing.locked():
            self._thread = -1  # it cannot wait for the call that it interrupts
        else:
            self._close()

    def _close(self) -> None:
        deadline = monotonic() + self._options.timeout_seconds
        is_over = self._publishing.acquire(timeout=self._options.timeout_seconds)
        if not self._side.wait_rounds(deadline) or not is_over:
            self._side.abort()
            if not is_over:
                self._publishing.acquire(timeout=_CLOSE_SECONDS)
            self._side.wait_rounds(monotonic() + _CLOSE_SECONDS)
        self._side.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
