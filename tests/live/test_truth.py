"""What a replica calls a version is what the trainer had when it published: never a mix of two."""

import gc
import threading
import weakref

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import DigestMismatch, PlanError, SpecError
from flyweight.live.catch_up import CatchUpRounds
from flyweight.live.round import Round
from flyweight.live.source import HeldCopy, PublishedSource
from live_models import assign, holds, until, weights

SIZES = (1000, 200_000)  # digested with others, and as it lands


def before(monkeypatch, owner, name, work):
    """Have something happen just before a method runs."""
    original = getattr(owner, name)

    def method(self, *args, **options):
        work()
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("transport", ["host", "auto"])
def test_a_step_between_digest_and_copy_is_found_out(address, threads, monkeypatch, transport):
    """C29: one tensor is the old one, another the new one, and no single copy is torn."""
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, transport=transport) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        with monkeypatch.context() as patch:
            before(patch, Round, "_fill_buckets", lambda: assign(model, 2))
            future = threads.submit(replica.update, timeout_seconds=10)
            report = publisher.publish(1, num_replicas=1)
            assert isinstance(report.failed[0].error, DigestMismatch)
            with pytest.raises(DigestMismatch, match="other bytes than were published"):
                future.result(10)
            assert replica.state == "failed"
        future = threads.submit(replica.update, timeout_seconds=10)
        assert not publisher.publish(2, num_replicas=1).failed
        future.result(10)
        assert holds(engine, 2)


