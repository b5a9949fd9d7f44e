"""Paddle's distributed checkpoints: what Paddle writes we read, what we write Paddle reads."""

import pickle
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from paddle.distributed.flex_checkpoint.dcp import metadata as meta_classes

import flyweight as fw
from flyweight.errors import FormatError, SnapshotIncomplete
from rank_processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KINDS = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
]
fresh = count()


def whole(dtype="float32", shape=(7, 5)):
    values = np.random.default_rng(3).normal(size=shape) * 9
    return paddle.to_tensor(values.astype("float32")).astype(dtype)


def raw(tensor):
    """A Paddle tensor's own bytes."""
    from flyweight.adapters.model import adapt

    return adapt({"t": tensor}).read("t").tobytes()


def state():
    tensors = {f"d.{kind}": whole(kind) for kind in KINDS}
    return tensors | {
        "scalar": paddle.to_tensor(2.5),
        "cube": whole("float32", (2, 3, 4)),
        "x" * 300: whole(),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("paddle") / "ck"
    paddle.distributed.save_state_dict(state(), str(place))
    return place


@pytest.fixture
def broken(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / f"copy{next(fresh)}"))


def test_what_paddle_wrote_is_read_exactly_with_its_true_dtypes(written):
    """C35."""
    with fw.open(written) as opened:
        assert opened.format == "paddle"
        assert opened.manifest.tensors.keys() == state().keys()
        for name, tensor in state().items():
            assert opened.read(name).tobytes() == raw(tensor), name
        assert str(opened.manifest.spec("d.bfloat16")) == "bf16[7, 5]"
        assert not opened.raw_names
    fw.open(written / "0.metadata").close()


def test_it_loads_into_paddle_and_torch_alike(written):
    """C36."""
    into = {"d.bfloat16": torch.zeros(7, 5).bfloat16(), "scalar": torch.zeros(())}
    fw.load(written, into=into, extra="report")
    assert into["d.bfloat16"].view(torch.uint8).numpy().tobytes() == raw(whole("bfloat16"))
    into = {"d.bfloat16": paddle.zeros([7, 5], "bfloat16"), "cube": paddle.zeros([2, 3, 4])}
    fw.load(written, into=into, extra="report")
    assert raw(into["d.bfloat16"]) == raw(whole("bfloat16"))


def test_what_we_write_is_read_exactly_by_paddle(written, tmp_path):
    fw.convert(written, tmp_path / "run", to="snapshot")
    fw.convert(tmp_path / "run", tmp_path / "ck", to="paddle")
    into = {name: paddle.zeros_like(tensor) for name, tensor in state().items()}
    paddle.distributed.load_state_dict(into, str(tmp_path / "ck"))
    for name, tensor in state().items():
        assert into[name].dtype == tensor.dtype
        assert raw(into[name]) == raw(tensor), name
    assert fw.diff(written, tmp_path / "ck").is_same


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_stay_what_they_are_in_paddle(tmp_path, kind):
    tensor = whole().astype(kind)
    fw.save({"w": tensor, "v": whole()}, tmp_path / "run")
    fw.convert(tmp_path / "run", tmp_path / "ck", to="paddle")
    into = {"w": paddle.zeros([7, 5]).astype(kind), "v": paddle.zeros([7, 5])}
    paddle.distributed.load_state_dict(into, str(tmp_path / "ck"))
    assert str(into["w"].dtype) == f"paddle.{kind}"
    assert raw(into["w"]) == raw(tensor)


def test_tensors_paddle_has_no_name_for_are_refused_and_values_are_told(tmp_path):
    fw.save({"w": torch.zeros(4), "step": 3}, tmp_path / "run")
    assert fw.convert(tmp_path / "run", tmp_path / "ck", to="paddle").left_out == ["step"]
    fw.save({"w": torch.zeros(4).to(torch.float8_e4m3fnuz)}, tmp_path / "other")
    with pytest.raises(fw.FlyweightError, match="'w' is f8_e4m3fnuz, which Paddle has no name for"):
        fw.convert(tmp_path / "other", tmp_path / "bad", to="paddle")
    assert not (tmp_path / "bad").exists()


