"""Pickles made to cost: opening one takes seconds per MB at most, and memory of ten times the file."""

import itertools
import json
import pickle
import struct

import numpy as np
import pytest

import flyweight as fw
from campaign import HANG_SECONDS
from child_processes import run_python
from fakes import MemoryStore
from flyweight.errors import FormatError
from flyweight.formats import pickle_code as code
from flyweight.formats import pickle_values
from flyweight.formats.paddle_dist import open_paddle
from flyweight.formats.pdparams import open_pdparams

SIZE = 400_000
MIN_BUDGET_BYTES = 5 << 19
"""What any file may take, lowered: seven times SIZE is just above it, as it must be."""
MODULUS = 2**61 - 1  # Python's hash of a number is its remainder
HEAD = b"ccollections\nOrderedDict\n\x94]\x94K\x01"  # values 0 and 1, recalled below


def repeated(unit, head=HEAD, tail=b"", size=SIZE):
    return b"\x80\x04" + head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail + b"."


def batches(pairs, start=b"}", end=b"u", length=1000):
    """Items of a container in calls of a thousand, as pickle writes them."""
    pairs = iter(pairs)
    some = iter(lambda: b"".join(itertools.islice(pairs, length)), b"")
    return start + b"".join(b"(" + each + end for each in some)


def long(value):
    return b"\x8a\x10" + value.to_bytes(16, "little", signed=True)


def padding(nbytes):
    """Bytes that cost nothing to read."""
    return b"B" + struct.pack("<I", nbytes) + bytes(nbytes)


def real(value):
    return b"G" + struct.pack(">d", value)


