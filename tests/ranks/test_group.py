"""Ranks that join a group and learn of each other's end: threads with real sockets between them."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from child_processes import in_time
from flyweight.errors import PeerFailed, PeerLost, SpecError, TransferTimeout, TransportError
from flyweight.ranks import rendezvous
from flyweight.ranks.group import Group
from flyweight.ranks.rendezvous import Rendezvous, join_group

TIMEOUT = 2.0
LONG = 4.0
"""Where it is measured: the coordinator gives up after 3 s of it, and a rank after all of it."""


class FakeRendezvousStore:
    """A store store in memory."""

    def __init__(self):
        self._texts, self._changed = {}, threading.Condition()

    def set(self, key, text, deadline):
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def get(self, key, deadline):
        with self._changed:
            return self._texts.get(key)

    def answer(self, timeout_seconds):
        """Wait for the first answer to anybody; return it without the number of the question."""
        with self._changed:
            self._changed.wait_for(
                lambda: any("/answer/" in key for key in self._texts), timeout_seconds
            )
            answer = next(text for key, text in self._texts.items() if "/answer/" in key)
            return answer.partition(" ")[2]


def play(num_ranks, part, *, coordinator=0, timeout_seconds=TIMEOUT, ranks=None):
    """Run `part(group)` on every rank, and return what each returned or raised."""
    store = FakeRendezvousStore()

    def rank_part(rank):
        try:
            place = Rendezvous(rank, num_ranks, store, "group")
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


def test_no_thread_and_no_socket_is_left_behind():
    import os

    play(3, lambda group: group.gather("a", None))
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        play(3, lambda group: group.gather("a", None))
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_rank_that_never_closes_keeps_no_thread():
    ours, theirs = socket.socketpair()
    before = threading.active_count()
    with theirs:
        Group(0, 2, connections={1: ours}, timeout_seconds=TIMEOUT).close()
        assert threading.active_count() == before
    assert ours.fileno() == -1


def test_a_rank_that_fails_says_why_to_all():
    def part(group):
        if group.rank == 1:
            raise PeerLost("boom")  # any error of its own
        group.gather("work", None)
        return group.broadcast("done", None)

    found = play(3, part)
    assert str(found[1]) == "boom"
    for rank in (0, 2):
        assert isinstance(found[rank], PeerFailed)
        assert "rank 1 failed in step 'join': PeerLost: boom" in str(found[rank])


def test_a_connection_that_closes_names_its_rank():
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)

    def part(group):
        try:
            with group:
                group.gather("work", None)
                return group.broadcast("done", None)
        except TransportError as error:
            return error

    groups = [
        Group(0, 3, connections={1: ours[0], 2: ours[1]}, timeout_seconds=TIMEOUT),
        Group(1, 3, connections={0: theirs[0]}, timeout_seconds=TIMEOUT),
    ]
    theirs[1].close()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(part, groups))
    for error in found:
        assert isinstance(error, PeerLost)
        assert "rank 2 closed its connection in step" in str(error)


def test_silence_is_given_up_in_time_and_the_silent_one_is_named():
    noticed = threading.Barrier(3)

    def part(group):
        try:
            if group.rank != 1:
                with in_time(3, early=0.5):
                    group.gather("work", None)
                    group.broadcast("done", None)
        finally:
            noticed.wait(4 * LONG)

    found = play(3, part, timeout_seconds=LONG)
    for rank in (0, 2):
        assert isinstance(found[rank], TransferTimeout)
        assert "rank 1 was silent for 3 s in step 'work'" in str(found[rank])


def test_work_that_goes_on_is_no_silence():
    """One rank works for three times the deadline, and tells; all others wait for it."""

    def part(group):
        if group.rank == 1:
            for _ in range(30):
                time.sleep(TIMEOUT / 10)
                group.tick()
        group.gather("work", None)
        return group.broadcast("done", "well")

    assert play(3, part) == ["well"] * 3


def test_a_tick_tells_who_works_that_another_has_ended():
    def part(group):
        if group.rank == 2:
            raise PeerLost("boom")
        for _ in range(200):
            time.sleep(0.01)
            group.tick()

    assert [type(each) for each in play(3, part)] == [PeerFailed, PeerFailed, PeerLost]


def test_ranks_that_make_different_calls_are_told():
    def part(group):
        return group.gather("save" if group.rank else "load", None)

    found = play(2, part)
    assert (
        "rank 1 is at step 'save', this rank 0 at 'load'; all ranks must make the same call"
        in str(found[0])
    )


@pytest.mark.parametrize(
    ("rank", "seconds", "text"),
    [
        (0, 3, "2 ranks did not join within 3 s: [1, 2]"),
        (1, 4, "coordinator rank 0 did not answer within 4 s"),
    ],
)
def test_ranks_that_do_not_come_are_named_in_time(rank, seconds, text):
    with in_time(seconds):
        (error,) = play(3, lambda group: None, ranks=[rank], timeout_seconds=LONG)
    assert isinstance(error, TransferTimeout)
    assert text in str(error)


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"0" * 64 + b"00000001", b"\xff" * 72]
)
def test_strangers_are_turned_away_and_hold_nobody_up(words):
    store = FakeRendezvousStore()

    def stranger():
        name, port, _ = store.answer(5).rsplit(" ", 2)
        with socket.create_connection((name, int(port)), 5) as connection:
            connection.sendall(words)
            connection.settimeout(3)
            assert connection.recv(1) == b""

    def rank_part(rank):
        if rank == 1:
            time.sleep(0.3)  # the stranger is first
        with join_group(Rendezvous(rank, 2, store, "group"), timeout_seconds=4) as group:
            return group.gather("a", group.rank)

    with ThreadPoolExecutor(3) as pool:
        thief = pool.submit(stranger)
        assert list(pool.map(rank_part, range(2))) == [[0, 1], []]
        thief.exception(5)


@pytest.mark.parametrize(
    "frame",
    [b"\xff\xff\xff\xff", struct.pack("<I", 4) + b"junk", struct.pack("<I", 2) + b"[]", struct.pack("<I", 13) + b'{"kind":"no"}'],
)  # fmt: skip
def test_garbage_from_a_rank_is_named_and_ends_the_work(frame):
    ours, theirs = socket.socketpair()
    theirs.send(frame)
    group = Group(0, 2, connections={1: ours}, timeout_seconds=TIMEOUT)
    with theirs, pytest.raises(PeerLost, match="rank 1 sent"), group:
        group.gather("work", None)


def test_ranks_of_other_networks_connect_to_an_address_they_can_reach(monkeypatch):
    """Two ranks that take themselves for strangers: not the loopback, the host's own address."""
    posted = []
    real = rendezvous.location

    def elsewhere():
        return f"{threading.get_ident()} {real().partition(' ')[2]}"

    monkeypatch.setattr(rendezvous, "location", elsewhere)

    class Watched(FakeRendezvousStore):
        def set(self, key, text, deadline):
            posted.append((key, text))
            super().set(key, text, deadline)

    store = Watched()

    def rank_part(rank):
        with join_group(Rendezvous(rank, 2, store, "group"), timeout_seconds=5) as group:
            return group.gather("a", group.rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_part, range(2))) == [[0, 1], []]
    (address,) = [text for key, text in posted if "/answer/" in key]
    assert address.split()[1] == socket.gethostbyname(socket.gethostname())


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(SpecError, match="coordinator_rank is 2, the group has ranks 0 to 1"):
        join_group(Rendezvous(0, 2, FakeRendezvousStore(), "m"), 2)
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(SpecError, match="timeout_seconds is"):
            join_group(Rendezvous(0, 2, FakeRendezvousStore(), "m"), timeout_seconds=seconds)


