import numpy as np
import pytest

from flyweight.live import buckets
from flyweight.live.buckets import buckets_of

SHAPES = [
    [(4, 4, 4)],
    [(1, 1, 1)],
    [(1, 5, 7), (1, 1, 33), (2, 9, 11), (1, 1, 1)],
    [(1, 0, 3), (1, 2, 3), (64, 1, 64)],
    [(3, 17, 5)] * 9,
    [(1, 1, 0)],
]


@pytest.mark.parametrize("slot_bytes", [64, 256, 1024, 1 << 20])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("width", [1, 2, 8])
def test_buckets_hold_each_item_of_each_row_once(shapes, width, slot_bytes, monkeypatch):
    monkeypatch.setattr(buckets, "SLOT_BYTES", slot_bytes)
    rows = [np.zeros(shape, int) for shape in shapes]
    found = buckets_of(np.array(shapes), np.full(len(shapes), width))
    for each in found:
        ends = each.start + each.shape.prod(axis=1) * width
        assert (each.start[1:] >= ends[:-1]).all()  # no piece lies in another one
        assert each.start[0] == 0
        assert ends[-1] <= slot_bytes
        for row, offset, shape in zip(each.row, each.offset, each.shape, strict=True):
            rows[row][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))] += 1
    assert all((each == 1).all() for each in rows)
