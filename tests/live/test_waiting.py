"""What an update waits for, what ends the wait, and what it refuses."""

import threading

import pytest

from child_processes import LIMIT, in_time, until
from flyweight.errors import LifecycleError, TransferTimeout, TransportError, VersionError
from flyweight.live import Publisher
from live.live_processes import TOKEN, at, free_address, once
from live.one_process import (
    check_next_update,
    fill,
    holds,
    in_background,
    mappable,
    model,
    raising,
    reader,
    taken,
)

ADDRESS = "tcp://127.0.0.1:0"
WAYS = ["mapped", "filled", "read"]


@pytest.fixture(params=WAYS)
def transport(request):
    return request.param


@pytest.fixture
def pair(transport):
    """Return a publisher that keeps what it has, its weights, a replica and its arrays."""
    weights, arrays = (mappable if transport == "mapped" else model)(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, transport, name="engine") as sink,
    ):
        yield source, weights, sink, arrays


def test_the_newest_version_is_known_without_an_update(pair):
    source, weights, sink, _ = pair
    assert sink.newest is None
    source.publish(1)
    until(lambda: sink.newest == 1)
    sink.update(timeout_seconds=LIMIT)
    source.withdraw()
    fill(weights, 2)
    source.publish(2)
    until(lambda: sink.newest == 2)
    assert sink.version == 1


def test_a_version_that_an_update_waited_for_is_the_newest(pair):
    source, _, sink, _ = pair
    taken(source, 1, sink)
    assert (sink.version, sink.newest) == (1, 1)


def test_other_threads_may_look_while_an_update_waits(pair):
    source, weights, sink, arrays = pair
    with in_background(sink.update, timeout_seconds=LIMIT) as result:
        until(lambda: source.waiting)
        for _ in range(100):
            assert sink.is_connected
            assert sink.newest is None
        is_over = threading.Event()

        def look():
            while not is_over.is_set():
                assert sink.newest in (None, 1)
                assert sink.is_connected

        with in_background(look) as looked:
            for _ in range(3):
                sink.wake()
            source.publish(1)
            assert getattr(result(), "version", result()) == 1
            is_over.set()
            assert looked() is None
    check_next_update(source, weights, (sink, arrays))


def test_wake_ends_the_wait_if_it_is_over(pair):
    source, weights, sink, arrays = pair
    is_over = threading.Event()
    with in_background(sink.update, timeout_seconds=600, is_over=is_over.is_set) as result:
        until(lambda: source.waiting)
        sink.wake()  # not over yet
        is_over.set()
        sink.wake()
        assert isinstance(result(), TransferTimeout)
    check_next_update(source, weights, (sink, arrays))


