"""A replica's side of one round: the messages to and from the publisher, and the sink.

An `UpdateSink` says which tensors it wants. In a round it receives them, from memory that is
mapped and from buckets, and returns the digest of what it holds for each copy of the plan.
`MemorySink` and `LoaderSink` implement it. Each wait has the same deadline anew, so a round that
makes progress is never given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Protocol

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerFailed,
    StoreError,
    TransportError,
    error_named,
)
from flyweight.live import messages
from flyweight.live.connection import spin_seconds
from flyweight.live.fetch import Fetched, Fetches, FetchesFailed
from flyweight.live.replica_connection import ReplicaConnection
from flyweight.live.report import unverified
from flyweight.ports import UpdateReport
from flyweight.ranks.decision import Verdict
from flyweight.spec.manifest import Leaf, TensorSpec

_REASON_SECONDS = 1.0
InRound = messages.Filled | Fetched | messages.Write | messages.Commit
"""What a round waits for."""
_OTHER_RANK = "another rank of the engine gave up the round"


@dataclass(frozen=True)
class SinkResult:
    """What a sink received in a round, before the round is committed."""

    digests: bytes
    """The digest of each copy, 64 bits each; empty if the round does not verify."""
    copy_seconds: float
    verify_seconds: float


class ReplicaRound:
    """A round that a replica takes part in."""

    def __init__(
        self,
        connection: ReplicaConnection,
        begin: messages.Begin,
        *,
        timeout_seconds: float,
        has_devices: bool,
        waited_seconds: float,
        touch: Callable[[], None],
    ) -> None:
        """Prepare a round.

        timeout_seconds: the time for each step of it.
        has_devices: True if the sink writes to device memory.
        waited_seconds: how long the round was waited for.
        touch: the sink calls it before it overwrites the old version.
        """
        self.connection, self.begin, self.source = connection, begin, connection.source
        self._timeout_seconds, self._has_devices = timeout_seconds, has_devices
        self._missing_buckets: set[int] = set()
        self._fetches: Fetches | None = None
        """The buckets that come from another host."""
        self._early: deque[messages.Filled | Fetched] = deque()
        """The buckets that were there before the weights could be written."""
        self._is_aborted = self._is_committed = False
        self.interrupt: BaseException | None = None
        """What interrupted the wait for a commit that was decided, such as KeyboardInterrupt."""
        self.touch = touch
        self.nbytes = self._copied_bytes = self._fetched_bytes = 0
        connection.copied_bytes = lambda: self._copied_bytes + self._fetched_bytes
        self._started, self._waited_seconds = perf_counter(), waited_seconds

    @property
    def deadline(self) -> float:
        """The time, by the monotonic clock, by which the next step must be done."""
        return monotonic() + self._timeout_seconds

    @property
    def progress(self) -> float:
        """How much is copied, from 0 to 1."""
        return min(self._copied_bytes / self.nbytes, 1.0) if self.nbytes else 0.0

    def on_progress(self, nbytes: int) -> None:
        """Count bytes that were copied."""
        self._copied_bytes += nbytes  # a count that threads lose only shows in `progress`

    def _on_fetch_progress(self, nbytes: int) -> None:
        self._fetched_bytes += nbytes

    def open(self, *, must_verify: bool) -> None:
        """Check the version and map its memory; nothing is written yet."""
        begin = self.begin
        if begin.version < 0:
            raise TransportError(f"version {begin.version} is less than 0")
        if must_verify and not begin.should_verify:
            raise unverified(begin.version, begin.origin)
        if self._has_devices and begin.digest_kind != "words":
            raise TransportError(
                f"the publisher wants {begin.digest_kind} digests; device memory has 'words' only"
            )
        self.source.open(begin)
        self.nbytes = self.source.nbytes
        self._missing_buckets = set(self.source.buckets)
        network = self.source.transports.network
        if self.source.fetches and network is not None:
            self._fetches = Fetches(
                begin.round,
                self.source.fetches,
                network,
                self.source.transports.engines,
                timeout_seconds=self._timeout_seconds,
                on_progress=self._on_fetch_progress,
                send=self.connection.send,
                on_fetched=self.connection.post,
            )
            self.connection.attach(self._fetches)

    def close(self) -> None:
        """End all reading; what was not received yet never comes. Safe to repeat."""
        if self._fetches is not None:
            if not self._is_committed:  # else it hears which buckets others still need here
                self.connection.attach(None)
            if not self._fetches.close():
                self.source.forget()  # a thread may still write to that staging
            self.source.lent += self._fetches.lent.values()

    def check_running(self) -> None:
        """Raise if the publisher is gone or has aborted the round."""
        self.connection.check_open(self.begin.round)

    def wait_write(self) -> None:
        """Return once all ranks of the replica have drained; at once if this is the only one.

        From then on another rank may write, so this one does not keep its version either.
        """
        if self.connection.num_ranks == 1:
            return
        decisions, number = self.connection.decisions, self.begin.round
        assert decisions is not None
        decisions.begin(number)
        self.connection.send(messages.Drained(number))
        try:
            while not isinstance(
                message := self._next("the permission to write"), messages.Write | messages.Commit
            ):
                self._early.append(message)  # buckets are filled while others still drain
            if not isinstance(message, messages.Write):
                raise TransportError(f"the publisher sent {type(message).__name__}, not Write")
            verdict = decisions.decide(number, "write")
        except BaseException:
            if not self._is_aborted and self._verdict_instead("keep") != "keep":
                self.touch()
            raise
        if verdict == "keep":
            raise self.abort_reason() or PeerFailed(f"{_OTHER_RANK} before this one could write")
        self.touch()

    def _verdict_instead(self, proposal: Verdict) -> Verdict | None:
        """Return the verdict for all ranks, when this one cannot obey the publisher.

        None, the worst, if it can be neither stored nor read.
        """
        assert self.connection.decisions is not None
        try:
            return self.connection.decisions.decide(self.begin.round, proposal)
        except StoreError:
            return None

    def next_bucket(self) -> int:
        """Wait for the next bucket and return its number."""
        message = self._early.popleft() if self._early else self._next("a bucket")
        if not isinstance(message, messages.Filled | Fetched):
            raise TransportError("the publisher commits the round before its last bucket")
        if message.bucket not in self._missing_buckets:
            raise TransportError(f"bucket {message.bucket} was not announced, or came twice")
        self._missing_buckets.remove(message.bucket)
        return message.bucket

    def bucket_emptied(self, bucket: int) -> None:
        """Free the slot of a bucket, whose bytes are copied."""
        self.connection.send(messages.Emptied(self.begin.round, bucket))

    def copied(self) -> None:
        """Say that no memory of the publisher is read any more; digests may follow."""
        self.connection.send(messages.Copied(self.begin.round))

    def fail(self, error: BaseException, *, is_touched: bool) -> None:
        """Tell the publisher that the replica cannot continue."""
        kind, text = type(error).__name__, str(error)
        self.connection.send(messages.Fault(self.begin.round, kind, text, is_touched))

    def commit(self, result: SinkResult) -> None:
        """Send the digests of what was received; raise unless they are committed."""
        seconds = result.copy_seconds, result.verify_seconds
        done = messages.Done(self.begin.round, result.digests, *seconds)
        if self.connection.num_ranks > 1:
            self._commit_together(done)
        else:
            self._commit_alone(done)
        self._is_committed = True

    def _commit_alone(self, done: messages.Done) -> None:
        """Commit, as the only rank of the replica."""
        message: InRound
        try:
            self.connection.send(done)
            message = self._next("a commit")
        except TransportError:
            # All bytes and their digests were here before the publisher went.
            is_gone = self.connection.is_lost and not self._is_aborted
            digests = self.begin.digests if self.begin.may_commit_alone else None
            if not is_gone or digests is None or self.source.buckets:
                raise
            message = messages.Commit(done.round, digests)
        self._check_commit(message, done.digests)

    def _commit_together(self, done: messages.Done) -> None:
        """Commit, unless another rank of the replica has given up."""
        decisions, verdict = self.connection.decisions, "commit"
        assert decisions is not None
        try:
            self.connection.send(done)
            self._check_commit(self._next("a commit"), done.digests)
            verdict = decisions.decide(done.round, "commit")
        except BaseException as error:
            # The publisher has compared the digests of all ranks before it sent a commit.
            is_over = self._is_aborted or self._verdict_instead("fail") != "commit"
            if is_over or isinstance(error, DigestMismatch):
                raise
            if not isinstance(error, Exception):
                self.interrupt = error
        if verdict != "commit":
            raise self.abort_reason() or PeerFailed(f"{_OTHER_RANK} before this one had committed")
        self.connection.send(messages.Committed(done.round))

    def _check_commit(self, message: InRound, digests: bytes) -> None:
        """Raise unless a message commits these digests."""
        if not isinstance(message, messages.Commit):
            raise TransportError(f"the publisher sent {type(message).__name__}, not a commit")
        if message.digests != digests:
            raise DigestMismatch(
                f"{len(digests) // 8} digests of version {self.begin.version} are not those "
                f"that were committed"
            )

    def report(self, result: SinkResult, verified: str) -> UpdateReport:
        """Return the report of a round that has just been committed."""
        begin = self.begin
        return UpdateReport(
            begin.version,
            begin.parent,
            self.nbytes,
            perf_counter() - self._started,
            self._waited_seconds,
            result.copy_seconds,
            result.verify_seconds,
            begin.strategy,
            begin.origin,
            verified if begin.should_verify else "nothing",
        )

    def abort_reason(self) -> FlyweightError | None:
        """Return why the publisher aborted this round, if it says so soon."""
        deadline = monotonic() + _REASON_SECONDS
        try:
            while True:
                message = self.connection.next(deadline, "a reason")
                if isinstance(message, messages.Abort) and message.round == self.begin.round:
                    return error_named(message.kind, message.text)
        except TransportError:
            return None

    def _next(self, what: str) -> InRound:
        """Return the next message of this round; raise the error that aborts it."""
        deadline, this, spin = self.deadline, self.begin.round, spin_seconds(self._has_devices)
        while True:
            message = self.connection.next(deadline, what, spin_seconds=spin)
            match message:
                case (
                    Fetched(round=number)
                    | messages.Filled(round=number)
                    | messages.Write(round=number)
                    | messages.Commit(round=number)
                ) if number == this:
                    return message
                case messages.Abort(round=number, kind=kind, text=text) if number == this:
                    self._is_aborted = True
                    if message.is_touched and self.connection.num_ranks > 1:
                        self.touch()
                    raise error_named(kind, text)
                case FetchesFailed(round=number, reason=reason) if number == this:
                    raise TransportError(reason)
                case messages.Going(round=number) if number == this:
                    deadline = self.deadline
                case _:
                    continue


class UpdateSink(Protocol):
    """What an update writes to."""

    verified: str
    """What its digests are computed from, for reports: 'live' or 'received'."""
    takes_all: bool
    """True if it takes all tensors that the publisher has, whatever they are."""

    @property
    def has_devices(self) -> bool:
        """True if some of it is in device memory."""

    def is_current(self) -> bool:
        """True while the tensors are those that `want` returned."""

    def is_in_place(self) -> bool:
        """True while their memory can be written: a faster check, which ignores strides."""

    def check(self) -> None:
        """Raise SpecError if its tensors cannot be written, before there is a publisher."""

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> messages.Want:
        """Return which boxes of the publisher's tensors it wants.

        Raises PlanError or SpecError if its own tensors cannot be written.
        """

    def synchronize(self, deadline: float) -> None:
        """Wait for work of devices that still reads the old weights."""

    def stage(self, round_: ReplicaRound) -> None:
        """Receive what may be received before the engine pauses; call it before `receive`."""

    def unstage(self) -> None:
        """Free what was staged, at the end of a round. Safe to repeat."""

    def receive(self, round_: ReplicaRound) -> SinkResult:
        """Call `round_.touch`, then write all tensors; return their digests."""

    def touched(self) -> None:
        """Tell the framework that tensors were written, successfully or not."""

    def finish(self, values: Mapping[str, Leaf]) -> None:
        """Set the values that are not tensors, after all tensors are written."""

    def close(self) -> None:
        """Free what was prepared. Safe to repeat."""
