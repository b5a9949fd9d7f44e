"""Memory of another host is fetched by its handle, over as many connections as are needed."""

import itertools
import signal
import socket
import threading
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest

from child_processes import LIMIT, Child, in_time, resources, settled, until
from conftest import random_bytes
from flyweight.errors import HandleGone, PeerLost, PeerRefused, TransferTimeout, TransportError
from flyweight.memory import Buffer
from flyweight.transports import network
from flyweight.transports.data_sockets import DataConnection, DataServer, Welcome
from flyweight.transports.network import NetworkHandle, NetworkTransport
from patience import patient  # noqa: F401

DATA = random_bytes(1 << 20)


@contextmanager
def source(**options):
    server = DataServer("127.0.0.1", token="secret", welcome=Welcome(0, "session", "host"))
    with closing(server), closing(NetworkTransport(server=server, **options)) as transport:
        yield server, transport


@pytest.fixture
def offering():
    with source() as (server, transport):
        yield server, transport


@pytest.fixture
def reader(offering):
    connection = DataConnection("127.0.0.1", offering[0].port, token="secret")
    with closing(connection), closing(reading(connection)) as transport:
        yield transport


def reading(connection=None, **options):
    return NetworkTransport(connection=connection, **{"token": "secret", **options})


def fetched(transport, handle, *, timeout_seconds=LIMIT, **options):
    into = np.zeros(handle.nbytes, np.uint8)
    transport.fetch(handle, Buffer.of(into), timeout_seconds=timeout_seconds, **options)
    return into.tobytes()


def test_rows_are_offered_where_they_lie_and_read_as_they_are_now(offering, reader):
    rows = [np.array(DATA[:1000]), np.array(DATA[1000:5000])]
    handle = offering[1].offer_rows(rows, None)
    assert handle.nbytes == 5000
    assert fetched(reader, handle) == DATA[:5000].tobytes()
    rows[1][:] = 9
    assert fetched(reader, handle) == DATA[:1000].tobytes() + b"\x09" * 4000
    assert fetched(offering[1], handle) == fetched(reader, handle)
    part = msgspec.structs.replace(handle, offset=999, nbytes=2)
    assert fetched(reader, part) == fetched(offering[1], part) == DATA[999:1000].tobytes() + b"\x09"


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("change", [{"offset": 1}, {"nbytes": 11}, {"offset": 2**63 - 1}])
def test_a_handle_beyond_its_offer_is_refused(offering, reader, own, change):
    handle = offering[1].offer_rows([DATA[:10]], None)
    with pytest.raises(HandleGone, match="beyond"):
        fetched(offering[1] if own else reader, msgspec.structs.replace(handle, **change))


def test_memory_that_is_not_contiguous_is_copied_once(offering, reader):
    items = np.array(DATA[:600]).reshape(20, 30).T
    buffer = Buffer(items.ctypes.data, items.shape, items.strides, 1, items)
    handle = offering[1].offer(buffer)
    assert fetched(reader, handle) == items.tobytes()
    items[:] = 0
    assert fetched(reader, handle) != items.tobytes()


def test_opened_bytes_stay_as_they_were_read_until_their_handle_is_closed(offering, reader):
    data = np.array(DATA)
    handle = offering[1].offer(Buffer.of(data))
    assert reader.open(handle).items().tobytes() == DATA.tobytes()
    data[:] = 0
    assert reader.open(handle).items().tobytes() == DATA.tobytes()
    reader.close_handle(handle)
    assert reader.open(handle).items().tobytes() == data.tobytes()


def test_a_handle_may_name_its_host_and_then_needs_no_first_connection():
    for host in ("127.0.0.1", "localhost"):
        with source(place_host=host) as (_, transport), closing(reading()) as other:
            handle = transport.offer(Buffer.of(np.array(DATA)))
            assert handle.place.startswith(f"{host}:")
            assert fetched(other, handle) == DATA.tobytes()


def test_a_handle_without_a_host_needs_a_connection(offering):
    handle = offering[1].offer(Buffer.of(np.array(DATA)))
    with closing(reading()) as other, pytest.raises(TransportError, match="host"):
        fetched(other, handle)


GOOD = ["h:1", ":65535", "10.0.0.7:80", "[::1]:5", "[fe80::1.2.3.4]:5", "a-b_c.d:10"]
BAD = [
    "", ":", "h", "h:", "h:0", "h:01", "h:65536", "h:99999", "h:123456", "h:-1", "h: 1", "h:1\n",
    "h:\u0661", "::1:5", "[::1]", "[]:5", "[h]:5", "[::1%eth0]:5", "a b:1", "h:1:2", "tcp://h:1",
    "h" * 254 + ":1", "user@h:1", "h/x:1",
]  # fmt: skip


