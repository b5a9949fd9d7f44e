"""Live updates, whole: a publisher and replicas of one host, most of them in this process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flyweight as fw
from conftest import odd_arrays, same, zeros_like
from flyweight.errors import (
    ChecksumMismatch,
    DigestMismatch,
    DTypeMismatch,
    PeerFailed,
    PlanError,
    ShapeMismatch,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.events import listening
from flyweight.live import messages
from flyweight.live.connection import Connection
from live_models import assign, holds, resources, settled, until, weights


def asking(publisher, number=1):
    until(lambda: len(publisher.waiting) >= number)


def updated(threads, publisher, replica, version, **options):
    """Publish a version to a replica that waits for it; return both reports."""
    future = threads.submit(replica.update, version, timeout_seconds=10)
    report = publisher.publish(version, num_replicas=1, **options)
    return report, future.result(10)


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
        future = threads.submit(replica.update, timeout_seconds=5)
        report = publisher.publish(1, num_replicas=1)
        with pytest.raises(PlanError, match=r"cannot be mapped.*transport='auto'"):
            future.result(10)
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


def test_a_model_whose_tensors_were_replaced_is_published_as_it_is_now(address, threads):
    model, engine = weights(1), weights(9)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        updated(threads, publisher, replica, 1)
        model.update(weights(2))
        updated(threads, publisher, replica, 2)
        assert holds(engine, 2)
        engine.update(weights(77))  # and so are the engine's
        model.update(weights(3))
        updated(threads, publisher, replica, 3)
        assert holds(engine, 3)
        model["more"] = np.zeros(3)
        with pytest.raises(PlanError, match="other tensors than when its publisher was made"):
            publisher.publish(4)


def test_values_beside_tensors_arrive_with_their_version(address, threads):
    model, engine = {"w": np.ones(3), "step": 1}, {"w": np.zeros(3), "step": 0}
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        model["step"] = 41
        updated(threads, publisher, replica, 1)
        assert engine["step"] == 41
        model["step"] = 42
        updated(threads, publisher, replica, 2)
        assert engine["step"] == 42


# Layouts.


def cut(array, dim, pieces, piece):
    size = array.shape[dim] // pieces
    index = [slice(None)] * array.ndim
    index[dim] = slice(size * piece, size * (piece + 1))
    local = np.zeros_like(array[tuple(index)])
    offset = [0] * array.ndim
    offset[dim] = size * piece
    return fw.Sharded(local, array.shape, offset), tuple(index)


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 2}, {"hold": True}], ids=str
)
def test_replicas_of_different_layouts_take_one_publish(address, threads, options):
    whole = np.random.default_rng(1).random((64, 48))
    wanted, engines = [], []
    for dim, piece in ((0, 0), (0, 1), (1, 0), (1, 1)):
        shard, index = cut(whole, dim, 2, piece)
        engines.append({"w": shard})
        wanted.append(whole[index])
    engines.append({"w": np.zeros_like(whole)})
    wanted.append(whole)
    with fw.Publisher({"w": whole}, address, **options) as publisher:
        replicas = [fw.Replica(engine, address) for engine in engines]
        futures = [threads.submit(r.update, timeout_seconds=10) for r in replicas]
        report = publisher.publish(1, num_replicas=5)
        for future in futures:
            future.result(10)
        assert len(report.replicas) == 5
        assert report.failed == ()
        for engine, want in zip(engines, wanted, strict=True):
            held = engine["w"]
            held = held.tensor if isinstance(held, fw.Sharded) else held
            assert held.tobytes() == want.tobytes()
        for replica in replicas:
            replica.close()


def test_a_sharded_publisher_serves_what_lies_across_its_shards(address, threads):
    whole = np.random.default_rng(2).random((8, 6))
    source = {
        "a": fw.Sharded(whole[:, :2].copy(), (8, 6), (0, 0)),
        "b": whole,
    }
    target = {"a": fw.Sharded(np.zeros((4, 2)), (8, 6), (2, 0)), "b": np.zeros((8, 6))}
    with fw.Publisher(source, address) as publisher, fw.Replica(target, address) as replica:
        updated(threads, publisher, replica, 1)
    assert target["a"].tensor.tobytes() == whole[2:6, :2].tobytes()


def test_what_the_publisher_has_only_in_part_is_refused(address):
    whole = np.zeros((8, 6))
    source = {"a": fw.Sharded(whole[:, :2].copy(), (8, 6), (0, 0))}
    with fw.Publisher(source, address), pytest.raises(PlanError, match="16 of the 48 elements"):
        fw.Replica({"a": whole}, address)


def test_a_layout_says_what_a_rank_wants(address, threads):
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"0": "tp"}}]}'
    )
    whole = np.arange(24.0).reshape(6, 4)
    halves = [{"w": np.zeros((3, 4))} for _ in range(2)]
    with fw.Publisher({"w": whole}, address) as publisher:
        replicas = [
            fw.Replica(half, address, layout=layout, rank=rank) for rank, half in enumerate(halves)
        ]
        futures = [threads.submit(r.update, timeout_seconds=10) for r in replicas]
        publisher.publish(1, num_replicas=2)
        for future, replica in zip(futures, replicas, strict=True):
            future.result(10)
            replica.close()
    assert np.concatenate([half["w"] for half in halves]).tobytes() == whole.tobytes()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_boxes_of_any_tensors_arrive(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["u1", "u2", "f4", "c16"]))
    whole = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    whole = whole.view(dtype).reshape(shape)
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(
        data.draw(st.integers(1, size - at)) for size, at in zip(shape, offset, strict=True)
    )
    local = np.zeros(box, dtype)
    if data.draw(st.booleans()):
        local = np.asfortranarray(local)
    bucket_bytes = data.draw(st.sampled_from([4096, 1 << 20]))
    address = f"unix:{tmp_path_factory.mktemp('p')}/policy"
    index = tuple(slice(a, a + n) for a, n in zip(offset, box, strict=True))
    with (
        fw.Publisher({"w": whole}, address, bucket_bytes=bucket_bytes) as publisher,
        fw.Replica({"w": fw.Sharded(local, shape, offset)}, address) as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        updated(pool, publisher, replica, 1)
    assert local.tobytes() == whole[index].tobytes()


# What does not fit.


def test_what_does_not_fit_is_refused_before_anything_moves(address):
    have = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    with fw.Publisher(have, address):
        cases = [
            (
                {**have, "x": np.zeros(1)},
                PlanError,
                "wants 1 tensors that the publisher lacks: 'x'",
            ),
            ({**have, "b": np.zeros(3)}, DTypeMismatch, "'b' is f32 at the publisher and f64 at"),
            ({**have, "w": np.zeros((3, 2), np.float32)}, ShapeMismatch, r"\(2, 3\).*\(3, 2\)"),
            ({"w": have["w"]}, PlanError, "has 1 tensors that the replica lacks: 'b'"),
        ]
        for target, kind, text in cases:
            with pytest.raises(kind, match=text):
                fw.Replica(target, address)
        fw.Replica({"w": np.zeros((2, 3), np.float32)}, address, extra="report").close()


def test_one_tensor_here_and_two_that_differ_there_are_not_served(address, threads):
    shared = np.zeros(4)
    source = {"a": np.ones(4), "b": np.ones(4)}
    with (
        fw.Publisher(source, address) as publisher,
        fw.Replica({"a": shared, "b": shared}, address) as replica,
    ):
        updated(threads, publisher, replica, 1)
        source["b"][2] = 3
        future = threads.submit(replica.update, timeout_seconds=5)
        report = publisher.publish(2, num_replicas=1)
        with pytest.raises(
            DigestMismatch, match="other bytes than were published in 1 tensors: 'a'"
        ):
            future.result(10)
        assert isinstance(report.replicas[0].error, DigestMismatch)
        assert (replica.version, replica.state) == (None, "failed")
        with pytest.raises(VersionError, match="failed and holds no whole version"):
            replica.check_servable()
        source["b"][:] = source["a"][:]  # a whole update makes it good again
        updated(threads, publisher, replica, 3)
        replica.check_servable()


def test_tied_tensors_of_both_sides_go_once(address, threads):
    one, other = np.arange(5.0), np.zeros(5)
    with (
        fw.Publisher({"a": one, "b": one}, address) as publisher,
        fw.Replica({"a": other, "b": other}, address) as replica,
    ):
        report, _ = updated(threads, publisher, replica, 1)
    assert report.nbytes == 40
    assert (other == one).all()


def test_a_trainer_that_steps_under_its_own_publish_is_found_out(address, threads):
    """C29: sharing the trainer's memory must not let a step tear what is served."""
    torch = pytest.importorskip("torch")
    model = {"w": torch.zeros(64 << 20, dtype=torch.uint8).share_memory_()}
    engine = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
    stop = threading.Event()

    def step():
        while not stop.is_set():
            model["w"].add_(1)

    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        updated(threads, publisher, replica, 1)
        stepping = threads.submit(step)
        for version in range(2, 22):  # on a busy machine no step may fall into a round
            future = threads.submit(replica.update, timeout_seconds=20)
            report = publisher.publish(version, num_replicas=1)
            error = future.exception(20)
            if error is not None:
                break
        stop.set()
        stepping.result(10)
        assert isinstance(error, DigestMismatch)
        assert report.failed
        assert replica.state == "failed"


