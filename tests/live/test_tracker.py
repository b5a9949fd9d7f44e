"""What the front knows of its readers: where they fetch, and how updates ended, in every order."""

import random
from contextlib import suppress
from itertools import product

import pytest
from every_order import NotPossible, explore

from flyweight.errors import VersionError
from flyweight.live.messages import Current, Done, Join, Result, Staged, Wait
from flyweight.live.publish_id import PublishId
from flyweight.live.tracker import CHAIN_HOSTS, MAX_HOLDERS, MAX_PLACES, MAX_REFUSED, Tracker

LOST = "PeerLost: rank {} of 'e' died, or its lease was ended"


def id_(version, session="3fa9c1d2"):
    return PublishId(session, version)


def join(tracker, reader, name="", rank=0, num_ranks=1, *, host="", serves=True):
    place = f"tcp://h:{reader}" if serves else ""
    name, host = name or f"r{reader}", host or f"host {reader}"
    tracker.join(reader, Join(name, 0, rank, num_ranks, host, place, ""))


def wait(wanted, have):
    return Wait(wanted, None, have, False, 0.0)


def answer(tracker, reader, kind, wanted, have, *, is_offered=True):
    return tracker.answer(reader, kind, wait(wanted, have), is_offered=is_offered)


def staged(tracker, reader, id):
    tracker.note(reader, Staged(id))


def done(tracker, reader, id, result):
    tracker.note(reader, Done(id, result))


def waiting(count):
    """Return a tracker with so many readers on as many hosts, which wait."""
    tracker = Tracker()
    for reader in range(count):
        join(tracker, reader)
        tracker.wait(reader, "k", wait(None, None))
    return tracker


def holders(tracker, reader, kind="k"):
    """Return the numbers of the readers that a reader is sent to."""
    found = answer(tracker, reader, kind, tracker.newest, None)
    return [int(each.removeprefix("tcp://h:")) for each in found]


def outcomes(tracker, id):
    return {each.name: each.error for each in tracker.outcome(id).results}


# What readers are told of.


def test_a_front_that_lags_behind_sends_no_engine_back_but_a_restarted_trainer_does():
    tracker = Tracker()
    join(tracker, 0)
    tracker.announce(id_(1))
    ask = lambda have: answer(tracker, 0, "k", None, have)  # noqa: E731
    assert ask(id_(2)) is None
    assert ask(id_(1)) is None
    assert ask(id_(0)) == ()
    assert ask(id_(2, "another")) == ()
    assert answer(tracker, 0, "k", id_(1), id_(2)) == ()


# Where readers fetch.


def test_hosts_form_chains_in_the_order_in_which_they_were_told():
    tracker = waiting(2 * CHAIN_HOSTS + 3)
    tracker.announce(id_(1))
    for reader in range(2 * CHAIN_HOSTS + 3):
        first = reader - reader % CHAIN_HOSTS
        nearest_first = list(range(reader - 1, first - 1, -1))
        assert holders(tracker, reader) == nearest_first[:MAX_HOLDERS]


def test_the_first_of_a_late_chain_finds_those_that_are_complete():
    tracker = waiting(CHAIN_HOSTS + 1)
    tracker.announce(id_(1))
    done(tracker, 3, id_(1), Result("r3"))
    done(tracker, 4, id_(1), Result("r4", error="DigestMismatch"))
    assert holders(tracker, CHAIN_HOSTS) == [3]


def test_a_parent_in_the_chain_comes_before_those_that_are_complete():
    tracker = waiting(CHAIN_HOSTS + 2)
    tracker.announce(id_(1))
    done(tracker, 3, id_(1), Result("r3"))
    assert holders(tracker, CHAIN_HOSTS + 1) == [CHAIN_HOSTS, 3]


def test_readers_of_one_host_share_what_the_first_of_them_fetches():
    tracker = Tracker()
    tracker.announce(id_(1))
    for reader, host in enumerate("aabbbc"):
        join(tracker, reader, host=host)
    assert [holders(tracker, reader) for reader in range(6)] == [
        [],
        [0],
        [0],
        [2, 0],
        [2, 3, 0],
        [2, 0],
    ]


