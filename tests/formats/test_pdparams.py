"""C1 to C10: the old files, written by Paddle itself, found in the old order, never run."""

import os
import shutil

import numpy as np
import paddle
import pytest
import torch

import flyweight as fw
from conftest import flip
from flyweight.errors import FormatError, PlanError, SnapshotIncomplete, SnapshotNotFound, SpecError
from flyweight.formats.legacy import LegacyNames


def state(seed=0):
    """A Paddle state dict of every dtype that its files treat specially."""
    paddle.seed(seed)
    layer = paddle.nn.Sequential(paddle.nn.Linear(5, 3), paddle.nn.BatchNorm1D(3))
    return {
        **layer.state_dict(),
        "half": paddle.randn([4, 3]).astype("bfloat16"),
        "quarter": paddle.randn([2, 6]).astype("float8_e4m3fn"),
        "scalar": paddle.to_tensor(3.5 + seed),
        "empty": paddle.zeros([0, 4]),
        "ids": paddle.arange(7),
        "flag": paddle.to_tensor([True, False]),
        "f16": paddle.randn([3]).astype("float16"),
        "c": paddle.complex(paddle.randn([2]), paddle.randn([2])),
    }


def blank(tensors):
    return {name: paddle.zeros(t.shape).astype(t.dtype) for name, t in tensors.items()}


def raw(tensor):
    model = fw_bytes({"t": tensor})
    return model["t"]


def fw_bytes(tensors):
    from flyweight.adapters.model import adapt

    model = adapt(tensors)
    return {name: model.read(name).tobytes() for name in model.manifest.names}


def assert_loaded(path, expected, **options):
    target = blank(expected)
    report = fw.load(path, into=target, **options)
    assert fw_bytes(target) == fw_bytes(expected)
    return report


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_of_every_protocol_loads_exactly(tmp_path, protocol):
    tensors = state()
    paddle.save(tensors, str(tmp_path / "m.pdparams"), protocol=protocol)
    assert assert_loaded(tmp_path / "m.pdparams", tensors).format == "pdparams"


def test_a_large_text_array_of_protocol_2_loads_exactly(tmp_path):
    tensors = {"w": paddle.randn([300, 200]), "b": paddle.randn([300])}
    paddle.save(tensors, str(tmp_path / "m.pdparams"), protocol=2)
    assert_loaded(tmp_path / "m.pdparams", tensors, memory_bytes=1 << 20)


def test_safetensors_under_the_same_suffix_is_recognised_by_content(tmp_path):
    tensors = state()
    del tensors["c"], tensors["empty"]
    paddle.save(tensors, str(tmp_path / "m.pdparams"), safetensors=True)
    assert_loaded(tmp_path / "m.pdparams", tensors)


def test_a_nested_dict_gives_joined_names_and_values(tmp_path):
    tensors = {"w": paddle.randn([3]), "b": paddle.randn([2]).astype("bfloat16")}
    content = {"model": tensors, "step": 3, "rate": 0.25, "names": ["a", "b"], "np": np.float32(2)}
    paddle.save(content, str(tmp_path / "m.pdparams"))
    target = {"model": blank(tensors), "step": 0, "rate": 0.0, "names": ["", ""], "np": 0.0}
    fw.load(tmp_path / "m.pdparams", into=target)
    assert fw_bytes(target["model"]) == fw_bytes(tensors)
    assert (target["step"], target["rate"], target["names"]) == (3, 0.25, ["a", "b"])
    assert target["np"] == 2.0


def test_arrays_cut_at_a_gibibyte_are_joined(tmp_path, monkeypatch):
    # Paddle cuts arrays of over 2**30 - 1 bytes under protocols 2 and 3; here, of over 100.
    from paddle.framework import io as paddle_io

    original = paddle_io._unpack_saved_dict
    monkeypatch.setattr(
        paddle_io, "_unpack_saved_dict", lambda d, p: cut_at_100_bytes(d, p, original)
    )
    tensors = {"w": paddle.randn([11, 13]), "v": paddle.randn([3])}
    paddle.save(tensors, str(tmp_path / "m.pdparams"), protocol=3)
    content = (tmp_path / "m.pdparams").read_bytes()
    assert b"UnpackBigParamInfor@@" in content
    assert_loaded(tmp_path / "m.pdparams", tensors)


