"""What every UpdateSink promises: live parameters and an engine's loader, in rounds made here."""

import numpy as np
import pytest
from msgspec.structs import replace

from flyweight.adapters.loader import Loader
from flyweight.errors import DigestMismatch, TransportError
from flyweight.live.loader_sink import LoaderSink
from flyweight.live.memory_sink import MemorySink
from flyweight.live.messages import Agreed, Begin, Memory
from flyweight.live.remote_source import RemoteSource
from flyweight.memory import Buffer
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.tables import Boxes, Pieces, Places, packed
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
        assert sorted(want.tensors.names) == ["b", "m"]
        contents = {"m": MAPPED, "b": BUCKETED}
        self.contents = [contents[name] for name in want.tensors.names]
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
        digests = digests_of(*self.contents) if should_verify else None
        self.begin = Begin(
            1, 1, 7, None, "published", "host+mapped", should_verify, "xxh3", digests, 1, memory, {}
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


class StagingLoader(Loader):
    """A loader that wants 'b' before 'm'."""

    def __init__(self, load, staging_bytes):
        super().__init__(load, "numpy", "cpu")
        self.staging_bytes = staging_bytes

    def choose(self, tensors):
        return dict(sorted(tensors.items()))


@pytest.fixture(params=["memory", "loader", "staging loader"])
def target(request):
    """A sink, and where what it received is found."""
    if request.param == "memory":
        model = {"m": np.zeros(6000, np.uint8), "b": np.zeros(500, np.uint8)}
        return MemorySink(model), model
    model = {}
    if request.param == "loader":
        return LoaderSink(Loader(model.update, "numpy", "cpu")), model
    return LoaderSink(StagingLoader(model.update, 1 << 20)), model


def test_a_sink_receives_every_byte_and_digests_it(target):
    sink, model = target
    for _ in range(2):  # what was prepared serves the next round too
        round_ = Round(sink)
        sink.stage(round_)
        result = sink.receive(round_)
        sink.unstage()
        assert result.digests == digests_of(*round_.contents)
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
    sink.stage(round_)
    assert "touch" not in round_.told
    sink.receive(round_)
    assert sorted(round_.told) == ["emptied 3", "next", "touch"]
    assert round_.told.index("next") < round_.told.index("emptied 3")


def test_a_round_that_does_not_verify_has_no_digests(target):
    sink, _ = target
    round_ = Round(sink, should_verify=False)
    sink.stage(round_)
    assert sink.receive(round_).digests == b""


def test_a_round_that_lacks_bytes_is_refused_before_it_reaches_the_sink(target):
    sink, model = target
    with pytest.raises(TransportError, match="499"):
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


@pytest.mark.parametrize(("staging_bytes", "num_staged"), [(0, 0), (500, 1), (6499, 1), (6500, 2)])
def test_a_loader_stages_what_fits_before_it_touches_anything(staging_bytes, num_staged):
    given, told = [], []

    def load(named):
        for name, _ in named:
            given.append(name)
            told.append(list(round_.told))

    sink = LoaderSink(StagingLoader(load, staging_bytes))
    round_ = Round(sink)
    sink.stage(round_)
    staged = {0: [], 1: ["next", "emptied 3"], 2: ["next", "emptied 3"]}[num_staged]
    assert (round_.told, round_.nbytes, given) == (staged, [0, 500, 6500][num_staged], [])
    result = sink.receive(round_)
    assert given == ["b", "m"]
    assert result.digests == digests_of(BUCKETED, MAPPED)


@pytest.mark.parametrize("staging_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", ["m", "b"])
def test_a_loader_never_gets_a_tensor_whose_digest_is_wrong(staging_bytes, name):
    given = []

    def load(named):
        given.extend(name for name, _ in named)

    sink = LoaderSink(StagingLoader(load, staging_bytes))
    round_ = Round(sink)
    digests = bytearray(round_.begin.digests)
    digests[8 * ["b", "m"].index(name)] ^= 1
    round_.begin = replace(round_.begin, digests=bytes(digests))
    with pytest.raises(DigestMismatch, match=f"'{name}'.*digest"):
        sink.stage(round_) or sink.receive(round_)
    assert name not in given
    if staging_bytes:
        assert "touch" not in round_.told, "what is wrong before the pause costs no version"


@pytest.mark.parametrize("digests", [None, b"", bytes(8)])
def test_a_loader_refuses_a_round_that_verifies_without_digests(digests):
    sink = LoaderSink(StagingLoader(list, 0))
    round_ = Round(sink)
    round_.begin = replace(round_.begin, digests=digests)
    with pytest.raises(TransportError, match="digests"):
        sink.stage(round_)
