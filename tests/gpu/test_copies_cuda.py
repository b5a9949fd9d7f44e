"""Copies of device memory by address, of any stride, and the memory of devices itself."""

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_memory import used_bytes  # noqa: E402

from child_processes import LIMIT  # noqa: E402
from flyweight.cuda import driver  # noqa: E402
from flyweight.cuda.copies import Copier  # noqa: E402
from flyweight.cuda.pinned_memory import pinned  # noqa: E402
from flyweight.errors import SpecError, TransferTimeout, TransportError  # noqa: E402
from flyweight.memory import Buffer, page_memory  # noqa: E402
from flyweight.memory_table import BufferTable  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
_MEMORY_TYPE, _HOST_MEMORY = 2, 1


def buffer_of(tensor):
    width = tensor.element_size()
    strides = tuple(width * stride for stride in tensor.stride())
    device = tensor.get_device() if tensor.is_cuda else None
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), strides, width, tensor, device=device)


def table_of(tensors):
    return BufferTable.of([buffer_of(tensor) for tensor in tensors])


def copied(sink, source):
    copier = Copier(0)
    copier.copy(buffer_of(sink), buffer_of(source))
    copier.wait(LIMIT)
    copier.close()
    copier.close()


def numbers(*shape, device="cuda", dtype=torch.int16):
    return torch.randint(-(2**15), 2**15, shape, device=device).to(dtype)


VIEWS = {
    "whole": lambda t: t,
    "flat": lambda t: t.view(-1),
    "columns": lambda t: t.view(240, 1001)[:, 7:300],
    "rows": lambda t: t.view(240, 1001)[5:100:3],
    "block": lambda t: t.view(10, 24, 1001)[1:5, 3:20, 100:201],
    "apart": lambda t: t.view(5, 2, 24, 1001)[:, 1, ::2, 5:],
    "four": lambda t: t.view(5, 2, 24, 13, 77)[1:4, :, 2:7, 3:9, 11:30],
    "items": lambda t: t.view(240, 1001)[::2, 1::3],
    "transposed": lambda t: t.view(240, 1001).t(),
    "one": lambda t: t.view(240, 1001)[3, 4],
    "none": lambda t: t.view(240, 1001)[3:3],
}


@pytest.mark.parametrize("ends", ["cuda cuda", "cpu cuda", "cuda cpu"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float64], ids=str)
def test_a_view_is_copied_to_contiguous_memory_and_back(view, ends, dtype):
    sink_end, source_end = ends.split()
    source = VIEWS[view](numbers(240, 1001, device=source_end, dtype=dtype))
    there = torch.zeros(source.shape, device=sink_end, dtype=dtype)
    copied(there, source)
    assert torch.equal(there.cpu(), source.cpu())
    room = torch.zeros(240, 1001, device=sink_end, dtype=dtype)
    wanted = room.cpu()
    VIEWS[view](wanted).copy_(source.cpu())
    copied(VIEWS[view](room), source)
    assert torch.equal(room.cpu(), wanted)


def test_a_copy_larger_than_a_piece_arrives_whole():
    source = numbers(100_000_003)
    sink = torch.zeros_like(source)
    copied(sink, source)
    assert torch.equal(sink, source)


def test_a_table_of_copies_is_made_as_often_as_asked():
    sizes = [1, 15, 16, 17, 131071, 131072, 131073, 5_000_001, 0, 40]
    sources = [numbers(size, dtype=torch.uint8) for size in sizes]
    sinks = [torch.zeros_like(source) for source in sources]
    big = numbers(300, 400)
    views = [
        (torch.zeros(100, 200, device="cuda", dtype=torch.int16), big[100:200, 50:250]),
        (torch.zeros(400, 300, device="cuda", dtype=torch.int16).t(), big),
        (torch.zeros(300, 400, dtype=torch.int16), big),
        (torch.zeros(999, device="cuda", dtype=torch.int16), big.view(-1)[1:1000]),
    ]
    pairs = [*zip(sinks, sources, strict=True), *views]

    def copy_thrice():
        copier = Copier(0)
        table = copier.table(*map(table_of, zip(*pairs, strict=True)))
        assert (len(table.rest), table.num_tasks) == (4, 6 + 2 + 39 + 1)
        for _ in range(3):
            for tensor in (*sources, big):
                tensor.add_(1)
            copier.run(table)
            copier.wait(LIMIT)
            for sink, source in pairs:
                assert torch.equal(sink.cpu(), source.cpu())
        copier.close()

    copy_thrice()  # kernels are loaded at their first use, and stay
    before = used_bytes()
    copy_thrice()
    assert used_bytes() <= before


