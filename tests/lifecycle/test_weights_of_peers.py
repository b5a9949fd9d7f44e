"""An engine whose trainer is gone: other replicas come before snapshots, and nothing goes back."""

from contextlib import ExitStack

import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import TransferTimeout
from flyweight.lifecycle.weights import NearestWeights, StoredWeights
from flyweight.live.planner import Planner
from flyweight.ports import UpdateOptions
from live_rounds import delayed, updated
from versioned_models import holds, weights

SNAPSHOT = 3


@pytest.fixture
def served(tmp_path, address, threads):
    """Where a replica serves what a trainer that is gone has published."""
    with ExitStack() as stack:

        def serve(version):
            place = f"unix:{tmp_path}/served"
            with fw.Publisher(weights(version), address) as publisher:
                holder = stack.enter_context(fw.Replica(weights(50), address, serve_on=place))
                updated(threads, publisher, holder, version)
            return place

        yield serve


@pytest.fixture
def nearest(tmp_path, address):
    """Weights from a publisher that is gone, from others, or from version 3 in files."""
    fw.save(weights(SNAPSHOT), tmp_path / "run", version=SNAPSHOT)
    with ExitStack() as stack:

        def make(*peers):
            model = weights(51)
            replica = stack.enter_context(fw.Replica(model, address, peers=peers))
            return NearestWeights(replica, StoredWeights(model, tmp_path / "run")), model

        yield make


def take(weights, seconds, version=None):
    return weights.take(UpdateOptions(version=version, timeout_seconds=seconds))


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["at once", "slow"])
def test_another_replica_is_asked_before_a_snapshot_is_loaded(
    served, nearest, monkeypatch, seconds
):
    source, model = nearest(served(4))
    delayed(monkeypatch, Planner, "_agreed", seconds)
    assert take(source, LIMIT).origin == "published"
    assert (source.version, holds(model, 4)) == (4, True)


def test_a_snapshot_is_loaded_soon_if_no_replica_is_there(nearest, tmp_path):
    source, model = nearest(f"unix:{tmp_path}/nobody")
    report = take(source, 600)
    assert (report.origin, source.version) == ("snapshot", SNAPSHOT)
    assert holds(model, SNAPSHOT)


def test_an_engine_does_not_go_back_from_a_snapshot_to_what_others_hold(served, nearest, threads):
    place = served(2)
    source, model = nearest(place)
    taking = threads.submit(take, source, 3 * LIMIT, SNAPSHOT)
    assert taking.result(LIMIT).origin == "snapshot"  # who lacks the version is not waited for
    with pytest.raises(TransferTimeout):
        take(source, 1)
    assert (source.version, holds(model, SNAPSHOT)) == (SNAPSHOT, True)
    assert take(source, LIMIT, 2).version == 2  # it was asked for
    assert holds(model, 2)
