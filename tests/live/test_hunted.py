"""What a hunt for faults found: what must never happen again."""

import os
import socket
import threading
from contextlib import ExitStack
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from flyweight.live import Publisher, Replica, UpdateReport
from flyweight.live.front_store import FrontStore
from flyweight.live.holder import Conversation
from flyweight.live.messages import Available, Wait
from flyweight.live.offer import Offer
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, Reader
from flyweight.live.shelf import Shelf
from flyweight.live.staging import Staging
from flyweight.transports import address as addresses
from flyweight.transports import door
from flyweight.transports.address import connected_tcp, parse_address
from flyweight.transports.channel import Channel, introduce
from flyweight.transports.channel import Messages as NoMessages
from flyweight.transports.wire import Wire
from live.live_processes import SHAPES, TOKEN, Part, at, free_address, once, shared
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
    reader,
    taken,
)

ANY = "tcp://127.0.0.1:0"
RANGES = {"a": (4, 1 << 20)}  # four ranges of 4 MiB


def in_order(names, version):
    """Return tensors of one shape, each with a value of its own."""
    return {name: np.full((8, 8), 10 * version + sum(name.encode()), np.float32) for name in names}


def readers_thread():
    """True in a thread that answers a reader."""
    return threading.current_thread().name == "flyweight-reader"


def failing_looks(monkeypatch, address):
    """Have whoever connects to an address lose it after the plan was made."""
    want = Reader.want

    def fail(self, plan, deadline):
        if str(self.endpoint.remote) in address:
            raise PeerLost("it is gone again")
        want(self, plan, deadline)

    monkeypatch.setattr(Reader, "want", fail)


# A session and its target.


def test_a_look_at_another_publisher_leaves_the_tensors_of_a_loader_as_they_were(monkeypatch):
    names, main, found = ["up", "gate", "down"], free_address(), {}

    def load(weights):
        found.clear()
        found.update((name, each.clone().numpy()) for name, each in weights)

    with ExitStack() as stack:
        weights = in_order(names, 1)
        other = stack.enter_context(Publisher(weights, ANY, token=TOKEN, keep="memory"))
        other.publish(1)
        sink = stack.enter_context(reader(load, main, "read", fallback=[other.address]))
        sink.update(timeout_seconds=LIMIT)
        failing_looks(monkeypatch, main)
        back = in_order(reversed(names), 5)
        stack.enter_context(Publisher(back, main, token=TOKEN, keep="memory")).publish(5)
        for name, each in in_order(names, 2).items():
            weights[name][...] = each
        other.publish(2)
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert list(found) == names
        for name, each in weights.items():
            assert (found[name] == each).all(), name


@pytest.mark.parametrize("verify", [True, False])
def test_a_look_at_another_publisher_leaves_the_rows_of_a_model_as_they_were(monkeypatch, verify):
    """The tensors that one publisher ties are two at the other, so the rows differ."""
    main, rest = free_address(), ["l0", "l1", "l2"]
    arrays = in_order(["embed", *rest], 0)
    arrays = {"embed": arrays["embed"], "head": arrays["embed"], **arrays}
    with ExitStack() as stack:
        weights = in_order(["embed", *rest], 1)
        options = {"token": TOKEN, "keep": "memory", "verify": verify}
        other = stack.enter_context(Publisher(weights, ANY, **options))
        other.publish(1)
        sink = reader(arrays, main, "read", fallback=[other.address], strict=False)
        stack.enter_context(sink)
        failing_looks(monkeypatch, main)
        back = in_order(["embed", "head", *rest], 5)
        stack.enter_context(Publisher(back, main, token=TOKEN, keep="memory")).publish(5)
        assert sink.update(timeout_seconds=LIMIT).version == 1
        for name, each in weights.items():
            assert (arrays[name] == each).all(), name


# Versions without digests.


@pytest.mark.parametrize("verify", [True, False])
def test_what_a_holder_gave_before_it_failed_is_kept_only_with_digests(monkeypatch, verify):
    weights, given, arrays = model(1, RANGES), model(0, RANGES), model(0, RANGES)
    with ExitStack() as stack:
        options = {"token": TOKEN, "keep": "memory", "verify": verify}
        source = stack.enter_context(Publisher(weights, ANY, **options))
        source.publish(1)
        parent = stack.enter_context(reader(given, source.address, "read", name="parent"))
        parent.update(timeout_seconds=LIMIT)
        child = stack.enter_context(reader(arrays, source.address, "read", name="child"))
        with at("range", once(parent.close)):
            if verify:
                assert child.update(timeout_seconds=LIMIT).version == 1
            else:
                with pytest.raises(PeerLost, match="what came from there proves nothing"):
                    child.update(timeout_seconds=LIMIT)
                assert child.version is None
                assert holds(arrays, 0)
        check_next_update(source, weights, (child, arrays))


