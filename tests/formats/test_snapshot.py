"""C5, C7: whatever is wrong with the files is seen, named, and not applied."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
from conftest import flip, odd_arrays, random_bytes, same, zeros_like
from flyweight.errors import (
    ChecksumMismatch,
    FormatError,
    SnapshotIncomplete,
    VersionError,
)
from flyweight.formats.snapshot import (
    MANIFEST,
    decode_envelope,
    directory_name,
    encode_envelope,
    version_of,
)

V5 = directory_name(5)


def test_the_directory_is_what_the_book_says(run):
    """docs/format.md, read by hand: eight bytes, a head on a page, tensors, a manifest."""
    place = run / V5
    assert sorted(os.listdir(place)) == [MANIFEST, "model.safetensors"]
    data = (place / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    head = json.loads(data[8 : 8 + length])
    record = json.loads((place / MANIFEST).read_bytes())["manifest"]
    assert record["version"] == 5
    assert record["parent"] == 2
    arrays = odd_arrays(5)
    for name, tensor in record["tensors"].items():
        (shard,) = tensor["shards"]
        start, end = head[name]["data_offsets"]
        assert shard["at"] == 8 + length + start
        assert data[shard["at"] : 8 + length + end] == arrays[name].tobytes()


def test_the_parts_open_in_safetensors_itself(run):
    from safetensors.numpy import load_file

    found = load_file(run / V5 / "model.safetensors")
    expected = odd_arrays(5)
    assert same({k: found[k] for k in expected}, expected)


def test_several_parts_are_a_hugging_face_checkpoint(tmp_path):
    arrays = {f"layer.{i}": random_bytes(1000, i).reshape(10, 100) for i in range(10)}
    fw.save(arrays, tmp_path, version=1, part_bytes=2500)
    place = tmp_path / directory_name(1)
    index = json.loads((place / "model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) == 5
    from safetensors import safe_open

    for name, file in index["weight_map"].items():
        with safe_open(place / file, "numpy") as opened:
            assert opened.get_tensor(name).tobytes() == arrays[name].tobytes()
    blank = zeros_like(arrays)
    (place / MANIFEST).unlink()
    assert fw.load(place, into=blank).format == "huggingface"
    assert same(blank, arrays)


@pytest.mark.parametrize("version", [0, 7, 10**10, 2**63 - 1])
def test_directory_names_and_versions_are_inverse(version):
    assert version_of(directory_name(version)) == version


@pytest.mark.parametrize("name", ["v5", "v00000000005", "x0000000005", "v-000000005", "v9" * 10])
def test_other_names_are_no_versions(name):
    assert version_of(name) is None


def test_directory_names_sort_by_version_up_to_ten_digits():
    names = [directory_name(v) for v in (9, 10, 99, 100, 10**9)]
    assert names == sorted(names)


# Damage. Each test damages a good snapshot and says what must be found.


def load_untouched(path, error, match, **options):
    """Load into arrays of ones and return the refusal; nothing may have been written."""
    target = {name: np.ones_like(array) for name, array in odd_arrays().items()}
    with pytest.raises(error, match=match) as refusal:
        fw.load(path, into=target, **options)
    if "bytes had been written" not in str(refusal.value):
        assert all((array == 1).all() for array in target.values())
    return str(refusal.value)


def test_every_flipped_bit_of_the_manifest_is_seen(run):
    content = (run / V5 / MANIFEST).read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(FormatError):
            decode_envelope(bytes(damaged), "here")


def test_every_cut_of_the_manifest_is_seen(run):
    content = (run / V5 / MANIFEST).read_bytes()
    for length in range(0, len(content), 7):
        with pytest.raises(FormatError):
            decode_envelope(content[:length], "here")
    with pytest.raises(FormatError):
        decode_envelope(content + b"\n", "here")


def test_every_flipped_bit_of_a_part_is_seen(run, tmp_path):
    part = run / V5 / "model.safetensors"
    size = part.stat().st_size
    head = 8 + int.from_bytes(part.read_bytes()[:8], "little")
    for at in [*range(0, head, 97), *range(head, size)]:
        flip(part, at, at % 8)
        load_untouched(run, FormatError, "checksum")
        flip(part, at, at % 8)
    target = zeros_like(odd_arrays())
    fw.load(run, into=target)
    assert same(target, odd_arrays(5))


def test_a_flipped_bit_is_told_with_its_tensor_and_file(run):
    part = run / V5 / "model.safetensors"
    flip(part, part.stat().st_size - 1)
    text = load_untouched(run, ChecksumMismatch, "'odd.bytes'|'flag'")
    assert "model.safetensors" in text
    assert "was written" in text


@pytest.mark.parametrize("length", [0, 5, 4096, -1])
def test_a_truncated_part_is_seen_before_anything_is_written(run, length):
    part = run / V5 / "model.safetensors"
    os.truncate(part, part.stat().st_size - 1 if length == -1 else length)
    text = load_untouched(run, SnapshotIncomplete, "were written")
    assert "ask for version=2" in text


def test_a_part_with_bytes_appended_is_seen(run):
    with open(run / V5 / "model.safetensors", "ab") as file:
        file.write(b"x")
    load_untouched(run, SnapshotIncomplete, "bytes, .* were written")


def test_a_missing_part_is_named(run):
    (run / V5 / "model.safetensors").unlink()
    load_untouched(run, SnapshotIncomplete, "has 0 of 1 parts; missing: 'model.safetensors'")


def test_a_left_over_part_is_named(run):
    shutil.copy(run / V5 / "model.safetensors", run / V5 / "model-00002-of-00002.safetensors")
    load_untouched(run, FormatError, "1 parts its manifest does not know: 'model-00002")


def test_a_version_without_its_manifest_does_not_exist(run):
    (run / V5 / MANIFEST).unlink()
    assert fw.versions(run) == [1, 2]
    target = zeros_like(odd_arrays())
    assert fw.load(run, into=target).version == 2
    assert same(target, odd_arrays(2))
    load_untouched(run, SnapshotIncomplete, "has no 'flyweight.json'", version=5)


def test_parts_of_another_version_are_refused(run):
    shutil.copy(run / directory_name(2) / "model.safetensors", run / V5 / "model.safetensors")
    load_untouched(run, FormatError, "checksum|were written")


def test_a_directory_renamed_to_another_version_is_refused(run):
    os.rename(run / V5, run / directory_name(6))
    load_untouched(run, VersionError, "holds version 5, not 6")


def test_a_version_that_is_not_there_is_named_with_the_newest(run):
    load_untouched(
        run, VersionError, "version 4 is not one of the 3 versions.*newest is 5", version=4
    )


def resealed(place: Path, change) -> None:
    """Change the manifest and give it a right checksum, as a hostile writer would."""
    path = place / MANIFEST
    manifest = decode_envelope(path.read_bytes(), "here")
    record = json.loads(path.read_bytes())["manifest"]
    change(record)
    text = json.dumps(record, separators=(",", ":")).encode()
    from flyweight.digest import checksum
    from flyweight.memory import bytes_of

    path.write_bytes(b'{"manifest":%s,\n"xxh3_64":"%016x"}\n' % (text, checksum(bytes_of(text))))
    assert manifest.version == 5


def test_a_manifest_with_a_right_checksum_and_an_escaping_path_is_refused(run):
    resealed(
        run / V5, lambda record: record["parts"][0].update(file="../v0000000002/x.safetensors")
    )
    load_untouched(run, FormatError, "plain name inside the directory")


def test_a_manifest_with_a_right_checksum_and_swapped_tensors_is_seen_by_verify(run):
    def swap(record):
        a, b = (record["tensors"][name]["shards"][0] for name in ("reversed", "scalar"))
        a["digest"], b["digest"] = b["digest"], a["digest"]

    resealed(run / V5, swap)
    report = fw.verify(run)
    assert len(report.damage) == 2
    assert "digest" in report.damage[0]


def test_heads_that_disagree_with_the_manifest_are_seen_by_verify(run):
    part = run / V5 / "model.safetensors"
    data = bytearray(part.read_bytes())
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    # Two tensors of one dtype and size trade places: a valid file, other weights.
    head["scalar"]["data_offsets"], head["flag"]["data_offsets"]
    sizes = {n: e["data_offsets"][1] - e["data_offsets"][0] for n, e in head.items() if n[0] != "_"}
    one, two = sorted(sizes, key=lambda n: head[n]["data_offsets"])[:2]
    start = head[one]["data_offsets"][0]
    head[two]["data_offsets"] = [start, start + sizes[two]]
    head[one]["data_offsets"] = [start + sizes[two], start + sizes[two] + sizes[one]]
    text = json.dumps(head, separators=(",", ":")).encode().ljust(length)
    data[8 : 8 + length] = text
    part.write_bytes(data)
    from flyweight.digest import checksum
    from flyweight.memory import bytes_of

    head_checksum = f"{checksum(bytes_of(bytes(data[: 8 + length]))):016x}"
    resealed(run / V5, lambda record: record["parts"][0].update(head_checksum=head_checksum))
    with pytest.raises(FormatError, match="places tensors at other bytes"):
        fw.verify(run)


def test_an_index_that_disagrees_with_the_manifest_is_seen_by_verify(tmp_path):
    fw.save({f"w{i}": random_bytes(100, i) for i in range(4)}, tmp_path, part_bytes=200)
    index = tmp_path / "v0000000000" / "model.safetensors.index.json"
    assert fw.verify(tmp_path).is_whole
    index.write_text(index.read_text().replace("model-00001", "model-00002"))
    with pytest.raises(FormatError, match="index and files of .* disagree on 2 tensors"):
        fw.verify(tmp_path)
    index.unlink()
    with pytest.raises(fw.FlyweightError, match="No such file"):
        fw.verify(tmp_path)


def test_a_manifest_of_absurd_size_is_refused_unread(run):
    with open(run / V5 / MANIFEST, "r+b") as file:
        file.truncate(2 << 30)  # sparse
    load_untouched(run, FormatError, "has 2147483648 bytes, at most 1073741824")


def test_an_envelope_round_trips(run):
    content = (run / V5 / MANIFEST).read_bytes()
    assert encode_envelope(decode_envelope(content, "here")) == content
    assert json.loads(content)["xxh3_64"]
