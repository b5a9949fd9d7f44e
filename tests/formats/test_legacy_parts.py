"""C3 and C7: memory that old parts take to load, and what is said of the damaged ones."""

import json
import os

import numpy as np
import pytest

import flyweight as fw
from child_processes import run_python
from conftest import drop_cache, random_bytes
from flyweight.errors import FormatError, StoreError

PART_BYTES, NUM_PARTS, MEMORY_BYTES = 24 << 20, 6, 8 << 20
SLACK_BYTES = 8 << 20
"""What Python, its threads and the allocator take; a third of one part."""

LOADER = """
import json, sys
import numpy as np
import flyweight as fw

def peak_bytes():
    with open("/proc/self/status") as status:  # ru_maxrss would count the parent's memory too
        (line,) = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024

part_bytes, num_parts, memory_bytes = map(int, sys.argv[2:])
fw.save_legacy({"w": np.ones(9)}, sys.argv[1] + "/warm", rank=0, legacy_id=0)
fw.load(sys.argv[1] + "/warm", into={"w": np.zeros(9)}, rank=0, legacy_id=0)
target = {f"w{n}": np.ones(part_bytes, np.uint8) for n in range(num_parts)}
before = peak_bytes()
fw.load(sys.argv[1], into=target, rank=0, legacy_id=0, memory_bytes=memory_bytes)
print(json.dumps({"extra": peak_bytes() - before, "first": [int(w[0]) for w in target.values()]}))
"""


@pytest.mark.check
@pytest.mark.parametrize("as_safetensors", [False, True])
@pytest.mark.parametrize("is_cold", [False, True])
def test_parts_load_within_the_memory_that_is_set_whatever_their_number(
    tmp_path, as_safetensors, is_cold
):
    """C3: the peak is `memory_bytes`, not a part and not the sum of the parts."""
    source = {f"w{n}": np.full(PART_BYTES, n, np.uint8) for n in range(NUM_PARTS)}
    fw.save_legacy(
        source, tmp_path, rank=0, legacy_id=0, part_bytes=PART_BYTES, as_safetensors=as_safetensors
    )
    files = list(tmp_path.glob("*.part*.pdparams"))
    assert len(files) == NUM_PARTS
    for file in files if is_cold else ():
        drop_cache(file)
    done = run_python(LOADER, tmp_path, PART_BYTES, NUM_PARTS, MEMORY_BYTES)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["first"] == list(range(NUM_PARTS))
    assert told["extra"] <= MEMORY_BYTES + SLACK_BYTES


def test_parts_are_taken_in_the_order_of_their_numbers(tmp_path):
    """C3: 2 before 10."""
    source = {f"w{n}": np.full(8, n) for n in range(12)}
    fw.save_legacy(source, tmp_path, rank=0, legacy_id=0, part_bytes=64)
    with fw.open(tmp_path, rank=0, legacy_id=0) as stored:
        files = [extent.file for extent in stored.manifest.extents]
    assert files == [f"model_state.tp0.0.part{n}.pdparams" for n in range(12)]


# C7: damage.


@pytest.fixture(params=[False, True], ids=["pickle", "safetensors"])
def parts(request, tmp_path):
    """Three parts of two tensors each; returns their files."""
    source = {f"layer.{n}.w": random_bytes(4000, n) for n in range(6)}
    fw.save_legacy(
        source, tmp_path, rank=0, legacy_id=0, part_bytes=8000, as_safetensors=request.param
    )
    return [tmp_path / f"model_state.tp0.0.part{n}.pdparams" for n in range(3)]


def refusal(parts, kind=FormatError):
    """Load what is damaged, and return what is said; nothing may have been applied."""
    target = {f"layer.{n}.w": np.zeros(4000, np.uint8) for n in range(6)}
    with pytest.raises(kind) as refused:
        fw.load(parts[0].parent, into=target, rank=0, legacy_id=0)
    assert not any(array.any() for array in target.values())
    return str(refused.value)


@pytest.mark.parametrize("tensor", [2, 3])
@pytest.mark.parametrize("left", [1, 2000, 3999])
def test_c7_a_part_cut_inside_a_tensor_is_named_with_the_tensor(parts, tensor, left):
    """C7: which file, and which tensor; nothing is applied, not even of the parts before."""
    content = parts[1].read_bytes()
    start = content.index(random_bytes(4000, tensor).tobytes())
    os.truncate(parts[1], start + left)
    said = refusal(parts)
    assert parts[1].name in said
    assert f"'layer.{tensor}.w'" in said


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40])
def test_c7_a_part_cut_before_its_first_tensor_is_named(parts, size):
    os.truncate(parts[1], size)
    assert parts[1].name in refusal(parts)


def test_c7_a_part_with_its_last_byte_missing_is_named(parts):
    os.truncate(parts[2], parts[2].stat().st_size - 1)
    said = refusal(parts)
    assert parts[2].name in said
    # The last byte of a pickle is behind all its tensors.
    assert "'layer.5.w'" in said or said.startswith("pickle ")


def test_c7_a_part_with_bytes_behind_its_end_is_named(parts):
    with open(parts[1], "ab") as file:
        file.write(b"more")
    assert parts[1].name in refusal(parts)


J4000, J4001 = (b"J" + number.to_bytes(4, "little") for number in (4000, 4001))


def test_c7_a_tensor_whose_shape_and_bytes_differ_is_named(parts):
    """One flipped bit in the shape: the bytes that are there are not those that it needs."""
    content = parts[1].read_bytes()
    old, new = (b"[4000]", b"[4001]") if b"[4000]" in content else (J4000, J4001)
    assert old in content
    at = content.rindex(old)
    parts[1].write_bytes(content[:at] + new + content[at + len(old) :])
    said = refusal(parts)
    assert parts[1].name in said
    assert "'layer.3.w'" in said


def test_c7_a_torn_part_whose_rest_is_zeros_is_named(parts):
    """As after a power cut: the size is right, the end was never written."""
    content = parts[1].read_bytes()
    start = content.index(random_bytes(4000, 3).tobytes())
    parts[1].write_bytes(content[: start - 50] + bytes(len(content) - start + 50))
    if content.startswith(b"\x80"):  # safetensors have their structure in front, and no checksum
        said = refusal(parts)
        assert parts[1].name in said
        assert "'layer." in said


def test_c7_a_part_cut_while_it_is_read_is_named_with_the_tensor(parts):
    with fw.open(parts[0].parent, rank=0, legacy_id=0) as stored:
        os.truncate(parts[1], 100)
        target = {f"layer.{n}.w": np.zeros(4000, np.uint8) for n in range(6)}
        with pytest.raises((FormatError, StoreError)) as refused:
            fw.load(stored, into=target)
    said = str(refused.value)
    assert parts[1].name in said
    assert "'layer.2.w'" in said
    assert "must not be used" in said or "was not touched" in said
