"""The cell's protocol, step by step: every interleaving of small models.

Models are explored whole: a step is one load, one store, one system call; a process may be
killed before any of them. test_cell_records.py holds the real cell to what they take for granted.
"""

from collections import deque
from typing import NamedTuple

import pytest

# The explorer.


class Wrong(Exception):
    """A step that must not be, found by a model."""


class Graph:
    """All states that steps lead to from a first one, and how each was first reached."""

    def __init__(self, first, steps):
        self.came, self.after = {first: None}, {}
        todo = deque([first])
        self.wrong = None
        while todo:
            state = todo.popleft()
            try:
                self.after[state] = found = list(steps(state))
            except Wrong as wrong:
                self.wrong = [*self.trace(state), str(wrong)]
                return
            for label, other in found:
                if other not in self.came:
                    self.came[other] = state, label
                    todo.append(other)

    def trace(self, state):
        """Return the labels of a shortest way to a state."""
        labels = []
        while self.came[state] is not None:
            state, label = self.came[state]
            labels.append(label)
        return labels[::-1]

    def stuck(self, is_good):
        """Return a shortest way to a state that has no steps and is not good; None if none is."""
        ends = (each for each in self.came if not self.after[each] and not is_good(each))
        return next(map(self.trace, ends), None)

    def hopeless(self, is_good):
        """Return a shortest way to a state from which no steps lead to a good one; None if none is."""
        before = {}
        for state, found in self.after.items():
            for _, other in found:
                before.setdefault(other, []).append(state)
        fine = {state for state in self.came if is_good(state)}
        todo = list(fine)
        while todo:
            for state in before.get(todo.pop(), ()):
                if state not in fine:
                    fine.add(state)
                    todo.append(state)
        return next((self.trace(state) for state in self.came if state not in fine), None)


# The old protocol: one word that server and ranks both write (C21, C22, C23).

NORMAL, UPDATING, CLEARING, CLEARED = "NORMAL", "UPDATING", "CLEARING", "CLEARED"
RESULT = {UPDATING: NORMAL, CLEARING: CLEARED}


class Old(NamedTuple):
    cell: str
    server: int
    ranks: tuple
    """What each rank has read and is at work on, or None."""
    seen: tuple
    """What each rank was asked for last: it acts on it once."""


def old_steps(is_patient, writers):
    """Clear, then update, as the old server did; it may lose patience with the clearing."""
    program = [("write", CLEARING), ("wait", CLEARED), ("write", UPDATING), ("wait", NORMAL)]

    def steps(state):
        if state.server < len(program):
            kind, value = program[state.server]
            if kind == "write":
                yield f"server writes {value}", state._replace(cell=value, server=state.server + 1)
            elif state.cell == value:
                yield f"server reads {value}", state._replace(server=state.server + 1)
            elif not is_patient and value == CLEARED:
                yield "server waits no longer", state._replace(server=state.server + 1)
        for rank, doing in enumerate(state.ranks):
            if doing is None and state.cell in RESULT and state.seen[rank] != state.cell:
                yield (
                    f"rank {rank} reads {state.cell}",
                    state._replace(
                        ranks=put(state.ranks, rank, state.cell),
                        seen=put(state.seen, rank, state.cell),
                    ),
                )
            elif doing is not None:
                done = state._replace(ranks=put(state.ranks, rank, None))
                if rank in writers:
                    yield f"rank {rank} writes {RESULT[doing]}", done._replace(cell=RESULT[doing])
                else:
                    yield f"rank {rank} is done", done

    return steps


def put(values, at, value):
    return (*values[:at], value, *values[at + 1 :])


@pytest.mark.parametrize(
    ("num_ranks", "is_patient", "writers"),
    [(1, False, {0}), (2, False, {0}), (3, False, {0}), (2, True, {0, 1}), (3, True, {0, 1, 2})],
)
def test_the_old_protocol_loses_an_update(num_ranks, is_patient, writers):
    """C23: a late CLEARED over the server's UPDATING: of rank 0, or of any rank to the cache's word."""
    first = Old(NORMAL, 0, (None,) * num_ranks, (None,) * num_ranks)
    graph = Graph(first, old_steps(is_patient, writers))
    trace = graph.stuck(lambda state: state.server == 4)
    print(f"{num_ranks} ranks:", *trace, sep="\n  ")
    late = max(n for n, step in enumerate(trace) if step.endswith("writes CLEARED"))
    assert "server writes UPDATING" in trace[:late]
    assert len(trace) == (7 if is_patient else 5)


