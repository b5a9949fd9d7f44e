"""Ranks that join a group and learn of each other's end: threads with real sockets between them."""

import hmac
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from child_processes import LIMIT, Child, in_time, resources, until
from fakes import FakeRendezvousStore
from flyweight.errors import (
    PeerFailed,
    PeerLost,
    PeerRefused,
    SpecError,
    TransferTimeout,
    TransportError,
)
from flyweight.ranks import group as groups
from flyweight.ranks import rendezvous
from flyweight.ranks.group import MESSAGES, PATIENCE, WORKING_TIMES, Group, Step
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.transports.address import TcpAddress, connected_tcp, listening_tcp
from flyweight.transports.channel import Channel, Refused, frame_of, introduce
from flyweight.transports.door import Door
from flyweight.transports.wire import Wire
from moved_clock import Clock


class Watched(FakeRendezvousStore):
    """Rank 1 hears no answer before the event, once others have seen it."""

    def __init__(self):
        super().__init__()
        self.answers, self.may_answer = SimpleQueue(), threading.Event()

    def set(self, key, text, deadline):
        super().set(key, text, deadline)
        if "/answer/" in key:
            self.answers.put(text.split(" ")[1:])

    def get(self, key, deadline):
        text = super().get(key, deadline)
        if text is not None and "/answer/" in key:
            assert self.may_answer.wait(LIMIT)
        return text


@pytest.fixture
def clock(monkeypatch):
    """The time of groups once they have joined; the ranks share it, as they are threads."""
    clock = Clock()
    monkeypatch.setattr(groups, "monotonic", clock)
    return clock


@pytest.fixture
def no_linger(monkeypatch):
    """Do not wait for the ranks that a test only pretends to have."""
    monkeypatch.setattr(groups, "_LINGER_SECONDS", 0.05)


def channels(rank=0, peer=1):
    """Return both ends of a connection between two ranks."""
    ends = [Channel(Wire(each), "", MESSAGES) for each in socket.socketpair()]
    for each, other in zip(ends, (peer, rank), strict=True):
        each.peer = f"rank {other}"
        each.authenticate(b"key", is_reader=each is ends[1])
    return ends


def play(num_ranks, part, *, coordinator=0, timeout_seconds=LIMIT, ranks=None, tokens=None):
    """Run `part(group)` on every rank, and return what each returned or raised."""
    store = FakeRendezvousStore()

    def rank_part(rank):
        try:
            token = tokens[rank] if tokens else ""
            place = Rendezvous(rank, num_ranks, store, "group", token=token)
            with join_group(place, coordinator, timeout_seconds=timeout_seconds) as group:
                return part(group)
        except TransportError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_part, ranks or range(num_ranks)))


@pytest.mark.parametrize("coordinator", [0, 2])
def test_what_is_gathered_is_by_rank_and_what_is_scattered_arrives(coordinator):
    def part(group):
        told = group.gather("tell", {"rank": group.rank})
        answer = group.scatter("answer", [[rank, "x" * 100_000] for rank in range(3)])
        return told, answer[0], group.broadcast("all", "same" if group.is_coordinator else None)

    found = play(3, part, coordinator=coordinator)
    for rank, (told, answer, same) in enumerate(found):
        assert told == ([{"rank": n} for n in range(3)] if rank == coordinator else [])
        assert answer == rank
        assert same == "same"


def test_a_group_of_one_rank_needs_no_connection():
    with Group() as group:
        assert group.gather("a", 1) == [1]
        assert group.scatter("b", [2]) == 2
        group.tick()
    assert join_group(Rendezvous()).num_ranks == 1


def test_a_rank_that_never_closes_holds_nobody_up(no_linger):
    ours, theirs = channels()
    with Group(0, 2, connections={1: ours}, timeout_seconds=LIMIT):
        pass
    assert ours.wire.fileno() == -1
    theirs.close()


def in_a_child(group, pipe):
    with pytest.raises(PeerLost), group:
        group.gather("work", None)


def test_a_forked_child_has_none_of_the_connections_and_ends_none():
    def part(group):
        if group.rank == 0:
            with group._lock, Child(in_a_child, group) as child:  # as another thread may hold it
                child.result()
        group.gather("work", group.rank)
        return group.broadcast("done", "well")

    assert play(2, part) == ["well", "well"]


class Working:
    """A rank that tells that it works, while time goes by for ranks that have a second for it."""

    def __init__(self, clock):
        self._clock, self._groups = clock, {}

    def joins(self, group):
        group.timeout_seconds = 1.0
        self._groups[group.rank] = group

    def goes_on(self, seconds, tick=lambda: None, *, others=None):
        """Each third of a second, wait until rank 0 has heard of this rank, and others of rank 0."""
        others = [each for rank, each in self._groups.items() if rank in (others or self._groups)]
        connections = [each._connections[0 if each.rank else 1] for each in others]

        def all_have_heard():
            tick()
            return all(each.heard == self._clock.now for each in connections)

        for _ in range(round(3 * seconds)):
            self._clock.now += 1 / 3
            until(all_have_heard)


