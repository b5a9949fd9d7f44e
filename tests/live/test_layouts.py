"""Engines of every layout take one publish: fused, stacked, cut and renamed tensors."""

from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import PlanError, SpecError
from live.live_processes import TOKEN
from live.one_process import in_background
from model_layouts import LAYOUTS, MODEL, rank_tensors

ANY = "tcp://127.0.0.1:0"


@pytest.mark.parametrize("transport", ["filled", "read"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_of_a_layout_gets_what_it_holds(name, transport):
    layout = LAYOUTS[name]
    source = {key: each.copy() for key, each in MODEL.items()}
    with fw.Publisher(source, ANY, token=TOKEN, keep="in_place") as publisher, ExitStack() as stack:
        publisher.publish(1)
        ranks = range(layout.num_ranks)
        wanted = [rank_tensors(layout, rank) for rank in ranks]
        found = [{key: np.zeros_like(each) for key, each in of.items()} for of in wanted]
        updates = []
        for rank in ranks:
            replica = fw.Replica(
                found[rank], publisher.address, token=TOKEN, name="engine", transport=transport,
                layout=layout, rank=rank, world_size=layout.num_ranks,
            )  # fmt: skip
            stack.enter_context(replica)
            updates.append(
                stack.enter_context(in_background(replica.update, timeout_seconds=LIMIT))
            )
        for rank, each in enumerate(updates):
            report = each()
            assert getattr(report, "version", report) == 1
            assert report.nbytes == sum(each.nbytes for each in wanted[rank].values())
            for key, array in wanted[rank].items():
                assert found[rank][key].tobytes() == array.tobytes(), (rank, key)


def test_what_a_layout_lacks_at_the_trainer_is_refused_with_its_name():
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 1}, "rules": [{"names": ["q", "k"], "local": "qk"}]}'
    )
    with (
        fw.Publisher({"q": np.zeros((2, 2))}, ANY, token=TOKEN) as publisher,
        pytest.raises(PlanError, match="qk"),
    ):
        fw.Replica({"qk": np.zeros((4, 2))}, publisher.address, token=TOKEN, layout=layout, rank=0)


def test_a_publisher_alone_that_has_a_part_of_a_tensor_is_refused_with_the_recipe(address):
    source = {"a": fw.Sharded(np.zeros((8, 2)), (8, 6), (0, 0)), "b": np.zeros(3)}
    with pytest.raises(PlanError, match="'a'; .*process_group="):
        fw.Publisher(source, address)


def test_tied_tensors_of_both_sides_go_once(address):
    one, other = np.arange(5.0), np.zeros(5)
    with (
        fw.Publisher({"a": one, "b": one}, address, keep="memory") as publisher,
        fw.Replica({"a": other, "b": other}, address) as replica,
    ):
        publisher.publish(1)
        assert replica.update(timeout_seconds=LIMIT).nbytes == 40
    assert (other == one).all()


@pytest.mark.parametrize("size", [3, 1000])
def test_one_memory_for_two_parts_of_what_is_whole_is_refused(address, size):
    memory = np.zeros((1, size))
    target = {
        name: fw.Sharded(memory, shape=(2, size), offset=(row, 0))
        for row, name in enumerate(("a", "b"))
    }
    with pytest.raises(SpecError, match="'a' and 'b' share"):
        fw.Replica(target, address)
    assert not memory.any()