# One word of ours: a counter and two records, one writer that may be killed, one reader.


class Words(NamedTuple):
    count: int = 0
    halves: tuple = ((0, 0, 0), (0, 0, 0))
    """Checksum and two words of a record; whole if all three are the record's number."""
    value: int = 0
    """The number that is being written; those before are written or lost."""
    stores: frozenset | None = None
    """What the writer has still to store; None if it has not begun."""
    target: int = 0
    num_kills: int = 0
    reads: tuple | None = None
    """Of the reader: the counter and what was loaded; None if it has not begun."""
    least: int = 0
    """The record that held when the reader began."""


class Way(NamedTuple):
    """How words are written and read; each part can be left out, to see that it is missed."""

    has_two_halves: bool = True
    has_check: bool = True
    has_recount: bool = True
    num_values: int = 4
    num_kills: int = 1


def word_steps(way):
    """Write records one by one and read them over and over, loads and stores in any order."""

    def half_of(count):
        return count & 1 if way.has_two_halves else 0

    def writer(state):
        if state.stores is None:
            if state.value < way.num_values:
                yield (
                    "writer loads the counter",
                    state._replace(
                        value=state.value + 1, stores=frozenset(range(3)), target=state.count + 1
                    ),
                )
        elif state.stores:
            at = half_of(state.target)
            for word in state.stores:
                half = put(state.halves[at], word, state.value)
                yield (
                    f"writer stores word {word} of {state.value}",
                    state._replace(
                        halves=put(state.halves, at, half), stores=state.stores - {word}
                    ),
                )
        else:
            yield "writer stores the counter", state._replace(count=state.target, stores=None)
        if state.num_kills < way.num_kills and state.stores is not None:
            yield "writer is killed", state._replace(stores=None, num_kills=state.num_kills + 1)

    def reader(state):
        if state.reads is None:
            held = state.halves[half_of(state.count)]
            least = held[0] if way.has_two_halves else 0
            yield (
                "reader loads the counter",
                state._replace(reads=(state.count, None, None, None), least=least),
            )
            return
        count, *loaded = state.reads
        if None in loaded:
            for word in (n for n in range(3) if loaded[n] is None):
                value = state.halves[half_of(count)][word]
                yield (
                    f"reader loads word {word}",
                    state._replace(reads=put(state.reads, 1 + word, value)),
                )
            return
        is_taken = (count == state.count or not way.has_recount) and (
            loaded[0] == loaded[1] == loaded[2] or not way.has_check
        )
        if is_taken and not loaded[0] == loaded[1] == loaded[2]:
            raise Wrong(f"reader takes {loaded} for whole")
        if is_taken and loaded[1] < state.least:
            raise Wrong(f"reader takes {loaded[1]}, {state.least} held before it began")
        yield "reader takes it" if is_taken else "reader tries again", state._replace(reads=None)

    def steps(state):
        yield from writer(state)
        yield from reader(state)

    return steps


def test_a_reader_never_takes_a_record_that_is_not_whole_or_is_old():
    """C23: whatever the order of loads and stores, and wherever a writer is killed."""
    graph = Graph(Words(), word_steps(Way()))
    assert graph.wrong is None, graph.wrong
    assert len(graph.came) > 5_000
    for state in graph.came:  # whoever dies at this step leaves a record that can be read
        held = state.halves[state.count & 1]
        assert held[0] == held[1] == held[2], graph.trace(state)
    last = max(state.halves[state.count & 1][0] for state in graph.came)
    assert last == Way().num_values


@pytest.mark.parametrize(
    "way",
    [Way(has_two_halves=False, has_check=False), Way(has_check=False, has_recount=False)],
    ids=["one record", "no second look at the counter"],
)
def test_the_explorer_finds_the_torn_record_of_a_poorer_cell(way):
    graph = Graph(Words(), word_steps(way))
    assert graph.wrong is not None
    assert "for whole" in graph.wrong[-1]


def test_the_checksum_alone_keeps_torn_records_out():
    """On a machine that shows stores in another order the counter may prove nothing."""
    graph = Graph(Words(), word_steps(Way(has_recount=False)))
    assert graph.wrong is None or "for whole" not in graph.wrong[-1]


# Requests and records of ours: a controller, ranks, and everybody's restart.