def test_a_rank_that_missed_a_call_is_not_out_of_step_for_the_next():
    """What a failed rendezvous left in the store answers nobody."""
    store = FakeRendezvousStore()

    def rank_part(rank, calls):
        found = []
        for timeout_seconds in calls:
            try:
                with join_group(
                    Rendezvous(rank, 2, store, "group"), timeout_seconds=timeout_seconds
                ) as group:
                    found.append(group.gather("a", rank))
            except TransferTimeout:
                found.append("late")
        return found

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rank_part, 0, [0.4, 5, 5])
        time.sleep(0.6)
        second = pool.submit(rank_part, 1, [5, 5])
        assert first.result(20) == ["late", [0, 1], [0, 1]]
        assert second.result(20) == [[], []]
    with ThreadPoolExecutor(
        2
    ) as pool:  # and the other way round: the member's first call finds nobody
        second = pool.submit(rank_part, 1, [0.4, 5])
        time.sleep(0.6)
        first = pool.submit(rank_part, 0, [5])
        assert first.result(20) == [[0, 1]]
        assert second.result(20) == ["late", []]


def test_an_arrival_of_an_earlier_call_is_not_answered_again():
    answers = []

    class Watched(FakeRendezvousStore):
        def set(self, key, text, deadline):
            if "/answer/" in key:
                answers.append(key)
            super().set(key, text, deadline)

    store = Watched()

    def rank_part(rank):
        with join_group(Rendezvous(rank, 2, store, "again"), timeout_seconds=TIMEOUT) as group:
            return group.gather("a", rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_part, range(2))) == [[0, 1], []]
    assert len(answers) == 1
    with pytest.raises(TransferTimeout, match="1 ranks did not join"):
        join_group(Rendezvous(0, 2, store, "again"), timeout_seconds=0.4)
    assert len(answers) == 1