def cut_at_100_bytes(saved, protocol, original):
    """Paddle's own function with its limit lowered: the source says 2**30 - 1."""
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(original))
    assert "(2**30) - 1" in source or "2**30 - 1" in source
    source = source.replace("(2**30) - 1", "100").replace("2**30 - 1", "100")
    names = dict(original.__globals__)
    exec(source, names)
    return names["_unpack_saved_dict"](saved, protocol)


def test_what_we_write_is_read_by_paddle(tmp_path):
    tensors = state()
    fw.save_legacy(tensors, tmp_path, rank=0, legacy_id=0, as_safetensors=False)
    found = paddle.load(str(tmp_path / "model_state.tp0.0.pdparams"))
    for name, tensor in tensors.items():
        theirs = found[name]
        theirs = theirs.numpy() if isinstance(theirs, paddle.Tensor) else np.asarray(theirs)
        assert theirs.tobytes() == raw(tensor), name
        assert list(theirs.shape) == list(tensor.shape)


def test_paddles_own_files_and_ours_hold_the_same_arrays(tmp_path):
    tensors = state()
    paddle.save(tensors, str(tmp_path / "theirs.pdparams"))
    fw.save_legacy(tensors, tmp_path, rank=0, legacy_id=0, as_safetensors=False)
    report = fw.diff(tmp_path / "theirs.pdparams", tmp_path / "model_state.tp0.0.pdparams")
    assert report.is_same
    assert report.num_same == len(tensors)


def test_torch_tensors_written_the_old_way_load_into_paddle(tmp_path):
    source = {"w": torch.randn(4, 4).to(torch.bfloat16), "b": torch.randn(3)}
    fw.save_legacy(source, tmp_path, rank=2, legacy_id="GPU-8932f937-d72c", part_bytes=16)
    assert sorted(os.listdir(tmp_path)) == [
        "model_state.tp2.GPU-8932f937-d72c.part0.pdparams",
        "model_state.tp2.GPU-8932f937-d72c.part1.pdparams",
    ]
    target = {"w": paddle.zeros([4, 4], dtype="bfloat16"), "b": paddle.zeros([3])}
    fw.load(tmp_path, into=target, rank=2, legacy_id="GPU-8932f937-d72c")
    assert fw_bytes(target) == fw_bytes(source)


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_parts_are_read_back_within_memory(tmp_path, as_safetensors):
    source = {f"w{i}": torch.randn(100, 100) for i in range(12)}
    fw.save_legacy(
        source, tmp_path, rank=3, legacy_id=5, part_bytes=40_000, as_safetensors=as_safetensors
    )
    assert len(os.listdir(tmp_path)) == 12
    target = {name: torch.zeros(100, 100) for name in source}
    fw.load(tmp_path, into=target, rank=3, legacy_id=5, memory_bytes=1 << 20)
    assert all(torch.equal(target[n], source[n]) for n in source)


def test_a_bf16_target_and_a_u16_target_both_take_what_a_pickle_calls_uint16(tmp_path):
    source = {"w": torch.randn(4).to(torch.bfloat16)}
    fw.save_legacy(source, tmp_path, rank=0, legacy_id=0, as_safetensors=False)
    for dtype in (torch.bfloat16, torch.uint16):
        fw.load(tmp_path, into={"w": torch.zeros(4, dtype=dtype)}, rank=0, legacy_id=0)
    with pytest.raises(TypeError, match="'w' is u16 .* and f16 in the target"):
        fw.load(tmp_path, into={"w": torch.zeros(4, dtype=torch.float16)}, rank=0, legacy_id=0)


def test_ties_become_bytes_of_their_own(tmp_path):
    shared = torch.randn(3)
    fw.save_legacy({"a": shared, "b": shared}, tmp_path, rank=0, legacy_id=0)
    target = {"a": torch.zeros(3), "b": torch.zeros(3)}
    fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert torch.equal(target["a"], shared)
    assert torch.equal(target["b"], shared)


# C1: the four places.


