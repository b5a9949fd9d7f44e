"""Very many at once: readers, strangers and tensors."""

import socket
from contextlib import ExitStack
from time import monotonic

import numpy as np
import pytest

from child_processes import FORK, LIMIT, Child, until
from flyweight.live import Publisher, Replica
from live.live_processes import SHAPES, TOKEN, Part
from live.one_process import fill, holds, in_background, mappable, model, reader, taken

NUM_READERS, NUM_CHILDREN = 300, 10
DEADLINE = 10.0


def readers(address, count, first, pipe):
    """Connect that many replicas at once, and have each take the version that is there."""
    parts = [Part(SHAPES) for _ in range(count)]
    pipe.recv()
    with ExitStack() as stack:
        started, replicas = monotonic(), []

        def join(number):
            name = f"engine {first + number}"
            return Replica(parts[number].model, address, token=TOKEN, transport="read", name=name)

        joins = [stack.enter_context(in_background(join, number)) for number in range(count)]
        for each in joins:
            found = each()
            if isinstance(found, BaseException):
                raise found
            replicas.append(stack.enter_context(found))
        seconds, is_joined = monotonic() - started, all(each.is_connected for each in replicas)
        pipe.send((seconds, is_joined))
        pipe.recv()
        updates = [
            stack.enter_context(in_background(each.update, 1, timeout_seconds=LIMIT))
            for each in replicas
        ]
        versions = {getattr(each(), "version", str(each())) for each in updates}
        return versions, all(each.is_complete(1) for each in parts)


@pytest.mark.check
@pytest.mark.timeout(300)
def test_three_hundred_readers_that_come_at_once_all_join_and_take_the_version():
    """More than a door has places, and beside as many strangers that say nothing."""
    part = Part(SHAPES)
    with (
        Publisher(part.model, "tcp://127.0.0.1:0", token=TOKEN, keep="memory") as publisher,
        ExitStack() as stack,
    ):
        part.fill(1)
        publisher.publish(1)
        host, port = publisher.address.removeprefix("tcp://").split(":")
        each_has = NUM_READERS // NUM_CHILDREN
        children = [
            stack.enter_context(
                Child(readers, publisher.address, each_has, number * each_has, context=FORK)
            )
            for number in range(NUM_CHILDREN)
        ]
        for _ in range(NUM_READERS):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT))
        for child in children:
            child.send("begin")
        for child in children:
            seconds, is_joined = child.told(4 * LIMIT)
            assert is_joined, seconds
        assert len(publisher.replicas) == NUM_READERS
        for child in children:
            child.send("update")
        for child in children:
            assert child.result(4 * LIMIT) == ({1}, True)


@pytest.mark.check
@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_fifty_thousand_tensors_arrive_in_every_version(transport):
    shapes = {f"layer.{n}.weight": (8, 8) for n in range(50_000)}
    whole = (mappable if transport == "mapped" else model)(0, {"all": (50_000, 8, 8)})["all"]
    weights = dict(zip(shapes, whole, strict=True))
    arrays = dict(zip(shapes, np.zeros((50_000, 8, 8), np.float32), strict=True))
    with (
        Publisher(weights, "tcp://127.0.0.1:0", token=TOKEN) as publisher,
        reader(arrays, publisher.address, transport, name="engine") as sink,
    ):
        for version in (1, 2):
            whole[...] = version
            whole[:, 0, 0] = np.arange(50_000)
            report, _ = taken(publisher, version, sink)
            assert not report.failed
            assert report.replicas[0].transport == transport
            found = np.stack(list(arrays.values()))
            assert np.array_equal(found, whole)


def test_engines_of_a_hundred_kinds_take_one_publish():
    """Each wants another part, so the trainer plans and digests for each."""
    weights = mappable(1, {f"t{n}": (16,) for n in range(100)})
    with (
        Publisher(weights, "tcp://127.0.0.1:0", token=TOKEN, keep="memory") as publisher,
        ExitStack() as stack,
    ):
        publisher.publish(1)
        for number in range(100):
            arrays = model(0, {f"t{n}": (16,) for n in range(number + 1)})
            sink = reader(arrays, publisher.address, name=f"engine {number}", strict=False)
            stack.enter_context(sink)
            assert sink.update(timeout_seconds=LIMIT).version == 1
            assert holds(arrays, 1)
        fill(weights, 2)
        publisher.publish(2)
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert holds(arrays, 2)
    until(lambda: not publisher.replicas)
