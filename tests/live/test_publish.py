"""A publish: every version arrives in place, whatever the tensors, their memory and their number."""

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from conftest import odd_arrays, same, zeros_like
from flyweight.errors import (
    PlanError,
    SpecError,
    TransferTimeout,
    VersionError,
)
from flyweight.live.rounds import Rounds
from flyweight.live.source import PublishedSource
from live_rounds import call_before, updated
from versioned_models import assign, holds, weights

OPTIONS = [
    {},
    {"bucket_bytes": 4096, "depth": 1},
    {"bucket_bytes": 5000, "depth": 3},
    {"hold": True},
    {"transport": "host"},
    {"should_verify": False},
    {"should_verify": False, "bucket_bytes": 4096, "depth": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_replica_takes_every_version_over_in_place(address, threads, options):
    """C28, C30: host tensors by the same protocol, with buckets in flight, acknowledged and reused."""
    model, engine = weights(1), weights(100)
    before = {name: (id(a), a.ctypes.data, a.strides) for name, a in engine.items()}
    with (
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        for version in (1, 2, 7):
            assign(model, version)
            report, update = updated(threads, publisher, replica, version)
            assert holds(engine, version)
            assert (replica.version, publisher.version) == (version, version)
            assert replica.state == "ready"
            replica.check_servable()
            assert report.failed == ()
            assert report.nbytes == update.nbytes == sum(a.nbytes for a in model.values())
            assert report.seconds > 0
            assert update.version == version
            assert update.verified == ("live" if options.get("should_verify", True) else "nothing")
        assert update.parent == 2
    assert {name: (id(a), a.ctypes.data, a.strides) for name, a in engine.items()} == before


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_odd_tensors_arrive(address, threads, bucket_bytes):
    source = odd_arrays(1)
    target = zeros_like(source)
    with (
        fw.Publisher(source, address, bucket_bytes=bucket_bytes) as publisher,
        fw.Replica(target, address) as replica,
    ):
        updated(threads, publisher, replica, 1)
    assert same(target, source)


def test_tensors_in_shared_memory_are_mapped_and_copied_once(address, threads):
    """C14: memory that is shared already is copied from, never served from."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).share_memory()
    engine = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        for version in (1, 2):
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(version)
            report, _ = updated(threads, publisher, replica, version)
            assert report.replicas[0].strategy == "mapped"
            for a, b in zip(model.parameters(), engine.parameters(), strict=True):
                assert torch.equal(a, b)


def test_a_transport_that_cannot_be_is_refused_with_the_remedy_and_harms_nobody_else(
    address, threads
):
    torch = pytest.importorskip("torch")
    shared = {"w": torch.ones(1000).share_memory_(), "b": torch.ones(3).share_memory_()}
    private = {"w": torch.ones(1000), "b": torch.ones(3)}
    with (
        fw.Publisher(private, address, transport="mapped") as publisher,
        fw.Replica(weights_like(private), address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        report = publisher.publish(1, num_replicas=1)
        with pytest.raises(PlanError, match="transport='auto'"):
            future.result(LIMIT)
        assert isinstance(report.replicas[0].error, PlanError)
        assert replica.state == "empty"
    with (
        fw.Publisher(shared, address, transport="mapped") as publisher,
        fw.Replica(weights_like(shared), address) as replica,
    ):
        report, _ = updated(threads, publisher, replica, 1)
        assert report.replicas[0].strategy == "mapped"


def weights_like(tensors):
    return {name: tensor.clone().zero_() for name, tensor in tensors.items()}


def test_a_torch_module_goes_to_a_paddle_layer(address, threads):
    torch, paddle = pytest.importorskip("torch"), pytest.importorskip("paddle")
    model = torch.nn.Linear(5, 5)
    layer = paddle.nn.Linear(5, 5)
    with fw.Publisher(model, address) as publisher, fw.Replica(layer, address) as replica:
        updated(threads, publisher, replica, 1)
    assert layer.weight.numpy().tobytes() == model.weight.detach().numpy().tobytes()


def test_values_beside_tensors_arrive_with_their_version(address, threads):
    model, engine = {"w": np.ones(3), "step": 1}, {"w": np.zeros(3), "step": 0}
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        model["step"] = 41
        updated(threads, publisher, replica, 1)
        assert engine["step"] == 41
        model["step"] = 42
        updated(threads, publisher, replica, 2)
        assert engine["step"] == 42


def test_a_publish_that_nobody_waits_for_returns_at_once_and_says_so(address):
    with fw.Publisher(weights(1), address) as publisher:
        with in_time(0):
            report = publisher.publish(1, timeout_seconds=LIMIT)
        assert report.replicas == ()
        assert "no replica" in str(report)
        with fw.Replica(weights(2), address):  # connected is not waiting
            assert publisher.publish(2).replicas == ()


@pytest.mark.parametrize("number", [-1, 1.0, "1", None])
def test_a_number_of_replicas_is_whole_or_refused(address, number):
    with fw.Publisher(weights(1), address) as publisher:
        with pytest.raises(SpecError, match="num_replicas"):
            publisher.publish(1, num_replicas=number)
        assert publisher.publish(1).version == 1


def test_versions_only_grow(address):
    with fw.Publisher(weights(1), address) as publisher:
        publisher.publish(3)
        with pytest.raises(VersionError, match="follow"):
            publisher.publish(3)
        with pytest.raises((SpecError, VersionError)):
            publisher.publish(-1)


def test_replicas_join_and_leave_at_any_time(address, threads):
    model = weights(1)
    with fw.Publisher(model, address) as publisher:
        replicas = {}
        for version in range(1, 9):
            if version % 3:
                engine = weights(50 + version)
                replicas[version] = fw.Replica(engine, address, name=f"r{version}"), engine
            else:
                replica, _ = replicas.pop(version - 1)
                replica.close()
            until(lambda: len(publisher.replicas) == len(replicas))
            futures = [
                threads.submit(r.update, timeout_seconds=LIMIT) for r, _ in replicas.values()
            ]
            assign(model, version)
            report = publisher.publish(version, num_replicas=len(replicas))
            assert report.failed == ()
            for future in futures:
                future.result(LIMIT)
            assert all(holds(engine, version) for _, engine in replicas.values())
        for replica, _ in replicas.values():
            replica.close()


class Fixed(dict):
    def __setitem__(self, key, value):
        raise RuntimeError("values of mine are mine")


def test_values_that_cannot_be_set_fail_the_replica_by_name(address, threads):
    engine = Fixed(w=np.zeros(3), step=0)
    with (
        fw.Publisher({"w": np.ones(3), "step": 1}, address) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        publisher.publish(1, num_replicas=1)
        with pytest.raises(RuntimeError, match="mine"):
            future.result(LIMIT)
        assert replica.state == "failed"
        assert "mine" in str(replica.failure)


def test_hundreds_of_shared_tensors_are_mapped(address, threads):
    torch = pytest.importorskip("torch")
    model = {f"w{n}": torch.full((100,), float(n)).share_memory_() for n in range(300)}
    engine = {name: torch.zeros(100) for name in model}
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        _, update = updated(threads, publisher, replica, 1)
    assert update.strategy == "mapped"
    assert all(torch.equal(engine[name], model[name]) for name in model)


def test_a_replica_with_plain_values_is_servable_and_takes_a_version_once(address, threads):
    model, engine = {**weights(1), "step": 123_456}, {**weights(50), "step": 0}
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        assert next(replica.follow(timeout_seconds=LIMIT)).version == 1
        replica.check_servable()
        assert engine["step"] == 123_456
        with pytest.raises(TransferTimeout):
            next(replica.follow(timeout_seconds=0.3))
        replica.check_servable()
        assign(model, 2)
        model["step"] = 999_999
        publisher.publish(2)
        replica.update(timeout_seconds=LIMIT)
        replica.check_servable()
        assert (engine["step"], holds(engine, 2)) == (999_999, True)


def test_a_publish_that_nobody_got_by_an_error_of_ours_does_not_use_its_number_up(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        with monkeypatch.context() as patch:

            def no_memory():
                raise MemoryError("on purpose")

            call_before(patch, PublishedSource, "digests", no_memory)
            with pytest.raises(MemoryError):
                publisher.publish(1, num_replicas=1)
        assert publisher.version is None
        assert not future.done(), "it had not begun, and waits"
        publisher.publish(1, num_replicas=1)
        assert future.result(LIMIT).version == 1
        assert holds(engine, 1)


def test_a_publish_that_cannot_give_its_replicas_back_is_over_all_the_same(address, monkeypatch):
    def failing(self, peers):
        raise RuntimeError("an error of ours")

    with fw.Publisher(weights(1), address) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(Rounds, "release_members", failing)
            with pytest.raises(RuntimeError, match="of ours"):
                publisher.publish(1)
        assert publisher.publish(2, timeout_seconds=LIMIT).version == 2
