"""Options that make no sense are refused, with both values."""

from contextlib import nullcontext

import numpy as np
import pytest

import flyweight as fw
from child_processes import resources, settled
from flyweight.errors import (
    SpecError,
)
from live_rounds import (
    CONTENT,
    updated,
)
from peers import shared
from versioned_models import weights


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, None, "3", True])
def test_a_time_that_is_none_is_refused(address, seconds):
    with fw.Publisher(weights(1), address) as publisher, fw.Replica(weights(2), address) as replica:
        with pytest.raises(SpecError, match="timeout_seconds"):
            replica.update(timeout_seconds=seconds)
        if seconds is not None:
            with pytest.raises(SpecError, match="timeout_seconds"):
                publisher.publish(1, timeout_seconds=seconds)
            with pytest.raises(SpecError, match="silence_seconds"):
                fw.Publisher(weights(1), address + "2", silence_seconds=seconds)


@pytest.mark.parametrize(
    "options",
    [
        *({"depth": 1.5}, {"depth": 0}, {"bucket_bytes": 5000.5}, {"transport": "best"}),
        *({"network_engine": "rdma"}, {"token": 5}),
    ],
    ids=str,
)
def test_options_of_no_sense_are_refused_and_leave_nothing(address, options):
    before = resources()
    with pytest.raises(SpecError):
        fw.Publisher(weights(1), address, **options)
    assert settled(before) == before
    fw.Publisher(weights(1), address).close()


def test_what_is_no_model_is_refused_alike_on_both_sides(address):
    with pytest.raises(SpecError, match="no model"):
        fw.Publisher(5, address)
    with pytest.raises(SpecError, match="no model"):
        fw.Replica(5, address)


def test_strategy_is_a_deprecated_name_of_transport(address, threads):
    """Both keywords choose how tensors travel; the old one warns."""
    reports = []
    for option in ({"transport": "host"}, {"strategy": "host"}):
        expected = pytest.warns(DeprecationWarning, match="transport=")
        with expected if "strategy" in option else nullcontext():
            publisher = fw.Publisher({"w": shared(CONTENT)}, address, **option)
        with publisher, fw.Replica({"w": np.zeros_like(CONTENT)}, address) as replica:
            reports.append(updated(threads, publisher, replica, 1)[0])
    assert [each.replicas[0].strategy for each in reports] == ["host", "host"]
    with (
        pytest.warns(DeprecationWarning, match="transport="),
        pytest.raises(SpecError, match="'best'"),
    ):
        fw.Publisher(weights(1), address, strategy="best")
