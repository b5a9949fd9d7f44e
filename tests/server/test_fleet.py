"""The journal of a fleet, and its operations. Here the test plays all the ranks."""

import json
import os
import threading

import pytest

from child_processes import LIMIT, resources, settled, until
from flyweight.errors import SpecError
from flyweight.lifecycle.cell import Cell, RankRecord, Request
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State
from flyweight.server import fleet as server_fleet
from flyweight.server.fleet import Fleet
from flyweight.server.journal import MAX_ROUNDS


class Ranks:
    """Two ranks that report what a test wants."""

    def __init__(self, path):
        self.path, self.records = path, [{}, {}]
        self.cells = [self._claimed(rank) for rank in range(2)]

    def _claimed(self, rank):
        cell = Cell(self.path, 2)
        cell.claim(rank)
        return cell

    @property
    def cell(self):
        return self.cells[0]

    def restart(self, rank):
        """Restart a rank: the same number, another process as far as the cell knows."""
        self.cells[rank].close()
        self.cells[rank] = self._claimed(rank)
        self.records[rank] = {}
        self.tell(rank)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for cell in self.cells:
            cell.close()

    def tell(self, rank, **fields):
        self.records[rank] |= fields
        record = {"pid": os.getpid(), "absent": ()}
        self.cells[rank].write_record(
            rank, RankRecord(**{**record, "state": State.SERVING, **self.records[rank]})
        )

    def answer(self, *ranks):
        """Answer the last request."""
        for rank in ranks:
            self.tell(rank, done=self.cell.request().number)

    def finish(self, rank, version, nbytes=100, seconds=1.0, pause=0.5):
        count = self.records[rank].get("num_rounds", 0) + 1
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


def test_each_round_has_its_own_entry_even_for_the_same_version(ranks, fleet):
    for version in (1, 2, 2, 1):
        for rank in range(2):
            ranks.finish(rank, version)
            fleet.status()
    assert [each["version"] for each in fleet.status()["rounds"]] == [1, 2, 2, 1]


def test_a_late_report_of_a_round_is_added_to_its_entry(ranks, fleet):
    ranks.finish(0, version=1, pause=0.0)
    assert fleet.status()["rounds"][0]["pause_seconds"] == 0.0
    ranks.tell(0, pause_seconds=0.25)
    assert [each["pause_seconds"] for each in fleet.status()["rounds"]] == [0.25]


def test_a_restarted_rank_counts_its_rounds_from_zero(ranks, fleet):
    ranks.finish(0, version=1)
    ranks.finish(0, version=2)
    fleet.status()
    ranks.restart(0)
    fleet.status()
    for version in (3, 4):
        ranks.finish(0, version)
    assert [each["version"] for each in fleet.status()["rounds"]] == [2, 4]


def test_the_journal_has_a_limited_length(ranks, fleet):
    for version in range(MAX_ROUNDS + 10):
        ranks.finish(0, version)
        fleet.status()
    versions = [each["version"] for each in fleet.status()["rounds"]]
    assert versions == list(range(10, MAX_ROUNDS + 10))


def test_a_failure_is_recorded_once_with_its_reason(ranks, fleet):
    for rank in range(2):
        ranks.tell(rank, version=1)
    for percent in range(3):
        ranks.tell(0, state=State.FAILED, reason="the tensor 'w' is odd", percent=percent)
        fleet.status()
    faults = fleet.status()["faults"]  # the first may be that rank 1 has not started yet
    (fault,) = [each for each in faults if "rank 0" in each["reason"]]
    assert (fault["replica"], fault["reason"]) == ("policy", "rank 0: the tensor 'w' is odd")


def test_a_removed_cell_is_a_failed_replica(ranks, fleet):
    """C25: the status is read, not remembered."""
    for rank in range(2):
        ranks.tell(rank, version=1)
    assert fleet.status()["replicas"][0]["state"] == "SERVING"
    ranks.cell.path.unlink()
    replica = fleet.status()["replicas"][0]
    assert (replica["state"], replica["version"]) == ("FAILED", None)
    assert "was removed while in use" in replica["reason"]


