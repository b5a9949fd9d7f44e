"""Readers of foreign bytes, given bytes from the dark: a FormatError, or what was really there."""

import json
import pickle
import struct
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flyweight as fw
from campaign import budget
from fakes import MemoryStore
from flyweight.errors import FlyweightError, FormatError
from flyweight.formats import pickle_values
from flyweight.formats.huggingface import open_shards
from flyweight.formats.paddle_dist import open_paddle
from flyweight.formats.pdparams import open_pdparams
from flyweight.formats.safetensors import open_files
from flyweight.formats.snapshot import decode_envelope
from flyweight.formats.torch_dcp import open_dcp
from flyweight.ports import Store
from flyweight.spec.manifest_json import decode_manifest

pytestmark = pytest.mark.check

FUZZ = settings(
    max_examples=budget(40, 4000), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_all(open_it, data):
    """Open and read everything; only our own errors may come out, and no read may leave the file."""
    store: Store = MemoryStore({"file": data})
    try:
        source = open_it(store, ["file"])
        for name in source.manifest.names:
            assert len(source.read(name)) == source.manifest.spec(name).nbytes
    except FormatError:
        return None
    return source.manifest


def mutated(draw, data):
    """Data with a few bytes changed, cut out, doubled or inserted."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["change", "cut", "insert", "double", "number"]))
        if kind == "change" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=6))
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        else:
            number = draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]))
            data[at : at + 8] = struct.pack("<Q", number)
    return bytes(data)


HEAD = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
    }
).encode()
GOOD_SAFETENSORS = struct.pack("<Q", len(HEAD)) + HEAD + bytes(range(28))
GOOD_PICKLES = [
    pickle.dumps(
        {
            "w": np.arange(6.0).reshape(2, 3),
            "n": {"b": np.arange(3, dtype=np.uint16), "e": np.zeros((0, 2))},
            "step": 3,
            "l": [1, 2.5, None, True],
            "s": np.float32(2),
        },
        protocol=protocol,
    )
    for protocol in (2, 3, 4)
]


def test_the_good_ones_are_good():
    assert sorted(read_all(open_files, GOOD_SAFETENSORS).names) == ["a", "b"]
    for data in GOOD_PICKLES:
        manifest = read_all(open_pdparams, data)
        assert sorted(manifest.names) == ["n.b", "n.e", "w"]
        assert manifest.values["s"] == 2.0


@FUZZ
@given(st.data())
def test_safetensors_with_damage(data):
    manifest = read_all(open_files, mutated(data.draw, GOOD_SAFETENSORS))
    assert manifest is None or sum(s.nbytes for s in manifest.tensors.values()) < 1000


@FUZZ
@given(st.binary(max_size=200))
def test_safetensors_of_anything(data):
    read_all(open_files, struct.pack("<Q", max(len(data) - 8, 0)) + data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@FUZZ
@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), json_values))
def test_safetensors_heads_of_any_json(head):
    text = json.dumps(head).encode()
    read_all(open_files, struct.pack("<Q", len(text)) + text)


@FUZZ
@given(st.data())
def test_pickles_with_damage(data):
    manifest = read_all(open_pdparams, mutated(data.draw, data.draw(st.sampled_from(GOOD_PICKLES))))
    assert manifest is None or sum(s.nbytes for s in manifest.tensors.values()) < 10_000


@FUZZ
@given(st.lists(st.sampled_from([
    b"(", b".", b"0", b"1", b"2", b"N", b"\x88", b"\x89", b"K\x01", b"J\0\0\0\0", b"\x8a\x01\x05",
    b"X\x01\0\0\0a", b"\x8c\x01b", b"C\x01x", b"B\x02\0\0\0xy", b"]", b"a", b"e", b"l", b"}", b"d",
    b"s", b"u", b")", b"t", b"\x85", b"\x86", b"\x87", b"q\x00", b"h\x00", b"\x94", b"R", b"b",
    b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n",
    b"c_codecs\nencode\n", b"ccollections\nOrderedDict\n", b"\x93", b"G" + bytes(8),
]), max_size=30))  # fmt: skip
def test_pickles_of_any_opcodes(codes):
    read_all(open_pdparams, b"\x80\x04" + b"".join(codes) + b".")


@settings(FUZZ, max_examples=budget(8, 400))
@given(st.lists(st.sampled_from([
    b"(", b"0", b"N", b"\x88", b"K\x01", b"M\xff\xff", b"J\0\0\0\x7f", b"\x8a\x09" + b"\x7f" * 9, b"X\x01\0\0\0a",
    b"\x8c\x03abc", b"C\x01x", b"]", b"a", b"e", b"l", b"}", b"d", b"s", b"u", b")", b"t", b"\x85", b"\x86", b"\x94",
    b"h\x00", b"h\x01", b"h\x02", b"R", b"b", b"G" + b"\x40" * 8,
]), min_size=1, max_size=8))  # fmt: skip
def test_pickles_of_any_opcodes_again_and_again_take_little_memory(codes):
    head = b"ccollections\nOrderedDict\n\x94]\x94)\x94"
    unit = b"".join(codes)
    data = b"\x80\x04" + head + unit * (60_000 // len(unit)) + b"."
    with mock.patch.object(pickle_values, "MIN_BUDGET_BYTES", 128 << 10):
        tracemalloc.start()
        try:
            read_all(open_pdparams, data)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < 10 * len(data)


@FUZZ
@given(st.binary(max_size=100))
def test_pickles_of_anything(data):
    read_all(open_pdparams, b"\x80" + data)


@pytest.fixture(scope="module")
def manifest_bytes(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    fw.save({"w": np.arange(12.0).reshape(3, 4), "b": np.zeros(3, np.int8), "step": 1}, place)
    return (place / "v0000000000" / "flyweight.json").read_bytes()


@FUZZ
@given(st.data())
def test_manifests_with_damage_are_always_seen(manifest_bytes, data):
    damaged = mutated(data.draw, manifest_bytes)
    if damaged != manifest_bytes:
        with pytest.raises(FormatError):
            decode_envelope(damaged, "here")


@FUZZ
@given(st.data())
def test_manifests_with_damage_under_a_right_checksum(manifest_bytes, data):
    """A hostile writer seals what he wrote: it is refused, or it is well-formed."""
    record = json.loads(manifest_bytes)["manifest"]
    place, key = record, data.draw(st.sampled_from(sorted(record)))
    while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
    place[key] = data.draw(json_values | st.sampled_from([-1, 2**63, 2**64, [2**62, 8], "../x"]))
    try:
        manifest = decode_manifest(json.dumps(record).encode())
    except FormatError:
        return
    assert manifest.nbytes <= sum(part.nbytes for part in manifest.files)
    for extent in manifest.extents:
        assert fw.Box.whole(manifest.tensors[extent.name].shape).contains(extent.box)


@FUZZ
@given(json_values)
def test_manifests_of_any_json(value):
    with pytest.raises(FlyweightError):
        decode_manifest(json.dumps(value).encode())


# Checkpoints of many files: a few bytes of one of them changed.


def small_state():
    return {
        "w": np.arange(6.0).reshape(2, 3),
        "b": np.arange(3, dtype=np.int16),
        "e": np.zeros((0, 2), np.float32),
    }


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Small checkpoints, as torch and Paddle write them and as we do, by what opens them."""
    import paddle
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    root = tmp_path_factory.mktemp("directories")
    tensors = {name: torch.from_numpy(array) for name, array in small_state().items()}
    dcp.save(
        {**tensors, "t": tensors["w"].t(), "step": 3, "l": [1, "x"]}, checkpoint_id=root / "dcp"
    )
    writer = HuggingFaceStorageWriter(str(root / "hf"), save_distributed=True)
    dcp.save({name: tensors[name] for name in "wb"}, storage_writer=writer)
    theirs = {name: paddle.to_tensor(array) for name, array in small_state().items()}
    paddle.distributed.save_state_dict(theirs, str(root / "paddle"))
    fw.save({**small_state(), "step": 3}, root / "run")
    fw.convert(root / "run", root / "our dcp", to="dcp")
    fw.convert(root / "run", root / "our paddle", to="paddle")
    openers = {
        "dcp": open_dcp,
        "our dcp": open_dcp,
        "hf": open_shards,
        "paddle": open_paddle,
        "our paddle": open_paddle,
    }
    return {
        name: (opener, {each.name: each.read_bytes() for each in (root / name).iterdir()})
        for name, opener in openers.items()
    }


def read_directory(opener, files):
    try:
        source = opener(MemoryStore(files))
        for name in source.manifest.names:
            assert len(source.read(name)) == source.manifest.spec(name).nbytes
    except FlyweightError:
        return None
    return source.manifest


KINDS = pytest.mark.parametrize("kind", ["dcp", "our dcp", "hf", "paddle", "our paddle"])


@KINDS
def test_checkpoints_of_many_files_are_good(directories, kind):
    assert read_directory(*directories[kind]) is not None


@KINDS
@FUZZ
@given(st.data())
def test_checkpoints_of_many_files_with_damage(directories, kind, data):
    opener, files = directories[kind]
    name = data.draw(st.sampled_from(sorted(files)))
    manifest = read_directory(opener, {**files, name: mutated(data.draw, files[name])})
    assert manifest is None or sum(s.nbytes for s in manifest.tensors.values()) < 100_000


@FUZZ
@given(st.lists(st.sampled_from([
    b"(", b".", b"0", b"N", b"\x88", b"K\x01", b"X\x01\0\0\0a", b"]", b"a", b"e", b"}", b"s", b"u", b")", b"t",
    b"\x85", b"\x86", b"q\x00", b"h\x00", b"R", b"b", b"\x81", b"Q", b"ctorch\nSize\n", b"ctorch\nfloat32\n",
    *(b"ctorch.distributed.checkpoint.metadata\n%s\n" % name for name in (
        b"Metadata", b"MetadataIndex", b"TensorStorageMetadata", b"ChunkStorageMetadata", b"TensorProperties")),
    *(b"X%s\0\0\0%s" % (bytes([len(name)]), name) for name in (
        b"state_dict_metadata", b"storage_data", b"properties", b"size", b"chunks", b"fqn", b"offset")),
]), max_size=40))  # fmt: skip
def test_metadata_of_any_opcodes(codes):
    read_directory(open_dcp, {".metadata": b"\x80\x02" + b"".join(codes) + b"."})
