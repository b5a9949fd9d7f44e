"""Every pair of a state and a signal, with every set of absent tags, against rules told in words."""

import itertools
import re

import pytest

from flyweight.errors import Busy, LifecycleError
from flyweight.lifecycle.states import (
    OUTSIDE,
    TABLE,
    Condition,
    Signal,
    State,
    Tag,
    accepted,
    needed,
)

TAG_SETS = [frozenset(), *map(frozenset, ({Tag.WEIGHTS}, {Tag.KV_CACHE}, set(Tag)))]
AT_WORK = {State.PAUSING, State.CLEARING, State.UPDATING, State.VERIFYING}
ENDS_STEP = {
    Signal.DRAINED: {State.PAUSING},
    Signal.STUCK: {State.PAUSING},
    Signal.EMPTIED: {State.CLEARING},
    Signal.FILLED: {State.UPDATING},
    Signal.COMMITTED: {State.VERIFYING},
    Signal.KEPT: {State.UPDATING, State.VERIFYING},
    Signal.FAULT: set(State),
}


def is_coherent(condition):
    """True if a state goes with what is absent."""
    if condition.state in (State.SERVING, State.PAUSING, State.PAUSED):
        return not condition.absent  # only a whole engine serves, and only one that serves pauses
    return condition.state is not State.CLEARED or bool(condition.absent)


CONDITIONS = [
    condition
    for state, absent in itertools.product(State, TAG_SETS)
    if is_coherent(condition := Condition(state, absent))
]
CASES = list(itertools.product(CONDITIONS, Signal))


def resting(absent):
    return State.CLEARED if absent else State.PAUSED


def expected(state, signal, absent):
    """Return the state that a signal leads to, or 'busy', or 'refused': the rules in words.

    `absent` is what is so afterwards.
    """
    if signal is Signal.FAULT:
        return State.FAILED  # anything may break at any time
    if signal in OUTSIDE and state in AT_WORK:
        return "busy"  # one thing at a time
    if signal not in OUTSIDE and state not in ENDS_STEP[signal]:
        return "refused"  # a step that does not run cannot end
    match signal:
        case Signal.PAUSE if state is State.SERVING:  # requests that run are finished
            return State.PAUSING
        case Signal.RESUME | Signal.STUCK:  # only what is whole serves
            is_whole = state not in (State.CLEARED, State.FAILED) and not absent
            return State.SERVING if is_whole else "refused"
        case Signal.CLEAR | Signal.UPDATE:  # never under requests that run
            step = State.CLEARING if signal is Signal.CLEAR else State.UPDATING
            return "refused" if state is State.SERVING else step
        case Signal.FILLED:  # not served before it is verified
            return State.VERIFYING
        case Signal.RESTORE if state is State.SERVING:  # it has all already
            return "refused" if absent else state
        case Signal.PAUSE | Signal.RESTORE if state is State.FAILED:  # makes nothing whole
            return state
        case _:  # it stands still
            return resting(absent)


def outcome(condition, signal, absent=None):
    try:
        return condition.after(signal, absent)
    except Busy:
        return "busy"
    except LifecycleError:
        return "refused"


def test_every_pair_of_a_state_and_a_signal_is_decided():
    assert set(TABLE) == set(itertools.product(State, Signal))
    assert (len(State), len(Signal)) == (8, 12)


@pytest.mark.parametrize("signal", Signal)
def test_every_signal_leads_where_the_rules_say(signal):
    for condition, told in itertools.product(CONDITIONS, [None, *TAG_SETS]):
        absent = condition.absent if told is None else told
        wanted = expected(condition.state, signal, absent)
        if isinstance(wanted, State):
            wanted = Condition(wanted, absent)
        assert outcome(condition, signal, told) == wanted, (condition, signal, told)


def test_no_condition_answers_a_signal_with_anything_but_a_condition_or_a_lifecycle_error():
    """Also those that no engine is ever in, and with every set of tags that could be given."""
    for state, absent, signal, told in itertools.product(State, TAG_SETS, Signal, [None, *TAG_SETS]):  # fmt: skip
        found = outcome(Condition(state, absent), signal, told)
        assert found in ("busy", "refused") or isinstance(found, Condition)


def test_a_busy_engine_and_one_that_refuses_differ():
    """C32: a second pause while requests drain is Busy, one after they did changes nothing."""
    assert outcome(Condition(State.PAUSING, frozenset()), Signal.PAUSE) == "busy"
    paused = Condition(State.PAUSED, frozenset())
    assert paused.after(Signal.PAUSE) == paused


def test_nothing_leads_to_serving_while_something_is_absent():
    """C32: whatever is told to be absent along with the signal."""
    for condition, signal in CASES:
        for absent in (None, *TAG_SETS):
            found = outcome(condition, signal, absent)
            if isinstance(found, Condition) and found.state is State.SERVING:
                assert not found.absent, (condition, signal, absent)


def test_paused_and_cleared_are_told_apart_by_what_is_absent():
    for condition, signal in CASES:
        for absent in (None, *TAG_SETS):
            found = outcome(condition, signal, absent)
            if isinstance(found, Condition):
                assert found.state is not State.PAUSED or not found.absent, (condition, signal)
                assert found.state is not State.CLEARED or found.absent, (condition, signal)


