"""Publisher: offers each new version of a model to the replicas that request one.

The thread that calls `publish` runs the round; replicas connect and send requests at any time.
A trainer's memory is read only until `publish` returns, or until `Lease.wait_copied` does.
Between two publishes a replica gets the version that is held in shared memory or the newest
snapshot of a store, if there is one, and otherwise waits for the next publish.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from time import monotonic, perf_counter
from typing import Literal, overload
from warnings import warn

from flyweight.checks import check_seconds, check_version
from flyweight.errors import (
    PeerLost,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
    listed,
)
from flyweight.events import emit
from flyweight.live.address import Address, Claim
from flyweight.live.lanes import BucketSlots, TransportChoice, Transports
from flyweight.live.members import Members
from flyweight.live.published_model import PublishedModel, PublishedVersion
from flyweight.live.report import TIMEOUT_SECONDS, Lease, PublishReport
from flyweight.live.round import Member, Round
from flyweight.live.rounds import PublisherOptions, Rounds
from flyweight.transports.cuda_ipc import CudaIpcTransport
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.shared_memory import SharedMemoryTransport
from flyweight.verbs.find import PathLike

SILENCE_SECONDS = 15.0
_CLOSE_SECONDS = 5.0


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
        strategy: TransportChoice | None = None,
    ) -> None:
        """Listen at an address. A model's tensors are not read before the first `publish`.

        source: a model, a dict of tensors, or an opened snapshot, which replicas can take at once.
        address: `unix:DIRECTORY`; the directory is made if it does not exist.
        hold: keep a copy of the last version in shared memory, for replicas that ask between two
            publishes.
        store: a directory of snapshots. Replicas that ask between two publishes get the newest.
        transport: how tensors get to replicas. 'auto' maps them where that is possible; 'mapped'
            insists on it; 'bucketed' and 'host' copy them through buckets of device or host memory.
        bucket_bytes: the size of a bucket; by default 64 MiB on the host, 512 MiB on a device.
        depth: the number of buckets in flight; by default 4 on the host, 2 on a device.
        should_verify: compare digests of every tensor on both sides before a version is committed.
        version: the version of a snapshot that has no number.
        token: the secret that replicas must have; by default a random one in a file that only
            this user can read.
        timeout_seconds: a replica that makes no progress in a round for this long is given up.
        silence_seconds: a replica that sends nothing for this long is given up.
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
        )
        number = None if version is None else check_version(version)
        self._model = PublishedModel(source)
        self._publishing = threading.Lock()
        self._is_open, self._pid = True, os.getpid()
        with ExitStack() as stack:
            claim = Claim(Address.parse(address), token)
            stack.callback(claim.close)
            self._open(claim, number, stack)
            self._address = str(claim.address)
            self._closing = stack.pop_all()

    def _open(self, claim: Claim, version: int | None, stack: ExitStack) -> None:
        """Open sockets and memory, and accept replicas."""
        model, options = self._model, self._options
        members = self._members = Members(claim, model, options.silence_seconds)
        stack.callback(members.close)
        files = FdServer(
            claim.address.fd_socket, token=claim.token, on_hangup=members.on_process_gone
        )
        stack.callback(files.close)
        transports = Transports(
            SharedMemoryTransport(fd_server=files), CudaIpcTransport(fd_server=files)
        )
        stack.callback(transports.close)
        stack.callback(model.copiers.close)
        model.open(transports)
        self._slots = BucketSlots(transports, options.bucket_bytes, options.depth)
        stack.callback(self._slots.close)
        self._rounds = Rounds(members, options, transports, model)
        if model.stored is not None:
            deadline = monotonic() + options.timeout_seconds
            available = model.snapshot(version, hold=options.hold, deadline=deadline)
            self._rounds.available, members.version = available, available.version
        members.start(files, self._rounds.serve)

    @property
    def version(self) -> int | None:
        """The version that was published last; None before the first."""
        return self._members.version

    @property
    def address(self) -> str:
        """The address, with its directory as an absolute path."""
        return self._address

    @property
    def replicas(self) -> list[str]:
        """The names of the connected replicas."""
        with self._members.changed:
            return [each.name for each in self._members.by_id.values() if each.agreement]

    @property
    def waiting(self) -> list[str]:
        """The names of the replicas that wait for a version."""
        with self._members.changed:
            return [each.name for each in self._members.waiting()]

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
        """Send the model as it is now to every replica that waits for a version.

        Returns a report once each replica has committed the version or failed.

        version: the number of the version, greater than the last one.
        background: return a `Lease` at once, and publish in another thread.
        num_replicas: first wait until this many replicas wait for the version.
        timeout_seconds: the time for that wait, and for each replica to make progress in the
            round; by default the publisher's own.

        Do not write to the model until the call returns, or with `background` until
        `Lease.wait_copied` returns. Digests detect a write between the digest and the copy of a
        tensor; they cannot detect a training step that is half-way through before both.
        """
        timeout = self._options.timeout_seconds
        if timeout_seconds is not None:
            timeout = check_seconds("timeout_seconds", timeout_seconds)
        deadline = monotonic() + timeout
        members: list[Member] = []
        lease = Lease(check_version(version))
        self._check_open()
        if not self._publishing.acquire(timeout=max(timeout, 0)):
            raise TransferTimeout(f"the last publish is still under way after {timeout:g} s")
        try:
            self._check_next(version)
            members = self._gather(version, num_replicas, deadline)
            self._refresh()  # after the wait for replicas, in which the model may change
            self._model.synchronize(deadline)
            if background:
                threading.Thread(
                    target=self._publish,
                    args=(lease, members, timeout),
                    name="flyweight-publish",
                    daemon=True,
                ).start()
                return lease
        except BaseException:
            self._rounds.release_members(members)
            self._publishing.release()
            raise
        self._publish(lease, members, timeout)
        return lease.wait(0)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise TransportError(
                f"this publisher belongs to process {self._pid}; a child process makes its own"
            )
        if not self._is_open:
            raise TransportError(f"the publisher at {self.address} is closed")
        if self._members.has_failed:
            raise TransportError(
                f"the connection of the publisher at {self.address} has ended by an error, which "
                f"its thread has shown; close the publisher and make another"
            )

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

    def _gather(self, version: int, num_replicas: int, deadline: float) -> list[Member]:
        """Reserve the members that wait for this version; deny those that wait for an older one."""
        with self._members.changed:
            while True:
                found = []
                for member in self._members.waiting():
                    wanted = None if member.request is None else member.request.version
                    if wanted is not None and wanted < version:
                        self._members.deny(member, version)
                    elif wanted in (None, version):
                        found.append(member)
                self._check_open()
                left = deadline - monotonic()
                if len(found) >= num_replicas:
                    break
                if left <= 0:
                    refused = [f"{e.name}: {e.error}" for e in self._members.take_refused()]
                    why = f"; {len(refused)} were refused: {listed(refused)}" if refused else ""
                    raise TransferTimeout(
                        f"{len(found)} of {num_replicas} replicas requested version {version} "
                        f"in time; {len(self.replicas)} are connected{why}"
                    )
                self._members.changed.wait(left)
            for member in found:
                self._members.reserve(member)
            return found

    def _refresh(self) -> None:
        """Offer the model's tensors anew if they were replaced."""
        if self._model.refresh():
            self._slots.close()
            with self._members.changed:
                for member in self._members.by_id.values():
                    member.forget_lists()  # they would keep the old tensors alive

    def _publish(self, lease: Lease, members: list[Member], timeout_seconds: float) -> None:
        try:
            lease.run(lambda: self._run_rounds(lease, members, timeout_seconds))
        finally:
            try:
                self._rounds.release_members(members)
            finally:
                self._publishing.release()

    def _run_rounds(
        self, lease: Lease, members: list[Member], timeout_seconds: float
    ) -> PublishReport:
        """Run the rounds of one publish: from the model's memory, and from the held copy."""
        version, parent, started = lease.version, self.version, perf_counter()
        live = self._model.live(version, parent)
        held = self._hold(version, parent, timeout_seconds) if self._options.hold else None
        from_model, from_copy, failed = self._rounds.choose_sources(live, held, members)
        if not from_model:
            lease.release()
        rounds: list[Round] = []
        for source, some in ((live, from_model), (held, from_copy)):
            if source is not None and some:
                release = lease.release if source is live else lambda: None
                rounds.append(
                    self._rounds.prepare(source, some, self._slots, timeout_seconds, release)
                )
                self._run_round(rounds[-1], parent, is_held=held is not None)
        self._members.version = version
        progress = [member for round_ in rounds for member in round_.members]
        digest_seconds = sum(round_.digest_seconds for round_ in rounds)
        digest_seconds += 0.0 if held is None else held.digest_seconds
        refused = self._members.take_refused()
        replicas = (*refused, *failed, *(each.report for each in progress))
        nbytes, seconds = sum(each.nbytes for each in replicas), perf_counter() - started
        report = PublishReport(version, nbytes, seconds, digest_seconds, replicas)
        self._members.set_state(self._rounds.last_number, version, "idle", progress, seconds)
        emit(
            "publish.done",
            version=version,
            nbytes=nbytes,
            seconds=seconds,
            num_replicas=len(replicas),
            num_failed=len(report.failed),
            strategy="+".join(sorted({each.strategy for each in replicas})),
        )
        return report

    def _run_round(self, round_: Round, parent: int | None, *, is_held: bool) -> None:
        """Run a round; if it raises and nobody has the version, its number can be used again."""
        members, version = self._members, round_.members[0].begin.version
        members.version = version
        members.set_state(round_.number, version, "publishing", round_.members, 0.0)
        try:
            self._rounds.run(round_)
        except BaseException:
            if not is_held and not any(each.is_committed for each in round_.members):
                members.version = parent
            raise

    def _hold(self, version: int, parent: int | None, timeout_seconds: float) -> PublishedVersion:
        """Copy the model to shared memory, once nobody reads the copy of the last version."""
        held = self._model.hold(
            version,
            parent,
            should_verify=self._options.should_verify,
            deadline=monotonic() + timeout_seconds,
            before_copy=lambda: self._rounds.retire_available(version, timeout_seconds),
        )
        with self._members.changed:
            self._rounds.available, self._members.version = held, version
            # Serve the requests that came meanwhile now, not after the rounds of this publish.
            self._rounds.release_members(())
        return held

    def close(self) -> None:
        """Disconnect all replicas and free everything. Safe to repeat.

        Rounds that run may end, for up to `timeout_seconds`; then they are aborted.
        """
        if not self._is_open or self._pid != os.getpid():
            return
        self._is_open = False
        self._rounds.close()
        with self._members.changed:
            self._members.changed.notify_all()  # ends a publish that waits for replicas
        deadline = monotonic() + self._options.timeout_seconds
        is_over = self._publishing.acquire(timeout=self._options.timeout_seconds)
        if not self._rounds.join(deadline) or not is_over:
            self._rounds.abort(PeerLost("the publisher was closed"))
            if not is_over:
                self._publishing.acquire(timeout=_CLOSE_SECONDS)
            self._rounds.join(monotonic() + _CLOSE_SECONDS)
        self._members.close()
        self._model.close()
        self._closing.close()
        self._rounds.available = None  # its buffers would keep their memory

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
