"""Rows of any memory are copied, cast, digested, and served in any range."""

from time import monotonic

import numpy as np
import pytest

from child_processes import LIMIT
from flyweight.casts import BF16, F32, cast
from flyweight.digest import digest
from flyweight.errors import TransferTimeout
from flyweight.live.catalog import Catalog, Devices
from flyweight.live.offer import Offer, OfferMemory
from flyweight.live.plan import Wanted, make_plan
from flyweight.live.publish_id import PublishId
from flyweight.live.rows import RowCopies, RowDigests
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable
from flyweight.plans.copy_table import BoxTable
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec

KINDS = ("words", "xxh3")


def buffer_of(array):
    return Buffer(array.ctypes.data, array.shape, array.strides, array.itemsize, array)


def table_of(arrays):
    return BufferTable.of([buffer_of(each) for each in arrays])


def as_bytes(array):
    return np.frombuffer(array.tobytes(), np.uint8)


def as_bf16(array):
    """Return the bytes that a cast of float32 values to bfloat16 gives."""
    found = np.empty(2 * array.size, np.uint8)
    cast(as_bytes(array), found, (F32, BF16))
    return found


def rows(seed):
    """Return arrays of any size and order: small and large, contiguous and not."""
    rng = np.random.default_rng(seed)
    flat = [rng.integers(0, 256, size, np.uint8) for size in (0, 1, 7, 131_072, 131_073, 9 << 20)]
    small = [rng.random((5, n)).astype(np.float32) for n in range(300)]
    square = rng.random((1500, 1500))
    return [*flat, *small, square, square.T.copy().T, square[:9, ::2], square[::2, 1::3]]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_copied_and_digested_where_they_were_written(kind):
    sources = rows(0)
    sinks = [np.zeros_like(each) for each in sources]
    sinks[-4] = np.zeros((1500, 1500), order="F")
    sinks[-2] = np.zeros((9, 1500))[:, ::2]
    # Tensors that are one here and differ there have the digest of what is here in the end.
    sinks += [sinks[6], sinks[-1]]
    sources += [sources[6] + 1, sources[-1] + 1]
    copies = RowCopies(table_of(sinks), table_of(sources), kind)
    for n in range(2):
        assert copies.start(should_digest=False)(monotonic() + LIMIT) is None
        sources[1][:] = n
        found = copies.start(should_digest=True)(monotonic() + LIMIT).tolist()
        assert all(np.array_equal(*each) for each in zip(sinks[:6], sources[:6], strict=True))
        assert all(np.array_equal(*each) for each in zip(sinks[7:-3], sources[7:-3], strict=True))
        expected = [digest(as_bytes(each), kind) for each in sinks]
        assert found == expected
        assert RowDigests(table_of(sinks), kind).run(monotonic() + LIMIT)[0].tolist() == expected
    with pytest.raises(TransferTimeout):
        copies.start(should_digest=True)(monotonic() - 1)
    copies.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_cast_have_the_digests_of_the_cast_before_and_after(kind):
    sources = [np.float32(each) for each in rows(1)[6:]] + [np.full(3, 3.4e38, np.float32)]
    sinks = [np.zeros(each.shape, np.float32 if n % 3 == 0 else np.uint16)
             for n, each in enumerate(sources)]  # fmt: skip
    pairs = np.array([(-1, -1) if n % 3 == 0 else (F32, BF16) for n in range(len(sources))])
    pairs[-1], sinks[-1] = (F32, BF16), np.zeros(3, np.uint16)
    digests = RowDigests(table_of(sources), kind, pairs)
    copies = RowCopies(table_of(sinks), table_of(sources), kind, pairs)
    expected = [
        digest(as_bytes(each) if pair[0] < 0 else as_bf16(each), kind)
        for each, pair in zip(sources, pairs, strict=True)
    ]
    for _ in range(2):
        found, overflows = digests.run(monotonic() + LIMIT)
        assert found.tolist() == expected
        assert overflows == 3  # values that are finite, and infinite as bfloat16
        assert copies.start(should_digest=True)(monotonic() + LIMIT).tolist() == expected
        assert copies.overflows == 3


def offered(arrays, dtypes):
    """Return an offer of arrays to a reader that wants them in some dtypes; -1 is as they are."""
    specs = {f"t{n}": TensorSpec(DTYPES[kind], each.shape) for n, (kind, each) in enumerate(arrays)}
    boxes, zeros = BoxTable.whole(specs.values()), np.zeros(len(arrays), np.int64)
    devices = Devices(("",), zeros)
    catalog, (blocks,) = Catalog.joined([Catalog(specs, {}, boxes, zeros, devices)], [{}])
    plan = make_plan(catalog, Wanted(boxes, np.array(dtypes), devices, "xxh3"))
    memory = table_of([each for _, each in arrays]).widened(boxes.num_dims).take(blocks)
    offer = Offer(
        PublishId("1", 1), OfferMemory.of_model(0, memory), until=None, should_verify=True
    )
    return offer, plan


def test_any_range_of_a_stream_is_what_lies_there_views_and_copies():
    rng = np.random.default_rng(2)
    beside = rng.random(60).astype(np.float32)  # three rows, one after the other
    square = rng.random((6, 5)).astype(np.float32)
    arrays = [
        ("f32", beside[:20]), ("f32", beside[20:50]), ("f32", beside[50:]),
        ("u8", rng.integers(0, 256, 7, np.uint8)),
        ("f32", square.T), ("f32", square), ("f32", square[::2, 1::2]), ("f32", square[0, 0:1]),
        ("u8", rng.integers(0, 256, (3, 3), np.uint8).T), ("f32", beside[3:5]),
    ]  # fmt: skip
    dtypes = [-1, -1, -1, -1, BF16, BF16, -1, BF16, -1, -1]
    offer, plan = offered(arrays, dtypes)
    casts = zip(arrays, dtypes, strict=True)
    stream = b"".join(
        (as_bytes(each) if to < 0 else as_bf16(each)).tobytes() for (_, each), to in casts
    )
    assert plan.streams[0].total == len(stream)
    for start in range(len(stream)):
        for stop in {*range(start + 1, min(start + 12, len(stream))), start + 150, len(stream)}:
            parts = offer.parts(plan, 0, start, min(stop, len(stream)))
            assert b"".join(each.tobytes() for each in parts) == stream[start:stop], (start, stop)
    first, *_ = offer.parts(plan, 0, 4, 240)
    assert np.shares_memory(first, beside)
    assert len(offer.parts(plan, 0, 4, 240)) == 1
    sink = np.zeros(len(stream), np.uint8)
    offer.copies(plan, 0, sink).start(should_digest=False)(monotonic() + LIMIT)
    assert sink.tobytes() == stream
