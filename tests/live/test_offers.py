"""Which blocks lie in one allocation of a device, by a driver that is made up."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.live import lanes


def row_by_row(allocation_at, low, high):
    number, end = -1, 0
    found = np.empty(len(low), np.int64)
    for row in np.argsort(low, kind="stable").tolist():
        first, last = int(low[row]), int(high[row])
        if first >= end:
            allocation = allocation_at(0, first)
            number, end = number + 1, allocation.start + allocation.nbytes
        while last > end:
            allocation = allocation_at(0, end)
            end = allocation.start + allocation.nbytes
        found[row] = number
    return found


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=20),
)
def test_blocks_of_one_allocation_and_of_those_that_share_a_block_count_as_one(sizes, blocks):
    ends = np.cumsum(sizes)
    asked = []

    def allocation_at(device, address):
        asked.append(address)
        number = int(np.searchsorted(ends, address, side="right"))
        return SimpleNamespace(start=int(ends[number]) - sizes[number], nbytes=sizes[number])

    total = int(ends[-1])
    low = np.array([start % total for start, _ in blocks], np.int64)
    high = np.minimum(low + np.array([size for _, size in blocks], np.int64), total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes.driver, "allocation_at", allocation_at)
        found = lanes.allocations_of(0, low, high)
        num_asked = len(asked)
    assert num_asked <= len(sizes)
    assert found.tolist() == row_by_row(allocation_at, low, high).tolist()
