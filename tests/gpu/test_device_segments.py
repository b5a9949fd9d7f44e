"""Device memory of another, real process, mapped by handles and files that came through a channel."""

import ctypes
import gc
import os
import socket
import weakref
from time import monotonic

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_memory import used_bytes  # noqa: E402

from child_processes import LIMIT, SPAWN, Child  # noqa: E402
from flyweight.cuda import driver  # noqa: E402
from flyweight.cuda.copies import Copier  # noqa: E402
from flyweight.errors import HandleGone, TransportError  # noqa: E402
from flyweight.memory import Buffer  # noqa: E402
from flyweight.memory_table import BufferTable  # noqa: E402
from flyweight.transports.channel import Channel, Message, Messages  # noqa: E402
from flyweight.transports.device_segments import (  # noqa: E402
    DeviceHandle,
    export,
    open_segment,
    open_segments,
    places_on_devices,
)
from flyweight.transports.segments import Places, Segment, mapped_rows  # noqa: E402
from flyweight.transports.wire import Wire  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

KINDS = {
    "plain": "expandable_segments:False",
    "expandable": "expandable_segments:True",
    "pooled": "backend:cudaMallocAsync",
}
both_kinds = pytest.mark.parametrize("kind", ["plain", "expandable"])


class Do(Message, frozen=True):
    """Reader to holder: what to do with its tensors."""

    what: str
    sizes: tuple[int, ...] = ()


class Shown(Message, frozen=True):
    segments: tuple[DeviceHandle | int, ...]
    places: Places


class Done(Message, frozen=True):
    pass


KNOWN = Messages(Do, Shown, Done)


def soon():
    return monotonic() + LIMIT


def buffer_of(tensor):
    width = tensor.element_size()
    strides = tuple(width * stride for stride in tensor.stride())
    return Buffer(
        tensor.data_ptr(), tuple(tensor.shape), strides, width, tensor, device=tensor.get_device()
    )


def table_of(tensors):
    return BufferTable.of([buffer_of(tensor) for tensor in tensors])


def holder(there, pipe):
    """Obey the reader until it closes the channel."""
    channel = Channel(Wire(there), "the reader", KNOWN)
    channel.authenticate(b"key", is_reader=False)
    tensors, placed = [], None
    while True:
        frame = channel.next_frame()
        answer, files = Done(), []
        match frame.message:
            case Do("show", sizes):
                tensors += [torch.arange(n, device="cuda").to(torch.uint8) for n in sizes]
                torch.cuda.synchronize()
                table = table_of(tensors)
                placed = places_on_devices(table)
                if placed is not None:
                    handles = tuple(each.handle for each in placed.segments)
                    files = [file for each in placed.segments for file in each.files]
                    answer = Shown(handles, placed.table(table))
            case Do("add"):
                for tensor in tensors:
                    tensor.add_(3)
                torch.cuda.synchronize()
            case Do("free"):
                tensors, placed, table = [], None, None
                gc.collect()
                torch.cuda.empty_cache()
        channel.send(answer, soon(), files, number=frame.number)


class Holder(Child):
    def __init__(self):
        here, there = socket.socketpair()
        super().__init__(holder, there, context=SPAWN)
        there.close()
        self.channel = Channel(Wire(here), "the holder", KNOWN)
        self.channel.authenticate(b"key", is_reader=True)

    def ask(self, what, *sizes):
        number = self.channel.ask(Do(what, sizes), soon())
        return self.channel.answer(number, (Shown, Done), soon())

    def __exit__(self, *raised):
        self.channel.close()
        super().__exit__(*raised)


@pytest.fixture
def start(monkeypatch):
    """Start a holder whose allocator is of a kind."""
    running = []

    def begin(kind):
        with monkeypatch.context() as patch:  # this process keeps its own allocator
            patch.setenv("PYTORCH_CUDA_ALLOC_CONF", KINDS[kind])
            running.append(Holder())
        return running[-1]

    yield begin
    for each in running:
        with each:
            pass


