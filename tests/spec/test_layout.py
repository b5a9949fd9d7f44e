from collections import Counter
from itertools import product
from math import prod

import pytest

from flyweight.errors import SpecError
from flyweight.spec.layout import Layout


def boxes(layout, shape):
    return [layout.box(rank, shape) for rank in range(layout.num_ranks)]


@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 5, 2)])
@pytest.mark.parametrize("tp", [1, 2, 3, 5])
@pytest.mark.parametrize("fsdp", [1, 2, 4])
def test_a_two_axis_cut_covers_every_element_once(shape, tp, fsdp):
    for dim_tp, dim_fsdp in product(range(len(shape)), repeat=2):
        cuts = (
            {dim_tp: ("tp", "fsdp")}
            if dim_tp == dim_fsdp
            else {dim_tp: ("tp",), dim_fsdp: ("fsdp",)}
        )
        layout = Layout({"fsdp": fsdp, "tp": tp}, cuts)
        seen = Counter()
        for box in boxes(layout, shape):
            seen.update(i for at, n in box.runs(shape) for i in range(at, at + n))
        assert seen == Counter(range(prod(shape)))


def test_an_axis_that_cuts_nothing_replicates():
    held = boxes(Layout({"dp": 2, "tp": 2}, {0: ("tp",)}), (4, 3))
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert held[0] != held[1]


def test_the_last_rank_is_short_and_later_ones_are_empty():
    shapes = [box.shape for box in boxes(Layout({"tp": 4}, {0: ("tp",)}), (5,))]
    assert shapes == [(2,), (2,), (1,), (0,)]


def test_cuts_are_those_of_torch_chunk():
    import torch

    for size, pieces in product(range(1, 12), range(1, 6)):
        ours = [box.shape[0] for box in boxes(Layout({"tp": pieces}, {0: ("tp",)}), (size,))]
        theirs = [len(chunk) for chunk in torch.arange(size).chunk(pieces)]
        assert [n for n in ours if n] == theirs


@pytest.mark.parametrize(
    ("axes", "cuts"),
    [({"tp": 2}, {0: ("dp",)}), ({"tp": 2}, {0: ("tp",), 1: ("tp",)}), ({"tp": 0}, {})],
)
def test_a_layout_that_describes_nothing_is_refused(axes, cuts):
    with pytest.raises(SpecError):
        Layout(axes, cuts)


def test_a_rank_or_dim_outside_is_refused():
    layout = Layout({"tp": 2}, {1: ("tp",)})
    with pytest.raises(SpecError, match="rank 2 of a mesh of 2 ranks"):
        layout.box(2, (4, 4))
    with pytest.raises(SpecError, match=r"cuts dims \[1\] of a tensor of \(4,\)"):
        layout.box(0, (4,))
