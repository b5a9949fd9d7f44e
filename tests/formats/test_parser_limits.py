"""Limits of what is read: a file at the limit opens, one just over it is refused with both values.

Each limit is lowered, so that a small file reaches it.
"""

import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import flyweight as fw
from flyweight.errors import FormatError, SpecError
from flyweight.spec.model_layout import ModelLayout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def lower(monkeypatch, limit, *places):
    """Set a limit wherever a module has it under its name."""
    for place in places:
        monkeypatch.setattr(f"flyweight.{place}", limit)


def opens(path):
    fw.open(path).close()


def refused(path, match):
    with pytest.raises(FormatError, match=match):
        fw.open(path)


def pickled(path, content, protocol=4):
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def nested(depth, leaf=1):
    for _ in range(depth):
        leaf = {"a": leaf}
    return leaf


def safetensors(path, entries, data=b""):
    head = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return len(head)


def one(shape=(4,)):
    return {"dtype": "U8", "shape": list(shape), "data_offsets": [0, int(np.prod(shape))]}


# Files that are read whole.


def test_the_head_of_a_safetensors_file(tmp_path, monkeypatch):
    nbytes = safetensors(tmp_path / "model.safetensors", {"w": one()}, bytes(4))
    lower(monkeypatch, nbytes, "formats.safetensors.MAX_HEAD_BYTES")
    opens(tmp_path)
    opens(tmp_path / "model.safetensors")
    lower(monkeypatch, nbytes - 1, "formats.safetensors.MAX_HEAD_BYTES")
    refused(tmp_path, f"claims a head of {nbytes} bytes; .*, a head at most {nbytes - 1}")
    refused(tmp_path / "model.safetensors", "neither a pickle nor safetensors")


