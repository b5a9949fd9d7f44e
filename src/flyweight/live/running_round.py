"""A round that runs: a version goes from its source to the members that take part.

`round.py` decides which messages are sent; the threads of connections feed it what members say. The
thread that publishes fills buckets and gives up late members. Each replica ends on its own. No
member delays the others for longer than its deadline, and the bucket slots that a lost member had
not emptied are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, perf_counter
from weakref import WeakMethod

import numpy as np

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerFailed,
    TransferTimeout,
    listed,
)
from flyweight.live import messages
from flyweight.live.bucket_slots import Fill
from flyweight.live.connection import Connection, spin_seconds
from flyweight.live.fanned_out import FannedOut
from flyweight.live.member import MemberRound, RoundEvent
from flyweight.live.published_model import PublishedVersion
from flyweight.live.rank_messages import Released
from flyweight.live.report import ReplicaReport
from flyweight.live.round import (
    COPIED,
    Action,
    Event,
    Failed,
    Reported,
    SourceReady,
    SourcesFailed,
    start,
    step,
    waiting_for,
)
from flyweight.live.source_part import fill_in_turn

GRACE_SECONDS = 3.0
"""After the round's deadline, a member is given up once it made no progress for this long."""


class RunningRound:
    """Runs in the thread that publishes. One lock guards all state."""

    def __init__(
        self,
        number: int,
        version: PublishedVersion,
        members: Sequence[MemberRound],
        connection: Connection,
        *,
        fills: Sequence[Fill],
        num_ranks: int,
        tell_rank: Callable[[int, messages.Message], None],
        name_of: Callable[[int], str],
        beginning: threading.Condition,
        on_release: Callable[[], None],
        timeout_seconds: float,
    ) -> None:
        """Prepare a round; `run` runs it.

        members: who takes part, all ranks of each replica.
        fills: the buckets of this process. Those of all ranks together are numbered in turn.
        num_ranks, tell_rank: the number of source ranks, and how to send one of them a message.
        name_of: returns the name of a block's tensor.
        beginning: a lock that is held while the round begins; a version is marked as replaced only
            under it, and a round whose version is replaced does not begin.
        on_release: called when nothing reads the source's memory any more, maybe repeatedly.
        timeout_seconds: a member without progress for this long is given up. So is one that is
            not done when the round is this old, unless it has just made progress.
        """
        self.number, self.version, self.members = number, version, members
        self._connection = connection
        self._fills, self._num_ranks, self._tell_rank = fills, num_ranks, tell_rank
        self._name_of, self._beginning = name_of, beginning
        self._on_release, self._timeout_seconds = on_release, timeout_seconds
        self._spin_seconds = spin_seconds(bool(version.source.devices))
        self.refused: list[ReplicaReport] = []
        """The members that the round cannot serve."""
        self._changed = threading.Condition(threading.RLock())
        self._by_replica: dict[str, list[MemberRound]] = {}
        for each in members:
            each.feed = WeakMethod(self.on_event)
            self._by_replica.setdefault(each.member.replica, []).append(each)
        ranks = {name: each[0].member.hello.num_ranks for name, each in self._by_replica.items()}
        self._state = start(num_ranks, ranks)
        self._errors: dict[str, FlyweightError] = {}
        """Why each replica failed."""
        self._filled: set[int] = set()
        """The buckets that are full, or were."""
        self._filled_elsewhere: set[int] = set()
        """The buckets of other ranks that are full, and that some member has not emptied."""
        remote = [each for each in members if each.is_remote]
        self._fanned_out = FannedOut(number, remote, send=self._send, give_up=self._fail)
        self._deadline = float("inf")
        self._started, self._last_going = perf_counter(), 0.0
        self.digest_seconds = 0.0

    def run(self) -> None:
        """Run the round until every replica has committed or failed."""
        self._started, self._deadline = perf_counter(), monotonic() + self._timeout_seconds
        try:
            with self._beginning:
                if self.version.is_replaced:
                    return
                self.begin()
            self._fill_buckets()
            if not any(member.offer.is_mapped for member in self.members):
                self._on_release()
            # Two waits, as each begins with a spin: for the copies, then for the digests.
            self._wait(lambda: self._state.num_reading == 0, self._waited_for)
            self._wait(lambda: self._state.is_over, self._waited_for)
        except BaseException as error:
            stopped = PeerFailed(f"the publisher stopped: {type(error).__name__}: {error}")
            reason = error if isinstance(error, FlyweightError) else stopped
            self.abort(reason)
            for member in self._running():  # nobody waits for an answer to their commit
                member.error, member.is_touched = reason, True
            raise
        finally:
            self._on_release()

    def begin(self) -> None:
        """Tell all members that the round starts."""
        self._last_going = monotonic()
        with self._changed:
            for rank in range(self._num_ranks):  # all of them have offered their memory
                self._feed(SourceReady(rank))
            self._fanned_out.start()

    def abort(self, error: FlyweightError) -> None:
        """End the round for all replicas that have not committed."""
        with self._changed:
            for name in self._by_replica:
                self._errors.setdefault(name, error)
            self._feed(SourcesFailed(str(error)))

    # What happened, and what follows from it.

    def on_event(
        self, member: MemberRound, event: RoundEvent | None, error: FlyweightError | None
    ) -> None:
        """Handle what a member says, or that it is gone."""
        with self._changed:
            if isinstance(event, messages.Has | messages.Emptied | messages.Unread):
                self._fanned_out.on_message(member, event)
                event = None
            elif member.is_gone:
                self._fanned_out.lost(member)
            if isinstance(event, Reported) and event.step == "done":
                error = self._mismatch(member)
                if error is not None:
                    event = Failed(event.replica, event.rank, str(error))
            if event is not None:
                self._feed(event, error)
        self._relay_emptied()

    def _feed(self, event: Event, error: FlyweightError | None = None) -> None:
        if isinstance(event, Failed) and error is not None:
            self._errors.setdefault(event.replica, error)
        self._state, actions = step(self._state, event)
        for action in actions:
            self._carry_out(action)
        self._changed.notify_all()

    def _carry_out(self, action: Action) -> None:
        now = monotonic()
        if action.what == "release":
            self._on_release()
            self._tell_ranks(Released(self.version.version))
        for member in self._by_replica.get(action.replica, ()):
            match action.what:
                case "begin":
                    member.last_progress, member.has_begun = now, True
                    self._send(member, member.begin)
                    # Other ranks fill their buckets as soon as they have offered them.
                    for bucket in member.buckets & self._filled:
                        self._send_filled(member, bucket)
                case "write":
                    member.last_progress = now
                    self._send(member, messages.Write(self.number))
                case "commit":
                    member.last_progress = now
                    self._send(member, messages.Commit(self.number, member.offer.digests))
                case "committed":
                    member.is_committed, member.seconds = True, perf_counter() - self._started
                case "abort":
                    self._abort(member, action)

    def _abort(self, member: MemberRound, action: Action) -> None:
        error = self._errors.get(action.replica)
        assert error is not None
        if member.member.hello.num_ranks > 1 and not member.is_gone:
            error = type(error)(action.reason)
        member.error, member.is_touched = error, action.is_touched
        self._fanned_out.lost(member)
        if member.has_begun and not member.is_gone:
            kind, text = type(error).__name__, str(error)
            self._send(member, messages.Abort(self.number, kind, text, action.is_touched))

    def _send(self, member: MemberRound, message: messages.Message) -> None:
        self._connection.send(message, member.member.id)

    def _mismatch(self, member: MemberRound) -> DigestMismatch | None:
        """Return an error if a member holds other bytes than were published."""
        assert member.done is not None
        found, expected = member.done.digests, member.offer.digests
        if found == expected:
            return None
        if len(found) != len(expected):
            wrong = [f"{len(found) // 8} digests, {len(expected) // 8} expected"]
        else:
            differs = np.frombuffer(found, np.uint64) != np.frombuffer(expected, np.uint64)
            blocks = np.unique(member.agreement.whole.source[differs])
            wrong = sorted({self._name_of(block) for block in blocks.tolist()})
        return DigestMismatch(
            f"replica {member.member.label} holds other bytes than were published in "
            f"{len(wrong)} tensors: {listed(wrong)}{self._fanned_out.blame(member)}"
        )

    # Buckets.

    def _fill_buckets(self) -> None:
        """Fill the buckets of this process, in turn with the members that empty them."""

        def numbered(fill: int) -> int:
            """Return the number that members know a bucket of this process by."""
            return fill * self._num_ranks

        fill_in_turn(
            self._fills,
            is_needed=lambda n: any(numbered(n) in each.buckets for each in self._running()),
            is_empty=lambda n: self._is_empty(numbered(n)),
            wait_empty=lambda n: self._wait_empty(numbered(n)),
            on_filled=lambda n: self.on_filled(numbered(n)),
            timeout_seconds=self._timeout_seconds,
        )

    def _running(self) -> list[MemberRound]:
        return [member for member in self.members if member.is_running]

    def _is_empty(self, bucket: int) -> bool:
        """True if nobody reads a bucket from its slot any more."""
        return self._fanned_out.is_free(bucket) and all(
            each.is_remote or each.has_emptied(bucket) for each in self._running()
        )

    def _wait_empty(self, bucket: int) -> None:
        def waited_for() -> Iterator[tuple[MemberRound, str]]:
            for each, what in self._waited_for():
                if not each.has_emptied(bucket):
                    emptied = f"emptied bucket {bucket // self._num_ranks}"
                    yield each, emptied if what == COPIED else what

        self._wait(lambda: self._is_empty(bucket), waited_for)

    def on_filled(self, bucket: int) -> None:
        """Tell the members that need a bucket that it is full."""
        with self._changed:
            self._filled.add(bucket)
            self._fanned_out.filled(bucket)
            for member in self._running():
                if bucket in member.buckets and member.has_begun:
                    self._send_filled(member, bucket)
            if bucket % self._num_ranks:
                self._filled_elsewhere.add(bucket)
        self._relay_emptied()

    def _send_filled(self, member: MemberRound, bucket: int) -> None:
        if not member.is_remote:  # else the fan-out tells it from whom to read
            member.last_progress = monotonic()  # only now it has something to do
            self._send(member, messages.Filled(self.number, bucket))

    def _relay_emptied(self) -> None:
        """Tell other ranks which of their buckets all members have emptied."""
        with self._changed:
            empty = [each for each in self._filled_elsewhere if self._is_empty(each)]
            self._filled_elsewhere.difference_update(empty)
            self._changed.notify_all()
        for bucket in empty:
            number, rank = divmod(bucket, self._num_ranks)
            self._tell_rank(rank, messages.Emptied(self.number, number))

    def _tell_ranks(self, message: messages.Message) -> None:
        for rank in range(1, self._num_ranks if self.version.is_shared else 1):
            self._tell_rank(rank, message)

    # Waiting.

    def _waited_for(self) -> Iterator[tuple[MemberRound, str]]:
        """Yield the members that the round waits for, and what each has not done."""
        self._fanned_out.check_slow()
        missing = waiting_for(self._state)
        for each in self._waiting_for_others():
            each.last_progress = monotonic()
        for each in self._running():
            if (what := missing.get((each.member.replica, each.rank))) is not None:
                yield each, what

    def _waiting_for_others(self) -> list[MemberRound]:
        """Return the remote members without a task, if another member keeps them waiting.

        If nobody has a task, a source rank does, and they are late together with it.
        """
        is_busy = self._fanned_out.is_busy or any(
            (each.buckets & self._filled) - each.emptied
            for each in self._running()
            if not each.is_remote  # it holds a slot that the source waits for
        )
        return [each for each in self._fanned_out.idle() if is_busy and each.done is None]

    def _wait(
        self,
        is_over: Callable[[], bool],
        waited_for: Callable[[], Iterator[tuple[MemberRound, str]]],
    ) -> None:
        """Return once it is over; meanwhile give up late members, and tell the others to wait."""
        self._connection.spin(is_over, self._spin_seconds)
        going_seconds = min(self._timeout_seconds / 8, 1.0)
        while True:
            with self._changed:
                if is_over():
                    return
                now, next_late = monotonic(), float("inf")
                for member, what in list(waited_for()):
                    late_at = self._late_at(member)
                    if now >= late_at:
                        self._give_up(member, what)
                    else:
                        next_late = min(next_late, late_at)
                seconds = max(min(next_late - now, going_seconds), 0.001)
                if self._changed.wait_for(is_over, seconds):
                    return
                if monotonic() - self._last_going > going_seconds:
                    self._last_going = monotonic()
                    self._tell_ranks(messages.Going(self.number))
                    for member in self._running():
                        self._send(member, messages.Going(self.number))

    def _late_at(self, member: MemberRound) -> float:
        """Return when a member is given up if it makes no progress from now on."""
        seconds = self._timeout_seconds
        # Never less than a second: a busy machine is late with the news of progress.
        grace = member.last_progress + min(GRACE_SECONDS, max(seconds / 4, 1.0))
        return min(member.last_progress + seconds, max(self._deadline, grace))

    def _give_up(self, member: MemberRound, what: str) -> None:
        unfilled = member.buckets - self._filled
        ranks = sorted({bucket % self._num_ranks for bucket in unfilled} - {0})
        if ranks:  # another source rank keeps the member waiting
            late = f"source rank {ranks[0]} has not filled its buckets in time"
            self.abort(TransferTimeout(late))
            return
        text = f"replica {member.member.label} is late: it has not {what} in "
        self._fail(member, TransferTimeout(f"{text}{monotonic() - member.last_progress:.3g} s"))

    def _fail(self, member: MemberRound, error: FlyweightError) -> None:
        self._feed(Failed(member.member.replica, member.rank, str(error)), error)