@pytest.fixture
def places(tmp_path):
    """A file at each of the four places, each with a value of its own."""
    model, shared = tmp_path / "model", tmp_path / "shared"
    model.mkdir()
    shared.mkdir()
    for number, name in enumerate(["tp1.4.part0", "tp1.4.part1", "tp1.4", "tp04"], start=1):
        content = {"b": paddle.full([2], 10 + number)} if name.endswith("part1") else {}
        content = content or {"a": paddle.full([2], number)}
        if not name.endswith(("part0", "part1")):
            content["b"] = paddle.full([2], 10 + number)
        paddle.save(content, str(model / f"model_state.{name}.pdparams"))
    paddle.save(
        {"a": paddle.full([2], 9), "b": paddle.full([2], 9)},
        str(shared / "model_state.tp1.4.pdparams"),
    )
    return model, shared


def found_value(places, **options):
    model, shared = places
    target = {"a": paddle.zeros([2]), "b": paddle.zeros([2])}
    fw.load(model, into=target, rank=1, legacy_id=4, shared_directory=shared, **options)
    return float(target["a"][0])


def test_c1_the_first_place_that_answers_wins(places):
    model, _ = places
    assert found_value(places) == 1
    for part in (0, 1):
        (model / f"model_state.tp1.4.part{part}.pdparams").unlink()
    assert found_value(places) == 3
    (model / "model_state.tp1.4.pdparams").unlink()
    assert found_value(places) == 4
    (model / "model_state.tp04.pdparams").unlink()
    assert found_value(places) == 9


def test_c1_parts_in_the_shared_directory_do_not_count(places):
    model, shared = places
    for file in sorted(model.iterdir()):
        file.rename(shared / file.name) if ".part" in file.name else file.unlink()
    assert found_value(places) == 9


def test_c6_nothing_found_lists_every_candidate(places, tmp_path):
    model, shared = tmp_path / "nothing", tmp_path / "gone"
    model.mkdir()
    with pytest.raises(FileNotFoundError) as refusal:
        fw.load(model, into={"a": paddle.zeros([2])}, rank=1, legacy_id=4, shared_directory=shared)
    assert isinstance(refusal.value, SnapshotNotFound)
    for name in ("part0", "part1", "tp1.4.pdparams", "tp04.pdparams", "gone"):
        assert name in str(refusal.value)


def test_c1_own_snapshots_come_before_the_old_files(places):
    model, _ = places
    fw.save({"a": np.full(2, 100.0, np.float32), "b": np.zeros(2, np.float32)}, model, version=1)
    assert found_value(places) == 100


def test_c8_a_version_that_was_asked_for_is_never_answered_by_unversioned_files(places):
    with pytest.raises(fw.FlyweightError, match="version 42 is not one of the 0 versions"):
        found_value(places, version=42)


def test_old_files_are_read_only_when_asked_for(places):
    model, _ = places
    with pytest.raises(SnapshotNotFound, match="open one by its path"):
        fw.load(model, into={"a": paddle.zeros([2])})


def test_c2_rank_and_id_do_not_run_together():
    assert LegacyNames(1, 234).single != LegacyNames(12, 34).single
    assert LegacyNames(1, 234).part(0) != LegacyNames(12, 34).part(0)


@pytest.mark.parametrize(
    ("rank", "legacy_id"), [(-1, 0), (0, "../x"), (0, ""), (0, "a.b"), (0, -1.5)]
)
def test_ranks_and_ids_that_make_no_name_are_refused(rank, legacy_id, tmp_path):
    with pytest.raises(SpecError, match="make no file name"):
        fw.load(tmp_path, into={"a": np.zeros(1)}, rank=rank, legacy_id=legacy_id)


def test_rank_without_id_is_refused(tmp_path):
    with pytest.raises(SpecError, match="rank is 0, and neither a layout nor a legacy_id"):
        fw.load(tmp_path, into={"a": np.zeros(1)}, rank=0)


# C3, C4, C5: parts.


def parts(place, numbers, rank=0, legacy_id=0):
    place.mkdir(exist_ok=True, parents=True)
    for number in numbers:
        content = {f"w{number}": paddle.full([3], number)}
        paddle.save(content, str(place / LegacyNames(rank, legacy_id).part(number)))