def test_memory_of_the_host_is_digested_by_xxh3_and_files_by_what_they_have(
    address, threads, tmp_path, monkeypatch
):
    kinds, send = [], Connection.send

    def watched(self, message, to=b""):
        if isinstance(message, messages.Begin):
            kinds.append(message.digest_kind)
        send(self, message, to)

    monkeypatch.setattr(Connection, "send", watched)
    engine = weights(5)
    fw.save(weights(1), tmp_path, version=1)
    with (
        fw.Publisher(weights(2), address, store=tmp_path) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        replica.update(1, timeout_seconds=10)
        assert holds(engine, 1)
        updated(threads, publisher, replica, 2)
        assert holds(engine, 2)
    assert kinds == ["words", "xxh3"]


# When a version comes.


def test_a_publish_that_nobody_waits_for_returns_at_once_and_says_so(address):
    with fw.Publisher(weights(1), address) as publisher:
        started = time.monotonic()
        report = publisher.publish(1)
        assert time.monotonic() - started < 1
        assert report.replicas == ()
        assert str(report) == "version 1: no replica was listening"
        with fw.Replica(weights(2), address):  # connected is not waiting
            assert publisher.publish(2).replicas == ()


def test_who_asks_late_waits_for_the_next_publish_up_to_its_deadline(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        publisher.publish(1)
        with pytest.raises(TransferTimeout, match="a version from"):
            replica.update(timeout_seconds=0.1)
        assert holds(engine, 50)
        assert replica.state == "empty"
        with pytest.raises(VersionError, match="version 1 was requested, the publisher is at 1"):
            replica.update(1, timeout_seconds=5)
        future = threads.submit(replica.update, timeout_seconds=10)
        asking(publisher)
        assign(model, 2)
        publisher.publish(2)
        assert future.result(10).version == 2
        assert holds(engine, 2)


def test_a_version_that_was_asked_for_never_changes_on_the_way(address, threads):
    with fw.Publisher(weights(1), address) as publisher, fw.Replica(weights(2), address) as replica:
        future = threads.submit(replica.update, 5, timeout_seconds=10)
        asking(publisher)
        assert publisher.publish(4).replicas == ()
        assert publisher.publish(5).replicas[0].error is None
        assert future.result(10).version == 5
        assert replica.update(5).version == 5  # it is here already
        future = threads.submit(replica.update, 6, timeout_seconds=10)
        asking(publisher)
        publisher.publish(7)
        with pytest.raises(VersionError, match="version 6 was requested, the publisher is at 7"):
            future.result(10)


def test_versions_only_grow(address):
    with fw.Publisher(weights(1), address) as publisher:
        publisher.publish(3)
        with pytest.raises(VersionError, match="version 3 does not follow 3"):
            publisher.publish(3)
        with pytest.raises((SpecError, VersionError)):
            publisher.publish(-1)


def test_what_is_held_is_taken_at_once_whatever_the_trainer_did_since(address):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        assign(model, 33)  # the trainer steps on
        with fw.Replica(engine, address) as replica:
            report = replica.update(timeout_seconds=10)
            assert (report.version, report.origin) == (1, "held")
            assert holds(engine, 1)
            with pytest.raises(TransferTimeout):  # it has that one
                replica.update(timeout_seconds=0.1)
            assert replica.update(1).version == 1
            assign(model, 2)
            publisher.publish(2)
            assert replica.update(2, timeout_seconds=10).version == 2
            assert holds(engine, 2)


def test_a_store_gives_late_replicas_its_newest_snapshot(address, tmp_path, threads):
    model, engine = weights(1), weights(50)
    fw.save(weights(8), tmp_path / "run", version=8)
    fw.save(weights(9), tmp_path / "run", version=9)
    with (
        fw.Publisher(model, address, store=tmp_path / "run") as publisher,
        fw.Replica(engine, address) as replica,
    ):
        report = replica.update(timeout_seconds=10)
        assert (report.version, report.origin, report.verified) == (9, "snapshot", "live")
        assert holds(engine, 9)
        assert replica.update(8, timeout_seconds=10).version == 8
        assert holds(engine, 8)
        future = threads.submit(replica.update, 10, timeout_seconds=10)
        asking(publisher)
        assign(model, 10)
        publisher.publish(10)
        assert future.result(10).version == 10
        assert holds(engine, 10)


def test_a_damaged_snapshot_is_not_served(address, tmp_path):
    engine = weights(50)
    fw.save(weights(8), tmp_path / "run", version=8)
    (part,) = (tmp_path / "run").glob("*/*.safetensors")
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    with (
        fw.Publisher(weights(1), address, store=tmp_path / "run"),
        fw.Replica(engine, address) as replica,
    ):
        with pytest.raises(ChecksumMismatch):
            replica.update(timeout_seconds=10)
        assert replica.version is None


@pytest.mark.parametrize("hold", [False, True])
def test_an_opened_snapshot_is_there_for_whoever_asks(address, tmp_path, hold):
    fw.save(weights(8), tmp_path / "run", version=8)
    with fw.open(tmp_path / "run") as stored, fw.Publisher(stored, address, hold=hold) as publisher:
        for _ in range(2):
            engine = weights(50)
            with fw.Replica(engine, address) as replica:
                assert replica.update(timeout_seconds=10).version == 8
                assert holds(engine, 8)
        with pytest.raises(SpecError, match="take without a publish"):
            publisher.publish(9)


def test_follow_yields_each_version_as_it_comes(address, threads):
    model, engine = weights(1), weights(50)
    seen = []

    def follow(replica):
        for report in replica.follow(timeout_seconds=10):
            seen.append((report.version, holds(engine, report.version)))
            if report.version == 3:
                return

    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        future = threads.submit(follow, replica)
        for version in (1, 2, 3):
            assign(model, version)
            publisher.publish(version, num_replicas=1)
        future.result(10)
    assert seen == [(1, True), (2, True), (3, True)]


def test_a_replica_may_be_there_before_its_publisher_and_outlive_it(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Replica(engine, address) as replica:
        with pytest.raises(TransferTimeout, match="no publisher came in time"):
            replica.update(timeout_seconds=0.2)
        future = threads.submit(replica.update, timeout_seconds=10)
        with fw.Publisher(model, address) as publisher:
            publisher.publish(1, num_replicas=1)
            future.result(10)
        assert replica.version == 1  # still whole
        with fw.Publisher(model, address) as publisher:
            # Another session's version 1 is not the one that is held.
            future = threads.submit(replica.update, 1, timeout_seconds=10)
            asking(publisher)
            assign(model, 4)
            publisher.publish(1, num_replicas=1)
            future.result(10)
            assert holds(engine, 4)


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
            futures = [threads.submit(r.update, timeout_seconds=10) for r, _ in replicas.values()]
            assign(model, version)
            report = publisher.publish(version, num_replicas=len(replicas))
            assert report.failed == ()
            for future in futures:
                future.result(10)
            assert all(holds(engine, version) for _, engine in replicas.values())
        for replica, _ in replicas.values():
            replica.close()


# Leases.


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 2}, {"hold": True}], ids=str
)
def test_a_background_publish_lets_the_trainer_step_once_copied(address, threads, options):
    model, engine = weights(1, 1 << 20), weights(50, 1 << 20)
    with (
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        asking(publisher)
        lease = publisher.publish(1, background=True)
        lease.wait_copied(10)
        assert lease.is_copied
        assign(model, 2)  # a step
        assert future.result(10).version == 1
        assert lease.wait(10).failed == ()
        assert lease.is_done
        assert holds(engine, 1)


def test_publishes_in_the_background_follow_each_other(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        for version in (1, 2, 3):
            future = threads.submit(replica.update, version, timeout_seconds=10)
            asking(publisher)
            lease = publisher.publish(version, background=True)
            lease.wait(10)
            future.result(10)
        assert replica.version == 3


# A loader.


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 1}, {"hold": True}], ids=str
)
@pytest.mark.parametrize("framework", ["numpy", "torch", "paddle"])
def test_a_loader_gets_whole_tensors_in_order_that_it_may_keep(
    address, threads, framework, options
):
    """C20, C28"""
    pytest.importorskip(framework)
    model, kept = weights(1), {}

    def load(named):
        for name, tensor in named:
            kept[name] = tensor

    with (
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(load, address, framework=framework) as replica,
    ):
        for version in (1, 2):
            assign(model, version)
            _, update = updated(threads, publisher, replica, version)
            assert update.verified == "received"
            assign(model, 77)
            assert list(kept) == list(model)
            found = {name: np.asarray(tensor) for name, tensor in kept.items()}
            assert holds(found, version)
            assign(model, version)


