"""The real cell does what the models of test_cell_model.py take for granted.

Its records are written byte by byte, its writers are killed, and it runs at full speed.
"""

import mmap
import os
import random
import struct
import sys
import time

import msgspec
import pytest

from campaign import SEED
from child_processes import LIMIT, Child, until
from flyweight.errors import LifecycleError
from flyweight.lifecycle.cell import Cell, RankRecord, Request
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State, Tag
from rank_processes import run_ranks

# The real cell, byte by byte.

PID = os.getpid()


def record_of(number):
    """A record of which every field follows from one number, and so does its length."""
    return RankRecord(
        pid=number, started=3 * number, state=list(State)[number % 8], version=number,
        absent=tuple(Tag)[: number % 3], taken=number, done=number + 1, error=f"E{number}",
        answer=str(number) * (number % 40), reason="ß" * (number % 50), percent=number / 2,
        num_running=number, nbytes=number**2, num_rounds=number,
    )  # fmt: skip


def words_of(record):
    """A record less what the cell itself knows: which life wrote it, and whether that lasts."""
    return msgspec.structs.replace(record, started=3 * record.taken, is_alive=False)


def request_of(number):
    return Request(
        number=number,
        signal=list(Signal)[number % 12],
        version=2 * number,
        tags=tuple(Tag)[: number % 3],
        may_drain=bool(number % 2),
        timeout_seconds=number / 4,
    )


class Image:
    """A cell's file as bytes, written to from beside the cell's own code."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.memory.close()


WRITES = {
    "record": (
        lambda cell, number: cell.write_record(0, record_of(number)),
        lambda cell: cell.record(0),
        record_of,
    ),
    "request": (
        lambda cell, number: cell.write_request(request_of(number)),
        Cell.request,
        request_of,
    ),
}


def taken_apart(cell, image, write, number):
    """Return what a write changes, as (place, byte): its record's, and its counter's.

    The file is left as it was before.
    """
    before = bytes(image.memory)
    write(cell, number)
    after = bytes(image.memory)
    image.memory[:] = before
    changed = [(at, new) for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]  # fmt: skip
    gaps = [n for n in range(1, len(changed)) if changed[n][0] - changed[n - 1][0] >= 4]
    bell = [each for each in changed if each[0] < 64]
    count = next(each for each in changed if each[0] >= 64)  # a small number: one byte of it
    assert gaps
    return [each for each in changed if each not in bell and each is not count], count


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("order", ["up", "down", "any"])
def test_a_writer_killed_at_any_byte_leaves_the_record_before(tmp_path, kind, order):
    """C23, C25: the real cell does what the model's word does: record first, then its counter."""
    write, read, record_of = WRITES[kind]
    with Cell(tmp_path / "cell") as cell, Image(tmp_path / "cell") as image:
        for number in (5, 6, 39):
            write(cell, number)
        data, count = taken_apart(cell, image, write, 40)
        if order != "up":
            data = data[::-1] if order == "down" else random.Random(7).sample(data, len(data))
        for at, byte in data:
            image.memory[at] = byte
            assert read(cell) == record_of(39)
        image.memory[count[0]] = count[1]
        assert read(cell) == record_of(40)


@pytest.mark.parametrize("kind", WRITES)
def test_a_writer_goes_on_from_wherever_another_was_killed(tmp_path, kind):
    write, read, record_of = WRITES[kind]
    with Cell(tmp_path / "cell") as cell, Image(tmp_path / "cell") as image:
        for number in range(5):
            write(cell, number)
        data, _ = taken_apart(cell, image, write, 5)
        for num_bytes in range(0, len(data), 3):
            for at, byte in data[:num_bytes]:
                image.memory[at] = byte
            with Cell(tmp_path / "cell") as successor:
                write(successor, 6)
                assert read(cell) == read(successor) == record_of(6)


