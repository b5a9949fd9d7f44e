"""Device memory by address: copies of any stride, and memory of another, real process."""

import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_memory import used_bytes  # noqa: E402

from child_processes import LIMIT, Command  # noqa: E402
from flyweight.cuda import driver  # noqa: E402
from flyweight.cuda.copies import Copier  # noqa: E402
from flyweight.errors import HandleGone, SpecError, TransferTimeout, TransportError  # noqa: E402
from flyweight.memory import Buffer  # noqa: E402
from flyweight.memory_table import BufferTable  # noqa: E402
from flyweight.transports.cuda_ipc import CudaIpcHandle, CudaIpcTransport  # noqa: E402
from flyweight.transports.fd_passing import FdConnection, FdServer  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

KINDS = {
    "plain": "expandable_segments:False",
    "expandable": "expandable_segments:True",
    "pooled": "backend:cudaMallocAsync",
}


def buffer_of(tensor):
    width = tensor.element_size()
    strides = tuple(width * stride for stride in tensor.stride())
    device = tensor.get_device() if tensor.is_cuda else None
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), strides, width, tensor, device=device)


def table_of(tensors):
    return BufferTable.of([buffer_of(tensor) for tensor in tensors])


def content(buffer):
    """Return a flat buffer's bytes."""
    data = np.empty(buffer.nbytes, np.uint8)
    copier = Copier(buffer.device)
    copier.copy(Buffer.of(data), buffer)
    copier.wait(LIMIT)
    copier.close()
    return data


# The other process.


def exporter(server_path):
    """Obey commands from stdin: one line of JSON each, and one for the answer."""
    server = FdServer(Path(server_path), token="token") if server_path else None
    transport = CudaIpcTransport(fd_server=server)
    tensors, handles = [], []
    for line in sys.stdin:
        command, *args = json.loads(line)
        answer = None
        if command == "offer":
            for size in args:
                tensors.append(torch.arange(size, device="cuda").to(torch.uint8))
            torch.cuda.synchronize()
            try:
                handles = [transport.offer(buffer_of(tensor)) for tensor in tensors]
                answer = [msgspec.json.encode(handle).decode() for handle in handles]
            except TransportError as error:
                answer = str(error)
        elif command == "refusal":
            some = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in args]
            answer = "".join(transport.refusal(buffer_of(each)) for each in some)
        elif command == "add":
            for tensor in tensors:
                tensor.add_(args[0])
            torch.cuda.synchronize()
        elif command == "release":
            transport.release(handles[args[0]])
        elif command == "close":
            transport.close()
        elif command == "free":
            tensors.clear()
            torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


class Exporter(Command):
    def __init__(self, kind, server_path):
        super().__init__(
            sys.executable, __file__, server_path or "",
            PYTORCH_CUDA_ALLOC_CONF=KINDS[kind], PYTHONPATH=os.pathsep.join(sys.path),
        )  # fmt: skip

    def ask(self, *command):
        return json.loads(super().ask(json.dumps(command)))

    def offer(self, *sizes):
        answer = self.ask("offer", *sizes)
        assert isinstance(answer, list), answer
        return [msgspec.json.decode(text, type=CudaIpcHandle) for text in answer]

    def kill(self):
        super().kill()
        self.join()


@pytest.fixture
def start(tmp_path):
    """Start an exporter; return it and a transport that reads from it."""
    running, transports, connections = [], [], []

    def begin(kind, *, has_server=True):
        server_path = tmp_path / f"server{len(running)}" if has_server else None
        other = Exporter(kind, server_path)
        running.append(other)
        other.ask("hello")
        connection = FdConnection(server_path, token="token") if has_server else None
        if connection is not None:
            connections.append(connection)
        transports.append(CudaIpcTransport(fd_connection=connection))
        return other, transports[-1]

    yield begin
    for each in (*transports, *connections):
        each.close()
    for each in running:
        with each:
            each.output()  # it ends with its input


SIZES = [3_000_001, 100, 0, 8192, 64 << 20, 5]


def expected(size, added=0):
    return (np.arange(size) + added).astype(np.uint8)


@pytest.mark.parametrize("kind", ["plain", "expandable"])
def test_another_process_reads_what_is_offered_and_what_is_written_later(start, kind):
    other, transport = start(kind)
    handles = other.offer(*SIZES)
    buffers = [transport.open(handle) for handle in handles]
    for buffer, size in zip(buffers, SIZES, strict=True):
        assert not buffer.is_writable
        assert content(buffer).tobytes() == expected(size).tobytes()
    other.ask("add", 3)
    for handle, size in zip(handles, SIZES, strict=True):
        assert content(transport.open(handle)).tobytes() == expected(size, 3).tobytes()
    assert [transport.open(handle).address for handle in handles] == [b.address for b in buffers]


def test_without_a_server_plain_memory_is_read_all_the_same(start):
    other, transport = start("plain", has_server=False)
    (handle,) = other.offer(100_000)
    assert content(transport.open(handle)).tobytes() == expected(100_000).tobytes()
    transport.close_handle(handle)
    other.ask("close")
    other.ask("free")
    with pytest.raises(HandleGone, match="no memory"):
        transport.open(handle)
    (handle,) = other.offer(100_000)
    other.kill()
    with pytest.raises(HandleGone, match="no memory"):
        transport.open(handle)


