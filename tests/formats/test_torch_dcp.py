"""torch's distributed checkpoints: what torch writes we read, what we write torch reads."""

import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

import flyweight as fw
from child_processes import run_python
from flyweight.errors import FormatError, SnapshotIncomplete
from flyweight.spec.dtype import BY_TORCH
from rank_processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DTYPES = [name for name in BY_TORCH if name != "float4_e2m1fn_x2"]


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state():
    generator = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {f"d.{name}": some(4, 6).abs().mul(9).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "turned": some(5, 3).t(),
        "channels": some(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "view": some(10, 10)[2:7, 1:4], "wide": some(3, 1, 1, 2, 1),
        "parameter": torch.nn.Parameter(some(3)), "x" * 300: some(2), "fp4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }  # fmt: skip
    return {
        "model": tensors, "list": [1, some(2), {"a": some(3)}], "step": 7, "lr": 1e-3, "big": 2**40, "name": "x",
        "betas": (0.9, 0.99), "none": None, "yes": True, "groups": [{"lr": 0.5, "ids": [1, 2]}],
    }  # fmt: skip


VALUES = {
    "list.0": 1, "step": 7, "lr": 1e-3, "big": 2**40, "name": "x", "betas.0": 0.9, "betas.1": 0.99, "none": None,
    "yes": True, "groups.0.lr": 0.5, "groups.0.ids.0": 1, "groups.0.ids.1": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("dcp") / "torch"
    dcp.save(state(), checkpoint_id=place)
    return place


@pytest.fixture
def broken(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "copy"))


def check(place, *, has_values=True):
    tensors = {f"model.{name}": tensor for name, tensor in state()["model"].items()}
    tensors |= {"list.1": state()["list"][1], "list.2.a": state()["list"][2]["a"]}
    with fw.open(place) as opened:
        assert opened.manifest.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert opened.read(name).tobytes() == raw(tensor), name
            assert (
                BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
                == opened.manifest.spec(name).dtype
            )
        if has_values:
            assert opened.manifest.values == VALUES


def test_what_torch_wrote_is_read_exactly_whatever_its_dtype_and_strides(written):
    """C35."""
    check(written)
    assert fw.open(written).format == "dcp"
    fw.open(written / ".metadata").close()


def test_it_loads_in_place_and_nothing_of_torch_is_needed(written):
    target = {"model": {"scalar": np.zeros((), "f4"), "turned": np.zeros((3, 5), "f4")}, "step": 0}
    report = fw.load(written, into=target, extra="report")
    assert report.checked_bytes == 0
    assert target["model"]["turned"].tobytes() == raw(state()["model"]["turned"])
    assert target["step"] == 7


@pytest.fixture(scope="module")
def ours(written, tmp_path_factory):
    place = tmp_path_factory.mktemp("ours")
    fw.convert(written, place / "run", to="snapshot")
    fw.convert(place / "run", place / "dcp", to="dcp")
    return place / "dcp"


def test_what_we_write_is_read_back_exactly_by_us(ours):
    check(ours)


def test_what_we_write_is_read_exactly_by_torch(ours):
    target = state()
    for part in (target["model"].values(), [target["list"][1], target["list"][2]["a"]]):
        for tensor in part:
            with torch.no_grad():
                tensor.view(
                    torch.uint8
                ).zero_() if tensor.dtype == torch.float4_e2m1fn_x2 else tensor.fill_(0)
    target |= {
        "step": 0,
        "lr": 0.0,
        "big": 0,
        "name": "",
        "none": 1,
        "yes": False,
        "betas": None,
        "groups": None,
    }
    del target["betas"], target["groups"]
    dcp.load(target, checkpoint_id=ours)
    for name, tensor in state()["model"].items():
        assert raw(target["model"][name]) == raw(tensor), name
    assert raw(target["list"][1]) == raw(state()["list"][1])
    assert (
        target["step"],
        target["lr"],
        target["big"],
        target["name"],
        target["none"],
        target["yes"],
    ) == (7, 1e-3, 2**40, "x", None, True)


def test_torchs_own_tools_take_what_we_write(ours, tmp_path):
    dcp_to_torch_save(ours, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    assert raw(found["model.turned"]) == raw(state()["model"]["turned"])
    meta = FileSystemReader(ours).read_metadata()
    assert meta.state_dict_metadata["model.scalar"].properties.dtype == torch.float32


def test_tensors_that_we_write_stand_aligned(ours):
    with fw.open(ours) as opened:
        assert {extent.offset % 64 for extent in opened.manifest.extents} == {0}


# Two ranks of torch.


def save_sharded(rank, num_ranks, place):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(35.0).reshape(7, 5)
    places = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    tensors = {name: distribute_tensor(whole, mesh, [each]) for name, each in places.items()}
    dcp.save({"m": tensors, "step": 3}, checkpoint_id=place)
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(f"{place}-hf", save_distributed=True))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    place = tmp_path_factory.mktemp("sharded") / "ck"
    run_ranks(3, __file__, "save_sharded", place)
    return place


def test_what_ranks_of_torch_wrote_is_read_exactly(sharded):
    whole = torch.arange(35.0).reshape(7, 5)
    with fw.open(sharded) as opened:
        assert {len(opened.shards(f"m.{n}")) for n in ("rows", "columns")} == {3}
        for name in ("rows", "columns", "copies"):
            assert opened.read(f"m.{name}").tobytes() == raw(whole), name
        assert opened.manifest.values == {"step": 3}


def test_the_safetensors_variant_is_read_exactly(sharded):
    whole = torch.arange(35.0).reshape(7, 5)
    with fw.open(f"{sharded}-hf") as opened:
        assert opened.format == "dcp safetensors"
        for name in ("rows", "columns", "copies"):
            assert opened.read(name).tobytes() == raw(whole), name


def save_ours(rank, num_ranks, place):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(35.0).reshape(7, 5).bfloat16()
    places = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    tensors = {name: distribute_tensor(whole, mesh, [each]) for name, each in places.items()}
    fw.save_state_dict(tensors, place, version=1)
    reader = HuggingFaceStorageReader(Path(place) / "v0000000001")
    back = {
        name: distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1 - (name == "columns"))])
        for name in places
    }
    dcp.load(back, storage_reader=reader)
    for name, tensor in back.items():
        assert torch.equal(tensor.full_tensor(), whole), name


