"""Steps that all ranks take together or none of them, over connections that stay."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from child_processes import LIMIT, Child, in_time, resources, settled
from fakes import FakeRendezvousStore, FileRendezvousStore
from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    LifecycleError,
    PeerFailed,
    PeerLost,
    TransferTimeout,
)
from flyweight.ranks.agreement import Ranks
from flyweight.ranks.rendezvous import Rendezvous


def soon(seconds=LIMIT):
    return time.monotonic() + seconds


def play(num_ranks, part, before=lambda: None):
    """Run `part(ranks)` on every rank; return what each returned or raised, once all have ended."""
    store = FakeRendezvousStore()
    made = [Ranks(Rendezvous(rank, num_ranks, store, "steps")) for rank in range(num_ranks)]
    all_have_ended = threading.Barrier(num_ranks)

    def rank_part(ranks):
        try:
            ranks.step("meet", lambda: None, soon())
            return part(ranks)
        except BaseException as error:
            return error
        finally:
            all_have_ended.wait(LIMIT)
            ranks.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_part, made))


def nothing():
    pass


def fail(error):
    raise error


def test_a_rank_alone_needs_no_others():
    ranks, done = Ranks(), []
    assert ranks.step("write", lambda: done.append(1), soon(), n=lambda: len(done)) == [{"n": 1}]
    with pytest.raises(LifecycleError, match="this rank could not write: ZeroDivisionError"):
        ranks.step("write", lambda: 1 / 0, soon())
    with pytest.raises(KeyboardInterrupt):
        ranks.step("write", lambda: fail(KeyboardInterrupt()), soon())
    ranks.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_get_the_facts_of_all_after_the_work(num_ranks):
    def part(ranks):
        done, found = [], []
        for number in range(3):
            found.append(
                ranks.step(f"step {number}", lambda: done.append(1), soon(), n=lambda: len(done))
            )
        return found

    everyone = [[{"n": n + 1}] * num_ranks for n in range(3)]
    assert play(num_ranks, part) == [everyone] * num_ranks


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all_and_the_connections_stay(failing):
    def part(ranks):
        group = ranks._group
        mine = DigestMismatch("of 'w'")
        work = (lambda: fail(mine)) if ranks.rank == failing else nothing
        with pytest.raises(DigestMismatch) as raised:
            ranks.step("verify", work, soon())
        assert (raised.value is mine) == (ranks.rank == failing)
        assert ranks.rank == failing or f"rank {failing}: DigestMismatch: of 'w'" in str(
            raised.value
        )
        ranks.step("go on", nothing, soon())
        return ranks._group is group

    assert play(3, part) == [True] * 3


@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_rank_at_another_step_is_named_on_all_with_both_steps(other):
    def part(ranks):
        ranks.step("commit" if ranks.rank == other else "write", nothing, soon())

    for error in play(3, part):
        assert isinstance(error, LifecycleError)
        assert f"rank {other} 'commit'" in str(error)
        assert "'write'" in str(error)


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_an_interrupted_rank_is_named_by_the_others_at_once(interrupted):
    def part(ranks):
        work = (lambda: fail(KeyboardInterrupt())) if ranks.rank == interrupted else nothing
        ranks.step("write", work, soon(3 * LIMIT))

    found = play(3, part)
    for rank, error in enumerate(found):
        assert isinstance(error, KeyboardInterrupt if rank == interrupted else PeerFailed)
        if rank != interrupted:
            assert f"rank {interrupted} failed in step 'write': KeyboardInterrupt" in str(error)


@pytest.mark.parametrize(("late", "seconds"), [(1, 0.3), (2, 0.3), (0, 1.3)])
def test_a_missing_rank_is_given_up_at_the_deadline_and_named(late, seconds):
    """The others wait a fixed second longer for the coordinator's word, and no more."""
    given_up = threading.Barrier(3)

    def part(ranks):
        try:
            if ranks.rank == late:
                return
            with in_time(seconds):
                ranks.step("write", nothing, soon(0.3))
        finally:
            given_up.wait(LIMIT)

    for rank, error in enumerate(play(3, part)):
        if rank != late:
            assert isinstance(error, TransferTimeout)
            assert f"rank {late} was silent" in str(error)


