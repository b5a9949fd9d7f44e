"""Faults that a prototype had, each with the number of its row: what must never happen again.

Rows 3, 4, 13, 19 to 21 and 23 are in the tests of one trainer and of ranks, 24 in `transports`.
"""

import os
import threading
from contextlib import ExitStack
from time import monotonic

import numpy as np
import pytest

from child_processes import LIMIT, in_time, until
from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerLost,
    PlanError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live import Publisher, fetch, incoming, messages, publisher, reader, source_rank
from flyweight.live.incoming import Incoming
from flyweight.live.reader import Reader
from live.live_processes import TOKEN, at, once
from live.one_process import (
    check_next_update,
    fill,
    holds,
    in_background,
    is_free,
    is_leased,
    mappable,
    model,
    raising,
    staged,
)
from live.one_process import reader as replica_of

WAYS = ["mapped", "filled", "read"]


@pytest.fixture
def pair():
    """Return what makes a publisher, its weights, a replica and its arrays, for a transport."""
    with ExitStack() as stack:

        def make(transport, **options):
            weights, arrays = (mappable if transport == "mapped" else model)(1), model()
            source = stack.enter_context(
                Publisher(weights, "tcp://127.0.0.1:0", token=TOKEN, **options)
            )
            sink = stack.enter_context(replica_of(arrays, source.address, transport))
            return source, weights, sink, arrays

        yield make


@pytest.mark.parametrize("transport", WAYS)
def test_a_late_answer_to_a_lease_is_never_that_to_the_next_one(pair, transport):
    """FAULTS 1: half of version 1 and half of version 2 were committed as 2."""
    source, weights, sink, arrays = pair(transport, keep="memory")
    source.publish(1)
    is_late = threading.Event()

    def answer_late(number):
        assert is_late.wait(LIMIT)

    with at("leasing", once(lambda: answer_late(0))):
        with pytest.raises(TransferTimeout):
            sink.update(timeout_seconds=0.5)
        fill(weights, 2)
        is_late.set()
        source.publish(2)
        assert sink.update(timeout_seconds=LIMIT).version == 2
    assert holds(arrays, 2)
    check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("transport", WAYS)
def test_a_restarted_trainer_may_publish_a_number_again(tmp_path, transport):
    """FAULTS 2 and 10: staging of the old session was served as the new one, or never left."""
    with ExitStack() as stack:
        first = stack.enter_context(
            Publisher(model(1), "tcp://127.0.0.1:0", token=TOKEN, keep="memory")
        )
        engines = []
        for name in ("parent", "child"):
            arrays = model()
            sink = replica_of(arrays, first.address, transport, name=name)
            engines.append((stack.enter_context(sink), arrays))
        first.publish(5)
        for sink, arrays in engines:
            assert sink.update(timeout_seconds=LIMIT).version == 5
            assert holds(arrays, 1)
        first.close()
        weights = model(2)
        second = stack.enter_context(Publisher(weights, first.address, token=TOKEN, keep="memory"))
        second.publish(5)
        for sink, arrays in engines:
            before = sink.session
            assert sink.update(timeout_seconds=LIMIT).version == 5
            assert holds(arrays, 2)
            assert sink.session != before
        check_next_update(second, weights, *engines)


@pytest.mark.parametrize("transport", WAYS)
@pytest.mark.parametrize("call", ["want", "connect"])
def test_a_first_meeting_that_fails_leaves_nothing_of_the_old_session(
    pair, monkeypatch, transport, call
):
    """FAULTS 3: the second meeting used the old plan, and tensors were scrambled."""
    first, _, sink, arrays = pair(transport, keep="memory")
    first.publish(1)
    sink.update(timeout_seconds=LIMIT)
    first.close()
    weights = dict(reversed(model(2).items()))  # the same tensors in another order
    with Publisher(weights, first.address, token=TOKEN, keep="memory") as second:
        second.publish(2)
        with monkeypatch.context() as patch:
            patch.setattr(Reader, call, raising(TransportError("it failed")))
            with pytest.raises(FlyweightError, match="it failed"):
                sink.update(timeout_seconds=LIMIT)
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert holds(arrays, 2)
        check_next_update(second, weights, (sink, arrays))


def test_both_sides_must_have_worked_out_the_same_plan(pair, monkeypatch):
    """FAULTS 3; invariant 4."""
    source, weights, sink, arrays = pair("mapped", keep="memory")
    source.publish(1)
    sink._link.session.close()
    with monkeypatch.context() as patch:
        patch.setattr(messages.Planned, "kind", property(lambda self: "another"), raising=False)
        with pytest.raises(PlanError, match="has plan another, this reader"):
            sink.update(timeout_seconds=LIMIT)
    assert holds(arrays, 0)
    check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("transport", WAYS)