@pytest.mark.parametrize("kind", WRITES)
def test_a_record_that_is_shown_before_it_is_whole_is_damage_and_never_taken(tmp_path, kind):
    """What no writer does, and a machine that reorders stores might: the checksum tells."""
    write, read, record_of = WRITES[kind]
    with Cell(tmp_path / "cell") as cell, Image(tmp_path / "cell") as image:
        write(cell, 38)
        write(cell, 39)
        data, count = taken_apart(cell, image, write, 40)
        image.memory[count[0]] = count[1]
        for at, byte in data[:-1:5]:
            image.memory[at] = byte
            with pytest.raises(LifecycleError, match="damaged"):
                read(cell)
        for at, byte in data:
            image.memory[at] = byte
        assert read(cell) == record_of(40)


@pytest.mark.parametrize("kind", WRITES)
def test_before_every_line_of_a_write_readers_see_a_whole_record(tmp_path, kind):
    """C23, C25: wherever a writer is killed between two lines of its code."""
    write, read, record_of = WRITES[kind]
    with Cell(tmp_path / "cell") as cell, Cell(tmp_path / "cell") as reader:
        write(cell, 39)
        seen = []

        def look(frame, event, argument):
            if event == "line":
                seen.append(read(reader))
            return look

        traced = sys.gettrace()
        sys.settrace(look)
        try:
            write(cell, 40)
        finally:
            sys.settrace(traced)
        first_new = seen.index(record_of(40))
        assert first_new > 0
        assert all(each == record_of(39) for each in seen[:first_new])
        assert all(each == record_of(40) for each in seen[first_new:])


def test_a_counter_that_begins_anew_goes_on(tmp_path):
    """After four thousand million records."""
    with Cell(tmp_path / "cell") as cell, Image(tmp_path / "cell") as image:
        cell.write_request(request_of(1))  # its counter is at 64
        cell.write_request(request_of(2))
        before = image.memory[64 + 8 :]
        struct.pack_into("<I", image.memory, 64, 0xFFFFFFFE)
        assert image.memory[64 + 8 :] == before
        for number in range(3, 9):
            cell.write_request(request_of(number))
            assert cell.request() == request_of(number)
        assert struct.unpack_from("<I", image.memory, 64) == (4,)


# The real cell, killed and at full speed.


def write_for_ever(path, rank, pipe):
    with Cell(path, 2) as cell:
        cell.claim(rank)
        last = cell.request() if rank is None else cell.record(rank)
        number = 0 if last is None else last.number if rank is None else last.taken
        while True:
            number += 1
            if rank is None:
                cell.write_request(request_of(number))
            else:
                cell.write_record(rank, record_of(number))


@pytest.mark.parametrize(
    "num_rounds",
    [pytest.param(5, marks=pytest.mark.check), pytest.param(100, marks=pytest.mark.campaign)],
)
def test_writers_that_are_killed_leave_whole_records_and_successors_go_on(tmp_path, num_rounds):
    """C23, C25: real processes, SIGKILL at random moments; no record is torn and none goes back."""
    run_ranks(0, __file__, "kill_writers", tmp_path / "cell", num_rounds, framework="numpy")


def kill_writers(path, num_rounds):
    rng = random.Random(SEED)
    with Cell(path, 2) as cell:
        numbers = {None: 0, 0: 0, 1: 0}

        def check(who):
            found = cell.request() if who is None else cell.record(who)
            if found is None:
                return 0
            number = found.number if who is None else found.taken
            if who is None:
                assert found == request_of(number)
            else:
                assert words_of(found) == record_of(number)
            assert number >= numbers[who]
            numbers[who] = number
            return number

        for _ in range(int(num_rounds)):
            some = rng.sample([None, 0, 1], 2)
            before = {who: check(who) for who in some}
            first, second = (Child(write_for_ever, path, who) for who in some)
            with first, second:  # killed at its end
                until(lambda: all(check(who) > before[who] for who in some))  # noqa: B023
                assert all(cell.record(who).is_alive for who in some if who is not None)
                for _ in range(rng.randrange(40)):
                    check(rng.choice(some))
            for who in numbers:
                check(who)
            assert not any(record is not None and record.is_alive for record in cell.records())
        assert min(numbers.values()) > 0


