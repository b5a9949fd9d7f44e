"""Worker threads: every job is done once, the first error stops the others, nobody works on."""

import threading

import pytest

from child_processes import LIMIT
from flyweight.events import listening
from flyweight.memory import Staging
from flyweight.worker_threads import run_jobs, run_on_threads


def run(jobs, work, *, num_threads, verb=None, total_bytes=0):
    run_jobs(
        jobs,
        work,
        num_threads=num_threads,
        staging=Staging(shelf_bytes=1 << 20),
        staging_bytes=64,
        verb=verb,
        total_bytes=total_bytes,
    )


@pytest.mark.parametrize("num_threads", [1, 3, 50])
def test_every_job_is_done_once_in_memory_of_its_threads_own(num_threads):
    done, blocks, lock = [], {}, threading.Lock()

    def work(job, block):
        block[:] = job % 256
        with lock:
            done.append(job)
            blocks.setdefault(threading.get_ident(), block)
        assert (block == job % 256).all()
        return job

    run(range(40), work, num_threads=num_threads)
    assert sorted(done) == list(range(40))
    assert len(blocks) <= num_threads


def test_progress_counts_up_to_the_total():
    seen = []
    with listening(seen.append):
        run([5, 6, 7], lambda job, _: job, num_threads=2, verb="save", total_bytes=18)
    assert {event.kind for event in seen} == {"progress"}
    assert sorted(event.fields["done_bytes"] for event in seen)[-1] == 18
    assert {event.fields["total_bytes"] for event in seen} == {18}


def test_without_a_verb_nothing_is_emitted():
    seen = []
    with listening(seen.append):
        run([5, 6], lambda job, _: job, num_threads=2)
    assert seen == []


def test_the_first_error_stops_the_others_after_their_job():
    started = threading.Barrier(3)

    def work(job, _):
        if job < 3:
            started.wait(LIMIT)
        if job == 1:
            raise KeyError(job)
        return 1

    with pytest.raises(KeyError):
        run(range(10**12), work, num_threads=3)


def test_no_call_runs_once_run_on_threads_has_raised():
    both, left = threading.Barrier(2), []

    def work(jobs):
        if both.wait(LIMIT) == 0:
            raise ValueError("first")
        for _ in jobs:  # until the error of the other thread ends it
            pass
        threading.Event().wait(0.05)  # a caller that did not wait would be gone by then
        left.append(1)

    with pytest.raises(ValueError, match="first"):
        run_on_threads(range(10**12), work, 2, "test")
    assert left == [1]
