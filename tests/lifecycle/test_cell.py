"""What a status cell promises, and every way in which its file can be wrong."""

import errno
import multiprocessing.shared_memory
import os
import random
import resource
import signal as signals
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import wait

import msgspec
import pytest

import flyweight as fw
from child_processes import LIMIT, SPAWN, Child, exit_code, in_time, resources, settled, until
from flyweight.errors import LifecycleError, SpecError, StoreError, TransferTimeout
from flyweight.forks import fork_lock
from flyweight.lifecycle import cell_file
from flyweight.lifecycle.cell import MAX_RANKS, Cell, RankRecord, Request
from flyweight.lifecycle.cell_file import HEADER, PROTOCOL, CellFile, locked
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.states import Signal, State, Tag
from flyweight.lifecycle.worker import Worker
from versioned_models import weights

RECORD_BYTES = 2048
FIRST_SLOT = 64 + 8 + 2 * RECORD_BYTES
PAUSE = Request(number=1, signal=Signal.PAUSE)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "engine.cell"


def inode(path):
    found = os.stat(path)
    return found.st_dev, found.st_ino


def reheaded(path, **changes):
    """Write some fields of a cell's header anew."""
    names = ("magic", "protocol", "num_ranks", "epoch", "boot")
    with open(path, "r+b") as file:
        fields = dict(zip(names, HEADER.unpack(file.read(HEADER.size)), strict=True))
        file.seek(0)
        file.write(HEADER.pack(*{**fields, **changes}.values()))


def resized(path, nbytes):
    os.truncate(path, nbytes)


# The file.


def test_a_cell_is_made_whole_and_private_with_its_directory(tmp_path):
    path = tmp_path / "some" / "run" / "cell"
    with Cell(path, 3) as cell:
        assert cell.request() is None
        assert cell.records() == [None, None, None]
    found = os.stat(path)
    assert found.st_mode & 0o777 == 0o600
    assert found.st_blocks * 512 >= found.st_size  # a full disk is noticed here, not at a store
    assert os.listdir(path.parent) == ["cell"]
    assert os.stat(path.parent).st_mode & 0o777 == 0o700


def test_who_comes_later_finds_what_was_told_before(path):
    """C25: the file outlives all who use it."""
    with Cell(path, 2) as cell:
        epoch = cell.epoch
        cell.write_request(PAUSE)
        cell.write_record(1, RankRecord(pid=7, state=State.PAUSED))
    with Cell(path, 2) as cell:
        assert cell.epoch == epoch
        assert cell.request() == PAUSE
        assert cell.records() == [None, RankRecord(pid=7, state=State.PAUSED)]


def test_all_who_come_at_once_find_one_cell(path, threads, monkeypatch):
    """C25: on nothing, and on what another boot of the machine left; nobody is refused."""
    monkeypatch.setattr(cell_file, "REPLACE_SECONDS", LIMIT)
    for round_ in range(20):
        barrier = threading.Barrier(6)

        def attached(barrier=barrier):
            barrier.wait(LIMIT)
            with Cell(path, 2) as cell:
                return cell.epoch

        epochs = [future.result(LIMIT) for future in [threads.submit(attached) for _ in range(6)]]
        assert len(set(epochs)) == 1
        if round_ % 2:
            os.unlink(path)
        else:
            reheaded(path, boot=b"another boot    ")
    assert os.listdir(path.parent) == []  # nor drafts


