"""Shared memory: no copy where there need be none, sealed, private, and never left behind."""

import fcntl
import mmap
import os
import resource
import signal
from contextlib import suppress
from multiprocessing import shared_memory

import numpy as np
import pytest

from child_processes import Child, resources, settled, shared_files
from flyweight.errors import HandleGone, TransportError
from flyweight.memory import Buffer
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.shared_memory import SharedMemoryTransport
from patience import patient  # noqa: F401


@pytest.fixture
def server(tmp_path):
    server = FdServer(tmp_path / "fds", token="secret")
    yield server
    server.close()


@pytest.fixture
def offering(server):
    transport = SharedMemoryTransport(fd_server=server)
    yield transport
    transport.close()


@pytest.fixture
def reading(server, tmp_path):
    connection = FdConnection(tmp_path / "fds", token="secret")
    transport = SharedMemoryTransport(fd_connection=connection)
    yield transport
    transport.close()
    connection.close()


def test_what_is_written_after_the_offer_is_seen_by_who_has_it_open(offering, reading):
    buffer = offering.allocate(1 << 16)
    handle = offering.offer(buffer)
    seen = reading.open(handle).items()
    buffer.items()[:] = 7
    assert (seen == 7).all()
    assert reading.open(handle).address == reading.open(handle).address


def is_shared(offering, buffer):
    low, high = buffer.span
    return offering.segments_of(np.array([low]), np.array([high])).tolist() == [0]


def test_memory_that_torch_shares_is_shown_where_it_lies(offering, reading):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1000).share_memory_()
    view = tensor[100:200].numpy()
    buffer = Buffer(tensor.data_ptr() + 800, (100,), (8,), 8, tensor)
    assert is_shared(offering, buffer)
    seen = reading.open(offering.offer(buffer)).items().view(np.int64)
    assert (seen == view).all()
    tensor += 5
    assert (seen == view).all()


def test_what_cannot_be_shown_as_a_whole_is_not_shown_in_part(offering):
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros(1000).share_memory_() for _ in range(5)]
    buffers = [Buffer(each.data_ptr(), (1000,), (4,), 4, each) for each in tensors]
    known = offering.offer(buffers[0])
    before = resources()
    with pytest.raises(TransportError, match="shared memory"):
        offering.offer_in_place([*buffers, Buffer.of(np.zeros(1000, np.uint8))])
    assert resources() == before
    assert offering.open(known).address == buffers[0].address


def test_what_reaches_beyond_its_segment_is_not_shown(offering):
    buffer = offering.allocate(4096)
    beyond = Buffer.flat_at(buffer.address + 4000, 97, buffer.owner)
    assert not is_shared(offering, beyond)
    with pytest.raises(TransportError, match="97 bytes at"):
        offering.offer_in_place([beyond])


def test_a_released_handle_of_memory_that_stays_is_gone(offering):
    handle = offering.offer(offering.allocate(10))
    offering.release(handle)
    with pytest.raises(HandleGone, match="released"):
        offering.open(handle)


def without_files(offering, pipe):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    files = []
    with suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    told = []
    nothing = np.empty(0, np.int64)
    for look in (
        lambda: offering.segments_of(nothing, nothing),
        lambda: offering.offer_in_place([]),
    ):
        try:
            look()
        except TransportError as error:
            told.append(str(error))
    return told


def test_a_process_without_files_is_told_what_helps(offering):
    with Child(without_files, offering) as child:
        first, second = child.result()
    assert first == second
    assert "Too many open files" in first


def test_memory_of_multiprocessing_is_shown_where_it_lies(offering, reading):
    memory = shared_memory.SharedMemory(create=True, size=5000)
    try:
        array = np.frombuffer(memory.buf, np.uint8)[:5000]
        handle = offering.offer(Buffer.of(array))
        seen = reading.open(handle).items()
        array[:] = 9
        assert (seen == 9).all()
        offering.release(handle)  # which has kept the array
        del array
    finally:
        memory.close()
        memory.unlink()


def test_private_memory_is_copied_once_and_goes_with_its_handle(offering, reading):
    array = np.arange(100, dtype=np.uint8)
    assert not is_shared(offering, Buffer.of(array))
    before = resources()
    handle = offering.offer(Buffer.of(array))
    array[:] = 0
    assert reading.open(handle).items()[99] == 99
    reading.close_handle(handle)
    offering.release(handle)
    assert settled(before) == before


def test_a_strided_buffer_is_offered_by_its_span(offering, reading):
    buffer = offering.allocate(1000)
    buffer.items()[:] = np.arange(1000) % 251
    strided = Buffer(buffer.address + 900, (10,), (-90,), 1, buffer.owner)
    seen = reading.open(offering.offer(strided))
    assert seen.nbytes == 811
    assert seen.items()[0] == 90


def test_readers_cannot_write_nor_cut_the_memory_short(offering, server, tmp_path):
    handle = offering.offer(offering.allocate(4096))
    connection = FdConnection(tmp_path / "fds", token="secret")
    fd = connection.fetch(handle.key)
    with pytest.raises(OSError, match="not permitted|denied|Bad file"):
        mmap.mmap(fd, 4096)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 0)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # nor by opening it anew for writing
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(again, 0)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(again, 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(again, b"x", 0)
    os.close(again)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    os.close(fd)
    connection.close()


def test_no_memory_left_is_an_error_with_the_bytes_and_leaks_nothing(offering):
    before = resources()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(TransportError, match="2097152"):
            offering.allocate(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(TransportError, match=str(1 << 62)):
        offering.allocate(1 << 62)
    assert settled(before) == before


def test_segments_have_no_name_in_dev_shm(offering):
    before = shared_files()
    offering.offer(offering.allocate(1 << 20))
    assert shared_files() == before


def offer_and_wait(path, pipe):
    server = FdServer(path, token="secret")
    transport = SharedMemoryTransport(fd_server=server)
    buffer = transport.allocate(1 << 20)
    buffer.items()[:] = 42
    pipe.send(("handle", transport.offer(buffer)))
    signal.pause()


def test_a_reader_keeps_its_bytes_when_the_publisher_is_killed(tmp_path):
    before = resources()
    with Child(offer_and_wait, tmp_path / "fds") as child:
        _, handle = child.told()
        connection = FdConnection(tmp_path / "fds", token="secret")
        transport = SharedMemoryTransport(fd_connection=connection)
        seen = transport.open(handle).items()
        child.kill()
        child.join()
        assert (seen == 42).all()
        del seen
        transport.close()
        connection.close()
    assert settled(before) == before


def sleep_on(pipe):
    signal.pause()


def test_a_forked_child_does_not_see_the_segments(offering):
    offering.offer(offering.allocate(1 << 20))
    with Child(sleep_on) as child, open(f"/proc/{child.pid}/maps") as maps:
        assert "memfd:flyweight" not in maps.read()


def test_device_memory_is_refused(offering):
    with pytest.raises(TransportError, match="device 0"):
        offering.offer(Buffer.flat_at(4096, 10, None, device=0))


def test_without_a_line_nothing_of_others_can_be_opened(offering):
    handle = offering.offer(offering.allocate(10))
    with pytest.raises(TransportError, match="connection"):
        SharedMemoryTransport().open(handle)
