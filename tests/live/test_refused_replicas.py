"""A replica that is refused: it hears why, and the trainer's next report has it by its name."""

from contextlib import nullcontext

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import DTypeMismatch, PlanError, SpecError
from live.one_process import in_background

MODEL = {"w": np.zeros(4, np.float32), "b": np.ones(2, np.float32)}
REFUSED = {
    "a dtype": ({"w": np.zeros(4, np.float16), "b": np.ones(2, np.float32)}, "f32"),
    "a shape": ({"w": np.zeros(5, np.float32), "b": np.ones(2, np.float32)}, "(4,)"),
    "a missing name": ({**MODEL, "c": np.zeros(1)}, "'c'"),
    "an extra name": ({"w": np.zeros(4, np.float32)}, "'b'"),
}


def copied():
    return {name: each.copy() for name, each in MODEL.items()}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_replica_is_in_the_next_report_with_the_reason(address, kind):
    engine, reason = REFUSED[kind]
    before = {name: each.copy() for name, each in engine.items()}
    with fw.Publisher(copied(), address) as publisher:
        with pytest.raises(fw.FlyweightError):
            fw.Replica(engine, address, name="engine 7")
        report = publisher.publish(1)
        (failed,) = report.failed
        assert (failed.name, failed.nbytes, failed.is_touched) == ("engine 7", 0, False)
        assert reason in failed.error
        assert "1 failed" in str(report)
        assert reason in str(report)
        assert publisher.publish(2).replicas == ()
    assert all(np.array_equal(engine[name], before[name]) for name in engine)


def test_a_publish_that_waits_in_vain_names_the_refused(address):
    with fw.Publisher(copied(), address) as publisher:
        with pytest.raises(DTypeMismatch):
            fw.Replica(REFUSED["a dtype"][0], address, name="engine 7")
        (failed,) = publisher.publish(1, num_replicas=1, timeout_seconds=0.2).failed
        assert failed.name == "engine 7"


def test_a_replica_that_is_refused_and_then_agrees_is_not_reported(address):
    with fw.Publisher(copied(), address, keep="memory") as publisher:
        with pytest.raises(PlanError):
            fw.Replica(REFUSED["a missing name"][0], address, name="engine 7")
        with (
            fw.Replica(copied(), address, name="engine 7") as replica,
            in_background(replica.update, timeout_seconds=LIMIT) as result,
        ):
            until(lambda: publisher.waiting)
            report = publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
            assert [(each.name, each.error) for each in report.replicas] == [("engine 7", "")]
            assert result().version == 1


@pytest.mark.parametrize("has_publisher", [True, False])
def test_a_model_that_cannot_be_written_is_refused_at_once(address, has_publisher):
    engine = copied()
    engine["b"].setflags(write=False)
    with (
        fw.Publisher(copied(), address) if has_publisher else nullcontext(),
        pytest.raises(SpecError, match="read-only.*'b'"),
    ):
        fw.Replica(engine, address)


def test_a_refused_replica_costs_others_nothing(address):
    arrays = {name: np.zeros_like(each) for name, each in MODEL.items()}
    with (
        fw.Publisher(copied(), address, keep="memory") as publisher,
        fw.Replica(arrays, address, name="good") as good,
    ):
        publisher.publish(1)
        for engine, _ in REFUSED.values():
            with pytest.raises(fw.FlyweightError):
                fw.Replica(engine, address)
        assert good.update(timeout_seconds=LIMIT).version == 1
        assert all(np.array_equal(arrays[name], each) for name, each in MODEL.items())
