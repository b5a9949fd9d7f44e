"""Layouts of two sides: boxes, shards and ranks that differ, and what does not fit."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import (
    DTypeMismatch,
    PlanError,
    ShapeMismatch,
    SpecError,
)
from live_rounds import (
    SIZES,
    updated,
)


def cut(array, dim, pieces, piece):
    size = array.shape[dim] // pieces
    index = [slice(None)] * array.ndim
    index[dim] = slice(size * piece, size * (piece + 1))
    local = np.zeros_like(array[tuple(index)])
    offset = [0] * array.ndim
    offset[dim] = size * piece
    return fw.Sharded(local, array.shape, offset), tuple(index)


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 2}, {"hold": True}], ids=str
)
def test_replicas_of_different_layouts_take_one_publish(address, threads, options):
    whole = np.random.default_rng(1).random((64, 48))
    wanted, engines = [], []
    for dim, piece in ((0, 0), (0, 1), (1, 0), (1, 1)):
        shard, index = cut(whole, dim, 2, piece)
        engines.append({"w": shard})
        wanted.append(whole[index])
    engines.append({"w": np.zeros_like(whole)})
    wanted.append(whole)
    with fw.Publisher({"w": whole}, address, **options) as publisher:
        replicas = [fw.Replica(engine, address) for engine in engines]
        futures = [threads.submit(r.update, timeout_seconds=LIMIT) for r in replicas]
        report = publisher.publish(1, num_replicas=5)
        for future in futures:
            future.result(LIMIT)
        assert len(report.replicas) == 5
        assert report.failed == ()
        for engine, want in zip(engines, wanted, strict=True):
            held = engine["w"]
            held = held.tensor if isinstance(held, fw.Sharded) else held
            assert held.tobytes() == want.tobytes()
        for replica in replicas:
            replica.close()


def test_a_publisher_alone_that_has_a_part_of_a_tensor_is_refused_with_the_recipe(address):
    source = {"a": fw.Sharded(np.zeros((8, 2)), (8, 6), (0, 0)), "b": np.zeros(3)}
    with pytest.raises(PlanError, match="'a'; .*process_group="):
        fw.Publisher(source, address)


def test_a_layout_says_what_a_rank_wants(address, threads):
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"0": "tp"}}]}'
    )
    whole = np.arange(24.0).reshape(6, 4)
    halves = [{"w": np.zeros((3, 4))} for _ in range(2)]
    with fw.Publisher({"w": whole}, address) as publisher:
        replicas = [
            fw.Replica(half, address, layout=layout, rank=rank) for rank, half in enumerate(halves)
        ]
        futures = [threads.submit(r.update, timeout_seconds=LIMIT) for r in replicas]
        publisher.publish(1, num_replicas=2)
        for future, replica in zip(futures, replicas, strict=True):
            future.result(LIMIT)
            replica.close()
    assert np.concatenate([half["w"] for half in halves]).tobytes() == whole.tobytes()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_boxes_of_any_tensors_arrive(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["u1", "u2", "f4", "c16"]))
    whole = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    whole = whole.view(dtype).reshape(shape)
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(
        data.draw(st.integers(1, size - at)) for size, at in zip(shape, offset, strict=True)
    )
    local = np.zeros(box, dtype)
    if data.draw(st.booleans()):
        local = np.asfortranarray(local)
    bucket_bytes = data.draw(st.sampled_from([4096, 1 << 20]))
    address = f"unix:{tmp_path_factory.mktemp('p')}/policy"
    index = tuple(slice(a, a + n) for a, n in zip(offset, box, strict=True))
    with (
        fw.Publisher({"w": whole}, address, bucket_bytes=bucket_bytes) as publisher,
        fw.Replica({"w": fw.Sharded(local, shape, offset)}, address) as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        updated(pool, publisher, replica, 1)
    assert local.tobytes() == whole[index].tobytes()


def test_what_does_not_fit_is_refused_before_anything_moves(address):
    have = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    with fw.Publisher(have, address):
        cases = [
            (
                {**have, "x": np.zeros(1)},
                PlanError,
                "lacks: 'x'",
            ),
            ({**have, "b": np.zeros(3)}, DTypeMismatch, "'b' is f32.* f64"),
            ({**have, "w": np.zeros((3, 2), np.float32)}, ShapeMismatch, r"\(2, 3\).*\(3, 2\)"),
            ({"w": have["w"]}, PlanError, "lacks: 'b'"),
        ]
        for target, kind, text in cases:
            with pytest.raises(kind, match=text):
                fw.Replica(target, address)
        fw.Replica({"w": np.zeros((2, 3), np.float32)}, address, extra="report").close()


def test_tied_tensors_of_both_sides_go_once(address, threads):
    one, other = np.arange(5.0), np.zeros(5)
    with (
        fw.Publisher({"a": one, "b": one}, address) as publisher,
        fw.Replica({"a": other, "b": other}, address) as replica,
    ):
        report, _ = updated(threads, publisher, replica, 1)
    assert report.nbytes == 40
    assert (other == one).all()


@pytest.mark.parametrize("size", SIZES)
def test_one_memory_for_two_parts_of_what_is_whole_is_refused(address, tmp_path, size):
    memory = np.zeros((1, size))
    target = {
        name: fw.Sharded(memory, shape=(2, size), offset=(row, 0))
        for row, name in enumerate(("a", "b"))
    }
    fw.save({"a": np.ones((2, size)), "b": np.ones((2, size))}, tmp_path / "run", version=1)
    for take in (
        lambda: fw.load(tmp_path / "run", into=target),
        lambda: fw.Replica(target, address),
    ):
        with pytest.raises(SpecError, match="'a' and 'b' share"):
            take()
    assert not memory.any()