def test_no_bytes_come_from_memory_that_was_withdrawn_while_they_were_sent(monkeypatch):
    weights, arrays = model(1, RANGES), model(0, RANGES)
    is_coming, has_changed, arrived = threading.Event(), threading.Event(), []
    receive, note, keep_alive = Channel.receive_bytes, Staging.arrived, addresses.keep_alive

    def slow(connection):
        for each in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, each, 1 << 16)
        keep_alive(connection)

    def late(self, *arguments):
        is_coming.set()
        assert has_changed.wait(LIMIT)
        receive(self, *arguments)

    def noted(self, each, holder):
        arrived.append(each)
        note(self, each, holder)

    for each in (addresses, door):  # else all of a range is on its way at once
        monkeypatch.setattr(each, "keep_alive", slow)
    with ExitStack() as stack:
        options = {"keep": "in_place", "verify": False}
        source = stack.enter_context(Publisher(weights, ANY, token=TOKEN, **options))
        source.publish(1)
        sink = stack.enter_context(reader(arrays, source.address, "read"))
        monkeypatch.setattr(Channel, "receive_bytes", late)
        monkeypatch.setattr(Staging, "arrived", noted)
        with in_background(sink.update, timeout_seconds=LIMIT) as result:
            assert is_coming.wait(LIMIT)
            source.shelf.reclaim(source.shelf.newest, monotonic())  # as Ctrl-C does
            fill(weights, 9)
            has_changed.set()
            assert isinstance(result(), FlyweightError), result()
        assert not arrived
        assert holds(arrays, 0)
        monkeypatch.undo()
        check_next_update(source, weights, (sink, arrays))


def test_a_lease_that_was_ended_is_noticed_before_anything_else_is_said():
    shelf, id = Shelf(), PublishId("3fa9c1d2", 1)
    shelf.offer(SimpleNamespace(id=id))
    shelf.lease(id, 7, monotonic() + LIMIT)
    shelf.leased(7)
    shelf.reclaim(id, monotonic())
    with pytest.raises(HandleGone, match="has ended; the memory may have changed"):
        shelf.leased(7)


def test_a_version_that_is_announced_while_a_wait_ends_is_its_answer(monkeypatch):
    """Else the publisher waits until its deadline for a replica that was never told."""
    has_input, ids = Wire.has_input, []

    def late(self, *others, deadline):
        found = has_input(self, *others, deadline=deadline)
        if readers_thread() and others and not ids and monotonic() >= deadline:
            ids.append(PublishId(session, 1))
            source.shelf.announce(Available(ids[0], None, {}))
        return found

    with Publisher(model(1), ANY, token=TOKEN) as source, reader(model(), source.address) as sink:
        front = sink._link.session.front
        session = front.welcome.session
        source.shelf.offer(SimpleNamespace(id=PublishId(session, 1)))
        monkeypatch.setattr(Wire, "has_input", late)
        wait = Wait(None, None, None, False, 0.05)
        assert front.channel.call(wait, Available, monotonic() + LIMIT).id == ids[0]


def test_how_an_update_ended_is_known_also_if_its_lease_was_ended_meanwhile(monkeypatch):
    """What a reader says after it, unasked, may be on its way when the publisher closes."""
    weights, arrays, release = mappable(1), model(), Conversation._release

    def ended(self, *words, **options):
        with self._shelf.changing():
            self._shelf.leases.end(self._shelf.newest)
        self._me.ending = "its time was over"
        return release(self, *words, **options)

    monkeypatch.setattr(Conversation, "_release", ended)
    with Publisher(weights, ANY, token=TOKEN) as source, reader(arrays, source.address) as sink:
        report, _ = taken(source, 1, sink)
        assert [each.error for each in report.replicas] == [""]
        assert holds(arrays, 1)


# Leases and digests.