def test_a_reader_that_does_not_serve_is_nobodys_parent_and_has_no_place_in_a_chain():
    tracker = Tracker()
    tracker.announce(id_(1))
    join(tracker, 0)
    join(tracker, 1, serves=False)
    join(tracker, 2)
    join(tracker, 3, serves=False, host="host 2")
    assert [holders(tracker, reader) for reader in range(4)] == [[], [], [0], [2, 0]]
    for reader in (0, 1):
        done(tracker, reader, id_(1), Result(f"r{reader}"))
    assert holders(tracker, 1) == [0]


def test_readers_of_another_kind_have_chains_of_their_own():
    tracker = Tracker()
    tracker.announce(id_(1))
    kinds = ["k", "other", "k", "other"]
    for reader in range(4):
        join(tracker, reader, host="one" if reader < 2 else "")
    assert [holders(tracker, *each) for each in enumerate(kinds)] == [[], [], [0], [1]]


def test_a_child_of_a_lost_parent_is_sent_to_the_next_above_it():
    tracker = waiting(3)
    tracker.announce(id_(1))
    tracker.lose(1)
    assert holders(tracker, 2) == [0]


def test_a_list_has_a_limit_and_begins_with_the_nearest():
    tracker = Tracker()
    tracker.announce(id_(1))
    for reader in range(2 * MAX_HOLDERS):
        join(tracker, reader)
        holders(tracker, reader)
        done(tracker, reader, id_(1), Result("complete"))
    join(tracker, 99, host="host 3")
    assert holders(tracker, 99) == [3, 2, 1, 0, *range(15, 11, -1)]


def test_a_reader_that_has_fetched_everything_is_known_as_complete():
    tracker = waiting(CHAIN_HOSTS + 1)
    tracker.announce(id_(1))
    staged(tracker, 3, id_(1))
    staged(tracker, 4, id_(2))
    assert holders(tracker, CHAIN_HOSTS) == [3]


# What readers are told.


def test_another_version_is_news_whatever_its_number():
    tracker = waiting(1)
    assert answer(tracker, 0, "k", None, None) is None
    tracker.announce(id_(5, "new"))
    assert answer(tracker, 0, "k", None, id_(5, "old")) == ()
    assert answer(tracker, 0, "k", None, id_(5, "new")) is None


def test_a_version_that_cannot_come_any_more_is_an_immediate_answer():
    tracker = waiting(1)
    tracker.announce(id_(2))
    for wanted in (id_(1), id_(7, "old")):
        with pytest.raises(VersionError, match="newest is version 2"):
            answer(tracker, 0, "k", wanted, None)
    assert answer(tracker, 0, "k", id_(3), None) is None  # it is on its way
    assert answer(tracker, 0, "k", id_(2), id_(2)) == Current()


def test_a_version_that_the_trainer_withdrew_is_there_as_long_as_others_have_it():
    tracker = waiting(1)
    tracker.announce(id_(1))
    join(tracker, 1)
    assert answer(tracker, 1, "k", None, None, is_offered=False) == ("tcp://h:0",)
    tracker.lose(0)
    assert answer(tracker, 1, "k", None, None, is_offered=False) is None
    join(tracker, 2)
    join(tracker, 3)
    assert answer(tracker, 2, "k", None, None, is_offered=False) == ("tcp://h:1",)
    assert answer(tracker, 3, "other", None, None, is_offered=False) is None
    assert "r3" not in tracker.outcome(id_(1)).missing  # it was not told


def test_only_readers_that_wait_for_another_version_are_told_of_a_new_one():
    tracker = waiting(3)
    join(tracker, 3)
    tracker.stop_waiting(1)
    tracker.wait(2, "k", wait(None, id_(1)))
    assert tracker.replicas() == ["r0", "r1", "r2", "r3"]
    assert tracker.waiting() == ["r0", "r2"]
    tracker.announce(id_(1))
    assert tracker.newest == id_(1)
    assert tracker.outcome(id_(1)).missing == ["r0"]
    tracker.lose(0)
    tracker.lose(2)
    assert tracker.replicas() == ["r1", "r3"]
    assert tracker.waiting() == []


# How updates ended.