@pytest.mark.parametrize("numbers", [range(12), range(1, 12)])
def test_c3_parts_start_at_0_or_1_and_sort_as_numbers(tmp_path, numbers):
    parts(tmp_path, numbers)
    target = {f"w{number}": paddle.zeros([3]) for number in numbers}
    fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert all(float(target[f"w{n}"][0]) == n for n in numbers)
    names = [LegacyNames(0, 0).part(n) for n in (10, 2, 1, 0)]
    assert list(LegacyNames(0, 0).parts(names)) == [0, 1, 2, 10]


@pytest.mark.parametrize(("numbers", "missing"), [([0, 2], [1]), ([1, 4], [2, 3]), ([3], [1, 2])])
def test_c5_a_gap_is_refused_with_what_is_missing(tmp_path, numbers, missing):
    parts(tmp_path, numbers)
    with pytest.raises(SnapshotIncomplete, match=rf"missing: \{missing}"[:-1]):
        fw.load(tmp_path, into={"w0": paddle.zeros([3])}, rank=0, legacy_id=0)


def test_c5_parts_left_over_from_a_longer_save_are_refused(tmp_path):
    parts(tmp_path, range(3))
    target = {f"w{n}": paddle.zeros([3]) for n in range(2)}
    with pytest.raises(PlanError, match="has 1 tensors that the target lacks: 'w2'"):
        fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert float(target["w1"].sum()) == 0


def test_c5_a_tensor_in_two_parts_is_refused(tmp_path):
    parts(tmp_path, range(2))
    paddle.save({"w0": paddle.zeros([3])}, str(tmp_path / LegacyNames(0, 0).part(2)))
    with pytest.raises(FormatError, match="'w0'; files of two saves may be mixed"):
        fw.load(tmp_path, into={"w0": paddle.zeros([3])}, rank=0, legacy_id=0)


def test_c5_a_later_save_with_fewer_parts_removes_the_rest(tmp_path):
    first = {f"w{n}": torch.full((8,), n) for n in range(5)}
    fw.save_legacy(first, tmp_path, rank=0, legacy_id=0, part_bytes=64)
    second = {f"w{n}": torch.full((8,), 10 + n) for n in range(2)}
    fw.save_legacy(second, tmp_path, rank=0, legacy_id=0, part_bytes=64)
    assert sorted(os.listdir(tmp_path)) == [LegacyNames(0, 0).part(n) for n in range(2)]
    fw.save_legacy(first, tmp_path, rank=0, legacy_id=0)
    assert os.listdir(tmp_path) == [LegacyNames(0, 0).single]


@pytest.mark.parametrize("directory", ["run.part3.v2", "exp[1]", "a b", "model_state.tp0.0.part7"])
def test_c4_the_directorys_own_name_confuses_nobody(tmp_path, directory):
    parts(tmp_path / directory, range(2))
    target = {f"w{n}": paddle.zeros([3]) for n in range(2)}
    fw.load(tmp_path / directory, into=target, rank=0, legacy_id=0)
    assert float(target["w1"][0]) == 1


@pytest.mark.parametrize(
    "name",
    [
        "part0.tmp.pdparams",
        "partx.pdparams",
        "part.pdparams",
        "part-1.pdparams",
        "part2.pdparams.bak",
    ],
)
def test_c4_names_that_only_look_like_parts_are_passed_over_and_told(tmp_path, name, caplog):
    """C4: by an event, and by a warning in the log."""
    from flyweight.events import listening

    parts(tmp_path, range(2))
    shutil.copy(tmp_path / LegacyNames(0, 0).part(0), tmp_path / f"model_state.tp0.0.{name}")
    target = {f"w{n}": paddle.zeros([3]) for n in range(2)}
    seen = []
    with listening(seen.append):
        fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert [event.fields["file"] for event in seen if event.kind == "legacy.ignored"] == [
        f"model_state.tp0.0.{name}"
    ]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("flyweight.formats", "WARNING")
    assert f"model_state.tp0.0.{name}" in record.getMessage()


