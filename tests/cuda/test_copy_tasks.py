"""Tables of device copies against the same copies one by one; no device is needed."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flyweight.cuda.copy_tasks import copy_tasks, driver_dims, kernel_rows, run_bytes
from flyweight.errors import SpecError
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable

ADDRESSES = st.builds(
    lambda line, byte: 16 * line + byte,
    st.integers(1, 1 << 40),
    st.sampled_from([0, 0, 0, 8, 4, 1]),
)


@st.composite
def strides(draw, shape, width):
    """Draw the strides of items in some order of the dims, with gaps here and there."""
    found, step = [0] * len(shape), width
    for dim in draw(st.permutations(range(len(shape)))):
        step *= draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
        found[dim] = draw(st.just(step) if shape[dim] != 1 else st.integers(-9, 9 * width))
        step *= max(shape[dim], 1)
    return tuple(found)


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8]), max_size=4)))
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    sink, source = draw(strides(shape, width)), draw(strides(shape, width))
    if draw(st.booleans()):
        source = sink  # contiguous in the same order at both ends, more often than by chance
    devices = st.sampled_from([None, 0, 0, 0, 1])
    return tuple(
        Buffer(draw(ADDRESSES), shape, each, width, None, device=draw(devices))
        for each in (sink, source)
    )


def tables(copies):
    return tuple(BufferTable.of([pair[side] for pair in copies]) for side in (0, 1))


def run_of(sink, source):
    dims = driver_dims(sink, source)
    return 0 if dims is None else dims[1][-1][0]


def is_kernels(sink, source, most_bytes):
    dims = driver_dims(sink, source)
    return (
        dims is not None
        and not dims[0]
        and len(dims[1]) == 1
        and dims[1][0][0] < most_bytes
        and sink.device == source.device == 0
        and sink.address % 16 == source.address % 16 == 0
    )


@given(st.lists(pairs(), max_size=12), st.sampled_from([1, 16, 40, 1 << 62]))
def test_each_row_is_what_the_copy_is_alone(copies, most_bytes):
    sink, source = tables(copies)
    assert run_bytes(sink, source).tolist() == [run_of(*each) for each in copies]
    found = kernel_rows(sink, source, 0, most_bytes)
    assert found.tolist() == [is_kernels(*each, most_bytes) for each in copies]


@pytest.mark.parametrize(
    ("nbytes", "to", "at", "is_kernels"),
    [
        (4095, 4096, 8192, True),
        (4096, 4096, 8192, False),
        (64, 4096, 8200, False),
        (64, 4104, 8192, False),
        (0, 4096, 8192, False),
    ],
)
def test_the_kernel_copies_small_aligned_blocks(nbytes, to, at, is_kernels):
    pair = [Buffer.flat_at(address, nbytes, None, device=0) for address in (to, at)]
    assert kernel_rows(*tables([pair]), 0, 4096).tolist() == [is_kernels]


@pytest.mark.parametrize(
    ("sink", "source", "message"),
    [
        ({"strides": (6, 2)}, {"shape": (4, 4)}, r"source is \(4, 4\) items of 2 bytes, sink is"),
        ({"item_bytes": 4, "strides": (12, 4)}, {}, r"items of 2 bytes, sink is \(4, 3\) of 4"),
        ({"strides": (0, 2)}, {}, "items of the sink share bytes"),
        ({"strides": (-6, 2)}, {}, "items of the sink share bytes"),
        ({"strides": (6, 1)}, {}, "items of the sink share bytes"),
        ({"is_writable": False}, {}, "is read-only"),
    ],
)
def test_one_wrong_row_refuses_the_table(sink, source, message):
    good = Buffer(4096, (4, 3), (6, 2), 2, None, device=0)
    copies = [(good, good), (replace(good, **sink), replace(good, **source)), (good, good)]
    with pytest.raises(SpecError, match=message):
        kernel_rows(*tables(copies), 0, 1 << 20)


def test_rows_without_items_and_sources_that_share_bytes_are_no_fault():
    empty = Buffer(4096, (0, 3), (0, 0), 2, None, device=0)
    full = Buffer(4096, (4, 3), (6, 2), 2, None, device=0)
    copies = [(empty, empty), (full, replace(full, strides=(0, 2)))]
    assert kernel_rows(*tables(copies), 0, 1 << 20).tolist() == [False, False]
    assert kernel_rows(*tables([]), 0, 1 << 20).tolist() == []


def numbers(*values):
    return tuple(np.array(each, np.int64) for each in values)


@given(st.lists(st.tuples(ADDRESSES, ADDRESSES, st.integers(1, 400))), st.integers(1, 130))
def test_tasks_are_the_copies_cut_one_by_one(copies, most_bytes):
    expected = [
        (sink + at, source + at, min(most_bytes, nbytes - at))
        for sink, source, nbytes in copies
        for at in range(0, nbytes, most_bytes)
    ]
    columns = zip(*copies, strict=True) if copies else ((), (), ())
    found = copy_tasks(*numbers(*columns), most_bytes)
    assert (found.dtype, found.shape[1], found.flags.c_contiguous) == (np.int64, 3, True)
    assert list(map(tuple, found.tolist())) == expected


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 64))
def test_tasks_copy_every_byte_once_and_no_other(sizes, most_bytes):
    nbytes = np.array(sizes, np.int64)
    starts = np.cumsum(nbytes + 1) - nbytes - 1  # a byte between two copies
    source = np.random.default_rng(0).integers(1, 256, nbytes.sum() + len(sizes), np.uint8)
    sink = np.zeros_like(source)
    tasks = copy_tasks(sink.ctypes.data + starts, source.ctypes.data + starts, nbytes, most_bytes)
    for to, at, size in tasks.tolist():
        assert 0 < size <= most_bytes
        ctypes.memmove(to, at, size)
    wanted = source.copy()
    wanted[starts + nbytes] = 0
    assert (sink == wanted).all()