def test_the_result_of_an_engine_is_joined_from_its_ranks():
    tracker = Tracker()
    tracker.announce(id_(1))
    for rank in (1, 0):
        join(tracker, rank, "e", rank, 2)
        holders(tracker, rank, kind=f"k{rank}")
    done(tracker, 1, id_(1), Result("e", 11, 5, 2.0, 0.1, 0.5, 0.3, 0.1, 0.4, "read", 3))
    assert tracker.outcome(id_(1)).missing == ["e"]
    assert tracker.outcome(id_(1)).results == []
    done(tracker, 0, id_(1), Result("e", 10, 7, 1.0, 0.2, 0.4, 0.4, 0.2, 0.3, "mapped", 4))
    assert tracker.outcome(id_(1)).missing == []
    assert tracker.outcome(id_(1)).results == [
        Result("e", 10, 12, 2.0, 0.2, 0.5, 0.4, 0.2, 0.4, "mapped+read", 7)
    ]
    failed = Result("e", 11, error="PeerLost: gone", is_touched=True)
    done(tracker, 1, id_(1), failed)
    done(tracker, 0, id_(1), Result("e", 10, error="TransferTimeout: late"))
    assert tracker.outcome(id_(1)).results == [
        Result("e", 10, error="TransferTimeout: late", is_touched=True)
    ]


def test_an_engine_that_lacks_a_rank_is_not_committed():
    tracker = Tracker()
    tracker.announce(id_(1))
    join(tracker, 0, "e", 0, 3)
    assert holders(tracker, 0) == []
    done(tracker, 0, id_(1), Result("e"))
    error = "PeerLost: 1 of 3 ranks of 'e' asked for the version"
    assert outcomes(tracker, id_(1)) == {"e": error}


def test_a_rank_that_is_lost_after_it_was_told_makes_its_engine_fail():
    tracker = Tracker()
    for rank in range(2):
        join(tracker, rank, "e", rank, 2)
        tracker.wait(rank, "k", wait(None, None))
    tracker.announce(id_(1))
    done(tracker, 0, id_(1), Result("e"))
    tracker.lose(1)
    tracker.lose(0)
    assert tracker.outcome(id_(1)).missing == []
    assert outcomes(tracker, id_(1)) == {"e": LOST.format(1)}


def test_an_engine_whose_ranks_have_fetched_everything_is_missing_and_needs_nobody():
    tracker = Tracker()
    for rank in range(2):
        join(tracker, rank, "e", rank, 2)
        tracker.wait(rank, "k", wait(None, None))
    tracker.announce(id_(1))
    staged(tracker, 0, id_(1))
    assert tracker.outcome(id_(1)).needing == ["e"]
    staged(tracker, 1, id_(1))
    assert (tracker.outcome(id_(1)).needing, tracker.outcome(id_(1)).missing) == ([], ["e"])
    assert holders(tracker, 1) == [0]  # it has begun again
    assert tracker.outcome(id_(1)).needing == ["e"]
    assert tracker.outcome(id_(2)).needing == []
    tracker.lose(1)
    assert (tracker.outcome(id_(1)).needing, tracker.outcome(id_(1)).missing) == ([], ["e"])


def test_an_engine_needs_the_trainer_until_each_of_its_ranks_has_asked():
    """Else the trainer withdraws the version that rank 0 has, before rank 1 asks for it."""
    tracker = Tracker()
    for rank in range(2):
        join(tracker, rank, "e", rank, 2)
    tracker.wait(0, "k0", wait(None, None))
    tracker.announce(id_(1))
    staged(tracker, 0, id_(1))
    assert tracker.outcome(id_(1)).needing == ["e"]
    assert holders(tracker, 1, "k1") == []
    assert tracker.outcome(id_(1)).needing == ["e"]
    staged(tracker, 1, id_(1))
    assert (tracker.outcome(id_(1)).needing, tracker.outcome(id_(1)).missing) == ([], ["e"])


def test_an_engine_that_has_failed_needs_nobody_though_a_rank_never_asked():
    tracker = Tracker()
    for rank in range(3):
        join(tracker, rank, "e", rank, 3)
    tracker.announce(id_(1))
    for rank in range(2):
        holders(tracker, rank)
        staged(tracker, rank, id_(1))
    assert tracker.outcome(id_(1)).needing == ["e"]
    done(tracker, 0, id_(1), Result("e", error="PeerLost: rank 2 is gone"))
    assert tracker.outcome(id_(1)).needing == []


def test_readers_that_were_lost_before_they_were_told_have_no_result():
    tracker = waiting(2)
    tracker.lose(0)
    tracker.announce(id_(1))
    assert (tracker.outcome(id_(1)).missing, tracker.outcome(id_(1)).results) == (["r1"], [])


