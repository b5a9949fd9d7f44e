"""The writer: streams a source into planned files, by threads, checksums and digests on the way.

Large chunks go from the source's own memory to the file; small ones are gathered
first, so that a hundred thousand tiny tensors are not as many system calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from math import prod
from time import monotonic

import numpy as np

from flyweight.digest import Digest, checksum
from flyweight.errors import SpecError
from flyweight.events import emit
from flyweight.memory import STAGING, Bytes, bytes_of, collector_paused
from flyweight.ports import Draft, Format, Source
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Manifest, TensorSpec

_GATHER_BYTES = 1 << 20
"""Chunks below this size are gathered, up to a whole chunk's worth, and written as one."""


@dataclass(slots=True)
class _Running:
    """An extent on its way: its checksums so far, and its digest."""

    extent: Extent
    spec: TensorSpec
    checksums: list[int]
    digest: Digest


@dataclass(slots=True)
class _Chunk:
    running: _Running
    index: int
    box: Box
    """In items, counted from the corner of the extent."""
    offset: int
    nbytes: int


def write(
    source: Source,
    manifest: Manifest,
    format: Format,
    draft: Draft,
    *,
    num_threads: int,
    memory_bytes: int,
    verb: str = "save",
) -> Manifest:
    """Write `manifest`, whose bytes `source` has, and return it with extents; no commit yet."""
    with collector_paused():
        plans = format.layout(manifest)
        running = {plan.name: [_running(manifest, each) for each in plan.extents] for plan in plans}
        batches = [
            (plan.name, batch)
            for plan in plans
            for batch in _batches(running[plan.name], manifest.chunk_bytes)
        ]
    for plan in plans:
        draft.reserve(plan.name, plan.nbytes)
        for offset, literal in plan.literals:
            draft.write(plan.name, offset, bytes_of(literal))
    _run(
        source,
        draft,
        batches,
        manifest.chunk_bytes,
        num_threads=num_threads,
        memory_bytes=memory_bytes,
        verb=verb,
    )
    with collector_paused():
        extents = [
            replace(each.extent, checksums=tuple(each.checksums), digest=each.digest.value())
            for plan in plans
            for each in running[plan.name]
        ]
    whole = replace(manifest, extents=extents)
    for name, content in format.seal(whole, plans).items():
        draft.reserve(name, len(content))
        draft.write(name, 0, bytes_of(content))
    return whole


def _running(manifest: Manifest, extent: Extent) -> _Running:
    spec = manifest.tensors[extent.name]
    num_chunks = spec.num_chunks(extent.box, manifest.chunk_bytes)
    return _Running(extent, spec, [0] * num_chunks, Digest(spec.box_bytes(extent.box)))


def _batches(running: Sequence[_Running], chunk_bytes: int) -> Iterator[list[_Chunk]]:
    """Yield chunks to be written by one call: a large one alone, small neighbours together."""
    batch: list[_Chunk] = []
    held_bytes = 0
    for each in running:
        at = each.extent.offset
        for index, box in enumerate(each.spec.chunks(each.extent.box, chunk_bytes)):
            chunk = _Chunk(each, index, box, at, prod(box.shape) * each.spec.item_bytes)
            at += chunk.nbytes
            is_neighbour = batch and batch[-1].offset + batch[-1].nbytes == chunk.offset
            is_small = chunk.nbytes < _GATHER_BYTES and held_bytes + chunk.nbytes <= chunk_bytes
            if batch and not (is_neighbour and is_small):
                yield batch
                batch, held_bytes = [], 0
            batch.append(chunk)
            held_bytes += chunk.nbytes
    if batch:
        yield batch


def _run(
    source: Source,
    draft: Draft,
    batches: list[tuple[str, list[_Chunk]]],
    chunk_bytes: int,
    *,
    num_threads: int,
    memory_bytes: int,
    verb: str,
) -> None:
    # One block to gather or copy a batch in, and as much again if the source stages its reads.
    per_thread_bytes = 4 * chunk_bytes
    if memory_bytes < per_thread_bytes:
        raise SpecError(
            f"memory_bytes is {memory_bytes}, chunks of {chunk_bytes} bytes need {per_thread_bytes}"
        )
    num_threads = max(1, min(num_threads, memory_bytes // per_thread_bytes, len(batches)))
    started, queue, lock, stop = monotonic(), iter(batches), threading.Lock(), threading.Event()
    total_bytes = sum(chunk.nbytes for _, batch in batches for chunk in batch)
    done_bytes = 0

    def work() -> None:
        nonlocal done_bytes
        with STAGING.lend(chunk_bytes) as staging:
            while not stop.is_set():
                with lock:
                    name, batch = next(queue, ("", []))
                if not batch:
                    return
                _write_batch(source, draft, name, batch, staging)
                with lock:
                    done_bytes += sum(chunk.nbytes for chunk in batch)
                    done = done_bytes
                emit(
                    "progress",
                    verb=verb,
                    done_bytes=done,
                    total_bytes=total_bytes,
                    seconds=monotonic() - started,
                )

    with ThreadPoolExecutor(num_threads, "flyweight-write") as pool:
        try:
            jobs = [pool.submit(work) for _ in range(num_threads)]
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # an error or Ctrl-C: each thread ends after the batch it is in
            stop.set()
    for job in jobs:
        job.result()


def _write_batch(
    source: Source, draft: Draft, file: str, batch: list[_Chunk], staging: Bytes
) -> None:
    at = 0
    for chunk in batch:
        slot = staging[at : at + chunk.nbytes]
        data = _read(source, chunk, slot)
        chunk.running.checksums[chunk.index] = checksum(data)
        chunk.running.digest.add(chunk.offset - chunk.running.extent.offset, data)
        if len(batch) == 1:
            draft.write(file, chunk.offset, data)
            return
        if not np.may_share_memory(data, slot):
            np.copyto(slot, data)
        at += chunk.nbytes
    draft.write(file, batch[0].offset, staging[:at])


def _read(source: Source, chunk: _Chunk, slot: Bytes) -> Bytes:
    """Return a chunk's bytes; a box of the extent is a box of the tensor, moved to its corner."""
    running = chunk.running
    corner = running.spec.stored(running.extent.box).offset
    items = chunk.box.moved(corner)
    return source.read(running.extent.name, running.spec.elements(items), into=slot)
