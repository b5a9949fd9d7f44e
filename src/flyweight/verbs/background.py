"""Background: a save that goes on while the model changes again.

What this rank writes is first copied, once, to staging memory, which is kept for the
next save: fresh pages cost more than the copy. One such save runs at a time.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from time import perf_counter
from typing import Literal

import numpy as np

from flyweight.adapters.model import Model
from flyweight.errors import StoreError, TransferTimeout
from flyweight.events import emit
from flyweight.formats.writer import Beside
from flyweight.memory import STAGING, Bytes, Staging, block_of, bytes_for, items_of
from flyweight.ports import Source
from flyweight.ranks.group import TIMEOUT_SECONDS
from flyweight.spec.box import Box
from flyweight.spec.manifest import CHUNK_BYTES, Manifest, Parcel
from flyweight.verbs.commit import PendingSave, SaveReport, emit_done
from flyweight.worker_threads import default_threads, run_jobs

WhenBusy = Literal["wait", "refuse"]
_COPY_BYTES = 16 << 20
_ALIGN_BYTES = 4096
_STILL_TIMES = 10

_running: BackgroundSave | None = None
_shelf: Staging | None = None
_lock = threading.Lock()


class BackgroundSave:
    """The handle of a save in the background."""

    def __init__(self, version: int | None, total_bytes: int) -> None:
        self.version, self.total_bytes, self.done_bytes = version, total_bytes, 0
        self._ended = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._count = threading.Lock()

    @property
    def is_done(self) -> bool:
        """True once the save has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_seconds: float | None = None) -> SaveReport:
        """Return the report once the version is durable and visible; raises what went wrong.

        Without a timeout this ends when the save does, which has deadlines of its own.
        """
        if not self._ended.wait(timeout_seconds):
            raise TransferTimeout(
                f"version {self.version} is still being saved after {timeout_seconds:g} s: "
                f"{self.done_bytes} of {self.total_bytes} bytes"
            )
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def _progress(self, nbytes: int) -> None:
        with self._count:
            self.done_bytes += nbytes


class Staged:
    """A source: the parcels of a save as they were when it began."""

    staging = STAGING

    def __init__(self, manifest: Manifest, parcels: list[Parcel], memory: Bytes) -> None:
        self.manifest = manifest
        self.places: dict[str, list[tuple[Parcel, Bytes]]] = {}
        at = 0
        for parcel in parcels:
            data = memory[at : at + parcel.nbytes]
            self.places.setdefault(parcel.name, []).append((parcel, data))
            at += _room(parcel)

    def boxes(self, name: str) -> list[Box]:
        return [parcel.box for parcel, _ in self.places[name]]

    def read(self, name: str, box: Box | None = None, *, into: Bytes | None = None) -> Bytes:
        for parcel, data in self.places[name]:
            wanted = parcel.box if box is None else box
            if parcel.box.contains(wanted):
                spec = parcel.spec
                held = spec.stored(parcel.box)
                items = spec.stored(wanted).within(held)
                runs = list(items.runs(held.shape))
                if len(runs) == 1:
                    start, length = (each * spec.item_bytes for each in runs[0])
                    return data[start : start + length]
                found = bytes_for(items.num_elements * spec.item_bytes, into)
                goal = items_of(found, spec.item_bytes, items.shape)
                np.copyto(goal, block_of(items_of(data, spec.item_bytes, held.shape), items))
                return found
        raise AssertionError(f"{name!r} {box} was not staged")


