"""Segments: mapped by other processes through files of a frame, never torn away, never leaked."""

import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
from contextlib import suppress
from multiprocessing import shared_memory
from time import monotonic

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_processes import LIMIT, Child, exit_code
from flyweight.errors import FlyweightError, TransportError
from flyweight.memory import Buffer
from flyweight.memory_table import HOST, NOWHERE, BufferTable
from flyweight.plans.tables import packed
from flyweight.transports.channel import Channel, Message, Messages
from flyweight.transports.device_segments import DeviceHandle, open_segment, open_segments
from flyweight.transports.segments import (
    Placed,
    Places,
    Segment,
    map_segment,
    mapped_rows,
    places_in_shared_memory,
)
from flyweight.transports.wire import Wire


class Show(Message, frozen=True):
    """Reader to holder: share your blocks, write this value into them first."""

    value: int = 0


class Shown(Message, frozen=True):
    segments: tuple[DeviceHandle | int, ...]
    places: Places


KNOWN = Messages(Show, Shown)


def soon():
    return monotonic() + LIMIT


def sent(channel, placed, table, number=0):
    files = [file for each in placed.segments for file in each.files]
    message = Shown(tuple(each.nbytes for each in placed.segments), placed.table(table))
    channel.send(message, soon(), files, number=number)


def received(frame, table):
    """Return the blocks of a frame; `table` has their shapes."""
    mapped = open_segments(frame.message.segments, frame.files)
    frame.close()
    return mapped_rows(frame.message.places, mapped, table.shape, table.item_bytes)


def table_in(segment, sizes):
    """Return flat blocks of bytes that follow each other in a segment."""
    sizes = np.asarray(sizes)
    starts = np.cumsum(sizes) - sizes
    shape, ones = sizes[:, None], np.ones(len(sizes), np.int64)
    at = segment.start + starts
    return BufferTable(at, shape, ones[:, None], ones, np.full(len(sizes), HOST), segment), starts


def buffer_of(tensor):
    width = tensor.element_size()
    strides = tuple(width * stride for stride in tensor.stride())
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), strides, width, tensor)


def contents(rows):
    return [rows.buffer(row).items().tobytes() for row in range(len(rows))]


def num_files():
    return len(os.listdir("/proc/self/fd"))


# Two processes.


class Pair:
    """A holder in a process of its own, and the reader's channel to it."""

    def __init__(self, holder, *args):
        here, there = socket.socketpair()
        self.child = Child(_held, here, there, holder, args)
        there.close()
        self.channel = Channel(Wire(here), "the holder", KNOWN)
        self.channel.authenticate(b"key", is_reader=True)

    def show(self, value=0):
        return self.channel.answer(self.channel.ask(Show(value), soon()), Shown, soon())

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.channel.close()
        self.child.__exit__(*raised)


def _held(here, there, holder, args, pipe):
    here.close()
    channel = Channel(Wire(there), "the reader", KNOWN)
    channel.authenticate(b"key", is_reader=False)
    with suppress(FlyweightError):
        holder(channel, *args)


SIZES = [100, 0, 5000, 1, 1 << 20]


def a_holder_of_one_segment(channel, sizes):
    segment = Segment.allocate(int(np.sum(sizes)))
    table, starts = table_in(segment, sizes)
    placed = Placed((segment,), np.zeros(len(sizes), np.int64), starts)
    while True:
        frame = channel.next_frame()
        segment.bytes[:] = frame.message.value
        sent(channel, placed, table, frame.number)


def test_a_reader_maps_the_memory_of_another_process_and_sees_what_it_writes_later():
    table, _ = table_in(Segment.allocate(0), SIZES)
    with Pair(a_holder_of_one_segment, SIZES) as pair:
        rows = received(pair.show(7), table)
        assert contents(rows) == [bytes([7]) * size for size in SIZES]
        pair.show(8).close()
        assert contents(rows) == [bytes([8]) * size for size in SIZES]
        assert not rows.is_writable


