"""One round of a publish, without I/O: events in, actions out.

The leader (source rank 0) runs it. Threads feed it events and carry out its actions; nothing here
waits, reads a clock or touches a socket, so the tests try every order of messages and failures.

    1  [source ranks]  ready    memory is offered and digested; once all are  -> begin, all replicas
    2  [engine ranks]  drained  no request is running; all ranks of a replica -> write, this replica
    3  [engine ranks]  copied   no memory of the sources is read; all         -> release, to sources
    4  [engine ranks]  done     live digests agree; all ranks of a replica    -> commit, the replica
    5  [engine ranks]  committed, by one rank: it has stored that all commit -> the replica is over

A failed engine rank aborts its own replica; the others continue. A failed source rank aborts every
replica that has no commit yet. A replica of one rank waits for no others: `begin` lets it write,
and its commit is not answered.

The ranks of a larger replica may lose the leader between two messages. So each of them stores what
it hears, `write` or `commit`, where all ranks of the replica look (`ranks/decision.py`), before it
obeys. One that loses the leader, or waits too long, proposes `keep` instead of `write`, `fail`
instead of `commit`. The first proposal wins, and every rank obeys it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace


class Phase(Enum):
    """How far a replica is in a round. The last three are ends."""

    WAITING = "waits for the sources"
    DRAINING = "drains requests"
    WRITING = "writes weights"
    COMMITTING = "was told to commit"
    COMMITTED = "holds the new version"
    KEPT = "holds the version that it had before"
    FAILED = "holds no version"


COPIED = "copied the weights"
"""What a rank that copies has not done yet."""
_ENDS = frozenset({Phase.COMMITTED, Phase.KEPT, Phase.FAILED})
_NONE: frozenset[int] = frozenset()


class ReplicaRound(Struct, frozen=True):
    """A replica in a round, and which of its ranks have reported each step."""

    name: str
    num_ranks: int
    phase: Phase = Phase.WAITING
    drained: frozenset[int] = _NONE
    copied: frozenset[int] = _NONE
    done: frozenset[int] = _NONE
    lost: frozenset[int] = _NONE
    """The ranks that were lost, or late, after the commit was sent: others may have taken it."""

    @property
    def is_over(self) -> bool:
        return self.phase in _ENDS

    @property
    def is_reading(self) -> bool:
        """True while a rank may still read the memory of the sources for a version that counts."""
        return len(self.copied) < self.num_ranks and self.phase not in _ENDS


class Round(Struct, frozen=True):
    """The state of a round; `start` makes the first one."""

    num_sources: int
    replicas: Mapping[str, ReplicaRound]
    num_running: int
    """How many replicas are not over."""
    num_reading: int
    """How many replicas may still read the memory of the sources."""
    ready: frozenset[int] = _NONE

    @property
    def is_over(self) -> bool:
        return self.num_running == 0


def start(num_sources: int, ranks: Mapping[str, int]) -> Round:
    """Return a round that waits for its sources; `ranks` has each replica's number of ranks."""
    replicas = {name: ReplicaRound(name, num_ranks) for name, num_ranks in ranks.items()}
    return Round(num_sources, replicas, len(replicas), len(replicas))


class SourceReady(Struct, frozen=True):
    """A source rank has offered its memory."""

    rank: int


class SourcesFailed(Struct, frozen=True):
    """The sources cannot continue: a rank is lost or late, or the publisher is closed."""

    reason: str


class Reported(Struct, frozen=True):
    """A rank of a replica has finished a step. `done` includes `copied`."""

    replica: str
    rank: int
    step: Literal["drained", "copied", "done", "committed"]


class Failed(Struct, frozen=True):
    """A rank of a replica is lost or late, cannot continue, or holds other bytes."""

    replica: str
    rank: int
    reason: str
    is_touched: bool = True
    """False if the rank says that it has written nothing."""
    is_alive: bool = False
    """True if the rank says so itself: after a commit it then holds no version."""


Event = SourceReady | SourcesFailed | Reported | Failed


class Action(Struct, frozen=True):
    """A message to all ranks of a replica; `committed` and `release` are for the leader's side.

    A replica is `committed` when it surely holds the version. `release` is for the sources.
    """

    what: Literal["begin", "write", "commit", "committed", "abort", "release"]
    replica: str = ""
    reason: str = ""
    is_touched: bool = False
    """True if an aborted replica holds no version, False if it keeps the one that it had."""


def step(state: Round, event: Event) -> tuple[Round, list[Action]]:
    """Return the round after an event, and the actions. A late event changes nothing."""
    if state.is_over:
        return state, []
    match event:
        case SourceReady(rank) if 0 <= rank < state.num_sources:
            state = replace(state, ready=state.ready | {rank})
            if len(state.ready) < state.num_sources:
                return state, []
            steps = [_begun(each) for each in state.replicas.values()]
        case SourcesFailed(reason):
            steps = [_failed(each, reason) for each in state.replicas.values()]
        case Reported(name) | Failed(name) if name in state.replicas:
            replica = state.replicas[name]
            steps = [_step_replica(replica, event)]
            if steps[0][0] is replica:
                return state, []
        case _:
            return state, []
    return _with(state, steps)


