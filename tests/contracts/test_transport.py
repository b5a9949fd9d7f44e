"""What every way of the bytes promises. A new one joins by adding a line to WAYS."""

import gc
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flyweight as fw
from campaign import budget
from child_processes import LIMIT, resources, settled, until
from conftest import same
from flyweight.errors import DigestMismatch, FlyweightError
from live.live_processes import (
    LARGE,
    TOKEN,
    at,
    check_holds,
    check_next_update,
    once,
    plain,
    shared,
)
from live.one_process import in_background

ADDRESS = "tcp://127.0.0.1:0"


def on_host(shape, dtype):
    """Return an array that no other process can map."""
    return np.zeros(shape, dtype)


def in_shared_memory(shape, dtype):
    """Return an array in memory without a name, which other processes can map."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return shared((-(-nbytes // 4),)).view(np.uint8)[:nbytes].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Way:
    """A way of the bytes: its name in reports, and what makes a replica take it."""

    name: str
    make: Callable = on_host
    """Makes a tensor of the trainer."""
    make_words: Callable = plain
    """Makes one in a process of its own."""
    replica: dict = field(default_factory=dict)
    publisher: dict = field(default_factory=dict)
    is_mapped: bool = False
    """Whether bytes come in the pause, from the trainer's memory."""


WAYS = {
    "mapped": Way("mapped", in_shared_memory, shared, {"transport": "mapped"}, is_mapped=True),
    "filled": Way("filled", replica={"transport": "filled"}),
    "read": Way("read", replica={"transport": "read"}),
    "rdma over tcp": Way("rdma", replica={"transport": "rdma"}),
}


@pytest.fixture(params=WAYS)
def way(request):
    if WAYS[request.param].name == "rdma":
        request.getfixturevalue("over_tcp")
    return WAYS[request.param]


@contextmanager
def connected(way, source, *sinks, **options):
    """Give a publisher, and a replica of it for each target."""
    with ExitStack() as stack:
        publisher = fw.Publisher(source, ADDRESS, token=TOKEN, **way.publisher, **options)
        stack.enter_context(publisher)
        replicas = [
            stack.enter_context(
                fw.Replica(each, publisher.address, token=TOKEN, name=f"{number}", **way.replica)
            )
            for number, each in enumerate(sinks)
        ]
        yield publisher, *replicas


def taken(publisher, version, *replicas, **options):
    """Publish a version to replicas; return their reports, or errors."""
    with ExitStack() as stack:
        results = [
            stack.enter_context(in_background(each.update, timeout_seconds=LIMIT, **options))
            for each in replicas
        ]
        until(lambda: len(publisher.waiting) == len(replicas))
        publisher.publish(version, timeout_seconds=LIMIT)
        return [each() for each in results]


def random_array(make, dtype, *shape):
    array = make(shape, dtype)
    nbytes = int(np.prod(shape)) * array.itemsize
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    if array.dtype == bool:
        data &= 1
    array[...] = data.view(dtype).reshape(shape)
    return array


def odd_arrays(make):
    """Return arrays of every awkward kind, and one that is larger than what is read at once."""
    one = random_array(make, "f4", 3, 5)
    return {
        "scalar": random_array(make, "f8"),
        "empty": make((0, 3), "f4"),
        "bytes": random_array(make, "u1", 7, 3),
        "half": random_array(make, "f2", 5, 3, 2),
        "transposed": random_array(make, "f4", 4, 6).T,
        "sliced": random_array(make, "i8", 8, 8)[::2, 1::3],
        "reversed": random_array(make, "f8", 9)[::-1],
        "flag": random_array(make, "?", 3),
        "complex": random_array(make, "c8", 3),
        "large": random_array(make, "u1", (9 << 20) + 3),
        "tied": one,
        "tied too": one,
    }


def zeros_of(arrays):
    """Return arrays of the same kinds, other strides and ties, without their values."""
    found = {name: np.zeros_like(each) for name, each in arrays.items()}
    return {**found, "tied too": found["tied"]} if "tied too" in found else found


