"""Replicas that join while something else runs: nobody waits for their plan, and all are served."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, in_time
from flyweight.errors import TransferTimeout
from flyweight.events import listening
from flyweight.live import messages
from flyweight.live.planner import Planner
from flyweight.live.sources import Sources
from flyweight.plans.copy_table import BoxTable, plan_copies
from flyweight.spec.box import Box
from live_rounds import call_before
from peers import FakeReplica, tensors, want

SIZE, NUM_TENSORS = 1024, 4000
SILENCE_SECONDS = 0.8  # a round sends Going every second: only heartbeats come more often


def own_boxes(tensor, count):
    """Return boxes of a tensor that differ from those of all others.

    Tensors that are cut alike would be planned together, in no time.
    """
    singles = [Box((n,), (1,)) for n in range(count - 1)]
    return [*singles, Box((count + tensor // 200,), (1 + tensor % 200,))]


def slow_boxes(plan_seconds=3.0):
    """Return boxes of NUM_TENSORS tensors whose plan takes about so long on this machine."""
    some, names = range(200), [str(n) for n in range(200)]
    sources = BoxTable.of([(n, Box.whole((SIZE,))) for n in some])
    sinks = BoxTable.of([(n, box) for n in some for box in own_boxes(n, 10)])
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        plan_copies(sources, sinks, names)
        seconds.append(time.perf_counter() - started)
    count = int(10 * plan_seconds / min(seconds) * len(some) / NUM_TENSORS)
    return [(n, box) for n in range(NUM_TENSORS) for box in own_boxes(n, count)]


def many_weights(count, version):
    content = np.random.default_rng(version).integers(0, 256, (count, SIZE), dtype=np.uint8)
    return {f"w{n}": content[n].copy() for n in range(count)}


def own_cuts(model):
    """Return an engine that wants another box of each tensor."""
    boxes = [own_boxes(n, 1)[0] for n in range(len(model))]
    return {
        name: fw.Sharded(np.zeros(box.shape, np.uint8), (SIZE,), box.offset)
        for name, box in zip(model, boxes, strict=True)
    }


def halves(model):
    """Return an engine that wants the second half of each tensor."""
    half = SIZE // 2
    return {name: fw.Sharded(np.zeros(half, np.uint8), (SIZE,), (half,)) for name in model}


def wholes(model):
    return {name: np.zeros_like(array) for name, array in model.items()}


def has_arrived(engine, model):
    for name, leaf in engine.items():
        held, wanted = leaf, model[name]
        if isinstance(leaf, fw.Sharded):
            held, start = leaf.tensor, leaf.offset[0]
            wanted = wanted[start : start + len(held)]
        if held.tobytes() != wanted.tobytes():
            return False
    return True


def trainer(address, count, silence_seconds, pipe):
    """Publish version n to as many replicas as it is told; return who was lost meanwhile."""
    lost, version = [], 0

    def listener(event):
        if event.kind == "replica.lost":
            lost.append(event.fields["error"])

    model = many_weights(count, 0)
    with (
        listening(listener),
        fw.Publisher(
            model, address, silence_seconds=silence_seconds, timeout_seconds=LIMIT
        ) as publisher,
    ):
        pipe.send(("up", None))
        while (num_replicas := pipe.recv()) is not None:
            version += 1
            for name, array in many_weights(count, version).items():
                model[name][...] = array
            report = publisher.publish(version, num_replicas=num_replicas)
            failed = {each.name: str(each.error) for each in report.failed}
            pipe.send(("published", (sorted(each.name for each in report.replicas), failed)))
        return lost


def engine_in_round(address, pipe):
    """Stay in the first round until told to go on."""

    def wait(version):
        pipe.send(("in round", version))
        pipe.recv()

    with fw.Replica({"w0": np.zeros(SIZE, np.uint8)}, address, name="first", extra="report") as one:
        return one.update(timeout_seconds=LIMIT, before=wait).version


def joining_engine(address, name, layout, count, version, pipe):
    """Join, then take a version; return whether every byte is there."""
    model = many_weights(count, version)
    engine = layout(model)
    with fw.Replica(engine, address, name=name) as replica:
        pipe.send(("joined", None))
        replica.update(version, timeout_seconds=LIMIT)
        return has_arrived(engine, model)


@pytest.mark.campaign
def test_a_join_that_is_planned_for_long_disturbs_no_round(address):
    """Heartbeats go on: both sides give up a peer that is silent for too long."""
    with (
        Child(trainer, address, NUM_TENSORS, SILENCE_SECONDS) as publisher,
        Child(engine_in_round, address) as first,
    ):
        assert publisher.told() == ("up", None)
        publisher.send(1)
        assert first.told() == ("in round", 1)
        for wanted_seconds in (3, 6, 12):  # until one is slow enough to show something
            with FakeReplica(address) as second:
                if plan_seconds(second, slow_boxes(wanted_seconds)) > 2 * SILENCE_SECONDS:
                    break
        else:
            pytest.fail("no plan was slow enough to show anything")
        first.send("go on")
        assert first.result() == 1
        assert publisher.told() == ("published", (["first"], {}))
        publisher.send(None)
        assert not any("first" in each and "silent" in each for each in publisher.result())


def ask_for(peer, boxes):
    peer.say(messages.Hello(peer.token, "second", os.getpid()))
    tensors = peer.hear_of(messages.Welcome).tensors
    peer.say(want(tensors, boxes))


def plan_seconds(peer, boxes):
    """Join with some boxes; return how long the publisher took to agree."""
    ask_for(peer, boxes)
    deadline = (started := time.monotonic()) + 30
    while True:
        assert time.monotonic() < deadline
        if peer.has_heard() and isinstance(peer.hear(), messages.Agreed):
            return time.monotonic() - started
        peer.say(messages.Tick())


def test_a_publish_returns_in_time_while_a_join_is_planned(address, threads, monkeypatch):
    is_planning, may_plan = threading.Event(), threading.Event()

    def wait():
        is_planning.set()
        assert may_plan.wait(LIMIT)

    call_before(monkeypatch, Planner, "_agreed", wait)
    model = many_weights(4, 1)
    engine = wholes(model)
    with fw.Publisher(model, address) as publisher:
        joining = threads.submit(fw.Replica, engine, address)
        assert is_planning.wait(LIMIT)
        with in_time(0):
            assert publisher.publish(1).replicas == ()
        with in_time(0.2), pytest.raises(TransferTimeout, match="0 of 1 replicas"):
            publisher.publish(2, num_replicas=1, timeout_seconds=0.2)
        may_plan.set()
        with joining.result(LIMIT) as replica:
            update = threads.submit(replica.update, timeout_seconds=LIMIT)
            assert publisher.publish(3, num_replicas=1).failed == ()
            assert update.result(LIMIT).version == 3
        assert has_arrived(engine, model)


def test_two_layouts_that_join_while_a_round_runs_are_served_by_the_next(address):
    count = 100
    with (
        Child(trainer, address, count, LIMIT) as publisher,
        Child(engine_in_round, address) as first,
    ):
        assert publisher.told() == ("up", None)
        publisher.send(1)
        assert first.told() == ("in round", 1)
        with (
            Child(joining_engine, address, "wholes", wholes, count, 2) as one,
            Child(joining_engine, address, "halves", halves, count, 2) as other,
        ):
            assert one.told() == other.told() == ("joined", None)
            first.send("go on")
            assert first.result() == 1
            assert publisher.told() == ("published", (["first"], {}))
            publisher.send(2)
            assert one.result()
            assert other.result()
            assert publisher.told() == ("published", (["halves", "wholes"], {}))
        publisher.send(None)
        assert not any("silent" in each for each in publisher.result())


@pytest.mark.parametrize("is_in_round", [False, True])
def test_a_replica_that_is_restarted_with_another_layout_is_served(address, is_in_round):
    count = 100
    with Child(trainer, address, count, LIMIT) as publisher:
        assert publisher.told() == ("up", None)
        if is_in_round:
            with Child(engine_in_round, address) as first:
                publisher.send(1)
                assert first.told() == ("in round", 1)
                first.kill()
                _, (names, failed) = publisher.told()
                assert names == list(failed) == ["first"]
        else:
            with Child(joining_engine, address, "first", wholes, count, 1) as first:
                assert first.told() == ("joined", None)
                publisher.send(1)
                assert first.result()
                assert publisher.told() == ("published", (["first"], {}))
        for version, layout in ((2, halves), (3, own_cuts), (4, wholes)):
            with Child(joining_engine, address, "first", layout, count, version) as again:
                assert again.told() == ("joined", None)
                publisher.send(1)
                assert again.result()
                assert publisher.told() == ("published", (["first"], {}))
        publisher.send(None)
        publisher.result()


def test_a_replica_that_wants_something_else_in_mid_round_fails_alone(address, monkeypatch):
    model, engine = many_weights(4, 1), many_weights(4, 2)
    with (
        fw.Publisher(model, address, silence_seconds=2 * LIMIT) as publisher,
        fw.Replica(engine, address) as replica,
        FakeReplica(address) as peer,
        ThreadPoolExecutor(2) as pool,
    ):
        peer.join()
        has_agreed = threading.Event()

        def want_less():
            peer.say(
                want(tensors(("w0", "u8", (SIZE,))), [(0, Box.whole((SIZE,)))], may_leave=True)
            )
            peer.hear_of(messages.Agreed)
            has_agreed.set()

        call_before(monkeypatch, Sources, "offer", want_less)
        peer.say(messages.Ask(1, None, None))
        update = pool.submit(replica.update, timeout_seconds=LIMIT)
        publish = pool.submit(publisher.publish, 1, num_replicas=2, timeout_seconds=LIMIT)
        assert has_agreed.wait(LIMIT)
        begin = peer.hear_of(messages.Begin)
        peer.say(messages.Fault(begin.round, "PlanError", "another plan", False))
        assert [each.name for each in publish.result(LIMIT).failed] == ["fake"]
        assert update.result(LIMIT).version == 1
        assert has_arrived(engine, model)