def refusals():
    for condition, signal in CASES:
        try:
            condition.after(signal)
        except LifecycleError as refusal:
            yield condition, signal, refusal


def test_every_refusal_names_the_signal_the_state_and_what_is_accepted():
    """C24: who is refused is told why and what to do, never just no."""
    for condition, signal, refusal in refusals():
        text = str(refusal)
        assert f"signal {signal} needs state " in text
        assert f"engine is {condition.state}" in text
        states = re.search(r"needs state (.+?), engine is", text).group(1)
        assert set(re.split(r", | or ", states)) == {str(each) for each in needed(signal)}
        for tag in condition.absent if not isinstance(refusal, Busy) else ():
            assert tag in text
        if signal not in OUTSIDE:
            continue
        if isinstance(refusal, Busy):
            assert text.endswith("wait until that ends")
            assert accepted(condition.state) == []
        else:
            found = re.search(r"it accepts (.+?): send ", text).group(1)
            assert set(re.split(r", | or ", found)) == {
                str(each)
                for each in OUTSIDE
                if isinstance(expected(condition.state, each, condition.absent), State)
            }, text


def well_done(condition, signal):
    """Return the condition after a signal whose step succeeds."""
    match signal:
        case Signal.PAUSE:
            found = condition.after(signal)
            return found.after(Signal.DRAINED) if found.state is State.PAUSING else found
        case Signal.CLEAR:
            return condition.after(signal).after(Signal.EMPTIED, frozenset(Tag))
        case Signal.RESTORE:
            return condition.after(signal, condition.absent - {Tag.KV_CACHE})
        case Signal.UPDATE:
            found = condition.after(signal).after(Signal.FILLED)
            return found.after(Signal.COMMITTED, found.absent - {Tag.WEIGHTS})
        case _:
            return condition.after(signal)


def test_the_remedy_of_every_refusal_works():
    """Whoever sends what the text says, in that order, ends with the signal that was refused."""
    num_remedies = 0
    for condition, signal, refusal in refusals():
        if signal not in OUTSIDE or isinstance(refusal, Busy):
            continue
        words = str(refusal).split(": send ")[1].split(", then ")
        *first, last = (Signal(word) for word in words)
        assert last is signal
        found = condition
        for each in first:
            assert each is not signal, "the remedy is what was refused"
            found = well_done(found, each)
        well_done(found, signal)  # accepted
        num_remedies += 1
    assert num_remedies == 9  # CLEAR, UPDATE in SERVING; RESUME in 3 of CLEARED, 4 of FAILED


def reached(start, steps):
    """Return every condition that steps lead to."""
    found, todo = {start}, [start]
    while todo:
        condition = todo.pop()
        for after in steps(condition):
            if after not in found:
                found.add(after)
                todo.append(after)
    return found


def any_step(condition):
    """Yield what any signal, with whatever it takes away or brings, leads to."""
    told = {
        Signal.EMPTIED: [condition.absent | tags for tags in TAG_SETS[1:]],
        Signal.RESTORE: [condition.absent, condition.absent - {Tag.KV_CACHE}],
        Signal.COMMITTED: [condition.absent - {Tag.WEIGHTS}],
        Signal.FAULT: [condition.absent | {Tag.WEIGHTS}, frozenset(Tag)],
    }
    for signal in Signal:
        for absent in told.get(signal, [None]):
            found = outcome(condition, signal, absent)
            if isinstance(found, Condition):
                yield found


def good_step(condition):
    """Yield what helps: steps under way that end well, and signals whose steps do."""
    for signal in OUTSIDE if condition.state not in AT_WORK else ():
        if not isinstance(outcome(condition, signal), str):
            yield well_done(condition, signal)
    for signal in (Signal.DRAINED, Signal.FILLED, Signal.COMMITTED, Signal.EMPTIED):
        absent = condition.absent - ({Tag.WEIGHTS} if signal is Signal.COMMITTED else set())
        found = outcome(condition, signal, absent)
        if isinstance(found, Condition):
            yield found


def test_every_reachable_condition_is_coherent_and_has_a_way_back_to_serving():
    """C24: no state is for ever."""
    found = reached(Condition(), any_step)
    assert {each.state for each in found} == set(State)
    assert all(map(is_coherent, found))
    whole = Condition(State.SERVING, frozenset())
    for condition in found:
        assert whole in reached(condition, good_step), condition


def test_a_failed_engine_serves_only_after_a_commit():
    """C24: a weight that may be wrong is not served: no way from FAILED to SERVING around COMMITTED."""

    def steps(condition):
        for signal in set(Signal) - {Signal.COMMITTED}:
            told = [None]
            if signal is Signal.RESTORE:
                told.append(condition.absent - {Tag.KV_CACHE})
            for absent in told:
                found = outcome(condition, signal, absent)
                if isinstance(found, Condition):
                    yield found

    for absent in TAG_SETS:
        failed = Condition(State.FAILED, absent | {Tag.WEIGHTS})
        assert State.SERVING not in {each.state for each in reached(failed, steps)}


def test_an_engine_begins_without_weights_and_does_not_serve():
    assert Condition() == Condition(State.CLEARED, frozenset({Tag.WEIGHTS}))
