"""Worker threads: several threads work through a list of jobs.

The first error stops the other threads after the job they are in, and so does Ctrl-C.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event, Lock
from time import monotonic, sleep
from typing import TypeVar

from flyweight.events import emit
from flyweight.memory import Bytes, Staging

Job = TypeVar("Job")
_POLL_SECONDS = 0.002


def default_threads() -> int:
    """Return how many threads keep disk and memory busy: while half of them wait, others hash."""
    return max(4, min(8, 2 * len(os.sched_getaffinity(0))))


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job, Bytes], int],
    *,
    num_threads: int,
    staging: Staging,
    staging_bytes: int,
    verb: str | None,
    total_bytes: int,
) -> None:
    """Call `work(job, block)` for each job, in order, on up to `num_threads` threads.

    `block` is the thread's own `staging_bytes` of memory, lent by `staging`; `work` returns how
    many bytes it moved. With a `verb`, a "progress" event follows each job.
    """
    lock, started, done_bytes = Lock(), monotonic(), 0

    def run(queue: Iterator[Job]) -> None:
        nonlocal done_bytes
        with staging.lend(staging_bytes) as block:
            for job in queue:
                nbytes = work(job, block)
                with lock:
                    done_bytes += nbytes
                    done = done_bytes
                if verb:
                    emit(
                        "progress",
                        verb=verb,
                        done_bytes=done,
                        total_bytes=total_bytes,
                        seconds=monotonic() - started,
                    )

    run_on_threads(jobs, run, num_threads, "flyweight")


def run_on_threads(
    jobs: Sequence[Job], work: Callable[[Iterator[Job]], None], num_threads: int, name: str
) -> None:
    """Call `work` on up to `num_threads` threads and raise the first error.

    Each call gets an iterator: it takes the next job, until there are none or a call has failed.
    No call is running when this returns or raises, however often Ctrl-C is pressed meanwhile,
    because the caller goes on to close or reuse the memory that the threads work on.
    """
    queue, num_threads = iter(jobs), min(num_threads, len(jobs))
    if num_threads <= 1:
        work(queue)
        return
    lock, stop, num_running = Lock(), Event(), 0

    def taken() -> Iterator[Job]:
        while not stop.is_set():
            with lock:
                job = next(queue, None)
            if job is None:
                return
            yield job

    def counted() -> None:
        nonlocal num_running
        with lock:
            if stop.is_set():
                return
            num_running += 1
        try:
            work(taken())
        finally:
            with lock:
                num_running -= 1

    def finish() -> None:
        # Not by joining: Python 3.11 takes a thread for ended once its join was interrupted.
        interrupt = None
        while True:
            try:
                stop.set()
                while num_running:
                    sleep(_POLL_SECONDS)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    with ThreadPoolExecutor(num_threads, name) as pool:
        try:
            calls = [pool.submit(counted) for _ in range(num_threads)]
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            finish()
    for each in calls:
        each.result()