SIZES = [3_000_001, 100, 0, 8192, 64 << 20, 5]


def expected(size, added=0):
    return (np.arange(size) + added).astype(np.uint8).tobytes()


def content(buffer):
    """Return a flat buffer's bytes."""
    data = np.empty(buffer.nbytes, np.uint8)
    copier = Copier(buffer.device)
    copier.copy(Buffer.of(data), buffer)
    copier.wait(LIMIT)
    copier.close()
    return data.tobytes()


def rows_of(frame, sizes):
    """Map the blocks of a frame."""
    mapped = open_segments(frame.message.segments, frame.files)
    frame.close()
    shape, ones = np.array(sizes)[:, None], np.ones(len(sizes), np.int64)
    return mapped_rows(frame.message.places, mapped, shape, ones)


def contents(rows):
    return [content(rows.buffer(row)) for row in range(len(rows))]


def is_mapped(address):
    kind, memory_type = ctypes.c_uint(), 2
    with driver.current_context(0):
        code = driver.function("cuPointerGetAttribute")(ctypes.byref(kind), memory_type, address)
    return not code


@both_kinds
def test_a_reader_sees_what_another_process_shows_and_what_it_writes_later(start, kind):
    other = start(kind)
    frame = other.ask("show", *SIZES)
    assert bool(frame.files) == (kind == "expandable")
    rows = rows_of(frame, SIZES)
    assert contents(rows) == [expected(size) for size in SIZES]
    other.ask("add")
    assert contents(rows) == [expected(size, 3) for size in SIZES]
    assert not rows.is_writable
    assert not rows.buffer(0).is_writable


@both_kinds
def test_many_tensors_of_one_allocation_are_one_segment(start, kind):
    other = start(kind)
    frame = other.ask("show", *[4096] * 40)
    assert len(frame.message.segments) == 1
    assert contents(rows_of(frame, [4096] * 40)) == [expected(4096)] * 40


def test_pieces_that_follow_each_other_are_one_segment(start):
    other = start("expandable")
    sizes = [7 << 20] * 30  # pieces have 20 MiB
    frame = other.ask("show", *sizes)
    (handle,) = frame.message.segments
    assert handle.num_files == len(handle.pieces) == len(frame.files) > 5
    assert contents(rows_of(frame, sizes)) == [expected(7 << 20)] * 30


@both_kinds
def test_memory_that_is_opened_twice_is_mapped_once(start, kind):
    other = start(kind)
    first = rows_of(other.ask("show", 30 << 20), [30 << 20])
    again = rows_of(other.ask("show"), [30 << 20])
    assert first.address.tolist() == again.address.tolist()
    del first
    gc.collect()
    assert contents(again) == [expected(30 << 20)]


@both_kinds
def test_memory_is_unmapped_with_its_last_reference(start, kind):
    other = start(kind)
    frame = other.ask("show", 30 << 20)
    rows = rows_of(frame, [30 << 20])
    kept, address = rows.buffer(0), int(rows.address[0])
    mapping = weakref.ref(rows.owner[0].owner)
    del rows
    gc.collect()
    assert is_mapped(address)
    del kept
    gc.collect()
    assert mapping() is None
    assert not is_mapped(address)
    assert contents(rows_of(other.ask("show"), [30 << 20])) == [expected(30 << 20)]


@both_kinds
def test_mapping_over_and_over_takes_neither_memory_nor_files(start, kind):
    other = start(kind)
    sizes = [30 << 20, 5000]
    other.ask("show", *sizes).close()

    def map_and_drop(times):
        for _ in range(times):
            rows_of(other.ask("show"), sizes)
        gc.collect()
        return used_bytes(), used_bytes(other.pid), len(os.listdir("/proc/self/fd"))

    assert map_and_drop(10) == map_and_drop(100)


@both_kinds
def test_what_is_mapped_stays_readable_after_its_holder_was_killed(start, kind):
    other = start(kind)
    rows = rows_of(other.ask("show", 30 << 20), [30 << 20])
    other.kill()
    other.join()
    assert contents(rows) == [expected(30 << 20)]
    del rows
    gc.collect()
    assert torch.ones(8, device="cuda").sum().item() == 8  # the context is whole


