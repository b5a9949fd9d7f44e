"""Buckets hold every item once, in order, and never more than they may."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import SpecError
from flyweight.plans.buckets import pack
from flyweight.spec.box import strides_of

SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8])),
    max_size=8,
)


def flat_items(shape, box):
    strides = strides_of(shape)
    start = sum(a * b for a, b in zip(box.offset, strides, strict=True))
    return range(start, start + box.num_elements)


@given(shapes=SHAPES, bucket_bytes=st.integers(8, 400), align_bytes=st.sampled_from([1, 4, 8]))
def test_every_item_is_in_one_bucket_in_order_and_none_overlap(shapes, bucket_bytes, align_bytes):
    seen = [[] for _ in shapes]
    for bucket in pack(shapes, bucket_bytes=bucket_bytes, align_bytes=align_bytes):
        assert bucket
        end = 0
        for piece in bucket:
            shape, width = shapes[piece.index]
            assert piece.at % align_bytes == 0
            assert piece.at >= end
            end = piece.at + piece.box.num_elements * width
            assert end <= bucket_bytes
            # A piece is one contiguous stretch of its block, so the flat items are all of it.
            seen[piece.index] += flat_items(shape, piece.box)
    for (shape, _), items in zip(shapes, seen, strict=True):
        total = 1
        for size in shape:
            total *= size
        assert items == list(range(total))


def test_small_blocks_share_a_bucket_and_large_ones_are_cut():
    buckets = list(pack([((2,), 4), ((3,), 4), ((100,), 4)], bucket_bytes=256, align_bytes=16))
    assert [piece.index for piece in buckets[0]][:2] == [0, 1]
    assert len(buckets) == 2
    assert sum(p.box.num_elements for b in buckets for p in b if p.index == 2) == 100


@pytest.mark.parametrize(("bucket_bytes", "align_bytes"), [(8, 16), (0, 1), (4, 0)])
def test_a_bucket_that_holds_no_piece_is_refused(bucket_bytes, align_bytes):
    with pytest.raises(SpecError, match=f"buckets of {bucket_bytes} bytes"):
        list(pack([((1,), 1)], bucket_bytes=bucket_bytes, align_bytes=align_bytes))


def test_an_item_wider_than_a_bucket_is_refused():
    with pytest.raises(SpecError, match="items of 16 bytes"):
        list(pack([((1,), 16)], bucket_bytes=8, align_bytes=1))
