"""A replica that is refused: the trainer hears of it, with the reason."""

from contextlib import nullcontext

import numpy as np
import pytest

import flyweight as fw
from child_processes import until
from flyweight.errors import DTypeMismatch, PlanError, SpecError, TransferTimeout

MODEL = {"w": np.zeros(4, np.float32), "b": np.ones(2, np.float32)}
REFUSED = {
    "a dtype": ({"w": np.zeros(4, np.float16), "b": np.ones(2, np.float32)}, "f32"),
    "a shape": ({"w": np.zeros(5, np.float32), "b": np.ones(2, np.float32)}, "(4,)"),
    "a missing name": ({**MODEL, "c": np.zeros(1)}, "'c'"),
    "an extra name": ({"w": np.zeros(4, np.float32)}, "'b'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_replica_is_in_the_next_report_with_the_reason(address, kind):
    engine, reason = REFUSED[kind]
    with fw.Publisher(MODEL, address) as publisher:
        with pytest.raises(fw.FlyweightError):
            fw.Replica(engine, address, name="engine 7")
        report = publisher.publish(1)
        (failed,) = report.failed
        assert (failed.name, failed.nbytes, failed.is_touched) == ("engine 7", 0, False)
        assert reason in str(failed.error)
        assert "1 failed" in str(report)
        assert reason in str(report)
        assert publisher.publish(2).replicas == ()


def test_a_publish_that_waits_in_vain_names_the_refused(address):
    with fw.Publisher(MODEL, address) as publisher:
        with pytest.raises(DTypeMismatch):
            fw.Replica(REFUSED["a dtype"][0], address, name="engine 7")
        with pytest.raises(TransferTimeout, match="engine 7.*'w'.*f32"):
            publisher.publish(1, num_replicas=1, timeout_seconds=0.2)


def test_a_replica_that_is_refused_and_then_agrees_is_not_reported(address):
    with fw.Publisher(MODEL, address) as publisher:
        with pytest.raises(PlanError):
            fw.Replica(REFUSED["a missing name"][0], address, name="engine 7")
        with fw.Replica(
            {name: each.copy() for name, each in MODEL.items()}, address, name="engine 7"
        ):
            until(lambda: publisher.replicas)
            assert publisher.publish(1).replicas == ()


@pytest.mark.parametrize("has_publisher", [True, False])
def test_a_model_that_cannot_be_written_is_refused_at_once(address, has_publisher):
    engine = {name: array.copy() for name, array in MODEL.items()}
    engine["b"].setflags(write=False)
    with (
        fw.Publisher(MODEL, address) if has_publisher else nullcontext(),
        pytest.raises(SpecError, match="read-only.*'b'"),
    ):
        fw.Replica(engine, address)