@pytest.mark.parametrize("place", GOOD)
def test_a_place_is_a_host_and_a_port(place):
    said = {"type": "network", "session": "s", "key": "0" * 16, "offset": 0, "nbytes": 0}
    handle = msgspec.convert({**said, "place": place}, NetworkHandle)
    assert msgspec.json.decode(msgspec.json.encode(handle), type=NetworkHandle) == handle


@pytest.mark.parametrize("place", BAD)
def test_another_text_is_no_place(place):
    said = {"type": "network", "session": "s", "key": "0" * 16, "offset": 0, "nbytes": 0}
    with pytest.raises((TransportError, msgspec.ValidationError), match="HOST:PORT"):
        msgspec.convert({**said, "place": place}, NetworkHandle)


@pytest.mark.parametrize("key", ["", "0" * 15, "0" * 17, "0" * 16 + "\n", "G" * 16])
def test_another_text_is_no_key(key):
    said = {"type": "network", "session": "s", "place": "h:1", "offset": 0, "nbytes": 0}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**said, "key": key}, NetworkHandle)


def test_more_bytes_than_there_is_memory_are_refused_before_they_are_read(offering, reader):
    handle = offering[1].offer(Buffer.of(np.array(DATA)))
    for nbytes in (1 << 50, 2**63 - 1):
        with pytest.raises(TransportError, match=str(nbytes)):
            reader.open(msgspec.structs.replace(handle, nbytes=nbytes))


def test_memory_of_a_device_and_memory_of_another_size_are_refused(offering, reader):
    handle = offering[1].offer(Buffer.of(np.array(DATA)))
    with pytest.raises(TransportError, match="device 3"):
        offering[1].offer(Buffer.flat_at(0, 5, None, device=3))
    with pytest.raises(TransportError, match="1048576"):
        reader.fetch(handle, Buffer.of(np.zeros(5, np.uint8)), timeout_seconds=LIMIT)


def test_a_server_that_does_not_know_the_token_is_not_read_from(offering, reader):
    handle = offering[1].offer(Buffer.of(np.array(DATA)))
    connection = DataConnection("127.0.0.1", offering[0].port, token="secret")
    other = reading(connection, token="guess")
    with closing(connection), closing(other), pytest.raises(PeerRefused):
        fetched(other, handle)


class Fetch(threading.Thread):
    """A fetch in a thread, which stops after its first bytes until `go_on`."""

    def __init__(self, transport, handle, **options):
        super().__init__()
        self.has_some, self.goes_on, self.error = threading.Event(), threading.Event(), None
        self._transport, self._handle, self._options = transport, handle, options
        self.start()

    def run(self):
        try:
            self.data = fetched(
                self._transport, self._handle, on_progress=self._pause, **self._options
            )
        except TransportError as error:
            self.error = error

    def _pause(self, nbytes):
        self.has_some.set()
        self.goes_on.wait(LIMIT)

    def end(self):
        self.goes_on.set()
        self.join(LIMIT)
        assert not self.is_alive()
        return self.error


def test_threads_fetch_at_once_and_reuse_connections(offering, reader):
    before = resources()
    handles = [offering[1].offer(Buffer.of(DATA[n:])) for n in range(5)]
    for _ in range(3):
        threads = [Fetch(reader, handle) for handle in handles]
        assert all(each.has_some.wait(LIMIT) for each in threads)
        for number, each in enumerate(threads):
            assert each.end() is None
            assert each.data == DATA[number:].tobytes()
    assert len(reader._idle) == 5
    reader.close()
    assert settled(before) == before


def test_the_number_of_connections_has_a_limit_and_waiting_for_one_a_deadline(
    offering, reader, monkeypatch
):
    monkeypatch.setattr(network, "MAX_STREAMS", 2)
    handle = offering[1].offer(Buffer.of(DATA))
    first, second = Fetch(reader, handle), Fetch(reader, handle)
    assert first.has_some.wait(LIMIT)
    assert second.has_some.wait(LIMIT)
    with pytest.raises(TransferTimeout, match="in use"):
        fetched(reader, handle, timeout_seconds=0.1)
    third = Fetch(reader, handle)
    until(lambda: reader._changed._waiters)  # it waits for a connection
    assert not third.has_some.is_set()
    assert first.end() is None
    assert third.has_some.wait(LIMIT)
    assert third.end() is second.end() is None


def test_idle_connections_to_another_place_make_room(offering, reader, monkeypatch):
    monkeypatch.setattr(network, "MAX_STREAMS", 2)
    with source() as (_, other):
        for transport in (offering[1], other, offering[1], other, other):
            handle = transport.offer(Buffer.of(DATA))
            assert fetched(reader, handle) == DATA.tobytes()
            assert len(reader._idle) <= 2