def test_a_snapshot_of_many_ranks_is_the_safetensors_variant_and_torch_reads_it(tmp_path):
    run_ranks(2, __file__, "save_ours", tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    target = {name: torch.zeros(7, 5).bfloat16() for name in ("rows", "columns", "copies")}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(tmp_path / "hf"))
    assert all(torch.equal(t, torch.arange(35.0).reshape(7, 5).bfloat16()) for t in target.values())


def load_ours(rank, num_ranks, place):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (num_ranks,))
    for each in (Shard(0), Shard(1), Replicate()):
        target = {
            "m": {
                n: distribute_tensor(torch.zeros(7, 5), mesh, [each])
                for n in ("rows", "columns", "copies")
            }
        }
        dcp.load(target, checkpoint_id=place)
        for name, tensor in target["m"].items():
            assert torch.equal(tensor.full_tensor(), torch.arange(35.0).reshape(7, 5)), name


def test_ranks_of_torch_load_what_we_converted(sharded, tmp_path):
    """C39: from the files of three ranks to one file, without any of them."""
    fw.convert(sharded, tmp_path / "whole", to="dcp")
    run_ranks(2, __file__, "load_ours", tmp_path / "whole")


# Bad input. Each is refused by name, before any target is touched.


def target():
    return {"model": {"scalar": torch.tensor(9.0)}}


def refused(place, kind, match):
    into = target()
    with pytest.raises(kind, match=match):
        fw.load(place, into=into, extra="report")
    assert into["model"]["scalar"] == 9


def test_a_data_file_cut_short_is_refused(broken):
    file = broken / "__0_0.distcp"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 10)
    refused(broken, SnapshotIncomplete, r"has \d+ bytes, '.*' ends at \d+")


def test_a_data_file_that_is_gone_is_refused(broken):
    (broken / "__0_0.distcp").unlink()
    refused(broken, SnapshotIncomplete, "names '__0_0.distcp', which is not there")


