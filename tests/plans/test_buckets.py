"""Buckets hold every item once, in order, and never more than they may."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import SpecError
from flyweight.plans.buckets import pack
from flyweight.spec.box import strides_of

SHAPES = st.lists(
    st.tuples(st.tuples(*[st.integers(0, 9)] * 3), st.sampled_from([1, 2, 4, 8])), max_size=8
)


def packed(shapes, **options):
    numbers = np.arange(10, 10 + len(shapes))
    sizes = np.array([shape for shape, _ in shapes] or np.empty((0, 1)), np.int64)
    return list(pack(numbers, sizes, np.array([w for _, w in shapes], np.int64), **options))


def flat_items(shape, box):
    strides = strides_of(shape)
    start = sum(a * b for a, b in zip(box.offset, strides, strict=True))
    return range(start, start + box.num_elements)


@given(shapes=SHAPES, bucket_bytes=st.integers(8, 400), align_bytes=st.sampled_from([1, 4, 8]))
def test_every_item_is_in_one_bucket_in_order_and_none_overlap(shapes, bucket_bytes, align_bytes):
    seen = [[] for _ in shapes]
    for bucket in packed(shapes, bucket_bytes=bucket_bytes, align_bytes=align_bytes):
        assert len(bucket)
        end = 0
        for row in range(len(bucket)):
            number, box = int(bucket.block[row]) - 10, bucket.box(row)
            shape, width = shapes[number]
            assert bucket.at[row] % align_bytes == 0
            assert bucket.at[row] >= end
            end = bucket.at[row] + box.num_elements * width
            assert end <= bucket_bytes
            # A piece is one contiguous run of its block, so the flat items are all of it.
            seen[number] += flat_items(shape, box)
    for (shape, _), items in zip(shapes, seen, strict=True):
        assert items == list(range(prod(shape)))


def test_small_blocks_share_a_bucket_and_large_ones_are_cut():
    buckets = packed([((2,), 4), ((3,), 4), ((100,), 4)], bucket_bytes=256, align_bytes=16)
    assert buckets[0].block[:2].tolist() == [10, 11]
    assert len(buckets) == 2
    assert sum(int(b.shape[b.block == 12].sum()) for b in buckets) == 100


@pytest.mark.parametrize(("bucket_bytes", "align_bytes"), [(8, 16), (0, 1), (4, 0)])
def test_a_bucket_that_holds_no_piece_is_refused(bucket_bytes, align_bytes):
    with pytest.raises(SpecError, match=f"buckets of {bucket_bytes} bytes"):
        packed([((1,), 1)], bucket_bytes=bucket_bytes, align_bytes=align_bytes)


def test_an_item_wider_than_a_bucket_is_refused():
    with pytest.raises(SpecError, match="items of 16 bytes"):
        packed([((1,), 16)], bucket_bytes=8, align_bytes=1)