@pytest.mark.parametrize("keep", [None, "memory", "in_place"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, PeerLost])
def test_a_publish_that_raises_leaves_no_offer_and_no_lease(pair, keep, error, transport):
    """FAULTS 5 and 10; invariant 6; and its number is used up."""
    source, weights, sink, arrays = pair(transport, keep=keep)
    is_leased, has_raised = threading.Event(), threading.Event()

    def hold(number):
        is_leased.set()
        assert has_raised.wait(LIMIT)

    def interrupt(number):
        assert is_leased.wait(LIMIT)
        raise error("a rank")

    with (
        at("leased", once(lambda: hold(0))),
        in_background(sink.update, timeout_seconds=LIMIT) as result,
    ):
        until(lambda: source.waiting)
        with at("serving", interrupt), pytest.raises(error):
            source.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        assert is_free(source, 1)
        fill(weights, 7)  # user code goes on
        has_raised.set()
        if keep != "memory":  # a copy does not change
            assert isinstance(result(), FlyweightError), result()
            assert sink.version is None
    assert sink.version is None or holds(arrays, sink.version)
    with pytest.raises(VersionError, match="does not follow 1, which was offered; take 2"):
        source.publish(1)
    check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("transport", WAYS)
def test_copies_that_were_prepared_for_a_failed_attempt_are_thrown_away(
    pair, monkeypatch, transport
):
    """FAULTS 6: digests that were queued for a failed attempt were taken for the next one."""
    source, weights, sink, arrays = pair(transport, keep="memory")
    source.publish(1)
    closed = []
    with monkeypatch.context() as patch:
        wrong = DigestMismatch("wrong")
        patch.setattr(source_rank, "check_digests", raising(wrong))
        with pytest.raises(DigestMismatch):
            sink.update(timeout_seconds=LIMIT, before=closed.append)
    assert all(each._copies is None for each in sink._link.session.sources.values())
    assert sink.update(timeout_seconds=LIMIT).version == 1
    assert holds(arrays, 1)
    check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("transport", ["filled", "read"])
def test_what_changes_in_staging_after_it_was_verified_is_noticed(pair, transport):
    """FAULTS 8: what a holder writes late was not seen."""
    source, weights, sink, arrays = pair(transport, keep="in_place")
    source.publish(1)

    def before(version):
        staged(sink).memory[0].segment.bytes[5] ^= 1

    with pytest.raises(DigestMismatch, match="where they were written"):
        sink.update(timeout_seconds=LIMIT, before=before)
    assert (sink.version, str(sink.state)) == (None, "FAILED")
    assert sink.update(timeout_seconds=LIMIT).version == 1
    assert holds(arrays, 1)
    check_next_update(source, weights, (sink, arrays))


