"""Background: a save that continues while the model changes.

What this rank writes is copied once, to staging memory that is kept for the next save, because
fresh pages cost more than the copy. A process runs one background save at a time.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from functools import lru_cache
from time import perf_counter
from typing import Literal

import numpy as np

from flyweight.adapters.model import Model
from flyweight.errors import StoreError, TransferTimeout
from flyweight.events import emit
from flyweight.formats.writer import Beside
from flyweight.memory import STAGING, Bytes, Staging
from flyweight.ranks.group import TIMEOUT_SECONDS
from flyweight.spec.box import Box
from flyweight.spec.manifest import CHUNK_BYTES, Manifest, TensorBox
from flyweight.verbs.commit import PendingCommit, SaveReport, write_and_commit
from flyweight.worker_threads import run_jobs

WhenBusy = Literal["wait", "refuse"]
_COPY_BYTES = 16 << 20
_ALIGN_BYTES = 4096
_STALLED_TIMES = 10

_running: BackgroundSave | None = None


class BackgroundSave:
    """A save in the background: its progress while it runs, its report once it is done."""

    def __init__(self, version: int | None, total_bytes: int) -> None:
        self.version, self.total_bytes, self.done_bytes = version, total_bytes, 0
        self._future: Future[SaveReport] = Future()
        self._count = threading.Lock()

    @property
    def is_done(self) -> bool:
        """True once the save has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> SaveReport:
        """Return the report once the version is durable and visible, or raise the save's error.

        `timeout_seconds` limits this wait and raises TransferTimeout; the save goes on. With None
        the wait ends when the save does, which has deadlines of its own.
        """
        if not futures.wait([self._future], timeout_seconds).done:
            raise TransferTimeout(
                f"version {self.version} is still being saved after {timeout_seconds:g} s: "
                f"{self.done_bytes} of {self.total_bytes} bytes"
            )
        return self._future.result()

    def _progress(self, nbytes: int) -> None:
        with self._count:
            self.done_bytes += nbytes

    def _run(self, pending: PendingCommit, held: ExitStack) -> None:
        """Write and commit, in the thread of this save; then close all that `held` holds."""
        try:
            with held:
                report = write_and_commit(pending, self._progress)
        except BaseException as error:
            try:
                emit("save.failed", version=self.version, error=f"{type(error).__name__}: {error}")
            finally:
                self._future.set_exception(error)
        else:
            self._future.set_result(report)


def check_idle() -> None:
    """Raise StoreError if a background save of this process still runs."""
    running = _running
    if running is not None and not running.is_done:
        raise StoreError(
            f"version {running.version} is still being saved in the background: "
            f"{running.done_bytes} of {running.total_bytes} bytes; wait for it, or save with "
            f"when_busy='wait'"
        )


def wait_for_background(timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Return once no background save runs; its handle has its report or error.

    Raises StoreError if it writes no byte for ten times the timeout: its disk hangs.
    """
    running = _running
    if running is None:
        return
    done_bytes = -1
    while not running.is_done and done_bytes != running.done_bytes:
        done_bytes = running.done_bytes
        futures.wait([running._future], _STALLED_TIMES * timeout_seconds)
    check_idle()


# An exiting interpreter cannot start threads, and a save starts some: wait before that.
getattr(threading, "_register_atexit", atexit.register)(wait_for_background)


def start_background(source: Model, pending: PendingCommit, stack: ExitStack) -> BackgroundSave:
    """Copy this rank's share, then write it in a thread, which takes over what `stack` holds.

    The digests of replicas that other ranks write are computed during the copy.
    """
    global _running  # noqa: PLW0603
    pending.started = perf_counter()
    handle = BackgroundSave(pending.manifest.version, sum(each.nbytes for each in pending.share))
    staging = _kept_staging(source.staging.allocate)
    memory = stack.enter_context(staging.lend(sum(map(_aligned_bytes, pending.share))))
    staged = StagedSource(source.manifest, pending.share, memory)
    _copy(source, staged, pending)
    pending.source, pending.beside = staged, ()
    held = stack.pop_all()
    thread = threading.Thread(target=handle._run, args=(pending, held), name="flyweight-save")
    try:
        thread.start()
    except BaseException:
        held.close()
        raise
    _running = handle
    return handle


@lru_cache(maxsize=1)
def _kept_staging(allocate: Callable[[int], Bytes]) -> Staging:
    """Return the staging that is kept between saves, of the same kind as the source's own."""
    return Staging(shelf_bytes=1 << 62, allocate=allocate, max_blocks=1)


def _reset_in_child() -> None:
    """Forget the parent's save after a fork: its thread does not exist in the child."""
    global _running  # noqa: PLW0603
    _running = None
    _kept_staging.cache_clear()


os.register_at_fork(after_in_child=_reset_in_child)


class StagedSource:
    """A source: the boxes of one save, as they were when it began."""

    staging = STAGING

    def __init__(
        self, manifest: Manifest, tensor_boxes: Sequence[TensorBox], memory: Bytes
    ) -> None:
        self.manifest = manifest
        self._places: dict[str, list[tuple[TensorBox, Bytes]]] = {}
        at = 0
        for tensor_box in tensor_boxes:
            data = memory[at : at + tensor_box.nbytes]
            self._places.setdefault(tensor_box.name, []).append((tensor_box, data))
            at += _aligned_bytes(tensor_box)

    def boxes(self, name: str) -> list[Box]:
        return [tensor_box.box for tensor_box, _ in self._places[name]]

    def read(self, name: str, box: Box | None = None, *, into: Bytes | None = None) -> Bytes:
        """Return the staging memory of a box that is one run of bytes, as every chunk is."""
        for tensor_box, data in self._places[name]:
            if box is None or box == tensor_box.box:
                return data
            if tensor_box.box.contains(box):
                spec, held = tensor_box.spec, tensor_box.spec.stored(tensor_box.box)
                ((start, length),) = spec.stored(box).within(held).runs(held.shape)
                return data[start * spec.item_bytes : (start + length) * spec.item_bytes]
        raise AssertionError(f"{name!r} {box} was not staged")


def _aligned_bytes(tensor_box: TensorBox) -> int:
    return -(-tensor_box.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _copy(source: Model, staged: StagedSource, pending: PendingCommit) -> None:
    """Fill the staging. Threads copy host tensors; copies from a device are queued in order."""
    jobs: list[tuple[str, Box] | Beside] = []
    for each in pending.share:
        name, spec, whole = each.name, each.spec, each.box
        if source.is_on_host(name):
            corner = spec.stored(whole).offset
            jobs += [
                (name, spec.elements(items.moved(corner)))
                for items in spec.chunks(whole, _COPY_BYTES)
            ]
        else:
            source.read(name, whole, into=staged.read(name, whole), should_wait=False)
            pending.group.tick()

    def work(job: tuple[str, Box] | Beside, staging: Bytes) -> int:
        pending.group.tick()
        if callable(job):
            job(staging)
            return 0
        goal = staged.read(*job)
        found = source.read(*job, into=goal)
        if not np.may_share_memory(found, goal):
            np.copyto(goal, found)
        return len(goal)

    run_jobs(
        [*jobs, *pending.beside],
        work,
        num_threads=pending.options.threads,
        staging=source.staging if pending.beside else STAGING,
        staging_bytes=CHUNK_BYTES if pending.beside else 0,
        verb="stage",
        total_bytes=sum(each.nbytes for each in pending.share),
    )
    source.settle()