def test_ranks_that_take_different_ranks_for_the_coordinator_are_told():
    store = FakeRendezvousStore()

    def rank_part(rank):
        try:
            join_group(
                Rendezvous(rank, 3, store, "group"), 0 if rank != 1 else 2, timeout_seconds=TIMEOUT
            )
        except TransportError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(rank_part, [0, 1]))
    assert "rank 1 takes rank 2 for the coordinator, rank 0 itself" in found[0]


def test_a_silent_rank_is_noticed_while_another_goes_on_working():
    noticed = threading.Barrier(3)

    def part(group):
        try:
            if group.rank != 2:
                with in_time(3, early=0.5):
                    if group.rank == 1:
                        for _ in range(60):
                            time.sleep(LONG / 20)
                            group.tick()
                    group.gather("work", None)
                    group.broadcast("done", None)
        finally:
            noticed.wait(4 * LONG)

    found = play(3, part, timeout_seconds=LONG)
    assert "rank 2 was silent for 3 s" in str(found[0])
    assert "rank 2 was silent for 3 s" in str(found[1])


def test_work_that_cannot_tell_is_told_for_it_and_not_for_ever(monkeypatch):
    noticed = threading.Event()

    def part(group):
        if group.rank == 1:
            with group.working():
                noticed.wait(2 * TIMEOUT)
        try:
            group.gather("work", None)
            return group.broadcast("done", "well")
        finally:
            if group.rank == 0:
                noticed.set()

    assert play(2, part) == ["well", "well"]
    noticed.clear()
    monkeypatch.setattr("flyweight.ranks.group.WORKING_TIMES", 0.2)
    found = play(2, part)
    assert "rank 1 was silent" in str(found[0])


def test_many_silent_strangers_cost_the_ranks_nothing():
    store = FakeRendezvousStore()
    connections = []

    def strangers():
        name, port, _ = store.answer(5).rsplit(" ", 2)
        connections.extend(socket.create_connection((name, int(port)), 5) for _ in range(30))

    def rank_part(rank):
        if rank == 1:
            time.sleep(0.3)
        started = time.monotonic()
        with join_group(Rendezvous(rank, 2, store, "group"), timeout_seconds=5) as group:
            group.gather("a", group.rank)
        return time.monotonic() - started

    with ThreadPoolExecutor(3) as pool:
        crowd = pool.submit(strangers)
        assert max(pool.map(rank_part, range(2))) < 2
        crowd.exception(5)
    for connection in connections:
        connection.close()
