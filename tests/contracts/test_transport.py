"""What every transport promises. A new one joins by adding a line to TRANSPORTS."""

import os
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pytest

from child_processes import FORK, LIMIT, SPAWN, Child, resources, settled
from fakes import FileHandle, FileTransport
from flyweight.cuda import driver
from flyweight.cuda.copies import Copier
from flyweight.errors import HandleGone, TransportError
from flyweight.memory import Buffer
from flyweight.transports.cuda_ipc import CudaIpcHandle, CudaIpcTransport
from flyweight.transports.data_sockets import DataConnection, DataServer, Welcome
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.network import NetworkHandle, NetworkTransport
from flyweight.transports.shared_memory import SharedMemoryHandle, SharedMemoryTransport
from patience import patient  # noqa: F401

BUCKET = np.frombuffer(bytes(range(256)) * 4096, np.uint8)
TOKEN = "secret"


def on_host(data):
    return Buffer.of(np.array(data))


def on_device(data):
    buffer = driver.allocate(0, len(data))
    copier = Copier(0)
    copier.copy(buffer, Buffer.of(np.array(data)))
    copier.wait(LIMIT)
    copier.close()
    return buffer


def bytes_at(buffer):
    if buffer.device is None:
        return buffer.items().tobytes()
    found = np.empty(buffer.nbytes, np.uint8)
    copier = Copier(buffer.device)
    copier.copy(Buffer.of(found), buffer)
    copier.wait(LIMIT)
    copier.close()
    return found.tobytes()


@dataclass(frozen=True)
class Kind:
    """How the suite makes a transport, on either side of a directory that both know."""

    offering: Callable
    reading: Callable
    """Return a context that gives a transport, for that directory."""
    handle: type
    memory: Callable = on_host
    """Return a buffer that the transport can offer, with the given bytes."""
    context: object = FORK
    outlives_release: bool = True
    """Whether a reader keeps what it has open although its offer is released."""


@contextmanager
def by_server(make, directory):
    """Give a transport of ours that offers, through a server of file descriptors."""
    server = FdServer(directory / "fds", token=TOKEN)
    with closing(server), closing(make(fd_server=server)) as transport:
        yield transport


@contextmanager
def by_connection(make, directory):
    connection = FdConnection(directory / "fds", token=TOKEN)
    with closing(connection), closing(make(fd_connection=connection)) as transport:
        yield transport


@contextmanager
def by_data_server(directory):
    server = DataServer("127.0.0.1", token=TOKEN, welcome=Welcome(0, "session", "host"))
    (directory / "port").write_text(str(server.port))
    with closing(server), closing(NetworkTransport(server=server)) as transport:
        yield transport


@contextmanager
def by_data_connection(directory):
    port = int((directory / "port").read_text())
    connection = DataConnection("127.0.0.1", port, token=TOKEN)
    transport = NetworkTransport(connection=connection, token=TOKEN)
    with closing(connection), closing(transport):
        yield transport


def by_file(directory):
    return closing(FileTransport(directory))


TRANSPORTS = {
    "shared-memory": Kind(
        partial(by_server, SharedMemoryTransport),
        partial(by_connection, SharedMemoryTransport),
        SharedMemoryHandle,
    ),
    "cuda-ipc": Kind(
        partial(by_server, CudaIpcTransport),
        partial(by_connection, CudaIpcTransport),
        CudaIpcHandle,
        on_device,
        SPAWN,  # a forked process cannot use a driver that its parent has started
        outlives_release=False,  # the owner of device memory must keep it for its readers
    ),
    "network": Kind(by_data_server, by_data_connection, NetworkHandle),
    "a third party's": Kind(by_file, by_file, FileHandle),
}
no_gpu = pytest.mark.skipif(not driver.num_devices(), reason="the CUDA driver is not here")
MARKS = {"cuda-ipc": [pytest.mark.gpu, no_gpu]}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in TRANSPORTS])
def kind(request):
    return TRANSPORTS[request.param]


@pytest.fixture
def offering(kind, tmp_path):
    """A transport that offers, to children of the test that know its directory."""
    with kind.offering(tmp_path) as transport:
        yield transport


