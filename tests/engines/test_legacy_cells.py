"""The old int32 cells (C21 to C25), against real processes that use multiprocessing.shared_memory."""

import os
import secrets
import signal
import sys
import threading
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from child_processes import LIMIT, Child, Command
from flyweight.engines.legacy_cells import (
    KV_CACHE,
    MODEL_WEIGHTS,
    PREFIX_TREE,
    LegacyCell,
    LegacyStatus,
    settle,
)
from flyweight.engines.worker_loop import check_model_weights_status
from flyweight.errors import LifecycleError, SpecError, StoreError, TransferTimeout

NORMAL, UPDATING, CLEARING, CLEARED = LegacyStatus
REQUESTS = (UPDATING, CLEARING)

# An old process: makes or attaches a cell as FastDeploy does, then obeys line by line.
FOREIGN = """
import sys
from multiprocessing.shared_memory import SharedMemory
import numpy as np

held = []
for line in sys.stdin:
    word, *rest = line.split()
    if word == "create":
        try:
            SharedMemory(name=rest[0]).unlink()
        except FileNotFoundError:
            pass
    if word in ("create", "attach"):
        shm = SharedMemory(name=rest[0], **({"create": True, "size": 4} if word == "create" else {}))
        value = np.ndarray([1], np.int32, buffer=shm.buf)
        held.append(shm)
    elif word == "write":
        value[0] = int(rest[0])
    print(int(value[0]), flush=True)
"""


class Foreign(Command):
    """A process of the old kind."""

    def __init__(self):
        super().__init__(sys.executable, "-c", FOREIGN)

    def ask(self, *words):
        """Send a command and return the status that the process then reads in its cell."""
        return int(super().ask(" ".join(map(str, words))))


@pytest.fixture
def id():
    """An engine of this test's own; its cells are removed afterwards."""
    name = f"test{secrets.token_hex(6)}"
    yield name
    for path in Path("/dev/shm").glob(f"*.{name}"):
        path.unlink()


@pytest.fixture
def cell(id, threads):
    with LegacyCell.create(MODEL_WEIGHTS, id) as cell:
        yield cell
        cell.value[0] = NORMAL  # whatever happened, no thread stays in a loop
        threads.shutdown()


@pytest.fixture
def cache(id):
    with LegacyCell.create(KV_CACHE, id) as cell:
        yield cell


def test_a_cell_of_an_old_process_is_read_and_written_under_its_old_name(id):  # C21
    with Foreign() as old:
        for name in (MODEL_WEIGHTS, KV_CACHE, PREFIX_TREE):
            assert old.ask("create", f"{name}.{id}") == 0
            with LegacyCell(name, id) as ours:
                for status in LegacyStatus:
                    old.ask("write", status.value)
                    assert ours.status is status
                assert settle(ours, NORMAL, of=UPDATING)
                assert old.ask("read") == 0


def test_an_old_process_attaches_to_a_cell_of_ours(id):  # C21
    with LegacyCell.create(MODEL_WEIGHTS, id, CLEARED) as ours, Foreign() as old:
        assert old.ask("attach", f"{MODEL_WEIGHTS}.{id}") == -2
        old.ask("write", 1)
        assert ours.wait(lambda status: status is UPDATING, LIMIT) is UPDATING
        assert settle(ours, NORMAL, of=UPDATING)
        assert old.ask("read") == 0


def _attach_and_write(id, pipe):
    cell = LegacyCell(MODEL_WEIGHTS, id)
    cell.ask(UPDATING)
    pipe.send(("asked", None))
    pipe.recv()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_that_attached_leaves_the_cell_behind_however_it_ends(id, cell, is_killed):  # C25
    with Child(_attach_and_write, id) as child:
        assert child.told() == ("asked", None)
        if is_killed:
            child.kill(signal.SIGKILL)
        else:
            child.send("end")
        child.join()
    cell.check_current()
    assert cell.status is UPDATING
    with LegacyCell(MODEL_WEIGHTS, id) as again:
        assert settle(again, NORMAL, of=UPDATING)
    assert cell.status is NORMAL


def test_to_create_does_not_delete_nor_reset_a_live_cell(id, cell):  # C25
    cell.ask(CLEARING)
    with LegacyCell.create(MODEL_WEIGHTS, id, NORMAL) as again:
        assert again.status is CLEARING
        again.value[0] = CLEARED
    assert cell.status is CLEARED
    cell.check_current()