def test_a_step_while_the_held_copy_is_made_is_an_error_of_the_publish(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        with monkeypatch.context() as patch:
            before(patch, HeldCopy, "refill", lambda: model["norm"].__setitem__(3, 7.0))
            future = threads.submit(replica.update, timeout_seconds=10)
            with pytest.raises(
                DigestMismatch, match="1 tensors changed while version 1 was copied: 'norm'"
            ):
                publisher.publish(1, num_replicas=1)
            assert publisher.version is None
            assert not future.done(), "nobody was given anything"
        assign(model, 1)
        publisher.publish(1)
        assert future.result(10).version == 1
        assert holds(engine, 1)


@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_here_and_two_there_must_hold_the_same(address, threads, size):
    shared = np.zeros(size)
    source = {"a": np.full(size, 1.0), "b": np.full(size, 2.0)}
    with (
        fw.Publisher(source, address) as publisher,
        fw.Replica({"a": shared, "b": shared}, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(1, num_replicas=1).failed
        with pytest.raises(DigestMismatch):
            future.result(10)
        source["a"][:] = 2.0
        future = threads.submit(replica.update, timeout_seconds=10)
        assert not publisher.publish(2, num_replicas=1).failed
        assert future.result(10).version == 2
        assert (shared == 2.0).all()


@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_here_and_two_there_are_refused_where_nothing_is_verified(
    address, threads, size
):
    shared = np.zeros(size)
    source = {"a": np.full(size, 1.0), "b": np.full(size, 2.0)}
    with (
        fw.Publisher(source, address, should_verify=False) as publisher,
        fw.Replica({"a": shared, "b": shared}, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(1, num_replicas=1).failed
        with pytest.raises(PlanError, match="several at the publisher, and nothing is verified"):
            future.result(10)
        assert not shared.any(), "nothing was touched"


@pytest.mark.parametrize("size", SIZES)
def test_one_memory_for_two_parts_of_what_is_whole_is_refused(address, tmp_path, size):
    memory = np.zeros((1, size))
    target = {
        name: fw.Sharded(memory, shape=(2, size), offset=(row, 0))
        for row, name in enumerate(("a", "b"))
    }
    fw.save({"a": np.ones((2, size)), "b": np.ones((2, size))}, tmp_path / "run", version=1)
    for take in (
        lambda: fw.load(tmp_path / "run", into=target),
        lambda: fw.Replica(target, address),
    ):
        with pytest.raises(SpecError, match="'a' and 'b' are in the same memory"):
            take()
    assert not memory.any()


def test_a_replica_with_plain_values_is_servable_and_takes_a_version_once(address, threads):
    model, engine = {**weights(1), "step": 123_456}, {**weights(50), "step": 0}
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        taken = replica.follow(timeout_seconds=0.5)
        assert next(taken).version == 1
        replica.check_servable()
        assert engine["step"] == 123_456
        with pytest.raises(fw.FlyweightError, match="did not come in time"):
            next(taken)
        replica.check_servable()
        assign(model, 2)
        model["step"] = 999_999
        publisher.publish(2)
        replica.update(timeout_seconds=10)
        replica.check_servable()
        assert (engine["step"], holds(engine, 2)) == (999_999, True)


def test_who_asks_while_the_held_copy_is_made_does_not_wait_for_a_slow_one(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    may_go_on, asked, is_copying = threading.Event(), threading.Event(), threading.Event()

    def wait_for_the_other():
        is_copying.set()
        asked.wait(10)

    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(weights(51), address, name="slow") as slow,
        fw.Replica(engine, address, name="other") as other,
    ):
        before(monkeypatch, HeldCopy, "refill", wait_for_the_other)
        slowed = threads.submit(
            slow.update, timeout_seconds=20, before=lambda version: may_go_on.wait(20)
        )
        published = threads.submit(publisher.publish, 1, num_replicas=1)
        assert is_copying.wait(10)
        future = threads.submit(other.update, timeout_seconds=10)
        until(lambda: publisher.waiting == ["other"])
        asked.set()
        assert future.result(10).version == 1
        assert holds(engine, 1)
        assert not slowed.done()
        may_go_on.set()
        slowed.result(10)
        assert not published.result(10).failed


def test_ranks_that_wait_for_each_other_all_get_what_is_held_before_the_next_takes_its_place(
    address, threads, monkeypatch
):
    """One has begun and waits for the other to; the trainer publishes; then the other asks."""
    model, engines = weights(1), [weights(50), weights(51)]
    has_begun, may_go_on, is_publishing = (threading.Event() for _ in range(3))

    def wait(version):
        has_begun.set()
        assert may_go_on.wait(20)

    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engines[0], address) as first,
        fw.Replica(engines[1], address) as second,
    ):
        publisher.publish(1)
        waiting = threads.submit(first.update, timeout_seconds=20, before=wait)
        assert has_begun.wait(10)
        before(monkeypatch, CatchUpRounds, "retire_available", is_publishing.set)
        publishing = threads.submit(publisher.publish, 2)
        assert is_publishing.wait(10)
        other = second.update(timeout_seconds=10, before=lambda version: may_go_on.set())
        assert (other.version, waiting.result(10).version) == (1, 1)
        assert publishing.result(10).version == 2
        for engine, replica in zip(engines, (first, second), strict=True):
            assert replica.update(timeout_seconds=10).version == 2
            assert holds(engine, 1), "of the tensors nothing was changed"


def test_a_publish_that_nobody_got_by_an_error_of_ours_does_not_use_its_number_up(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        future = threads.submit(replica.update, timeout_seconds=20)
        with monkeypatch.context() as patch:

            def no_memory():
                raise MemoryError("on purpose")

            before(patch, PublishedSource, "digests", no_memory)
            with pytest.raises(MemoryError):
                publisher.publish(1, num_replicas=1)
        assert publisher.version is None
        assert not future.done(), "it had not begun, and waits"
        publisher.publish(1, num_replicas=1)
        assert future.result(10).version == 1
        assert holds(engine, 1)


def test_what_is_held_does_not_keep_tensors_that_were_replaced(address):
    torch = pytest.importorskip("torch")
    model = {"w": torch.zeros(1000)}
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        old = weakref.ref(model["w"])
        model["w"] = torch.ones(1000)
        publisher.publish(2)
        gc.collect()
        until(lambda: old() is None, 5)
