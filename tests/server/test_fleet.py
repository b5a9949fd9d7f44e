"""What a fleet makes of the slots that ranks write. Here the test is all the ranks."""

import os
import threading

import pytest

from flyweight.errors import SpecError
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State
from flyweight.server import fleet as server_fleet
from flyweight.server.course import Order
from flyweight.server.fleet import MAX_ROUNDS, Fleet
from live_models import resources, settled, until


class Ranks:
    """Two ranks that say what a test wants them to."""

    def __init__(self, path):
        self.path, self.slots = path, [{}, {}]
        self.cells = [self._claimed(rank) for rank in range(2)]

    def _claimed(self, rank):
        cell = Cell(self.path, 2)
        cell.claim(rank)
        return cell

    @property
    def cell(self):
        return self.cells[0]

    def restart(self, rank):
        """Be another life of a rank, with the same number."""
        self.cells[rank].close()
        self.cells[rank] = self._claimed(rank)
        self.slots[rank] = {}
        self.tell(rank)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for cell in self.cells:
            cell.close()

    def tell(self, rank, **fields):
        self.slots[rank] |= fields
        slot = {"pid": os.getpid(), "absent": ()}
        self.cells[rank].write_record(
            rank, RankRecord(**{**slot, "state": State.SERVING, **self.slots[rank]})
        )

    def answer(self, *ranks):
        """Say that what was asked last is done."""
        for rank in ranks:
            self.tell(rank, done=self.cell.request().number)

    def finish(self, rank, version, nbytes=100, seconds=1.0, pause=0.5):
        count = self.slots[rank].get("num_rounds", 0) + 1
        self.tell(
            rank, version=version, num_rounds=count, nbytes=nbytes, round_seconds=seconds,
            pause_seconds=pause,
        )  # fmt: skip


@pytest.fixture
def ranks(tmp_path):
    with Ranks(tmp_path / "policy.cell") as ranks:
        yield ranks


@pytest.fixture
def fleet(ranks):
    fleet = Fleet([Control(ranks.cell.path, 2)])
    yield fleet
    fleet.close()


def test_a_round_of_several_ranks_is_one_entry(ranks, fleet):
    ranks.finish(0, version=1, nbytes=100, seconds=2.0, pause=0.1)
    (first,) = fleet.status()["rounds"]
    assert (first["num_ranks"], first["nbytes"]) == (1, 100)
    ranks.finish(1, version=1, nbytes=50, seconds=1.0, pause=0.3)
    (first,) = fleet.status()["rounds"]
    assert (first["num_ranks"], first["nbytes"], first["seconds"]) == (2, 150, 2.0)
    assert first["pause_seconds"] == 0.3
    assert first["gb_per_second"] == pytest.approx(75e-9)


def test_each_round_has_an_entry_of_its_own_also_of_one_version(ranks, fleet):
    for version in (1, 2, 2, 1):
        for rank in range(2):
            ranks.finish(rank, version)
            fleet.status()
    assert [each["version"] for each in fleet.status()["rounds"]] == [1, 2, 2, 1]


def test_what_is_told_of_a_round_late_is_in_its_entry(ranks, fleet):
    ranks.finish(0, version=1, pause=0.0)
    assert fleet.status()["rounds"][0]["pause_seconds"] == 0.0
    ranks.tell(0, pause_seconds=0.25)
    assert [each["pause_seconds"] for each in fleet.status()["rounds"]] == [0.25]


def test_a_rank_that_started_again_counts_from_the_beginning(ranks, fleet):
    ranks.finish(0, version=1)
    ranks.finish(0, version=2)
    fleet.status()
    ranks.restart(0)
    fleet.status()
    for version in (3, 4):
        ranks.finish(0, version)
    assert [each["version"] for each in fleet.status()["rounds"]] == [2, 4]


def test_the_journal_keeps_only_so_much(ranks, fleet):
    for version in range(MAX_ROUNDS + 10):
        ranks.finish(0, version)
        fleet.status()
    versions = [each["version"] for each in fleet.status()["rounds"]]
    assert versions == list(range(10, MAX_ROUNDS + 10))


