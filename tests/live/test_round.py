"""Every order of events and failures in a round, and every process killed at every point of it."""

from typing import NamedTuple

import pytest

from flyweight.live.round import (
    Action,
    Failed,
    Phase,
    Reported,
    Round,
    SourceReady,
    SourcesFailed,
    start,
    step,
    waiting_for,
)

NUM_SOURCES = 2
QUESTION = {"write": "write", "keep": "write", "commit": "commit", "fail": "commit"}
ENDS = ("old", "new", "failed")
"""What a rank holds at the end of a round."""


class Rank(NamedTuple):
    """A rank of a replica: the rule that `live/replica_round.py` carries out."""

    replica: str
    number: int
    num_ranks: int
    phase: str = "asked"
    """Then draining, drained, writing, done; at last one of ENDS."""
    inbox: tuple = ()
    outbox: tuple = ()
    """The messages under way to this rank, and to the leader."""
    did: frozenset = frozenset()
    """The steps that it has finished."""
    is_cut: bool = False
    """True if both sides will lose each other, sooner or later."""
    is_dead: bool = False
    is_given_up: bool = False
    """True if the leader hears and sends nothing any more."""

    @property
    def has_ended(self):
        return self.is_dead or self.phase in ENDS

    def said(self, message, phase):
        did = self.did if isinstance(message, tuple) else self.did | {message}
        return self._replace(outbox=(*self.outbox, message), did=did, phase=phase)

    def ended(self, phase):
        """Return the rank after an end that it decided itself, and that it tells the leader."""
        return self.said(("fault", phase == "failed"), phase)


class World(NamedTuple):
    """The leader, the ranks, the messages between them, and what ranks have stored."""

    state: Round
    ranks: tuple
    stored: frozenset = frozenset()
    """(replica, question, verdict)"""
    unstorable: frozenset = frozenset()
    """The verdicts that cannot be stored."""
    told: frozenset = frozenset()
    """(replica, number, message): what the leader has told the ranks of each replica, in order."""
    is_leader_dead: bool = False
    num_released: int = 0
    num_faults: int = 0
    """How many more faults may happen."""

    @property
    def key(self):
        state = self.state
        return (state.ready, tuple(state.replicas.values()), *self[1:])

    def messages(self, replica):
        return [what for name, _, what in sorted(self.told) if name == replica]

    def ranks_of(self, replica):
        return [each for each in self.ranks if each.replica == replica]

    def put(self, rank):
        who = rank[:2]
        return self._replace(ranks=tuple(rank if r[:2] == who else r for r in self.ranks))

    def decided(self, replica, proposal):
        """Return what is stored once a rank has proposed this, or None, and the world then."""
        question = QUESTION[proposal]
        for name, asked, verdict in self.stored:
            if (name, asked) == (replica, question):
                return verdict, self
        if proposal in self.unstorable:
            return None, self
        return proposal, self._replace(stored=self.stored | {(replica, question, proposal)})


def explore(ranks, *, num_faults, unstorable=()):
    """Check every world that can be reached; return how many there are."""
    state = start(NUM_SOURCES, ranks)
    all_ranks = tuple(Rank(name, n, ranks[name]) for name in ranks for n in range(ranks[name]))
    world = World(state, all_ranks, unstorable=frozenset(unstorable), num_faults=num_faults)
    seen, todo = {world.key}, [world]
    while todo:
        world = todo.pop()
        check_ranks(world)
        if not world.is_leader_dead:
            check_leader(world)
        followers = list(after(world))
        if all(each.num_faults < world.num_faults for each in followers):
            assert all(each.has_ended for each in world.ranks), world
            if not world.is_leader_dead:
                assert world.state.is_over, world
                assert world.num_released == 1, world
        for each in followers:
            if each.key not in seen:
                seen.add(each.key)
                todo.append(each)
    return len(seen)


def after(world):
    """Yield the worlds that can come next."""
    fault = world._replace(num_faults=world.num_faults - 1)
    if not world.is_leader_dead:
        yield from after_leader(world, fault)
    for rank in world.ranks:
        if rank.has_ended:
            continue
        yield from after_rank(world, rank)
        if fault.num_faults >= 0:
            yield fault.put(rank._replace(is_dead=True))
            yield gives_up(fault, rank)
            if not rank.is_cut and not world.is_leader_dead:
                yield fault.put(rank._replace(is_cut=True))


