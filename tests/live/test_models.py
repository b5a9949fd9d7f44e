"""What models hold: tied, extra and replaced tensors, layouts, and values that are no tensors."""

import gc
from contextlib import ExitStack

import numpy as np
import pytest

from child_processes import LIMIT
from flyweight.adapters.sharded import Sharded
from flyweight.errors import PlanError, ShapeMismatch, SpecError, VersionError
from flyweight.live import Publisher, Replica
from flyweight.spec.model_layout import ModelLayout
from live.live_processes import TOKEN, at, once
from live.one_process import check_next_update, holds, in_background, mappable, model, reader

torch = pytest.importorskip("torch")
ADDRESS = "tcp://127.0.0.1:0"
WAYS = ["mapped", "filled", "read"]


@pytest.fixture(params=WAYS)
def transport(request):
    return request.param


@pytest.fixture
def publish():
    """Return what publishes version 1 of a model, which stays, for a transport."""
    with ExitStack() as stack:

        def start(weights, transport, **options):
            keep = "memory" if transport == "mapped" else "in_place"
            found = stack.enter_context(
                Publisher(weights, ADDRESS, token=TOKEN, keep=keep, **options)
            )
            found.publish(1)
            return found

        yield start


class Tied(torch.nn.Module):
    def __init__(self, is_tied, value):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        for each in self.parameters():
            torch.nn.init.constant_(each, value)


@pytest.mark.parametrize(("at_trainer", "here"), [(True, True), (True, False), (False, True)])
def test_tied_tensors_may_be_tied_on_one_side_only(publish, transport, at_trainer, here):
    source = publish(Tied(at_trainer, 3.0), transport)
    sink = Tied(here, 0.0)
    with reader(sink, source.address, transport) as replica:
        assert replica.update(timeout_seconds=LIMIT).version == 1
    assert (sink.embedding.weight == 3).all()
    assert (sink.head.weight == 3).all()
    assert (sink.head.weight is sink.embedding.weight) == here


def test_tensors_that_are_one_here_must_be_equal_at_the_trainer(publish, transport):
    weights = Tied(is_tied=False, value=3.0)
    torch.nn.init.constant_(weights.head.weight, 4.0)
    source = publish(weights, transport)
    sink = Tied(is_tied=True, value=0.0)
    with (
        reader(sink, source.address, transport) as replica,
        pytest.raises(VersionError, match="are not what was published"),
    ):
        replica.update(timeout_seconds=LIMIT)


def test_tensors_that_are_one_here_need_digests(publish, transport):
    source = publish(Tied(is_tied=False, value=3.0), transport, verify=False)
    with (
        reader(Tied(is_tied=True, value=0.0), source.address, transport) as replica,
        pytest.raises(PlanError, match="nothing is verified, so they may differ"),
    ):
        replica.update(timeout_seconds=LIMIT)


def test_extra_tensors_of_the_trainer_are_refused_or_left_out(publish, transport):
    weights = {**model(1), "extra": np.ones(3, np.float32)}
    source = publish(weights, transport)
    arrays = model()
    with pytest.raises(PlanError, match="1 tensors that the model lacks: 'extra'; strict=False"):
        reader(arrays, source.address, transport)
    with reader(arrays, source.address, transport, strict=False) as sink:
        assert sink.update(timeout_seconds=LIMIT).version == 1
        assert sink.unused == ("extra",)
        assert holds(arrays, 1)


def test_what_the_trainer_lacks_is_refused_with_names(publish):
    source = publish(model(1), "filled")
    more = {**model(), "c": np.zeros(1, np.float32), "d": np.zeros(1, np.float32)}
    with pytest.raises(PlanError, match="the trainer lacks 2 tensors: 'c', 'd'"):
        reader(more, source.address)
    with pytest.raises(ShapeMismatch, match="'b'"):
        reader({**model(), "b": np.zeros(5, np.float32)}, source.address)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("option", ["rank", "layout_rank"])
def test_a_layout_says_which_part_an_engines_rank_has(publish, transport, dim, option):
    whole = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    source = publish({"w": whole, "b": np.arange(8, dtype=np.float32)}, transport)
    cut = '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"%d": "tp"}}, {"names": ["b"]}]}'
    layout = ModelLayout.from_json(cut % dim)
    for rank in (0, 1):
        part = np.split(whole, 2, dim)[rank]
        sink = {"w": np.zeros_like(part, order="C"), "b": np.zeros(8, np.float32)}
        with Replica(
            sink, source.address, token=TOKEN, transport=transport, layout=layout,
            name=f"rank {rank}", **{option: rank},
        ) as replica:  # fmt: skip
            assert replica.update(timeout_seconds=LIMIT).version == 1
        assert np.array_equal(sink["w"], part)
        assert sink["b"].tolist() == list(range(8))


def test_engines_of_different_cuts_take_one_publish(transport):
    whole = np.random.default_rng(1).random((64, 48))
    cuts = [np.s_[:32], np.s_[32:], np.s_[:, :24], np.s_[:, 24:]]
    offsets = [(0, 0), (32, 0), (0, 0), (0, 24)]
    with ExitStack() as stack:
        source = stack.enter_context(Publisher({"w": whole}, ADDRESS, token=TOKEN))
        sinks, results = [np.zeros_like(whole[cut], order="C") for cut in cuts], []
        for number, (sink, offset) in enumerate(zip(sinks, offsets, strict=True)):
            replica = stack.enter_context(
                reader({"w": Sharded(sink, whole.shape, offset)}, source.address, name=f"e{number}",
                       transport="auto" if transport == "mapped" else transport)
            )  # fmt: skip
            results.append(
                stack.enter_context(in_background(replica.update, timeout_seconds=LIMIT))
            )
        report = source.publish(1, num_replicas=4, timeout_seconds=LIMIT)
        assert len(report.replicas) == 4
        assert not report.failed
        for result, sink, cut in zip(results, sinks, cuts, strict=True):
            assert result().version == 1
            assert np.array_equal(sink, whole[cut])