def test_a_reader_keeps_its_bytes_when_the_holder_is_killed():
    table, _ = table_in(Segment.allocate(0), SIZES)
    with Pair(a_holder_of_one_segment, SIZES) as pair:
        rows = received(pair.show(7), table)
        pair.child.kill()
        pair.child.join()
        assert contents(rows) == [bytes([7]) * size for size in SIZES]


def test_a_reader_can_neither_write_nor_truncate():
    with Pair(a_holder_of_one_segment, [4096]) as pair:
        frame = pair.show(7)
        (file,) = frame.files
        data = map_segment(file, 4096)
        with pytest.raises(ValueError, match="WRITEABLE|read-only"):
            data.flags.writeable = True
        with pytest.raises(TransportError, match="4096 bytes"):
            map_segment(file, 4096, is_writable=True)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(file, 0)
        again = os.open(f"/proc/self/fd/{file}", os.O_RDWR)  # nor by opening it anew for writing
        for size in (0, 8192):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(again, size)
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(again, 4096)
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(again, b"x", 0)
        os.close(again)
        frame.close()
        assert (data == 7).all()


def a_holder_that_fills(channel):
    frame = channel.next_frame()
    (nbytes,) = frame.message.segments
    data = map_segment(frame.files[0], nbytes, is_writable=True)
    frame.close()
    data[10:20] = 9
    channel.send(Show(), soon(), number=frame.number)


def test_a_holder_fills_memory_that_a_reader_has_allocated_and_cannot_truncate_it():
    segment = Segment.allocate(100, is_writable_by_readers=True)
    for size in (0, 200):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.files[0], size)
    with Pair(a_holder_that_fills) as pair:
        request = Shown((segment.nbytes,), Places(1, b"", b"", b""))
        number = pair.channel.ask(request, soon(), segment.files)
        pair.channel.answer(number, Show, soon())
    assert segment.bytes.tolist() == [0] * 10 + [9] * 10 + [0] * 80


def a_holder_of_torch(channel, strategy):
    import torch

    torch.multiprocessing.set_sharing_strategy(strategy)
    model = [torch.arange(n, dtype=torch.int16).view(-1, 5).t().share_memory_() for n in (1000, 65)]
    table = BufferTable.of([buffer_of(tensor) for tensor in model])
    placed = places_in_shared_memory(table)
    while True:
        frame = channel.next_frame()
        if placed is None:
            channel.send(Show(), soon(), number=frame.number)
            continue
        for tensor in model:
            tensor += frame.message.value
        sent(channel, placed, table, frame.number)


def test_tensors_that_torch_shares_are_mapped_where_they_lie():
    torch = pytest.importorskip("torch")
    model = [torch.arange(n, dtype=torch.int16).view(-1, 5).t() for n in (1000, 65)]
    table = BufferTable.of([buffer_of(tensor) for tensor in model])
    with Pair(a_holder_of_torch, "file_descriptor") as pair:
        rows = received(pair.show(3), table)
        assert contents(rows) == [(tensor + 3).numpy().tobytes() for tensor in model]
        pair.show(4).close()
        assert contents(rows) == [(tensor + 7).numpy().tobytes() for tensor in model]


def test_tensors_that_torch_shares_by_a_name_are_not_mapped():
    pytest.importorskip("torch")
    with Pair(a_holder_of_torch, "file_system") as pair:
        number = pair.channel.ask(Show(3), soon())
        pair.channel.answer(number, Show, soon()).close()
        pair.channel.close()
        assert pair.child.join() == 0  # it removes the files


def test_many_thousand_blocks_of_one_segment_are_mapped_once():
    sizes = np.arange(20_000) % 50
    segment = Segment.allocate(int(sizes.sum()))
    segment.bytes[:] = np.arange(len(segment.bytes))
    table, starts = table_in(segment, sizes)
    placed = places_in_shared_memory(table)
    assert len(placed.segments) == 1
    assert (placed.start == starts)[sizes > 0].all()
    mapped = [map_segment(placed.segments[0].files[0], segment.nbytes)]
    rows = mapped_rows(placed.table(table), mapped, table.shape, table.item_bytes)
    assert b"".join(contents(rows)) == segment.bytes.tobytes()