def test_a_failure_is_noted_once_and_in_words(ranks, fleet):
    for rank in range(2):
        ranks.tell(rank, version=1)
    for percent in range(3):
        ranks.tell(0, state=State.FAILED, reason="the tensor 'w' is odd", percent=percent)
        fleet.status()
    (fault,) = fleet.status()["faults"]
    assert (fault["replica"], fault["reason"]) == ("policy", "rank 0: the tensor 'w' is odd")


def test_a_cell_that_was_taken_away_is_a_failed_replica(ranks, fleet):
    """C25: what is shown is what is so, not what was."""
    for rank in range(2):
        ranks.tell(rank, version=1)
    assert fleet.status()["replicas"][0]["state"] == "SERVING"
    ranks.cell.path.unlink()
    replica = fleet.status()["replicas"][0]
    assert (replica["state"], replica["version"]) == ("FAILED", None)
    assert "was removed while in use" in replica["reason"]


def test_a_change_is_told_to_whoever_listens_without_being_asked(ranks, fleet):
    heard = []
    with fleet.listening(lambda: heard.append(fleet.news())):
        ranks.tell(0, version=7)
        until(lambda: any(b'"version":7' in data for _, data in heard))
        numbers = [number for number, _ in heard]
        assert numbers == sorted(numbers)


def test_a_fleet_needs_replicas_with_names_of_their_own(ranks):
    with pytest.raises(SpecError, match="a fleet needs a replica"):
        Fleet([])
    with Control(ranks.cell.path, 2) as control, pytest.raises(SpecError, match="'policy'"):
        Fleet([control, control])


def test_a_fleet_that_is_closed_leaves_nothing_behind(ranks):
    before = resources()
    fleet = Fleet([Control(ranks.cell.path, 2)])
    ranks.tell(0, version=1)
    fleet.close()
    fleet.close()
    assert settled(before) == before


# What is asked of them.


def asks(signal, timeout_seconds=20.0):
    return lambda before: Order(signal=signal, timeout_seconds=timeout_seconds)


def test_nothing_is_asked_of_anybody_while_a_rank_is_at_what_was_given_up(ranks, tmp_path, threads):
    other = Ranks(tmp_path / "other.cell")
    fleet = Fleet([Control(other.cell.path, 2), Control(ranks.cell.path, 2)])
    try:
        for rank in range(2):
            ranks.tell(rank, version=1)
            other.tell(rank, version=1)
        (late,) = fleet.carry_out("policy", asks(Signal.PAUSE, timeout_seconds=0.05))
        assert (late.error, late.operation) == ("TransferTimeout", "pause-1")
        (busy,) = fleet.carry_out(None, asks(Signal.CLEAR))
        assert (busy.replica, busy.ending, busy.operation) == ("policy", "busy", "pause-1")
        assert busy.signal == "PAUSE"
        assert "rank 0 of replica 'policy' still works on operation pause-1" in busy.reason
        assert other.cell.request() is None
        ranks.answer(0, 1)
        resuming = threads.submit(fleet.carry_out, "policy", asks(Signal.RESUME))
        until(lambda: ranks.cell.request().number == 2)
        ranks.answer(0, 1)
        assert [each.ending for each in resuming.result(20)] == ["done"]
    finally:
        fleet.close()
        other.__exit__()


def test_a_watcher_that_does_not_come_back_does_not_keep_a_fleet_open(ranks, monkeypatch):
    monkeypatch.setattr(server_fleet, "_CLOSE_SECONDS", 0.05)
    control, is_in, may_go_on = Control(ranks.cell.path, 2), threading.Event(), threading.Event()

    def wait_change(seen, timeout_seconds):
        is_in.set()
        assert may_go_on.wait(60)
        return seen

    monkeypatch.setattr(control.cell, "wait_change", wait_change)
    fleet = Fleet([control])
    (watcher,) = fleet._watchers
    assert is_in.wait(20)
    closing = threading.Thread(target=fleet.close, daemon=True)
    closing.start()
    closing.join(10)
    has_closed = not closing.is_alive()
    may_go_on.set()
    watcher.join(20)
    control.close()
    assert has_closed
