"""An opened snapshot, or any other checkpoint, as the source of a publisher."""

import json
import os
import struct

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import FlyweightError, SpecError, VersionError
from flyweight.live import Publisher, Replica
from flyweight.live.source import PublishedFiles
from live.live_processes import TOKEN, free_address

TIMES = {"timeout_seconds": LIMIT}
SHAPES = {"embed": (3000, 700), "w": (64, 96), "e": (4, 6, 8), "scale": (), "empty": (0, 3)}


def content(version, dtype=np.float32):
    """Return a model of some MiB, whose tensors lie over several ranges and chunks."""
    rng = np.random.default_rng(version)
    odd = {"odd": rng.integers(0, 256, 7, np.uint8)}  # what follows lies at odd addresses
    found = {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    small = {f"layer.{n}": rng.standard_normal((5, 3)).astype(dtype) for n in range(300)}
    return {**odd, **found, **small}


def blank(model):
    return {name: np.zeros_like(array) for name, array in model.items()}


def same(found, wanted):
    return all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture
def run(tmp_path):
    """A directory with snapshots of two versions."""
    for version in (6, 7):
        fw.save(content(version), tmp_path / "run", version=version)
    return tmp_path / "run"


def publisher(stored, **options):
    return Publisher(stored, "tcp://127.0.0.1:0", token=TOKEN, **TIMES, **options)


def replica(target, source, **options):
    return Replica(target, source.address, token=TOKEN, **options)


def file_of(run, version):
    """Return the one file with the tensors of a version."""
    (found,) = run.glob(f"v*{version}/*.safetensors")
    return found


@pytest.mark.parametrize("transport", ["auto", "filled", "read"])
@pytest.mark.parametrize("verify", [True, False])
def test_replicas_take_a_snapshot_at_once_and_late(run, transport, verify):
    with fw.open(run) as stored, publisher(stored, verify=verify) as source:
        assert source.version == 7
        for _ in range(2):
            target = blank(content(7))
            with replica(target, source, transport=transport) as sink:
                report = sink.update(**TIMES)
                assert same(target, content(7))
                assert (report.version, report.parent) == (7, stored.manifest.parent)
                assert report.transport == {"auto": "mapped"}.get(transport, transport)
                assert report.verified == ("live" if verify else "nothing")
                assert sink.update(may_keep=True, **TIMES) == report
        with pytest.raises(SpecError, match="without a publish"):
            source.publish(8)


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_ranks_of_a_tensor_parallel_engine_take_their_parts_of_a_snapshot(run, transport):
    model = content(7)
    cuts = {"embed": 0, "w": 1, "e": 2}
    with fw.open(run) as stored, publisher(stored) as source:
        for rank in (0, 1):
            wanted, target = {}, {}
            for name, array in model.items():
                part, offset = array, (0,) * array.ndim
                if name in cuts:
                    dim, size = cuts[name], array.shape[cuts[name]] // 2
                    part = np.take(array, range(rank * size, (rank + 1) * size), dim)
                    offset = tuple(rank * size if n == dim else 0 for n in range(array.ndim))
                wanted[name] = part
                target[name] = fw.Sharded(np.zeros_like(part), array.shape, offset)
            with replica(target, source, transport=transport) as sink:
                assert sink.update(**TIMES).verified == "live"
            assert same({name: each.tensor for name, each in target.items()}, wanted)


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_a_replica_takes_a_snapshot_in_other_dtypes(tmp_path, transport):
    torch = pytest.importorskip("torch")
    model = {"w": torch.randn(2000, 1100), "b": torch.randn(7), "n": torch.arange(5)}
    model["w"][1999, 1099] = 3e38  # infinite as float16
    fw.save(model, tmp_path / "run", version=1)
    target = {"w": torch.zeros(2000, 1100).half(), "b": torch.zeros(7).bfloat16()}
    target["n"] = torch.zeros(5, dtype=torch.int64)
    with (
        fw.open(tmp_path / "run") as stored,
        publisher(stored) as source,
        replica(target, source, cast=True, transport=transport) as sink,
    ):
        report = sink.update(**TIMES)
    assert (report.verified, report.overflows) == ("live", 1)
    assert all(torch.equal(target[name], model[name].to(target[name].dtype)) for name in model)


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
@pytest.mark.parametrize("format", ["hf", "dcp", "pdparams"])
def test_a_checkpoint_without_a_number_or_digests_is_published_by_the_one_that_is_given(
    run, tmp_path, format, transport
):
    fw.convert(run, tmp_path / "model", to=format)
    target = blank(content(7))
    with fw.open(tmp_path / "model") as stored, publisher(stored, version=12) as source:
        assert stored.manifest.version is None
        with replica(target, source, transport=transport) as sink:
            assert sink.update(12, **TIMES).verified == "live"
            assert same(target, content(7))
            with pytest.raises(VersionError):
                sink.update(11, **TIMES)


def flip(path, at):
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff\x00\xff", at)


DAMAGES = {
    "a flipped byte": (flip, "'w'"),
    "a shorter file": (os.truncate, r"has \d+ bytes, \d+ when it was opened"),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_file_is_never_published(run, fault):
    address, target = free_address(), blank(content(7))
    options, (damage, text) = {"token": TOKEN, **TIMES}, DAMAGES[fault]
    with Replica(target, address, token=TOKEN) as sink:
        with fw.open(run, version=6) as stored, Publisher(stored, address, **options):
            sink.update(**TIMES)
        with fw.open(run, version=7) as stored:
            path = file_of(run, 7)
            damage(path, path.read_bytes().index(content(7)["w"].tobytes()) + 99)
            with pytest.raises(FlyweightError, match=text):
                Publisher(stored, address, **options)
        assert (str(sink.state), sink.version) == ("READY", 6)
        assert same(target, content(6))


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_what_happens_to_files_that_are_published_costs_replicas_nothing(run, transport):
    target = blank(content(7))
    with fw.open(run) as stored, publisher(stored) as source:
        os.truncate(file_of(run, 7), 0)
        with replica(target, source, transport=transport) as sink:
            assert sink.update(**TIMES).verified == "live"
        assert same(target, content(7))


@pytest.fixture
def packed(tmp_path):
    """A file of tensors with elements of six, eight and 32 bits, and the bytes of each."""
    rng = np.random.default_rng(1)
    kinds = {"a": ("F6_E2M3", (5, 4, 16)), "b": ("U8", (7,)), "c": ("F32", (40, 30))}
    bits = {"F6_E2M3": 6, "U8": 8, "F32": 32}
    head, found, at = {}, {}, 0
    for name, (dtype, shape) in kinds.items():
        found[name] = rng.integers(0, 256, int(np.prod(shape)) * bits[dtype] // 8, np.uint8)
        end = at + len(found[name])
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(head).encode()
    data = b"".join(each.tobytes() for each in found.values())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return tmp_path / "model.safetensors", found


def test_tensors_of_elements_of_six_bits_are_read_too(packed):
    path, wanted = packed
    with fw.open(path) as stored:
        table = PublishedFiles(stored, 1).read().table
        for row, name in enumerate(stored.manifest.tensors):
            assert table.buffer(row).flat().tobytes() == wanted[name].tobytes()


def test_one_publisher_serves_files(run, tmp_path):
    with fw.open(run) as stored:
        for options, text in [
            ({"rank": 0, "world_size": 2}, "on one rank"),
            ({"keep": "memory"}, "is for models"),
            ({"version": -1}, "version -1"),
        ]:
            with pytest.raises(SpecError, match=text):
                publisher(stored, **options)
    with pytest.raises(SpecError, match="is for files"):
        publisher(content(1), version=3)