# What can be mapped.


def a_mapping_of(file):
    """Return a table of one block of 4096 bytes in a mapping of a file."""
    data = np.frombuffer(mmap.mmap(file, 4096), np.uint8)
    return BufferTable.of([Buffer.of(data)])


def test_memory_in_a_file_with_a_name_is_not_offered(tmp_path):
    memory = shared_memory.SharedMemory(create=True, size=4096)
    array = np.frombuffer(memory.buf, np.uint8)
    array[:] = 1  # a file that was never written has no memory
    table = BufferTable.of([Buffer.of(array)])
    try:
        assert places_in_shared_memory(table) is None
    finally:
        memory.unlink()
    assert places_in_shared_memory(table) is not None
    del table, array
    memory.close()
    with open(tmp_path / "on a disk", "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        assert places_in_shared_memory(a_mapping_of(file.fileno())) is None
        os.unlink(file.name)
        if os.statvfs(tmp_path).f_fsid != os.statvfs("/dev/shm").f_fsid:
            assert places_in_shared_memory(a_mapping_of(file.fileno())) is None


def test_private_memory_and_that_of_devices_is_not_offered():
    segment = Segment.allocate(100)
    table, _ = table_in(segment, [100])
    assert places_in_shared_memory(BufferTable.of([Buffer.of(np.zeros(100, np.uint8))])) is None
    mixed = [table.buffer(0), Buffer.of(np.zeros(100, np.uint8))]
    assert places_in_shared_memory(BufferTable.of(mixed)) is None
    device = [table.buffer(0), Buffer.flat_at(segment.start, 10, None, device=0)]
    assert places_in_shared_memory(BufferTable.of(device)) is None
    nowhere = BufferTable.of([table.buffer(0), None])
    assert nowhere.device[1] == NOWHERE
    assert places_in_shared_memory(nowhere) is None


def test_a_block_that_reaches_beyond_its_file_is_not_offered():
    page = mmap.PAGESIZE
    segment = Segment.allocate(page + 100)
    for nbytes, is_offered in ((page + 100, True), (page + 101, False)):
        block = Buffer.flat_at(segment.start, nbytes, segment)  # all of it lies in mapped pages
        assert (places_in_shared_memory(BufferTable.of([block])) is not None) == is_offered


def test_blocks_without_items_may_lie_anywhere():
    segment = Segment.allocate(8)
    segment.bytes[:] = range(8)
    nothing = [Buffer(at, (0, 3), (9**15, -1), 4, None) for at in (0, 12345)]
    for blocks in ([*nothing, Buffer.of(segment.bytes)], nothing, []):
        table = BufferTable.of(blocks)
        placed = places_in_shared_memory(table)
        assert len(placed.segments) == (len(blocks) == 3)
        mapped = [map_segment(each.files[0], each.nbytes) for each in placed.segments]
        rows = mapped_rows(placed.table(table), mapped, table.shape, table.item_bytes)
        assert contents(rows) == contents(table)


def test_a_file_that_has_a_name_is_refused_and_never_mapped():
    with open("/dev/shm/flyweight-test-segment", "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 8192)
        try:
            with pytest.raises(TransportError, match="1 names and seals 0x1"):
                map_segment(file.fileno(), 8192)
            file.truncate(4096)
            with pytest.raises(TransportError, match="1 names"):
                map_segment(file.fileno(), 8192)
        finally:
            os.unlink(file.name)
        with pytest.raises(TransportError, match="4096 bytes, its segment 8192"):
            map_segment(file.fileno(), 8192)
        assert len(map_segment(file.fileno(), 4096)) == 4096
        with open("/proc/self/maps") as maps:
            assert "flyweight-test-segment" not in maps.read()


def test_a_file_without_all_of_its_memory_is_refused():
    file = os.memfd_create("x")
    os.ftruncate(file, 1 << 20)
    with pytest.raises(TransportError, match="1048576 bytes has memory for 0"):
        map_segment(file, 1 << 20)
    os.close(file)


def test_what_is_no_shared_memory_is_refused(tmp_path):
    reader, writer = os.pipe()
    here, there = socket.socketpair()
    with open(tmp_path / "file", "w+b") as file, open("/dev/zero", "r+b") as zeros:
        file.write(bytes(4096))
        file.flush()
        os.unlink(file.name)
        path_only = os.open("/dev/shm", os.O_PATH)
        for each in (reader, writer, here.fileno(), zeros.fileno(), path_only):
            with pytest.raises(TransportError, match="not shared memory"):
                map_segment(each, 4096)
        if os.statvfs(tmp_path).f_fsid != os.statvfs("/dev/shm").f_fsid:
            with pytest.raises(TransportError, match="not shared memory"):
                map_segment(file.fileno(), 4096)
    for each in (reader, writer, path_only):
        os.close(each)
    here.close()
    there.close()


@pytest.mark.parametrize("nbytes", [0, -1, 4097, 1 << 47, 1 << 63, 1 << 64, (1 << 64) + 1])
def test_a_segment_of_absurd_size_is_refused(nbytes):
    segment = Segment.allocate(4096)
    with pytest.raises(TransportError, match="bytes"):
        map_segment(segment.files[0], nbytes)


def test_a_message_with_too_few_or_too_many_files_is_refused():
    segment = Segment.allocate(10)
    for handles, files in (([10], []), ([10], segment.files * 2), ([], segment.files)):
        with pytest.raises(TransportError, match=f"{len(files)} files"):
            open_segments(handles, files)


# Places that lie.


def places(segment, start, strides):
    strides = np.array(strides)
    return Places(strides.shape[1], packed(segment), packed(start), packed(strides))


def rows_of(start, strides, shape, item_bytes=1, nbytes=1000, segment=0):
    data = np.zeros(nbytes, np.uint8)
    found = mapped_rows(
        places([segment], [start], [strides]), [data], np.array([shape]), np.array([item_bytes])
    )
    low, high = found.spans
    base = Buffer.of(data).address
    assert base <= low[0] <= high[0] <= base + nbytes
    return low[0] - base, high[0] - base


LARGEST = 2**63 - 1


def check_row(start, strides, shape, item_bytes):
    """A block is mapped if and only if all of it is in its segment, of 1000 bytes."""
    reach = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    low = start + sum(each for each in reach if each < 0)
    high = start + sum(each for each in reach if each > 0) + item_bytes
    if 0 in shape:
        assert rows_of(start, strides, shape, item_bytes) == (0, 0)
    elif low >= 0 and high <= 1000:
        assert rows_of(start, strides, shape, item_bytes) == (low, high)
    else:
        with pytest.raises(TransportError, match="not inside of segment 0, 1000 bytes"):
            rows_of(start, strides, shape, item_bytes)


@pytest.mark.parametrize(
    ("start", "strides", "shape", "item_bytes"),
    [
        (0, (1,), (1000,), 1),
        (999, (-1,), (1000,), 1),
        (992, (2**63 - 1,), (1,), 8),
        (0, (-(2**63), 100), (1, 10), 1),
        (0, (0, 0), (2**40, 7), 1),
        (LARGEST, (LARGEST, 5), (0, 2**62), 1),
        (-1, (1,), (1,), 1),
        (1000, (1,), (1,), 1),
        (993, (8,), (1,), 8),
        (0, (1,), (1001,), 1),
        (0, (-1,), (2,), 1),
        (10, (-1,), (12,), 1),
        (LARGEST, (1,), (10,), 1),
        (-LARGEST - 1, (1,), (10,), 1),
        (0, (2**62,), (5,), 1),  # 4 * 2**62 is 0 in 64 bits
        (0, (2**63 - 1,), (3,), 1),
        (0, (-(2**63),), (3,), 1),
        (0, (2**32,), (2**32 + 1,), 1),
        (0, (2**62, 2**62, 2**62, 2**62), (2, 2, 2, 2), 1),
        (0, (-(2**62), 2**62), (2, 2), 1),
        (500, (-(2**63), 2**63 - 1), (2, 2), 1),
        (999 - LARGEST, (LARGEST // 3,), (4,), 1),
        (0, (1,), (2**62,), 1),
        (0, (500, 500, 1), (2, 2, 1), 1),
    ],
)
def test_a_block_at_the_edges_of_a_segment_is_mapped_and_beyond_them_refused(
    start, strides, shape, item_bytes
):
    check_row(start, strides, shape, item_bytes)


some_numbers = st.one_of(
    st.integers(-2000, 2000), st.integers(-(2**63), 2**63 - 1),
    st.builds(lambda power, more, sign: max(-(2**63), min(sign * 2**power + more, LARGEST)),
              st.integers(0, 63), st.integers(-2, 2), st.sampled_from([-1, 1])),
)  # fmt: skip
some_sizes = st.one_of(st.integers(0, 40), st.integers(0, 2**47))


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.tuples(*[some_numbers] * n), st.tuples(*[some_sizes] * n))
    ),
    some_numbers,
    st.sampled_from([1, 2, 8, 16]),
)
def test_a_block_is_mapped_if_and_only_if_all_of_it_is_in_its_segment(dims, start, item_bytes):
    check_row(start, *dims, item_bytes)


@pytest.mark.parametrize("segment", [-2, -1, 1, LARGEST, -LARGEST])
def test_a_block_in_a_segment_that_is_not_there_is_refused(segment):
    with pytest.raises(TransportError, match="segment"):
        rows_of(0, (1,), (10,), segment=segment)


@pytest.mark.parametrize(
    "lie",
    [
        {"segment": b""},
        {"segment": packed([0, 0, 0])},
        {"segment": packed([0] * 3), "start": packed([0] * 3), "strides": packed([1] * 3)},
        {"segment": b"x"},
        {"start": packed([0])},
        {"strides": packed([1])},
        {"strides": packed([1, 1, 1])},
        {"num_dims": 2},
        {"num_dims": 2, "strides": packed([1, 1, 1, 1])},
        {"num_dims": 0},
        {"num_dims": -1},
        {"num_dims": 65},
    ],
    ids=str,
)
def test_places_that_are_not_those_of_the_blocks_are_refused(lie):
    good = Places(1, packed([0, 0]), packed([0, 5]), packed([1, 1]))
    shape, data = np.array([[5], [5]]), np.zeros(10, np.uint8)
    assert len(mapped_rows(good, [data], shape, np.array([1, 1]))) == 2
    with pytest.raises(FlyweightError):
        mapped_rows(msgspec.structs.replace(good, **lie), [data], shape, np.array([1, 1]))


def test_blocks_of_fewer_dims_get_leading_dims_of_size_one_and_no_others():
    data = np.arange(6, dtype=np.uint8)
    shape = np.array([[1, 1, 6]])
    rows = mapped_rows(places([0], [0], [[1]]), [data], shape, np.array([1]))
    assert rows.shape.shape == rows.strides.shape == (1, 3)
    assert contents(rows) == [data.tobytes()]
    with pytest.raises(TransportError, match="dims"):
        mapped_rows(places([0], [0], [[1]]), [data], np.array([[2, 1, 3]]), np.array([1]))


def test_each_block_is_on_the_device_of_its_segment():
    data = np.arange(6, dtype=np.uint8)
    device = Buffer.flat_at(1 << 20, 100, None, device=3)
    shape, widths = np.array([[6], [100], [0]]), np.array([1, 1, 1])
    rows = mapped_rows(
        places([0, 1, -1], [0, 0, 0], [[1], [1], [1]]), [data, device], shape, widths
    )
    assert rows.device.tolist()[:2] == [HOST, 3]
    assert rows.address[1] == 1 << 20
    with pytest.raises(TransportError, match="6 bytes"):  # each has the size of its own segment
        mapped_rows(places([1, 0], [0, 0], [[1], [1]]), [data, device], shape[:2], widths[:2])


# Handles of devices, which lie too.

FIELDS = {
    "session": b"12345678", "pid": 5, "device": b"u" * 16, "allocation": 7, "pieces": (400,),
    "ipc": b"x" * 64,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"ipc": b"", "pieces": (300, 100)}], ids=["ipc", "files"])