class Step:
    """What a rank, and then what the controller, does next."""

    LOOK, TELL_TAKEN, RING_TAKEN, WAKE_TAKEN, DO, TELL_DONE, RING, WAKE, SLEEP, ASLEEP = range(10)
    START, ASK, WAKE_RANKS, RING_BELL, WAKE_BELL, LOAD_BELL, READ = range(20, 27)
    SLEEP_BELL, SLEEPING, ENDED = range(27, 30)


class Rank(NamedTuple):
    pc: int = Step.LOOK
    life: int = 0
    """Which process of this rank it is."""
    taken: int = 0
    count: int = 0
    """The request's counter, as loaded."""
    record: tuple = (0, 0, 0, True)
    """What its record shows: life, taken, done, and whether that was done well."""
    done: tuple = ()
    """Requests that it has carried out, by whichever process."""


class System(NamedTuple):
    ranks: tuple
    number: int = 0
    """The request that is shown; its counter is the same number."""
    pc: int = Step.START
    index: int = 0
    """The next record that the controller reads."""
    is_answered: bool = True
    """Whether all records that it has read since the bell say so."""
    is_well: bool = True
    is_gone: bool = False
    has_heard: bool = False
    """Whether the bell has rung since it was loaded."""
    lives: tuple = ()
    """The processes that were there when the request was asked."""
    endings: frozenset = frozenset()
    """Number and ending of each operation that a controller saw to its end."""
    kills: tuple = (0, 0)
    """Of controllers, of ranks."""


class Rules(NamedTuple):
    num_ranks: int
    num_requests: int = 2
    controller_kills: int = 0
    rank_kills: int = 0
    killable: tuple = (0, 1, 2)
    """Ranks do alike: one that may be killed stands for all."""
    rings_twice: bool = True
    """Whether a rank rings when it has taken a request, beside when it has done it."""
    may_give_up: bool = False
    """Whether the controller's patience may end before a rank's work does."""
    has_timeouts: bool = False
    """Whether who sleeps looks again after a while; the killed wake nobody."""
    adopts: str = "unanswered"
    """What a new controller waits for: requests 'unanswered' by a live rank, or only 'begun' ones."""
    admits: bool = True
    """Whether a restarted rank says that the one before it did not answer."""