def test_the_safetensors_variant_is_read_exactly(tmp_path):
    paddle.distributed.save_state_dict(state(), str(tmp_path / "ck"), safetensors=True)
    with fw.open(tmp_path / "ck") as opened:
        for name, tensor in state().items():
            assert opened.read(name).tobytes() == raw(tensor), name


# Ranks of Paddle.


def save_sharded(rank, num_ranks, place):
    import paddle.distributed as dist
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    mesh = dist.ProcessMesh(list(range(num_ranks)), dim_names=["x"])
    rows, columns = (
        dist.shard_tensor(whole(), mesh, [dist.Shard(0)]),
        dist.shard_tensor(whole(), mesh, [dist.Shard(1)]),
    )
    copies = dist.shard_tensor(whole(), mesh, [dist.Replicate()])
    low = [0, 4, 6][rank]
    local = whole("bfloat16")[low : [4, 6, 7][rank]].clone()
    uneven = ShardedWeight("uneven", local, tuple(local.shape), (7, 5), (low, 0))
    dist.save_state_dict(
        {"rows": rows, "columns": columns, "copies": copies, "uneven": uneven}, place
    )
    dist.barrier()
    fw.save_state_dict(
        {"model": {"rows": rows, "columns": columns, "copies": copies}, "step": 5}, f"{place}-ours"
    )
    for kind in ([dist.Shard(0)], [dist.Shard(1)], [dist.Replicate()]):
        target = {
            n: dist.shard_tensor(paddle.zeros([7, 5]), mesh, kind)
            for n in ("rows", "columns", "copies")
        }
        into = {"model": target, "step": 0}
        fw.load_state_dict(into, f"{place}-ours")
        assert into["step"] == 5
        fw.load_state_dict(target, place)  # which has "uneven" too
        for name, tensor in target.items():
            full = dist.reshard(tensor, mesh, [dist.Replicate()])
            assert raw(full._local_value()) == raw(whole()), (name, kind)
    dist.barrier()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    place = tmp_path_factory.mktemp("sharded") / "ck"
    run_ranks(3, __file__, "save_sharded", place, framework="paddle")
    return place


@pytest.mark.check
def test_what_ranks_of_paddle_wrote_is_read_exactly(sharded):
    with fw.open(sharded) as opened:
        assert len(opened.shards("rows")) == 3
        for name in ("rows", "columns", "copies"):
            assert opened.read(name).tobytes() == raw(whole()), name
        assert opened.read("uneven").tobytes() == raw(whole("bfloat16"))


def test_ranks_of_paddle_save_together_and_load_any_layout(sharded):
    """C35, C36, C37, for Paddle."""
    with fw.open(f"{sharded}-ours") as opened:
        assert opened.manifest.values == {"step": 5}
        assert len({extent.file for extent in opened.manifest.extents}) == 3
        for name in ("rows", "columns", "copies"):
            assert opened.read(f"model.{name}").tobytes() == raw(whole()), name


def test_converted_to_one_rank_paddle_loads_it(sharded, tmp_path):
    """C39."""
    fw.convert(sharded, tmp_path / "one", to="paddle")
    into = {name: paddle.zeros([7, 5]) for name in ("rows", "columns", "copies")}
    into["uneven"] = paddle.zeros([7, 5], "bfloat16")
    paddle.distributed.load_state_dict(into, str(tmp_path / "one"))
    assert raw(into["rows"]) == raw(whole())
    assert raw(into["uneven"]) == raw(whole("bfloat16"))


def test_flattened_shards_are_read_as_the_boxes_they_are(tmp_path):
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    flat = whole().flatten()
    weights = {
        f"part{n}": ShardedWeight("w", flat[a:b].clone(), (7, 5), (7, 5), (0, 0), True, slice(a, b))
        for n, (a, b) in enumerate([(0, 35)])
    }
    paddle.distributed.save_state_dict({"w": weights["part0"]}, str(tmp_path / "ck"))
    with fw.open(tmp_path / "ck") as opened:
        assert opened.read("w").tobytes() == raw(whole())