def test_an_idle_connection_that_was_closed_is_replaced(offering, reader, monkeypatch):
    server, transport = offering
    handle = transport.offer(Buffer.of(DATA))
    fetched(reader, handle)
    # Also if that shows only when it is used again.
    for is_seen in (True, False):
        if not is_seen:
            blind = property(lambda connection: connection.fileno() >= 0)
            monkeypatch.setattr(DataConnection, "is_open", blind)
        for peer in list(server._threads):
            if peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) != 3000:
                peer.shutdown(socket.SHUT_RDWR)
        until(lambda: len(server._threads) == 1)
        assert fetched(reader, handle) == DATA.tobytes()


def test_a_handle_that_is_gone_costs_nothing_but_its_connection(offering, reader):
    _, transport = offering
    first, second = (transport.offer(Buffer.of(DATA)) for _ in range(2))
    fetched(reader, first)
    transport.release(first)
    for _ in range(3):
        with pytest.raises(HandleGone):
            fetched(reader, first)
    assert fetched(reader, second) == DATA.tobytes()
    assert reader._connection.is_open


def test_a_release_leaves_the_connections_of_finished_reads(offering, reader):
    for _ in range(50):
        handle = offering[1].offer(Buffer.of(DATA[:100]))
        fetched(reader, handle)
        offering[1].release(handle)
    (used,) = reader._idle
    assert used[1].is_open


def serve(pipe):
    with source() as (server, transport):
        pipe.send(("at", (server.port, transport.offer(Buffer.of(DATA)))))
        signal.pause()


@contextmanager
def stopped_source():
    """Give a reader of a process that does not run, and a handle."""
    with Child(serve) as child:
        _, (port, handle) = child.told()
        connection = DataConnection("127.0.0.1", port, token="secret")
        with closing(connection), closing(reading(connection)) as transport:
            fetched(transport, handle)
            child.stop()
            yield child, transport, handle


def test_an_interrupt_ends_every_fetch_at_once():
    with stopped_source() as (child, reader, handle):
        threads = [Fetch(reader, handle, timeout_seconds=2 * LIMIT) for _ in range(3)]
        until(lambda: len(reader._used) + reader._num_connecting == 3)
        reader.interrupt()
        assert [type(each.end()) for each in threads] == [PeerLost] * 3
        child.go_on()
        assert fetched(reader, handle) == DATA.tobytes()


def test_a_silent_source_is_given_up_at_the_deadline_and_a_killed_one_at_once():
    with stopped_source() as (child, reader, handle):
        for _ in range(2):  # the second one needs a new connection
            with in_time(0.2), pytest.raises(TransferTimeout):
                fetched(reader, handle, timeout_seconds=0.2)
        with in_time(0), pytest.raises(TransferTimeout):
            fetched(reader, handle, timeout_seconds=2 * LIMIT, is_over=lambda: True)
        child.kill()
        with pytest.raises(PeerLost):
            fetched(reader, handle)


def fetch_in_child(reader, handle, pipe):
    return fetched(reader, handle) == DATA.tobytes()


@contextmanager
def held(lock):
    """Hold a lock in another thread."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            is_over.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(LIMIT)
    try:
        yield
    finally:
        is_over.set()
        thread.join(LIMIT)


def test_a_forked_child_has_connections_of_its_own(offering, reader, monkeypatch):
    monkeypatch.setattr(network, "MAX_STREAMS", 2)
    handle = offering[1].offer(Buffer.of(DATA))
    fetched(reader, handle)
    busy = [Fetch(reader, handle) for _ in range(2)]
    assert all(each.has_some.wait(LIMIT) for each in busy)
    with held(reader._changed), Child(fetch_in_child, reader, handle) as child:
        assert child.result()
    assert [each.end() for each in busy] == [None, None]
    assert fetched(reader, handle) == DATA.tobytes()


def test_a_closed_transport_reads_no_more_and_leaves_nothing(offering):
    before = resources()
    server, transport = offering
    handle = transport.offer(Buffer.of(DATA))
    connection = DataConnection("127.0.0.1", server.port, token="secret")
    reader = reading(connection)
    reader.open(handle)
    busy = Fetch(reader, handle)
    assert busy.has_some.wait(LIMIT)
    for _ in range(2):
        reader.close()
    assert busy.end() is None  # all bytes were here
    with pytest.raises(TransportError, match="closed"):
        fetched(reader, handle)
    connection.close()
    assert settled(before) == before


def test_every_way_to_cut_rows_is_read_right(offering, reader):
    """All cuts of six bytes into at most four rows."""
    data = DATA[:6]
    for cuts in itertools.combinations_with_replacement(range(7), 3):
        edges = (0, *cuts, 6)
        rows = [data[a:b] for a, b in itertools.pairwise(edges)]
        handle = offering[1].offer_rows(rows, None)
        assert fetched(reader, handle) == data.tobytes()
        offering[1].release(handle)