def test_digests_of_what_came_after_a_lease_are_not_given_for_it(monkeypatch):
    weights, arrays = mappable(1), model()
    is_computing, has_changed, is_over = (threading.Event() for _ in range(3))
    digests, hear = Offer.digests, Conversation._hear_bell

    def late(self, *arguments):
        if readers_thread() and self.id.version == 1:
            is_computing.set()
            assert has_changed.wait(LIMIT)
        return digests(self, *arguments)

    def deaf(self):
        if has_changed.is_set():
            assert is_over.wait(LIMIT)
        hear(self)

    with ExitStack() as stack:
        source = stack.enter_context(Publisher(weights, ANY, token=TOKEN, keep="in_place"))
        source.publish(1)
        sink = stack.enter_context(reader(arrays, source.address))
        with monkeypatch.context() as patch:
            patch.setattr(Offer, "digests", late)
            patch.setattr(Conversation, "_hear_bell", deaf)
            with in_background(sink.update, 1, timeout_seconds=LIMIT) as result:
                assert is_computing.wait(LIMIT)
                source.shelf.reclaim(source.shelf.newest, monotonic())  # as Ctrl-C does
                fill(weights, 2)
                has_changed.set()
                try:
                    assert isinstance(result(), FlyweightError), result()
                finally:
                    is_over.set()
        assert sink.version is None
        assert holds(arrays, 0)
        check_next_update(source, weights, (sink, arrays))


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_a_lease_whose_digests_fail_is_over(monkeypatch, transport):
    weights, arrays = (mappable if transport == "mapped" else model)(1), model()
    with (
        Publisher(weights, ANY, token=TOKEN, keep="in_place") as source,
        reader(arrays, source.address, transport, serve=False) as sink,
    ):
        offer = Offer.digests
        source.publish(0)
        with monkeypatch.context() as patch:

            def fail(self, *arguments):
                if readers_thread():
                    raise TransferTimeout("digests took too long")
                return offer(self, *arguments)

            patch.setattr(Offer, "digests", fail)
            with pytest.raises(FlyweightError, match="digests took too long"):
                sink.update(timeout_seconds=LIMIT)
        source.withdraw()
        assert is_free(source, 0)
        check_next_update(source, weights, (sink, arrays))


def test_a_lease_that_one_rank_refuses_is_left_at_no_other_rank(monkeypatch, tmp_path):
    parts, sources = [Part(SHAPES, shared, rank, 2) for rank in (0, 1)], [None, None]
    address, part = f"unix:{tmp_path}/trainer", Part(SHAPES)

    def make(rank):
        options = {"token": TOKEN, "keep": "in_place", "rank": rank, "world_size": 2}
        sources[rank] = Publisher(parts[rank].model, address, **options)
        parts[rank].fill(1)
        sources[rank].publish(1, timeout_seconds=LIMIT)

    digests = Offer.digests

    def fail(self, plan, rank, deadline):
        if readers_thread() and rank == 0:
            until(lambda: is_leased(sources[1], 1))
            raise TransportError("a device failed")
        return digests(self, plan, rank, deadline)

    with in_background(make, 0) as first, in_background(make, 1) as second:
        assert (first(), second()) == (None, None)
    with sources[1], sources[0], Replica(part.model, address, token=TOKEN) as sink:
        with monkeypatch.context() as patch:
            patch.setattr(Offer, "digests", fail)
            with pytest.raises(TransportError, match="a device failed"):
                sink.update(timeout_seconds=LIMIT)
        for each in sources:
            until(lambda each=each: not is_leased(each, 1))


# Ranks of an engine.


def test_no_rank_writes_once_the_lease_of_one_has_ended_while_another_paused():
    weights, arrays = mappable(1), [model(), model()]
    has_changed, paused = threading.Event(), []

    def pause(version):
        paused.append(version)
        if version == 2:
            assert has_changed.wait(LIMIT)

    with ExitStack() as stack:
        source = stack.enter_context(Publisher(weights, ANY, token=TOKEN))
        ranks = []
        for rank, transport in enumerate(("mapped", "read")):
            options = {"name": "e", "rank": rank, "world_size": 2}
            each = reader(arrays[rank], source.address, transport, **options)
            ranks.append(stack.enter_context(each))

        def publish(version, seconds):
            befores = [None, pause]
            with ExitStack() as updates:
                results = [
                    updates.enter_context(
                        in_background(each.update, timeout_seconds=LIMIT, before=before)
                    )
                    for each, before in zip(ranks, befores, strict=True)
                ]
                until(lambda: source.waiting)
                fill(weights, version)
                source.publish(version, timeout_seconds=seconds)
                if version == 2:
                    until(lambda: 2 in paused)
                    fill(weights, 99)
                    has_changed.set()
                return [each() for each in results]

        for each in publish(1, LIMIT):
            assert isinstance(each, UpdateReport), each
        for each in publish(2, 2.0):
            assert isinstance(each, FlyweightError), each
        for rank, held in zip(ranks, arrays, strict=True):
            assert (rank.version, str(rank.state)) == (1, "READY")
            assert holds(held, 1)


@pytest.mark.parametrize("has_publisher", [True, False])
def test_closing_a_rank_ends_its_wait_for_the_others(has_publisher):
    main = free_address()
    with ExitStack() as stack:
        if has_publisher:
            stack.enter_context(Publisher(mappable(1), main, token=TOKEN))
        sink = reader(model(), main, name="e", rank=0, world_size=2)
        with in_background(sink.update, timeout_seconds=LIMIT) as result:
            until(lambda: sink._store is not None)
            sink.close()
            assert "has left" in str(result())


