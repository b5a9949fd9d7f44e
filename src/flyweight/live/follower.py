"""Follower: a rank other than 0 of a publisher. It offers its part of the model in rank 0's rounds.

All of it happens in `publish`: the follower says that it is ready, does what rank 0 asks for, and
returns the report that rank 0 sends at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

from flyweight.errors import FlyweightError, PeerFailed, TransferTimeout, TransportError
from flyweight.host import identity
from flyweight.live import messages
from flyweight.live.address import Address
from flyweight.live.bucket_slots import BucketSlots
from flyweight.live.fetch import Fetched, FetchesFailed
from flyweight.live.frames import FromPublisher
from flyweight.live.lanes import Transports
from flyweight.live.line import Line, LocalLine, opened_line
from flyweight.live.options import PublisherOptions
from flyweight.live.published_model import PublishedModel
from flyweight.live.rank_messages import (
    Ended,
    Hold,
    HoldsCopy,
    Invitation,
    Offered,
    Ready,
    Released,
    ShareTable,
    Start,
)
from flyweight.live.replica_connection import ReplicaConnection
from flyweight.live.report import Lease, PublishReport
from flyweight.live.source import Regions, Share
from flyweight.live.source_part import WantedShare, fill_in_turn, offer_shares
from flyweight.live.source_rank import remember
from flyweight.live.tcp_address import TcpAddress, parse_address
from flyweight.plans.tables import numbers
from flyweight.transports.cuda_ipc import CudaIpcTransport
from flyweight.transports.data_sockets import DataServer, Welcome
from flyweight.transports.engine_reads import EngineReads
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.network import NetworkTransport
from flyweight.transports.shared_memory import SharedMemoryTransport


class Follower:
    """The connection of a rank to rank 0, and the memory that it offers."""

    def __init__(
        self,
        model: PublishedModel,
        options: PublisherOptions,
        invitation: Invitation,
        *,
        rank: int,
        num_ranks: int,
        deadline: float,
    ) -> None:
        self._model, self._options = model, options
        self._shares: dict[int, Share] = {}
        self.version: int | None = None
        """The version that was published last."""
        self._num_due = 0
        """How many `Ready` were sent that rank 0 has not answered by `Ended`."""
        self._is_stopped = False
        self._round = 0
        self._emptied: set[int] = set()
        self._ended: Ended | None = None
        address = parse_address(invitation.address)
        with ExitStack() as stack:
            line = opened_line(address, invitation.token, options.client_curve, deadline)
            stack.callback(line.close)
            self._transports = _opened_transports(line, address, invitation, rank, stack)
            stack.callback(self._transports.close)
            stack.callback(model.copiers.close)
            model.open(self._transports, invitation.num_dims)
            stack.callback(model.close)
            self._slots = BucketSlots(self._transports, options.bucket_bytes, options.depth)
            stack.callback(self._slots.close)
            self._connection = ReplicaConnection(
                line, f"source rank {rank}", role="source", rank=rank, num_ranks=num_ranks
            )
            stack.callback(self._connection.disconnect, "the publisher was closed")
            session = self._connection.welcomed(deadline).session
            if session != invitation.session:
                raise TransportError(
                    f"another publisher started at {address} while this rank joined; make new "
                    f"publishers on all ranks"
                )
            self._closing = stack.pop_all()

    def begin(
        self, version: int, num_replicas: int, timeout_seconds: float, is_open: Callable[[], bool]
    ) -> Callable[[Lease], PublishReport]:
        """Say that this rank is ready; return the function that publishes.

        Rank 0 decides how many replicas to wait for.
        """
        self._ended, self._round, self._emptied = None, 0, set()
        is_replaced, values = False, {}
        try:
            is_replaced = self._model.refresh()
            if is_replaced:
                self._slots.close()
            self._model.synchronize(monotonic() + timeout_seconds)
            values = dict(self._model.source.manifest.values)
        except BaseException as error:
            self._send_ready(Ready(version, {}, is_replaced, type(error).__name__, str(error)))
            raise
        self._send_ready(Ready(version, values, is_replaced))
        return lambda lease: self._publish(lease, timeout_seconds)

    def _send_ready(self, ready: Ready) -> None:
        self._connection.send(ready)
        self._num_due += 1  # not if it cannot be sent: rank 0 ends what it has heard of

    def give_up(self, version: int, error: BaseException) -> None:
        """Tell rank 0 that this rank cannot publish."""
        self._report(error)

    def _publish(self, lease: Lease, timeout_seconds: float) -> PublishReport:
        """Take part in the publish of a version; return rank 0's report."""
        version = lease.version
        try:
            while self._ended is None:
                message = self._next(timeout_seconds, f"version {version}")
                match message:
                    case Hold(version=number) if number == version:
                        self._hold(message, lease)
                    case Start(version=number) if number == version:
                        self._take_part(message, lease)
                    case Released(version=number) if number == version:
                        lease.release()
                    case _:
                        continue
        except BaseException as error:
            if self._ended is None:
                self._report(error)
            raise
        if self._ended.last is not None:
            self.version = self._ended.last
        if self._ended.error is not None:
            raise self._ended.error
        return self._ended.report

    def _report(self, error: BaseException) -> None:
        """Tell rank 0 that this rank does not go on with the publish."""
        kind, text = type(error).__name__, str(error)
        self._connection.send(messages.Fault(self._round, kind, text, False))

    def _next(self, timeout_seconds: float, what: str) -> FromPublisher:
        """Return the next message of this publish; remember the empty buckets and the end."""
        deadline = monotonic() + timeout_seconds
        while True:
            try:
                message = self._connection.next(deadline, what, is_over=self._is_over)
            except FlyweightError as error:
                if self._is_over() and not self._connection.is_lost:
                    raise TransportError("the publisher was closed") from error
                if self._connection.is_lost:
                    raise self._of_rank_0(error) from error
                raise TransferTimeout(
                    f"source rank 0 has sent nothing about {what} for {timeout_seconds:g} s; all "
                    f"ranks must call publish"
                ) from error
            is_late = self._num_due > 1  # of an earlier publish, which this rank gave up
            self._num_due -= isinstance(message, Ended)
            if is_late:
                continue
            match message:
                case messages.Going():
                    deadline = monotonic() + timeout_seconds
                case messages.Emptied(round=number, bucket=bucket):
                    if number == self._round:
                        self._emptied.add(bucket)
                        return message
                case Ended():
                    self._ended = message
                    return message
                case Fetched() | FetchesFailed():
                    continue  # a follower fetches nothing
                case _:
                    return message

    def _is_over(self) -> bool:
        return self._is_stopped and not self._round

    def _hold(self, hold: Hold, lease: Lease) -> None:
        held = self._model.hold(
            hold.version,
            None,
            should_verify=self._options.should_verify,
            deadline=monotonic() + hold.timeout_seconds,
            before_copy=lambda: None,
        )
        (handle,) = self._transports.host.offer_in_place([self._model.held_memory])
        digests = b"" if held.whole_digests is None else held.whole_digests.tobytes()
        copy = HoldsCopy(hold.version, handle, digests, held.digest_seconds)
        self._connection.send(copy)
        lease.release()  # replicas read the copy

    def _take_part(self, start: Start, lease: Lease) -> None:
        """Offer what a round needs, and fill its buckets."""
        deadline = monotonic() + start.timeout_seconds
        self._round, self._emptied = start.round, set()
        if not start.shares:  # nobody reads this rank
            self._connection.send(Offered(start.round, (), 0.0))
            lease.release()
            return
        wanted, before = [], dict(self._shares)
        for each in start.shares:
            known = before.get(each.number)
            share = known if each.table is None else _share(each.table)
            if share is None:
                raise PeerFailed(f"rank 0 refers to share {each.number}, never sent")
            remember(self._shares, share)
            wanted.append(WantedShare(share, each.digest_kind, each.known_lists))
        version = self._model.live(start.version, None)
        offers, seconds = offer_shares(
            version,
            wanted,
            self._slots,
            transport=self._options.transport,
            should_verify=self._options.should_verify,
            deadline=deadline,
        )
        self._connection.send(Offered(start.round, tuple(offers), seconds))
        fill_in_turn(
            self._slots.fills,
            is_needed=lambda bucket: self._ended is None,
            is_empty=self._emptied.__contains__,
            wait_empty=lambda bucket: self._wait_empty(bucket, start.timeout_seconds),
            on_filled=lambda n: self._connection.send(messages.Filled(start.round, n)),
            timeout_seconds=start.timeout_seconds,
        )
        if not any(each.is_mapped for each in offers):
            lease.release()

    def _wait_empty(self, bucket: int, timeout_seconds: float) -> None:
        while bucket not in self._emptied and self._ended is None:
            self._next(timeout_seconds, f"bucket {bucket}")

    def check_open(self) -> None:
        """Raise what ended the connection to rank 0."""
        try:
            self._connection.check_open(0)
        except FlyweightError as error:
            raise self._of_rank_0(error) from error

    def _of_rank_0(self, error: FlyweightError) -> FlyweightError:
        """Return the error that ends this publisher, if the connection to rank 0 is lost."""
        if not self._connection.is_lost:
            return error
        return type(error)(f"source rank 0: {error}; make new publishers on all ranks")

    def replicas(self) -> list[str]:
        """Return nothing: replicas connect to rank 0."""
        return []

    def waiting(self) -> list[str]:
        """Return nothing: replicas connect to rank 0."""
        return []

    def stop(self) -> None:
        """End a publish in which rank 0 has not begun a round; a round may end."""
        self._is_stopped = True
        self._connection.wake()

    def wait_rounds(self, deadline: float) -> bool:
        """Return True: rounds between two publishes need no follower."""
        return True

    def abort(self) -> None:
        """End the publish under way."""
        self._connection.disconnect("the publisher was closed")

    def close(self) -> None:
        """Disconnect from rank 0, and free everything. Safe to repeat."""
        self._closing.close()


