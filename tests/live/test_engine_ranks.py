"""All ranks of an engine change their version together, or none does."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import FlyweightError, SpecError

SECONDS = 10
LAYOUT = fw.ModelLayout.from_json(
    '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"0": "tp"}}]}'
)
WHOLE = np.arange(24.0).reshape(6, 4)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


class Engine:
    """Two ranks of one engine, in one process."""

    def __init__(self, address, name="engine"):
        self.halves = [{"w": np.zeros((3, 4))} for _ in range(2)]
        self.ranks = [
            fw.Replica(half, address, name=name, layout=LAYOUT, rank=rank, num_ranks=2)
            for rank, half in enumerate(self.halves)
        ]

    def update(self, pool, **options):
        options = {"timeout_seconds": SECONDS, **options}
        return [pool.submit(rank.update, **options) for rank in self.ranks]

    @property
    def weights(self):
        return np.concatenate([half["w"] for half in self.halves])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.ranks:
            each.close()


def test_ranks_of_a_replica_commit_together(address, pool):
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        assert publisher.replicas == ["engine"]
        for version in (1, 2, 3):
            model["w"] += version
            updates = engine.update(pool)
            report = publisher.publish(version, num_replicas=1)
            assert [each.result(SECONDS).version for each in updates] == [version] * 2
            assert [each.name for each in report.replicas] == ["engine"]
            assert report.nbytes == WHOLE.nbytes
            assert engine.weights.tobytes() == model["w"].tobytes()


def test_no_rank_writes_before_all_have_drained(address, pool):
    model, is_drained, seen = {"w": WHOLE.copy()}, threading.Event(), []

    def slow(version):
        assert is_drained.wait(SECONDS)

    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        first = pool.submit(engine.ranks[0].update, timeout_seconds=SECONDS)
        second = pool.submit(engine.ranks[1].update, timeout_seconds=SECONDS, before=slow)
        publish = pool.submit(publisher.publish, 1, num_replicas=1)
        threading.Event().wait(0.5)
        seen.append(engine.weights.any())
        is_drained.set()
        assert publish.result(SECONDS).failed == ()
        assert first.result(SECONDS).version == second.result(SECONDS).version == 1
    assert seen == [False]


def test_a_rank_that_cannot_drain_leaves_all_ranks_as_they_were(address, pool):
    model = {"w": WHOLE.copy()}

    def refuse(version):
        raise RuntimeError("a request never ends")

    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        updates = engine.update(pool)
        publisher.publish(1, num_replicas=1)
        assert [each.result(SECONDS).version for each in updates] == [1, 1]
        model["w"] += 1
        first = pool.submit(engine.ranks[0].update, timeout_seconds=SECONDS)
        second = pool.submit(engine.ranks[1].update, timeout_seconds=SECONDS, before=refuse)
        (failed,) = publisher.publish(2, num_replicas=1).failed
        assert "rank 1 of 'engine'" in str(failed.error)
        assert not failed.is_touched
        with pytest.raises(FlyweightError, match="a request never ends"):
            first.result(SECONDS)
        with pytest.raises(RuntimeError):
            second.result(SECONDS)
        assert [(each.version, each.state) for each in engine.ranks] == [(1, "ready")] * 2
        assert engine.weights.tobytes() == WHOLE.tobytes()


def test_a_replica_of_several_ranks_needs_a_name(address):
    with pytest.raises(SpecError, match="need a name that they share"):
        fw.Replica({"w": np.zeros(3)}, address, rank=0, num_ranks=2)