def test_tensors_that_the_trainer_replaced_are_published_from_where_they_are(transport):
    make = mappable if transport == "mapped" else model
    weights, arrays = make(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN) as source,
        reader(arrays, source.address, transport) as sink,
    ):
        check_next_update(source, weights, (sink, arrays))
        num_mapped = None
        for _ in range(3):
            weights.update(make(0))
            check_next_update(source, weights, (sink, arrays))
            gc.collect()
            with open("/proc/self/maps") as maps:
                found = sum("memfd:tensor" in line for line in maps)
            assert num_mapped in (None, found)  # FAULTS 25: of those before, nothing is left
            num_mapped = found


def test_other_tensors_need_another_publisher():
    weights = model(1)
    with Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source:
        source.publish(1)
        weights.update(model(2), c=np.zeros(3, np.float32))
        for version in (2, 3):  # never the tensors that it had before
            with pytest.raises(PlanError, match="has other tensors than .*: 'c'; make a new"):
                source.publish(version)
        del weights["c"]
        arrays = model()
        with reader(arrays, source.address) as sink:
            check_next_update(source, weights, (sink, arrays))


def test_tensors_that_the_engine_replaced_are_no_version_and_the_next_update_fills_them(transport):
    make = mappable if transport == "mapped" else model
    weights, arrays = make(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, transport) as sink,
    ):
        source.publish(1)
        sink.update(timeout_seconds=LIMIT)
        arrays.update(model(0))
        assert (sink.version, str(sink.state)) == (None, "EMPTY")
        assert "were replaced, or have moved" in str(sink.failure)
        assert sink.update(timeout_seconds=LIMIT).version == 1  # the same version, again
        assert holds(arrays, 1)
        check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("point", ["found", "leased"])
def test_tensors_that_are_replaced_while_an_update_waits_are_not_written(transport, point):
    make = mappable if transport == "mapped" else model
    weights, arrays = make(1), model()
    old = dict(arrays)
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, transport) as sink,
    ):
        source.publish(1)
        with (
            at(point, once(lambda: arrays.update(model(0)))),
            pytest.raises(VersionError, match="were replaced, or have moved"),
        ):
            sink.update(timeout_seconds=LIMIT)
        assert holds(old, 0)
        assert holds(arrays, 0)
        check_next_update(source, weights, (sink, arrays))


def test_values_that_are_no_tensors_travel_with_the_version(transport):
    weights = {"w": np.ones(4, np.float32), "step": 7, "name": "first", "rate": 0.5}
    arrays = {"w": np.zeros(4, np.float32), "step": 0, "name": "", "rate": 0.0}
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address, transport if transport != "mapped" else "auto") as sink,
    ):
        source.publish(1)
        assert sink.update(timeout_seconds=LIMIT).version == 1
        assert {k: v for k, v in arrays.items() if k != "w"} == {
            "step": 7, "name": "first", "rate": 0.5,
        }  # fmt: skip
        assert sink.version == 1
        weights["step"] = 8
        source.publish(2)
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert arrays["step"] == 8
        assert sink.version == 2


def test_values_of_a_version_that_is_kept_are_its_own_until_it_is_withdrawn():
    weights = {"w": np.ones(4, np.float32), "step": 7}
    arrays = {"w": np.zeros(4, np.float32), "step": 0}
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address) as sink,
    ):
        source.publish(1)

        def take():  # the next publish has looked at the model, and begins to withdraw this one
            assert sink.update(1, timeout_seconds=LIMIT).version == 1
            assert arrays["step"] == 7

        weights["step"] = 8
        with at("reclaiming", once(take)):
            source.publish(2)
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert arrays["step"] == 8


def test_empty_and_odd_tensors_arrive(publish, transport):
    rng = np.random.default_rng(3)
    weights = {
        "scalar": np.array(rng.random()),
        "empty": np.empty((0, 3), np.float32),
        "bytes": rng.integers(0, 256, (7, 3), dtype=np.uint8),
        "half": rng.random((5, 3, 2)).astype(np.float16),
        "transposed": rng.random((4, 6)).astype(np.float32).T,
        "sliced": rng.integers(0, 9, (8, 8))[::2, 1::3],
        "flag": np.array([True, False, True]),
    }
    arrays = {name: np.zeros_like(each) for name, each in weights.items()}
    source = publish(weights, transport)
    with reader(arrays, source.address, transport) as sink:
        assert sink.update(timeout_seconds=LIMIT).version == 1
    assert all(np.array_equal(arrays[name], weights[name]) for name in weights)


def test_a_model_that_cannot_be_written_is_refused_before_there_is_a_trainer():
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    with pytest.raises((SpecError, PlanError), match="'w'"):
        reader({"w": frozen}, "tcp://127.0.0.1:9")


def test_a_model_without_tensors_cannot_be_published():
    with pytest.raises(SpecError, match="holds no tensors"):
        Publisher({}, ADDRESS, token=TOKEN)


def test_a_rank_alone_says_nothing(tmp_path):
    with pytest.raises(SpecError, match="world_size"):
        Replica({"a": np.zeros(3)}, f"unix:{tmp_path}/policy", name="engine", rank=1)


def test_ranks_need_a_port_at_which_they_find_each_other():
    with pytest.raises(SpecError, match="port 0"):
        Publisher({"a": np.zeros(3)}, ADDRESS, token=TOKEN, rank=1, world_size=2)
