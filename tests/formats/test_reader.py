"""The reader: small neighbours are read by one call, and each of them is checked."""

import numpy as np
import pytest

import flyweight as fw
from conftest import flip, random_bytes, same, zeros_like
from flyweight.errors import ChecksumMismatch

SIZES = [1000, 1, 4095, 600 << 10, 600 << 10, 3 << 20, 1000, 9 << 20, (1 << 20) + 1, 7, 1 << 20, 5]
"""Bytes of neighbours in one file: some gathered into one call, some read alone, one in chunks."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A snapshot, what is in it, and where each tensor's last byte stands in its file."""
    place = tmp_path_factory.mktemp("reader") / "run"
    source = {f"w{n:02}": random_bytes(size, n) for n, size in enumerate(SIZES)}
    fw.save(source, place)
    with fw.open(place) as opened:
        ends = {e.name: e.offset + SIZES[int(e.name[1:])] for e in opened.manifest.extents}
        assert len({e.file for e in opened.manifest.extents}) == 1
    return place, source, ends


def part_of(place):
    part = place / "v0000000000" / "model.safetensors"
    part.read_bytes()  # now it is in the page cache, from where it is read in place
    return part


def test_neighbours_of_any_size_are_read_exactly(saved):
    place, source, _ = saved
    part_of(place)
    for should_verify in (True, False):
        target = zeros_like(source)
        report = fw.load(place, into=target, should_verify=should_verify)
        assert same(target, source)
        assert report.checked_bytes == (sum(SIZES) if should_verify else 0)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_wrong_byte_in_any_neighbour_is_seen_and_named(saved, number):
    """C7."""
    place, source, ends = saved
    name = f"w{number:02}"
    flip(part_of(place), ends[name] - 1)
    try:
        with pytest.raises(ChecksumMismatch, match=f"^'{name}': bytes "):
            fw.load(place, into=zeros_like(source), num_threads=1)
        (damage,) = fw.verify(place).damage
        assert damage.startswith(f"{name!r}: bytes ")
        target = zeros_like(source)
        fw.load(place, into=target, should_verify=False)
        wrong = [n for n in source if not np.array_equal(target[n], source[n])]
        assert wrong == [name]
    finally:
        flip(part_of(place), ends[name] - 1)
