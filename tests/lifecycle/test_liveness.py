"""Who lives is what the kernel says of its locks: not a number that others may have, or cannot see."""

import json
import os
import signal as signals
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, Command, until
from flyweight.errors import LifecycleError, PeerLost
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.cell_file import is_life_running, locked
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State
from flyweight.lifecycle.weights import StoredWeights
from versioned_models import weights

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SERVING = RankRecord(state=State.SERVING, absent=(), version=3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "engine.cell"


def claiming(path, pipe):
    """Be rank 0, serving, until killed."""
    with Cell(path) as cell:
        cell.claim(0)
        cell.write_record(0, msgspec.structs.replace(SERVING, pid=os.getpid()))
        pipe.send("there")
        pipe.recv()


@pytest.fixture
def rank(path):
    with Child(claiming, path) as child:
        assert child.told() == "there"
        yield child


def killed(child):
    child.kill()
    child.join()


def test_a_living_process_with_the_number_of_the_dead_rank_is_not_taken_for_it(path, rank):
    """C24: numbers come again."""
    with Control(path) as control:
        assert control.status().is_serving
        killed(rank)
        (record,) = control.cell.records()
        me = os.getpid()
        for other in ({"pid": me}, {"pid": me, "started": 1}):
            control.cell.write_record(0, msgspec.structs.replace(record, **other, is_alive=True))
            status = control.status()
            assert (status.state, status.version) == (State.FAILED, None)
            assert status.reason == f"rank 0: process {me} died"
            with pytest.raises(PeerLost, match=f"process {me} died"):
                control.start(Signal.PAUSE)


def test_the_words_of_a_dead_rank_are_not_those_of_a_successor_that_has_said_nothing_yet(
    path, rank
):
    """An engine may take a minute to stand still before its first word: nobody serves until then."""
    killed(rank)
    with Control(path) as control, Cell(path) as successor:
        successor.claim(0)
        assert control.status().state == State.FAILED
        assert not control.cell.record(0).is_alive
        successor.write_record(0, msgspec.structs.replace(SERVING, pid=os.getpid()))
        assert control.status().is_serving


def test_an_operation_asked_of_a_dead_rank_is_not_answered_by_its_successor(path, rank):
    with Control(path) as control:
        operation = control.start(Signal.PAUSE, timeout_seconds=LIMIT)
        rank.stop()  # the controller sees both ends of it at one look
        with Cell(path) as successor:
            killed(rank)
            successor.claim(0)
            successor.write_record(0, RankRecord(pid=os.getpid(), taken=1, done=1))
            assert control.wait(operation, LIMIT).error == "PeerLost"
        assert "rank 0" in operation.reason


def test_a_stopped_rank_lives_and_a_killed_one_does_not(path, rank):
    """C24: one that stands still may go on; only the kernel's word that it ended is an end."""
    with Control(path) as control:
        rank.stop()
        for _ in range(20):
            assert control.status().is_serving
        rank.kill(signals.SIGCONT)
        assert control.status().is_serving
        rank.stop()
        killed(rank)
        assert control.status().state == State.FAILED


def test_a_killed_rank_is_noticed_at_the_next_look(path):
    """C24: as soon as its process has ended; ten times."""
    with Cell(path) as cell:
        for _ in range(10):
            with Child(claiming, path) as child:
                assert child.told() == "there"
                assert cell.record(0).is_alive
                killed(child)
                assert not cell.record(0).is_alive


def test_who_replaces_a_cell_is_nobodys_life(path, rank):
    with Cell(path) as cell, open(path, "r+b") as other:
        record = cell.record(0)
        assert record.is_alive
        assert not locked(other.fileno(), 0, 0)  # nor is a cell replaced under a living rank
        killed(rank)
        assert locked(other.fileno(), 0, 0)
        assert not cell.record(0).is_alive


def asking(path, pipe):
    """Ask whether rank 0 lives, at full speed, until told to end."""
    with Cell(path) as cell:
        cell.record(0)
        pipe.send("there")
        while not pipe.poll():
            cell.record(0)


def test_asking_who_lives_never_takes_nor_holds_up_a_lock(path):
    """C21: a rank that starts has its lock at the first try, whoever asks meanwhile."""
    with Cell(path) as cell:
        cell.claim(0)
        cell.write_record(0, RankRecord(pid=os.getpid()))
    with Child(asking, path) as first, Child(asking, path) as second:
        assert [first.told(), second.told()] == ["there", "there"]
        for _ in range(2000):
            with open(path, "r+b") as file:
                assert locked(file.fileno(), 1, 1)
            with open(path, "r+b") as file:
                assert locked(file.fileno(), 0, 0)
        for child in (first, second):
            assert not child.has_told  # it asks still
            child.send("end")
            child.result()


@pytest.mark.parametrize("number", [0, -1, 1, 1 << 62, 2**63 - 1])
def test_a_number_that_is_no_life_lives_not(path, number):
    with Cell(path) as cell, open(path, "rb") as file:
        cell.claim(0)
        cell.claim(None)
        assert not is_life_running(file.fileno(), number)


def test_lives_of_all_ranks_are_told_apart(path):
    with Cell(path, 64) as cell:
        for rank in range(0, 64, 2):
            cell.claim(rank)
        for rank in range(64):
            cell.write_record(rank, RankRecord(pid=os.getpid()))
        assert [record.is_alive for record in cell.records()] == [True, False] * 32


def test_a_rank_that_is_there_already_is_named_unless_it_has_said_nothing_yet(path):
    with Cell(path) as first, Cell(path) as second:
        first.write_record(0, RankRecord(pid=123456))
        first.claim(0)
        with pytest.raises(LifecycleError, match="rank 0"):
            second.claim(0)


# Other PID namespaces.


def serve(cell, store):
    """An engine, to the end of its input."""
    model = weights(0)
    with fw.Worker(fw.ModelEngine(model), StoredWeights(model, store), cell):
        print(json.dumps(os.getpid()), flush=True)
        sys.stdin.read()


def command(cell, _):
    """A controller: pause and resume, and then tell of the engine's end."""

    def tell(what):
        print(json.dumps(what), flush=True)

    with Control(cell) as control:
        tell(os.getpid())
        until(lambda: control.status().is_serving)
        for signal in (Signal.PAUSE, Signal.RESUME):
            tell(control.wait(control.start(signal, timeout_seconds=LIMIT), LIMIT).ending)
        until(lambda: control.status().state == State.FAILED)
        tell(control.status().reason)


class Contained(Command):
    """A function of this file as process 1 of its own PID namespace, which ends with it."""

    def __init__(self, function, *words):
        before = filter(None, [os.environ.get("PYTHONPATH")])  # flyweight itself may be there
        path = os.pathsep.join([str(Path(__file__).parents[1]), *before])
        super().__init__(*NAMESPACE, sys.executable, __file__, function, *words, PYTHONPATH=path)

    def told(self):
        return json.loads(self.line())


@pytest.fixture
def contained(tmp_path):
    """Start a function in a namespace of its own, beside a store that holds version 1."""
    try:
        tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=LIMIT)
    except FileNotFoundError:
        pytest.skip("there is no unshare command")
    if tried.returncode:
        pytest.skip(f"no PID namespace can be made here: {tried.stderr.strip()}")
    fw.save(weights(1), tmp_path / "store", version=1)
    return lambda function, path: Contained(function, path, tmp_path / "store")