def test_a_device_handle_is_the_same_after_its_way(more):
    handle = DeviceHandle(**FIELDS | more)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=DeviceHandle | int)
    assert found == handle
    assert (handle.nbytes, handle.num_files) == (400, 0 if handle.ipc else 2)


LIES = {
    "session": [b"1234567", b"123456789"],
    "pid": [0, 2**22 + 1],
    "device": [b"u" * 15, b"u" * 17],
    "allocation": [-1],
    "pieces": [(), (0,), (-1, 401), (2**47 + 1,), (300, 100)],  # the driver's is of one allocation
    "ipc": [b"x" * 63, b"x" * 65],
}
LONG = [{"pieces": each, "ipc": b""} for each in [(2**46, 2**46, 1), (1,) * (2**16 + 1)]]


@pytest.mark.parametrize(
    "lie",
    [*({name: each} for name, lies in LIES.items() for each in lies), *LONG],
    ids=lambda lie: str(lie)[:40],
)
def test_a_device_handle_that_lies_is_refused(lie):
    names = [each.name for each in msgspec.structs.fields(DeviceHandle)]
    told = msgspec.msgpack.encode([(FIELDS | lie)[name] for name in names])
    with pytest.raises((TransportError, msgspec.ValidationError)):
        msgspec.msgpack.decode(told, type=DeviceHandle)