def test_c13_names_that_match_nothing_are_told_by_an_event_and_a_warning(tmp_path, caplog):
    """C13: counted in the report, and in the log, once."""
    from flyweight.events import listening

    parts(tmp_path, range(3))
    target, seen = {"w0": paddle.zeros([3])}, []
    with listening(seen.append):
        report = fw.load(tmp_path, into=target, rank=0, legacy_id=0, extra="report")
    assert report.unused == ["w1", "w2"]
    (event,) = [each for each in seen if each.kind == "load.unused"]
    assert (event.fields["num_tensors"], event.fields["names"]) == (2, "'w1', 'w2'")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("flyweight.verbs", "WARNING")
    assert "has 2 tensors that the target lacks: 'w1', 'w2'" in record.getMessage()


@pytest.mark.parametrize("is_newer", [True, False])
@pytest.mark.parametrize("name", ["tp0.0.part1", "tp0.0", "tp00"])
def test_newer_old_files_behind_a_snapshot_are_told(tmp_path, caplog, is_newer, name):
    """C1: ours come first. If the old ones are newer, somebody may have meant those."""
    from flyweight.events import listening

    parts(tmp_path, [0], rank=1)  # of another rank: never told
    paddle.save({"w": paddle.ones([3])}, str(tmp_path / f"model_state.{name}.pdparams"))
    fw.save({"w": np.zeros(3, np.float32)}, tmp_path, version=7)
    committed = os.stat(tmp_path / "v0000000007" / "flyweight.json").st_mtime
    for path in tmp_path.glob("*.pdparams"):
        os.utime(path, (0, committed + (5 if is_newer else -5)))
    target, seen = {"w": np.ones(3, np.float32)}, []
    with listening(seen.append):
        report = fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert report.version == 7
    assert target["w"].sum() == 0
    hidden = [each.fields for each in seen if each.kind == "legacy.hidden"]
    assert [each["files"] for each in hidden] == [f"'model_state.{name}.pdparams'"] * is_newer
    assert [each["version"] for each in hidden] == [7] * is_newer
    told = [(each.name, each.levelname) for each in caplog.records]
    assert told == [("flyweight.verbs", "WARNING")] * is_newer
    assert all(f"model_state.{name}.pdparams" in each.getMessage() for each in caplog.records)


def test_one_part_under_two_names_is_refused(tmp_path):
    parts(tmp_path, range(2))
    shutil.copy(
        tmp_path / LegacyNames(0, 0).part(1), tmp_path / "model_state.tp0.0.part01.pdparams"
    )
    with pytest.raises(FormatError, match="are the same part"):
        fw.load(tmp_path, into={"w0": paddle.zeros([3])}, rank=0, legacy_id=0)


# C7, C9.


def test_c9_one_reader_serves_every_place_and_every_encoding(places):
    model, shared = places
    for path in model.iterdir():
        path.unlink()
    content = {"a": paddle.full([2], 7), "b": paddle.full([2], 7)}
    paddle.save(content, str(shared / "model_state.tp1.4.pdparams"), safetensors=True)
    assert found_value(places) == 7
    paddle.save(content, str(model / "model_state.tp1.4.pdparams"), safetensors=True)
    assert found_value(places) == 7


@pytest.mark.parametrize("keep", [0, 1, 2, 50, 0.5, -1])
def test_c7_a_truncated_pickle_is_refused_before_anything_is_written(tmp_path, keep):
    tensors = {"w": paddle.randn([100, 100]), "b": paddle.randn([100])}
    path = tmp_path / "m.pdparams"
    paddle.save(tensors, str(path))
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep == -1 else int(size * keep) if keep == 0.5 else keep)
    target = blank(tensors)
    with pytest.raises(FormatError):
        fw.load(path, into=target)
    assert float(target["w"].abs().sum()) == 0


def test_c7_flipped_structure_is_refused_or_leaves_the_weights_as_written(tmp_path):
    """A pickle has no checksum: bits of weights can flip unseen, bits of structure cannot mix."""
    tensors = {"w": paddle.randn([4, 4]), "b": paddle.randn([3])}
    path = tmp_path / "m.pdparams"
    paddle.save(tensors, str(path))
    payload = {i for t in tensors.values() for i in where(path, raw(t))}
    for at in range(path.stat().st_size):
        for bit in (0, 4, 7):
            flip(path, at, bit)
            target = blank(tensors)
            try:
                fw.load(path, into=target)
                if at not in payload:
                    assert fw_bytes(target) == fw_bytes(tensors), f"byte {at} bit {bit}"
            except fw.FlyweightError:
                assert float(target["w"].abs().sum()) == 0
            flip(path, at, bit)


