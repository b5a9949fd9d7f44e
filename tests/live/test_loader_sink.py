"""An engine's own loader as the target of updates."""

import os

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import (
    PeerFailed,
    TransportError,
)
from live_rounds import updated
from versioned_models import assign, holds, weights


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

    def odd(named):
        raise FileNotFoundError(f"no such file: {os.fsdecode(b'a' + bytes([255]))}")  # not UTF-8

    cases = [
        (picky, PeerFailed, "no such parameter"),
        (lazy, TransportError, "took 1 of 7"),
        (odd, PeerFailed, "no such file"),
    ]
    with fw.Publisher(weights(1), address) as publisher:
        for version, (load, told, text) in enumerate(cases):
            with fw.Replica(load, address, framework="numpy") as replica:
                future = threads.submit(replica.update, timeout_seconds=LIMIT)
                report = publisher.publish(version, num_replicas=1)
                with pytest.raises((ValueError, OSError, TransportError), match=text):
                    future.result(LIMIT)
                assert isinstance(report.replicas[0].error, told)
                assert text in str(report.replicas[0].error)
                assert replica.state == "failed"


def test_an_iterator_that_a_loader_keeps_is_over(address, threads):
    kept = []

    def load(named):
        kept.append(named)
        if len(kept) == 1:
            raise ValueError("no")
        list(named)

    with (
        fw.Publisher(weights(1), address, bucket_bytes=4096) as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        publisher.publish(1, num_replicas=1)
        with pytest.raises(ValueError, match="no"):
            future.result(LIMIT)
        assert list(kept[0]) == []
        updated(threads, publisher, replica, 2)