def read_elsewhere(kind, directory, text, pipe):
    try:
        with kind.reading(directory) as transport:
            handle = msgspec.json.decode(text, type=kind.handle)
            data = bytes_at(transport.open(handle))
            transport.close_handle(handle)
            transport.close_handle(handle)
            return data
    except TransportError as error:
        return type(error).__name__


def elsewhere(kind, directory, handle):
    text = msgspec.json.encode(handle)
    with Child(read_elsewhere, kind, directory, text, context=kind.context) as child:
        return child.result()


def test_another_process_opens_the_same_bytes_by_a_handle_that_went_through_json(
    kind, offering, tmp_path
):
    handle = offering.offer(kind.memory(BUCKET))
    assert elsewhere(kind, tmp_path, handle) == BUCKET.tobytes()


def test_the_offering_process_can_open_its_own_handle(kind, offering):
    handle = offering.offer(kind.memory(BUCKET))
    assert bytes_at(offering.open(handle)) == BUCKET.tobytes()


def test_a_released_handle_is_gone_and_release_may_repeat(kind, offering, tmp_path):
    handle = offering.offer(kind.memory(BUCKET))
    offering.release(handle)
    offering.release(handle)
    assert elsewhere(kind, tmp_path, handle) == "HandleGone"
    with pytest.raises(HandleGone):
        offering.open(handle)


def test_a_part_of_a_buffer_can_be_offered(kind, offering, tmp_path):
    buffer = kind.memory(BUCKET)
    part = Buffer(buffer.address + 100, (50,), (1,), 1, buffer.owner, device=buffer.device)
    assert elsewhere(kind, tmp_path, offering.offer(part)) == BUCKET[100:150].tobytes()


def test_no_bytes_are_bytes_too(kind, offering, tmp_path):
    buffer = kind.memory(BUCKET)
    none = Buffer(buffer.address, (0,), (1,), 1, buffer.owner, device=buffer.device)
    assert elsewhere(kind, tmp_path, offering.offer(none)) == b""


def test_a_handle_of_another_session_is_gone(kind, offering, tmp_path):
    """C27: handles are typed records of a session; those of one that is over are refused."""
    handle = offering.offer(kind.memory(BUCKET))
    offering.close()
    assert elsewhere(kind, tmp_path, handle) == "HandleGone"


@pytest.mark.parametrize("field", ["nbytes", "offset"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_handle_of_absurd_numbers_is_no_handle(kind, offering, field, value):
    told = msgspec.to_builtins(offering.offer(kind.memory(BUCKET)))
    with pytest.raises((TransportError, msgspec.ValidationError)):
        msgspec.convert({**told, field: value}, kind.handle)


def test_a_handle_that_reaches_beyond_its_memory_is_refused(kind, offering, tmp_path):
    told = msgspec.to_builtins(offering.offer(kind.memory(BUCKET)))
    try:
        handle = msgspec.convert({**told, "nbytes": 1 << 50}, kind.handle)
    except TransportError:
        return  # it knows its own bounds
    assert elsewhere(kind, tmp_path, handle) == "TransportError"


def test_many_offers_and_releases_leak_nothing(kind, offering):
    offering.release(offering.offer(kind.memory(BUCKET)))
    before = resources()
    for _ in range(50):
        offering.release(offering.offer(kind.memory(BUCKET)))
    assert settled(before) == before


def hold_open(kind, directory, text, pipe):
    with kind.reading(directory) as transport:
        buffer = transport.open(msgspec.json.decode(text, type=kind.handle))
        pipe.send(("open", os.getpid()))
        pipe.recv()
        return bytes_at(buffer)


def test_a_release_does_not_tear_what_a_reader_has_open(kind, offering, tmp_path):
    if not kind.outlives_release:
        pytest.skip("the owner of this memory must keep it for its readers")
    handle = offering.offer(kind.memory(BUCKET))
    with Child(hold_open, kind, tmp_path, msgspec.json.encode(handle)) as child:
        child.told()
        offering.release(handle)
        child.send("go on")
        assert child.result() == BUCKET.tobytes()