def protocol_steps(rules):
    def rank_steps(state, at):
        rank = state.ranks[at]

        def now(label, *, system=state, **changes):
            ranks = put(system.ranks, at, system.ranks[at]._replace(**changes))
            return f"rank {at} {label}", system._replace(ranks=ranks)

        ringing = (
            state._replace(has_heard=True) if state.pc in (Step.READ, Step.SLEEP_BELL) else state
        )
        waking = state._replace(pc=Step.LOAD_BELL) if state.pc == Step.SLEEPING else state
        match rank.pc:
            case Step.LOOK:
                if state.number != rank.taken:
                    yield now(
                        f"reads request {state.number}", pc=Step.TELL_TAKEN, taken=state.number
                    )
                else:
                    yield now("reads nothing new", pc=Step.SLEEP, count=state.number)
            case Step.TELL_TAKEN:
                record = (rank.life, rank.taken, *rank.record[2:])
                pc = Step.RING_TAKEN if rules.rings_twice else Step.DO
                yield now(f"tells it took {rank.taken}", pc=pc, record=record)
            case Step.RING_TAKEN | Step.RING:
                yield now("rings", system=ringing, pc=rank.pc + 1)
            case Step.WAKE_TAKEN | Step.WAKE:
                yield now(
                    "wakes", system=waking, pc=Step.DO if rank.pc == Step.WAKE_TAKEN else Step.LOOK
                )
            case Step.DO:
                if rank.taken in rank.done:
                    raise Wrong(f"rank {at} carries {rank.taken} out again")
                yield now(
                    f"carries {rank.taken} out", pc=Step.TELL_DONE, done=(*rank.done, rank.taken)
                )
            case Step.TELL_DONE:
                record = (rank.life, rank.taken, rank.taken, True)
                yield now(f"tells {rank.taken} is done", pc=Step.RING, record=record)
            case Step.SLEEP:  # compared and slept in one step
                pc = Step.ASLEEP if rank.count == state.number else Step.LOOK
                yield now("falls asleep" if pc == Step.ASLEEP else "does not sleep", pc=pc, count=0)
            case Step.ASLEEP if rules.has_timeouts:
                yield now("looks again", pc=Step.LOOK)
        if state.kills[1] < rules.rank_kills and at in rules.killable:
            # Its first record; who looks before that sees a dead process, which comes to the same.
            # It takes what was asked before it came as answered: well, if the one before it did so.
            number, life = state.number, rank.life + 1
            is_well = rank.record[2] == number and (rank.record[3] or not rules.admits)
            record = (life, number, number, is_well or not rules.admits)
            fresh = Rank(Step.LOOK, life, number, 0, record, rank.done)
            kills = (state.kills[0], state.kills[1] + 1)
            yield (
                f"rank {at} is killed and restarted",
                state._replace(ranks=put(state.ranks, at, fresh), kills=kills),
            )

    def read(state):
        """Read one record, and after the last decide."""
        rank = state.ranks[state.index]
        life, _, done, is_well = rank.record
        is_gone = state.is_gone or life != state.lives[state.index]
        is_answered = state.is_answered and done == state.number
        is_well = state.is_well and is_well
        label = f"controller reads record {state.index}"
        if state.index + 1 < rules.num_ranks and not is_gone:
            yield (
                label,
                state._replace(index=state.index + 1, is_answered=is_answered, is_well=is_well),
            )
        elif is_gone or is_answered:
            ending = "lost" if is_gone else "done" if is_well else "failed"
            if ending == "done":
                for at, each in enumerate(state.ranks):
                    if state.number not in each.done:
                        raise Wrong(f"{state.number} is called done, rank {at} has not done it")
            yield f"{label}, {state.number} is {ending}", rested(state, ending)
        else:
            yield label, state._replace(pc=Step.SLEEP_BELL, index=0, is_answered=True, is_well=True)

    def rested(state, ending):
        pc = Step.START if state.number < rules.num_requests else Step.ENDED
        return state._replace(
            pc=pc, index=0, is_answered=True, is_well=True, is_gone=False, has_heard=False, lives=(),
            endings=state.endings | {(state.number, ending)},
        )  # fmt: skip

    def is_at(state, rank):
        _, taken, done, _ = rank.record
        if rules.adopts == "begun":
            return taken == state.number != done
        return done != state.number

    def controller_steps(state):
        lives = tuple(rank.record[0] for rank in state.ranks)
        match state.pc:
            case Step.START:  # what a controller does that comes anew, and before it asks
                if state.number and any(is_at(state, rank) for rank in state.ranks):
                    yield (
                        "controller waits for who is at it",
                        state._replace(pc=Step.LOAD_BELL, lives=lives),
                    )
                elif state.number < rules.num_requests:
                    yield (
                        "controller finds nobody at work",
                        state._replace(pc=Step.ASK, lives=lives),
                    )
                else:
                    yield "controller has nothing to ask", state._replace(pc=Step.ENDED)
            case Step.ASK:
                number = state.number + 1
                yield f"controller asks {number}", state._replace(number=number, pc=Step.WAKE_RANKS)
            case Step.WAKE_RANKS:
                ranks = tuple(
                    rank._replace(pc=Step.LOOK) if rank.pc == Step.ASLEEP else rank
                    for rank in state.ranks
                )
                yield "controller wakes", state._replace(ranks=ranks, pc=Step.RING_BELL)
            case Step.RING_BELL:
                yield "controller rings", state._replace(pc=Step.WAKE_BELL)
            case Step.WAKE_BELL:
                yield "controller wakes who looks on", state._replace(pc=Step.LOAD_BELL)
            case Step.LOAD_BELL:
                yield (
                    "controller loads the bell",
                    state._replace(
                        pc=Step.READ,
                        index=0,
                        is_answered=True,
                        is_well=True,
                        is_gone=False,
                        has_heard=False,
                    ),
                )
            case Step.READ:
                yield from read(state)
            case Step.SLEEP_BELL:  # compared and slept in one step
                pc = Step.LOAD_BELL if state.has_heard else Step.SLEEPING
                yield "controller would sleep", state._replace(pc=pc, has_heard=False)
            case Step.SLEEPING if (
                rules.has_timeouts or rules.rank_kills
            ):  # it looks ten times a second
                yield "controller looks again", state._replace(pc=Step.LOAD_BELL)
        if rules.may_give_up and state.pc in (Step.LOAD_BELL, Step.SLEEPING):
            yield "controller gives up", rested(state, "late")
        if state.kills[0] < rules.controller_kills:
            yield "controller is killed and restarted", state._replace(
                pc=Step.START, index=0, is_answered=True, is_well=True, is_gone=False, has_heard=False, lives=(),
                kills=(state.kills[0] + 1, state.kills[1]),
            )  # fmt: skip

    def steps(state):
        yield from controller_steps(state)
        for at in range(rules.num_ranks):
            yield from rank_steps(state, at)

    return steps