def test_after_a_missed_deadline_the_next_step_meets_again():
    given_up = threading.Barrier(2)

    def part(ranks):
        if ranks.rank == 0:
            with pytest.raises(TransferTimeout):
                ranks.step("write", nothing, soon(0.1))
        given_up.wait(LIMIT)
        if ranks.rank == 1:  # its answer of the step that is over is nobody's
            with pytest.raises(FlyweightError):
                ranks.step("write", nothing, soon(), fact=lambda: "of the first")
        return ranks.step("write", nothing, soon(), fact=lambda: "of the second")

    assert play(2, part) == [[{"fact": "of the second"}] * 2] * 2


def test_a_rank_that_leaves_is_named_and_an_error_of_ones_own_is_not_lost():
    at_work, has_left = threading.Barrier(3), threading.Event()

    def part(ranks):
        def work():
            at_work.wait(LIMIT)
            assert has_left.wait(LIMIT)
            if ranks.rank == 2:
                raise DigestMismatch("of 'w'")

        if ranks.rank == 1:
            at_work.wait(LIMIT)
            ranks.close()
            has_left.set()
        else:
            ranks.step("write", work, soon(3 * LIMIT))

    waiting, _, failing = play(3, part)
    assert isinstance(waiting, PeerFailed)
    assert "rank 1 has left" in str(waiting)
    assert isinstance(failing, DigestMismatch)


def test_no_work_begins_once_a_rank_is_known_to_be_gone():
    has_left, done = threading.Event(), []

    def part(ranks):
        if ranks.rank == 1:
            ranks.close()
            has_left.set()
        else:
            assert has_left.wait(LIMIT)
            ranks.step("write", lambda: done.append(1), soon())

    assert isinstance(play(2, part)[0], PeerFailed)
    assert done == []


def test_close_from_another_thread_ends_a_step_that_waits():
    works, is_closed = threading.Event(), threading.Event()

    def part(ranks):
        def close():
            assert works.wait(LIMIT)
            ranks.close()
            is_closed.set()

        if ranks.rank == 0:
            closing = threading.Thread(target=close)
            closing.start()
            with pytest.raises((PeerFailed, PeerLost)):
                ranks.step("write", works.set, soon(3 * LIMIT))
            closing.join(LIMIT)
        else:
            assert is_closed.wait(LIMIT)
            with pytest.raises(FlyweightError):
                ranks.step("write", nothing, soon(3 * LIMIT))

    assert play(2, part) == [None, None]


def test_steps_leave_no_thread_and_no_file_behind():
    play(3, lambda ranks: ranks.step("write", nothing, soon()))
    before = resources()
    for _ in range(3):
        play(3, lambda ranks: ranks.step("write", nothing, soon()))
        play(3, lambda ranks: ranks.step("write", lambda: fail(PeerLost("boom")), soon()))
    assert settled(before) == before


def rank_process(directory, rank, num_ranks, pipe):
    """Take the steps that the test asks for, and say how each ended."""
    ranks = Ranks(
        Rendezvous(rank, num_ranks, FileRendezvousStore(directory), "steps", token="secret")
    )
    for what, blow in iter(pipe.recv, None):
        ranks.renew() if what == "meet" else None
        work = (lambda blow=blow: os.kill(os.getpid(), blow)) if blow else nothing
        try:
            ranks.step(what, work, soon(3 * LIMIT))
            pipe.send("done")
        except FlyweightError as error:
            pipe.send(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_rank_is_named_at_once_and_comes_back(tmp_path, killed):
    def started(rank):
        return Child(rank_process, tmp_path, rank, 3)

    children = [started(rank) for rank in range(3)]

    def step(what, blow=0):
        for rank, child in enumerate(children):
            child.send((what, blow if rank == killed else 0))
        return [child.told() for rank, child in enumerate(children) if not blow or rank != killed]

    try:
        for _ in range(2):
            assert step("meet") == ["done"] * 3
            assert step("write") == ["done"] * 3
            for told in step("commit", signal.SIGKILL):
                assert f"rank {killed} closed its connection" in told
            children[killed].__exit__(None, None, None)
            children[killed] = started(killed)
    finally:
        for child in children:
            with suppress(OSError):
                child.send(None)
            child.__exit__(None, None, None)
