"""Ctrl-C at every point, events that listeners hear, and processes that fork."""

import asyncio
import os
import signal

import pytest

from child_processes import FORK, LIMIT, Child, until
from flyweight.events import listening
from flyweight.live import Publisher, Replica
from live.live_processes import (
    SHAPES,
    TOKEN,
    Part,
    at,
    check_holds,
    check_next_update,
    free_address,
    once,
    plain,
    shared,
)
from live.one_process import fill, holds, in_background, mappable, model, reader, taken

ANY = "tcp://127.0.0.1:0"


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_trainer(address, point, keep, pipe):
    """Publish version 1, and be interrupted in 2, as by Ctrl-C; then publish 3."""
    part = Part(SHAPES)
    with Publisher(part.model, address, token=TOKEN, keep=keep) as publisher:
        for version in (1, 2, 3):
            part.fill(version)
            pipe.send(version)
            until(lambda: publisher.waiting)
            if version != 2:
                assert not publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT).failed
                continue
            try:
                with at(point, once(interrupt)):
                    publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT)
            except KeyboardInterrupt:
                pipe.send("interrupted")
            part.fill(99)  # the model may change: nothing is offered


@pytest.mark.parametrize(
    ("point", "keep"),
    [
        *((point, None) for point in ("announcing", "serving", "reclaiming")),
        *((point, "memory") for point in ("announcing", "serving", "reclaiming", "copying")),
    ],
)
def test_ctrl_c_in_a_publish_withdraws_the_version_and_the_next_one_works(processes, point, keep):
    address = free_address()
    with Child(interrupted_trainer, address, point, keep, context=FORK) as trainer:
        assert trainer.told() == 1
        engine = processes.engine(address, name="engine", transport="read")
        engine.told()
        engine.send(("update", {"timeout_seconds": LIMIT}))
        check_holds(engine.told(), 1)
        assert trainer.told() == 2
        engine.send(("update", {"timeout_seconds": LIMIT}))
        assert trainer.told() == "interrupted"
        assert trainer.told() == 3
        found = engine.told()
        if found["error"] is None and found["version"] == 2:
            check_holds(found, 2)
            engine.send(("update", {"timeout_seconds": LIMIT}))
            found = engine.told()
        if found["error"]:
            assert found["version"] in (1, 2)
            assert found["is_complete"]
            engine.send(("update", {"timeout_seconds": LIMIT}))
            found = engine.told()
        check_holds(found, 3)
        assert trainer.result() is None


def interrupted_engine(address, point, transport, pipe):
    """Take version 1, be interrupted in 2, and take it then."""
    part = Part(SHAPES)
    with Replica(part.model, address, token=TOKEN, name="engine", transport=transport) as replica:
        replica.update(1, timeout_seconds=LIMIT)
        pipe.send("held")
        pipe.recv()
        try:
            with at(point, once(interrupt)):
                replica.update(2, timeout_seconds=LIMIT)
        except KeyboardInterrupt:
            version = replica.version
            assert version is None or part.is_complete(version)
            pipe.send(("interrupted", version, str(replica.state)))
        replica.update(2, timeout_seconds=LIMIT)
        return replica.version == 2 and part.is_complete(2)


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
@pytest.mark.parametrize("point", ["found", "leased", "copy", "copied"])
def test_ctrl_c_in_an_update_leaves_a_whole_version_or_none(point, transport):
    part = Part(SHAPES, shared if transport == "mapped" else plain)
    with Publisher(part.model, ANY, token=TOKEN, keep="in_place") as publisher:
        part.fill(1)
        publisher.publish(1)
        with Child(interrupted_engine, publisher.address, point, transport, context=FORK) as engine:
            assert engine.told() == "held"
            publisher.withdraw()
            part.fill(2)
            publisher.publish(2)
            engine.send("go on")
            _, version, state = engine.told()
            if point in ("found", "leased"):
                assert (version, state) == (1, "READY")
            else:
                assert (version, state) == (None, "FAILED")
            assert engine.result() is True