def explored(rules):
    first = System(tuple(Rank() for _ in range(rules.num_ranks)))
    return Graph(first, protocol_steps(rules))


def is_over(rules):
    """True if all was asked, and carried out by every rank that was not killed meanwhile."""

    def is_good(state):
        if state.pc != Step.ENDED or state.number != rules.num_requests:
            return False
        wanted = tuple(range(1, rules.num_requests + 1))
        return bool(state.kills[1]) or all(rank.done == wanted for rank in state.ranks)

    return is_good


FAULTLESS = [Rules(1, 3), Rules(2, 2)]
FAULTY = [
    Rules(1, 3, controller_kills=1, rank_kills=1, has_timeouts=True),
    Rules(2, 2, controller_kills=1, has_timeouts=True),
    Rules(2, 1, controller_kills=1, rank_kills=1, has_timeouts=True),
    Rules(1, 3, may_give_up=True, has_timeouts=True),
    Rules(2, 2, may_give_up=True, has_timeouts=True),
]
LARGE = [
    Rules(3, 1),
    Rules(2, 2, rank_kills=1, killable=(0,), has_timeouts=True),
    Rules(3, 1, rank_kills=1, killable=(1,), rings_twice=False, has_timeouts=True),
]


def named(rules):
    """The rules that are not as usual, for the test's name."""
    usual = Rules(0)
    return ",".join(
        f"{name}={value}"
        for name, value, other in zip(rules._fields, rules, usual, strict=True)
        if value != other
    )


@pytest.mark.parametrize(
    "rules",
    [
        *(pytest.param(rules, marks=pytest.mark.check) for rules in FAULTLESS + FAULTY),
        *(pytest.param(rules, marks=pytest.mark.campaign) for rules in LARGE),
    ],
    ids=named,
)
def test_no_request_is_lost_and_no_wakeup_is_slept_through(rules):
    """C21, C23, C24: from every state that can be, ways lead to where all was asked and done.

    Without faults nobody looks twice by the clock: a wake-up that is slept through would be the end.
    An operation is called done only when every rank has done it, and no request is done twice.
    """
    graph = explored(rules)
    assert graph.wrong is None, "\n".join(graph.wrong)
    lost = graph.hopeless(is_over(rules))
    assert lost is None, "\n".join(lost)
    endings = {ending for state in graph.came for _, ending in state.endings}
    allowed = {"done"} | ({"lost", "failed"} if rules.rank_kills else set())
    assert endings <= allowed | ({"late"} if rules.may_give_up else set())


def test_a_controller_that_adopts_only_what_was_begun_loses_a_request():
    """C23: why a new controller waits for every live rank that has not answered the last request."""
    rules = Rules(1, 2, controller_kills=1, has_timeouts=True, adopts="begun")
    trace = explored(rules).hopeless(is_over(rules))
    print(*trace, sep="\n  ")
    assert "controller is killed and restarted" in trace
    assert trace[-1] == "controller asks 2"


def test_a_restarted_rank_that_does_not_admit_it_answers_for_the_dead():
    """C24: why it says that its predecessor did not answer; else a new controller takes that for done."""
    rules = Rules(2, 1, controller_kills=1, rank_kills=1, has_timeouts=True, admits=False)
    wrong = explored(rules).wrong
    print(*wrong, sep="\n  ")
    assert wrong[-1].startswith("1 is called done, rank ")


def test_a_restarted_rank_that_took_up_the_last_request_would_do_it_twice():
    """Why a rank that comes takes what stands there as answered: the model has teeth."""
    rules = Rules(1, 1, rank_kills=1, has_timeouts=True)
    steps = protocol_steps(rules)

    def forgetful(state):
        for label, other in steps(state):
            rank = other.ranks[0]
            if label.endswith("is killed and restarted"):
                rank = rank._replace(taken=0, record=(rank.life, 0, 0, True))
            yield label, other._replace(ranks=(rank,))

    graph = Graph(System((Rank(),)), forgetful)
    assert graph.wrong is not None
    assert graph.wrong[-1] == "rank 0 carries 1 out again"