@pytest.mark.parametrize("verify", [True, False])
def test_tensors_of_every_kind_arrive_byte_for_byte_in_every_version(way, verify):
    source = odd_arrays(way.make)
    sink = zeros_of(source)
    with connected(way, source, sink, verify=verify) as (publisher, replica):
        for version in (1, 2, 3):
            (report,) = taken(publisher, version, replica)
            assert same(sink, source)
            assert (report.version, report.transport) == (version, way.name)
            assert report.verified == ("live" if verify else "nothing")
            assert report.nbytes == sum(each.nbytes for each in source.values()) - 60
            for each in source.values():
                each[...] = each[::-1].copy() if each.ndim else each + 1
    assert sink["tied"] is sink["tied too"]


@settings(
    max_examples=budget(20, 1000),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_box_of_any_tensor_arrives_in_any_strides(way, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["u1", "u2", "f4", "c16"]))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(
        data.draw(st.integers(1, size - first)) for size, first in zip(shape, offset, strict=True)
    )
    whole = random_array(way.make, dtype, *shape)
    part = np.zeros(box, dtype, order=data.draw(st.sampled_from("CF")))
    sink = {"w": fw.Sharded(part, shape, offset)}
    with connected(way, {"w": whole}, sink) as (publisher, replica):
        (report,) = taken(publisher, 1, replica)
        assert report.transport == way.name
    index = tuple(slice(first, first + size) for first, size in zip(offset, box, strict=True))
    assert part.tobytes() == whole[index].tobytes()


def test_replicas_of_several_kinds_take_one_publish(way):
    whole = random_array(way.make, "f4", 64, 48)
    cuts = {(0, 0): np.s_[:32], (32, 0): np.s_[32:], (0, 24): np.s_[:, 24:]}
    parts = [np.zeros_like(whole[cut], order="C") for cut in cuts.values()]
    sinks = [
        {"w": fw.Sharded(part, whole.shape, offset)}
        for part, offset in zip(parts, cuts, strict=True)
    ]
    with connected(way, {"w": whole}, {"w": np.zeros_like(whole)}, *sinks) as (publisher, *all_):
        for report in taken(publisher, 1, *all_):
            assert report.transport == way.name
    for part, cut in zip(parts, cuts.values(), strict=True):
        assert part.tobytes() == whole[cut].tobytes()


def test_nothing_is_written_before_the_pause(way):
    source = odd_arrays(way.make)
    sink, seen = zeros_of(source), []
    before = zeros_of(source)
    with connected(way, source, sink) as (publisher, replica):
        (report,) = taken(
            publisher, 1, replica, before=lambda version: seen.append(same(sink, before))
        )
        assert report.version == 1
    assert seen == [True]
    assert same(sink, source)


def test_one_wrong_byte_is_never_served_and_the_next_version_is(way):
    """The trainer changes a byte after its digest: whatever is written is held by nobody."""
    source = odd_arrays(way.make)
    sink = zeros_of(source)
    with connected(way, source, sink) as (publisher, replica):
        taken(publisher, 1, replica)
        old = {name: each.copy() for name, each in sink.items()}

        def spoil():
            source["large"][5 << 20] ^= 1

        with at("leased", once(spoil)):
            (error,) = taken(publisher, 2, replica)
        assert isinstance(error, DigestMismatch)
        assert "'large'" in str(error)
        if way.is_mapped:
            assert (replica.version, str(replica.state)) == (None, "FAILED")
        else:
            assert (replica.version, str(replica.state)) == (1, "READY")
            assert same(sink, old)
        (report,) = taken(publisher, 3, replica)
        assert report.version == 3
        assert same(sink, source)