def test_work_that_goes_on_is_no_silence(clock):
    """One rank works for three times the deadline, and tells; all others wait for it."""
    working, all_joined = Working(clock), threading.Barrier(3)

    def part(group):
        working.joins(group)
        all_joined.wait(LIMIT)
        if group.rank == 1:
            clock.is_looked_at()  # by those who wait
            working.goes_on(3, group.tick)
        group.gather("work", None)
        return group.broadcast("done", "well")

    assert play(3, part) == ["well"] * 3


def test_a_rank_that_works_hears_by_a_tick_why_another_has_failed():
    def part(group):
        if group.rank == 2:
            raise PeerLost("boom")
        until(group.tick)

    found = play(3, part)
    assert [type(each) for each in found] == [PeerFailed, PeerFailed, PeerLost]
    assert str(found[2]) == "boom"
    for error in found[:2]:
        assert "rank 2 failed in step 'join': PeerLost: boom" in str(error)


@pytest.mark.parametrize(
    ("rank", "seconds", "text"),
    [(0, 0.8 * PATIENCE, "[1, 2]"), (1, 0.8, "coordinator rank 0 did not answer")],
)
def test_ranks_that_do_not_come_are_named_in_time(rank, seconds, text):
    with in_time(seconds):
        (error,) = play(3, lambda group: None, ranks=[rank], timeout_seconds=0.8)
    assert isinstance(error, TransferTimeout)
    assert text in str(error)


def test_the_ranks_token_is_never_sent_and_the_store_alone_admits_nobody():
    """Without it, reading the store is not enough to take a rank's place."""
    store = Watched()

    def thief():
        try:
            place, secret = store.answers.get(timeout=LIMIT)
            for token in (secret, "", "another"):
                deadline = time.monotonic() + LIMIT
                wire = Wire(connected_tcp(place, deadline)[0])
                channel = Channel(wire, "the coordinator", MESSAGES)
                with pytest.raises(PeerRefused, match="another token"):
                    introduce(channel, "rank 1", token, deadline)
                channel.close()
        finally:
            store.may_answer.set()

    def rank_part(rank):
        place = Rendezvous(rank, 2, store, "group", token="of the ranks")
        assert "of the ranks" not in repr(place)
        with join_group(place, timeout_seconds=LIMIT) as group:
            return group.gather("a", group.rank)

    with ThreadPoolExecutor(3) as pool:
        stolen = pool.submit(thief)
        assert list(pool.map(rank_part, range(2))) == [[0, 1], []]
        stolen.result(LIMIT)
    assert not [text for text in store._texts.values() if "of the ranks" in text]


def test_a_rank_with_another_token_hears_of_it_at_once():
    answered, found = threading.Event(), []

    def rank_part(rank, store=FakeRendezvousStore()):  # noqa: B008
        try:
            seconds = LIMIT if rank else 1.0
            place = Rendezvous(rank, 2, store, "group", token=f"of rank {rank}")
            join_group(place, timeout_seconds=seconds)
        except TransportError as error:
            found.append(error)
            answered.set()
            return error

    with ThreadPoolExecutor(2) as pool:
        absent, refused = pool.map(rank_part, range(2))
    assert isinstance(refused, PeerRefused)
    assert isinstance(absent, TransferTimeout)
    assert "[1]" in str(absent)


def test_a_rank_that_is_sent_away_because_too_many_come_comes_again():
    store, joined = FakeRendezvousStore(), SimpleQueue()
    server, address = listening_tcp(TcpAddress("127.0.0.1", 0))
    token = hmac.digest(b"", b"secret", "sha256").hex()
    with ThreadPoolExecutor(1) as pool:
        place = Rendezvous(1, 2, store, "group")
        joining = pool.submit(join_group, place, timeout_seconds=LIMIT)
        until(lambda: store.get("group/arrival/1", 0))
        number = store.get("group/arrival/1", 0).split(" ")[0]
        store.set("group/answer/1", f"{number} {address.place} secret", 0)
        first, _ = server.accept()
        with first:
            assert first.recv(1000)
            away = Refused("TransportError", "too many come at once; come again")
            first.sendall(frame_of(away, 1))
        door = Door([server], token, MESSAGES, None)
        door.open(joined.put)
        group = joining.result(LIMIT)
    channel = joined.get(timeout=LIMIT)
    assert channel.name == "rank 1"
    door.close()
    channel.close()
    group.close()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\xff" * 40, "rank 1 speaks protocol unknown"),
        (b"fw\n\0" + bytes(40), "rank 1"),
        (Step(1, "work", b"junk"), "rank 1 sent no message"),
        (Step(1, "work", b"NaN"), "rank 1 sent no message"),
        (Step(1, "work", b'{"a": 1, "a": 2}'), "rank 1 sent no message"),
        (Step(1, "load", b"1"), "rank 1 is at step 'load'.* at 'work'"),
        (Step(2, "work", b"1"), "rank 1 is at step 'work', its number 2, this rank .* number 1"),
    ],
    ids=str,
)
def test_what_is_no_message_of_the_step_is_named_and_ends_the_work(message, says, no_linger):
    ours, theirs = channels()
    if isinstance(message, bytes):
        theirs.wire.send([message], time.monotonic() + LIMIT)
    else:
        theirs.send(message, time.monotonic() + LIMIT)
    group = Group(0, 2, connections={1: ours}, timeout_seconds=LIMIT)
    with pytest.raises(TransportError, match=says), group:
        group.gather("work", None)
    theirs.close()


