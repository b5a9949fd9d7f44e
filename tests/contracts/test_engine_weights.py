"""What every source of an engine's Weights promises. A new one joins by a line in WEIGHTS."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time
from fakes import FakeWeights
from flyweight.errors import PeerLost, TransferTimeout, VersionError
from flyweight.lifecycle.weights import StoredWeights
from flyweight.ports import UpdateOptions, Weights

SOON, LATE = 0.3, 2 * LIMIT


@dataclass(frozen=True)
class Held:
    """Weights, the model that they fill, and how a version with one value becomes available."""

    weights: Weights
    model: dict
    publish: Callable[[int], None]


def zeros():
    return {"w": np.zeros(1000, np.float32)}


def fill(model, value):
    model["w"][:] = value
    return model


@contextmanager
def stored(tmp_path):
    model = zeros()

    def publish(version):
        fw.save(fill(zeros(), version), tmp_path / "run", version=version)

    yield Held(StoredWeights(model, tmp_path / "run"), model, publish)


@contextmanager
def live(tmp_path, **options):
    model, trainer = zeros(), zeros()
    with ExitStack() as stack:
        address = f"unix:{tmp_path}/live"
        publisher = stack.enter_context(fw.Publisher(trainer, address, keep="memory"))
        replica = stack.enter_context(fw.Replica(model, address, **options))

        def publish(version):
            fill(trainer, version)
            publisher.publish(version)

        yield Held(replica, model, publish)


@contextmanager
def fallen_back(tmp_path):
    """Nobody publishes."""
    model = zeros()

    def publish(version):
        fw.save(fill(zeros(), version), tmp_path / "run", version=version)

    with fw.Replica(model, f"unix:{tmp_path}/live", fallback=[tmp_path / "run"]) as replica:
        yield Held(replica, model, publish)


def live_or_stored(tmp_path):
    return live(tmp_path, fallback=[tmp_path / "run"])


@contextmanager
def third_party(tmp_path):
    model = zeros()
    weights = FakeWeights(lambda version: fill(model, version))
    yield Held(weights, model, weights.add)


WEIGHTS = {
    "a replica": live,
    "snapshots": stored,
    "a replica that may fall back": live_or_stored,
    "a replica that falls back on snapshots": fallen_back,
    "a third party's": third_party,
}


@pytest.fixture(params=WEIGHTS)
def held(request, tmp_path):
    with WEIGHTS[request.param](tmp_path) as held:
        yield held


def update(
    held,
    version=None,
    *,
    before=lambda version: None,
    seconds=LATE,
    is_over=lambda: False,
    **options,
):
    return held.weights.take(
        UpdateOptions(
            version=version, timeout_seconds=seconds, before=before, is_over=is_over, **options
        )
    )


def test_a_version_is_held_once_it_is_whole_and_none_before(held):
    assert held.weights.version is None
    held.publish(1)
    assert held.weights.version is None
    report = update(held)
    assert (report.version, held.weights.version) == (1, 1)
    assert (held.model["w"] == 1).all()


def test_nothing_is_written_before_it_is_announced(held):
    held.publish(3)
    seen = []
    update(held, before=lambda version: seen.append((version, held.model["w"].max())))
    assert seen == [(3, 0)]


def test_what_before_raises_ends_the_update_and_leaves_the_old_version(held):
    held.publish(1)
    update(held)
    held.publish(2)

    def refuse(version):
        raise VersionError("not now")

    with pytest.raises(VersionError, match="not now"):
        update(held, before=refuse)
    assert held.weights.version == 1
    assert (held.model["w"] == 1).all()
    assert update(held).version == 2


def test_a_version_that_is_held_is_not_transferred_again(held):
    held.publish(1)
    update(held)
    announced = []
    assert update(held, 1, before=announced.append).version == 1
    assert update(held, may_keep=True, before=announced.append).version == 1
    assert announced == []


def test_the_next_version_is_waited_for_until_the_deadline(held):
    held.publish(1)
    update(held)
    with in_time(SOON), pytest.raises((TransferTimeout, PeerLost)):
        update(held, seconds=SOON)


def test_a_wait_ends_early_once_it_is_over_and_woken(held):
    held.publish(1)
    update(held)
    is_over = threading.Event()

    def end():
        is_over.set()
        held.weights.wake()

    timer = threading.Timer(SOON, end)  # an update that begins to wait only later ends as well
    timer.start()
    with in_time(0), pytest.raises((TransferTimeout, PeerLost)):
        update(held, seconds=LATE, is_over=is_over.is_set)
    timer.join(LIMIT)


def test_what_is_forgotten_is_transferred_again(held):
    held.publish(1)
    update(held)
    fill(held.model, 0)
    held.weights.forget("its memory was released")
    assert held.weights.version is None
    assert update(held, 1).version == 1
    assert (held.model["w"] == 1).all()


def test_a_session_is_told_while_a_version_is_held(held):
    held.publish(1)
    update(held)
    assert held.weights.session