OPCODES = {
    "lists": b"]", "dicts": b"}", "marks": b"(", "nones": b"N", "empty tuples": b")", "tuples": b")\x85",
    "tuple in tuple": b"\x85", "bytes": b"K\x01", "shorts": b"M\xff\xff", "ints": b"J\xff\xff\xff\x7f",
    "longs": b"\x8a\x01\x05", "wide longs": long(2**126), "no bytes": b"C\0", "texts": b"\x8c\x02ab",
    "wide texts": b"\x8c\x06" + "a\U0001f600b".encode(),
    "floats": real(3.14), "memo": b"\x94", "recalls": b"h\0", "kept recalls": b"h\0\x94", "pairs": b"h\1h\1\x86",
    "marked dicts": b"(d", "marked lists": b"(l", "calls": b"h\0)R", "calls with items": b"h\0)RNNs",
    "dropped lists": b"]0", "appends": b"h\1Na0", "globals": b"cnumpy\ndtype\n", "drops": b"N0",
}  # fmt: skip
ARRAYS = {name: repeated(unit) for name, unit in OPCODES.items()} | {
    "one tuple": repeated(b"N", b"(", b"t"),
    "one list": repeated(b"h\1", HEAD + b"](", b"e"),
    "many values": b"\x80\x04}\x8c\x01a" + batches([b"K\x01"] * (SIZE // 2), b"]", b"e") + b"s.",
    "numbers of one hash": b"\x80\x04}(" + b"".join(long(n * MODULUS) + b"N" for n in range(SIZE // 19)) + b"u.",
    "negative numbers of one hash": b"\x80\x04" + batches(long(-n * MODULUS) + b"N" for n in range(SIZE // 19)) + b".",
    "numbers of one hash, one by one": b"\x80\x04}" + b"".join(long(n * MODULUS + 7) + b"Ns" for n in range(SIZE // 20)) + b".",
    "floats for keys": b"\x80\x04" + batches(real(n * 1.5) + b"N" for n in range(SIZE // 10)) + b".",
    "powers for keys": b"\x80\x04" + batches(real(m * 2.0 ** (61 * e)) + b"N" for m in range(1, 12500) for e in range(-16, 16)) + b".",
    "texts for keys": b"\x80\x04" + batches(b"\x8c\x08%08dN" % n for n in range(SIZE // 11)) + b".",
    "long name": b"\x80\x04X" + struct.pack("<I", 60_000) + b"k" * 60_000 + b"\x940]\x94K\x01a"
    + b"".join(b"0}h\0(" + b"h%c" % (level + 1) * 100 + b"ls\x94" for level in range(8)) + padding(SIZE) + b"0.",
}  # fmt: skip


def torch_named(name):
    return code.named("torch.distributed.checkpoint.metadata", name)


def paddle_named(name):
    return code.named("paddle.distributed.flex_checkpoint.dcp.metadata", name)


def kept(*values):
    return b"".join(value + b"\x940" for value in values)


def torch_index(entries, places, head=b""):
    """An index as torch pickles it, of what stands for its tensors and their files."""
    fields = code.text("state_dict_metadata") + entries + code.text("storage_data") + places
    fields += code.text("planner_data") + padding(max(SIZE - len(fields), 0))
    return b"\x80\x04" + head + torch_named("Metadata") + b")\x81}(" + fields + b"ub."


def paddle_index(shards, places, head=b""):
    fields = code.text("state_dict_metadata") + shards + code.text("storage_metadata") + places
    fields += code.text("flat_mapping") + padding(max(SIZE - len(fields), 0))
    return b"\x80\x04" + head + paddle_named("Metadata") + b")\x81}(" + fields + b"ub."


def corners(count):
    """Offsets in nine dims, all different, whose tuples all have one hash: values 0 to 3."""
    products = itertools.product(*[[b"h%c" % n for n in range(4)]] * 9)
    return [b"(" + b"".join(each) + b"t" for each in itertools.islice(products, count)]


NUMBERS = kept(*(b"\x8a\x09" + (n * MODULUS).to_bytes(9, "little") for n in range(4)))


def torch_places(count):
    info = code.made(
        code.named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        relative_path=code.text("__0_0.distcp"), offset=b"K\0", length=b"K\0",
    )  # fmt: skip
    head = NUMBERS + kept(
        info, torch_named("MetadataIndex"), *map(code.text, ("fqn", "offset", "w"))
    )
    places = batches(b"h\5)\x81}(h\6h\x08h\7%subh\4" % corner for corner in corners(count))
    return torch_index(b"}", places, head)


def paddle_places(count):
    names = map(code.text, ("tensor_key", "global_offset", "w"))
    head = NUMBERS + kept(code.text("0_0.distcp"), paddle_named("LocalTensorIndex"), *names)
    places = batches(b"h\5)\x81}(h\6h\x08h\7%subh\4" % corner for corner in corners(count))
    return paddle_index(b"}", places, head)


def paddle_shards(count):
    head = NUMBERS + kept(
        b"N", paddle_named("LocalTensorMetadata"), code.text("local_shape"),
        code.text("global_offset"), b"(" + b"K\0" * 9 + b"t",
    )  # fmt: skip
    made = (b"h\5)\x81}(h\6h\x08h\7%sub" % corner for corner in corners(count))
    shards = b"}" + code.text("w") + batches(made, b"]", b"e") + b"s"
    index = code.made(
        paddle_named("LocalTensorIndex"), tensor_key=code.text("w"),
        global_offset=b"(" + b"K\0" * 9 + b"t",
    )  # fmt: skip
    return paddle_index(shards, b"}" + index + code.text("0_0.distcp") + b"s", head)


def torch_recalled(num_names, num_chunks):
    """Every tensor has the same list of empty chunks."""
    chunk = code.made(torch_named("ChunkStorageMetadata"), offsets=b"K\0\x85", sizes=b"K\0\x85")
    properties = torch_named("TensorProperties") + b")\x81(ctorch\nfloat32\n\x89tb"
    entry = code.made(
        torch_named("TensorStorageMetadata"), properties=properties, size=b"K\0\x85",
        chunks=b"](" + b"h\0" * num_chunks + b"e",
    )  # fmt: skip
    entries = batches(b"\x8c\x08%08dh\1" % n for n in range(num_names))
    return torch_index(entries, b"}", kept(chunk, entry))


def paddle_recalled(num_names, num_shards):
    shard = code.made(paddle_named("LocalTensorMetadata"), local_shape=b")", global_offset=b")")
    shards = batches(b"\x8c\x08%08dh\1" % n for n in range(num_names))
    head = kept(shard, b"](" + b"h\0" * num_shards + b"e")
    return paddle_index(shards, b"}", head)


INDEXES = {
    "torch, lists": (".metadata", repeated(b"]", b"")),
    "torch, memo": (".metadata", repeated(b"\x94", b"]")),
    "torch, calls": (".metadata", repeated(b"h\0)\x81", torch_named("Metadata") + b"\x94")),
    "torch, kept recalls": (".metadata", repeated(b"h\0\x94", b"]\x94")),
    "torch, offsets of one hash": (".metadata", torch_places(25_000)),
    "torch, one list of chunks": (".metadata", torch_recalled(100_000, 200_000)),
    "paddle, lists": ("0.metadata", repeated(b"]", b"")),
    "paddle, offsets of one hash": ("0.metadata", paddle_places(25_000)),
    "paddle, shards of one hash": ("0.metadata", paddle_shards(25_000)),
    "paddle, one list of shards": ("0.metadata", paddle_recalled(100_000, 200_000)),
}

MEASURE = """
import json, os, resource, sys, time
import flyweight as fw
from flyweight.formats import pickle_values
pickle_values.MIN_BUDGET_BYTES = int(sys.argv.pop(1))
def bytes_of(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))
def open_small():
    for path in sys.argv[1:3]:
        try: fw.open(path)
        except fw.FlyweightError: pass
open_small()  # imports what opening needs
def call(stack):
    stack.append(None)
    stack.pop()
def seconds_of_a_call(count=100_000):
    started = time.process_time()
    for _ in range(count):
        call([])
    return (time.process_time() - started) / count
print(json.dumps(min(seconds_of_a_call() for _ in range(5))), flush=True)
for path in sys.argv[3:]:
    if os.fork():
        os.wait()
        continue
    open_small()  # touches the pages that a fork copies when they are written
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    before, started = bytes_of("VmRSS"), time.process_time()
    try:
        fw.open(path)
        told = "opened"
    except fw.FlyweightError as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - started
    print(json.dumps([path, seconds, bytes_of("VmHWM") - before, told]), flush=True)
    os._exit(0)
"""


KILLED = (20.0, 0, "killed: took 20 s")
SECONDS_PER_MB = 3
"""What is in order takes half a second; what grows with the square of the file takes six or more."""


def measured(place):
    """For each file: bytes of the pickle, CPU seconds and memory of opening it, and what came.

    Seconds are those of a machine on which a call of a small function takes at most 0.1 us. What
    other processes do to the caches only adds to them, so what took
    too long is measured up to three times, and the least counts.
    """
    paths, sizes = {}, {}
    (place / "empty.pdparams").write_bytes(b"\x80\x04}.")
    (place / "empty").mkdir()
    (place / "empty" / ".metadata").write_bytes(b"\x80\x04}.")
    for number, (name, content) in enumerate(ARRAYS.items()):
        paths[name] = place / f"{number}.pdparams"
        paths[name].write_bytes(content)
        sizes[name] = len(content)
    for number, (name, (file, content)) in enumerate(INDEXES.items()):
        paths[name] = place / str(number)
        paths[name].mkdir()
        (paths[name] / file).write_bytes(content)
        for data in ("__0_0.distcp", "0_0.distcp"):
            if (data[0] == "_") == file.startswith("."):
                (paths[name] / data).write_bytes(b"\x80\x04}.")
        sizes[name] = len(content)
    found, left = {}, list(paths)
    for _ in range(3):
        words = [place / "empty.pdparams", place / "empty", *(paths[name] for name in left)]
        done = run_python(MEASURE, MIN_BUDGET_BYTES, *words, timeout=HANG_SECONDS, check=True)
        call_seconds, *rows = map(json.loads, done.stdout.splitlines())
        speed = max(call_seconds / 1e-7, 1)
        once = {path: (seconds / speed, *rest) for path, seconds, *rest in rows}
        for name in left:
            found[name] = min(found.get(name, KILLED), once.get(str(paths[name]), KILLED))
        left = [name for name in left if found[name][0] >= SECONDS_PER_MB * sizes[name] / 1e6]
    return {name: (sizes[name], *rest) for name, rest in found.items()}


@pytest.mark.check
def test_a_costly_pickle_takes_seconds_per_megabyte_and_ten_times_its_size(tmp_path):
    """One test, so that one process of a parallel run measures them all, one after another."""
    too_costly = {}
    for name, (nbytes, seconds, memory_bytes, told) in measured(tmp_path).items():
        assert 7 * nbytes > MIN_BUDGET_BYTES, name
        if seconds >= SECONDS_PER_MB * nbytes / 1e6 or memory_bytes >= 10 * nbytes:
            too_costly[name] = seconds / nbytes * 1e6, memory_bytes / nbytes, told
        if name in ("lists", "many values", "torch, lists", "paddle, lists"):
            assert told.startswith("FormatError: "), name
            assert str(7 * nbytes) in told, name
    assert not too_costly


def test_a_small_file_may_take_a_fixed_amount(tmp_path, monkeypatch):
    path = tmp_path / "m.pdparams"
    monkeypatch.setattr(pickle_values, "MIN_BUDGET_BYTES", 1 << 20)
    for count, is_fine in ((1000, True), (20_000, False)):
        path.write_bytes(pickle.dumps({"a": [1] * count}))
        if is_fine:
            assert len(fw.open(path).manifest.values) == count
        else:
            with pytest.raises(FormatError, match="1048576"):
                fw.open(path)


@pytest.mark.parametrize("key", [MODULUS, -MODULUS, 2**63, -(2**100)])
def test_a_number_for_a_key_that_shares_its_hash_is_refused_with_the_limit(tmp_path, key):
    path = tmp_path / "m.pdparams"
    path.write_bytes(pickle.dumps({"a": {key: 1.5}}))
    with pytest.raises(FormatError, match=f"{key}.*{MODULUS - 1}"):
        fw.open(path)


def test_plain_keys_of_every_kind_are_read(tmp_path):
    path = tmp_path / "m.pdparams"
    content = {0: 1, -1: 2, -2: 3, MODULUS - 1: 4, 1 - MODULUS: 5, 2.5: 6, None: 7, "é": 8}
    path.write_bytes(pickle.dumps({"a": content}))
    values = fw.open(path).manifest.values
    assert values == {f"a.{key}": value for key, value in content.items()}


def test_values_that_are_kept_from_1_on_are_recalled(tmp_path):
    """Python 2 counts the values that it keeps from 1 on."""
    path = tmp_path / "m.pdparams"
    a, b = code.text("a"), code.text("b")
    path.write_bytes(b"\x80\x02}q\1(" + a + b"q\2K\5" + b + b"h\2u.")
    assert fw.open(path).manifest.values == {"a": 5, "b": "a"}


def test_a_value_that_is_recalled_before_it_is_kept_is_refused(tmp_path):
    path = tmp_path / "m.pdparams"
    for pickled in (b"\x80\x02}(" + code.text("a") + b"h\0u.", b"\x80\x02}(h\1" + b"K\1q\1u."):
        path.write_bytes(pickled)
        with pytest.raises(FormatError, match="never kept"):
            fw.open(path)


def test_names_and_numbers_across_the_blocks_that_are_read_at_once_are_whole():
    content = {"w": np.arange(3, dtype="f4"), "n": 2**30}
    for shift in range(len(pickle.dumps(content, 2)) + 20):
        data = pickle.dumps({"long": "k" * ((64 << 10) - shift), **content}, 2)
        with open_pdparams(MemoryStore({"file": data}), ["file"]) as opened:
            assert opened.read("w").tobytes() == content["w"].tobytes()
            assert opened.manifest.values["n"] == 2**30


# Large and honest.

DIMS_AND_PROTOCOLS = pytest.mark.parametrize(
    ("num_dims", "protocol"),
    [
        *(pytest.param(*each, marks=pytest.mark.check) for each in [(1, 2), (4, 4)]),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in [(1, 4), (2, 2), (2, 4), (4, 2)]
        ),
    ],
)


@pytest.fixture
def small_floor(monkeypatch):
    """What small files may take is next to nothing for the files below."""
    monkeypatch.setattr(pickle_values, "MIN_BUDGET_BYTES", 128 << 10)


@DIMS_AND_PROTOCOLS
def test_an_index_of_many_shards_opens_within_ten_times_its_size(
    tmp_path, small_floor, num_dims, protocol
):
    """As torch writes it: one name, many chunks, so that names do not fill the file."""
    import io

    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    size, item = torch.Size, io.BytesIO()
    torch.save(torch.zeros([1] * num_dims), item)
    item, count = item.getvalue(), 2000
    offsets = [size([n, *[0] * (num_dims - 1)]) for n in range(count)]
    ones = [size([1] * num_dims) for _ in offsets]
    chunks = [metadata.ChunkStorageMetadata(*each) for each in zip(offsets, ones, strict=True)]
    whole = metadata.TensorStorageMetadata(
        metadata.TensorProperties(torch.float32), size([count, *[1] * (num_dims - 1)]), chunks
    )
    places = {
        metadata.MetadataIndex("w", offset, n): filesystem._StorageInfo(
            "__0_0.distcp", n * len(item), len(item)
        )
        for n, offset in enumerate(offsets)
    }
    meta = metadata.Metadata({"w": whole}, {"w": ("w",)}, places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta, protocol))
    (tmp_path / "__0_0.distcp").write_bytes(item * count)
    with fw.open(tmp_path) as opened:
        assert len(opened.shards("w")) == count


@DIMS_AND_PROTOCOLS
def test_an_index_of_paddle_with_many_shards_opens_within_ten_times_its_size(
    tmp_path, small_floor, num_dims, protocol
):
    """As Paddle writes it: each of a hundred files has a row of each of sixty tensors."""
    from paddle.distributed.flex_checkpoint.dcp import metadata

    num_files, names, rest = 100, [f"w{n}" for n in range(60)], [0] * (num_dims - 1)
    shards, places = {name: [] for name in names}, {}
    for n in range(num_files):
        for name in names:  # tuples of their own, as every rank makes them
            offset, ones = (n, *rest), tuple([1] * num_dims)
            whole = (num_files, *[1] * (num_dims - 1))
            shards[name].append(
                metadata.LocalTensorMetadata(offset, ones, "float32", whole, False, None)
            )
            index = metadata.LocalTensorIndex(name, offset, False, None, None, ones)
            places[index] = f"{n}_0.distcp"
        content = {name: np.full([1] * num_dims, n, "f4") for name in names}
        (tmp_path / f"{n}_0.distcp").write_bytes(pickle.dumps(content, 4))
    meta = metadata.Metadata(shards, places, {name: (name,) for name in names})
    (tmp_path / "0.metadata").write_bytes(pickle.dumps(meta, protocol))
    with fw.open(tmp_path) as opened:
        assert opened.read("w7").tobytes() == np.arange(num_files, dtype="f4").tobytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_many_small_arrays_open_within_ten_times_the_file(tmp_path, small_floor, protocol):
    name = "model.layers.12.mlp.experts.{}.down_proj.weight_scale"
    source = {name.format(n): np.full(1, n, "f4") for n in range(2000)}
    names = {name.format(n): f"generated_tensor_{n}" for n in range(2000)}
    content = {**source, "StructuredToParameterName@@": names}  # as paddle.save adds it
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps(content, protocol))
    with fw.open(tmp_path / "m.pdparams") as opened:
        assert opened.manifest.names == list(source)
        assert opened.read(name.format(1999)).tobytes() == source[name.format(1999)].tobytes()


def list_of_lists(levels=60):
    """A list of the same list, again and again: small to say, endless to print."""
    levels_code = b"".join(b"](" + b"h%c" % level * 2 + b"e\x940" for level in range(levels))
    return b"]\x940" + levels_code + b"h%c" % levels


@pytest.mark.parametrize("where", ["the file of a replica", "the name of a tensor"])
def test_a_value_of_an_index_that_is_endless_to_print_is_not_printed(where):
    if where == "the file of a replica":
        index = code.made(
            paddle_named("LocalTensorIndex"), tensor_key=code.text("w"), replica_id=b"K\1"
        )
        content = paddle_index(b"}", b"}" + index + list_of_lists() + b"s")
    else:
        shard = code.made(paddle_named("LocalTensorMetadata"), local_shape=list_of_lists())
        content = paddle_index(b"}" + shard + b"Ns", b"}")
    store = MemoryStore({"0.metadata": content, "0_0.distcp": b"\x80\x04}."})
    with pytest.raises(FormatError, match="(file|shards) of"):
        open_paddle(store)
