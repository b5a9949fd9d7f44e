"""What every source and every sink promises. A new one joins by a line in SOURCES or SINKS."""

from contextlib import contextmanager, nullcontext

import numpy as np
import paddle
import pytest
import torch

import flyweight as fw
from fakes import ArrayModel
from flyweight.adapters.model import adapt
from flyweight.errors import SpecError
from flyweight.spec.box import Box

SHAPE = (6, 4, 5)
VALUES = np.arange(120, dtype=np.float32).reshape(SHAPE)
BOXES = [Box.whole(SHAPE), Box((2, 0, 0), (3, 4, 5)), Box((1, 1, 2), (4, 2, 3)), Box((5, 3, 4), (1, 1, 1)),
         Box((0, 0, 0), (0, 4, 5))]  # fmt: skip


def files(format):
    """Return how VALUES are read from files of a format."""

    @contextmanager
    def source(tmp_path):
        fw.save({"w": VALUES}, tmp_path / "snapshot")
        if format != "snapshot":
            fw.convert(tmp_path / "snapshot", tmp_path / format, to=format)
        with fw.open(tmp_path / format) as opened:
            yield opened

    return source


SINKS = {
    "numpy": lambda: adapt({"w": VALUES.copy()}),
    "numpy, strided": lambda: adapt({"w": VALUES.transpose(2, 0, 1).copy().transpose(1, 2, 0)}),
    "torch": lambda: adapt({"w": torch.from_numpy(VALUES.copy())}),
    "torch, strided": lambda: adapt({"w": torch.from_numpy(VALUES.copy()).permute(1, 2, 0).contiguous().permute(2, 0, 1)}),
    "paddle": lambda: adapt({"w": paddle.to_tensor(VALUES.copy())}),
    "a third party's": lambda: ArrayModel({"w": VALUES.copy()}),
}  # fmt: skip
"""Return a new sink, which is a source too, of a tensor 'w' that holds VALUES."""
SOURCES = {
    **{name: lambda _, make=make: nullcontext(make()) for name, make in SINKS.items()},
    "snapshot": files("snapshot"),
    "huggingface": files("hf"),
    "torch distributed": files("dcp"),
    "Paddle distributed": files("paddle"),
}
"""Return, for an empty directory, a context that gives a source of a tensor 'w' that is VALUES."""


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    with SOURCES[request.param](tmp_path) as source:
        yield source


@pytest.fixture(params=SINKS)
def sink(request):
    return SINKS[request.param]()


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_source_reads_any_box_row_major(source, box):
    expected = VALUES[box.slices].tobytes()
    assert source.read("w", box).tobytes() == expected
    into = np.zeros(1000, np.uint8)
    assert source.read("w", box, into=into).tobytes() == expected


def test_a_source_reads_the_whole_tensor_by_default(source):
    assert source.read("w").tobytes() == VALUES.tobytes()
    assert str(source.manifest.spec("w")) == "f32[6, 4, 5]"


def test_a_source_has_boxes_that_cover_the_tensor_once(source):
    assert sum(box.num_elements for box in source.boxes("w")) == VALUES.size
    for box in source.boxes("w"):
        assert source.read("w", box).tobytes() == VALUES[box.slices].tobytes()


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_sink_takes_any_box_and_touches_nothing_else(sink, box):
    fresh = np.random.default_rng(0).random(box.shape).astype(np.float32)
    sink.check_writable()
    (block,) = sink.blocks("w")
    block.write(box, fresh.reshape(-1).view(np.uint8))
    sink.settle()
    sink.touched()
    sink.finish(sink.manifest)
    expected = VALUES.copy()
    expected[box.slices] = fresh
    assert sink.read("w").tobytes() == expected.tobytes()


def test_a_sink_describes_its_blocks(sink):
    (block,) = sink.blocks("w")
    assert (block.box, block.spec) == (Box.whole(SHAPE), sink.manifest.spec("w"))


def test_a_sink_shows_its_own_memory(sink):
    (block,) = sink.blocks("w")
    block.items()[0, 0, 0] = 7
    assert sink.read("w").view(np.uint32)[0] == 7


@pytest.mark.parametrize("kind", [adapt, ArrayModel])
def test_a_sink_of_read_only_memory_is_refused_before_a_write(kind):
    frozen = VALUES.copy()
    frozen.flags.writeable = False
    with pytest.raises(SpecError, match="read-only"):
        kind({"w": frozen}).check_writable()