def test_a_loader_that_fails_or_leaves_tensors_fails_the_replica_by_name(address, threads):
    def picky(named):
        for name, _ in named:
            if name == "norm":
                raise ValueError("no such parameter: norm")

    def lazy(named):
        next(iter(named))

    cases = [(picky, PeerFailed, "no such parameter"), (lazy, TransportError, "took 1 of 7")]
    with fw.Publisher(weights(1), address) as publisher:
        for version, (load, told, text) in enumerate(cases):
            with fw.Replica(load, address, framework="numpy") as replica:
                future = threads.submit(replica.update, timeout_seconds=10)
                report = publisher.publish(version, num_replicas=1)
                with pytest.raises((ValueError, TransportError), match=text):
                    future.result(10)
                assert isinstance(report.replicas[0].error, told)
                assert text in str(report.replicas[0].error)
                assert replica.state == "failed"


# The house is left as it was.


@pytest.mark.parametrize("options", [{}, {"hold": True}], ids=str)
def test_closing_leaves_no_thread_file_segment_or_socket(tmp_path, threads, options):
    address = f"unix:{tmp_path}/policy"
    threads.submit(int).result()
    before = resources()
    model, engine = weights(1), weights(2)
    publisher = fw.Publisher(model, address, **options)
    replica = fw.Replica(engine, address)
    updated(threads, publisher, replica, 1)
    replica.close()
    replica.close()
    publisher.close()
    publisher.close()
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == ["lock"]
    assert settled(before) == before
    with pytest.raises(TransportError, match="is closed"):
        publisher.publish(2)
    with pytest.raises(TransportError, match="is closed"):
        replica.update(2)


def test_events_tell_of_each_round(address, threads):
    seen = []
    with (
        listening(seen.append),
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(2), address, name="engine") as replica,
    ):
        updated(threads, publisher, replica, 1)
        replica.close()
        until(lambda: any(e.kind == "replica.lost" for e in seen))
    kinds = [event.kind for event in seen]
    assert {"replica.joined", "publish.done", "update.done", "replica.lost"} <= set(kinds)
    done = next(event for event in seen if event.kind == "publish.done")
    assert (done.fields["version"], done.fields["strategy"]) == (1, "host")