def test_a_cell_that_an_old_process_replaces_is_noticed_by_who_waits(id, cell, threads):  # C25
    cell.value[0] = CLEARED
    runner = Runner(cell)
    waiting = threads.submit(check_model_weights_status, cell, None, runner, 7, True)
    with Foreign() as old:
        old.ask("create", f"{MODEL_WEIGHTS}.{id}")  # as an engine that restarts does
        with pytest.raises(LifecycleError, match="removed|replaced"):
            waiting.result(LIMIT)
        with LegacyCell(MODEL_WEIGHTS, id) as again:
            assert again.status is NORMAL


def test_what_is_no_cell_is_refused(id, tmp_path):
    with pytest.raises(StoreError, match="No such file"):
        LegacyCell(MODEL_WEIGHTS, id)
    with pytest.raises(SpecError, match="name"):
        LegacyCell("../etc/passwd", id)
    for size in (0, 3, 8, 4096):
        (tmp_path / f"{KV_CACHE}.{size}").write_bytes(bytes(size))
        with pytest.raises(LifecycleError, match=f"{size} bytes"):
            LegacyCell(KV_CACHE, size, directory=str(tmp_path))
    whole = tmp_path / f"{KV_CACHE}.9"
    whole.write_bytes(bytes(4))
    (tmp_path / f"{KV_CACHE}.link").symlink_to(whole)
    with pytest.raises(StoreError):
        LegacyCell(KV_CACHE, "link", directory=str(tmp_path))
    whole.chmod(0o666)
    with pytest.raises(LifecycleError, match="666"):
        LegacyCell(KV_CACHE, 9, directory=str(tmp_path))


def test_a_number_that_means_nothing_is_said_so(cell):
    cell.value[0] = 7
    with pytest.raises(LifecycleError, match="says 7"):
        check_model_weights_status(cell, None, Runner(cell), 7, False)
    with pytest.raises(SpecError, match="request"):
        cell.ask(NORMAL)


def test_a_wait_ends_at_its_deadline(cell):
    with pytest.raises(TransferTimeout, match="NORMAL"):
        cell.wait(lambda status: status is CLEARED, 0.05)


def test_a_closed_cell_leaves_no_file_open(id):
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        cell = LegacyCell.create(MODEL_WEIGHTS, id)
        cell.close()
        cell.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("found", "request_", "result"), list(product(LegacyStatus, REQUESTS, (NORMAL, CLEARED)))
)
def test_a_result_never_replaces_another_request(cell, found, request_, result):  # C23
    cell.value[0] = found
    is_other = found in REQUESTS and found is not request_
    assert settle(cell, result, of=request_) is not is_other
    assert cell.status is (found if is_other else result)


class Runner:
    """FastDeploy's runner, as far as its worker loop sees it."""

    def __init__(self, cell, rank=0):
        self._cell, self.did = cell, []
        self.parallel_config = SimpleNamespace(tensor_parallel_rank=rank)
        self.faults, self.meanwhile = {}, {}
        self.kv_cache = None

    def clear_requests(self):
        self._step("clear_requests")

    def update_parameters(self, pid):
        self._step("update_parameters")
        self._end(UPDATING, NORMAL, pid)

    def clear_parameters(self, pid):
        self._step("clear_parameters")
        self._end(CLEARING, CLEARED, pid)

    def _step(self, name):
        self.did.append(name)
        self.meanwhile.pop(name, lambda: None)()
        if name in self.faults:
            raise self.faults.pop(name)

    def _end(self, request, result, pid):
        assert pid == 7
        if self.kv_cache is not None:
            assert self.kv_cache.status is request
        if self.parallel_config.tensor_parallel_rank == 0:
            settle(self._cell, result, of=request)


def test_the_loop_updates_and_clears_as_the_cell_asks(cell, cache):  # C22
    runner = Runner(cell)
    runner.kv_cache = cache
    check_model_weights_status(cell, cache, runner, 7, True)
    assert runner.did == []  # nothing was asked
    cell.ask(UPDATING)
    check_model_weights_status(cell, cache, runner, 7, False)
    assert (runner.did, cell.status, cache.status) == (
        ["clear_requests", "update_parameters"], NORMAL, UPDATING,
    )  # fmt: skip
    cell.ask(CLEARING)
    check_model_weights_status(cell, cache, runner, 7, False)
    assert runner.did[2:] == ["clear_requests", "clear_parameters"]
    assert (cell.status, cache.status) == (CLEARED, CLEARING)
    check_model_weights_status(cell, cache, runner, 7, False)  # without block it does not stay
    assert len(runner.did) == 4