def _opened_transports(
    line: Line, address: Address | TcpAddress, invitation: Invitation, rank: int, stack: ExitStack
) -> Transports:
    """Return transports that offer this rank's memory: to rank 0's host, and to others if asked."""
    files, data, engines = None, None, EngineReads()
    if isinstance(line, LocalLine):
        files = FdServer(line.address.fd_socket_of(rank), token=invitation.token)
        stack.callback(files.close)
    if isinstance(address, TcpAddress):
        # On another host than rank 0: the interface by which rank 0 is reached.
        host = address.host if isinstance(line, LocalLine) else line.files.local_host
        welcome = Welcome(control_port=0, session=invitation.session, host=identity())
        server = DataServer(host, token=invitation.token, welcome=welcome)
        stack.callback(server.close)
        place_host = "" if isinstance(line, LocalLine) else host
        data = NetworkTransport(server=server, place_host=place_host)
        engines = EngineReads("" if TcpAddress(host, 0).is_any else server.host)
    return Transports(
        SharedMemoryTransport(fd_server=files), CudaIpcTransport(fd_server=files), data, engines
    )


def _share(table: ShareTable) -> Share:
    regions = Regions(
        numbers(table.block),
        numbers(table.offset, table.num_dims),
        numbers(table.shape, table.num_dims),
    )
    return Share(
        table.number,
        regions,
        numbers(table.source),
        table.places,
        numbers(table.place),
        frozenset(table.devices),
        table.engine,
    )