def _step_replica(
    replica: ReplicaRound, event: Reported | Failed
) -> tuple[ReplicaRound, list[Action]]:
    """Return a replica after an event of its own, and the actions."""
    match event:
        case Reported(_, rank) if not 0 <= rank < replica.num_ranks:
            return replica, []
        case Reported(_, rank, "drained") if replica.phase is Phase.DRAINING:
            drained = replica.drained | {rank}
            if len(drained) < replica.num_ranks:
                return replace(replica, drained=drained), []
            after = replace(replica, drained=drained, phase=Phase.WRITING)
            return after, [Action("write", replica.name)]
        case Reported(_, rank, "copied") if replica.phase is Phase.WRITING:
            return replace(replica, copied=replica.copied | {rank}), []
        case Reported(_, rank, "done") if replica.phase is Phase.WRITING:
            return _on_done(replica, rank)
        case Reported(_, _, "committed") if replica.phase is Phase.COMMITTING:
            return replace(replica, phase=Phase.COMMITTED), [Action("committed", replica.name)]
        case Failed(_, rank, reason, is_touched):
            reason = f"rank {rank} of {replica.name!r}: {reason}"
            if replica.phase is not Phase.COMMITTING:
                return _failed(replica, reason, is_touched)
            lost = replica.lost | {rank}
            if event.is_alive or len(lost) == replica.num_ranks:
                return _aborted(replica, reason, is_touched=True)
            return replace(replica, lost=lost), []
    return replica, []


def waiting_for(state: Round) -> dict[tuple[str | None, int], str]:
    """Return the ranks that the round waits for, and what each has not done.

    A key is a replica's name and a rank; the name of a source rank is None.
    """
    if state.is_over:
        return {}
    missing = [rank for rank in range(state.num_sources) if rank not in state.ready]
    if missing:
        return {(None, rank): "offered its weights" for rank in missing}
    found: dict[tuple[str | None, int], str] = {}
    for name, each in state.replicas.items():
        for rank in range(each.num_ranks):
            if each.phase is Phase.DRAINING and rank not in each.drained:
                found[name, rank] = "drained its requests"
            elif each.phase is Phase.WRITING and rank not in each.done:
                has_copied = rank in each.copied
                found[name, rank] = "sent its digests" if has_copied else COPIED
            elif each.phase is Phase.COMMITTING and rank not in each.lost:
                found[name, rank] = "confirmed the commit"
    return found


def _begun(replica: ReplicaRound) -> tuple[ReplicaRound, list[Action]]:
    if replica.phase is not Phase.WAITING:
        return replica, []
    phase = Phase.DRAINING if replica.num_ranks > 1 else Phase.WRITING
    return replace(replica, phase=phase), [Action("begin", replica.name)]


def _on_done(replica: ReplicaRound, rank: int) -> tuple[ReplicaRound, list[Action]]:
    done = replica.done | {rank}
    after = replace(replica, copied=replica.copied | {rank}, done=done)
    if len(done) < replica.num_ranks:
        return after, []
    commit = Action("commit", replica.name)
    if replica.num_ranks == 1:  # no other rank could hear something else
        committed = Action("committed", replica.name)
        return replace(after, phase=Phase.COMMITTED), [commit, committed]
    return replace(after, phase=Phase.COMMITTING), [commit]


def _failed(
    replica: ReplicaRound, reason: str, is_touched: bool = True
) -> tuple[ReplicaRound, list[Action]]:
    match replica.phase:
        case Phase.WAITING | Phase.DRAINING:
            return _aborted(replica, reason, is_touched=False)
        case Phase.WRITING:
            return _aborted(replica, reason, is_touched=is_touched)
    return replica, []


def _aborted(
    replica: ReplicaRound, reason: str, *, is_touched: bool
) -> tuple[ReplicaRound, list[Action]]:
    phase = Phase.FAILED if is_touched else Phase.KEPT
    abort = Action("abort", replica.name, reason=reason, is_touched=is_touched)
    return replace(replica, phase=phase), [abort]


def _with(
    state: Round, steps: list[tuple[ReplicaRound, list[Action]]]
) -> tuple[Round, list[Action]]:
    """Return the round with these replicas, and all actions; the last reader releases."""
    replicas, actions = {**state.replicas}, []
    num_running, num_reading = state.num_running, state.num_reading
    for after, its_actions in steps:
        before = replicas[after.name]
        replicas[after.name] = after
        num_running -= before.is_over != after.is_over
        num_reading -= before.is_reading != after.is_reading
        actions += its_actions
    if num_reading == 0 < state.num_reading:
        actions.append(Action("release"))
    return Round(state.num_sources, replicas, num_running, num_reading, state.ready), actions
