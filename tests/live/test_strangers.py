"""Peers with the token that break the rules; those without it are in `transports/test_door.py`."""

import gc
import os
from time import monotonic

import pytest

from child_processes import LIMIT, resources, until
from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerRefused,
    SpecError,
    TransportError,
)
from flyweight.live import Publisher, Replica
from flyweight.live.messages import (
    Confirmed,
    Current,
    Data,
    Done,
    Fill,
    Join,
    Lease,
    Leased,
    Read,
    Release,
    Result,
    Wait,
    Welcome,
)
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, Reader, open_channel
from flyweight.transports.address import parse_address, this_host
from flyweight.transports.segments import Segment
from live.live_processes import TOKEN
from live.one_process import check_next_update, holds, model, reader

ME = Identity("me", token=TOKEN, is_remote=True)


@pytest.fixture
def source():
    weights = model(1)
    with Publisher(weights, "tcp://127.0.0.1:0", token=TOKEN, keep="memory") as publisher:
        publisher.weights = weights
        publisher.publish(1)
        yield publisher


def connection(source):
    deadline = monotonic() + LIMIT
    endpoint = parse_address(source.address).endpoint
    return open_channel(endpoint, ME, deadline), deadline


def joined(source):
    channel, deadline = connection(source)
    join = Join("me", os.getpid(), 0, 1, this_host(), None, "")
    welcome = channel.call(join, Welcome, deadline)
    return channel, deadline, welcome


@pytest.mark.parametrize("transport", ["mapped", "read"])
def test_a_replica_with_another_token_is_refused(source, transport):
    with pytest.raises(PeerRefused, match="has another token; give both sides the same"):
        Replica(model(), source.address, token="wrong wrong wrong", transport=transport)


def test_a_replica_without_a_token_is_refused_at_tcp(source):
    with pytest.raises(SpecError, match="needs the token of its publisher"):
        Replica(model(), source.address)
    with pytest.raises(SpecError, match="needs a token that replicas have"):
        Publisher(model(), "tcp://127.0.0.1:0")


def test_a_reader_of_another_session_is_refused(source):
    endpoint = parse_address(source.address).endpoint
    with pytest.raises(HandleGone, match=r"serves session \w+, not anothe"):
        Reader.connect(endpoint, ME, monotonic() + LIMIT, session="another one")


ID = PublishId("another", 1)
OUT_OF_TURN = [
    Wait(None, None, None, False, 0.0),
    Lease(ID, ("x",), 0, False, (), 0.0),
    Read("x", 0, 1, 0.0),
    Fill("x", 0, 0.0),
    Release(0.0),
]


@pytest.mark.parametrize("message", OUT_OF_TURN, ids=lambda each: type(each).__name__)
def test_what_comes_before_join_is_refused(source, message):
    channel, deadline = connection(source)
    with pytest.raises(FlyweightError):
        channel.call(message, Current, deadline)
    channel.close()
    check_works(source)


@pytest.mark.parametrize("message", OUT_OF_TURN, ids=lambda each: type(each).__name__)
def test_what_comes_out_of_turn_is_refused(source, message):
    channel, deadline, _ = joined(source)
    with pytest.raises(FlyweightError):
        channel.call(message, Current, deadline)
    channel.close()
    check_works(source)


def check_works(source):
    arrays = model()
    with reader(arrays, source.address, name="engine") as sink:
        assert sink.update(timeout_seconds=LIMIT).version == 1
        assert holds(arrays, 1)


def test_a_holder_answers_no_message_that_only_holders_send(source):
    channel, deadline, _ = joined(source)
    with pytest.raises(TransportError, match="sent Confirmed, which a holder sends"):
        channel.call(Confirmed(), Current, deadline)
    channel.close()


def leased(source, transport="read"):
    """Return a reader that has a lease of version 1, its plan, and a deadline."""
    sink = reader(model(), source.address, transport, name="spy")
    session, deadline = sink._link.session, monotonic() + LIMIT
    session.front.ask_lease(source.shelf.newest, [session.plan.kind], 0, deadline, can_map=False)
    session.front.lease(deadline)
    return sink, session.front.channel, session.plan, deadline


@pytest.mark.parametrize(
    ("start", "nbytes"), [(-1, 10), (0, 0), (8000, 10000), (1 << 40, 1), (0, -1)]
)
def test_a_range_outside_of_the_stream_is_refused(source, start, nbytes):
    """FAULTS 25: `Read` had no limit."""
    sink, channel, plan, deadline = leased(source)
    with sink, pytest.raises(SpecError, match="are not a range of the stream"):
        channel.call(Read(plan.kind, start, nbytes, 0.0), Data, deadline)


def test_a_rank_that_has_nothing_of_the_plan_cannot_be_leased(source):
    sink, channel, plan, deadline = leased(source)
    with sink:
        lease = Lease(source.shelf.newest, (plan.kind,), 7, False, (), 0.0)
        with pytest.raises(SpecError, match="read nothing from rank 7"):
            channel.call(lease, Leased, deadline)