FLAT_RANGES = [(0, 13), (13, 35)]  # rows have 5 elements: both cut inside a row


def save_flat(rank, num_ranks, place):
    import paddle.distributed as dist
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    start, end = FLAT_RANGES[rank]
    local = whole().flatten()[start:end].clone()
    one = ShardedWeight("w", local, (7, 5), (7, 5), (0, 0), True, slice(start, end))
    # The flat range counts from the corner of a box, which is itself a part of the whole tensor.
    local = whole("bfloat16", (9, 5))[2:].flatten()[start:end].clone()
    two = ShardedWeight("v", local, (7, 5), (9, 5), (2, 0), True, slice(start, end))
    head = whole("bfloat16", (9, 5))[rank : rank + 1].clone()
    rest = ShardedWeight("v", head, (1, 5), (9, 5), (rank, 0))
    dist.save_state_dict({"w": one, "v": two}, place)
    dist.barrier()
    dist.save_state_dict({"v": rest}, f"{place}-head")
    dist.barrier()


def test_flat_shards_of_several_ranks_are_put_where_each_one_starts(tmp_path):
    """C35: the second rank's range starts at element 13, inside the third row."""
    run_ranks(2, __file__, "save_flat", tmp_path / "ck", framework="paddle")
    ours, head = tmp_path / "ck", tmp_path / "ck-head"
    for rank in (0, 1):  # the first two rows of "v", which one save cannot hold beside the rest
        arrays = paddle.load(str(ours / f"{rank}_0.distcp"))
        assert list(arrays["w"].shape) == [FLAT_RANGES[rank][1] - FLAT_RANGES[rank][0]]
        shutil.copy(head / f"{rank}_0.distcp", ours / f"{rank + 2}_0.distcp")
    meta, more = read_meta(ours), read_meta(head)
    meta.state_dict_metadata["v"] += more.state_dict_metadata["v"]
    for index, file in more.storage_metadata.items():
        meta.storage_metadata[index] = f"{int(file[0]) + 2}_0.distcp"
    write_meta(ours, meta)
    with fw.open(ours) as opened:
        assert opened.read("w").tobytes() == raw(whole())
        assert opened.read("v").tobytes() == raw(whole("bfloat16", (9, 5)))
    into = {"w": np.zeros((7, 5), "f4")}
    fw.load(ours, into=into, extra="report")
    assert into["w"].tobytes() == raw(whole())


def test_a_flat_shard_whose_array_is_split_in_its_pickle_is_read_exactly(tmp_path, monkeypatch):
    """C35: old protocols split an array over 1 GiB; its pieces start inside the flat range."""
    import paddle.framework.io as paddle_io
    from test_pdparams import cut_at_100_bytes

    original, place = paddle_io._unpack_saved_dict, tmp_path / "ck"
    monkeypatch.setattr(
        paddle_io, "_unpack_saved_dict", lambda d, p: cut_at_100_bytes(d, p, original)
    )
    made, index = meta_classes.LocalTensorMetadata, meta_classes.LocalTensorIndex
    (values, shards, files) = whole("float32", (14, 5)).flatten(), [], {}
    place.mkdir()
    for rank, flat in enumerate([(0, 13), (13, 70)]):
        piece = {"w": values[flat[0] : flat[1]].clone()}
        paddle.save(piece, str(place / f"{rank}_0.distcp"), protocol=3)
        shards.append(made((0, 0), (14, 5), "float32", (14, 5), True, flat))
        files[index("w", (0, 0), True, flat, None, (14, 5))] = f"{rank}_0.distcp"
    assert (place / "1_0.distcp").read_bytes().count(b"w@@.2") > 0  # 25 elements a piece
    write_meta(place, meta_classes.Metadata({"w": shards}, files, {"w": ("w",)}))
    with fw.open(place) as opened:
        assert opened.read("w").tobytes() == raw(whole("float32", (14, 5)))