def test_a_handle_of_a_device_that_is_not_here_is_refused():
    with pytest.raises(TransportError, match="GPU-75757575"):
        open_segment(DeviceHandle(**FIELDS), [])


# Memory and files.


def test_no_memory_left_is_an_error_with_both_values_and_leaks_nothing():
    before = num_files()
    with pytest.raises(TransportError, match=rf"{1 << 62} bytes .* \d+ bytes are available"):
        Segment.allocate(1 << 62)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(TransportError, match="2097152"):
            Segment.allocate(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert num_files() == before


def num_mapped():
    with open("/proc/self/maps") as maps:
        return sum("memfd:flyweight" in line for line in maps)


def test_mapping_over_and_over_leaks_neither_files_nor_memory():
    gc.collect()
    before = num_files(), num_mapped()

    def share_and_map():
        segment = Segment.allocate(10_000)
        table, _ = table_in(segment, [4000, 6000])
        placed = places_in_shared_memory(table)
        mapped = open_segments([each.nbytes for each in placed.segments], placed.segments[0].files)
        rows = mapped_rows(placed.table(table), mapped, table.shape, table.item_bytes)
        segment.bytes[:] = 5
        assert num_mapped() > before[1]
        assert num_files() == before[0] + 2  # the segments': a mapping keeps none open
        return rows

    for _ in range(50):
        rows = share_and_map()
        assert contents(rows) == [bytes([5]) * 4000, bytes([5]) * 6000]
    del rows
    assert (num_files(), num_mapped()) == before


def test_what_is_cut_out_of_a_mapping_keeps_all_of_it():
    segment = Segment.allocate(10_000)
    part = map_segment(segment.files[0], 10_000)[9_999:]
    segment.bytes[-1] = 3
    del segment
    gc.collect()
    assert part.tolist() == [3]


def test_a_forked_child_has_neither_the_memory_nor_the_files():
    segment = Segment.allocate(10_000)
    mapped = map_segment(segment.files[0], 10_000)

    def look():
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{segment.files[0]}")
        return num_mapped()

    assert exit_code(look) == 0
    assert num_mapped() == 2
    assert (mapped == 0).all()
    os.fstat(segment.files[0])


def test_a_forked_child_that_drops_a_mapping_unmaps_nothing_else():
    segment = Segment.allocate(1 << 20)
    data = map_segment(segment.files[0], 1 << 20)
    kept = {"data": data}
    address = Buffer.of(data).address
    del data

    def drop():
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        fixed, private = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        at = libc.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(1 << 20), 3, fixed | private, -1, 0
        )
        assert at == address
        kept.clear()
        gc.collect()
        ctypes.memset(address, 1, 1 << 20)
        return 7

    assert exit_code(drop) == 7
