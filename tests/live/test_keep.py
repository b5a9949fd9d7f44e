"""What a publisher keeps between two publishes: nothing, a copy, or the model's own memory."""

import threading
from time import monotonic

import pytest

from child_processes import LIMIT, resources, settled, until
from flyweight.errors import (
    DigestMismatch,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live import Publisher
from live.live_processes import TOKEN, at, once
from live.one_process import (
    check_next_update,
    fill,
    holds,
    in_background,
    is_offered,
    mappable,
    model,
    reader,
)

ADDRESS = "tcp://127.0.0.1:0"
WAYS = ["mapped", "filled", "read"]


@pytest.mark.parametrize("transport", WAYS)
def test_a_copy_is_there_for_late_engines_while_the_trainer_goes_on(transport):
    weights = model(1)
    with Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source:
        report = source.publish(1)  # returns at once: nobody waits
        assert not report.replicas
        fill(weights, 2)
        for name in ("late", "later"):
            arrays = model()
            with reader(arrays, source.address, transport, name=name) as sink:
                assert sink.update(timeout_seconds=LIMIT).version == 1
                assert holds(arrays, 1)


def test_publish_with_a_copy_does_not_wait_for_engines_that_take_it():
    weights, arrays = model(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address, name="engine") as sink,
    ):
        is_pausing, may_go_on = threading.Event(), threading.Event()

        def before(version):
            is_pausing.set()
            assert may_go_on.wait(LIMIT)

        with in_background(sink.update, timeout_seconds=LIMIT, before=before) as result:
            until(lambda: source.waiting)
            source.publish(1, timeout_seconds=600)  # it would hang
            fill(weights, 2)
            assert is_pausing.wait(LIMIT)
            may_go_on.set()
            assert result().version == 1
        assert holds(arrays, 1)
        check_next_update(source, weights, (sink, arrays))


def test_publish_with_a_copy_waits_for_as_many_engines_as_are_asked_for():
    weights, arrays = model(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address, name="engine") as sink,
        in_background(sink.update, timeout_seconds=LIMIT) as result,
    ):
        report = source.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        assert [each.name for each in report.replicas] == ["engine"]
        assert result().version == 1


def test_a_step_while_the_copy_is_made_is_noticed():
    weights, arrays = model(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address) as sink,
    ):
        with (
            at("copying", once(lambda: fill({"b": weights["b"]}, 2))),
            pytest.raises(DigestMismatch, match="1 tensors changed while they were copied: 'b'"),
        ):
            source.publish(1)
        with pytest.raises(TransferTimeout):
            sink.update(timeout_seconds=0.2)
        with pytest.raises(VersionError, match="take 2"):
            source.publish(1)
        check_next_update(source, weights, (sink, arrays))


def test_the_copy_is_given_back_on_close():
    before = resources()
    source = Publisher(model(1, {"a": (1 << 20,)}), ADDRESS, token=TOKEN, keep="memory")
    for version in range(1, 4):
        source.publish(version)
    assert resources()["mapped"] == before["mapped"] + 1
    source.close()
    assert settled(before) == before


@pytest.mark.parametrize("transport", WAYS)
def test_the_models_own_memory_is_offered_until_it_is_withdrawn(transport):
    weights, arrays = (mappable if transport == "mapped" else model)(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, transport) as sink,
    ):
        source.publish(1)
        assert sink.update(timeout_seconds=LIMIT).version == 1
        assert holds(arrays, 1)
        source.withdraw()
        source.withdraw()  # nothing is offered: it does nothing
        fill(weights, 2)
        late_arrays = model()
        with reader(late_arrays, source.address, transport, name="late") as late:
            if transport == "mapped":
                with pytest.raises(TransferTimeout, match="no version"):
                    late.update(timeout_seconds=0.3)
                assert holds(late_arrays, 0)
            else:  # from the first one's staging
                assert late.update(timeout_seconds=LIMIT).version == 1
                assert holds(late_arrays, 1)
        check_next_update(source, weights, (sink, arrays))


def test_withdraw_waits_for_engines_that_read():
    weights, arrays = mappable(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, "mapped") as sink,
    ):
        source.publish(1)
        is_pausing, may_go_on = threading.Event(), threading.Event()

        def before(version):
            is_pausing.set()
            assert may_go_on.wait(LIMIT)

        with in_background(sink.update, timeout_seconds=LIMIT, before=before) as result:
            assert is_pausing.wait(LIMIT)
            with in_background(source.withdraw) as withdrawn:
                until(lambda: not is_offered(source, 1))
                may_go_on.set()
                assert withdrawn() is None
            fill(weights, 2)
            assert result().version == 1
        assert holds(arrays, 1)
        check_next_update(source, weights, (sink, arrays))


def test_background_with_a_copy_lets_the_trainer_step_after_wait_copied():
    weights, arrays = model(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address) as sink,
        in_background(sink.update, timeout_seconds=LIMIT) as result,
    ):
        publication = source.publish(1, background=True, num_replicas=1, timeout_seconds=LIMIT)
        publication.wait_copied(LIMIT)
        fill(weights, 2)
        assert publication.wait(LIMIT).version == 1
        assert publication.is_done
        assert result().version == 1
        assert holds(arrays, 1)


def test_close_waits_for_a_publish_in_the_background(tmp_path):
    for version in range(10):  # the next publisher finds the address free
        with Publisher(model(), f"unix:{tmp_path}/policy", keep="memory") as source:
            source.publish(version, background=True)


def test_background_without_a_copy_is_copied_once_nobody_reads():
    weights, arrays = mappable(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN) as source,
        reader(arrays, source.address) as sink,
    ):
        is_pausing, may_go_on = threading.Event(), threading.Event()

        def before(version):
            is_pausing.set()
            assert may_go_on.wait(LIMIT)

        with in_background(sink.update, timeout_seconds=LIMIT, before=before) as result:
            publication = source.publish(1, background=True, num_replicas=1, timeout_seconds=LIMIT)
            assert is_pausing.wait(LIMIT)
            assert not publication.is_copied
            with pytest.raises(TransferTimeout, match="still being copied"):
                publication.wait_copied(0.01)
            may_go_on.set()
            publication.wait_copied(LIMIT)
            fill(weights, 2)
            assert result().version == 1
        assert holds(arrays, 1)
        check_next_update(source, weights, (sink, arrays))


def test_background_in_place_is_refused():
    with (
        Publisher(model(1), ADDRESS, token=TOKEN, keep="in_place") as source,
        pytest.raises(SpecError, match="background=True with keep='in_place'"),
    ):
        source.publish(1, background=True)


def test_keep_is_one_of_three():
    with pytest.raises(SpecError, match="keep is 'disk', not None, 'memory' or 'in_place'"):
        Publisher(model(), ADDRESS, token=TOKEN, keep="disk")


def test_a_pause_may_take_longer_than_a_lease_while_the_version_is_kept(monkeypatch):
    monkeypatch.setattr("flyweight.live.publisher.RECLAIM_SECONDS", 2.0)
    weights, arrays = mappable(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, "mapped", name="engine") as sink,
    ):
        source.publish(1)

        def pause(version):
            end = monotonic() + 2.1
            until(lambda: monotonic() > end)

        assert sink.update(timeout_seconds=LIMIT, before=pause).version == 1
        assert holds(arrays, 1)

        def pause_too_long(version):
            pause(version)
            source.withdraw()

        source.publish(2)
        with pytest.raises((TransportError, VersionError)):
            sink.update(timeout_seconds=LIMIT, before=pause_too_long)
        assert sink.version == 1
        assert holds(arrays, 1)