# Bad input.


def refused(place, kind, match):
    into = {"scalar": np.full((), 9, "f4")}
    with pytest.raises(kind, match=match):
        fw.load(place, into=into, extra="report")
    assert into["scalar"] == 9


def read_meta(place):
    return paddle.load(str(place / "0.metadata"))


def write_meta(place, meta, name="0.metadata"):
    (place / name).write_bytes(pickle.dumps(meta))


def test_a_data_file_cut_short_is_refused(broken):
    file = broken / "0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    refused(broken, FormatError, "is cut short|ends|has")


def test_a_data_file_that_is_gone_is_refused(broken):
    (broken / "0_0.distcp").unlink()
    refused(broken, SnapshotIncomplete, "names '0_0.distcp', which is not there")


def test_data_without_metadata_is_a_save_that_never_finished(broken):
    """C38."""
    (broken / "0.metadata").unlink()
    refused(broken, SnapshotIncomplete, "no '.metadata': a save that never finished")


def test_two_saves_in_one_directory_are_refused(broken):
    """C38."""
    shutil.copy(broken / "0.metadata", broken / "1.metadata")
    refused(broken, FormatError, "has 2 saves: '0.metadata', '1.metadata'")


def test_data_of_a_second_unfinished_save_is_refused(broken):
    """C38."""
    shutil.copy(broken / "0_0.distcp", broken / "0_1.distcp")
    refused(broken, FormatError, "'0_1.distcp' .* that '0.metadata' does not put there")


def test_a_rank_without_any_data_is_no_sign_of_a_second_save(broken):
    paddle.save({}, str(broken / "1_0.distcp"))
    fw.open(broken).close()


def test_new_data_under_old_metadata_is_refused(broken):
    """C38: Paddle reuses the id and leaves the metadata of the first save beside the second's data."""
    paddle.save(
        {**{n: t for n, t in state().items() if n != "cube"}, "more": whole()},
        str(broken / "0_0.distcp"),
    )
    refused(broken, FormatError, "lacks 'cube', which '0.metadata' puts there")
    paddle.save({**state(), "more": whole()}, str(broken / "0_0.distcp"))
    refused(
        broken,
        FormatError,
        "has 1 tensors that '0.metadata' does not put there: 'more'; another save",
    )
    paddle.save({**state(), "cube": whole("float32", (4, 3, 2))}, str(broken / "0_0.distcp"))
    refused(
        broken,
        FormatError,
        r"'cube' is f32\[4, 3, 2\] in '0_0.distcp' and f32\[2, 3, 4\] by '0.metadata'",
    )
    paddle.save({**state(), "cube": whole("int32", (2, 3, 4))}, str(broken / "0_0.distcp"))
    refused(
        broken, FormatError, r"'cube' is i32\[.*\] in '0_0.distcp' and f32\[.*\] by '0.metadata'"
    )


@pytest.mark.parametrize("outside", ["../0_0.distcp", "/etc/passwd", "a/b", ".."])
def test_a_file_outside_the_directory_is_refused(broken, outside):
    meta = read_meta(broken)
    meta.storage_metadata = dict.fromkeys(meta.storage_metadata, outside)
    write_meta(broken, meta)
    refused(broken, FormatError, "is not a plain name inside the directory")


class Foreign:
    def __reduce__(self):
        return eval, ("open('/tmp/flyweight-was-run', 'w')",)


def test_a_foreign_class_is_refused_by_name_and_not_run(broken):
    meta = read_meta(broken)
    meta.flat_mapping = {"a": Foreign()}
    write_meta(broken, meta)
    refused(broken, FormatError, "names builtins.eval, which is not on the list")
    assert not Path("/tmp/flyweight-was-run").exists()


