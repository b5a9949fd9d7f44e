"""The crew: a few threads that take jobs in order, each with staging of its own, until all is done.

The first error stops the others after the job they are in, and so does Ctrl-C.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

from flyweight.events import emit
from flyweight.host import on_threads
from flyweight.memory import Bytes, Staging

Job = TypeVar("Job")


def work_through(
    jobs: Sequence[Job],
    work: Callable[[Job, Bytes], int],
    *,
    num_threads: int,
    staging: Staging,
    staging_bytes: int,
    verb: str | None,
    total_bytes: int,
) -> None:
    """Call `work` for each job, which returns how many bytes it moved; progress is emitted."""
    queue, lock, stop = iter(jobs), threading.Lock(), threading.Event()
    started, done_bytes = monotonic(), 0

    def take() -> Job | None:
        with lock:
            return next(queue, None)

    def member() -> None:
        nonlocal done_bytes
        with staging.lend(staging_bytes) as block:
            while not stop.is_set() and (job := take()) is not None:
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

    num_threads = min(num_threads, len(jobs))
    if num_threads <= 1:
        member()
        return
    on_threads(member, num_threads, "flyweight", stop)


def default_threads() -> int:
    """Return how many threads keep disk and memory busy: while half of them wait, others hash."""
    return max(4, min(8, 2 * len(os.sched_getaffinity(0))))
