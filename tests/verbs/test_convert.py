from itertools import product

import numpy as np
import pytest
import torch

import flyweight as fw
from conftest import flip, odd_arrays, random_bytes, same, zeros_like
from flyweight.errors import ChecksumMismatch, SpecError, StoreError, VersionError

FORMATS = ["snapshot", "hf", "dcp", "paddle", "safetensors", "pdparams"]


def plain_arrays():
    return odd_arrays()


def place(tmp_path, format, label):
    suffix = {"safetensors": ".safetensors", "pdparams": ".pdparams"}.get(format, "")
    return tmp_path / f"{label}{suffix}"


@pytest.mark.parametrize(("first", "second"), list(product(FORMATS, FORMATS)))
def test_any_format_becomes_any_other_exactly(tmp_path, first, second):
    fw.save(plain_arrays(), tmp_path / "run", version=7)
    one, two = place(tmp_path, first, "one"), place(tmp_path, second, "two")
    fw.convert(tmp_path / "run", one, to=first)
    report = fw.convert(one, two, to=second)
    assert report.num_tensors == len(plain_arrays())
    target = zeros_like(plain_arrays())
    fw.load(two, into=target)
    assert same(target, plain_arrays())


def test_a_snapshot_keeps_its_version_or_takes_the_one_given(run, tmp_path):
    assert fw.convert(run, tmp_path / "a", to="snapshot").version == 5
    assert fw.convert(run, tmp_path / "b", to="snapshot", version=9).version == 9
    with pytest.raises(VersionError, match="is there already"):
        fw.convert(run, tmp_path / "a", to="snapshot")


def test_a_pickles_true_dtypes_can_be_told(tmp_path):
    source = {"w": torch.randn(5).to(torch.bfloat16), "i": torch.arange(3, dtype=torch.int32)}
    fw.save_legacy(source, tmp_path, rank=0, legacy_id=0, as_safetensors=False)
    old = tmp_path / "model_state.tp0.0.pdparams"
    fw.convert(old, tmp_path / "run", to="snapshot", assume={"u16": "bf16"})
    target = {"w": torch.zeros(5, dtype=torch.bfloat16), "i": torch.zeros(3, dtype=torch.int32)}
    fw.load(tmp_path / "run", into=target)
    assert torch.equal(target["w"], source["w"])
    with pytest.raises(SpecError, match="u16 and f32 differ in width"):
        fw.convert(old, tmp_path / "x", to="hf", assume={"u16": "f32"})
    with pytest.raises(SpecError, match="dtype 'u17' is not one of"):
        fw.convert(old, tmp_path / "x", to="hf", assume={"u17": "f16"})


def test_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "there").mkdir()
    for to in ("hf", "dcp", "paddle", "safetensors", "pdparams"):
        with pytest.raises(StoreError, match="is there already; convert never overwrites"):
            fw.convert(run, tmp_path / "there", to=to)


@pytest.mark.parametrize(
    ("to", "inside"), [*((each, True) for each in FORMATS), ("snapshot", False)]
)
def test_nothing_is_written_into_a_committed_version(run, tmp_path, to, inside):
    version = run / "v0000000005"
    before = sorted(path.relative_to(version) for path in version.rglob("*"))
    goal = place(version, to, "out") if inside else version
    with pytest.raises(StoreError, match=r"v0000000005' holds a committed version"):
        fw.convert(run, goal, to=to, version=9 if to == "snapshot" else None)
    assert sorted(path.relative_to(version) for path in version.rglob("*")) == before
    assert fw.verify(run).is_whole


def test_nothing_is_saved_into_a_committed_version(run):
    version = run / "v0000000005"
    for act in (
        lambda: fw.save(odd_arrays(), version),
        lambda: fw.save_legacy(odd_arrays(), version, rank=0, legacy_id=0),
    ):
        with pytest.raises(StoreError, match=r"v0000000005' holds a committed version"):
            act()
    assert len(list(version.iterdir())) == 2
    assert fw.verify(run).is_whole


@pytest.mark.parametrize("there", ["hf", "dcp", "paddle"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "shard-00001-model-00001-of-00001.safetensors"]
)
def test_a_file_that_would_make_a_checkpoint_ambiguous_is_refused(run, tmp_path, there, name):
    fw.convert(run, tmp_path / "out", to=there, part_bytes=64)
    with pytest.raises(StoreError, match=r"out' holds a .* checkpoint"):
        fw.convert(run, tmp_path / "out" / name, to="safetensors")
    assert fw.diff(run, tmp_path / "out").is_same
    fw.convert(run, tmp_path / "out" / "weights.safetensors", to="safetensors")
    assert fw.diff(run, tmp_path / "out").is_same