MISFITS = {
    "cut inside its header": (lambda path: resized(path, 20), "has 20 bytes"),
    "cut": (lambda path: resized(path, 5000), "has 5000 bytes"),
    "too long": (lambda path: resized(path, 1 << 20), "has 1048576 bytes"),
    "another protocol": (
        lambda path: reheaded(path, protocol=PROTOCOL + 1),
        f"has protocol {PROTOCOL + 1}",
    ),
    "other ranks": (lambda path: reheaded(path, num_ranks=5), "is for 5 ranks, expected 2"),
    "another boot": (lambda path: reheaded(path, boot=bytes(16)), "from before this machine's"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_cell_that_does_not_fit_and_is_not_in_use_is_replaced(path, misfit):
    with Cell(path, 2) as old:
        before = inode(path)
        MISFITS[misfit][0](path)
        with Cell(path, 2) as cell:
            assert inode(path) != before
            cell.claim(None)
            cell.write_request(PAUSE)
            assert cell.request() == PAUSE
        with pytest.raises(LifecycleError, match="was replaced by another run"):
            old.check_current()
    assert os.listdir(path.parent) == [path.name]


def test_a_cell_that_is_in_use_is_never_replaced(tmp_path, threads):
    """C25: whatever is wrong with it, while a controller or a rank has a claim it stays."""

    def refused(misfit, who):
        spoil, text = MISFITS[misfit]
        path = tmp_path / f"{misfit}-{who}"
        with Cell(path, 2) as live:
            live.claim(who)
            spoil(path)
            before = inode(path)
            with pytest.raises(LifecycleError, match=f"{text}.*in use"):
                Cell(path, 2)
            assert inode(path) == before
            live.check_current()

    refusals = [threads.submit(refused, misfit, who) for misfit in MISFITS for who in (None, 1)]
    for each in refusals:
        each.result(LIMIT)


def test_an_old_cell_is_not_replaced_if_a_new_one_has_come_meanwhile(path, threads, monkeypatch):
    """C25: an engine replaces the cell between another process's look at the file and its lock."""
    has_looked, may_go_on = threading.Event(), threading.Event()

    def slowly_locked(*range_):
        if not has_looked.is_set():
            has_looked.set()
            assert may_go_on.wait(LIMIT)
        return locked(*range_)

    Cell(path, 1).close()
    monkeypatch.setattr(cell_file, "locked", slowly_locked)
    late = threads.submit(CellFile(path, 3, 1 << 14).opened)
    assert has_looked.wait(LIMIT)
    with Cell(path, 2) as engine:
        engine.claim(0)
        may_go_on.set()
        with pytest.raises(LifecycleError, match="2 ranks.*in use"):
            late.result(LIMIT)
        engine.check_current()


def test_a_process_waits_for_a_cell_that_another_is_replacing(path, threads, monkeypatch):
    """C25: to replace a cell is to lock all of it; that is not taken for a claim."""
    looks = []

    def watched_locked(*range_):
        looks.append(range_)
        return locked(*range_)

    Cell(path, 1).close()
    monkeypatch.setattr(cell_file, "REPLACE_SECONDS", LIMIT)
    monkeypatch.setattr(cell_file, "locked", watched_locked)
    with open(path, "r+b") as file:
        assert locked(file.fileno(), 0, 0)
        attached = threads.submit(CellFile(path, 2, 1 << 14).opened)
        until(lambda: len(looks) > 2)
    os.close(attached.result(LIMIT))


FOREIGN = {
    "nothing in it": b"",
    "garbage of the right size": random.Random(1).randbytes(64 + 2 * 4104),
    "another magic": b"FLYWSELL" + bytes(20000),
    "text": b"[tool.ruff]\nline-length = 100\n",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_no_cell_is_refused_and_left_alone(path, kind):
    path.write_bytes(FOREIGN[kind])
    path.chmod(0o600)
    with pytest.raises(LifecycleError, match="is not a status cell; choose another path"):
        Cell(path)
    assert path.read_bytes() == FOREIGN[kind]


def make_directory(path):
    path.mkdir()


def make_link(path):
    Cell(path.with_name("real")).close()
    path.symlink_to(path.with_name("real"))


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "code"),
    [(make_directory, errno.EISDIR), (make_link, errno.ELOOP), (make_socket, errno.ENXIO)],
)
def test_what_is_no_file_is_refused_by_name(path, make, code):
    make(path)
    with pytest.raises(StoreError, match="engine.cell") as raised:
        Cell(path)
    assert raised.value.errno == code


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_pipe_is_refused_without_waiting_for_its_other_end(path, mode, threads):
    os.mkfifo(path, mode)
    with pytest.raises(LifecycleError, match="status cell|mode 644"):
        threads.submit(Cell, path).result(LIMIT)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_cell_that_others_could_read_or_write_is_refused(path, mode):
    """C33: who can write it commands the engine."""
    Cell(path).close()
    path.chmod(mode)
    with pytest.raises(
        LifecycleError, match=rf"with mode {mode:o}; a status cell belongs to user \d+ "
    ):
        Cell(path)


def test_a_cell_of_another_user_is_refused(path):
    Cell(path).close()
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a file to another user")
    with pytest.raises(LifecycleError, match="is of user 12345 with mode 600"):
        Cell(path)


def test_a_place_where_no_file_can_be_is_told_with_its_name(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="status cell '.*/file/cell'"):
        Cell(tmp_path / "file" / "cell")


@pytest.mark.parametrize("num_ranks", [0, -1, MAX_RANKS + 1, True, 2.0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(path, num_ranks):
    with pytest.raises(SpecError, match=f"num_ranks is {num_ranks!r}, expected 1 to {MAX_RANKS}"):
        Cell(path, num_ranks)
    assert not path.exists()


def test_a_process_that_changes_its_directory_keeps_its_cell(tmp_path):
    def work(pipe):
        os.chdir(tmp_path)
        with Cell("cell") as cell:
            os.chdir("/")
            cell.claim(None)
            cell.check_current()

    with Child(work) as child:
        child.result()


# Claims.


def claiming(path, rank, pipe):
    """Claim a rank's record, or the request, and keep it until killed."""
    with Cell(path, 2) as cell:
        cell.claim(rank)
        if rank is not None:
            cell.write_record(rank, RankRecord(pid=os.getpid()))
        pipe.send("claimed")
        pipe.recv()


@pytest.mark.parametrize(("rank", "name"), [(None, "the controller"), (1, "rank 1")])
def test_a_second_claimant_is_refused_by_name_until_the_first_is_killed(path, rank, name):
    """C21: one writer for each word. C25: the claim ends with the process, however that does."""
    with Child(claiming, path, rank) as first, Cell(path, 2) as cell:
        assert first.told() == "claimed"
        process = "" if rank is None else f", process {first.pid}"
        with pytest.raises(LifecycleError, match=f"has {name} already{process}; stop that one"):
            cell.claim(rank)
        cell.claim(0)  # another word is free
        first.kill()
        first.join()
        cell.claim(rank)


def test_a_second_controller_is_refused_and_lets_go_of_all(path):
    before = resources()
    with Control(path), pytest.raises(LifecycleError, match="has the controller already"):
        Control(path)
    assert settled(before) == before


def test_a_rank_that_is_none_is_refused(path):
    with Cell(path, 2) as cell:
        for rank in (-1, 2):
            with pytest.raises(SpecError, match=f"rank is {rank}, the cell has ranks 0 to 1"):
                cell.claim(rank)


def claiming_with_a_child(path, pipe):
    cell = Cell(path, 2)
    cell.claim(0)
    cell.write_record(0, RankRecord(pid=os.getpid()))
    pid = os.fork()
    if pid == 0:
        signals.pause()
    pipe.send(pid)
    pipe.recv()


def waiting_for_a_claim_with_a_child(path, pipe):
    """The child is forked while another still has the claim."""
    cell_file.REPLACE_SECONDS = LIMIT  # in this process
    before, cell = Cell(path, 2), Cell(path, 2)
    before.claim(0)
    num_files = len(os.listdir("/proc/self/fd"))
    claiming = threading.Thread(target=cell.claim, args=(0,))
    claiming.start()
    until(lambda: len(os.listdir("/proc/self/fd")) > num_files)
    pid = os.fork()
    if pid == 0:
        signals.pause()
    before.close()
    claiming.join(LIMIT)
    assert not claiming.is_alive()
    cell.write_record(0, RankRecord(pid=os.getpid()))
    pipe.send(pid)
    pipe.recv()


@pytest.mark.parametrize("claiming", [claiming_with_a_child, waiting_for_a_claim_with_a_child])
def test_a_claim_is_not_inherited_by_a_forked_child_that_outlives_its_parent(path, claiming):
    """C25: it would keep the rank's successor out for as long as the child lives."""
    with Child(claiming, path) as first, Cell(path, 2) as cell:
        orphan = first.told()
        try:
            first.kill()
            first.join()
            until(lambda: not cell.record(0).is_alive)  # once the child has run at all
            cell.claim(0)
            os.kill(orphan, 0)  # it lives
        finally:
            os.kill(orphan, signals.SIGKILL)


@pytest.mark.parametrize(
    ("num_ranks", "timeout", "least", "most"),
    [(1, 60.0, 60.0, 60.0), (2, 20.0, 15.0, 15.0), (2, 60.0, 50.0, 51.0), (2, 2.0, 1.5, 1.5)],
)
def test_several_ranks_have_time_to_tell_each_other_how_it_ended(
    path, num_ranks, timeout, least, most
):
    """C24: they listen for each other's last words after their own deadline, before the user's."""
    with Cell(path, num_ranks) as cell, Control(path, num_ranks) as control:
        for rank in range(num_ranks):
            cell.claim(rank)
            cell.write_record(rank, RankRecord(pid=os.getpid()))
        began = time.monotonic()
        control.start(Signal.PAUSE, timeout_seconds=timeout)
        request = cell.next_request(0, LIMIT)
        assert least - 0.01 <= request.timeout_seconds <= most + 0.01
        assert began + least - 0.01 <= request.deadline <= time.monotonic() + most + 0.01


def test_the_error_of_an_operation_is_the_first_one_that_a_rank_answers(path):
    with Cell(path, 2) as cell, Control(path, 2) as control:
        for rank in range(2):
            cell.claim(rank)
            cell.write_record(rank, RankRecord(pid=os.getpid()))
        operation = control.start(Signal.PAUSE, timeout_seconds=LIMIT)
        said = {"error": "LifecycleError", "answer": "rank 1 was silent"}
        for rank in range(2):
            cell.write_record(rank, RankRecord(pid=os.getpid(), taken=1, done=1, **said))
        ended = control.wait(operation, LIMIT)
        assert (ended.error, ended.reason) == ("LifecycleError", "rank 0: rank 1 was silent")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_operation_ends_soon_after_its_timeout_whatever_its_ranks_do(path, num_ranks):
    """C24: they live and say nothing; the first has answered, if there are two."""
    with Cell(path, num_ranks) as cell, Control(path, num_ranks) as control:
        for rank in range(num_ranks):
            cell.claim(rank)
            cell.write_record(rank, RankRecord(pid=os.getpid(), done=int(rank < num_ranks - 1)))
        with in_time(0.5):
            operation = control.start(Signal.PAUSE, timeout_seconds=0.5)
            ended = control.wait(operation, LIMIT)
        assert (ended.ending, ended.error) == ("failed", "TransferTimeout")
        assert f"rank {num_ranks - 1}" in ended.reason
        assert "rank 0" not in ended.reason or num_ranks == 1


def test_no_child_is_forked_before_a_file_that_was_opened_is_known(threads):
    """`os.open` lets other threads run when the file is open, and before it says which it is."""
    with fork_lock:
        forking = threads.submit(exit_code, lambda: 0)
        assert not wait([forking], 0.2).done  # a slow machine forks later: not seen, never red
    assert forking.result(LIMIT) == 0


def test_a_claim_is_not_ended_by_a_forked_child_that_ends(path):
    with Cell(path) as cell, Cell(path) as other:
        cell.claim(0)
        assert exit_code(lambda: 0) == 0
        with pytest.raises(LifecycleError, match="has rank 0 already"):
            other.claim(0)


def attached_and_gone(path, pipe):
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()  # the tracker runs by now
    with Cell(path, 2) as cell:
        cell.claim(1)
        cell.write_record(1, RankRecord(pid=os.getpid()))
    return cell.epoch


def test_a_process_with_a_resource_tracker_leaves_the_cell_when_it_goes(path):
    """C25: neither who attaches and ends, nor who is killed, takes the file with it."""
    with Cell(path, 2) as cell:
        before = inode(path)
        with Child(attached_and_gone, path, context=SPAWN) as child:
            assert child.result() == cell.epoch
        with Child(claiming, path, 0) as child:
            assert child.told() == "claimed"
            child.kill()
            child.join()
        assert inode(path) == before
        cell.check_current()
        assert [record.pid > 0 for record in cell.records()] == [True, True]


# Under its users.


def test_a_removed_cell_is_noticed_by_everyone_who_looks(path):
    with Control(path) as control, Cell(path) as cell:
        path.unlink()
        for notice in (
            cell.check_current,
            lambda: cell.claim(0),
            lambda: control.start(PAUSE.signal),
        ):
            with pytest.raises(LifecycleError, match="was removed while in use"):
                notice()


def test_a_replaced_cell_is_noticed_by_everyone_who_looks(path):
    with Control(path) as control, Cell(path) as cell:
        path.unlink()
        with Cell(path) as other:
            other.check_current()
            for notice in (cell.check_current, lambda: control.start(PAUSE.signal)):
                with pytest.raises(
                    LifecycleError, match="was replaced by another run; attach again"
                ):
                    notice()


def test_a_worker_whose_cell_is_removed_ends_soon_and_says_why(path, address):
    model = weights(1, 1 << 12)
    with fw.Replica(model, address) as replica:
        worker = Worker(ModelEngine(model), replica, path, should_follow=False)
        with worker:
            path.unlink()
            until(lambda: worker.failure is not None)
            assert "was removed while in use" in str(worker.failure)
            until(lambda: worker.operations.state is State.FAILED)


# Records.


@pytest.mark.parametrize("letter", "aß€😀")
def test_words_that_are_too_long_are_cut_between_two_characters(path, letter):
    with Cell(path) as cell:
        for shift in range(4):
            text = "." * shift + letter * 1000
            cell.write_record(0, RankRecord(reason=text, answer=text))
            record = cell.record(0)
            for found in (record.reason, record.answer):
                assert found.endswith("…")
                assert text.startswith(found[:-1])
                assert 690 < len(found.encode()) <= 700


def test_words_that_are_no_text_are_told_all_the_same(path):
    """File names and errors of other libraries may hold half of a character."""
    with Cell(path) as cell:
        cell.write_record(0, RankRecord(reason="disk \udcff is full"))
        assert cell.record(0).reason == "disk ? is full"


def test_the_largest_slot_fits(path):
    most = 2**63 - 1
    record = RankRecord(
        pid=most, started=most, state=State.VERIFYING, absent=tuple(Tag), version=most, pinned=most,
        taken=most, went_back_from=most, num_went_back=most, is_paused_by_hand=True, done=most, error="E" * 60, answer="€" * 233, reason="€" * 233, is_listening=False,
        step="release_experts", percent=99.99, num_running=most, nbytes=most, round_seconds=1e300,
        pause_seconds=1e300, num_rounds=most,
    )  # fmt: skip
    with Cell(path) as cell:
        cell.write_record(0, record)
        assert cell.record(0) == record


def write_record(path, offset, body, crc=None):
    """Show a record of our own making where a counter is."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (count,) = struct.unpack("<I", file.read(4))
        file.seek(offset + 8 + (count & 1) * RECORD_BYTES)
        crc = zlib.crc32(body, zlib.crc32(struct.pack("<I", count))) if crc is None else crc
        file.write(struct.pack("<III", count, len(body), crc) + body)


GOOD = msgspec.msgpack.encode(RankRecord())
DAMAGE = {
    "another checksum": (GOOD, 1, "damaged"),
    "not msgpack": (b"\xc1\xc1", None, "has no readable rank record"),
    "not a record": (msgspec.msgpack.encode({"pid": "seven"}), None, "has no readable rank record"),
    "a field that we do not know": (
        msgspec.msgpack.encode({"color": 1}),
        None,
        "has no readable rank record",
    ),
    "a state that there is not": (msgspec.msgpack.encode({"state": "DOZING"}), None, "DOZING"),
    "text that is none": (b"\x81\xa6reason\xa2\xff\xfe", None, "has no readable rank record"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_told_and_never_taken(path, damage):
    body, crc, text = DAMAGE[damage]
    with Cell(path) as cell:
        cell.write_record(0, RankRecord())
        write_record(path, FIRST_SLOT, body, crc)
        with pytest.raises(LifecycleError, match=text):
            cell.record(0)
        cell.write_record(0, RankRecord(pid=3))  # its writer heals it
        assert cell.record(0) == RankRecord(pid=3)


def test_a_damaged_request_is_told_to_who_waits_for_one(path):
    with Cell(path) as cell:
        cell.write_request(PAUSE)
        write_record(path, 64, b"rubbish", 0)
        with pytest.raises(
            LifecycleError, match="a request in the status cell is damaged; stop all"
        ):
            cell.next_request(0, 5)


def test_a_length_beyond_the_record_is_damage(path):
    with Cell(path) as cell:
        cell.write_request(PAUSE)
        with open(path, "r+b") as file:
            file.seek(64 + 8 + RECORD_BYTES)
            file.write(struct.pack("<III", 1, 0xFFFFFFFF, 0))
        with pytest.raises(LifecycleError, match="damaged"):
            cell.request()


# Waits.


def test_every_wait_ends_at_its_deadline(path):
    """C21: always with a deadline."""
    with Cell(path) as cell:
        cell.write_request(PAUSE)
        bell = cell.wait_change(0, 0)

        def waits_in_vain():
            with pytest.raises(TransferTimeout, match="a sign"):
                cell.wait(lambda records: False, 0.2, "a sign")

        def no_request():
            assert cell.next_request(1, 0.2) is None

        for wait in (waits_in_vain, no_request, lambda: cell.wait_change(bell, 0.2)):
            with in_time(0.2):
                wait()


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_wait_without_time_only_looks(path, timeout):
    with Cell(path) as cell:
        assert cell.next_request(0, timeout) is None
        with pytest.raises(TransferTimeout):
            cell.wait(lambda records: False, timeout)
        cell.write_request(PAUSE)
        assert cell.next_request(0, timeout) == PAUSE
        assert cell.wait(lambda records: True, timeout) == [None]


def test_all_threads_and_processes_that_wait_wake_at_once(path, threads):
    """C21: without polling; who is not woken would wait for longer than the test does."""

    def hear(pipe):
        with Cell(path) as cell:
            pipe.send("there")
            return cell.next_request(0, 3 * LIMIT).number

    with Cell(path) as cell, Child(hear) as first, Child(hear) as second:
        children = (first, second)
        assert [child.told() for child in children] == ["there", "there"]
        futures = [threads.submit(cell.next_request, 0, 3 * LIMIT) for _ in range(3)]
        told = threads.submit(cell.wait, lambda records: records[0] is not None, 3 * LIMIT)
        cell.write_request(PAUSE)
        assert [future.result(LIMIT) for future in futures] == [PAUSE] * 3
        assert [child.result() for child in children] == [1, 1]
        cell.write_record(0, RankRecord(pid=5))
        assert told.result(LIMIT) == [RankRecord(pid=5)]


def test_a_request_of_an_older_number_is_not_taken_for_the_next(path):
    with Cell(path) as cell:
        cell.write_request(PAUSE)
        assert cell.next_request(1, 0.05) is None
        cell.write_request(Request(number=2, signal=Signal.RESUME))
        assert cell.next_request(1, 5).signal is Signal.RESUME


def test_waits_end_at_once_when_their_owner_says_so(path, threads):
    with Cell(path) as cell:
        request = threads.submit(cell.next_request, 0, 3 * LIMIT)
        answer = threads.submit(cell.wait, lambda records: False, 3 * LIMIT)
        cell.end_waits()
        assert request.result(LIMIT) is None
        with pytest.raises(TransferTimeout):
            answer.result(LIMIT)
        assert cell.next_request(0, 3 * LIMIT) is None


def test_a_dead_rank_is_noticed_though_it_rings_no_bell(path, threads):
    """C24: looked up ten times a second by whoever waits."""
    looked = threading.Event()

    def has_died(records):
        looked.set()
        return not records[1].is_alive

    with Cell(path, 2) as cell, Child(claiming, path, 1) as child:
        assert child.told() == "claimed"
        assert cell.record(1).is_alive
        wait = threads.submit(cell.wait, has_died, 3 * LIMIT)
        assert looked.wait(LIMIT)
        child.kill()
        assert wait.result(LIMIT)[1].pid == child.pid


def idle(path, address, pipe):
    """Return what an engine's worker takes that nobody asks for anything.

    How often a second its threads sleep, and its share of a core.
    """
    model = weights(1, 1 << 12)
    with fw.Replica(model, address) as replica, Worker(ModelEngine(model), replica, path):
        pipe.send("there")
        assert pipe.recv() == "measure"
        before = resource.getrusage(resource.RUSAGE_SELF)
        cpu, started = time.process_time(), time.monotonic()
        assert not pipe.poll(1.0)  # this is what is measured
        spent, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
        return (after.ru_nvcsw - before.ru_nvcsw) / spent, (time.process_time() - cpu) / spent


def test_a_worker_that_waits_is_woken_and_does_not_poll(path, address):
    """C21: with its publisher there, which it follows. It sleeps 13 times, and takes one percent."""
    with (
        fw.Publisher(weights(1, 1 << 12), address) as publisher,
        Child(idle, path, address) as child,
    ):
        assert child.told() == "there"
        until(lambda: publisher.replicas)
        child.send("measure")
        sleeps_per_second, share = child.result()
        assert sleeps_per_second < 40
        assert share < 0.2  # of a core, however slow it is: a loop without a sleep takes more


# Ends.


def test_a_closed_cell_leaves_nothing_behind(path):
    before = resources()
    for _ in range(3):
        cell = Cell(path, 4)
        cell.claim(None)
        cell.claim(2)
        cell.close()
        cell.close()
    assert resources() == before


def test_a_closed_cell_says_so(path):
    cell, control = Cell(path), Control(path)
    cell.close()
    control.close()
    for use in (cell.check_current, cell.request, cell.records, control.status):
        with pytest.raises(LifecycleError, match="was closed here"):
            use()
    with pytest.raises(LifecycleError, match="was closed here"):
        control.start(Signal.PAUSE)
