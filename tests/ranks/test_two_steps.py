"""Write, then commit: in every order of messages, deaths and timeouts no ranks serve a mixture.

Here every state that ranks can get into is visited: at each message that `Group.exchange` sends or
hears, a rank goes on, gives up (a deadline has passed, or a connection ended: more often here than
it can be), or dies. A rank that stops and runs on later is one that others give up.
"""

import itertools

import pytest

from flyweight.errors import FlyweightError, LifecycleError, PeerLost
from flyweight.ranks.agreement import raise_first
from flyweight.ranks.group import Group

OLD, NEW, NONE = "old", "new", "none"


class Paused(Exception):
    """The rank waits for what is not in its history yet."""


class Rank(Group):
    """A rank that has gone through a history: of each point, what it heard, or None if it gave up."""

    def __init__(self, update, rank, num_ranks, history, failing):
        super().__init__(rank, num_ranks)
        self.sent, self.holds, self.hears = [], OLD, False
        self._failing, self._todo = failing, list(history)
        self.is_at_end = True
        try:
            update(self)
        except Paused:
            self.is_at_end = False
        except FlyweightError:
            pass

    def _next(self, *, hears):
        self.hears = hears
        if not self._todo:
            raise Paused
        if (heard := self._todo.pop(0)) is None:
            raise PeerLost("gives up")
        return heard

    def say(self, peer, body, deadline=None):
        self._next(hears=False)
        self.sent.append((peer, body))

    def hear(self, deadline=None):
        return self._next(hears=True)

    def step(self, what):
        error = LifecycleError("on purpose") if (self.rank, what) in self._failing else None
        mine = {"what": what, "error": type(error).__name__ if error else "", "text": ""}
        said = self.exchange(what, mine, 0.0)
        assert [each["what"] for each in said] == [what] * self.num_ranks
        raise_first(said, error)


def safe(rank):
    """Take the new version in two steps: it is what a replica does."""
    rank.step("may write")
    rank.holds = NONE  # it writes now
    rank.step("has written")
    rank.holds = NEW


def hasty(rank):
    """Keep the old version until all ranks have the new one: a rank may not hear of that."""
    rank.step("has the new one beside the old one")
    rank.holds = NEW


def states(update, num_ranks, failing=frozenset()):
    """Yield what each rank holds (None if it is dead), in every state that can be reached."""
    start = tuple(() for _ in range(num_ranks)), frozenset()
    seen, todo = {start}, [start]
    while todo:
        histories, dead = todo.pop()
        ranks = [
            Rank(update, rank, num_ranks, history, failing)
            for rank, history in enumerate(histories)
        ]
        yield tuple(None if n in dead else each.holds for n, each in enumerate(ranks))
        for n, each in enumerate(ranks):
            if n in dead:
                continue
            follows = [(histories, dead | {n})]
            if not each.is_at_end:
                inputs = [None, *next_inputs(ranks, n, histories[n])]
                follows += [
                    ((*histories[:n], (*histories[n], one), *histories[n + 1 :]), dead)
                    for one in inputs
                ]
            for state in follows:
                if frozen(state) not in seen:
                    seen.add(frozen(state))
                    todo.append(state)


def next_inputs(ranks, n, history):
    """What the rank may hear at its next point, if it does not give up there."""
    if not ranks[n].hears:
        return ["sent"]
    num_heard = sum(isinstance(each, dict) for each in history)
    heard = {}
    for peer in range(1, len(ranks)) if n == 0 else [0]:
        bodies = [body for whom, body in ranks[peer].sent if whom == n]
        if len(bodies) <= num_heard:
            return []
        heard[peer] = bodies[num_heard]
    return [heard]


def frozen(state):
    return repr(state[0]), state[1]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_two_ranks_hold_two_versions_whatever_dies_or_stops_between_two_sends(num_ranks):
    found = set(states(safe, num_ranks))
    assert (NEW,) * num_ranks in found
    assert (OLD,) * num_ranks in found
    assert not [each for each in found if OLD in each and NEW in each]
    assert [each for each in found if NEW in each and NONE in each]  # one was not told


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_of_which_one_fails_never_commit(num_ranks):
    for rank, what in itertools.product(range(num_ranks), ("may write", "has written")):
        found = set(states(safe, num_ranks, {(rank, what)}))
        assert not [each for each in found if NEW in each]
        is_before = what == "may write"
        assert bool([each for each in found if NONE in each]) != is_before


def test_the_exploration_itself_sees_a_mixture():
    assert [each for each in states(hasty, 2) if OLD in each and NEW in each]
