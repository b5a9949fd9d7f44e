"""What every source and every sink promises: models of each framework, and opened files."""

import numpy as np
import paddle
import pytest
import torch

import flyweight as fw
from flyweight.adapters.adapt import adapt
from flyweight.spec.box import Box

SHAPE = (6, 4, 5)
VALUES = np.arange(120, dtype=np.float32).reshape(SHAPE)
BOXES = [Box.whole(SHAPE), Box((2, 0, 0), (3, 4, 5)), Box((1, 1, 2), (4, 2, 3)), Box((5, 3, 4), (1, 1, 1)),
         Box((0, 0, 0), (0, 4, 5))]  # fmt: skip
MODELS = {
    "numpy": lambda: {"w": VALUES.copy()},
    "numpy, strided": lambda: {"w": VALUES.transpose(2, 0, 1).copy().transpose(1, 2, 0)},
    "torch": lambda: {"w": torch.from_numpy(VALUES.copy())},
    "torch, strided": lambda: {"w": torch.from_numpy(VALUES.copy()).permute(1, 2, 0).contiguous().permute(2, 0, 1)},
    "paddle": lambda: {"w": paddle.to_tensor(VALUES.copy())},
}  # fmt: skip


FILES = {
    "snapshot": "run",
    "huggingface": "hf",
    "torch distributed": "dcp",
    "Paddle distributed": "paddle",
}


@pytest.fixture(params=[*MODELS, *FILES])
def source(request, tmp_path):
    if request.param in MODELS:
        yield adapt(MODELS[request.param]())
        return
    fw.save({"w": VALUES}, tmp_path / "run")
    if request.param != "snapshot":
        fw.convert(tmp_path / "run", tmp_path / FILES[request.param], to=FILES[request.param])
    with fw.open(tmp_path / FILES[request.param]) as opened:
        yield opened


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_source_reads_any_box_row_major(source, box):
    expected = VALUES[box.slices].tobytes()
    assert source.read("w", box).tobytes() == expected
    into = np.zeros(1000, np.uint8)
    assert source.read("w", box, into=into).tobytes() == expected


def test_a_source_reads_the_whole_tensor_by_default(source):
    assert source.read("w").tobytes() == VALUES.tobytes()
    assert str(source.manifest.spec("w")) == "f32[6, 4, 5]"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_sink_takes_any_box_and_touches_nothing_else(kind, box):
    sink = adapt(MODELS[kind]())
    fresh = np.random.default_rng(0).random(box.shape).astype(np.float32)
    (block,) = sink.blocks("w")
    block.write(box, fresh.reshape(-1).view(np.uint8))
    sink.settle()
    expected = VALUES.copy()
    expected[box.slices] = fresh
    assert sink.read("w").tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", MODELS)
def test_a_sink_shows_its_own_memory(kind):
    sink = adapt(MODELS[kind]())
    (block,) = sink.blocks("w")
    block.items()[0, 0, 0] = 7
    assert sink.read("w").view(np.uint32)[0] == 7