def test_listeners_are_notified_of_each_change(ranks, fleet):
    heard = []
    with fleet.listening(lambda: heard.append(fleet.latest_status())):
        ranks.tell(0, version=7)
        until(lambda: any(b'"version":7' in data for _, data in heard))
        numbers = [number for number, _ in heard]
        assert numbers == sorted(numbers)


def test_a_fleet_needs_replicas_with_unique_names(ranks):
    with pytest.raises(SpecError, match="a fleet needs a replica"):
        Fleet([])
    with Control(ranks.cell.path, 2) as control, pytest.raises(SpecError, match="'policy'"):
        Fleet([control, control])


def test_a_closed_fleet_leaks_nothing(ranks):
    before = resources()
    fleet = Fleet([Control(ranks.cell.path, 2)])
    ranks.tell(0, version=1)
    fleet.close()
    fleet.close()
    assert settled(before) == before


# Operations.


def test_nothing_is_sent_to_any_replica_while_a_rank_still_works_on_an_operation_that_timed_out(
    ranks, tmp_path, threads
):
    other = Ranks(tmp_path / "other.cell")
    fleet = Fleet([Control(other.cell.path, 2), Control(ranks.cell.path, 2)])
    try:
        for rank in range(2):
            ranks.tell(rank, version=1)
            other.tell(rank, version=1)
        (late,) = fleet.carry_out(
            "policy", Request(number=0, signal=Signal.PAUSE, timeout_seconds=0.05)
        )
        assert (late.error, late.operation) == ("TransferTimeout", "pause-1")
        (busy,) = fleet.carry_out(None, Request(number=0, signal=Signal.CLEAR))
        assert (busy.replica, busy.ending, busy.operation) == ("policy", "busy", "pause-1")
        assert busy.signal == "PAUSE"
        assert "rank 0" in busy.reason
        assert other.cell.request() is None
        ranks.answer(0, 1)
        resuming = threads.submit(
            fleet.carry_out, "policy", Request(number=0, signal=Signal.RESUME)
        )
        until(lambda: ranks.cell.request().number == 2)
        ranks.answer(0, 1)
        assert [each.ending for each in resuming.result(LIMIT)] == ["done"]
    finally:
        fleet.close()
        other.__exit__()


def test_listeners_are_notified_of_an_operation_that_changes_no_state(ranks, fleet, threads):
    for rank in range(2):
        ranks.tell(rank, version=1)
    resuming = threads.submit(fleet.carry_out, None, Request(number=0, signal=Signal.RESUME))
    until(lambda: ranks.cell.request() is not None)
    ranks.answer(0, 1)
    assert [each.ending for each in resuming.result(LIMIT)] == ["done"]
    operations = json.loads(fleet.latest_status()[1])["operations"]
    assert [each["id"] for each in operations] == ["resume-1"]


def test_a_request_that_was_never_started_is_not_in_the_journal(fleet):
    (answer,) = fleet.carry_out(None, Request(number=0, signal=Signal.PAUSE))
    assert (answer.ending, answer.operation, answer.error) == ("failed", None, "PeerLost")
    status = fleet.status()
    assert (status["operations"], status["faults"]) == ([], [])
    assert not fleet.endings


def test_a_watcher_that_hangs_does_not_block_close(ranks, monkeypatch):
    monkeypatch.setattr(server_fleet, "CLOSE_SECONDS", 0.05)
    control, is_in, may_go_on = Control(ranks.cell.path, 2), threading.Event(), threading.Event()

    def wait_change(seen, timeout_seconds):
        is_in.set()
        assert may_go_on.wait(3 * LIMIT)
        return seen

    monkeypatch.setattr(control.cell, "wait_change", wait_change)
    fleet = Fleet([control])
    assert is_in.wait(LIMIT)
    (watcher,) = [each for each in threading.enumerate() if each.name == "flyweight-fleet"]
    closing = threading.Thread(target=fleet.close, daemon=True)
    closing.start()
    closing.join(LIMIT)
    has_closed = not closing.is_alive()
    may_go_on.set()
    watcher.join(LIMIT)
    control.close()
    assert has_closed
