"""Handles of memory that an engine serves: hostile ones are refused, and reach no engine."""

import sys
import time
import types

import msgspec
import pytest

from child_processes import LIMIT
from conftest import random_bytes
from flyweight.errors import TransportError
from flyweight.memory import Buffer
from flyweight.transports import engine_reads, mooncake_reads
from flyweight.transports.engine_reads import EngineHandle, EngineReads
from flyweight.transports.network_engines import Engines
from flyweight.transports.read_messages import MAX_TEXT_BYTES

SAID = {"type": "engine", "engine": "nixl", "description": b"d", "place": b"p", "nbytes": 8}


@pytest.mark.parametrize(
    "lie",
    [
        {"engine": "sockets"},
        {"engine": "nixl\n"},
        {"engine": 1},
        {"description": bytes(MAX_TEXT_BYTES + 1)},
        {"place": bytes(MAX_TEXT_BYTES + 1)},
        {"place": "text"},
        {"nbytes": -1},
        {"nbytes": 1 << 63},
        {"nbytes": 1.5},
        {"more": 1},
    ],
    ids=str,
)
def test_a_handle_has_limits(lie):
    text = msgspec.msgpack.encode(SAID)
    handle = msgspec.msgpack.decode(text, type=EngineHandle)
    assert msgspec.json.decode(msgspec.json.encode(handle), type=EngineHandle) == handle
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**SAID, **lie}), type=EngineHandle)


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
@pytest.mark.parametrize("description", [b"", b"{}", b"\xff" * 100, b"[" * MAX_TEXT_BYTES])
def test_a_description_that_is_none_is_refused_before_an_engine_sees_it(engine, description):
    handle = EngineHandle(engine=engine, description=description, place=b"", nbytes=8)
    into = Buffer.of(random_bytes(8))
    before = into.items().copy()
    with pytest.raises(TransportError, match="description"):
        EngineReads("127.0.0.1").fetch(handle, into, timeout_seconds=LIMIT)
    assert (into.items() == before).all()


class FakeReader:
    """A reader that can be told to fail."""

    error, made = None, []

    def __init__(self, description, *, address):
        self.description, self.is_closed = description, False
        self.made.append(self)

    def read(self, place, offset, into, **options):
        assert not self.is_closed
        if self.error is not None:
            raise self.error

    def close(self):
        self.is_closed = True


def test_readers_are_kept_until_one_fails_or_others_are_needed(monkeypatch):
    made = []
    monkeypatch.setattr(FakeReader, "made", made)
    monkeypatch.setattr(engine_reads, "NixlReader", FakeReader)
    reads, into = EngineReads("127.0.0.1"), Buffer.of(random_bytes(8))

    def fetch(description=b"d"):
        handle = EngineHandle(engine="nixl", description=description, place=b"p", nbytes=8)
        reads.fetch(handle, into, timeout_seconds=LIMIT)

    fetch(), fetch()
    assert len(made) == 1
    fetch(b"of another process")
    assert [each.description for each in made] == [b"d", b"of another process"]
    monkeypatch.setattr(made[0], "error", KeyboardInterrupt(), raising=False)
    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert [each.is_closed for each in made] == [True, False]
    fetch()
    assert len(made) == 3
    reads.close_readers()
    assert all(each.is_closed for each in made)
    fetch()
    reads.close()
    assert made[3].is_closed
    with pytest.raises(TransportError, match="closed"):
        fetch()


class SlowEngine:
    """Mooncake's engine, which takes a while to start."""

    def __init__(self):
        time.sleep(0.2)  # others come meanwhile; the test passes as well if they come later

    def initialize(self, *args):
        return 0


def test_threads_that_need_mooncake_at_once_share_an_engine(monkeypatch, threads):
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = SlowEngine
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(mooncake_reads, "engines_here", lambda: Engines(mooncake="1"))
    address = "an address of this test"
    engines = list(threads.map(lambda _: mooncake_reads._engine(address, "tcp"), range(4)))
    assert len({id(each) for each in engines}) == 1