def test_memory_of_a_dead_process_is_gone(start):
    other = start("plain")
    frame = other.ask("show", 30 << 20)
    other.kill()
    other.join()
    with pytest.raises(HandleGone, match=f"process {frame.message.segments[0].pid}"):
        rows_of(frame, [30 << 20])


def test_memory_that_was_freed_is_gone(start):
    other = start("plain")
    frame = other.ask("show", 30 << 20)
    other.ask("free")
    with pytest.raises(HandleGone):
        rows_of(frame, [30 << 20])


def test_files_keep_mapped_memory_that_was_freed(start):
    other = start("expandable")
    frame = other.ask("show", 30 << 20)
    other.ask("free")
    assert contents(rows_of(frame, [30 << 20])) == [expected(30 << 20)]


def test_memory_of_a_pool_and_of_the_host_is_not_shown(start):
    other = start("pooled")
    assert isinstance(other.ask("show", 1000).message, Done)
    host, device = torch.zeros(10), torch.zeros(10, device="cuda")
    flat = Buffer.flat_at(host.data_ptr(), 40, host)
    assert places_on_devices(BufferTable.of([flat, buffer_of(device)])) is None
    unknown = Buffer.flat_at(host.data_ptr(), 40, host, device=0)
    assert places_on_devices(BufferTable.of([unknown])) is None


def test_memory_of_ones_own_process_is_used_as_it_lies():
    tensor = torch.arange(4000, device="cuda")
    low, high = buffer_of(tensor).span
    first = export(0, low, high - low, tensor)
    again = export(0, low, high - low, tensor)
    assert first.handle == again.handle
    files = first.files
    del again  # it takes nothing from the first
    gc.collect()
    buffer = open_segment(first.handle, files)
    assert (buffer.address, buffer.nbytes) == (first.start, first.nbytes)
    assert first.start <= low < high <= first.start + first.nbytes
    handle, tensor = first.handle, weakref.ref(tensor)
    del first
    gc.collect()
    assert tensor() is not None  # the buffer keeps it
    del buffer
    gc.collect()
    assert tensor() is None
    with pytest.raises(HandleGone, match="given back"):
        open_segment(handle, files)


@both_kinds
@pytest.mark.parametrize("factor", [2, 1 << 10])
def test_a_handle_of_more_bytes_than_its_memory_is_refused(start, kind, factor):
    other = start(kind)
    frame = other.ask("show", 30 << 20)
    (handle,) = frame.message.segments
    pieces = (*handle.pieces[:-1], handle.pieces[-1] * factor)
    lie = msgspec.structs.replace(handle, pieces=pieces)
    with pytest.raises(TransportError, match=str(lie.nbytes)):
        open_segment(lie, frame.files)
    assert contents(rows_of(frame, [30 << 20])) == [expected(30 << 20)]


def test_bytes_and_files_that_stand_for_no_memory_are_refused(start):
    frame = start("plain").ask("show", 1000)
    (handle,) = frame.message.segments
    for ipc in (bytes(64), b"\xff" * 64):
        with pytest.raises(TransportError):
            open_segment(msgspec.structs.replace(handle, ipc=ipc), [])
    frame = start("expandable").ask("show", 1000)
    (handle,) = frame.message.segments
    with pytest.raises(TransportError, match=f"{handle.num_files} files"):
        open_segment(handle, [])
    segment = Segment.allocate(handle.nbytes)
    with pytest.raises(TransportError):
        open_segment(handle, segment.files * handle.num_files)
    assert contents(rows_of(frame, [1000])) == [expected(1000)]


def test_a_device_has_the_uuid_that_torch_gives_it(start):
    (handle,) = start("plain").ask("show", 1000).message.segments
    assert handle.device == bytes(torch.cuda.get_device_properties(0).uuid.bytes)
