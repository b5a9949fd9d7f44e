import struct

import ml_dtypes
import numpy as np
import pytest

import flyweight as fw
from conftest import flip, odd_arrays, random_bytes
from flyweight.errors import VersionError
from flyweight.spec.dtype import BY_NUMPY
from flyweight.verbs.compare import numbers


def test_a_good_snapshot_is_whole(run):
    report = fw.verify(run)
    assert report.is_whole
    assert report.version == 5
    assert report.checked_bytes == report.read_bytes > 0
    assert fw.verify(run, version=2).version == 2


def test_all_damage_is_listed_not_only_the_first(tmp_path):
    fw.save({f"w{i}": random_bytes(9 << 20, i) for i in range(4)}, tmp_path)
    part = tmp_path / "v0000000000" / "model.safetensors"
    head = 8 + int.from_bytes(part.read_bytes()[:8], "little")
    for at in (0, 5 << 20, 20 << 20):
        flip(part, head + at)
    report = fw.verify(tmp_path)
    assert len(report.damage) == 3
    assert [line.split(":")[0] for line in report.damage] == ["'w0'", "'w0'", "'w2'"]


def test_formats_without_checksums_say_that_nothing_was_checked(run, tmp_path):
    fw.convert(run, tmp_path / "hf", to="hf")
    report = fw.verify(tmp_path / "hf")
    assert report.is_whole
    assert report.checked_bytes == 0
    assert report.read_bytes > 0


def test_a_diff_of_the_same_weights_is_empty_and_reads_nothing(run, tmp_path):
    fw.convert(run, tmp_path / "again", to="snapshot")
    report = fw.diff(run, tmp_path / "again")
    assert report.is_same
    assert report.num_same == len(odd_arrays())


def test_a_diff_tells_which_and_by_how_much(tmp_path):
    a = {
        "w": np.zeros((100, 3), np.float32),
        "same": np.ones(3),
        "gone": np.ones(1),
        "x": np.ones(2),
    }
    b = {"w": a["w"].copy(), "same": np.ones(3), "new": np.ones(1), "x": np.ones(3)}
    b["w"][7, 1], b["w"][9, 2] = 2.5, -0.5
    fw.save(a, tmp_path / "a")
    fw.save(b, tmp_path / "b")
    report = fw.diff(tmp_path / "a", tmp_path / "b")
    assert (report.only_a, report.only_b) == (["gone"], ["new"])
    assert report.other_spec == {"x": ("f64[2]", "f64[3]")}
    (changed,) = report.changed
    assert (changed.name, changed.num_different, changed.num_elements) == ("w", 2, 300)
    assert changed.max_distance == 2.5
    assert changed.mean_distance == pytest.approx(3 / 300)
    assert report.num_same == 1
    assert not report.is_same


def test_a_diff_across_formats_compares_bytes(run, tmp_path):
    fw.convert(run, tmp_path / "hf", to="hf")
    report = fw.diff(run, tmp_path / "hf")
    assert report.is_same
    assert report.num_same == len(odd_arrays())


def test_a_nan_has_no_distance(tmp_path):
    fw.save({"w": np.array([1.0, 2.0])}, tmp_path / "a")
    fw.save({"w": np.array([1.0, np.nan])}, tmp_path / "b")
    (changed,) = fw.diff(tmp_path / "a", tmp_path / "b").changed
    assert (changed.num_different, changed.max_distance, changed.mean_distance) == (1, None, None)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                                  "float8_e5m2fnuz", "float8_e8m0fnu"])  # fmt: skip
def test_small_floats_mean_what_ml_dtypes_says(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    codes = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    ours = numbers(codes.view(np.uint8), BY_NUMPY[name])
    np.testing.assert_array_equal(ours, codes.view(dtype).astype(np.float64))


def test_wide_complex_numbers_differ_by_their_distance(tmp_path):
    fw.save({"w": np.array([1 + 1j, 2])}, tmp_path / "a")
    fw.save({"w": np.array([1 + 1j, 2 + 3j])}, tmp_path / "b")
    (changed,) = fw.diff(tmp_path / "a", tmp_path / "b").changed
    assert (changed.num_different, changed.max_distance) == (1, 3.0)


def test_weights_that_are_open_are_not_taken_for_another_version(run):
    with fw.open(run, version=2) as stored:
        assert fw.verify(stored, version=2).version == 2
        with pytest.raises(VersionError, match="holds version 2, not 5"):
            fw.verify(stored, version=5)


def test_packed_elements_differ_without_a_distance(tmp_path):
    head = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    for name, data in (("a", b"\x12\x34"), ("b", b"\x12\x35")):
        (tmp_path / name).write_bytes(struct.pack("<Q", len(head)) + head + data)
    (changed,) = fw.diff(tmp_path / "a", tmp_path / "b").changed
    assert (changed.num_elements, changed.num_different) == (2, 1)
    assert (changed.max_distance, changed.mean_distance) == (None, None)