def test_a_hole_an_overlap_and_a_shard_outside_are_refused(broken):
    meta = read_meta(broken)
    (entry,) = meta.state_dict_metadata["cube"]
    fields = dict(vars(entry))
    made = meta_classes.LocalTensorMetadata
    for change, match in (
        ({"global_shape": (4, 3, 4)}, "'cube' has 24 of its 48 elements"),
        ({"global_shape": (1, 3, 4)}, r"\(0, 0, 0\)..\(2, 3, 4\) of 'cube', which is \(1, 3, 4\)"),
        ({"global_offset": (1, 0, 0)}, r"\(1, 0, 0\)..\(3, 3, 4\) of 'cube'"),
        ({"dtype": "float99"}, "says that 'cube' is 'float99'"),
        ({"local_shape": (2, -3, 4)}, "has the numbers"),
    ):
        meta.state_dict_metadata["cube"] = [made(**{**fields, **change})]
        write_meta(broken, meta)
        refused(broken, FormatError, match)


def test_metadata_of_older_releases_with_fewer_fields_is_read(broken):
    """Before 3.0 there was no dtype, before 3.1 no whole shape, and the module had another name."""
    meta = read_meta(broken)
    for shards in meta.state_dict_metadata.values():
        for shard in shards:
            for name in ("dtype", "global_shape", "is_flattened", "flattened_range"):
                object.__delattr__(shard, name)
    for index in meta.storage_metadata:
        for name in ("is_flattened", "flattened_range", "replica_id", "local_shape"):
            index.__dict__.pop(name, None)
    data = pickle.dumps(meta, protocol=2).replace(
        b"paddle.distributed.flex_checkpoint.dcp.metadata",
        b"paddle.distributed.checkpoint.metadata",
    )
    (broken / "0.metadata").write_bytes(data)
    into = {"d.bfloat16": paddle.zeros([7, 5], "bfloat16"), "cube": paddle.zeros([2, 3, 4])}
    fw.load(broken, into=into, extra="report")
    assert raw(into["d.bfloat16"]) == raw(whole("bfloat16"))


@pytest.mark.parametrize("where", range(0, 2200, 37))
def test_a_flipped_byte_is_refused_or_changes_a_tensor_and_never_does_more(broken, where):
    file = broken / ("0_0.distcp" if where % 2 else "0.metadata")
    data = bytearray(file.read_bytes())
    data[where % len(data)] ^= 0x41
    file.write_bytes(data)
    try:
        with fw.open(broken) as opened:
            for name in opened.manifest.tensors:
                opened.read(name)
    except fw.FlyweightError:
        pass


def save_replicas(rank, num_ranks, place):
    import paddle.distributed as dist

    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    copies = dist.shard_tensor(whole(), mesh, [dist.Replicate()])
    rows = dist.shard_tensor(whole(), mesh, [dist.Shard(0)])
    dist.save_state_dict({"copies": copies, "rows": rows}, place, save_replicas=True)
    dist.barrier()


def test_replicas_that_paddle_keeps_are_no_second_save(tmp_path):
    run_ranks(2, __file__, "save_replicas", tmp_path / "ck", framework="paddle")
    with fw.open(tmp_path / "ck") as opened:
        for name in ("copies", "rows"):
            assert opened.read(name).tobytes() == raw(whole()), name


@pytest.mark.parametrize("name", ["StructuredToParameterName@@", "UnpackBigParamInfor@@"])
@pytest.mark.parametrize("to", ["paddle", "pdparams"])
def test_names_that_paddle_keeps_for_itself_are_refused(tmp_path, name, to):
    fw.save({name: np.zeros(2), "w": np.zeros(2)}, tmp_path / "run")
    with pytest.raises(fw.FlyweightError, match="which Paddle keeps for itself"):
        fw.convert(tmp_path / "run", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_metadata_that_nests_without_end_is_refused(broken):
    (broken / "0.metadata").write_bytes(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")
    refused(broken, FormatError, "has a list where a Metadata is expected")


def test_a_transposed_tensor_is_refused_with_the_remedy(tmp_path):
    paddle.distributed.save_state_dict({"t": whole().t()}, str(tmp_path / "ck"))
    with pytest.raises(
        FormatError, match=r"in column order, expected row order; save .* after .contiguous\(\)"
    ):
        fw.open(tmp_path / "ck")