def test_may_keep_is_answered_at_once_by_the_last_report(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    report = sink.update(timeout_seconds=LIMIT)
    assert sink.update(may_keep=True, timeout_seconds=600) is report
    assert sink.update(1, timeout_seconds=600) is report
    with pytest.raises(TransferTimeout, match="is the newest"):
        sink.update(timeout_seconds=0.2)
    assert sink.version == 1
    source.withdraw()
    fill(weights, 2)
    source.publish(2)
    assert sink.update(may_keep=True, timeout_seconds=LIMIT).version == 2
    assert holds(arrays, 2)
    check_next_update(source, weights, (sink, arrays))


def test_a_version_that_is_held_is_confirmed_after_newer_ones_and_keeps_no_other(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    report = sink.update(timeout_seconds=LIMIT)
    source.withdraw()
    fill(weights, 2)
    source.publish(2)
    assert sink.update(1, timeout_seconds=600) is report
    assert sink.update(2, may_keep=True, timeout_seconds=LIMIT).version == 2
    with pytest.raises(VersionError, match="version 1 .*cannot come any more"):
        sink.update(1, may_keep=True, timeout_seconds=600)  # though it holds the newest
    assert holds(arrays, 2)


def test_a_version_that_cannot_come_any_more_is_refused_at_once(pair):
    source, weights, sink, arrays = pair
    source.publish(5)
    with pytest.raises(VersionError, match="version 3 .*cannot come any more"):
        sink.update(3, timeout_seconds=600)
    check_next_update(source, weights, (sink, arrays))


def test_a_version_that_is_asked_for_is_waited_for(pair):
    source, weights, sink, arrays = pair
    source.publish(1)
    with in_background(sink.update, 2, timeout_seconds=LIMIT) as result:
        until(lambda: source.waiting)
        source.withdraw()
        fill(weights, 2)
        source.publish(2)
        assert result().version == 2
    assert holds(arrays, 2)


def test_no_version_in_time_changes_nothing(pair):
    source, weights, sink, arrays = pair
    with in_time(0.3), pytest.raises(TransferTimeout, match="no version"):
        sink.update(timeout_seconds=0.3)
    assert str(sink.state) == "EMPTY"
    check_next_update(source, weights, (sink, arrays))


def test_a_publisher_may_start_later(transport):
    address, arrays = free_address(), model()
    weights = (mappable if transport == "mapped" else model)(1)
    with reader(arrays, address, transport) as sink:
        assert not sink.is_connected
        with (
            in_background(sink.update, timeout_seconds=LIMIT) as result,
            Publisher(weights, address, token=TOKEN) as source,
        ):
            source.publish(1, num_replicas=1, timeout_seconds=LIMIT)
            assert result().version == 1
        assert holds(arrays, 1)


def test_a_pause_that_is_refused_keeps_the_old_version(pair):
    source, weights, sink, arrays = pair
    check_next_update(source, weights, (sink, arrays))
    version = sink.version
    fill_and_publish(source, weights, version + 1)
    with pytest.raises(LifecycleError, match="not now"):
        sink.update(timeout_seconds=LIMIT, before=raising(ValueError("not now")))
    assert sink.version == version
    assert holds(arrays, version)
    assert sink.update(timeout_seconds=LIMIT).version == version + 1
    check_next_update(source, weights, (sink, arrays))


def fill_and_publish(source, weights, version):
    source.withdraw()
    fill(weights, version)
    source.publish(version)


def test_an_update_that_is_interrupted_while_it_pauses_keeps_the_old_version(pair):
    source, weights, sink, arrays = pair
    check_next_update(source, weights, (sink, arrays))
    version = sink.version
    fill_and_publish(source, weights, version + 1)
    with pytest.raises(KeyboardInterrupt):
        sink.update(timeout_seconds=LIMIT, before=raising(KeyboardInterrupt()))
    assert sink.version == version
    assert holds(arrays, version)
    check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("point", ["found", "leased", "copy", "copied"])
def test_an_update_that_is_interrupted_can_be_made_again(pair, point):
    source, weights, sink, arrays = pair
    check_next_update(source, weights, (sink, arrays))
    version = sink.version
    fill_and_publish(source, weights, version + 1)
    with at(point, once(lambda: raising(KeyboardInterrupt())())), pytest.raises(KeyboardInterrupt):
        sink.update(timeout_seconds=LIMIT)
    if point in ("found", "leased"):
        assert sink.version == version
        assert holds(arrays, version)
    else:
        assert (sink.version, str(sink.state)) == (None, "FAILED")
    check_next_update(source, weights, (sink, arrays))


def test_verify_refuses_an_unverified_version_before_the_first_write(transport):
    weights, arrays = (mappable if transport == "mapped" else model)(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place", verify=False) as source,
        reader(arrays, source.address, transport) as sink,
    ):
        source.publish(1)
        paused = []
        with pytest.raises(VersionError, match="has no digests, and verify=True was asked for"):
            sink.update(timeout_seconds=LIMIT, verify=True, before=paused.append)
        assert not paused
        assert holds(arrays, 0)
        assert sink.update(timeout_seconds=LIMIT).verified == "nothing"
        assert holds(arrays, 1)
        with pytest.raises(VersionError, match="has no digests"):
            sink.update(1, timeout_seconds=LIMIT, verify=True)
        check_next_update(source, weights, (sink, arrays))


def test_publish_returns_at_once_if_nobody_waits_and_waits_for_num_replicas():
    weights, arrays = mappable(1), model()
    with Publisher(weights, ADDRESS, token=TOKEN) as source:
        assert not source.publish(1, timeout_seconds=600).replicas
        with in_time(0.3):
            assert not source.publish(2, num_replicas=1, timeout_seconds=0.3).replicas
        with (
            reader(arrays, source.address, name="engine") as sink,
            in_background(sink.update, timeout_seconds=LIMIT),
        ):
            report = source.publish(3, num_replicas=1, timeout_seconds=LIMIT)
            assert [each.name for each in report.replicas] == ["engine"]


def test_two_updates_at_once_are_refused(pair):
    source, weights, sink, arrays = pair
    with in_background(sink.update, timeout_seconds=LIMIT) as result:
        until(lambda: source.waiting)
        with pytest.raises(TransportError, match="under way"):
            sink.update()
        source.publish(1)
        assert result().version == 1
    check_next_update(source, weights, (sink, arrays))


def test_follow_yields_every_version_and_ends_by_its_timeout(pair):
    source, weights, sink, arrays = pair
    following = sink.follow(timeout_seconds=0.5)
    for version in (1, 2, 3):
        fill_and_publish(source, weights, version)
        assert next(following).version == version
        assert holds(arrays, version)
    with pytest.raises(TransferTimeout):
        next(following)


def test_an_engine_that_maps_is_nobodys_source(monkeypatch):
    """Whoever was sent to it would wait there for what never comes."""
    weights, arrays = mappable(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, "mapped", name="first") as first,
    ):
        source.publish(1)
        first.update(timeout_seconds=LIMIT)
        late_arrays = model()
        with reader(late_arrays, source.address, "read", name="late") as late:
            assert late.update(timeout_seconds=LIMIT).version == 1
            assert holds(late_arrays, 1)
        source.withdraw()
        later_arrays = model()
        with (
            reader(later_arrays, source.address, "mapped", name="later") as later,
            pytest.raises(TransferTimeout, match="no version"),
        ):
            later.update(timeout_seconds=0.3)
        check_next_update(source, weights, (first, arrays))
