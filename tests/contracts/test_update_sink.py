"""What every UpdateSink promises: live parameters and an engine's loader, in rounds made here."""

import numpy as np
import pytest

from flyweight.adapters.loader import Loader
from flyweight.errors import TransportError
from flyweight.live.loader_sink import LoaderSink
from flyweight.live.memory_sink import MemorySink
from flyweight.live.message_tables import Boxes, Pieces, Places, packed
from flyweight.live.messages import Agreed, Begin, Memory
from flyweight.live.remote_source import RemoteSource
from flyweight.memory import Buffer
from flyweight.plans.copy_table import BoxTable
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import TensorSpec
from flyweight.transports.shared_memory import SharedMemoryHandle
from peers import digests_of

MAPPED, BUCKETED = np.arange(6000, dtype=np.uint8), np.arange(500, dtype=np.uint8)[::-1].copy()
SPECS = {name: TensorSpec(dtype_named("u8"), (n,)) for name, n in (("m", 6000), ("b", 500))}


def handle(key):
    return SharedMemoryHandle(session="here", key=key, offset=0, nbytes=1)


class OwnMemory:
    """A transport that opens this process's own memory, and the only one there is."""

    def of(self, handle):
        return self

    def open(self, handle):
        return Buffer.of({"m": MAPPED, "slot": BUCKETED}[handle.key])


class Round:
    """A round that fills 'm' from mapped memory and 'b' from one bucket."""

    def __init__(self, sink, *, should_verify=True, bucket_bytes=500):
        want = sink.want(SPECS, {})
        assert want.tensors.names == ("m", "b")
        zeros = packed([0] * len(SPECS))
        agreed = Agreed(Boxes.of(BoxTable.whole(SPECS.values())), zeros, ("",), zeros)
        self.source = RemoteSource(agreed, SPECS, {}, want, OwnMemory())
        nothing, one = packed([0]), packed([1])
        memory = Memory(
            (handle("m"),),
            Places(1, nothing, nothing, nothing, one),
            {0: handle("slot")},
            {3: 0},
            Pieces(1, packed([3]), one, nothing, packed([bucket_bytes]), nothing),
        )
        self.begin = Begin(
            1, 1, 7, None, "published", "host+mapped", should_verify, "xxh3", None, 1, memory, {}
        )
        self.source.open(self.begin)
        self.deadline, self.told, self.nbytes = float("inf"), [], 0

    def next_bucket(self):
        self.told.append("next")
        return 3

    def bucket_emptied(self, bucket):
        self.told.append(f"emptied {bucket}")

    def copied(self):
        self.told.append("copied")

    def touch(self):
        self.told.append("touch")

    def on_progress(self, nbytes):
        self.nbytes += nbytes


@pytest.fixture(params=["memory", "loader"])
def target(request):
    """A sink, and where what it received is found."""
    if request.param == "memory":
        model = {"m": np.zeros(6000, np.uint8), "b": np.zeros(500, np.uint8)}
        return MemorySink(model), model
    model = {}
    return LoaderSink(Loader(model.update, "numpy", "cpu")), model


def test_a_sink_receives_every_byte_and_digests_it(target):
    sink, model = target
    for _ in range(2):  # what was prepared serves the next round too
        round_ = Round(sink)
        result = sink.receive(round_)
        assert result.digests == digests_of(MAPPED, BUCKETED)
        assert (model["m"].tobytes(), model["b"].tobytes()) == (
            MAPPED.tobytes(),
            BUCKETED.tobytes(),
        )
        assert round_.nbytes == 6500
        for each in model.values():
            each[:] = 0


def test_a_sink_says_so_before_it_writes_and_frees_each_bucket(target):
    sink, _ = target
    round_ = Round(sink)
    sink.receive(round_)
    assert round_.told == ["touch", "next", "emptied 3"]


def test_a_round_that_does_not_verify_has_no_digests(target):
    sink, _ = target
    assert sink.receive(Round(sink, should_verify=False)).digests == b""


def test_a_round_that_lacks_bytes_is_refused_before_it_reaches_the_sink(target):
    sink, model = target
    with pytest.raises(TransportError, match="499 of the 500 bytes"):
        Round(sink, bucket_bytes=499)
    assert not np.any(model.get("m", 0)), "nothing was written, or given to the loader"


def test_a_sink_is_current_once_it_has_chosen_tensors(target):
    sink, _ = target
    assert not sink.is_current()
    sink.want(SPECS, {})
    assert sink.is_current()
    sink.touched()
    sink.finish({})
    sink.close()
    sink.close()