def _room(parcel: Parcel) -> int:
    return -(-parcel.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def check_idle() -> None:
    """Raise if a save still runs in the background of this process."""
    running = _running
    if running is not None and not running.is_done:
        raise StoreError(
            f"version {running.version} is still being saved in the background: "
            f"{running.done_bytes} of {running.total_bytes} bytes; wait for it, or save with "
            f"when_busy='wait'"
        )


def wait_for_background(timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Return once no save runs in the background; how it ended is told by its own handle.

    A save that moves no byte for ten times the timeout is given up: its disk hangs.
    """
    running = _running
    if running is None:
        return
    done_bytes = -1
    while not running.is_done and done_bytes != running.done_bytes:
        done_bytes = running.done_bytes
        running._ended.wait(_STILL_TIMES * timeout_seconds)
    check_idle()


def start_background(
    source: Model,
    pending: PendingSave,
    stack: ExitStack,
    *,
    memory_bytes: int,
    num_threads: int | None,
) -> BackgroundSave:
    """Copy the share, then write it in a thread that takes over what `stack` holds.

    Replicas that other ranks write are digested here, as they are when the copies are made.
    """
    global _running  # noqa: PLW0603
    started = perf_counter()
    parcels = list(pending.share)
    handle = BackgroundSave(pending.manifest.version, sum(parcel.nbytes for parcel in parcels))
    block = stack.enter_context(_shelf_for(source).lend(sum(map(_room, parcels))))
    staged = Staged(source.manifest, parcels, block)
    _copy(source, staged, pending, num_threads)
    held = stack.pop_all()

    def work() -> None:
        try:
            with held:
                handle._report = pending.write(
                    staged,
                    memory_bytes=memory_bytes,
                    num_threads=num_threads,
                    started=started,
                    progress=handle._progress,
                )
            emit_done("save", handle._report)
        except BaseException as error:
            handle._error = error
            emit("save.failed", version=handle.version, error=f"{type(error).__name__}: {error}")
        finally:
            handle._ended.set()

    thread = threading.Thread(target=work, name="flyweight-save")
    with _lock:
        if _running is None:
            # Python lets no thread start another once it is on its way out: wait before that.
            getattr(threading, "_register_atexit", atexit.register)(wait_for_background)
        try:
            thread.start()
        except BaseException:
            held.close()
            raise
        _running = handle
    return handle


def _forget() -> None:
    """Know nothing, in a forked child, of what its parent's threads do."""
    global _running, _shelf, _lock
    _running, _shelf, _lock = None, None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _shelf_for(source: Source) -> Staging:
    """Return where staging is kept between saves: of the same kind as the source's own."""
    global _shelf  # noqa: PLW0603
    with _lock:
        if _shelf is None or _shelf.allocate is not source.staging.allocate:
            _shelf = Staging(shelf_bytes=1 << 62, allocate=source.staging.allocate, max_blocks=1)
        return _shelf


def _copy(source: Model, staged: Staged, pending: PendingSave, num_threads: int | None) -> None:
    """Fill the staging: host tensors by several threads, a device's queued behind each other.

    The same threads digest the replicas that other ranks write.
    """
    places = [place for places in staged.places.values() for place in places]
    jobs: list[tuple[Parcel, Bytes, Box] | Beside] = [
        (parcel, data, items)
        for parcel, data in places
        if source.is_on_host(parcel.name)
        for items in parcel.spec.chunks(parcel.box, _COPY_BYTES)
    ]

    digests = pending.found.jobs(source)

    def work(job: tuple[Parcel, Bytes, Box] | Beside, staging: Bytes) -> int:
        pending.group.tick()
        if callable(job):
            job(staging)
            return 0
        parcel, data, items = job
        spec, held = parcel.spec, parcel.spec.stored(parcel.box)
        ((start, length),) = items.runs(held.shape)
        goal = data[start * spec.item_bytes : (start + length) * spec.item_bytes]
        found = source.read(parcel.name, spec.elements(items.moved(held.offset)), into=goal)
        if not np.may_share_memory(found, goal):
            np.copyto(goal, found)
        return len(goal)

    for parcel, data in places:
        if not source.is_on_host(parcel.name):
            source.read(parcel.name, parcel.box, into=data, should_wait=False)
            pending.group.tick()
    run_jobs(
        [*jobs, *digests],
        work,
        num_threads=default_threads() if num_threads is None else num_threads,
        staging=source.staging if digests else STAGING,
        staging_bytes=CHUNK_BYTES if digests else 0,
        verb="stage",
        total_bytes=sum(len(data) for _, data in places),
    )
    source.settle()