def test_a_table_writes_no_byte_beyond_its_sinks():
    room, source = numbers(100_000, dtype=torch.uint8), numbers(100_000, dtype=torch.uint8)
    wanted = room.clone()
    copier = Copier(0)
    cuts = [(0, 16), (32, 47), (64, 4097), (8192, 8193), (20_000, 90_001)]
    table = copier.table(*(table_of(each[a:b] for a, b in cuts) for each in (room, source)))
    assert not table.rest
    copier.run(table)
    copier.wait(LIMIT)
    copier.close()
    for a, b in cuts:
        wanted[a:b] = source[a:b]
    assert torch.equal(room, wanted)


def test_a_copy_waits_for_the_default_stream_and_keeps_its_deadline():
    source, sink = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    copier = Copier(0)
    torch.cuda._sleep(1_000_000_000)  # about half a second
    source.fill_(5)
    copier.copy(buffer_of(sink), buffer_of(source))
    with pytest.raises(TransferTimeout, match="device 0"):
        copier.wait(0.01)
    with pytest.raises(TransferTimeout, match="device 0"):
        driver.synchronize(0, 0.01)
    copier.wait(LIMIT)
    driver.synchronize(0, LIMIT)
    assert sink.cpu().eq(5).all()
    copier.close()


def test_copies_that_make_no_sense_are_refused():
    copier = Copier(0)
    a, b = buffer_of(numbers(4, 6)), buffer_of(numbers(6, 4))
    with pytest.raises(SpecError, match=r"\(6, 4\)"):
        copier.copy(a, b)
    with pytest.raises(SpecError, match="read-only"):
        copier.copy(msgspec.structs.replace(a, is_writable=False), a)
    with pytest.raises(SpecError, match="share bytes"):
        copier.copy(buffer_of(numbers(1, 6).expand(4, 6)), a)
    sink, source = numbers(300, 300, 8, 8), numbers(8, 8, 300, 300).permute(3, 2, 1, 0)
    with pytest.raises(SpecError, match="65536"):
        copier.copy(buffer_of(sink), buffer_of(source))
    with pytest.raises(SpecError, match="65536"):
        copier.table(table_of([sink]), table_of([source]))
    copier.close()


def test_a_table_without_copies_takes_no_memory():
    copier = Copier(0)
    table = copier.table(table_of([]), table_of([]))
    assert (table.rest, table.tasks, table.num_tasks) == ((), None, 0)
    copier.run(table)
    copier.wait(LIMIT)
    copier.close()


def test_broadcast_sources_are_copied():
    source = numbers(1, 6).expand(4, 6)
    sink = torch.zeros(4, 6, device="cuda", dtype=torch.int16)
    copied(sink, source)
    assert torch.equal(sink, source)


# Devices.


def test_a_device_has_the_name_that_torch_gives_it():
    assert driver.num_devices() == torch.cuda.device_count()
    assert driver.uuid(0) == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert driver.device_named(driver.uuid(0)) == 0
    assert driver.device_named("GPU-0") is None


def test_memory_of_its_own_is_taken_and_given_back():
    before = used_bytes()
    buffer = driver.allocate(0, 256 << 20)
    assert used_bytes() - before >= 256 << 20
    assert driver.allocation_at(0, buffer.address + 5).start == buffer.address
    number = driver.allocation_at(0, buffer.address).number
    driver.free(buffer)
    assert used_bytes() == before
    again = driver.allocate(0, 256 << 20)
    assert driver.allocation_at(0, again.address).number != number
    driver.free(again)


def test_a_driver_error_has_its_name():
    with pytest.raises(TransportError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        driver.allocate(0, 1 << 45)


def test_memory_of_the_host_is_pinned_as_long_as_it_lives():
    data = page_memory(1 << 20)
    buffer = pinned(0, Buffer.of(data))
    kind = np.zeros(1, np.uint32)
    assert buffer.address == data.ctypes.data

    def memory_type():
        with driver.current_context(0):
            code = driver.function("cuPointerGetAttribute")(
                kind.ctypes.data, _MEMORY_TYPE, buffer_address
            )
        return int(kind[0]) if code == 0 else None

    buffer_address = buffer.address
    assert memory_type() == _HOST_MEMORY
    del buffer
    assert memory_type() is None
    again = pinned(0, Buffer.of(data))
    assert memory_type() == _HOST_MEMORY
    assert pinned(0, again).owner is again.owner  # what is refused stays as it is