def after_leader(world, fault):
    """Yield what comes next at the leader: sources, messages of ranks, and losses."""
    for source in range(NUM_SOURCES):
        if source not in world.state.ready:
            yield fed(world, SourceReady(source))
    if fault.num_faults >= 0:
        yield fault._replace(is_leader_dead=True)
        if not world.state.is_over:
            yield fed(fault, SourcesFailed("died"))
    for rank in world.ranks:
        name, number = rank[:2]
        if rank.is_given_up or world.state.replicas[name].is_over:
            continue  # what it says is of no interest
        lost = rank._replace(outbox=(), is_given_up=True)
        if rank.outbox:
            heard = rank.outbox[0]
            if isinstance(heard, tuple):
                event = Failed(name, number, "failed", heard[1], is_alive=True)
                yield fed(world.put(lost), event)
            else:
                rest = world.put(rank._replace(outbox=rank.outbox[1:]))
                yield fed(rest, Reported(name, number, heard))
        if rank.is_dead or rank.is_cut:
            yield fed(world.put(lost), Failed(name, number, "is gone"))
        elif fault.num_faults >= 0:
            yield fed(fault, Failed(name, number, "is late"))
            yield fed(fault.put(lost._replace(is_cut=True)), Failed(name, number, "is silent"))


def after_rank(world, rank):
    """Yield what a rank does next, by itself or because of a message."""
    if rank.inbox:
        rest = rank._replace(inbox=rank.inbox[1:])
        yield obeys(world, rest, rank.inbox[0])
    if rank.phase == "draining":
        yield world.put(rank.said("drained", "drained"))
    if rank.phase == "writing":
        yield world.put(rank.said("done", "done"))
        if "copied" not in rank.did:
            yield world.put(rank.said("copied", "writing"))
    if rank.is_cut or world.is_leader_dead:
        yield gives_up(world, rank)  # what is still under way never arrives


def obeys(world, rank, message):
    """Return the world after a rank has received a message."""
    match message, rank.phase:
        case "begin", "asked":
            phase = "draining" if rank.num_ranks > 1 else "writing"
            return world.put(rank._replace(phase=phase))
        case "write", "drained":
            verdict, world = world.decided(rank.replica, "write")
            if verdict is None:
                return gives_up(world, rank)
            return world.put(
                rank._replace(phase="writing") if verdict == "write" else rank.ended("old")
            )
        case "commit", "done":
            if rank.num_ranks == 1:
                return world.put(rank._replace(phase="new"))
            verdict, world = world.decided(rank.replica, "commit")
            if verdict is None:
                return gives_up(world, rank)
            is_new = verdict == "commit"
            return world.put(rank.said("committed", "new") if is_new else rank.ended("failed"))
        case (("kept" | "failed"), _):
            has_written = rank.phase in ("writing", "done")
            is_old = message == "kept" and not has_written
            return world.put(rank.ended("old" if is_old else "failed"))
    raise AssertionError((world, rank, message))


def gives_up(world, rank):
    """Return the world after a rank has lost the leader, has waited too long, or cannot go on."""
    if rank.phase == "drained":
        verdict, world = world.decided(rank.replica, "keep")
        return world.put(rank.ended("old" if verdict == "keep" else "failed"))
    if rank.phase == "done" and rank.num_ranks > 1:
        verdict, world = world.decided(rank.replica, "fail")
        return world.put(
            rank.said("committed", "new") if verdict == "commit" else rank.ended("failed")
        )
    return world.put(rank.ended("old" if rank.phase in ("asked", "draining") else "failed"))


def fed(world, event):
    """Return the world after an event at the leader; check each of its actions."""
    state, actions = step(world.state, event)
    assert (state, actions) == step(world.state, event)  # the same again: it changes nothing else
    world = world._replace(state=state)
    for action in actions:
        check_action(world, action)
        if action.what == "release":
            world = world._replace(num_released=world.num_released + 1)
        elif action.what != "committed":
            world = sent(world, action)
    return world


def sent(world, action):
    what = action.what
    if what == "abort":
        what = "failed" if action.is_touched else "kept"
    before = world.messages(action.replica)
    for rank in world.ranks_of(action.replica):
        has_begun = what not in ("kept", "failed") or before
        if has_begun and not rank.is_given_up and not rank.has_ended:
            world = world.put(rank._replace(inbox=(*rank.inbox, what)))
        elif not has_begun and not rank.has_ended:
            world = world.put(rank._replace(phase="old"))  # it waits for another round
    return world._replace(told=world.told | {(action.replica, len(before), what)})