def test_the_head_of_a_safetensors_file_that_is_written(tmp_path, monkeypatch):
    fw.save({"w": np.zeros(4)}, tmp_path / "run")
    lower(monkeypatch, 40, "formats.safetensors.MAX_HEAD_BYTES")
    with pytest.raises(SpecError, match=r"has \d+ bytes, at most 40"):
        fw.convert(tmp_path / "run", tmp_path / "m.safetensors", to="safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_the_index_of_hugging_face(tmp_path, monkeypatch):
    fw.save({"w": np.zeros(4), "v": np.ones(4)}, tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "hf", to="hf", part_bytes=40)
    (index,) = (tmp_path / "hf").glob("*.index.json")
    nbytes = index.stat().st_size
    lower(monkeypatch, nbytes, "formats.huggingface.MAX_INDEX_BYTES")
    opens(tmp_path / "hf")
    lower(monkeypatch, nbytes - 1, "formats.huggingface.MAX_INDEX_BYTES")
    refused(tmp_path / "hf", f"has {nbytes} bytes, at most {nbytes - 1}")


def test_the_manifest_of_a_snapshot(tmp_path, monkeypatch):
    fw.save({"w": np.zeros(4)}, tmp_path)
    nbytes = (tmp_path / "v0000000000" / "flyweight.json").stat().st_size
    lower(monkeypatch, nbytes, "formats.snapshot.MAX_MANIFEST_BYTES")
    opens(tmp_path)
    lower(monkeypatch, nbytes - 1, "formats.snapshot.MAX_MANIFEST_BYTES")
    refused(tmp_path, f"has {nbytes} bytes, at most {nbytes - 1}")


@pytest.fixture
def theirs(tmp_path):
    dcp.save(
        {"w": torch.arange(4.0), "n": {"a": {"b": 3}}, "l": [1, 2]}, checkpoint_id=tmp_path / "dcp"
    )
    return tmp_path / "dcp"


@pytest.fixture
def paddles(tmp_path):
    fw.save({"w": np.arange(4.0)}, tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "paddle", to="paddle")
    return tmp_path / "paddle"


@pytest.mark.parametrize("kind", ["theirs", "paddles"])
def test_the_metadata_of_a_checkpoint(kind, request, monkeypatch):
    place = request.getfixturevalue(kind)
    (file,) = (name for name in os.listdir(place) if name.endswith(".metadata"))
    nbytes = (place / file).stat().st_size
    lower(monkeypatch, nbytes, "formats.records.MAX_METADATA_BYTES")
    opens(place)
    lower(monkeypatch, nbytes - 1, "formats.records.MAX_METADATA_BYTES")
    refused(place, f"has {nbytes} bytes, at most {nbytes - 1}")


# Pickles.


def test_the_opcodes_of_a_pickle(tmp_path, monkeypatch):
    import pickletools

    path = pickled(tmp_path / "m.pdparams", {"a": 1, "b": [2, 3]})
    count = sum(1 for _ in pickletools.genops(path.read_bytes()))
    lower(monkeypatch, count, "formats.pickle_bytes.MAX_OPCODES")
    opens(path)
    lower(monkeypatch, count - 1, "formats.pickle_bytes.MAX_OPCODES")
    refused(path, f"has more than {count - 1} opcodes: {path.stat().st_size - 1} of")


def test_the_characters_of_a_name_in_a_pickle(tmp_path, monkeypatch):
    path = pickled(tmp_path / "m.pdparams", {"a": np.zeros(1)}, 2)
    longest = len("numpy._core.multiarray")
    assert b"numpy._core.multiarray" in path.read_bytes() or b"numpy.core" in path.read_bytes()
    lower(monkeypatch, longest, "formats.pickle_bytes.MAX_LINE_CHARS")
    opens(path)
    lower(monkeypatch, 10, "formats.pickle_bytes.MAX_LINE_CHARS")
    refused(path, "names something with more than 10 characters")


def test_the_bytes_of_a_number_in_a_pickle(tmp_path):
    opens(pickled(tmp_path / "m.pdparams", {"a": -(2**62)}))
    path = tmp_path / "n.pdparams"
    path.write_bytes(b"\x80\x04}\x8c\x01a\x8a\x10" + b"\1" + bytes(15) + b"s.")
    opens(path)
    path.write_bytes(b"\x80\x04}\x8c\x01a\x8a\x11" + b"\1" + bytes(16) + b"s.")
    refused(path, "has a number of 17 bytes, at most 16")


@pytest.mark.parametrize("nbytes", [99, 100, 101, 5000])
def test_text_longer_than_what_is_read_at_once_is_the_same_array(tmp_path, monkeypatch, nbytes):
    """No refusal: longer text stays in the file until somebody reads the array."""
    lower(monkeypatch, 100, "formats.pickles.MAX_INLINE_BYTES")
    array = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
    with fw.open(pickled(tmp_path / "m.pdparams", {"w": array}, 2)) as opened:
        assert opened.read("w").tobytes() == array.tobytes()


def test_the_nesting_of_a_pickle(tmp_path, monkeypatch):
    path = tmp_path / "m.pdparams"
    lower(monkeypatch, 5, "formats.records.MAX_NESTING")
    opens(pickled(path, nested(5)))
    refused(pickled(path, nested(6)), "depth 6, at most 5")


def test_the_values_of_a_pickle(tmp_path, monkeypatch):
    path = tmp_path / "m.pdparams"
    lower(monkeypatch, 10, "formats.pdparams.MAX_VALUES")  # with the dict and the list
    opens(pickled(path, {"a": [0] * 8}))
    refused(pickled(path, {"a": [0] * 9}), "11 values, at most 10")


def test_the_nesting_and_number_of_values_in_a_checkpoint_of_torch(theirs, monkeypatch):
    lower(monkeypatch, 1, "formats.records.MAX_NESTING")  # of lists: torch flattens dicts itself
    opens(theirs)
    dcp.save({"w": torch.zeros(1), "l": (1, (2,))}, checkpoint_id=theirs)
    lower(monkeypatch, 2, "formats.records.MAX_NESTING")
    opens(theirs)
    lower(monkeypatch, 1, "formats.records.MAX_NESTING")
    refused(theirs, "depth 2, at most 1")
    lower(monkeypatch, 32, "formats.records.MAX_NESTING")
    lower(monkeypatch, 4, "formats.records.MAX_VALUES")
    opens(theirs)
    lower(monkeypatch, 3, "formats.records.MAX_VALUES")
    refused(theirs, "4 values, at most 3")


# Archives.


def archive_entries(place):
    meta = dcp.FileSystemReader(place).read_metadata()
    info = next(each for index, each in meta.storage_data.items() if index.fqn == "w")
    data = (place / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    item = place / "item.zip"
    item.write_bytes(data)
    with zipfile.ZipFile(item) as archive:
        count = len(archive.namelist())
        start = archive.start_dir
    item.unlink()
    end = data.rindex(b"PK\5\6")
    nbytes = struct.unpack_from("<I", data, end + 12)[0]
    assert start + nbytes <= end
    return count, nbytes


def test_the_entries_and_the_directory_of_an_archive(theirs, monkeypatch):
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=theirs)
    count, nbytes = archive_entries(theirs)
    lower(monkeypatch, count, "formats.torch_item.MAX_ENTRIES")
    lower(monkeypatch, nbytes, "formats.torch_item.MAX_DIRECTORY_BYTES")
    opens(theirs)
    lower(monkeypatch, nbytes - 1, "formats.torch_item.MAX_DIRECTORY_BYTES")
    refused(theirs, f"and {nbytes} bytes, at most {nbytes - 1}")
    lower(monkeypatch, count - 1, "formats.torch_item.MAX_ENTRIES")
    refused(theirs, f"has a directory of {count} entries, at most {count - 1}")


# What a tensor may be.

DIMS = ("spec.manifest.MAX_DIMS", "formats.records.MAX_DIMS")


@pytest.mark.parametrize("place", DIMS)
@pytest.mark.parametrize("to", ["snapshot", "safetensors", "pdparams", "dcp", "paddle"])
def test_the_dims_of_a_tensor(tmp_path, monkeypatch, to, place):
    """The tensor's own spec has the limit; readers of pickles look before they copy a shape."""
    fw.save({"w": np.zeros((1, 2, 1, 3))}, tmp_path / "run")
    path = tmp_path / ("run" if to == "snapshot" else f"out.{to}")
    if to != "snapshot":
        fw.convert(tmp_path / "run", path, to=to)
    lower(monkeypatch, 4, *DIMS)
    opens(path)
    lower(monkeypatch, 3, place)
    reads = {
        "spec.manifest.MAX_DIMS": {"snapshot", "safetensors", "pdparams", "dcp", "paddle"},
        "formats.records.MAX_DIMS": {"pdparams", "dcp", "paddle"},
    }
    if to not in reads[place]:
        opens(path)
    else:
        refused(path, "4 (dims|numbers).* at most 3")


def test_the_characters_of_a_name(tmp_path, monkeypatch):
    lower(monkeypatch, 20, "spec.manifest.MAX_NAME_CHARS")
    for number, (name, is_fine) in enumerate((("x" * 20, True), ("x" * 21, False))):
        flat, deep = tmp_path / f"{number}.safetensors", tmp_path / f"{number}.pdparams"
        safetensors(flat, {name: one()}, bytes(4))
        pickled(deep, {name[:10]: {name[11:]: np.zeros(2)}})
        for path in (flat, deep):
            if is_fine:
                opens(path)
            else:
                refused(path, "of 21 characters; 1 to 20")


@pytest.mark.parametrize(
    ("chunk_bytes", "is_fine"), [(4095, False), (4096, True), (8192, True), (8193, False)]
)
def test_the_chunks_of_a_manifest(monkeypatch, chunk_bytes, is_fine):
    from dataclasses import replace

    from flyweight.spec.dtype import dtype_named
    from flyweight.spec.manifest import Manifest, TensorSpec
    from flyweight.spec.manifest_json import decode_manifest, encode_manifest

    lower(monkeypatch, 8192, "spec.manifest_json.MAX_CHUNK_BYTES")
    manifest = Manifest({"e": TensorSpec(dtype_named("f32"), (0,))}, version=1)
    text = encode_manifest(replace(manifest, chunk_bytes=chunk_bytes))
    if is_fine:
        assert decode_manifest(text).chunk_bytes == chunk_bytes
    else:
        with pytest.raises(
            FormatError, match=f"chunks of {chunk_bytes} bytes, expected 4096 to 8192"
        ):
            decode_manifest(text)


def test_the_numbers_of_a_file_end_before_2_to_the_63(tmp_path):
    path = tmp_path / "m.safetensors"
    for size, is_fine in ((2**63 - 1, True), (2**63, False)):
        entry = {"dtype": "U8", "shape": [size, 0], "data_offsets": [0, 0]}
        safetensors(path, {"w": entry})
        opens(path) if is_fine else refused(path, rf"at `\$\.shape\[0\]`, found {size}")


def test_the_ranks_of_a_mesh(monkeypatch):
    lower(monkeypatch, 12, "spec.model_layout.MAX_RANKS")
    assert ModelLayout({"a": 3, "b": 4}, []).num_ranks == 12
    with pytest.raises(SpecError, match="a mesh of 13 ranks, at most 12"):
        ModelLayout({"a": 13}, [])


def test_the_boxes_that_are_compared(monkeypatch):
    from flyweight.spec.box import Box, overlapping_pair

    boxes = [Box((n, 0, n), (2, 1, 1)) for n in range(0, 40, 2)] + [
        Box((n, 1, 0), (2, 1, 40)) for n in range(0, 40, 2)
    ]
    assert overlapping_pair(list(boxes)) is None
    lower(monkeypatch, 3, "spec.box.MAX_COMPARED")
    with pytest.raises(SpecError, match="40 boxes are cut so irregularly that more than 3 pairs"):
        overlapping_pair(list(boxes))