def test_staging_memory_comes_back_only_without_leases_even_after_ctrl_c(pair, monkeypatch):
    """FAULTS 7: the next update wrote into memory that a child still read; invariant 5."""
    source, weights, parent, arrays = pair("read", keep="memory")
    source.publish(1)
    parent.update(timeout_seconds=LIMIT)
    child_arrays, is_reading, may_go_on = model(), threading.Event(), threading.Event()

    def hold(number):
        is_reading.set()
        assert may_go_on.wait(LIMIT)

    with replica_of(child_arrays, source.address, "read", name="child") as child:
        with (
            at("leased", once(lambda: hold(0))),
            in_background(child.update, timeout_seconds=LIMIT) as result,
        ):
            assert is_reading.wait(LIMIT)
            staging = staged(parent)
            fill(weights, 2)
            source.publish(2)
            with monkeypatch.context() as patch:
                condition = parent._link.shelf._changed
                patch.setattr(condition, "wait_for", raising(KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    parent.update(timeout_seconds=LIMIT)
            assert not parent._link.shelf.leases.readers(staging.id)
            assert parent._link.session._memory is not staging.memory  # it is the shelf's
            assert parent.update(timeout_seconds=LIMIT).version == 2
            may_go_on.set()
            assert getattr(result(), "version", 1) in (1, 2), result()
        assert holds(arrays, 2)
        assert holds(child_arrays, 0) or holds(child_arrays, 2)
        check_next_update(source, weights, (parent, arrays), (child, child_arrays))


@pytest.mark.parametrize("transport", WAYS)
def test_a_pause_that_ends_after_the_deadline_keeps_the_old_version(pair, transport):
    """FAULTS 11; invariant 8."""
    source, weights, sink, arrays = pair(transport, keep="memory")
    source.publish(1)
    late = threading.Event()
    with pytest.raises(TransferTimeout, match="too late to begin"):
        sink.update(timeout_seconds=0.5, before=lambda version: late.wait(0.6))
    assert sink.failure is None
    assert holds(arrays, 0)
    check_next_update(source, weights, (sink, arrays))


def test_the_copy_has_a_budget_of_its_own(pair, monkeypatch):
    """FAULTS 11: what came before the copy used up its time."""
    deadlines, copy = [], Incoming.copy
    monkeypatch.setattr(
        Incoming, "copy", lambda self, end, check: deadlines.append(end) or copy(self, end, check)
    )
    source, _, sink, _ = pair("mapped", keep="memory")
    source.publish(1)
    sink.update(timeout_seconds=5)
    assert deadlines[0] - monotonic() > 30


def test_no_write_begins_that_the_lease_cannot_outlast(pair, monkeypatch):
    """FAULTS 11; invariant 8."""
    source, weights, sink, arrays = pair("mapped", keep="memory")
    source.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(incoming, "_SLOW_BYTES", 1)
        with pytest.raises(TransferTimeout, match=r"keeps version 1 .* and the copy may take"):
            sink.update(timeout_seconds=LIMIT)
    assert sink.failure is None
    assert holds(arrays, 0)
    check_next_update(source, weights, (sink, arrays))


def test_a_reader_of_another_kind_does_not_disturb_the_replica_that_it_asks(pair):
    """FAULTS 12; invariant 14."""
    source, weights, sink, arrays = pair("read", keep="memory")
    source.publish(1)
    sink.update(timeout_seconds=LIMIT)
    part = {"a": np.zeros((64, 32), np.float32)}
    with pytest.raises(PlanError), replica_of(part, sink.serves_at, "read", strict=False):
        pass
    assert sink.version == 1
    check_next_update(source, weights, (sink, arrays))


def test_a_replica_that_is_sent_to_its_own_address_goes_elsewhere(pair, monkeypatch):
    """FAULTS 13."""
    source, weights, sink, arrays = pair("read", keep="memory")
    source.publish(1)
    with monkeypatch.context() as patch:
        find = type(sink)._find

        def found(self, *arguments, **options):
            incoming, available = find(self, *arguments, **options)
            holders = self._link.holder.endpoint, *available.holders
            return incoming, messages.Available(incoming.id, None, {}, holders)

        patch.setattr(type(sink), "_find", found)
        patch.setattr(fetch, "STALL_SECONDS", 0.5)
        assert sink.update(timeout_seconds=LIMIT).version == 1
    check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("keep", ["memory", "in_place"])
def test_a_slow_reader_does_not_fail_a_publish(pair, monkeypatch, keep):
    """FAULTS 15; invariant 11."""
    monkeypatch.setattr(publisher, "RECLAIM_SECONDS", 0.1)
    source, weights, sink, arrays = pair("mapped", keep=keep)
    source.publish(1)
    is_pausing, is_late = threading.Event(), threading.Event()

    def before(version):
        is_pausing.set()
        assert is_late.wait(LIMIT)

    with in_background(sink.update, timeout_seconds=LIMIT, before=before) as result:
        assert is_pausing.wait(LIMIT)
        for version in (2, 3, 4):
            source.publish(version, timeout_seconds=LIMIT)
        is_late.set()
        assert "ended the lease" in str(result())
    assert holds(arrays, 0)
    assert sink.update(timeout_seconds=LIMIT).version == 4
    check_next_update(source, weights, (sink, arrays))


def test_a_segment_that_could_not_be_mapped_is_sent_again(pair, monkeypatch):
    """FAULTS 15 and 16: leases whose mapping failed were never released."""
    source, weights, sink, arrays = pair("mapped", keep="memory")
    source.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(source_rank, "open_segments", raising(TransportError("no map")))
        with pytest.raises(TransportError, match="no map"):
            sink.update(timeout_seconds=LIMIT)
    until(lambda: not is_leased(source, 1))
    assert sink.update(timeout_seconds=LIMIT).version == 1
    check_next_update(source, weights, (sink, arrays))


def test_staging_that_is_refused_leaves_no_lease(pair):
    """FAULTS 15: any error after the lease ends it."""
    source, *_ = pair("filled")
    arrays = model()
    with replica_of(arrays, source.address, "filled", staging_bytes=100, name="small") as small:
        for version in (1, 2):
            with in_background(small.update, timeout_seconds=LIMIT) as result:
                until(lambda: "small" in source.waiting)
                report = source.publish(version, timeout_seconds=600)  # it would hang
                assert "staging needs 8704 bytes and may take 100" in str(result())
            assert [each.name for each in report.failed] == ["small"]
        assert holds(arrays, 0)


def test_connections_of_a_session_live_and_die_together(pair):
    """FAULTS 17: a connection to a source rank was never made again; invariant 3."""
    source, weights, sink, arrays = pair("mapped", keep="memory")
    source.publish(1)
    sink.update(timeout_seconds=LIMIT)
    session = sink._link.session
    front = session.front
    another = Reader.connect(front.endpoint, sink._link.me, monotonic() + LIMIT, session=session.id)
    session.sources[0].reader = another  # as if the trainer had another rank
    another.channel.shut()  # as a timeout does
    check_next_update(source, weights, (sink, arrays))
    assert sink._link.session is not session


@pytest.mark.parametrize("transport", WAYS)
def test_a_reader_that_waits_goes_on_at_the_next_publisher(pair, transport):
    """FAULTS 18: after `close` readers waited at the old publisher for ever."""
    source, _, sink, _ = pair(transport, keep="memory")
    source.publish(1)
    sink.update(timeout_seconds=LIMIT)
    with in_background(sink.update, timeout_seconds=LIMIT) as result:
        until(lambda: source.waiting)
        source.close()
        with Publisher(model(2), source.address, token=TOKEN, keep="memory") as again:
            again.publish(1)
            assert result().version == 1
            assert sink.session == again.shelf.newest.session


def test_one_flipped_byte_at_a_parent_costs_a_range(pair):
    """FAULTS 22: it failed the child for ever."""
    source, weights, parent, arrays = pair("read", keep="memory")
    source.publish(1)
    parent.update(timeout_seconds=LIMIT)
    staged(parent).memory[0].segment.bytes[5] ^= 1
    child_arrays = model()
    with replica_of(child_arrays, source.address, "read", name="child") as child:
        assert child.update(timeout_seconds=LIMIT).version == 1
        assert holds(child_arrays, 1)
        third_arrays = model()
        with replica_of(third_arrays, source.address, "read", name="third") as third:
            assert third.update(timeout_seconds=LIMIT).version == 1  # it is not sent to the parent
        check_next_update(source, weights, (parent, arrays), (child, child_arrays))


def test_the_plans_of_readers_that_left_are_not_digested_any_more(pair):
    """FAULTS 25."""
    source, _, sink, _ = pair("mapped", keep="memory")
    source.publish(1)
    sink.update(timeout_seconds=LIMIT)
    assert len(list(source._holding.plans)) == 1
    sink.close()
    del sink
    until(lambda: not source.shelf._readers)
    until(lambda: not list(source._holding.plans))


@pytest.mark.parametrize("transport", WAYS)
def test_a_forked_child_closes_its_sockets_and_nothing_of_its_parent(pair, transport):
    """FAULTS 23; invariant 17."""
    source, weights, sink, arrays = pair(transport, keep="memory")
    source.publish(1)
    sink.update(timeout_seconds=LIMIT)
    child = os.fork()
    if child == 0:
        is_closed = sink._link.session.front.channel.wire.fileno() < 0
        source.close()
        sink.close()
        os._exit(0 if is_closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_next_update(source, weights, (sink, arrays))
    another_arrays = model()
    with replica_of(another_arrays, source.address, transport, name="another") as another:
        check_next_update(source, weights, (sink, arrays), (another, another_arrays))


def test_a_unix_socket_that_cannot_be_reached_means_the_address(pair, monkeypatch):
    """FAULTS 22: engines in another container of a pod failed."""
    source, weights, _, _ = pair("mapped", keep="memory")
    monkeypatch.setattr(reader, "connected", raising(PeerLost("not in this container")))
    arrays = model()
    with replica_of(arrays, source.address, "auto", name="engine") as sink:
        source.publish(1)
        assert sink.update(timeout_seconds=LIMIT).transport == "read"
        assert holds(arrays, 1)
        check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("transport", WAYS)
def test_ranges_that_come_too_late_end_at_the_deadline_and_nothing_is_written(pair, transport):
    """FAULTS 13; invariant 9: signs of life extend no deadline."""
    source, weights, sink, arrays = pair(transport, keep="memory")
    source.publish(1)
    may_go_on = threading.Event()
    point = {"mapped": "leasing", "filled": "fill", "read": "leasing"}[transport]
    with at(point, lambda number: may_go_on.wait(LIMIT)):
        with in_time(0.5), pytest.raises(FlyweightError):
            sink.update(timeout_seconds=0.5)
        may_go_on.set()
    assert holds(arrays, 0)
    check_next_update(source, weights, (sink, arrays))