def test_the_loop_works_on_an_old_wrapper_of_a_cell(id):  # C22
    signal_ = SimpleNamespace(value=np.array([1], np.int32))

    class OldRunner(Runner):
        def _end(self, request, result, pid):
            signal_.value[0] = result

    runner = OldRunner(None)
    check_model_weights_status(signal_, None, runner, 7, True)
    assert runner.did == ["clear_requests", "update_parameters"]


def test_with_block_the_loop_stays_until_normal(cell, threads):  # C22
    runner = Runner(cell)
    cell.ask(CLEARING)
    loop = threads.submit(check_model_weights_status, cell, None, runner, 7, True)
    assert cell.wait(lambda status: status is CLEARED, LIMIT) is CLEARED
    assert not loop.done()
    cell.ask(UPDATING)
    loop.result(LIMIT)
    assert cell.status is NORMAL
    assert runner.did[-1] == "update_parameters"


@pytest.mark.parametrize("step", ["clear_requests", "clear_parameters"])
def test_an_update_asked_for_during_a_clear_is_not_lost(cell, step):  # C23
    runner = Runner(cell)
    runner.meanwhile[step] = lambda: cell.ask(UPDATING)  # the server did not want to wait
    cell.ask(CLEARING)
    check_model_weights_status(cell, None, runner, 7, False)
    assert runner.did == [
        "clear_requests", "clear_parameters", "clear_requests", "update_parameters",
    ]  # fmt: skip
    assert cell.status is NORMAL


def test_a_clear_asked_for_during_an_update_is_not_lost(cell):  # C23
    runner = Runner(cell)
    runner.meanwhile["update_parameters"] = lambda: cell.ask(CLEARING)
    cell.ask(UPDATING)
    check_model_weights_status(cell, None, runner, 7, False)
    assert runner.did[-1] == "clear_parameters"
    assert cell.status is CLEARED


@pytest.mark.parametrize(
    ("request_", "step"),
    [
        (UPDATING, "clear_requests"),
        (UPDATING, "update_parameters"),
        (CLEARING, "clear_requests"),
        (CLEARING, "clear_parameters"),
    ],
)
@pytest.mark.parametrize("was", [NORMAL, UPDATING])
def test_a_failure_reaches_the_caller_and_the_cells_do_not_wait_for_ever(
    cell, cache, request_, step, was
):  # C24
    runner = Runner(cell)
    cache.value[0] = was
    runner.faults[step] = RuntimeError("out of memory")
    cell.ask(request_)
    with pytest.raises(RuntimeError, match="out of memory"):
        check_model_weights_status(cell, cache, runner, 7, True)
    assert cell.status is CLEARED
    assert cache.status is (NORMAL if was is NORMAL else CLEARED)
    cell.ask(UPDATING)
    check_model_weights_status(cell, cache, runner, 7, True)  # nothing has to be restarted
    assert cell.status is NORMAL


@pytest.mark.parametrize("fault", [None, RuntimeError("late")])
def test_a_late_rank_writes_neither_cell(cell, cache, threads, fault):  # C23
    late, is_over = Runner(cell, rank=1), threading.Event()

    def meanwhile():  # the first rank has told its result, and the server asks again
        cache.value[0] = NORMAL
        cell.value[0] = NORMAL
        cell.ask(UPDATING)
        is_over.set()

    late.meanwhile["update_parameters"] = meanwhile
    late.faults = {} if fault is None else {"update_parameters": fault}
    cell.ask(UPDATING)
    loop = threads.submit(check_model_weights_status, cell, cache, late, 7, False)
    assert is_over.wait(LIMIT)
    if fault is not None:
        with pytest.raises(RuntimeError, match="late"):
            loop.result(LIMIT)
    assert (cell.status, cache.status) == (UPDATING, NORMAL)
    cell.value[0] = NORMAL
    if fault is None:
        loop.result(LIMIT)


def test_the_failure_of_the_rank_that_tells_results_is_heard_by_the_others(cell, threads):  # C24
    other, updated = Runner(cell, rank=1), threading.Event()
    other.meanwhile["update_parameters"] = updated.set
    cell.ask(UPDATING)
    loop = threads.submit(check_model_weights_status, cell, None, other, 7, True)
    assert updated.wait(LIMIT)
    settle(cell, CLEARED, of=UPDATING)
    with pytest.raises(LifecycleError, match="rank"):
        loop.result(LIMIT)


def test_a_result_that_never_comes_ends_the_wait_and_the_request(cell):  # C24
    cell.ask(UPDATING)
    with pytest.raises(TransferTimeout, match="UPDATING"):
        check_model_weights_status(cell, None, Runner(cell, rank=1), 7, True, timeout_seconds=0.1)
    assert cell.status is CLEARED
