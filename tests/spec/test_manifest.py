import json
from dataclasses import replace

import pytest

from flyweight.errors import FormatError, SpecError
from flyweight.spec.box import Box
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import (
    Extent,
    Manifest,
    SnapshotFile,
    TensorSpec,
    check_file_name,
)
from flyweight.spec.manifest_json import decode_manifest, encode_manifest
from flyweight.spec.strict_json import Hash

F32, I4, BF16 = DTYPES["f32"], DTYPES["i4"], DTYPES["bf16"]


def example():
    """Two tensors in two parts, one of them cut in two, one packed, one tied."""
    tensors = {"w": TensorSpec(BF16, (4, 6)), "q": TensorSpec(I4, (2, 4))}
    return Manifest(
        tensors,
        version=7,
        parent=3,
        tied={"head": "w"},
        values={"step": 12, "rate": 0.5, "name": "run", "none": None, "flag": True},
        writer={"host": "somewhere"},
        files=[
            SnapshotFile("a.safetensors", 100 + 24 + 4, 100, Hash(1)),
            SnapshotFile("b.safetensors", 64 + 24, 64, Hash(2)),
        ],
        extents=[
            Extent("w", Box((0, 0), (2, 6)), "a.safetensors", 100, (11,), 21),
            Extent("w", Box((2, 0), (2, 6)), "b.safetensors", 64, (12,), None),
            Extent("q", Box((0, 0), (2, 4)), "a.safetensors", 124, (13,), 23),
        ],
        chunk_bytes=4096,
    )


def test_a_manifest_survives_json():
    manifest = example()
    text = encode_manifest(manifest)
    assert decode_manifest(text) == manifest
    assert encode_manifest(decode_manifest(text)) == text


def edited(*path, to):
    record = json.loads(encode_manifest(example()))
    place = record
    for key in path[:-1]:
        place = place[key]
    if to is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(record).encode()


