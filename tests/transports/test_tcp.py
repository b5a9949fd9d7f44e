"""Rows of memory are sent as one run of bytes, whatever the gaps between their items."""

import socket
import threading
from contextlib import closing

import numpy as np
import pytest

from child_processes import LIMIT
from flyweight.transports import tcp
from flyweight.transports.tcp import PACK_BYTES, Rows

RNG = np.random.default_rng(5)
HEAD = b"+"


def rows_with_gaps():
    """Return arrays of every kind: whole, transposed, cut, backwards, repeated, large, and of odd items."""
    cube = RNG.integers(0, 2**16, (6, 50, 40), np.uint16)
    wide = RNG.integers(0, 2**32, (700, 512), np.uint32)
    odd = RNG.integers(0, 256, 24 * 30, np.uint8).view("V12").reshape(6, 10)
    return [
        memoryview(b"start"), cube, cube.T, cube[::2, 1:, 3:7], cube[::-1, ::-1], wide[:, :128],
        wide[:, 1::2], memoryview(bytes(7)), odd[:, ::3], np.broadcast_to(cube[0], (3, 50, 40)),
    ]  # fmt: skip


def bytes_of(rows):
    return b"".join(bytes(row) if isinstance(row, memoryview) else row.tobytes() for row in rows)


def sent(rows, offset, nbytes, *, timeout=None):
    """Send a range through a pair of sockets, and return what arrives."""
    a, b = socket.socketpair()
    with closing(a), closing(b):
        a.settimeout(timeout)
        arrived = bytearray()

        def receive():
            while part := b.recv(1 << 20):
                arrived.extend(part)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        rows.send(a, HEAD, offset, nbytes)
        a.shutdown(socket.SHUT_WR)
        thread.join(LIMIT)
        assert not thread.is_alive()
        return bytes(arrived)


@pytest.mark.parametrize("timeout", [None, LIMIT], ids=["all at once", "in parts"])
def test_any_range_of_rows_with_gaps_is_sent(timeout):
    """A socket with a timeout takes what fits, so that the rest is sent by further calls."""
    made = rows_with_gaps()
    rows, whole = Rows(made), bytes_of(made)
    assert rows.nbytes == len(whole)
    ends = np.cumsum([row.nbytes for row in made]).tolist()
    edges = sorted({0, 1, *ends, *(end - 1 for end in ends), *(end + 3 for end in ends[:-1])})
    for start in edges:
        for end in (start, start + 1, start + PACK_BYTES, len(whole)):
            if start <= end <= len(whole):
                assert sent(rows, start, end - start, timeout=timeout) == HEAD + whole[start:end]


def test_more_rows_than_one_call_takes_are_sent(monkeypatch):
    monkeypatch.setattr(tcp, "_MAX_ROWS", 3)
    data = RNG.integers(0, 256, 100, np.uint8)
    rows = Rows([data[i : i + 7] for i in range(0, 100, 7)])
    for start, end in ((0, 100), (6, 8), (20, 90), (100, 100)):
        assert sent(rows, start, end - start) == HEAD + data[start:end].tobytes()


def test_rows_without_bytes_are_left_out():
    rows = Rows([memoryview(b""), np.empty((3, 0), np.uint8), np.empty((4, 0, 2))[:, ::2]])
    assert rows.nbytes == 0
    assert sent(rows, 0, 0) == HEAD


def test_rows_are_read_when_they_are_sent():
    """A thread uses its memory for packing again: what was sent before must not come again."""
    data = np.zeros((100, 100), np.uint8)
    rows = Rows([data[:, ::2], data[:, 1::2], data[::2, ::5]])
    for version in (1, 2, 3):
        data[:] = version
        assert sent(rows, 0, rows.nbytes) == HEAD + bytes([version]) * rows.nbytes
