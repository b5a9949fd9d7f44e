"""Every order of reads and losses in a fan-out, and what it costs where links are alike."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flyweight.live.forwarding import SOURCE, Forwarding, Free, GiveUp, Read, SourceFree
from flyweight.plans.fanout import FanOut, Node, fan_out

CAMPAIGN = pytest.mark.campaign


class World:
    """A fan-out, and what has happened at its members; every action is checked against that."""

    def __init__(self, plan, buckets, *, packed=(), source_slots=3, faults=""):
        self.forwarding = Forwarding(plan, buckets, packed=packed)
        self.plan, self.nodes = plan, plan.nodes
        self.buckets, self.packed, self.source_slots = buckets, tuple(packed), source_slots
        self.faults = faults
        """A letter for each fault that may still happen: l(ost), s(low), u(nreachable), f(ailed read)."""
        self.num_faults, self.has_source_failed = 0, False
        self.source = {each for some in buckets.values() for each in some} - {*packed}
        self.num_filled = 0
        self.alive = {*self.nodes}
        self.reading, self.staging, self.has = {}, {}, set()
        self.may_read_again = set()
        """Reads that have failed, or that were told to end."""
        self.num_sent = 0
        self.carry_out(self.forwarding.start())

    def copy(self):
        made = object.__new__(World)
        made.__dict__ = {
            name: value.copy() if isinstance(value, (dict, set)) and name not in ("nodes", "buckets") else value
            for name, value in self.__dict__.items()
        }  # fmt: skip
        made.forwarding = self.forwarding.copy()
        return made

    @property
    def key(self):
        holdings = tuple(
            (name, each.num_begun, frozenset(each.missing), frozenset(each.staged.items()), frozenset(each.reads.items()))
            for name, each in self.forwarding.holdings.items()
        )  # fmt: skip
        return (
            holdings,
            tuple(self.forwarding.fan_out.parents.items()),
            self.faults,
            self.has_source_failed,
        )

    def wants(self, name):
        return self.buckets[self.nodes[name].group]

    def lacks(self, name):
        """Return the buckets that a member lacks."""
        return [each for each in self.wants(name) if (name, each) not in self.has]

    def steps(self):
        """Return what can happen next without a fault."""
        found = [("has", *each) for each in self.reading]
        found += [("emptied", *each) for each, is_empty in self.staging.items() if not is_empty]
        num_full = len(self.source.intersection(self.packed))
        if num_full < self.source_slots and self.num_filled < len(self.packed):
            found.append(("filled", self.packed[self.num_filled]))
        return found

    def fault_steps(self):
        found = []
        if "l" in self.faults:
            found += [("lost", name) for name in sorted(self.alive)]
        if "s" in self.faults:
            found += [("slow", name) for name in sorted(self.alive)]
        if "u" in self.faults:
            found += [("unreachable", name) for name in sorted(self.alive)]
        if "f" in self.faults:
            found += [("failed_read", *each, holder) for each, holder in self.reading.items()]
        return found

    def take(self, step):
        what, *words = step
        if what in ("lost", "slow", "unreachable", "failed_read"):
            self.faults = self.faults.replace(what[0], "", 1)
            self.num_faults += 1
        match step:
            case ("has", name, bucket):
                del self.reading[name, bucket]
                self.may_read_again.discard((name, bucket))
                self.staging[name, bucket] = False
                self.has.add((name, bucket))
            case ("emptied", name, bucket):
                self.staging[name, bucket] = True
            case ("filled", bucket):
                self.source.add(bucket)
                self.num_filled += 1
            case ("lost", name):
                self.leave(name)
            case ("slow", slow):
                is_gathered = not {*self.lacks(slow)} & {*self.packed}
                self.plan = self.plan.as_leaf(slow, at_trainer=is_gathered)
                self.may_read_again |= {
                    each for each, holder in self.reading.items() if slow in (holder, each[0])
                }
            case ("unreachable", name):
                self.plan = self.plan.as_leaf(name)
                self.may_read_again |= {each for each, it in self.reading.items() if it == name}
            case ("failed_read", name, bucket, holder):
                self.may_read_again.add((name, bucket))
                self.has_source_failed |= holder == SOURCE
        self.carry_out(getattr(self.forwarding, what)(*words))
        assert self.forwarding.fan_out == self.plan
        assert all(it in self.plan.ancestors(name) for (name, _), it in self.reading.items())

    def leave(self, name):
        self.alive.remove(name)
        self.plan = self.plan.without(name)
        self.may_read_again |= {each for each, holder in self.reading.items() if holder == name}
        self.reading = {each: it for each, it in self.reading.items() if each[0] != name}
        self.staging = {each: it for each, it in self.staging.items() if each[0] != name}

    def near(self, holder):
        """Return the live members within two hops of a holder."""
        children = self.plan.children(holder)
        return {*children, *(each for child in children for each in self.plan.children(child))}

    def carry_out(self, actions):
        for action in actions:
            match action:
                case Read(name, bucket, holder):
                    assert (
                        bucket in self.source
                        if holder == SOURCE
                        else (holder, bucket) in self.staging
                    )
                    assert name in self.alive
                    assert (name, bucket) not in self.has
                    if (name, bucket) in self.reading:
                        assert (name, bucket) in self.may_read_again
                    self.may_read_again.discard((name, bucket))
                    self.reading[name, bucket] = holder
                    used = sum(each[0] == name for each in (*self.reading, *self.staging))
                    assert used <= self.nodes[name].num_slots
                    self.num_sent += holder == SOURCE
                case Free(name, bucket):
                    assert self.staging.pop((name, bucket))  # it is unpacked
                    self.check_unused(name, bucket)
                case SourceFree(bucket):
                    assert bucket in self.packed
                    self.source.remove(bucket)
                    self.check_unused(SOURCE, bucket)
                case GiveUp(name, reason):
                    assert reason.startswith("bucket ")
                    assert self.has_source_failed or (self.num_faults > 1 and self.packed)
                    self.leave(name)

    def check_unused(self, holder, bucket):
        """Check that nobody reads a bucket there, and that one more loss would lose nothing."""
        assert holder not in {it for (_, each), it in self.reading.items() if each == bucket}
        near = self.near(holder)
        assert all((each, bucket) in self.has for each in near if bucket in self.wants(each))

    def check_end(self):
        """Check that nobody waits: all have all, every slot is free."""
        for name in self.alive:
            assert not self.lacks(name), (name, self.reading)
        assert not self.staging
        assert not self.source.intersection(self.packed)
        assert self.num_filled == len(self.packed)


def explore(world):
    """Try every order; return how many states there are."""
    seen, todo = {world.key}, [world]
    while todo:
        world = todo.pop()
        steps = world.steps()
        if not steps:
            world.check_end()
        busy = {name for what, name, *_ in steps if what != "filled"}
        assert {*world.forwarding.waiting_for()} == busy
        lacking = {name for name in world.alive if world.lacks(name)}
        idle = world.forwarding.idle()
        assert idle == lacking - busy
        if idle and not any(what == "filled" for what, *_ in steps):
            # They do not wait for the source, so a member that has something to do is why.
            assert world.forwarding.kept_waiting(min(lacking & busy)) == idle
        for step in steps + world.fault_steps():
            after = world.copy()
            after.take(step)
            if after.key not in seen:
                seen.add(after.key)
                todo.append(after)
    return len(seen)


def chain(count, *, slots=3):
    """Return a chain of members on hosts of their own; with fewer slots than fan_out accepts, too."""
    plan = fan_out([Node(name, f"host-{name}") for name in "abcdefghij"[:count]])
    return with_slots(plan, slots)


def tree(*, slots=3):
    """Return a member with two children, one of which has a child."""
    nodes = {name: Node(name, name, num_slots=slots) for name in "abcd"}
    return FanOut(nodes, {"a": SOURCE, "b": "a", "c": "a", "d": "b"})


def with_slots(plan, slots):
    nodes = {name: replace(node, num_slots=slots) for name, node in plan.nodes.items()}
    return FanOut(nodes, plan.parents)


GATHERED, PACKED = (), (0, 1, 2)


@pytest.mark.parametrize("packed", [GATHERED, PACKED], ids=["gathered", "packed"])
@pytest.mark.parametrize(
    ("plan", "faults", "least"),
    [
        pytest.param(chain(3, slots=1), "lls", 800, id="chain"),
        pytest.param(chain(3, slots=1), "lu", 400, id="chain-unreachable"),
        pytest.param(chain(4, slots=1), "l", 400, id="longer-chain"),
        pytest.param(tree(slots=1), "l", 500, id="tree"),
    ],
)
def test_every_live_member_gets_every_bucket_in_every_order(plan, packed, faults, least):
    world = World(plan, {"": range(3)}, packed=packed, source_slots=1, faults=faults)
    assert explore(world) > least


@pytest.mark.parametrize("packed", [GATHERED, PACKED], ids=["gathered", "packed"])
@pytest.mark.parametrize(
    ("plan", "faults", "least"),
    [
        pytest.param(chain(3), "l", 3_000, id="chain-3x3-lost"),
        pytest.param(chain(3, slots=2), "ls", 10_000, id="chain-3x2-lost-slow", marks=CAMPAIGN),
        pytest.param(chain(3, slots=2), "llf", 4_000, id="chain-3x2-lost-lost-failed"),
        pytest.param(chain(4), "l", 10_000, id="chain-4x3-lost", marks=CAMPAIGN),
        pytest.param(chain(4, slots=2), "ll", 5_000, id="chain-4x2-lost-lost", marks=CAMPAIGN),
        pytest.param(
            chain(4, slots=1), "lsf", 5_000, id="chain-4x1-lost-slow-failed", marks=CAMPAIGN
        ),
        pytest.param(tree(slots=2), "l", 5_000, id="tree-4x2-lost", marks=CAMPAIGN),
        pytest.param(tree(slots=1), "lls", 5_000, id="tree-4x1-lost-lost-slow", marks=CAMPAIGN),
    ],
)
def test_every_live_member_gets_every_bucket_in_every_order_of_more(plan, packed, faults, least):
    world = World(plan, {"": range(3)}, packed=packed, source_slots=2, faults=faults)
    assert explore(world) > least


def random_world(random, *, faults):
    """Return a world of ten members in two groups, some of which cannot forward."""
    nodes = [
        Node(f"{n}", f"host-{random.randrange(5)}", random.choice("xy"), random.random() < 0.8, random.choice([1, 3, 4]))
        for n in range(10)
    ]  # fmt: skip
    buckets = {group: [b for b in range(30) if random.random() < 0.8] for group in "xy"}
    wanted = sorted({each for some in buckets.values() for each in some})
    share = random.choice([0, 0.5, 1])
    return World(
        fan_out(nodes, degree=random.choice([1, 1, 2, 3])),
        buckets,
        packed=[each for each in wanted if random.random() < share],
        source_slots=random.choice([1, 2, 4]),
        faults=faults,
    )


@CAMPAIGN
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["", "lll", "llsf", "lssf", "fff", "luu"]))
def test_random_fan_outs_end_and_late_events_change_nothing(seed, faults):
    random = Random(seed)
    world = random_world(random, faults=faults)
    past = []
    while steps := world.steps():
        if world.faults and random.random() < 0.02:
            steps = world.fault_steps() or steps
        step = random.choice(steps)
        world.take(step)
        past.append(step)
        before = world.key
        what, *words = random.choice(past)
        is_over = what not in ("slow", "unreachable") and (
            what != "failed_read" or (*words[:2],) not in world.reading
        )
        if is_over and (what != "has" or (*words,) not in world.reading):
            assert getattr(world.forwarding, what)(*words) == []
            assert world.key == before
    world.check_end()


def simulated(plan, num_buckets, *, slow=(), packed=False):
    """Return in how many steps each member has all; a link carries a bucket per step.

    slow: members that take 20 steps for a bucket.
    """
    world = World(
        plan, {"": range(num_buckets)}, packed=range(num_buckets) if packed else (), source_slots=4
    )
    ends, now = {}, 0
    while world.steps():
        now += 1
        readers, steps = set(), []
        for name, bucket in world.reading:  # in the order in which they were told
            if name not in readers and (name not in slow or now % 20 == 0):
                steps.append(("has", name, bucket))
                readers.add(name)
        for step in steps:
            world.take(step)
        for each in [each for each in world.steps() if each[0] != "has"]:
            world.take(each)
        for name in world.alive:
            if (
                name not in ends
                and len([each for each in world.has if each[0] == name]) == num_buckets
            ):
                ends[name] = now
        yield world, now, ends
    world.check_end()


@pytest.mark.parametrize("packed", [False, True])
def test_a_chain_of_eight_takes_one_step_per_bucket_and_hop_and_the_source_sends_once(packed):
    *_, (world, steps, _) = simulated(chain(8), 100, packed=packed)
    assert 100 + 7 <= steps <= 100 + 9
    assert world.num_sent == 100


def test_nobody_waits_for_a_slow_member_once_it_is_known():
    for world, now, each in simulated(chain(8), 100, slow="c"):
        ends = each
        if now == 20:
            world.take(("slow", "c"))
    assert max(end for name, end in ends.items() if name != "c") < 20 + 100 + 20
    assert ends["c"] > 1000


def draining(plan, num_buckets, *, drained=""):
    """Return a world as far as it gets while all but some members drain, and unpack nothing."""
    world = World(plan, {"": range(num_buckets)})
    while steps := [
        step for step in world.steps() if step[0] == "has" or (step[0] == "emptied" and step[1] in drained)
    ]:  # fmt: skip
        world.take(steps[0])
    return world


def test_members_that_drain_at_the_same_time_keep_nobody_waiting():
    world = draining(chain(8), 100)
    assert world.num_sent == 3  # every slot is full
    busy = world.forwarding.waiting_for()
    assert {*busy} == world.alive
    assert not any(map(world.forwarding.is_reading, busy))
    assert not any(map(world.forwarding.kept_waiting, busy))


@pytest.mark.parametrize("last", "ad")
def test_a_member_that_drains_longest_keeps_the_others_waiting_until_it_counts_as_slow(last):
    drained = "abcd".replace(last, "")
    world = draining(chain(4), 100, drained=drained)
    assert world.forwarding.waiting_for().keys() == {last}
    assert world.forwarding.kept_waiting(last) == {*drained}
    world.take(("slow", last))
    while steps := [each for each in world.steps() if each[:2] != ("emptied", last)]:
        world.take(steps[0])
    assert not any(map(world.lacks, drained))
    assert world.forwarding.kept_waiting(last) == set()


def run(forwarding, *events):
    """Return the actions of the last event."""
    for what, *words in events:
        actions = getattr(forwarding, what)(*words)
    return actions


def test_a_failed_read_goes_to_the_next_ancestor_and_at_last_to_the_source():
    forwarding = Forwarding(chain(3), {"": [7]})
    assert run(forwarding, ("start",)) == [Read("a", 7, SOURCE)]
    assert run(forwarding, ("has", "a", 7)) == [Read("b", 7, "a")]
    assert run(forwarding, ("has", "b", 7)) == [Read("c", 7, "b")]
    assert forwarding.waiting_for() == {
        "a": "unpack bucket 7",
        "b": "unpack bucket 7",
        "c": "read bucket 7 from 'b'",
    }
    assert run(forwarding, ("failed_read", "c", 7, "b")) == [Read("c", 7, "a")]
    assert run(forwarding, ("failed_read", "c", 7, "b")) == []
    assert run(forwarding, ("failed_read", "c", 7, "a")) == [Read("c", 7, SOURCE)]
    (end,) = run(forwarding, ("failed_read", "c", 7, SOURCE))
    reason = "bucket 7: no member above can give it, and the source could not give it"
    assert end == GiveUp("c", reason)


@pytest.mark.parametrize("packed", [[], [7]], ids=["gathered", "packed"])
def test_two_neighbours_lost_at_once_lose_a_packed_bucket_and_no_gathered_one(packed):
    forwarding = Forwarding(chain(3), {"": [7]}, packed=packed)
    run(forwarding, ("start",), ("filled", 7), ("has", "a", 7))
    freed = run(forwarding, ("has", "b", 7))
    assert freed == [Read("c", 7, "b"), *[SourceFree(each) for each in packed]]
    assert run(forwarding, ("lost", "b")) == [Read("c", 7, "a")]
    (end,) = run(forwarding, ("lost", "a"))
    reason = "bucket 7: no member above can give it, and the source has refilled its slot"
    assert end == (GiveUp("c", reason) if packed else Read("c", 7, SOURCE))


def test_a_member_that_is_given_up_leaves_nobody_waiting_for_it():
    nodes = {name: Node(name, name, num_slots=1 if name == "d" else 3) for name in "dcba"}
    plan = FanOut(nodes, {"a": SOURCE, "b": "a", "c": "b", "d": "c"})
    forwarding = Forwarding(plan, {"": [7, 8]}, packed=[7, 8])
    run(forwarding, ("start",), ("filled", 7), ("filled", 8))
    run(forwarding, *[("has", name, bucket) for name in "ab" for bucket in (7, 8)], ("has", "c", 7))
    run(forwarding, ("emptied", "a", 7), ("lost", "a"))
    ends = run(forwarding, ("lost", "b"))  # c reads 8 from it, and d reads 7 from c
    assert [(type(end), end.member) for end in ends] == [(GiveUp, "c"), (GiveUp, "d")]


def test_a_member_is_given_up_once_however_many_buckets_it_lacks():
    forwarding = Forwarding(chain(3), {"": [7, 8]}, packed=[7, 8])
    run(forwarding, ("start",), ("filled", 7), ("filled", 8))
    run(forwarding, *[("has", name, bucket) for name in "ab" for bucket in (7, 8)], ("lost", "a"))
    (end,) = run(forwarding, ("lost", "b"))
    assert isinstance(end, GiveUp)


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (("has", "f", 7), [Free("a", 7)]),
        (("failed_read", "f", 7, "a"), [Read("f", 7, SOURCE), Free("a", 7)]),
    ],
    ids=["has", "failed"],
)
def test_a_slot_is_kept_for_a_reader_that_is_further_away_than_two_hops(event, actions):
    forwarding = Forwarding(chain(6), {"": [7]})
    run(forwarding, ("start",), *[("has", name, 7) for name in "abcde"])
    run(forwarding, *[("emptied", name, 7) for name in "bcde"], ("lost", "e"))
    assert run(forwarding, ("lost", "d")) == [Read("f", 7, "a")]  # b and c have freed it
    assert run(forwarding, ("emptied", "a", 7)) == []
    assert run(forwarding, event) == actions


def test_a_source_whose_members_are_all_lost_does_not_wait():
    forwarding = Forwarding(chain(1), {"": [7, 8]}, packed=[7, 8])
    run(forwarding, ("start",), ("filled", 7))
    assert run(forwarding, ("lost", "a")) == [SourceFree(7)]
    assert run(forwarding, ("filled", 8)) == [SourceFree(8)]


def test_events_of_unknown_members_and_buckets_change_nothing():
    world = World(chain(2), {"": [7]})
    before = world.key
    for event in [
        ("has", "b", 7),
        ("has", "x", 7),
        ("has", SOURCE, 7),
        ("emptied", "a", 7),
        ("emptied", SOURCE, 7),
        ("failed_read", "b", 7, "a"),
        ("failed_read", "a", 7, "b"),
        ("filled", 7),
        ("filled", 9),
        ("lost", "x"),
        ("lost", SOURCE),
        ("slow", SOURCE),
        ("unreachable", SOURCE),
    ]:
        assert run(world.forwarding, event) == []
        assert world.key == before, event
