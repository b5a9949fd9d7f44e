"""Tensors of which only a GPU's address is known: what Paddle's are, here with torch's memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flyweight.adapters import torch_module  # noqa: E402
from flyweight.adapters.paddle_layer import CudaDevice  # noqa: E402
from flyweight.spec.box import Box  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

TENSORS = {
    "rows": lambda: torch.arange(6000, device="cuda", dtype=torch.float32).reshape(60, 100),
    "turned": lambda: torch.arange(600, device="cuda").reshape(20, 30).t(),
    "strided": lambda: torch.arange(4096, device="cuda", dtype=torch.int16).view(64, 64)[::2, 1::3],
    "half": lambda: torch.randn(33, 65, device="cuda").bfloat16(),
    "scalar": lambda: torch.tensor(7.0, device="cuda"),
}


def by_address(tensor):
    memory = torch_module.tensor_of(tensor).memory
    return CudaDevice(memory.device), memory


def raw(tensor):
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TENSORS)
def test_boxes_are_read_and_written_by_address(name):
    """C11: every box by the driver alone, of any stride."""
    tensor, target = TENSORS[name](), torch.zeros_like(TENSORS[name]())
    (device, source), (_, sink) = by_address(tensor), by_address(target)
    shape = tuple(tensor.shape)
    boxes = [Box.whole(shape)]
    if shape:
        corner = tuple(size // 3 for size in shape)
        boxes.append(Box(corner, tuple(s - c - 1 for s, c in zip(shape, corner, strict=True))))
    for box in boxes:
        target.zero_()
        data = np.empty(box.num_elements * tensor.element_size(), np.uint8)
        device.read(source.block(box), data, should_wait=True)
        block = tensor[(Ellipsis, *box.slices)]
        assert data.tobytes() == raw(block)
        device.settle()
        device.write(sink.block(box), data)
        assert raw(target[(Ellipsis, *box.slices)]) == raw(block)
        assert int((target != 0).sum()) == int((block != 0).sum())


def test_a_read_waits_for_what_any_stream_still_writes():
    """C28: a framework's own streams are not known here."""
    tensor = torch.zeros(1 << 24, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(1)
    data = np.empty(tensor.numel() * 4, np.uint8)
    device, memory = by_address(tensor)
    device.read(memory, data, should_wait=True)
    assert (data.view(np.float32) == 1).all()