def where(path, content):
    start = path.read_bytes().index(content)
    return range(start, start + len(content))


def dump(path, content, protocol=4):
    import pickle

    path.write_bytes(pickle.dumps(content, protocol))
    return path


def test_arrays_that_share_bytes_are_read_each_in_its_own_shape(tmp_path):
    """Pickle writes equal bytes once; Paddle's own one-byte tensors do this."""
    tensors = {"u": paddle.ones([1], dtype="uint8"), "f": paddle.ones([1, 1], dtype="bool")}
    paddle.save(tensors, str(tmp_path / "m.pdparams"))
    assert_loaded(tmp_path / "m.pdparams", tensors)

    class Shared:
        def __init__(self, shape, raw):
            rebuild = np.empty(0, np.float32).__reduce__()[0]
            state = (1, shape, np.dtype(np.float32), False, raw)
            self.made = rebuild, (np.ndarray, (0,), b"b"), state

        def __reduce__(self):
            return self.made

    raw = np.arange(16, dtype=np.float32).tobytes()
    dump(tmp_path / "s.pdparams", {"a": Shared((2, 8), raw), "b": Shared((8, 2), raw)})
    target = {"a": np.zeros((2, 8), np.float32), "b": np.zeros((8, 2), np.float32)}
    fw.load(tmp_path / "s.pdparams", into=target)
    assert target["a"].tobytes() == target["b"].tobytes() == raw
    assert fw.verify(tmp_path / "s.pdparams").is_whole


def test_one_large_array_under_two_names_fills_both(tmp_path):
    array = np.arange(3 << 20, dtype=np.float32)
    dump(tmp_path / "m.pdparams", {"a": array, "b": array})
    target = {"a": np.zeros_like(array), "b": np.zeros_like(array)}
    fw.load(tmp_path / "m.pdparams", into=target)
    assert (target["a"] == array).all()
    assert (target["b"] == array).all()


@pytest.mark.parametrize(
    "content",
    [
        {"a.b": np.zeros(2), "a": {"b": np.ones(2)}},
        {1: np.zeros(2), "1": np.ones(2)},
        {"a.b": np.zeros(2), "a": {"b": 3}},
        {"z@@.0": np.zeros(2), "z": np.ones(2),
         "UnpackBigParamInfor@@": {"z": {"OriginShape": (2,), "slices": ["z@@.0"]}}},
    ],
)  # fmt: skip
def test_names_that_collide_when_joined_are_refused(tmp_path, content):
    with pytest.raises(FormatError, match="joined name|twice"):
        fw.open(dump(tmp_path / "m.pdparams", content))