def test_what_was_done_for_another_version_does_not_count():
    tracker = waiting(1)
    tracker.announce(id_(1))
    done(tracker, 0, id_(1, "old"), Result("r0"))
    assert tracker.outcome(id_(1)).missing == ["r0"]
    assert (tracker.outcome(id_(1, "old")).missing, tracker.outcome(id_(1, "old")).results) == (
        [],
        [],
    )
    done(tracker, 0, id_(1), Result("r0"))
    tracker.announce(id_(2))
    assert (tracker.outcome(id_(1)).missing, tracker.outcome(id_(1)).results) == ([], [])


def test_engines_that_were_refused_are_in_the_results_of_the_next_version_only():
    tracker = waiting(1)
    tracker.announce(id_(1))
    tracker.refused("bad", "ShapeMismatch: first")
    tracker.refused("bad", "ShapeMismatch: second")
    assert tracker.outcome(id_(1)).results == []
    tracker.announce(id_(2))
    assert tracker.outcome(id_(2)).results == [Result("bad", error="ShapeMismatch: second")]
    tracker.announce(id_(3))
    assert tracker.outcome(id_(3)).results == []


def test_a_refused_engine_that_came_back_has_one_result():
    tracker = waiting(1)
    tracker.refused("r0", "ShapeMismatch")
    tracker.announce(id_(1))
    assert tracker.outcome(id_(1)).results == []
    done(tracker, 0, id_(1), Result("r0"))
    assert outcomes(tracker, id_(1)) == {"r0": ""}
    tracker.refused("late", "ShapeMismatch")
    join(tracker, 1, "late")
    holders(tracker, 1)
    tracker.announce(id_(2))
    assert tracker.outcome(id_(2)).results == []


# Bounds.


def test_refused_engines_are_bounded_and_the_latest_are_kept():
    tracker = Tracker()
    for number in [*range(MAX_REFUSED), 0, *range(MAX_REFUSED, MAX_REFUSED + 5)]:
        tracker.refused(f"bad {number}", "ShapeMismatch")
    tracker.announce(id_(1))
    kept = [*range(6, MAX_REFUSED), 0, *range(MAX_REFUSED, MAX_REFUSED + 5)]
    assert [each.name for each in tracker.outcome(id_(1)).results] == [
        f"bad {each}" for each in kept
    ]


def size(value):
    if isinstance(value, dict):
        return len(value) + sum(map(size, value.values()))
    if isinstance(value, list | tuple | set):
        return len(value) + sum(map(size, value))
    return size(vars(value)) if hasattr(value, "__dict__") else 0


def restarts(tracker, start, count):
    """Let engines with names, places, hosts and kinds of their own come, be told, and leave."""
    for reader in range(start, start + count):
        join(tracker, reader)
        holders(tracker, reader, kind=f"k{reader % 3}")
        tracker.lose(reader)


def test_a_restart_loop_is_bounded_within_a_version_and_forgotten_after_it():
    tracker = Tracker()
    tracker.announce(id_(1))
    empty = size(vars(tracker))
    restarts(tracker, 1, MAX_PLACES)
    full = size(vars(tracker))
    restarts(tracker, MAX_PLACES + 1, 50)
    assert size(vars(tracker)) == full
    assert len(tracker.outcome(id_(1)).results) == MAX_PLACES
    tracker.announce(id_(2))
    assert size(vars(tracker)) == empty


def test_beyond_the_limit_of_places_a_reader_fetches_from_the_trainer():
    tracker = Tracker()
    tracker.announce(id_(1))
    join(tracker, 0)
    assert holders(tracker, 0) == []
    restarts(tracker, 1, MAX_PLACES - 2)
    join(tracker, 10_000)
    assert holders(tracker, 10_000, kind="k0") == []
    join(tracker, 10_001, host="host 0")
    assert holders(tracker, 10_001) == []
    join(tracker, 10_002)
    assert holders(tracker, 10_002, kind="k0") == []  # and it is nobody's parent itself
    assert holders(tracker, 0) == []


def test_a_reader_that_asks_for_kind_after_kind_costs_no_more_than_one():
    tracker = waiting(1)
    tracker.announce(id_(1))
    sizes = set()
    for number in range(5):
        holders(tracker, 0, kind=f"k{number}")
        sizes.add(size(vars(tracker)))
    assert len(sizes) == 1


# Every order of events.

BOTH = ("newer", "older")