NUM_RECORDS = 3000


def tell_many(path, rank, pipe):
    """Write a rank's record at full speed, and read all others' meanwhile."""
    with Cell(path, 3) as cell:
        cell.claim(rank)
        seen = 0
        for number in range(1, NUM_RECORDS + 1):
            cell.write_record(rank, record_of(number))
            other = cell.record((rank + 1) % 3)
            assert other is None or words_of(other) == record_of(other.taken)
            request = cell.request()
            if request is not None:
                assert request == request_of(request.number)
                assert request.number >= seen
                seen = request.number
        return seen


def test_many_processes_at_full_speed_never_read_a_mix(tmp_path):
    """C21, C23: one writer for each word, everybody reads."""
    path = tmp_path / "cell"
    with Cell(path, 3) as cell:
        cell.claim(None)
        number, last = 1, [0, 0, 0]
        cell.write_request(request_of(number))
        children = [Child(tell_many, path, rank) for rank in range(3)]
        while not all(child.has_told for child in children):
            number += 1
            cell.write_request(request_of(number))
            for rank, record in enumerate(cell.records()):
                if record is not None:
                    assert words_of(record) == record_of(record.taken)
                    assert record.taken >= last[rank]
                    last[rank] = record.taken
        for rank, child in enumerate(children):
            with child:
                assert 0 < child.result() <= number
                assert words_of(cell.record(rank)) == record_of(NUM_RECORDS)


NUM_REQUESTS = 1000


def answer_all(path, last, pipe):
    with Cell(path) as cell:
        cell.claim(0)
        pipe.send("there")
        number = 0
        while number < last:
            request = cell.next_request(number, LIMIT)
            assert request is not None, f"request {number + 1} was slept through"
            assert request.number == number + 1, "a request was lost"
            number = request.number
            cell.write_record(0, RankRecord(pid=PID, taken=number, done=number))
        return number


def test_no_wakeup_of_the_real_cell_is_slept_through(tmp_path):
    """C21: there and back a thousand times; who missed one would sleep as long as a hang."""
    path = tmp_path / "cell"
    with Cell(path) as cell, Child(answer_all, path, NUM_REQUESTS) as child:
        cell.claim(None)
        assert child.told() == "there"
        bell = cell.wait_change(0, 0)
        for number in range(1, NUM_REQUESTS + 1):
            cell.write_request(Request(number=number, signal=Signal.PAUSE))
            deadline = time.monotonic() + LIMIT
            while (record := cell.record(0)) is None or record.done != number:
                bell = cell.wait_change(bell, LIMIT)
                assert time.monotonic() < deadline, f"answer {number} was slept through"
        assert child.result() == NUM_REQUESTS


# The real controller.


def test_a_controller_that_comes_anew_waits_for_a_request_that_nobody_has_taken_yet(tmp_path):
    """C23: the trace of the model, in the real thing: the first is gone before the rank woke up."""
    path = tmp_path / "cell"
    me = RankRecord(pid=PID)
    with Cell(path) as rank:
        rank.claim(0)
        rank.write_record(0, me)
        with Cell(path) as first:
            first.claim(None)
            first.write_request(Request(number=1, signal=Signal.PAUSE, timeout_seconds=LIMIT))
        with Control(path) as control:
            operation = control.status().operation
            assert operation is not None
            assert operation.id == "pause-1"
            assert operation.ending == "running"
            rank.write_record(0, RankRecord(pid=PID, taken=1, done=1))
            assert control.wait(operation, LIMIT).ending == "done"
            assert control.start(Signal.RESUME).id == "resume-2"
