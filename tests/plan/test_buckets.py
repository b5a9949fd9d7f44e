import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import SpecError
from flyweight.plan.buckets import pack


@given(
    st.lists(st.integers(0, 300), max_size=30),
    st.integers(1, 200),
    st.sampled_from([1, 2, 8, 64]),
)
def test_buckets_hold_every_byte_once_in_order_aligned_and_in_bounds(sizes, bucket_bytes, align):
    if bucket_bytes < align:
        with pytest.raises(SpecError):
            list(pack(sizes, bucket_bytes=bucket_bytes, align_bytes=align))
        return
    seen = []
    for bucket in pack(sizes, bucket_bytes=bucket_bytes, align_bytes=align):
        assert bucket
        end = 0
        for piece in bucket:
            assert piece.at % align == 0
            assert piece.at >= end
            end = piece.at + piece.nbytes
            seen += [(piece.index, piece.start + i) for i in range(piece.nbytes)]
        assert end <= bucket_bytes
    assert seen == [(index, i) for index, size in enumerate(sizes) for i in range(size)]


def test_a_tensor_larger_than_a_bucket_is_split():
    buckets = list(pack([250], bucket_bytes=100))
    assert [[(p.start, p.nbytes) for p in b] for b in buckets] == [
        [(0, 100)],
        [(100, 100)],
        [(200, 50)],
    ]