class Places:
    """Readers at a few places, and by the events alone: who was told, and who waits for whom.

    An older reader of a place is one whose process has gone, while its end was not seen yet: what
    it sent before still comes. A reader that was lost may live, and go on with what it fetches: the
    lists that a place was ever given count, whatever happens after.
    """

    def __init__(self, hosts):
        self.hosts, self.tracker, self.version = hosts, Tracker(), 0
        self.readers = {}
        """The readers at each place, the newest last."""
        self.announce()

    def announce(self):
        self.version = 3 - self.version if self.version else 1  # two of them make fewer states
        self.tracker.announce(id_(self.version))
        self.order = {}
        """The kind of each place that was told, in order."""
        self.told = {}
        """The places whose newest reader was told and has not failed; True if it is complete."""
        self.edges = set()

    def join(self, place):
        if place > len(self.readers) or len(self.readers.get(place, ())) == 2:
            raise NotPossible  # places are alike but for their hosts, so that they may come in order
        reader = min(set(range(2 * len(self.hosts))).difference(*self.readers.values()))
        host = self.hosts[place]
        self.tracker.join(reader, Join(f"r{place}", 0, 0, 1, host, str(place), ""))
        self.readers.setdefault(place, []).append(reader)
        self.told.pop(place, None)

    def reader(self, place, which):
        readers = self.readers.get(place, ())
        if len(readers) <= (which == "older"):
            raise NotPossible
        return readers[-1 if which == "newer" else 0]

    def tell(self, place, which, kind="k"):
        reader = self.reader(place, which)
        found = answer(self.tracker, reader, kind, None, None)
        found = [int(each) for each in found]
        self.edges |= {(place, other) for other in found}
        self.order.setdefault(place, kind)
        best, others = self.expected(place, kind)
        assert found[: len(best)] == best
        assert sorted(found[len(best) :]) == sorted(others)
        if which == "newer":
            self.told.pop(place, None)
            if self.order[place] == kind:
                self.told[place] = False

    def expected(self, place, kind):
        """Return the places to fetch from, best first, and those that are only known as complete."""
        order, host = list(self.order), self.hosts[place]
        of_kind = [each for each in order if self.order[each] == kind]
        line = list(dict.fromkeys(self.hosts[each] for each in of_kind))
        above = line[: line.index(host)] if host in line else line
        firsts = [next(each for each in of_kind if self.hosts[each] == host) for host in above]
        same = [each for each in of_kind if self.hosts[each] == host]
        usable = [each for each in order[: order.index(place)] if each in self.told]
        best = [each for each in [*same, *reversed(firsts)] if each in usable]
        complete = {each for each in of_kind if self.told.get(each)}
        return best, complete.intersection(usable).difference(best)

    def staged(self, place, which):
        staged(self.tracker, self.reader(place, which), id_(self.version))
        if which == "newer" and place in self.told:
            self.told[place] = True

    def done(self, place, which, error):
        reader = self.reader(place, which)
        done(self.tracker, reader, id_(self.version), Result(f"r{place}", error=error))
        if which == "newer" and place in self.told:
            self.told[place] = True
            if error:
                del self.told[place]

    def lose(self, place, which):
        reader = self.reader(place, which)
        self.tracker.lose(reader)
        self.readers[place].remove(reader)
        if which == "newer":
            self.told.pop(place, None)

    def check(self):
        reached = set(self.edges)
        for middle in range(len(self.hosts)):
            starts = {start for start, end in reached if end == middle}
            reached |= {
                (start, end) for begin, end in reached if begin == middle for start in starts
            }
        assert not any(start == end for start, end in reached), self.edges