def check_action(world, action):
    if action.what == "release":
        assert not any(is_reading(world, name) for name in world.state.replicas), world
        return
    before, ranks = world.messages(action.replica), world.ranks_of(action.replica)
    assert not before or before[-1] not in ("kept", "failed"), (world, action)
    match action.what:
        case "begin":
            assert world.state.ready == {0, 1}, world
            assert before == []
        case "write":
            assert all("drained" in each.did for each in ranks), world
            assert before == ["begin"]
        case "commit":
            assert all("done" in each.did for each in ranks), world
            assert before == (["begin", "write"] if len(ranks) > 1 else ["begin"])
        case "committed":
            is_stored = (action.replica, "commit", "commit") in world.stored
            assert is_stored or len(ranks) == 1, world
            assert before[-1] == "commit"
        case "abort":
            assert action.reason
            assert before or not action.is_touched, world


def is_reading(world, name):
    """True if the replica may still commit, and the leader knows that not all have copied."""
    replica = world.state.replicas[name]
    return not replica.is_over and len(replica.copied) < replica.num_ranks


def check_ranks(world):
    """Check that no two ranks of a replica that live end a round with different versions."""
    for name, replica in world.state.replicas.items():
        ranks = world.ranks_of(name)
        ends = {each.phase for each in ranks if each.phase in ENDS and not each.is_dead}
        assert len(ends) <= 1, world
        if "new" in ends:
            assert all("done" in each.did for each in ranks), world
        if "old" in ends:
            assert not any(each.did - {"drained"} for each in ranks), world
        # What the leader reports. One rank may lose it after `done`, and nobody says that it did.
        if replica.phase is Phase.COMMITTED and replica.num_ranks > 1:
            assert ends <= {"new"}, world
        if replica.phase is Phase.KEPT:
            assert ends <= {"old"}, world
        if replica.phase is Phase.FAILED and "commit" not in world.messages(name):
            assert ends <= {"old", "failed"}, world


def check_leader(world):
    """Check the leader's state against what has happened, and that it is never stuck."""
    state, waited = world.state, waiting_for(world.state)
    running = [each for each in state.replicas.values() if not each.is_over]
    assert state.is_over == (not running)
    assert state.num_reading == sum(is_reading(world, name) for name in state.replicas), world
    assert world.num_released == (state.num_reading == 0), world
    assert bool(running) == bool(waited), world
    for name in {name for name, _ in waited}:
        after = state
        for rank in [rank for each, rank in waited if each == name]:
            event = SourcesFailed("late") if name is None else Failed(name, rank, "late")
            after, _ = step(after, event)
        assert after.num_running < state.num_running, (world, name)
    for (name, rank), what in waited.items():
        assert name is None or what == missing(state.replicas[name], rank), world
    for event in [SourceReady(rank) for rank in state.ready]:
        assert step(state, event) == (state, []), world  # nothing counts or begins twice
    for name, replica in state.replicas.items():
        heard = {"drained": replica.drained, "copied": replica.copied, "done": replica.done}
        for what, ranks in heard.items():
            for rank in ranks:
                assert step(state, Reported(name, rank, what)) == (state, []), world
        # A replica that has ended stays as it is, and nobody is counted who is not in the round.
        for event in late_events(name, 0 if replica.is_over else replica.num_ranks):
            assert step(state, event) == (state, []), (world, event)
        if replica.is_over:
            assert step(state, Failed(name, 0, "late", is_alive=True)) == (state, [])


def missing(replica, rank):
    if replica.phase is Phase.DRAINING:
        return "drained its requests"
    if replica.phase is Phase.COMMITTING:
        return "confirmed the commit"
    return "sent its digests" if rank in replica.copied else "copied the weights"


def late_events(name, rank):
    yield from (Reported(name, rank, what) for what in ("drained", "copied", "done"))
    yield Reported("unknown", 0, "done")
    yield Failed("unknown", 0, "died")
    yield SourceReady(NUM_SOURCES)