def test_a_publish_and_updates_run_beside_an_event_loop():
    """Blocking calls in threads of a loop, and listeners that hand events to it."""
    weights, arrays, seen = mappable(1), model(), []

    async def train_and_serve(publisher, replica):
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        heard = lambda event: loop.call_soon_threadsafe(events.put_nowait, event)  # noqa: E731
        with listening(heard):
            update = asyncio.create_task(asyncio.to_thread(replica.update, timeout_seconds=LIMIT))
            report = await asyncio.to_thread(
                publisher.publish, 1, num_replicas=1, timeout_seconds=LIMIT
            )
            assert (await update).version == 1
            assert not report.failed
            while "update.done" not in seen:
                seen.append((await asyncio.wait_for(events.get(), LIMIT)).kind)

    with (
        Publisher(weights, ANY, token=TOKEN) as publisher,
        reader(arrays, publisher.address, name="engine") as replica,
    ):
        asyncio.run(train_and_serve(publisher, replica))
    assert holds(arrays, 1)


def test_events_say_what_an_update_did_and_a_listener_that_raises_stops_nothing():
    weights, arrays, seen = mappable(1), model(), []

    def hear(event):
        seen.append(event)
        raise RuntimeError("a listener of the user's")

    with (
        listening(hear),
        Publisher(weights, ANY, token=TOKEN) as publisher,
        reader(arrays, publisher.address, name="engine") as replica,
    ):
        taken(publisher, 1, replica)
        fill(weights, 2)
        taken(publisher, 2, replica)
    done = [each.fields for each in seen if each.kind == "update.done"]
    assert [(each["name"], each["version"]) for each in done] == [("engine", 1), ("engine", 2)]
    assert holds(arrays, 2)


def test_an_engine_that_was_killed_is_lost_though_a_process_that_it_forked_lives(processes):
    """As vLLM's and torch's workers do: what a child inherits keeps no connection open."""
    weights, arrays = mappable(1), model()
    with Publisher(weights, ANY, token=TOKEN) as publisher:
        with Child(forking_engine, publisher.address, context=FORK) as engine:
            child = engine.told()
            try:
                until(lambda: publisher.waiting)
                engine.kill()
                engine.join()
                until(lambda: not publisher.replicas)
                assert not publisher.publish(1, timeout_seconds=600).pending  # it would hang
            finally:
                os.kill(child, signal.SIGKILL)
        with reader(arrays, publisher.address) as sink:
            fill(weights, 2)
            taken(publisher, 2, sink)
        assert holds(arrays, 2)


def forking_engine(address, pipe):
    with Replica(model(), address, token=TOKEN, name="engine") as replica:
        child = os.fork()
        if child == 0:
            signal.pause()
        pipe.send(child)
        replica.update(timeout_seconds=LIMIT)


def use_inherited(publisher, replica, pipe):
    """Look at what a fork has inherited, which may have been in use; it must not hang."""
    replica.wake()
    return publisher.replicas, replica.version, str(replica.state)


def test_a_child_that_was_forked_in_the_middle_of_an_update_can_look_at_what_it_has():
    weights, arrays = mappable(1), model()
    with (
        Publisher(weights, ANY, token=TOKEN) as publisher,
        reader(arrays, publisher.address, name="engine") as replica,
        in_background(replica.update, timeout_seconds=LIMIT) as result,
    ):
        until(lambda: publisher.waiting)
        with Child(use_inherited, publisher, replica) as child:
            assert child.result() == (["engine"], None, "EMPTY")
        assert not publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT).failed
        assert result().version == 1
    assert holds(arrays, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_trainer_that_is_asked_to_end_lets_its_engines_go_on(processes, number):
    address = free_address()
    trainer = processes.trainer(address)
    trainer.told()
    engine = processes.engine(address, name="engine")
    engine.told()
    check_next_update([trainer], [engine], 1)
    engine.send(("update", {"version": 1, "timeout_seconds": LIMIT}))
    check_holds(engine.told(), 1)
    trainer.kill(number)
    trainer.join()
    again = processes.trainer(address)
    again.told()
    check_next_update([again], [engine], 5)