def test_a_save_without_its_metadata_never_finished(broken):
    (broken / ".metadata").unlink()
    refused(broken, SnapshotIncomplete, "no '.metadata': a save that never finished")


@pytest.mark.parametrize("outside", ["../__0_0.distcp", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_a_file_outside_the_directory_is_refused(broken, outside):
    meta = FileSystemReader(broken).read_metadata()
    for info in meta.storage_data.values():
        info.relative_path = outside
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(
        broken, FormatError, f"into {re.escape(repr(outside))}, which is no file of this directory"
    )


class Foreign:
    def __reduce__(self):
        return eval, ("open('/tmp/flyweight-was-run', 'w')",)


def test_a_foreign_class_in_the_metadata_is_refused_by_name_and_not_run(broken):
    meta = FileSystemReader(broken).read_metadata()
    meta.planner_data = {"a": Foreign()}
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, "names builtins.eval, which is not on the list")
    assert not Path("/tmp/flyweight-was-run").exists()


def test_a_foreign_class_in_a_value_is_refused_by_name_and_not_run(tmp_path):
    dcp.save({"w": torch.zeros(2), "v": Foreign()}, checkpoint_id=tmp_path / "ck")
    with pytest.raises(FormatError, match=r"names (__builtin__|builtins).eval[\s\S]*value 'v'"):
        fw.open(tmp_path / "ck")


def test_a_key_of_a_value_that_is_neither_text_nor_a_whole_number_is_refused(tmp_path):
    dcp.save({"w": torch.zeros(2), "v": ({2.5: 1},)}, checkpoint_id=tmp_path / "ck")
    refused(tmp_path / "ck", FormatError, "has 2.5 for a key in 'v.0'")


@pytest.mark.parametrize(
    ("offset", "size"), [((1, 0), (4, 6)), ((0,), (24,)), ((0, 0), (24,)), ((0,), (0,))]
)
def test_a_box_that_leaves_its_tensor_is_refused(broken, offset, size):
    """It has as many elements as the tensor, or none, so that counting them shows nothing."""
    meta = FileSystemReader(broken).read_metadata()
    (chunk,) = meta.state_dict_metadata["model.d.float32"].chunks
    chunk.offsets, chunk.sizes = torch.Size(offset), torch.Size(size)
    index = next(key for key in meta.storage_data if key.fqn == "model.d.float32")
    meta.storage_data[type(index)(index.fqn, chunk.offsets)] = meta.storage_data.pop(index)
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, r"'model.d.float32',? (which is|of) \(4, 6\)|differ in rank")


def test_a_hole_and_a_doubled_box_are_refused(broken):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    meta = FileSystemReader(broken).read_metadata()
    entry = meta.state_dict_metadata["model.d.float32"]
    entry.size = torch.Size((9, 6))
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, "'model.d.float32' has 24 of its 54 elements")
    entry.size = torch.Size((4, 6))
    entry.chunks.append(ChunkStorageMetadata(torch.Size((1, 0)), torch.Size((2, 6))))
    index = next(key for key in meta.storage_data if key.fqn == "model.d.float32")
    meta.storage_data[type(index)(index.fqn, torch.Size((1, 0)))] = meta.storage_data[index]
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, "has two items that share bytes from")
    shutil.copy(broken / "__0_0.distcp", broken / "__0_1.distcp")
    other = type(meta.storage_data[index])(
        "__0_1.distcp", meta.storage_data[index].offset, meta.storage_data[index].length
    )
    meta.storage_data[type(index)(index.fqn, torch.Size((1, 0)))] = other
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, r"is f32\[4, 6\] there and f32\[2, 6\] by '.metadata'")


def test_a_dtype_that_metadata_and_data_do_not_agree_on_is_refused(broken):
    import dataclasses

    meta = FileSystemReader(broken).read_metadata()
    entry = meta.state_dict_metadata["model.d.float32"]
    entry.properties = dataclasses.replace(entry.properties, dtype=torch.int32)
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, r"is f32\[4, 6\] there and i32\[4, 6\] by '.metadata'")