@pytest.mark.parametrize("length", [120, 128, 136, 128 + 256, 640])
def test_a_head_whose_length_looks_like_a_pickle_is_safetensors_all_the_same(tmp_path, length):
    import json

    head = json.dumps({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode()
    content = length.to_bytes(8, "little") + head.ljust(length) + b"abc"
    for name in ("m.safetensors", "m.pdparams"):
        (tmp_path / name).write_bytes(content)
        with fw.open(tmp_path / name) as source:
            assert source.read("w").tobytes() == b"abc"


def test_a_legacy_save_that_dies_between_its_files_leaves_nothing_that_mixes(tmp_path, monkeypatch):
    first = {f"w{n}": torch.full((8,), n) for n in range(3)}
    fw.save_legacy(first, tmp_path, rank=0, legacy_id=0, part_bytes=64)
    real, calls = os.link, []

    def fail_second(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(*args, **options)

    monkeypatch.setattr(os, "link", fail_second)
    second = {f"w{n}": torch.full((8,), 10 + n) for n in range(3)}
    with pytest.raises(fw.FlyweightError, match="Input/output error"):
        fw.save_legacy(second, tmp_path, rank=0, legacy_id=0, part_bytes=64)
    monkeypatch.undo()
    target = {f"w{n}": torch.zeros(8, dtype=torch.int64) for n in range(3)}
    with pytest.raises(fw.FlyweightError):
        fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert not any(t.any() for t in target.values())


@pytest.mark.parametrize(
    ("number", "num_tensors", "num_others"),
    [(0, 4, 0), (1, 3, 1), (2, 3, 2), (2, 1, 2)],
)
def test_parts_that_are_saved_anew_while_they_are_opened_are_refused(
    tmp_path, monkeypatch, number, num_tensors, num_others
):
    def save(value, count):
        tensors = {f"w{n}": torch.full((8,), value) for n in range(count)}
        fw.save_legacy(tensors, tmp_path, rank=0, legacy_id=0, part_bytes=64)

    save(1, 3)
    real, place = os.open, str(tmp_path / LegacyNames(0, 0).part(number))

    def after_another_save(path, *args, **options):
        if os.fspath(path) == place:
            monkeypatch.undo()
            save(2, num_tensors)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", after_another_save)
    target = {f"w{n}": torch.zeros(8, dtype=torch.int64) for n in range(3)}
    refusal = "cannot open" if number >= num_tensors else f"saved again .*{num_others} of 3 changed"
    with pytest.raises(fw.FlyweightError, match=refusal):
        fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert not any(t.any() for t in target.values())
    with fw.open(tmp_path, rank=0, legacy_id=0) as source:
        assert len(source.manifest.tensors) == num_tensors


@pytest.mark.parametrize("num_tensors", [1, 2, 4])
def test_a_legacy_save_removes_what_another_saved_meanwhile(tmp_path, monkeypatch, num_tensors):
    def save(value, count):
        tensors = {f"w{n}": torch.full((8,), value) for n in range(count)}
        fw.save_legacy(tensors, tmp_path, rank=0, legacy_id=0, part_bytes=64)

    save(1, 2)
    real = os.posix_fallocate

    def after_another_save(*args):
        monkeypatch.undo()
        save(2, 4)
        real(*args)

    monkeypatch.setattr(os, "posix_fallocate", after_another_save)
    save(3, num_tensors)
    target = {f"w{n}": torch.zeros(8, dtype=torch.int64) for n in range(num_tensors)}
    fw.load(tmp_path, into=target, rank=0, legacy_id=0)
    assert all((t == 3).all() for t in target.values())
    assert len(os.listdir(tmp_path)) == num_tensors


@pytest.mark.parametrize(
    ("as_safetensors", "dtype", "refusal"),
    [
        (False, torch.float8_e4m3fnuz, "cannot hold f8_e4m3fnuz"),
        (None, torch.complex128, "'w' is c128, which safetensors has no name for"),
    ],
)
def test_a_legacy_save_that_is_refused_leaves_nothing(tmp_path, as_safetensors, dtype, refusal):
    fds = len(os.listdir("/proc/self/fd"))
    source = {"w": torch.zeros(4, dtype=dtype)}
    with pytest.raises(SpecError, match=refusal):
        fw.save_legacy(source, tmp_path, rank=0, legacy_id=0, as_safetensors=as_safetensors)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == fds


def test_only_what_came_from_a_pickle_may_mean_another_dtype(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3, np.uint16)}, tmp_path / LegacyNames(0, 0).single)
    with pytest.raises(TypeError, match="'w' is u16 .* and bf16 in the target"):
        fw.load(tmp_path, into={"w": torch.zeros(3, dtype=torch.bfloat16)}, rank=0, legacy_id=0)


def test_structured_names_of_paddle_are_not_tensors(tmp_path):
    layer = paddle.nn.Linear(2, 2)
    paddle.save(layer.state_dict(), str(tmp_path / "m.pdparams"))
    with fw.open(tmp_path / "m.pdparams") as source:
        assert sorted(source.manifest.names) == ["bias", "weight"]
    fresh = paddle.nn.Linear(2, 2)
    fw.load(tmp_path / "m.pdparams", into=fresh)
    assert fw_bytes(fresh) == fw_bytes(layer)
