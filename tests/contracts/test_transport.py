"""What every transport promises. A new one joins by adding a line to TRANSPORTS."""

import os

import msgspec
import numpy as np
import pytest

from flyweight.cuda import driver
from flyweight.cuda.copies import Copier
from flyweight.errors import HandleGone, TransportError
from flyweight.memory import Buffer
from flyweight.transports.cuda_ipc import CudaIpcHandle, CudaIpcTransport
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.shared_memory import SharedMemoryHandle, SharedMemoryTransport
from live_models import FORK, SPAWN, Child, resources, settled

BUCKET = np.frombuffer(bytes(range(256)) * 4096, np.uint8)
TOKEN = "secret"


def on_host(data):
    return Buffer.of(np.array(data))


def on_device(data):
    buffer = driver.allocate(0, len(data))
    copier = Copier(0)
    copier.copy(buffer, Buffer.of(np.array(data)))
    copier.wait(10)
    copier.close()
    return buffer


def bytes_at(buffer):
    if buffer.device is None:
        return buffer.items().tobytes()
    found = np.empty(buffer.nbytes, np.uint8)
    copier = Copier(buffer.device)
    copier.copy(Buffer.of(found), buffer)
    copier.wait(10)
    copier.close()
    return found.tobytes()


no_gpu = pytest.mark.skipif(not driver.is_available(), reason="the CUDA driver is not here")
TRANSPORTS = {
    "shared-memory": (SharedMemoryTransport, SharedMemoryHandle, on_host),
    "cuda-ipc": (CudaIpcTransport, CudaIpcHandle, on_device),
}
PARAMS = [
    "shared-memory",
    pytest.param("cuda-ipc", marks=[pytest.mark.gpu, no_gpu]),
]


@pytest.fixture(params=PARAMS)
def kind(request):
    return TRANSPORTS[request.param]


@pytest.fixture
def offering(kind, tmp_path):
    """A transport that offers, at a door that the test's children find."""
    door = FdServer(tmp_path / "door", token=TOKEN)
    transport = kind[0](fd_server=door)
    yield transport
    transport.close()
    door.close()


def read_elsewhere(kind, path, text, pipe):
    line = FdConnection(path, token=TOKEN)
    transport = kind[0](fd_connection=line)
    try:
        handle = msgspec.json.decode(text, type=kind[1])
        data = bytes_at(transport.open(handle))
        transport.close_handle(handle)
        return data
    except TransportError as error:
        return type(error).__name__
    finally:
        transport.close()
        line.close()


def elsewhere(kind, tmp_path, handle):
    text = msgspec.json.encode(handle)
    # A process that was forked cannot use a driver that its parent has started.
    context = SPAWN if kind[1] is CudaIpcHandle else FORK
    with Child(read_elsewhere, kind, tmp_path / "door", text, context=context) as child:
        return child.result()


def test_another_process_opens_the_same_bytes_by_a_handle_that_went_through_json(
    kind, offering, tmp_path
):
    handle = offering.offer(kind[2](BUCKET))
    assert elsewhere(kind, tmp_path, handle) == BUCKET.tobytes()


def test_the_offering_process_can_open_its_own_handle(kind, offering):
    handle = offering.offer(kind[2](BUCKET))
    assert bytes_at(offering.open(handle)) == BUCKET.tobytes()


def test_a_released_handle_is_gone_and_release_may_repeat(kind, offering, tmp_path):
    handle = offering.offer(kind[2](BUCKET))
    offering.release(handle)
    offering.release(handle)
    assert elsewhere(kind, tmp_path, handle) == "HandleGone"
    with pytest.raises(HandleGone):
        offering.open(handle)


def test_a_part_of_a_buffer_can_be_offered(kind, offering, tmp_path):
    buffer = kind[2](BUCKET)
    part = Buffer(buffer.address + 100, (50,), (1,), 1, buffer.owner, device=buffer.device)
    assert elsewhere(kind, tmp_path, offering.offer(part)) == BUCKET[100:150].tobytes()


def test_no_bytes_are_bytes_too(kind, offering, tmp_path):
    buffer = kind[2](BUCKET)
    none = Buffer(buffer.address, (0,), (1,), 1, buffer.owner, device=buffer.device)
    assert elsewhere(kind, tmp_path, offering.offer(none)) == b""


def test_a_handle_of_another_session_is_gone(kind, offering, tmp_path):
    """C27: handles are typed records of a session; those of one that is over are refused."""
    handle = offering.offer(kind[2](BUCKET))
    offering.close()
    assert elsewhere(kind, tmp_path, handle) == "HandleGone"


@pytest.mark.parametrize("field", ["nbytes", "offset"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_handle_of_absurd_numbers_is_no_handle(kind, offering, field, value):
    told = msgspec.to_builtins(offering.offer(kind[2](BUCKET)))
    with pytest.raises((TransportError, msgspec.ValidationError)):
        msgspec.convert({**told, field: value}, kind[1])


def test_a_handle_that_reaches_beyond_its_memory_is_refused(kind, offering, tmp_path):
    told = msgspec.to_builtins(offering.offer(kind[2](BUCKET)))
    try:
        handle = msgspec.convert({**told, "nbytes": 1 << 50}, kind[1])
    except TransportError:
        return  # it knows its own bounds
    assert elsewhere(kind, tmp_path, handle) == "TransportError"


def test_many_offers_and_releases_leak_nothing(kind, offering):
    offering.release(offering.offer(kind[2](BUCKET)))
    before = resources()
    for _ in range(50):
        offering.release(offering.offer(kind[2](BUCKET)))
    assert settled(before) == before


def hold_open(kind, path, text, pipe):
    line = FdConnection(path, token=TOKEN)
    transport = kind[0](fd_connection=line)
    handle = msgspec.json.decode(text, type=kind[1])
    buffer = transport.open(handle)
    pipe.send(("open", os.getpid()))
    pipe.recv()
    return bytes_at(buffer)


def test_a_release_does_not_tear_what_a_reader_has_open(kind, offering, tmp_path):
    if kind[1] is CudaIpcHandle:
        pytest.skip("of device memory that is not ours the owner must keep the lease")
    handle = offering.offer(kind[2](BUCKET))
    with Child(hold_open, kind, tmp_path / "door", msgspec.json.encode(handle)) as child:
        child.told()
        offering.release(handle)
        child.send("go on")
        assert child.result() == BUCKET.tobytes()