# Closing a replica.


def test_an_update_whose_replica_was_closed_while_it_paused_writes_nothing():
    arrays = model()
    with Publisher(mappable(1), ANY, token=TOKEN, keep="memory") as source:
        source.publish(1)
        sink, stack = reader(arrays, source.address, "read"), ExitStack()

        def close(version):
            stack.enter_context(in_background(sink.close))
            until(lambda: not sink._is_open)

        with stack, pytest.raises(TransportError, match="is closed|has left"):
            sink.update(timeout_seconds=LIMIT, before=close)
        assert holds(arrays, 0)


def test_a_replica_that_was_closed_while_it_paused_loads_no_files(tmp_path):
    arrays = model()
    fw.save(model(1), tmp_path / "stored", version=1)
    sink = reader(arrays, free_address(), fallback=[str(tmp_path / "stored")])
    with ExitStack() as stack:

        def close(version):
            stack.enter_context(in_background(sink.close))
            until(lambda: not sink._is_open)

        with pytest.raises(TransportError, match="is closed|has left"):
            sink.update(timeout_seconds=LIMIT, before=close)
    assert holds(arrays, 0)


# Times.


def test_a_reader_of_what_is_kept_has_its_time_and_fails_no_publish():
    weights, arrays = mappable(1), model()
    is_copying, is_late = threading.Event(), threading.Event()

    def copy_slowly():
        is_copying.set()
        assert is_late.wait(LIMIT)

    with (
        Publisher(weights, ANY, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address, "mapped") as sink,
    ):
        source.publish(1)
        with (
            at("copy", once(copy_slowly)),
            in_background(sink.update, timeout_seconds=LIMIT) as result,
        ):
            assert is_copying.wait(LIMIT)
            fill(weights, 2)
            end = monotonic() + 1.0
            with in_background(source.publish, 2, timeout_seconds=1.0) as published:
                until(lambda: monotonic() > end)
                is_late.set()
                assert published().version == 2
            assert result().version == 1
        assert holds(arrays, 1)
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert holds(arrays, 2)


def test_a_version_that_comes_late_has_all_the_time_to_be_fetched(monkeypatch):
    weights, arrays = model(1), model()
    find = Replica._find

    def late(self, options, deadline, **more):
        found = find(self, options, deadline, **more)
        until(lambda: monotonic() > deadline)
        return found

    with (
        Publisher(weights, ANY, token=TOKEN, keep="memory") as source,
        reader(arrays, source.address, "read") as sink,
    ):
        source.publish(1)
        monkeypatch.setattr(Replica, "_find", late)
        assert sink.update(timeout_seconds=2.0).version == 1
        assert holds(arrays, 1)


# Fronts and doors.


def test_what_was_left_at_a_front_is_there_again_when_the_front_was_started_again():
    deadline = monotonic() + LIMIT
    with Publisher(model(), ANY, token=TOKEN) as first:
        address = first.address
        store = FrontStore(parse_address(address), Identity("rank 1", token=TOKEN))
        store.set("key", "text", deadline)
    with Publisher(model(), address, token=TOKEN):
        assert store.get("key", deadline) == "text"
        store.close()


def test_a_stranger_that_a_full_door_sends_away_may_come_again(monkeypatch):
    monkeypatch.setattr(door, "PLACES", 1)
    deadline = monotonic() + LIMIT
    with Publisher(model(), ANY, token=TOKEN) as source:
        connection, _ = connected_tcp(source.address.removeprefix("tcp://"), deadline)
        silent = Channel(Wire(connection), "the door", NoMessages())
        with reader(model(), source.address):
            with pytest.raises(PeerLost, match="come again"):
                introduce(silent, "silent", TOKEN, deadline)
            silent.close()


@pytest.mark.parametrize("fault", ["no thread", "no file"])
def test_a_door_stays_open_when_a_reader_could_not_be_served(monkeypatch, fault):
    weights, arrays = mappable(1), model()
    with Publisher(weights, ANY, token=TOKEN) as source:
        with monkeypatch.context() as patch:
            if fault == "no thread":
                start = threading.Thread.start

                def fail(self):
                    if self.name == "flyweight-reader":
                        raise RuntimeError("can't start new thread")
                    start(self)

                patch.setattr(threading.Thread, "start", fail)
            else:
                make = os.eventfd
                patch.setattr(
                    os,
                    "eventfd",
                    lambda *given: (
                        raising(OSError("no file"))() if readers_thread() else make(*given)
                    ),
                )
            sink = reader(arrays, source.address)
        with sink:
            assert not sink.is_connected
            assert source.replicas == []
            assert not source.shelf._readers
            check_next_update(source, weights, (sink, arrays))
