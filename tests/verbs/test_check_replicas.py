"""Tensors that several ranks hold alike: a save compares all their bytes, or samples if asked to."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import PeerFailed, PlanError, SpecError
from rank_processes import run_ranks

ROWS, COLUMNS = 768, 4096
FAR = (ROWS // 16, COLUMNS // 2)
"""An element of a tensor of 12 MiB that no sample comes near: eight of 4 KiB are spread evenly."""


def replicas(version):
    """Every rank's weights: in rows, in columns, and many that are small."""
    generator = torch.Generator().manual_seed(version)
    rows = torch.randn(ROWS, COLUMNS, generator=generator)
    state = {"rows": rows, "columns": torch.randn(COLUMNS, ROWS, generator=generator).t()}
    return state | {f"small.{n}": torch.full((n, 3), float(version)) for n in range(1, 40)}


def loaded(run):
    """Return the newest version, which is whole and right."""
    target = {name: torch.zeros_like(tensor) for name, tensor in replicas(0).items()}
    version = fw.load(run, into=target).version
    assert all(torch.equal(target[name], each) for name, each in replicas(version).items())
    return version


def save(state, run, background=False, **options):
    handle = fw.save_state_dict(state, run, background=background, timeout_seconds=LIMIT, **options)
    return handle.wait(LIMIT) if background else handle


def check_refusal(text, name, odd):
    """The error names the tensor, its writer, another holder and the digests of both."""
    found = re.search(
        rf"'{name}' .* has digest ([0-9a-f]{{16}}) on rank (\d) and ([0-9a-f]{{16}}) on rank (\d)",
        text,
    )
    assert found, text
    assert found[1] != found[3]
    assert odd in (int(found[2]), int(found[4])), text


def one_element(rank, num_ranks, root, background):
    background = background == "True"
    group = torch.distributed.group.WORLD
    run = Path(root) / "run"
    save(replicas(1), run, background, version=1)
    for odd, name in enumerate(("rows", "rows", "columns")):
        state = replicas(2)
        if rank == odd:
            state[name][FAR] += 1
        with pytest.raises(fw.FlyweightError) as caught:
            save(state, run, background, version=2)
        assert isinstance(caught.value, PlanError if rank == 0 else PeerFailed)
        check_refusal(str(caught.value), name, odd)
        torch.distributed.barrier()
        assert fw.versions(run) == [1]
        assert loaded(run) == 1
        torch.distributed.barrier()
    with pytest.raises(fw.FlyweightError, match="'columns' .* has digest"):
        fw.save(state, run, process_group=group, version=2, timeout_seconds=LIMIT)
    save(state, run, background, version=2, check_replicas="sampled")
    assert fw.versions(run) == [1, 2]
    save(replicas(3), run, background, version=3)
    assert loaded(run) == 3


@pytest.mark.check
@pytest.mark.parametrize("background", [False, True])
def test_a_difference_of_one_element_is_refused_on_every_rank(tmp_path, background):
    """C35: replicated shards are written once, so they must be the same."""
    run_ranks(3, __file__, "one_element", tmp_path, background)


def changed_meanwhile(rank, num_ranks, root):
    run = Path(root) / "run"
    state = replicas(1)
    handle = fw.save_state_dict(state, run, background=True, timeout_seconds=LIMIT)
    for each in state.values():
        each.add_(1 + rank)  # training goes on, and the ranks are out of step with each other
    handle.wait(LIMIT)
    state = replicas(2)
    state["rows"][FAR] += rank
    handle = fw.save_state_dict(state, run, background=True, timeout_seconds=LIMIT)
    state["rows"][FAR] -= rank
    with pytest.raises(fw.FlyweightError, match="'rows' .* has digest"):
        handle.wait(LIMIT)


def test_a_save_in_the_background_compares_what_it_saves(tmp_path):
    """C40: the model may change once the call has returned, differently on every rank."""
    run_ranks(2, __file__, "changed_meanwhile", tmp_path)
    target = {name: torch.zeros_like(tensor) for name, tensor in replicas(0).items()}
    assert fw.load(tmp_path / "run", into=target).version == 0
    assert all(torch.equal(target[name], each) for name, each in replicas(1).items())


def disagreed(rank, num_ranks, root):
    with pytest.raises(
        fw.FlyweightError, match="rank 1 .* check_replicas='sampled'; rank 0 .*'digest'"
    ):
        save(replicas(1), Path(root), check_replicas="sampled" if rank == 1 else "digest")


def test_ranks_that_compare_differently_are_told(tmp_path):
    run_ranks(2, __file__, "disagreed", tmp_path)
    assert fw.versions(tmp_path) == []


@pytest.mark.parametrize("value", [None, "", "full", 1, True, ["digest"], b"digest", np.zeros(2)])
@pytest.mark.parametrize("call", [fw.save, fw.save_state_dict])
def test_another_way_to_compare_is_refused_with_those_that_exist(tmp_path, call, value):
    with pytest.raises(SpecError, match="check_replicas is .*, not 'digest' or 'sampled'"):
        call({"w": np.zeros(3)}, tmp_path / "run", check_replicas=value)
    assert not list(tmp_path.iterdir())