@pytest.mark.parametrize(
    ("ranks", "num_faults", "least"),
    [
        ({"a": 2}, 2, 10_000),
        ({"a": 2, "b": 1}, 0, 1_000),
        ({"a": 3}, 0, 500),
        pytest.param({"a": 2}, 4, 50_000, marks=pytest.mark.campaign),
        pytest.param({"a": 3}, 1, 50_000, marks=pytest.mark.campaign),
        pytest.param({"a": 2, "b": 1}, 1, 50_000, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_all_ranks_of_a_replica_end_alike_in_every_order_and_whoever_dies(ranks, num_faults, least):
    assert explore(ranks, num_faults=num_faults) > least


@pytest.mark.parametrize("verdict", ["write", "commit"])
def test_all_ranks_end_alike_if_a_verdict_cannot_be_stored(verdict):
    assert explore({"a": 2}, num_faults=1, unstorable=[verdict]) > 500


def run(state, *events):
    """Return the state after some events, and the actions of the last one."""
    actions = []
    for event in events:
        state, actions = step(state, event)
    return state, actions


READY = (SourceReady(0), SourceReady(1))


def test_a_replica_of_one_rank_writes_at_begin_and_commits_without_a_decision():
    state, actions = run(start(2, {"a": 1}), *READY)
    assert actions == [Action("begin", "a")]
    state, actions = run(state, Reported("a", 0, "copied"))
    assert actions == [Action("release")]
    state, actions = run(state, Reported("a", 0, "done"))
    assert actions == [Action("commit", "a"), Action("committed", "a")]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_touched", [False, True])
def test_a_rank_that_keeps_its_version_after_write_has_found_that_all_keep_theirs(
    num_ranks, is_touched
):
    state, _ = run(start(2, {"a": num_ranks}), *READY)
    if num_ranks > 1:
        drained = [Reported("a", rank, "drained") for rank in range(num_ranks)]
        state, actions = run(state, *drained)
        assert actions == [Action("write", "a")]
    state, actions = run(state, Failed("a", 0, "no memory", is_touched=is_touched))
    reason = "rank 0 of 'a': no memory"
    assert actions[0] == Action("abort", "a", reason=reason, is_touched=is_touched)
    assert state.replicas["a"].phase is (Phase.FAILED if is_touched else Phase.KEPT)


def told_to_commit():
    """Return a round whose only replica, of two ranks, was told to commit."""
    steps = [Reported("a", rank, what) for what in ("drained", "done") for rank in range(2)]
    state, actions = run(start(2, {"a": 2}), *READY, *steps)
    assert actions == [Action("commit", "a"), Action("release")]
    return state


def test_a_replica_has_committed_once_one_of_its_ranks_says_so():
    lost = run(told_to_commit(), Failed("a", 0, "died"), SourcesFailed("died"))[0]
    assert waiting_for(lost) == {("a", 1): "confirmed the commit"}
    for state in (told_to_commit(), lost):
        after, actions = step(state, Reported("a", 1, "committed"))
        assert actions == [Action("committed", "a")]
        assert after.replicas["a"].phase is Phase.COMMITTED


def test_a_replica_that_did_not_obey_the_commit_has_failed():
    """At once if a rank says so; if all are lost, they may have obeyed, and nobody knows."""
    fault, *losses = (
        Failed("a", 0, "another rank gave up", is_alive=True),
        Failed("a", 0, "died"),
        Failed("a", 1, "died"),
    )
    for events in ([fault], losses):
        state, actions = run(told_to_commit(), *events)
        reason = f"rank {events[-1].rank} of 'a': {events[-1].reason}"
        assert actions == [Action("abort", "a", reason=reason, is_touched=True)]
        assert step(state, Reported("a", 1, "committed")) == (state, [])


def test_a_failed_engine_rank_does_not_stop_the_other_replica():
    state, actions = run(start(2, {"a": 2, "b": 1}), Failed("a", 1, "died"))
    assert actions == [Action("abort", "a", reason="rank 1 of 'a': died")]
    state, actions = run(state, *READY, Reported("b", 0, "done"))
    assert actions == [Action("commit", "b"), Action("committed", "b"), Action("release")]


def test_a_source_that_fails_before_the_begin_leaves_all_replicas_as_they_are():
    state, actions = run(start(2, {"a": 2, "b": 1}), SourceReady(0), SourcesFailed("died"))
    aborts = [Action("abort", name, reason="died") for name in ("a", "b")]
    assert actions == [*aborts, Action("release")]
    assert step(state, SourceReady(1)) == (state, [])


def test_a_source_that_fails_spares_the_replica_that_has_committed():
    state, _ = run(start(2, {"a": 1, "b": 1}), *READY, Reported("a", 0, "done"))
    state, actions = run(state, SourcesFailed("died"))
    assert [(each.what, each.replica) for each in actions] == [("abort", "b"), ("release", "")]
    assert state.replicas["a"].phase is Phase.COMMITTED


def test_the_round_says_for_whom_it_waits():
    state = start(2, {"a": 2, "b": 1})
    assert waiting_for(state) == dict.fromkeys([(None, 0), (None, 1)], "offered its weights")
    state, _ = run(state, *READY, Reported("a", 1, "drained"), Reported("b", 0, "copied"))
    assert waiting_for(state) == {
        ("a", 0): "drained its requests",
        ("b", 0): "sent its digests",
    }
    state, _ = run(state, Reported("a", 0, "drained"))
    state, _ = run(state, Reported("b", 0, "done"), Reported("a", 1, "done"))
    assert waiting_for(state) == {("a", 0): "copied the weights"}
    assert waiting_for(run(state, Failed("a", 0, "died"))[0]) == {}