def test_wrong_bytes_of_the_way_itself_are_found(way, monkeypatch):
    """What arrives is digested where it was written, whatever the way did to it."""
    from flyweight.live.incoming import Incoming

    source = odd_arrays(way.make)
    sink, copy = zeros_of(source), Incoming.copy

    def spoiled(self, deadline, check):
        for arrived in self.arrived.values():
            largest = int(np.argmax(arrived.rows.nbytes))
            if not way.is_mapped:
                first = arrived.rows.address[largest]
                segments = [each.segment for each in self.staging.memory.values()]
                (segment,) = [
                    each for each in segments if each.start <= first < each.start + each.nbytes
                ]
                segment.bytes[int(first) - segment.start] ^= 1
            else:
                source["large"][0] ^= 1
        copy(self, deadline, check)

    with connected(way, source, sink) as (publisher, replica):
        monkeypatch.setattr(Incoming, "copy", spoiled)
        (error,) = taken(publisher, 1, replica)
        assert isinstance(error, DigestMismatch)
        assert replica.version is None
        monkeypatch.undo()
        (report,) = taken(publisher, 2, replica)
        assert report.version == 2
        assert same(sink, source)


def pair(processes, way, shapes=LARGE, **options):
    """Return a trainer and an engine of it in processes, both with version 1."""
    trainer = processes.trainer(shapes=shapes, make=way.make_words, **way.publisher, **options)
    address = trainer.told()
    engine = processes.engine(address, name="engine", shapes=shapes, **way.replica)
    engine.told()
    check_next_update([trainer], [engine], 1)
    return trainer, engine, address


def test_a_dead_holder_ends_it_and_its_successor_goes_on(processes, way):
    trainer, engine, address = pair(processes, way)
    engine.send(("update", {"timeout_seconds": LIMIT, "stop_at": "leased"}))
    trainer.send(("publish in the background", 2, {"waiting": 1, "timeout_seconds": LIMIT}))
    assert engine.told() == "leased"
    trainer.kill()
    trainer.join()
    engine.send("go on")
    found = engine.told()
    assert "PeerLost" in found["error"]
    check_holds(found, 1)
    again = processes.trainer(address, shapes=LARGE, make=way.make_words, **way.publisher)
    again.told()
    check_next_update([again], [engine], 1)


def test_a_holder_that_stops_ends_it_at_the_deadline(processes, way):
    trainer, engine, _ = pair(processes, way)
    engine.send(("update", {"timeout_seconds": 1, "stop_at": "leased"}))
    trainer.send(("publish", 2, {"waiting": 1, "timeout_seconds": LIMIT}))
    assert engine.told() == "leased"
    trainer.stop()
    engine.send("go on")
    found = engine.told()
    if way.is_mapped and found["error"] is None:
        check_holds(found, 2)  # mapped memory and its digests are there without the holder
    else:
        check_holds(found, 1)
        assert found["error"]
    trainer.go_on()
    assert not isinstance(trainer.told(), FlyweightError)
    check_next_update([trainer], [engine], 3)


def test_a_reader_that_dies_in_the_middle_costs_the_holder_nothing(processes, way):
    trainer, engine, address = pair(processes, way)
    other = processes.engine(address, name="other", shapes=LARGE, **way.replica)
    other.told()
    engine.send(("update", {"timeout_seconds": LIMIT, "stop_at": "leased"}))
    other.send(("update", {"version": 2, "timeout_seconds": LIMIT}))  # not 1, from the engine
    trainer.send(("publish", 2, {"waiting": 2, "timeout_seconds": 600}))  # it would hang
    assert engine.told() == "leased"
    engine.kill()
    check_holds(other.told(), 2)
    assert "engine" not in trainer.told().pending
    check_next_update([trainer], [other], 3)


def test_updates_and_failed_attempts_leave_nothing_behind(way, collected):
    source = odd_arrays(way.make)
    sink = zeros_of(source)
    with connected(way, source, sink) as (publisher, replica):

        def attempts(first):
            for version in range(first, first + 8, 2):
                assert taken(publisher, version, replica)[0].version == version
                with at("leased", once(lambda: np.negative(source["half"], out=source["half"]))):
                    (error,) = taken(publisher, version + 1, replica)
                assert isinstance(error, DigestMismatch)
            assert taken(publisher, first + 8, replica)[0].version == first + 8
            gc.collect()

        attempts(1)
        before = resources()
        attempts(20)
        assert settled(before) == before
