import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import flyweight as fw
from conftest import odd_arrays, random_bytes, same, zeros_like
from flyweight.errors import FormatError, PlanError, SnapshotIncomplete, SnapshotNotFound


def checkpoint(place, num_files=2):
    """A checkpoint as Hugging Face's tools write it."""
    place.mkdir(parents=True, exist_ok=True)
    tensors = {f"layer.{i}.weight": torch.randn(8, 8).to(torch.bfloat16) for i in range(6)}
    files = {}
    for n in range(num_files):
        name = f"model-{n + 1:05d}-of-{num_files:05d}.safetensors"
        some = {k: tensors[k] for k in list(tensors)[n::num_files]}
        save_file(some, place / name, metadata={"format": "pt"})
        files |= dict.fromkeys(some, name)
    index = {"metadata": {"total_size": 768}, "weight_map": files}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_a_sharded_checkpoint_loads_in_place(tmp_path):
    tensors = checkpoint(tmp_path)
    target = {name: torch.zeros_like(t) for name, t in tensors.items()}
    report = fw.load(tmp_path, into=target)
    assert all(torch.equal(target[n], tensors[n]) for n in tensors)
    assert (report.format, report.checked_bytes, report.version) == ("huggingface", 0, None)


def test_a_single_file_loads_from_its_path_and_from_its_directory(tmp_path):
    tensors = {"a": torch.randn(3, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        target = {"a": torch.zeros(3, 3)}
        fw.load(path, into=target)
        assert torch.equal(target["a"], tensors["a"])


def edit_index(place, change):
    path = place / "model.safetensors.index.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


FAULTS = {
    "a file upstairs": (lambda r: r["weight_map"].update({"layer.0.weight": "../x"}), "plain name"),
    "a file that is a number": (lambda r: r["weight_map"].update({"layer.0.weight": 5}), "plain"),
    "no map": (lambda r: r.pop("weight_map"), "no weight_map"),
    "a tensor in the wrong file": (
        lambda r: r["weight_map"].update({"layer.0.weight": "model-00002-of-00002.safetensors"}),
        "disagree on 1 tensors: 'layer.0.weight'",
    ),
    "a tensor that is nowhere": (
        lambda r: r["weight_map"].update({"gone": "model-00002-of-00002.safetensors"}),
        "disagree on 1 tensors: 'gone'",
    ),
    "a tensor forgotten": (lambda r: r["weight_map"].pop("layer.0.weight"), "disagree on 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_is_refused_that_names(fault, tmp_path):
    checkpoint(tmp_path)
    change, message = FAULTS[fault]
    edit_index(tmp_path, change)
    with pytest.raises(FormatError, match=message):
        fw.open(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(SnapshotIncomplete, match="lacks 1 of the 2 files.*model-00001"):
        fw.open(tmp_path)


def test_two_checkpoints_in_one_directory_are_told_apart_by_path_only(tmp_path):
    tensors = checkpoint(tmp_path)
    single = {name: torch.ones_like(t) for name, t in tensors.items()}
    save_file(single, tmp_path / "model.safetensors")
    with pytest.raises(
        FormatError, match=r"'model\.safetensors' and '.*index\.json', which does not name it.*path"
    ):
        fw.open(tmp_path)
    for file, expected in [
        ("model.safetensors", single),
        ("model.safetensors.index.json", tensors),
    ]:
        target = {name: torch.zeros_like(t) for name, t in tensors.items()}
        fw.load(tmp_path / file, into=target)
        assert all(torch.equal(target[n], expected[n]) for n in tensors)


def test_an_index_may_name_the_single_file(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "more.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with fw.open(tmp_path) as source:
        assert source.manifest.tensors.keys() == {"a", "b"}


def test_a_name_in_two_files_is_refused(tmp_path):
    checkpoint(tmp_path)
    save_file({"layer.1.weight": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(FormatError, match="are in another file .* too: 'layer.1.weight'"):
        fw.open(tmp_path)


def test_an_empty_directory_says_what_was_looked_for(tmp_path):
    with pytest.raises(SnapshotNotFound, match=r"no version directory.*no 'model\.safetensors'"):
        fw.open(tmp_path)


def test_a_directory_of_loose_files_points_at_them(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter.safetensors")
    with pytest.raises(SnapshotNotFound, match=r"1 files like 'adapter\.safetensors'"):
        fw.open(tmp_path)


def test_what_we_write_is_read_by_safetensors(tmp_path):
    from safetensors.torch import load_file

    tensors = checkpoint(tmp_path / "in")
    fw.convert(tmp_path / "in", tmp_path / "out", to="hf", part_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 128
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "out" / file)
    assert all(torch.equal(found[n], tensors[n]) for n in tensors)
    assert len(set(index["weight_map"].values())) == 3


def test_reading_a_box_reads_only_near_it(tmp_path):
    data = random_bytes(64 << 20).reshape(-1, 1024)
    from safetensors.numpy import save_file as save_numpy

    save_numpy({"w": data}, tmp_path / "model.safetensors")
    with fw.open(tmp_path) as source:
        box = fw.Box((30_000, 0), (10, 1024))
        assert source.read("w", box).tobytes() == data[30_000:30_010].tobytes()
        column = fw.Box((5, 7), (3, 2))
        assert source.read("w", column).tobytes() == data[5:8, 7:9].tobytes()


def test_a_missing_name_says_how_many_there_are(tmp_path):
    checkpoint(tmp_path)
    with fw.open(tmp_path) as source, pytest.raises(PlanError, match="not among the 6 tensors"):
        source.read("nope")


def test_odd_arrays_survive_through_hugging_face(tmp_path):
    arrays = odd_arrays()
    fw.save(arrays, tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    target = zeros_like(arrays)
    fw.load(tmp_path / "hf", into=target)
    assert same(target, arrays)
    assert np.isfinite(target["scalar"])