def test_a_conjugated_tensor_is_refused(tmp_path):
    dcp.save({"c": torch.ones(3, dtype=torch.complex64).conj()}, checkpoint_id=tmp_path / "ck")
    with pytest.raises(
        FormatError, match=r"marked 'conj': not a plain tensor; save it after .resolve_conj"
    ):
        fw.open(tmp_path / "ck")


@pytest.mark.parametrize("where", range(0, 2200, 37))
def test_a_flipped_byte_is_refused_or_changes_a_tensor_and_never_does_more(broken, where):
    """torch keeps no checksums: a flip inside a tensor cannot be seen, one outside must not hurt."""
    file = broken / ("__0_0.distcp" if where % 2 else ".metadata")
    data = bytearray(file.read_bytes())
    data[where % len(data)] ^= 0x41
    file.write_bytes(data)
    try:
        with fw.open(broken) as opened:
            for name in opened.manifest.tensors:
                opened.read(name)
    except fw.FlyweightError:
        pass


def test_packed_entries_are_refused(broken, tmp_path):
    meta = FileSystemReader(broken).read_metadata()
    index = next(key for key in meta.storage_data if key.fqn == "model.scalar")
    info = meta.storage_data[index]
    item = (broken / "__0_0.distcp").read_bytes()[info.offset : info.offset + info.length]
    (tmp_path / "item.zip").write_bytes(item)
    with (
        zipfile.ZipFile(tmp_path / "item.zip") as source,
        zipfile.ZipFile(broken / "packed", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in source.namelist():
            packed.writestr(name, source.read(name) * 50)
    info.relative_path, info.offset, info.length = "packed", 0, (broken / "packed").stat().st_size
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    refused(broken, FormatError, "compressed or encrypted; only stored entries can be read")


def test_the_state_of_an_optimizer_comes_back_to_torch_by_way_of_a_snapshot(tmp_path):
    """Tuples and lists of values are there under their own name, as torch asks for them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def trained(seed):
        torch.manual_seed(seed)
        module = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(module.parameters(), lr=seed / 10)
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model, optim = get_state_dict(module, optimizer)
        return {"model": model, "optimizer": optim, "best": float("inf")}

    fw.save_state_dict(trained(1), tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    target = trained(2)
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    expected = trained(1)
    assert list(target["optimizer"]["param_groups"][0]["betas"]) == [0.9, 0.999]
    assert target["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert target["best"] == float("inf")
    for name, moments in expected["optimizer"]["state"].items():
        for kind, tensor in moments.items():
            assert raw(target["optimizer"]["state"][name][kind]) == raw(tensor)
    fw.convert(tmp_path / "dcp", tmp_path / "again", to="snapshot")
    assert fw.diff(tmp_path / "run", tmp_path / "again").is_same


@pytest.mark.parametrize("num_chars", [65_536, 65_537, 1_000_000])
def test_long_text_comes_and_goes(tmp_path, num_chars):
    state = {
        "w": torch.ones(2),
        "text": "x" * num_chars,
        "nested": {"texts": ["é" * num_chars, ""]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    fw.convert(tmp_path / "theirs", tmp_path / "run", to="snapshot")
    fw.convert(tmp_path / "run", tmp_path / "ours", to="dcp")
    for place in (tmp_path / "theirs", tmp_path / "ours"):
        target = {"w": torch.zeros(2), "text": "", "nested": {"texts": ["", "?"]}}
        fw.load(place, into=target)
        assert (target["text"], target["nested"]) == (state["text"], state["nested"])
    theirs = {"text": "", "w": torch.zeros(2)}
    dcp.load(theirs, checkpoint_id=tmp_path / "ours")
    assert theirs["text"] == state["text"]


def test_names_that_lists_and_tensors_share_are_refused_before_a_version_is_there(tmp_path):
    dcp.save({"a": [1, 2], "a.0": torch.ones(2)}, checkpoint_id=tmp_path / "ck")
    with pytest.raises(FormatError, match="uses 1 names twice: 'a.0'"):
        fw.convert(tmp_path / "ck", tmp_path / "run", to="snapshot")
    assert fw.versions(tmp_path / "run") == []


# Files made to do harm.


def hostile(tmp_path, pickled_metadata):
    place = tmp_path / "bad"
    place.mkdir()
    (place / ".metadata").write_bytes(pickled_metadata)
    return place


def bomb(levels, width=2, leaf=b"]"):
    """A list of the same list, again and again: small to say, endless to walk or print."""
    code = leaf + b"q\x000"
    for level in range(1, levels):
        code += b"](" + b"h%c" % (level - 1) * width + b"eq%c0" % level
    return code + b"h%c" % (levels - 1)


def test_a_list_of_lists_of_lists_is_neither_printed_nor_walked(tmp_path):
    place = hostile(tmp_path, b"\x80\x02" + bomb(60) + b".")
    with pytest.raises(FormatError, match="has a list where a Metadata is expected"):
        fw.open(place)
    from fakes import MemoryStore
    from flyweight.formats.pickles import read_pickle
    from flyweight.formats.records import Records

    value = read_pickle(MemoryStore({"file": b"\x80\x02" + bomb(30, 50) + b"."}), "file", ())
    with pytest.raises(FormatError, match="describes objects of more than"):
        list(Records("it").values("v", value))


def rewritten(broken, change):
    meta = FileSystemReader(broken).read_metadata()
    index = next(key for key in meta.storage_data if key.fqn == "model.scalar")
    info = meta.storage_data[index]
    item = bytearray(
        (broken / "__0_0.distcp").read_bytes()[info.offset : info.offset + info.length]
    )
    (broken / "item.distcp").write_bytes(change(bytes(item)))
    info.relative_path, info.offset, info.length = (
        "item.distcp",
        0,
        (broken / "item.distcp").stat().st_size,
    )
    (broken / ".metadata").write_bytes(pickle.dumps(meta))
    return broken


def folded_item(shape, strides, count, *flags):
    from flyweight.formats import pickle_code as code
    from flyweight.formats.torch_item import lay_out_item

    storage = code.pack(
        [
            code.text("storage"),
            code.named("torch", "FloatStorage"),
            code.text("0"),
            code.text("cpu"),
            code.number(count),
        ]
    )
    args = [
        storage + b"Q",
        code.number(0),
        code.numbers(shape),
        code.numbers(strides),
        code.FALSE,
        code.called(code.named("collections", "OrderedDict")),
        *flags,
    ]
    pickled = (
        b"\x80\x02" + code.called(code.named("torch._utils", "_rebuild_tensor_v2"), *args) + b"."
    )
    head, tail = lay_out_item(pickled, 4 * count, 0)
    return head + bytes(4 * count) + tail


def test_a_mark_of_a_tensor_that_is_endless_to_print_is_not_printed(broken):
    from flyweight.formats import pickle_code as code

    mark = code.called(code.named("collections", "OrderedDict"), bomb(60))
    item = folded_item((), (), 1, b"}" + mark + b"\x88s")
    refused(rewritten(broken, lambda _: item), FormatError, "not a plain tensor")


@pytest.mark.parametrize(
    ("shape", "strides", "match"),
    [
        ((2**36,), (0,), "elements would share bytes"),
        ((4, 4), (1, 1), "elements would share bytes"),
        ((9,), (1,), "needs 36 bytes of its storage"),
    ],
)
def test_strides_that_make_much_of_little_are_refused(tmp_path, shape, strides, match):
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "ck")
    meta = FileSystemReader(tmp_path / "ck").read_metadata()
    (tmp_path / "ck" / "item.distcp").write_bytes(folded_item(shape, strides, 8))
    (info,) = meta.storage_data.values()
    info.relative_path, info.offset, info.length = (
        "item.distcp",
        0,
        (tmp_path / "ck" / "item.distcp").stat().st_size,
    )
    entry = meta.state_dict_metadata["w"]
    entry.size = torch.Size(shape)
    entry.chunks[0].sizes, entry.chunks[0].offsets = torch.Size(shape), torch.Size([0] * len(shape))
    meta.storage_data = {
        type(next(iter(meta.storage_data)))("w", torch.Size([0] * len(shape))): info
    }
    (tmp_path / "ck" / ".metadata").write_bytes(pickle.dumps(meta))
    with pytest.raises(FormatError, match=match):
        fw.open(tmp_path / "ck")


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_tensor_that_starts_inside_its_storage_is_read_from_there(tmp_path, dtype, is_turned):
    """C35: torch.save keeps a view's whole storage; DCP clones views, other writers do not."""
    view = torch.arange(40).to(dtype)[7:19].view(3, 4)
    view = view.t() if is_turned else view
    assert view.storage_offset() == 7
    place = tmp_path / "ck"
    dcp.save({"a": torch.full((5,), 9.0), "w": view}, checkpoint_id=place)
    torch.save(view, place / "item.distcp")
    meta = FileSystemReader(place).read_metadata()
    (info,) = (each for index, each in meta.storage_data.items() if index.fqn == "w")
    info.relative_path, info.offset = "item.distcp", 0
    info.length = (place / "item.distcp").stat().st_size
    (place / ".metadata").write_bytes(pickle.dumps(meta))
    with fw.open(place) as opened:
        assert opened.read("w").tobytes() == raw(view)
    theirs = {"w": torch.zeros(view.shape, dtype=dtype)}
    dcp.load(theirs, checkpoint_id=place)
    assert raw(theirs["w"]) == raw(view)


def test_an_archive_with_a_second_root_is_refused(broken, tmp_path):
    def change(item):
        (tmp_path / "item.zip").write_bytes(item)
        with zipfile.ZipFile(tmp_path / "item.zip", "a", zipfile.ZIP_STORED) as archive:
            archive.writestr("evil/data/0", b"\0\0\0\0")
        return (tmp_path / "item.zip").read_bytes()

    refused(rewritten(broken, change), FormatError, "has the directories .*, expected one")


def test_a_directory_of_any_claimed_size_is_not_read(broken):
    import struct

    def change(item):
        at = item.rindex(b"PK\5\6")
        return item[: at + 12] + struct.pack("<II", 1 << 30, 0) + item[at + 20 :]

    refused(rewritten(broken, change), FormatError, "and 1073741824 bytes, at most 4194304")


def test_rank_files_that_do_not_tell_where_they_start_are_refused(sharded, tmp_path):
    from flyweight.formats.safetensors import read_head
    from flyweight.stores.local import LocalStore

    place = Path(shutil.copytree(f"{sharded}-hf", tmp_path / "copy"))
    second = sorted(place.glob("shard-00002-*"))[0]
    head = read_head(LocalStore(place), second.name)
    data = second.read_bytes()
    assert "DCP_SHARDING_INFO" in head.notes
    for old, new in (
        (b"DCP_SHARDING_INFO", b"DCP_SHARDING_INF0"),
        (b"saved_offsets", b"saved_offsetz"),
    ):
        second.write_bytes(data.replace(old, new))
        with pytest.raises(FormatError, match="DCP_SHARDING_INFO"):
            fw.open(place)
    second.unlink()
    with pytest.raises(SnapshotIncomplete, match=r"has files of ranks \[1, 3\]"):
        fw.open(place)


def test_two_kinds_of_checkpoint_in_one_directory_are_told_apart_by_file_only(written, tmp_path):
    place = Path(shutil.copytree(written, tmp_path / "copy"))
    fw.save({"x": np.zeros(2)}, tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "model.safetensors", to="safetensors")
    shutil.move(tmp_path / "model.safetensors", place)
    with pytest.raises(
        FormatError, match="has checkpoints of 2 kinds: 'Hugging Face', 'torch distributed'"
    ):
        fw.open(place)
    assert fw.open(place / ".metadata").format == "dcp"
    assert fw.open(place / "model.safetensors").manifest.names == ["x"]


def test_more_files_than_a_process_may_usually_open(tmp_path):

    dcp.save(
        {f"w{n}": torch.full((2,), float(n)) for n in range(150)},
        storage_writer=dcp.FileSystemWriter(tmp_path / "ck", single_file_per_rank=False),
    )
    code = (
        "import resource, sys, flyweight as fw\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))\n"
        "opened = fw.open(sys.argv[1])\n"
        "print(sum(opened.read(f'w{n}').view('f4')[0] for n in range(150)))\n"
    )
    done = run_python(code, tmp_path / "ck", 4096)
    assert done.stdout == "11175.0\n", done.stderr
    done = run_python(code, tmp_path / "ck", 64)
    assert "raise the limit, ulimit -n: Too many open files" in done.stderr