HUGE = 10**30
FAULTS = {
    "no version": (("version",), KeyError, "missing required field `version`"),
    "an extra field": (("surprise",), 1, "surprise"),
    "an extra field of a part": (("parts", 0, "surprise"), 1, "unknown field `surprise`"),
    "an extra field of a tensor": (("tensors", "w", "surprise"), 1, "unknown field `surprise`"),
    "an extra field of a shard": (("tensors", "w", "shards", 0, "surprise"), 1, "unknown field"),
    "a part without its size": (("parts", 0, "bytes"), KeyError, "missing required field `bytes`"),
    "a size of a fraction": (("tensors", "w", "shape"), [4.0, 6], "got `float`.*found 4.0"),
    "a bool for a size": (("tensors", "w", "shape"), [4, True], "got `bool`.*found True"),
    "a place that is negative": (("tensors", "w", "shards", 0, "at"), -1, "found -1"),
    "an offset of more dims": (
        ("tensors", "q", "shards", 0, "offset"),
        [0, 0, 0],
        "differ in rank",
    ),
    "a digest of 17 digits": (("tensors", "w", "shards", 0, "digest"), "0" * 17, "16 hexadecimal"),
    "a checksum with a newline": (("parts", 0, "head_checksum"), "0" * 16 + "\n", "16 hexadecimal"),
    "a field that looks like a path": (("x` - at `$.parts[9].y",), 1, "unknown field"),
    "another format": (("format",), "tarball", "tarball"),
    "a newer format": (("format_version",), 2, "version 2"),
    "a huge version": (("version",), HUGE, r"\.version`, found 1000"),
    "a negative version": (("version",), -1, r"\.version`, found -1"),
    "a fractional version": (("version",), 7.0, r"\.version`, found 7\.0"),
    "a bool for a version": (("version",), True, r"\.version`, found True"),
    "a parent of its own age": (("parent",), 7, "parent 7"),
    "chunks of a byte": (("chunk_bytes",), 1, "chunks of 1 bytes"),
    "chunks of a terabyte": (("chunk_bytes",), 1 << 40, "chunks of 1099511627776 bytes"),
    "parts that are no list": (("parts",), {}, r"got `object` - at `\$\.parts`"),
    "a part upstairs": (("parts", 0, "file"), "../a.safetensors", r"\.\./a"),
    "a part with a root": (("parts", 0, "file"), "/etc/passwd", "/etc/passwd"),
    "a hidden part": (("parts", 0, "file"), ".a", "plain name"),
    "a part with a null": (("parts", 0, "file"), "a\0b", "plain name"),
    "a part twice": (("parts", 0, "file"), "b.safetensors", "a part twice"),
    "a head longer than its part": (("parts", 0, "head_bytes"), 1000, "head of 1000"),
    "a shorter part": (("parts", 0, "bytes"), 126, "which has 126"),
    "a longer part": (("parts", 0, "bytes"), 200, "a gap"),
    "a checksum that is no number": (("parts", 0, "head_checksum"), "xyz", "16 hexadecimal"),
    "an unknown dtype": (("tensors", "w", "dtype"), "f128", "f128"),
    "a dtype that is a list": (("tensors", "w", "dtype"), [], "dtype"),
    "a negative size": (("tensors", "w", "shape"), [-4, 6], "-4"),
    "a shape of absurd size": (("tensors", "w", "shape"), [2**62, 2**62], r"2\*\*63 bytes"),
    "a shape of 65 dims": (
        ("tensors", "w", "shape"),
        [1] * 65,
        r"tensor 'w': Expected `array` of length <= 64 - at `\$\.shape`",
    ),
    "a shape that is larger": (("tensors", "w", "shape"), [5, 6], "24 of its 30 elements"),
    "a box outside": (("tensors", "w", "shards", 0, "offset"), [3, 0], "leaves a tensor"),
    "a box of another rank": (("tensors", "w", "shards", 0, "offset"), [0], "differ in rank"),
    "a box of fewer dims": (
        ("tensors", "w", "shards", 0),
        "x",
        r"tensor 'w': Expected `object`.* found 'x'",
    ),
    "a box twice": (("tensors", "w", "shards", 1, "offset"), [1, 0], "twice"),
    "a part that is not there": (("tensors", "w", "shards", 0, "part"), 2, "part 2 of 2"),
    "a place in the head": (("tensors", "w", "shards", 0, "at"), 10, "an overlap|a gap"),
    "a place past the end": (("tensors", "w", "shards", 0, "at"), HUGE, "at|whole number"),
    "too few checksums": (("tensors", "w", "shards", 0, "checksums"), "", "0 checksum digits"),
    "checksums of words": (("tensors", "w", "shards", 0, "checksums"), "z" * 16, "checksum"),
    "a digest that is a number": (
        ("tensors", "w", "shards", 0, "digest"),
        5,
        r"tensor 'w': .*16 hexadecimal digits - at `\$.shards\[0\]\.digest`, found 5",
    ),
    "a lost shard": (("tensors", "w", "shards"), [], "a gap|0 of its 24"),
    "a nibble cut": (("tensors", "q", "shards", 0, "shape"), [2, 3], "inside a byte"),
    "an empty name": (("tensors", ""), {"dtype": "u8", "shape": [0], "shards": []}, "tensor name"),
    "a name with a bell": (("tied", "\a"), "w", "tensor name"),
    "a tie to nothing": (("tied", "head"), "gone", "do not exist"),
    "a tie that is a tensor": (("tied", "q"), "w", "names twice"),
    "a value that is a tensor": (("values", "q"), 1, "names twice"),
    "a value that nests": (("values", "deep"), {"a": 1}, "plain leaf"),
    "a writer of numbers": (("writer", "pid"), 5, "Expected `str`"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_manifest_is_refused_that_has(fault):
    path, value, message = FAULTS[fault]
    with pytest.raises(FormatError, match=message):
        decode_manifest(edited(*path, to=value))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format":"flyweight-snapshot"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b'{"version":NaN}',
        b'{"a":1,"a":2}',
    ],
    ids=repr,
)
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(FormatError):
        decode_manifest(text[:200_000])


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_only_python_takes_for_json_are_refused(word):
    text = encode_manifest(replace(example(), values={"x": 1234}))
    with pytest.raises(FormatError, match=f"holds {word}, which is not JSON"):
        decode_manifest(text.replace(b"1234", word.encode()))