def test_a_connection_for_bytes_cannot_wait_for_a_version(source):
    sink, _, _, deadline = leased(source)
    with sink:
        endpoint = parse_address(source.address).endpoint
        me, session = sink._link.session.me, sink._link.session
        found = Reader.connect(endpoint, me, deadline, session=session.id, plans=session.plans)
        with pytest.raises(TransportError, match="has joined for bytes, and waits for no version"):
            found.channel.call(Wait(None, None, None, False, 0.0), Current, deadline)
        found.close()
    check_works(source)


def test_memory_that_is_shared_is_checked_before_it_is_written(source):
    sink, channel, plan, deadline = leased(source, "filled")
    with sink:
        small, large = (
            Segment.allocate(nbytes, is_writable_by_readers=True) for nbytes in (100, 1 << 20)
        )

        def fill(files, nbytes):
            return channel.call(Fill(plan.kind, nbytes, LIMIT), Confirmed, deadline, files)

        with pytest.raises(SpecError, match="0 files came"):
            fill((), 1 << 20)
        with pytest.raises(TransportError, match="its segment"):
            fill(small.files, 1 << 20)
        with pytest.raises(SpecError, match="do not fit into memory of 100 bytes"):
            fill(small.files, 100)
        with open("/dev/null") as other, pytest.raises(TransportError):
            fill((other.fileno(),), 1 << 20)
        assert fill(large.files, 1 << 20) == Confirmed()
        assert fill((), 1 << 20) == Confirmed()  # the same once more
        assert large.bytes[: plan.nbytes].any()
        assert not small.bytes.any()
    check_works(source)


def test_files_and_memory_that_are_shared_are_bounded(source):
    sink, channel, plan, deadline = leased(source, "filled")
    with sink:
        before = resources()
        for _ in range(20):
            segment = Segment.allocate(1 << 20, is_writable_by_readers=True)
            fill = Fill(plan.kind, segment.nbytes, LIMIT)
            channel.call(fill, Confirmed, deadline, segment.files)
            del segment
        gc.collect()
        now = resources()
        assert len(now["files"]) <= len(before["files"])
        assert now["mapped"] <= before["mapped"] + 1  # the last one


def test_a_lease_can_be_released_once(source):
    sink, channel, _, deadline = leased(source)
    with sink:
        channel.call(Release(1.0), Confirmed, deadline)
        with pytest.raises(FlyweightError, match="has no lease here"):
            channel.call(Release(1.0), Confirmed, deadline)


def test_what_a_reader_says_of_others_costs_them_nothing(source):
    """Invariant 14: wrong results."""
    arrays = model()
    with reader(arrays, source.address, "read", name="engine") as sink:
        sink.update(timeout_seconds=LIMIT)
        channel, deadline, _ = joined(source)
        newest = source.shelf.newest
        channel.send(Done(newest, Result("engine", error="it lies")), deadline)
        channel.send(Done(ID, Result("engine", error="it lies")), deadline)
        late_arrays = model()
        before = source.shelf.all_sent_bytes()
        with reader(late_arrays, source.address, "read", name="late") as late:
            late.update(timeout_seconds=LIMIT)
            assert source.shelf.all_sent_bytes() == before  # from the first one, as ever
        channel.close()
        check_next_update(source, source.weights, (sink, arrays))


def check_no_more(before):
    """Wait until this process has no more threads, files and mapped memory than before."""

    def is_settled():
        gc.collect()
        now = resources()
        return (
            all(len(now[kind]) <= len(before[kind]) for kind in ("threads", "files"))
            and now["mapped"] <= before["mapped"]
        )

    until(is_settled, 10)


def test_readers_that_come_and_go_leave_nothing_behind(source):
    """FAULTS 25; invariant 15."""

    def come_and_go(transport):
        with reader(model(), source.address, transport, name="engine") as sink:
            sink.update(timeout_seconds=LIMIT)

    come_and_go("read")
    until(lambda: not source.shelf._readers)
    gc.collect()
    before = resources()
    for transport in ("filled", "read", "mapped"):
        for _ in range(5):
            come_and_go(transport)
    check_no_more(before)


def test_publishers_that_come_and_go_leave_nothing_behind(tmp_path):
    """FAULTS 25; invariant 15."""
    address = f"unix:{tmp_path}/trainer"
    arrays = model()
    with Replica(arrays, address) as sink:

        def meet(version):
            with Publisher(model(version), address, keep="memory") as again:
                again.publish(version)
                assert sink.update(version, timeout_seconds=LIMIT).version == version

        meet(1)
        gc.collect()
        before = resources()
        for version in range(2, 8):
            meet(version)
        check_no_more(before)
    assert holds(arrays, 7)
