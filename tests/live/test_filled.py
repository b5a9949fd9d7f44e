"""Memory that cannot be mapped: the trainer writes it into staging of the engine, on one host."""

import gc
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from child_processes import LIMIT, resources, settled, until
from flyweight.errors import DigestMismatch, TransferTimeout, TransportError
from flyweight.live import Publisher, Replica
from live.live_processes import LARGE, TOKEN, at, check_holds, check_next_update, once
from live.one_process import check_next_update as check_both
from live.one_process import fill, holds, in_background, model, raising, reader, staged


@pytest.fixture
def pair():
    """Return a publisher, its weights, a replica of it and its arrays."""
    weights, arrays = model(1), model()
    with (
        Publisher(weights, "tcp://127.0.0.1:0", token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, "filled", name="engine") as sink,
    ):
        yield source, weights, sink, arrays


def staging_of(replica):
    return staged(replica).memory[0].segment


def test_staging_is_used_again_for_the_next_version(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    sink.update(timeout_seconds=LIMIT)
    before = staging_of(sink).start
    check_both(source, weights, (sink, arrays))
    assert staging_of(sink).start == before


@pytest.mark.parametrize("point", ["fill", "filled"])
def test_staging_of_a_fill_that_failed_is_never_used_again(pair, point, monkeypatch):
    """FAULTS 8: what a holder may write late belongs to one attempt."""
    monkeypatch.setattr("flyweight.live.publisher.RECLAIM_SECONDS", 0.2)
    source, weights, sink, arrays = pair
    check_both(source, weights, (sink, arrays))
    before, may_write, has_written = staging_of(sink).start, threading.Event(), threading.Event()

    def wait():
        assert may_write.wait(LIMIT)
        has_written.set()

    with at(point, once(wait)):
        fill(weights, 2)
        source.publish(version=500)
        with pytest.raises(TransferTimeout):
            sink.update(timeout_seconds=0.5)
        source.withdraw(timeout_seconds=0.1)
        fill(weights, 3)
        source.publish(501)
        assert sink.update(timeout_seconds=LIMIT).version == 501
        assert staging_of(sink).start != before
        may_write.set()  # only now the trainer writes what was asked for first
        assert has_written.wait(LIMIT)
    assert holds(arrays, 3)
    check_both(source, weights, (sink, arrays))


def test_a_fill_that_a_step_of_the_trainer_spoiled_is_noticed_before_the_pause(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    paused = []
    with (
        at("leased", once(lambda: fill(weights, 2))),
        pytest.raises(DigestMismatch, match="as they arrived"),
    ):
        sink.update(timeout_seconds=LIMIT, before=paused.append)
    assert not paused
    assert holds(arrays, 0)
    check_both(source, weights, (sink, arrays))


def test_attempts_that_failed_leave_no_memory_behind(pair):
    """FAULTS 25: staging that was dropped, and what the trainer had mapped of it."""
    source, weights, sink, arrays = pair
    check_both(source, weights, (sink, arrays))
    gc.collect()
    before = resources()
    for version in range(1000, 1003):
        source.withdraw()
        fill(weights, version)
        source.publish(version)
        with at("leased", once(lambda: fill(weights, 7))), pytest.raises(DigestMismatch):
            sink.update(timeout_seconds=LIMIT)
    check_both(source, weights, (sink, arrays))
    gc.collect()
    assert settled(before, 5)["mapped"] == before["mapped"]


def test_any_number_of_fills_may_fail(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    for _ in range(70):  # more than a connection may share
        with at("leased", once(lambda: fill(weights, 7))), pytest.raises(DigestMismatch):
            sink.update(timeout_seconds=LIMIT)
        fill(weights, 1)
    assert sink.update(timeout_seconds=LIMIT).version == 1
    assert holds(arrays, 1)


def test_a_fill_that_is_refused_costs_one_update(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    with at("fill", once(lambda: raising(TransportError("no"))())), pytest.raises(TransportError):
        sink.update(timeout_seconds=LIMIT)
    assert holds(arrays, 0)
    check_both(source, weights, (sink, arrays))


def test_a_reader_that_leaves_in_the_middle_of_a_fill_costs_the_trainer_nothing(pair):
    source, weights, _, _ = pair
    arrays = model()
    with ExitStack() as stack:
        leaver = stack.enter_context(reader(arrays, source.address, "filled", name="leaver"))
        source.publish(1)
        with (
            at("fill", once(leaver._link.session.front.channel.shut)),
            in_background(leaver.update, timeout_seconds=LIMIT) as result,
        ):
            assert isinstance(result(), TransportError)
        until(lambda: "leaver" not in source.replicas)
        source.withdraw(timeout_seconds=LIMIT)
        assert holds(arrays, 0)
        check_both(source, weights, (leaver, arrays))


def test_strided_and_tiny_tensors_are_filled(tmp_path):
    whole = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
    weights = {
        "columns": whole[:, ::3],
        "rows": whole[::2].T,
        "one": np.float64([7]),
        "none": whole[:0],
    }
    arrays = {name: np.zeros(each.shape, each.dtype) for name, each in weights.items()}
    with (
        Publisher(weights, f"unix:{tmp_path}/t", keep="in_place") as source,
        Replica(arrays, source.address, transport="filled") as sink,
    ):
        source.publish(1)
        assert sink.update(timeout_seconds=LIMIT).transport == "filled"
        assert all(np.array_equal(arrays[name], weights[name]) for name in weights)


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("point", ["fill", "filled"])
def test_a_trainer_killed_or_stopped_in_the_middle_of_a_fill_leaves_the_old_version(
    processes, point, is_killed
):
    trainer = processes.trainer(shapes=LARGE)
    address = trainer.told()
    engine = processes.engine(address, name="engine", transport="filled", shapes=LARGE)
    engine.told()
    check_next_update([trainer], [engine], 1)
    engine.send(("update", {"timeout_seconds": LIMIT if is_killed else 5}))
    trainer.send(
        ("publish in the background", 2, {"waiting": 1, "stop_at": point, "timeout_seconds": LIMIT})
    )
    assert trainer.told() == point
    if is_killed:
        trainer.kill()
        trainer.join()
        trainer = processes.trainer(address, shapes=LARGE)
    else:
        trainer.stop()
    found = engine.told()
    assert ("PeerLost" if is_killed else "TransferTimeout") in found["error"]
    check_holds(found, 1)
    if is_killed:
        trainer.told()
    else:
        trainer.go_on()
        trainer.send("go on")
        trainer.send(("end of publish",))
        assert trainer.told() == "ended"
    check_next_update([trainer], [engine], 3)