def steps_of(count, kinds=("k",)):
    both = product(range(count), BOTH)
    return [
        ("announce",),
        *(("join", place) for place in range(count)),
        *(step for each in both for step in (
            *(("tell", *each, kind) for kind in kinds),
            ("staged", *each),
            ("done", *each, ""),
            ("done", *each, "PeerLost: gone"),
            ("lose", *each),
        )),
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [6, pytest.param(7, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("hosts", ["abc", "aab", "aba", "abb", "aaa"])
def test_in_every_order_nobody_waits_in_a_circle_and_lists_are_right(hosts, depth):
    assert explore(lambda: Places(hosts), steps_of(3), depth=depth) > 1_000


@pytest.mark.parametrize("depth", [6, pytest.param(7, marks=pytest.mark.campaign)])
def test_in_every_order_readers_of_two_kinds_do_not_wait_in_a_circle(depth):
    steps = steps_of(2, kinds=("k", "other"))
    assert explore(lambda: Places("ab"), steps, depth=depth) > 1_000


@pytest.mark.parametrize("seed", range(20))
def test_many_readers_do_not_wait_in_a_circle(seed):
    steps, chosen = steps_of(8, kinds=("k", "k", "other")), random.Random(seed)
    places = Places("abcabdae")
    for _ in range(400):
        name, *arguments = chosen.choice(steps)
        if name == "announce" and chosen.random() < 0.5:
            continue
        with suppress(NotPossible):
            getattr(places, name)(*arguments)
        places.check()


class Ranks:
    """The two ranks of an engine, and by the events alone: how its update ended."""

    def __init__(self):
        self.tracker, self.version, self.readers = Tracker(), 0, {0: [], 1: []}
        self.waiting = set()
        self.announce()
        self.join(0)
        self.join(1)

    def announce(self):
        self.version = 3 - self.version if self.version else 1
        self.tracker.announce(id_(self.version))
        self.ended = {}
        """How each rank that was told has ended: None, "" for a success, or why it failed."""
        self.complete = set()
        for rank, readers in self.readers.items():
            if readers and readers[-1] in self.waiting:
                self.ended[rank] = None

    def join(self, rank):
        if len(self.readers[rank]) == 2:
            raise NotPossible
        reader = min({0, 1, 2, 3}.difference(*self.readers.values()))
        join(self.tracker, reader, "e", rank, 2)
        self.readers[rank].append(reader)

    def reader(self, rank, which):
        readers = self.readers[rank]
        if len(readers) <= (which == "older"):
            raise NotPossible
        return readers[-1 if which == "newer" else 0]

    def wait(self, rank):
        reader = self.reader(rank, "newer")
        self.tracker.wait(reader, "k", wait(None, None))
        self.waiting.add(reader)

    def tell(self, rank, which):
        reader = self.reader(rank, which)
        self.tracker.stop_waiting(reader)
        self.waiting.discard(reader)
        holders(self.tracker, reader)
        if which == "newer":
            self.ended[rank] = None
            self.complete.discard(rank)

    def staged(self, rank, which):
        staged(self.tracker, self.reader(rank, which), id_(self.version))
        if which == "newer" and rank in self.ended:
            self.complete.add(rank)

    def done(self, rank, which, error):
        reader = self.reader(rank, which)
        done(self.tracker, reader, id_(self.version), Result("e", nbytes=rank + 1, error=error))
        if which == "newer" and rank in self.ended:
            self.ended[rank] = error

    def lose(self, rank, which):
        reader = self.reader(rank, which)
        self.tracker.lose(reader)
        self.readers[rank].remove(reader)
        self.waiting.discard(reader)
        if which == "newer" and self.ended.get(rank, "") is None:
            self.ended[rank] = LOST.format(rank)

    def check(self):
        errors = [self.ended[rank] for rank in sorted(self.ended)]
        is_missing = None in errors
        assert self.tracker.outcome(id_(self.version)).missing == ["e"] * is_missing
        needs = [rank not in self.complete for rank in self.ended if self.ended[rank] is None]
        lacks_one = len(self.ended) == 1 and is_missing
        assert self.tracker.outcome(id_(self.version)).needing == ["e"] * (any(needs) or lacks_one)
        found = outcomes(self.tracker, id_(self.version))
        if is_missing or not errors:
            assert found == {}
        elif errors == ["", ""]:
            assert found == {"e": ""}
        else:
            few = "PeerLost: 1 of 2 ranks of 'e' asked for the version"
            assert found == {"e": next(filter(None, errors), few)}
        assert self.tracker.replicas() == ["e"] * any(self.readers.values())
        assert self.tracker.waiting() == ["e"] * bool(self.waiting)


@pytest.mark.parametrize("depth", [5, pytest.param(6, marks=pytest.mark.campaign)])
def test_in_every_order_an_engine_is_committed_only_if_each_of_its_ranks_was(depth):
    steps = [("announce",), ("wait", 0)]
    for rank in range(2):
        steps.append(("join", rank))
        for which in BOTH:
            steps += [(name, rank, which) for name in ("tell", "staged", "lose")]
            steps += [("done", rank, which, error) for error in ("", "PeerLost: gone")]
    assert explore(Ranks, steps, depth=depth) > 1_000