@pytest.mark.parametrize("kind", ["plain", "expandable"])
def test_an_allocation_is_mapped_once_however_many_handles_lie_in_it(start, kind):
    other, transport = start(kind)
    handles = other.offer(*[4096] * 40)
    starts = {transport.open(handle).address - handle.offset for handle in handles}
    assert len(starts) == len({handle.place for handle in handles}) == 1
    for handle in handles[:-1]:
        transport.close_handle(handle)
        transport.close_handle(handle)
    assert content(transport.open(handles[-1])).tobytes() == expected(4096).tobytes()


@pytest.mark.parametrize("kind", ["plain", "expandable"])
def test_a_released_handle_is_gone_and_its_neighbour_is_not(start, kind):
    other, transport = start(kind)
    first, second = other.offer(1000, 1000)
    transport.open(second)
    other.ask("release", 0)
    other.ask("release", 0)
    with pytest.raises(HandleGone, match="released"):
        transport.open(first)
    assert content(transport.open(second)).tobytes() == expected(1000).tobytes()
    other.ask("close")
    with pytest.raises(HandleGone):
        transport.open(second)


@pytest.mark.parametrize("kind", ["plain", "expandable"])
def test_handles_are_gone_with_a_killed_exporter_and_what_is_open_can_be_shut(start, kind):
    other, transport = start(kind)
    opened, other_one = other.offer(30 << 20, 30 << 20)
    buffer = transport.open(opened)
    other.kill()
    for handle in (opened, other_one):
        with pytest.raises(HandleGone, match="gone"):
            transport.open(handle)
    assert content(buffer).tobytes() == expected(30 << 20).tobytes()
    transport.close_handle(opened)
    transport.close_handle(opened)
    assert torch.ones(8, device="cuda").sum().item() == 8  # the context is whole


@pytest.mark.parametrize("kind", ["plain", "expandable"])
def test_opening_and_shutting_over_and_over_takes_no_memory(start, kind):
    other, transport = start(kind)
    handles = other.offer(30 << 20, 5000)

    def open_and_shut(times):
        for _ in range(times):
            for handle in handles:
                transport.open(handle)
            for handle in handles:
                transport.close_handle(handle)
        return used_bytes(), used_bytes(other.pid)

    assert open_and_shut(10) == open_and_shut(190)
    assert len(os.listdir("/proc/self/fd")) < 200


def test_memory_of_a_pool_is_refused_with_a_remedy(start):
    other, _ = start("pooled")
    assert "backend:native" in other.ask("refusal", 1000)  # also before it is offered
    assert "backend:native" in other.ask("offer", 1000)


@pytest.mark.parametrize("kind", ["plain", "expandable"])
def test_memory_that_can_be_offered_is_not_refused_before(start, kind):
    other, _ = start(kind)
    assert other.ask("refusal", *SIZES) == ""


def test_mapped_memory_without_a_server_is_refused_with_a_remedy(start):
    other, _ = start("expandable", has_server=False)
    assert "expandable_segments:False" in other.ask("offer", 1000)


def test_memory_of_the_host_is_refused():
    with pytest.raises(TransportError, match="host"):
        CudaIpcTransport().offer(Buffer.of(np.zeros(8, np.uint8)))


def test_a_handle_of_ones_own_process_is_the_memory_itself():
    tensor = torch.arange(40, device="cuda").view(5, 8)[1:4, 2:6]
    mine, other = CudaIpcTransport(), CudaIpcTransport()
    handle = mine.offer(buffer_of(tensor))
    low, high = buffer_of(tensor).span
    for transport in (mine, other):
        buffer = transport.open(handle)
        assert (buffer.address, buffer.nbytes) == (low, high - low)
    other.close_handle(handle)
    other.release(handle)
    mine.open(handle)
    mine.release(handle)
    mine.release(handle)
    with pytest.raises(HandleGone, match="released"):
        other.open(handle)
    for transport in (mine, other):
        transport.close()
        transport.close()


def a_handle():
    transport = CudaIpcTransport()
    return transport.offer(buffer_of(torch.zeros(100, device="cuda")))


def test_a_handle_survives_json_and_msgpack():
    handle = a_handle()
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(handle), type=CudaIpcHandle) == handle


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": -1},
        {"nbytes": 2**40},
        {"nbytes": 2**64},
        {"allocation_bytes": 1},
        {"ipc": ""},
        {"ipc": "AAAA"},
        {"session": "../../etc"},
        {"slot": 2**40},
        {"pieces": [["key", 100]]},
        {"device": "G" * 100},
    ],
    ids=str,
)
def test_a_handle_that_lies_is_refused_before_the_driver_sees_it(lie):
    text = json.dumps(json.loads(msgspec.json.encode(a_handle())) | lie)
    with pytest.raises((TransportError, msgspec.ValidationError)):
        msgspec.json.decode(text, type=CudaIpcHandle)


def test_a_handle_of_a_device_that_is_not_here_is_refused():
    handle = msgspec.structs.replace(a_handle(), device="GPU-0", pid=1)
    with pytest.raises(TransportError, match="GPU-0"):
        CudaIpcTransport().open(handle)


# Copies.


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
    copier.free_table(table)
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


if __name__ == "__main__":
    exporter(sys.argv[1])