def test_a_message_may_contain_any_number_of_a_state_that_is_saved():
    def part(group):
        return group.gather("a", {"state": 2**127 + group.rank})

    assert play(2, part)[0] == [{"state": 2**127}, {"state": 2**127 + 1}]


def test_ranks_of_other_networks_connect_to_an_address_they_can_reach(monkeypatch):
    """Two ranks that take themselves for strangers: not the loopback, the host's own address."""
    store, real = Watched(), rendezvous.location
    store.may_answer.set()

    def elsewhere():
        return f"{threading.get_ident()} {real().partition(' ')[2]}"

    monkeypatch.setattr(rendezvous, "location", elsewhere)

    def rank_part(rank):
        with join_group(Rendezvous(rank, 2, store, "group"), timeout_seconds=LIMIT) as group:
            return group.gather("a", group.rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_part, range(2))) == [[0, 1], []]
    host = store.answers.get()[0].rpartition(":")[0]
    assert host in (socket.gethostbyname(socket.gethostname()), "127.0.0.1")


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(SpecError, match="coordinator_rank"):
        join_group(Rendezvous(0, 2, FakeRendezvousStore(), "m"), 2)
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(SpecError, match="timeout_seconds"):
            join_group(Rendezvous(0, 2, FakeRendezvousStore(), "m"), timeout_seconds=seconds)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_missed_a_call_is_not_out_of_step_for_the_next(late):
    """What a failed rendezvous left in the store answers nobody."""
    store, was_late = FakeRendezvousStore(), threading.Event()

    def joined(rank, seconds=LIMIT):
        with join_group(Rendezvous(rank, 2, store, "group"), timeout_seconds=seconds) as group:
            return group.gather("a", rank)

    def rank_part(rank):
        if rank == late:
            with pytest.raises(TransferTimeout):
                joined(rank, 0.4)
            was_late.set()
        assert was_late.wait(LIMIT)
        return [joined(rank), joined(rank)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_part, range(2))) == [[[0, 1]] * 2, [[]] * 2]


def test_a_rank_that_another_process_takes_too_is_told():
    class Shared(FakeRendezvousStore):
        def set(self, key, text, deadline):
            super().set(key, text and "of another process", deadline)

    store = Shared()
    with pytest.raises(TransferTimeout, match="another process made it as rank 1"):
        join_group(Rendezvous(1, 2, store, "group"), timeout_seconds=0.1)
    assert store.get("group/arrival/1", 0) == "of another process"


def test_ranks_that_take_different_ranks_for_the_coordinator_are_told():
    store = FakeRendezvousStore()

    def rank_part(rank):
        try:
            # Rank 1 gives up soon: the rank that it waits for does not come.
            coordinator, seconds = (0, LIMIT) if rank == 0 else (2, 0.2)
            join_group(Rendezvous(rank, 3, store, "group"), coordinator, timeout_seconds=seconds)
        except TransportError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(rank_part, [0, 1]))
    assert "rank 1 takes rank 2 for the coordinator" in found[0]


def test_a_silent_rank_is_noticed_while_another_goes_on_working(clock):
    working, all_joined, noticed = Working(clock), threading.Barrier(3), threading.Barrier(3)

    def part(group):
        working.joins(group)
        all_joined.wait(LIMIT)
        try:
            if group.rank == 1:
                clock.is_looked_at()  # by those who wait
                working.goes_on(2 / 3, group.tick, others=[0, 1])
                clock.now += 1 / 3  # now it is too long for rank 0
                until(group.tick)
            if group.rank == 0:
                group.gather("work", None)
        finally:
            noticed.wait(LIMIT)

    found = play(3, part)
    assert "rank 2 was silent" in str(found[0])
    assert "rank 2 was silent" in str(found[1])


@pytest.mark.parametrize("is_endless", [False, True])
def test_work_that_cannot_tell_is_told_for_it_and_not_for_ever(clock, is_endless):
    working, all_joined, noticed = Working(clock), threading.Barrier(2), threading.Event()

    def part(group):
        working.joins(group)
        all_joined.wait(LIMIT)
        try:
            if group.rank == 1:
                with group.working():
                    working.goes_on(WORKING_TIMES - 1 if is_endless else 3)
                    if is_endless:
                        clock.now += 2
                        until(lambda: "flyweight-working" not in resources()["threads"])
                        clock.now += 1  # nobody tells of this time
                        assert noticed.wait(LIMIT)
            group.gather("work", None)
            return group.broadcast("done", "well")
        finally:
            if group.rank == 0:
                noticed.set()

    found = play(2, part)
    if is_endless:
        assert "rank 1 was silent" in str(found[0])
    else:
        assert found == ["well", "well"]