def test_names_given_twice_are_named():
    with pytest.raises(FormatError, match="names 'a' twice"):
        decode_manifest(b'{"a":1,"b":2,"a":3}')


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "-rf", "x" * 256, 5, None, "ä"])
def test_only_plain_file_names_pass(name):
    with pytest.raises(FormatError, match="plain name"):
        check_file_name(name)


def test_packed_dtypes_count_bytes_along_the_last_dim():
    spec = TensorSpec(I4, (3, 8))
    assert (spec.nbytes, spec.item_bytes) == (12, 1)
    box = Box((1, 4), (2, 4))
    assert spec.stored(box) == Box((1, 2), (2, 2))
    assert spec.elements(spec.stored(box)) == box
    with pytest.raises(SpecError, match="inside a byte"):
        spec.stored(Box((0, 1), (1, 2)))
    with pytest.raises(SpecError, match="do not fill whole bytes"):
        TensorSpec(I4, (3, 7))


def test_six_bit_floats_pack_four_to_three_bytes():
    spec = TensorSpec(DTYPES["f6_e2m3"], (2, 8))
    assert spec.nbytes == 12
    assert spec.stored(Box.whole((2, 8))) == Box.whole((2, 6))


def test_thousands_of_shards_are_checked_by_few_comparisons(monkeypatch):
    count = 4000
    monkeypatch.setattr("flyweight.spec.box.MAX_COMPARED", 10 * count)
    spec = TensorSpec(F32, (count, 4))
    boxes = [Box((row, 0), (1, 4)) for row in range(count)]
    extents = [Extent("w", box, "a.safetensors", 64 + 16 * i, (1,)) for i, box in enumerate(boxes)]
    parts = [SnapshotFile("a.safetensors", 64 + 16 * count, 64, Hash(1))]
    manifest = Manifest({"w": spec}, version=1, files=parts, extents=extents, chunk_bytes=4096)
    assert len(decode_manifest(encode_manifest(manifest)).extents) == count


def test_six_bit_floats_longer_than_a_chunk_are_cut_between_elements():
    spec = TensorSpec(DTYPES["f6_e2m3"], (8000,))
    for items in spec.chunks(Box.whole((8000,)), 4096):
        box = spec.elements(items)
        assert spec.stored(box) == items


def test_infinities_and_what_is_no_number_survive():
    values = {"best": float("inf"), "worst": float("-inf"), "none": float("nan"), "one": 1.0}
    found = decode_manifest(encode_manifest(replace(example(), values=values))).values
    assert {name: repr(value) for name, value in found.items()} == {
        n: repr(v) for n, v in values.items()
    }


@pytest.mark.parametrize(
    "value", [{"float": "1"}, {"float": "inf", "x": 1}, {"float": 1}, {"int": "inf"}]
)
def test_other_objects_are_no_values(value):
    record = json.loads(encode_manifest(replace(example(), values={"x": 1})))
    record["values"]["x"] = value
    with pytest.raises(FormatError, match="expected a plain leaf"):
        decode_manifest(json.dumps(record).encode())


def test_values_without_a_place_in_json_are_refused_on_the_way_out():
    with pytest.raises(SpecError, match="no place in JSON"):
        encode_manifest(replace(example(), values={"x": "\ud800"}))


def test_an_untied_manifest_has_a_spec_for_every_name():
    manifest = replace(example(), files=(), extents=())
    assert manifest.untied().tensors["head"] == manifest.tensors["w"]
    assert not manifest.untied().tied
    assert manifest.spec("head") == manifest.spec("w")