@pytest.mark.parametrize("there", ["hf", "dcp", "paddle"])
def test_a_version_that_would_hide_a_checkpoint_is_refused(run, tmp_path, there):
    fw.convert(run, tmp_path / "out", to=there)
    with pytest.raises(StoreError, match=r"out' holds a .* checkpoint"):
        fw.convert(run, tmp_path / "out", to="snapshot")
    with fw.open(tmp_path / "out") as stored:
        assert stored.format != "snapshot"


def test_a_version_beside_others_hides_nothing_more(run, tmp_path):
    """Versions are often saved where the model that training began with lies."""
    fw.convert(run, tmp_path / "out", to="hf")
    fw.save(odd_arrays(), tmp_path / "out", version=1)
    assert fw.convert(run, tmp_path / "out", to="snapshot").version == 5
    assert fw.versions(tmp_path / "out") == [1, 5]


def test_damage_is_not_carried_over(run, tmp_path):
    part = run / "v0000000005" / "model.safetensors"
    flip(part, part.stat().st_size - 1)
    with pytest.raises(ChecksumMismatch):
        fw.convert(run, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_ties_get_bytes_of_their_own_where_there_are_no_ties(tmp_path):
    shared = np.arange(6.0)
    fw.save({"a": shared, "b": shared, "step": 1}, tmp_path / "run")
    report = fw.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert report.left_out == ["step"]
    target = {"a": np.zeros(6), "b": np.zeros(6)}
    fw.load(tmp_path / "hf", into=target)
    assert target["b"].tolist() == shared.tolist()
    again = fw.convert(tmp_path / "run", tmp_path / "again", to="snapshot")
    assert again.left_out == []
    with fw.open(tmp_path / "again") as source:
        assert source.manifest.tied == {"b": "a"}
        assert source.manifest.values == {"step": 1}


def test_a_version_for_a_format_without_versions_is_refused(run, tmp_path):
    with pytest.raises(SpecError, match="version 3 for hf, which has no versions"):
        fw.convert(run, tmp_path / "out", to="hf", version=3)


def test_an_unknown_format_lists_the_known(run, tmp_path):
    with pytest.raises(
        SpecError, match="format 'gguf' is not one of snapshot, hf, dcp, paddle, safetensors"
    ):
        fw.convert(run, tmp_path / "out", to="gguf")


def test_a_dtype_that_a_pickle_cannot_hold_is_refused(tmp_path):
    fw.save({"w": torch.zeros(4, dtype=torch.float8_e8m0fnu)}, tmp_path / "run")
    with pytest.raises(SpecError, match="a .pdparams pickle cannot hold f8_e8m0"):
        fw.convert(tmp_path / "run", tmp_path / "x.pdparams", to="pdparams")


def test_a_dtype_that_safetensors_lacks_is_kept_in_snapshots_and_refused_elsewhere(tmp_path):
    source = {"w": np.arange(6.0).reshape(2, 3) + 1j}
    fw.save(source, tmp_path / "run")
    target = zeros_like(source)
    fw.load(tmp_path / "run", into=target)
    assert same(target, source)
    assert fw.verify(tmp_path / "run").is_whole
    for to, name in (("hf", "hf"), ("safetensors", "x.safetensors")):
        with pytest.raises(SpecError, match="'w' is c128, which safetensors has no name for"):
            fw.convert(tmp_path / "run", tmp_path / name, to=to)
    fw.convert(tmp_path / "run", tmp_path / "x.pdparams", to="pdparams")
    assert fw.diff(tmp_path / "run", tmp_path / "x.pdparams").is_same


def test_packed_int4_is_kept_as_its_bytes(tmp_path):
    """No framework has int4 tensors; a manifest may say so, and the bytes are what counts."""
    from dataclasses import replace

    from flyweight.formats.stored import Stored
    from flyweight.spec.dtype import DTYPES
    from flyweight.spec.manifest import TensorSpec

    packed = random_bytes(24).reshape(4, 6)
    fw.save({"q": packed}, tmp_path / "run")
    with fw.open(tmp_path / "run") as source:
        manifest = source.manifest
        spec = TensorSpec(DTYPES["i4"], (4, 12))
        extents = [replace(e, box=fw.Box.whole((4, 12))) for e in manifest.extents]
        told = replace(manifest, tensors={"q": spec}, extents=extents)
        as_int4 = Stored(told, source.store, format="snapshot")
        fw.convert(as_int4, tmp_path / "int4", to="snapshot", version=0)
    with fw.open(tmp_path / "int4") as source:
        assert str(source.manifest.tensors["q"]) == "i4[4, 12]"
        assert source.read("q").tobytes() == packed.tobytes()
        assert source.read("q", fw.Box((1, 4), (2, 4))).tobytes() == packed[1:3, 2:4].tobytes()
    assert fw.verify(tmp_path / "int4").is_whole