def test_an_engine_in_another_pid_namespace_is_controlled_and_its_death_is_seen(contained, path):
    """C22: containers of one pod; its process 1 is not ours, which lives on."""
    with Control(path) as control, contained("serve", path) as engine:
        assert engine.told() == 1
        until(lambda: control.status().is_serving)
        assert control.status().ranks[0].pid == 1
        for signal in (Signal.PAUSE, Signal.RESUME):
            assert (
                control.wait(control.start(signal, timeout_seconds=LIMIT), LIMIT).ending == "done"
            )
        engine.kill()
        until(lambda: control.status().state == State.FAILED)
        assert control.status().reason == "rank 0: process 1 died"
        with contained("serve", path) as second:  # process 1 again, and another
            assert second.told() == 1
            until(lambda: control.status().is_serving)


def test_an_engine_and_a_controller_each_in_a_pid_namespace_of_its_own(contained, path):
    with contained("serve", path) as engine, contained("command", path) as controller:
        assert (engine.told(), controller.told()) == (1, 1)
        assert (controller.told(), controller.told()) == ("done", "done")
        engine.kill()
        assert controller.told() == "rank 0: process 1 died"


if __name__ == "__main__":
    {"serve": serve, "command": command}[sys.argv[1]](*sys.argv[2:])
