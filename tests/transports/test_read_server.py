"""What peers say about memory is checked, and the engine's process fails by name."""

import os
import sys

import msgspec
import numpy as np
import pytest

from child_processes import resources, settled
from flyweight.errors import MissingDependency, PeerLost, TransportError
from flyweight.memory import Buffer
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.read_messages import (
    MAX_TEXT_BYTES,
    Description,
    Place,
    checked_place,
    decoded,
)
from flyweight.transports.read_server import ReadServer
from flyweight.transports.shared_memory import SharedMemoryTransport

PLACE = Place(
    session="s", slot=1, word=5, address=1000, nbytes=100, region=(900, 300), key=b"key"
)  # fmt: skip


def changed(**fields):
    return msgspec.json.encode(msgspec.structs.replace(PLACE, **fields))


def test_a_place_survives_its_way_to_a_reader():
    assert checked_place(changed(), "s", 0, 100) == PLACE


@pytest.mark.parametrize(
    "fields",
    [
        {"address": 899}, {"address": 1101}, {"nbytes": 201}, {"region": (900, 199)}, {"slot": 4096},
        {"slot": -1}, {"word": 0}, {"address": -1}, {"address": 2**63}, {"nbytes": 2**63 - 1},
        {"region": (2**63 - 1, 2**63 - 1)}, {"key": b"k" * MAX_TEXT_BYTES},
    ],
)  # fmt: skip
def test_a_place_that_contradicts_itself_is_refused(fields):
    with pytest.raises(TransportError, match="place"):
        checked_place(changed(**fields), "s", 0, 10)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (-1, 5), (2**63, 1)])
def test_bytes_outside_of_a_place_are_refused(offset, nbytes):
    with pytest.raises(TransportError, match="100 bytes"):
        checked_place(changed(), "s", offset, nbytes)


def test_a_place_of_a_process_that_ended_is_a_lost_peer():
    with pytest.raises(PeerLost, match="ended"):
        checked_place(changed(), "another", 0, 100)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"\xff", b'{"engine":1}', b"{" * 5000, b'{"session":"\xff"}']
)
@pytest.mark.parametrize("kind", [Place, Description])
def test_what_is_no_message_is_refused(kind, text):
    with pytest.raises(TransportError, match="is none"):
        decoded(kind, text)


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_an_engine_that_is_not_installed_is_named_with_the_remedy(no_network_engine, engine):
    before = resources()
    server = ReadServer(engine, address="127.0.0.1")
    for _ in range(2):
        with pytest.raises(MissingDependency, match=f"{engine}.*pip install"):
            server.describe()
        assert server.pid is None
    server.close()
    assert settled(before) == before


def test_a_process_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    server = ReadServer("nixl")
    with pytest.raises(PeerLost, match="No such file"):
        server.describe()
    server.close()


def test_a_process_that_ends_at_once_is_named_by_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = ReadServer("nixl")
    with pytest.raises(PeerLost, match="exit code 1"):
        server.describe()
    server.close()


def test_a_closed_server_serves_nothing_and_closes_twice():
    server = ReadServer("nixl")
    buffer = server.allocate(100)
    buffer.items()[:] = 7
    server.close()
    server.close()
    with pytest.raises(TransportError, match="closed"):
        server.place(buffer)
    assert buffer.items().tolist() == [7] * 100  # the memory lives as long as its buffer


def test_device_memory_and_gaps_are_refused():
    server = ReadServer("nixl")
    gaps = Buffer.of(np.zeros(10, np.uint8)[::2])
    for buffer in (gaps, Buffer.flat_at(4096, 10, None, device=0)):
        with pytest.raises(TransportError, match="contiguous"):
            server.place(buffer)
    server.close()


def test_a_forked_child_closes_its_copies():
    server = ReadServer("nixl")
    server.allocate(100)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            server.close()
            code = len([f for f in resources()["files"] if "flyweight-reads" in f])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    server.close()


def test_shared_memory_is_found_by_its_file_and_other_memory_refused(tmp_path):
    # `_found` needs no engine; a whole read of such memory is in test_nixl_reads.
    fds = FdServer(tmp_path / "fds", token="t")
    transport = SharedMemoryTransport(fd_server=fds)
    buffer = transport.allocate(5000)
    server = ReadServer("nixl")
    region = server._found(buffer)
    assert (region.start, region.nbytes, region.offset) == (buffer.address, 5000, 0)
    private = Buffer.of(np.zeros(5000, np.uint8))
    with pytest.raises(TransportError, match="shared memory"):
        server._found(private)
    server.close()
    transport.close()
    fds.close()
