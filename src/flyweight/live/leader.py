"""Leader: rank 0 of a publisher, often the only one. It accepts replicas and runs the rounds.

The thread that calls `publish` runs the round; replicas connect and send requests at any time.
Between two publishes a replica gets the version that stays in the model's own memory or is held in
shared memory, or the newest snapshot of a store, if there is one, and otherwise waits for the next
publish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic, perf_counter

from flyweight.errors import PeerLost, SpecError, TransferTimeout, TransportError, listed
from flyweight.events import emit
from flyweight.live import messages
from flyweight.live.address import Claim
from flyweight.live.admission import Admission
from flyweight.live.bucket_slots import BucketSlots
from flyweight.live.lanes import Transports
from flyweight.live.member import (
    Member,
    different_requests,
    joined_request,
    late_ranks,
    too_late,
)
from flyweight.live.members import Members
from flyweight.live.options import PublisherOptions
from flyweight.live.published_model import PublishedModel, PublishedVersion
from flyweight.live.rank_messages import Ended, Hold, Invitation
from flyweight.live.report import Lease, PublishReport, ReplicaReport
from flyweight.live.rounds import Rounds
from flyweight.live.running_round import RunningRound
from flyweight.live.source_blocks import SourceBlocks
from flyweight.live.source_rank import failed_publish
from flyweight.live.sources import GOING_SECONDS, Sources
from flyweight.live.tcp_address import TcpAddress
from flyweight.spec.manifest import Leaf
from flyweight.transports.cuda_ipc import CudaIpcTransport
from flyweight.transports.engine_reads import EngineReads
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.network import NetworkTransport
from flyweight.transports.shared_memory import SharedMemoryTransport


class Leader:
    """The sockets of a publisher, its replicas, and the other ranks."""

    def __init__(
        self,
        model: PublishedModel,
        options: PublisherOptions,
        claim: Claim,
        blocks: SourceBlocks,
        *,
        version: int | None = None,
        listen: TcpAddress | None = None,
    ) -> None:
        """Open sockets and memory, and accept replicas and ranks.

        claim: closed with the leader, also if this fails.
        version: the version of a snapshot that has no number.
        listen: where replicas on other hosts are accepted, if they are.
        """
        self._model, self._options, self._claim = model, options, claim
        self.listens_at: TcpAddress | None = None
        """Where replicas on other hosts are accepted, with the real port."""
        self._gathered: list[Member] = []
        """The members that the publish under way serves."""
        self.has_staying = False
        """True while replicas read a version from the model's own memory between two publishes."""
        with ExitStack() as stack:
            stack.callback(claim.close)
            admission = Admission(claim)
            members = self.members = Members(claim, admission, options.silence_seconds)
            stack.callback(members.close)
            files = FdServer(
                claim.address.fd_socket, token=claim.token, on_hangup=members.on_process_gone
            )
            stack.callback(files.close)
            data = None
            if listen is not None:
                connection, curve = members.connection, options.curve
                data = admission.listen(listen, connection, curve, members.on_process_gone)
                stack.callback(data.close)
                self.listens_at = listen.with_port(data.port)
            transports = Transports(
                SharedMemoryTransport(fd_server=files),
                CudaIpcTransport(fd_server=files),
                None if data is None else NetworkTransport(server=data),
                EngineReads("" if listen is None or listen.is_any or data is None else data.host),
            )
            stack.callback(transports.close)
            stack.callback(model.copiers.close)
            model.open(transports, blocks.boxes.num_dims)
            self._slots = BucketSlots(transports, options.bucket_bytes, options.depth)
            stack.callback(self._slots.close)
            self._sources = Sources(
                blocks,
                members.changed,
                members.connection.send,
                files,
                transports,
                options=options,
            )
            stack.callback(self._sources.close)
            self._rounds = Rounds(members, options, transports, model, self._sources)
            if model.stored is not None:
                deadline = monotonic() + options.timeout_seconds
                available = model.snapshot(version, hold=options.hold, deadline=deadline)
                self._rounds.available, members.version = available, available.version
            members.start(self._sources, files, self._rounds.serve)
            self._closing = stack.pop_all()

    @property
    def version(self) -> int | None:
        """The version that was published last."""
        return self.members.version

    @property
    def num_ranks(self) -> int:
        """The number of ranks that publish together."""
        return self._sources.num_ranks

    @property
    def invitation(self) -> Invitation:
        """What the other ranks need to join."""
        num_dims = self._sources.blocks.boxes.num_dims
        listens_at, token = self.listens_at, self._claim.token
        address = self._claim.address if listens_at is None else listens_at.reachable
        return Invitation(str(address), token, self.members.admission.session, num_dims)

    def wait_joined(self, deadline: float, check: Callable[[], None]) -> None:
        """Return once all other ranks have joined; `check` raises if one is gone."""
        sources, claim, admission = self._sources, self._claim, self.members.admission
        sources.wait_joined(deadline, check)
        if not any(admission.is_remote(each.line) for each in sources.followers):
            for each in sources.followers:
                seconds = max(deadline - monotonic(), 0.1)
                path = claim.address.fd_socket_of(each.rank)
                each.files = FdConnection(path, token=claim.token, timeout_seconds=seconds)
            return
        if self._options.hold:
            raise SpecError(
                "hold=True needs all ranks that publish on one host; give store= in its place"
            )
        self.members.refuse_local()

    def check_open(self) -> None:
        """Raise if no version can be published any more."""
        if self.members.has_failed:
            raise TransportError(
                f"the connection of the publisher at {self._claim.address} has ended by an error, "
                f"which its thread has shown; close the publisher and make another"
            )
        if self._sources.failure is not None:
            raise self._sources.failure

    def begin(
        self, version: int, num_replicas: int, timeout_seconds: float, is_open: Callable[[], bool]
    ) -> Callable[[Lease], PublishReport]:
        """Wait for the other ranks and the replicas; return the function that publishes."""
        deadline = monotonic() + timeout_seconds
        try:
            self.withdraw(timeout_seconds)
            self._sources.wait_ready(version, deadline)
            self._gathered = self._gather(version, num_replicas, deadline, is_open)
            self._refresh()  # after the wait for replicas, in which the model may change
            self._model.synchronize(deadline)
        except BaseException as error:
            self.give_up(version, error)
            raise
        return lambda lease: self._publish(lease, timeout_seconds)

    def give_up(self, version: int, error: BaseException) -> None:
        """End a publish that has failed, here and on the other ranks."""
        self._rounds.coming = None
        try:
            self._release_gathered()
        finally:
            self._sources.end(version, failed_publish(version, error, self.version))

    def _release_gathered(self) -> None:
        members, self._gathered = self._gathered, []
        self._rounds.release_members(members)

    def _gather(
        self, version: int, num_replicas: int, deadline: float, is_open: Callable[[], bool]
    ) -> list[Member]:
        """Reserve the members that wait for this version; deny those that wait for an older one."""
        # Ranks with a short timeout must hear in time that this one still waits.
        going_seconds = min((deadline - monotonic()) / 8, GOING_SECONDS)
        with self.members.changed:
            while True:
                found: list[list[Member]] = []
                for ranks in self.members.waiting():
                    request = joined_request(ranks)
                    if request is None:
                        self.members.deny(ranks, different_requests(ranks))
                    elif request.version is not None and request.version < version:
                        self.members.deny(ranks, too_late(request, version))
                    elif request.version in (None, version):
                        found.append(ranks)
                self.check_open()
                if not is_open():
                    raise TransportError(f"the publisher at {self._claim.address} is closed")
                self._sources.check()
                left = deadline - monotonic()
                if len(found) >= num_replicas:
                    break
                if left <= 0:
                    refused = [f"{e.name}: {e.error}" for e in self.members.take_refused()]
                    why = f"; {len(refused)} were refused: {listed(refused)}" if refused else ""
                    if late := late_ranks(self.members.by_id.values()):
                        why += f"; these requested no version: {', '.join(late[:5])}"
                    raise TransferTimeout(
                        f"{len(found)} of {num_replicas} replicas requested version {version} "
                        f"in time; {len(self.replicas())} are connected{why}"
                    )
                self._sources.send_going(going_seconds)
                self.members.changed.wait(min(left, going_seconds))
            for ranks in found:
                self.members.reserve(ranks)
            return [member for ranks in found for member in ranks]

    def replicas(self) -> list[str]:
        """Return the names of the connected replicas."""
        with self.members.changed:
            return [ranks[0].name for ranks in self.members.replicas()]

    def waiting(self) -> list[str]:
        """Return the names of the replicas that wait for a version."""
        with self.members.changed:
            return [ranks[0].name for ranks in self.members.waiting()]

    def _refresh(self) -> None:
        """Offer the model's tensors anew if they were replaced."""
        if self._model.refresh():
            self._slots.close()

    def _publish(self, lease: Lease, timeout_seconds: float) -> PublishReport:
        try:
            report = self._run_rounds(lease, self._gathered, timeout_seconds)
        except BaseException as error:
            self.give_up(lease.version, error)
            raise
        self._rounds.coming = None
        try:
            self._release_gathered()
        finally:
            self._sources.end(lease.version, Ended(report, last=report.version))
        return report

    def _run_rounds(
        self, lease: Lease, members: list[Member], timeout_seconds: float
    ) -> PublishReport:
        """Run the rounds of one publish: from the models' memory, and from the held copies."""
        version, parent, started = lease.version, self.version, perf_counter()
        live = self._model.live(version, parent, stays=lease.stays)
        live.values = self._sources.agreed_values(live.values)
        self._rounds.coming = version if lease.stays else None
        held = self._hold(live, timeout_seconds) if self._options.hold else None
        from_model, from_copy = self._rounds.choose_sources(live, held, members)
        if not from_model:
            lease.release()
        rounds: list[RunningRound] = []
        for source, some in ((live, from_model), (held, from_copy)):
            if source is not None and some:
                release = lease.release if source is live else lambda: None
                rounds.append(
                    self._rounds.prepare(source, some, self._slots, timeout_seconds, release)
                )
                self._run_round(rounds[-1], parent, is_held=held is not None)
        if not from_model and held is None:
            self._sources.confirm(self._rounds.new_number(), version, timeout_seconds)
        self.members.version = version
        progress = [member for round_ in rounds for member in round_.members]
        digest_seconds = sum(round_.digest_seconds for round_ in rounds)
        digest_seconds += 0.0 if held is None else held.digest_seconds
        refused = [*self.members.take_refused(), *(each for r in rounds for each in r.refused)]
        by_key: dict[str, list[ReplicaReport]] = {}
        for each in progress:
            by_key.setdefault(each.member.replica, []).append(each.report)
        replicas = (*refused, *map(ReplicaReport.joined, by_key.values()))
        nbytes, seconds = sum(each.nbytes for each in replicas), perf_counter() - started
        report = PublishReport(version, nbytes, seconds, digest_seconds, replicas)
        self.members.set_state(self._rounds.last_number, version, "idle", progress, seconds)
        emit(
            "publish.done",
            version=version,
            nbytes=nbytes,
            seconds=seconds,
            num_replicas=len(replicas),
            num_failed=len(report.failed),
            strategy="+".join(sorted({each.strategy for each in replicas})),
        )
        if lease.stays:
            self._rounds.available, self.has_staying = live, True
        return report

    def _run_round(self, round_: RunningRound, parent: int | None, *, is_held: bool) -> None:
        """Run a round; if it raises and nobody has the version, its number can be used again."""
        members, version = self.members, round_.version.version
        members.version = version
        members.set_state(round_.number, version, "publishing", round_.members, 0.0)
        if round_.version.is_shared:
            self._sources.attach(round_)
        try:
            self._rounds.run(round_)
            if not all(each.is_committed for each in round_.members):
                self._sources.check()
        except BaseException:
            if not is_held and not any(each.is_committed for each in round_.members):
                members.version = parent
            raise
        finally:
            self._sources.detach()

    def _hold(self, live: PublishedVersion, timeout_seconds: float) -> PublishedVersion:
        """Copy the model to shared memory, once nobody reads the copy of the last version."""
        deadline, version = monotonic() + timeout_seconds, live.version

        def before_copy() -> None:
            self._sources.tell(messages.Going(0))
            reason = f"version {version} overwrites the version that it reads"
            self._rounds.withdraw_available(reason, timeout_seconds, may_begin=True)
            self._sources.tell(Hold(version, timeout_seconds))

        held = self._model.hold(
            version,
            live.parent,
            should_verify=self._options.should_verify,
            deadline=deadline,
            before_copy=before_copy,
        )
        held.values = live.values
        if self._sources.followers:
            held = self._sources.join_copies(held, deadline)
        with self.members.changed:
            self._rounds.available, self.members.version = held, version
            # Serve the requests that came meanwhile now, not after the rounds of this publish.
            self._rounds.release_members(())
        return held

    def serve(
        self, version: int, parent: int | None, values: Mapping[str, Leaf], timeout_seconds: float
    ) -> None:
        """Let replicas take the model as it is now from its own memory, until `withdraw`.

        Unlike a publish, it returns at once: replicas that wait take the version in other threads.
        """
        self.withdraw(timeout_seconds)
        self._refresh()
        self._model.synchronize(monotonic() + timeout_seconds)
        live = self._model.live(version, parent, stays=True)
        live.values = values
        with self.members.changed:
            self._rounds.available, self.has_staying = live, True
            self.members.version = version
            self._rounds.release_members(())
        self.members.set_state(self._rounds.last_number, version, "idle", (), 0.0)

    def withdraw(self, timeout_seconds: float) -> None:
        """Let nobody read the version that stays in the model's own memory, if there is one.

        Replicas that still read it after half of the time are given up.
        """
        if self.has_staying:
            reason = f"version {self.version} was withdrawn while it was read"
            self._rounds.withdraw_available(reason, timeout_seconds)
            self.has_staying = False

    def stop(self) -> None:
        """Start no more rounds, and end a publish that waits for replicas or other ranks."""
        self._rounds.close()
        if self._sources.followers:
            self._sources.stop(TransportError(f"the publisher at {self._claim.address} is closed"))
        with self.members.changed:
            self.members.changed.notify_all()

    def wait_rounds(self, deadline: float) -> bool:
        """Wait for catch-up rounds that run; return whether all are over."""
        return self._rounds.join(deadline)

    def abort(self) -> None:
        """End the rounds that still run."""
        self._rounds.abort(PeerLost("the publisher was closed"))

    def close(self) -> None:
        """Disconnect all replicas and free everything. Safe to repeat."""
        self.members.close()
        self._model.close()
        self._closing.close()
        self._rounds.available = None  # its buffers would keep their memory
