"""The writer: copies a source into planned files, by worker threads, and hashes it on the way.

Large chunks go from the source's own memory to the file; small ones are gathered
first, so that a hundred thousand tiny tensors do not need as many system calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from flyweight.checks import check_threads
from flyweight.digest import Digest, checksum
from flyweight.errors import SpecError
from flyweight.memory import Bytes, bytes_of, collector_paused
from flyweight.ports import Draft, FilePlan, Format, Source
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Manifest, TensorSpec
from flyweight.worker_threads import run_jobs

Beside = Callable[[Bytes], None]
"""Other work for the same threads, which is given staging memory of one chunk."""
_GATHER_BYTES = 1 << 20
"""Chunks below this size are gathered, up to a whole chunk's worth, and written as one."""


@dataclass(slots=True)
class _Running:
    """An extent that is being written: its checksums and digest so far, if the format has them."""

    extent: Extent
    spec: TensorSpec
    checksums: list[int]
    digest: Digest | None

    def add(self, chunk: _Chunk, data: Bytes) -> None:
        if self.digest is not None:
            self.checksums[chunk.index] = checksum(data)
            self.digest.add(chunk.offset - self.extent.offset, data)

    def finished(self) -> Extent:
        if self.digest is None:
            return self.extent
        return replace(self.extent, checksums=tuple(self.checksums), digest=self.digest.value())


@dataclass(slots=True)
class _Chunk:
    running: _Running
    index: int
    box: Box
    """In items, counted from the corner of the whole tensor."""
    offset: int
    nbytes: int


_Batch = tuple[str, list[_Chunk]]
"""A file, and chunks that are written to it by one call."""


def write(
    source: Source,
    manifest: Manifest,
    format: Format,
    draft: Draft,
    *,
    num_threads: int,
    memory_bytes: int,
    verb: str = "save",
    tick: Callable[[int], None] | None = None,
    beside: Sequence[Beside] = (),
) -> tuple[Manifest, list[FilePlan]]:
    """Write the tensors of `manifest` from `source`; return it with extents, and the files.

    This does not commit, and `seal` must write the small files that complete the format. The jobs
    `beside` are spread evenly over the writes, so that they run while other threads wait for the
    disk. `tick` is called with the bytes of each write, and may raise to stop.
    """
    with collector_paused():
        plans = format.layout(manifest)
        running = {
            plan.name: [_running(manifest, each, format.has_checksums) for each in plan.extents]
            for plan in plans
        }
        batches = [
            (plan.name, batch)
            for plan in plans
            for batch in _batches(running[plan.name], manifest.chunk_bytes)
        ]
    for plan in plans:
        draft.reserve(plan.name, plan.nbytes)
        for offset, literal in plan.literals:
            draft.write(plan.name, offset, bytes_of(literal))
    # One block to gather or copy a batch in, and as much again if the source stages its reads.
    per_thread_bytes = 4 * manifest.chunk_bytes
    if memory_bytes < per_thread_bytes:
        raise SpecError(
            f"memory_bytes is {memory_bytes}, chunks of {manifest.chunk_bytes} bytes need "
            f"{per_thread_bytes}"
        )

    def work(job: _Batch | Beside, staging: Bytes) -> int:
        nbytes = 0
        if callable(job):
            job(staging)
        else:
            nbytes = _write_batch(source, draft, job, staging)
        if tick is not None:
            tick(nbytes)
        return nbytes

    run_jobs(
        _spread(batches, beside),
        work,
        num_threads=min(check_threads(num_threads), memory_bytes // per_thread_bytes),
        staging=source.staging,
        staging_bytes=manifest.chunk_bytes,
        verb=verb,
        total_bytes=sum(chunk.nbytes for _, batch in batches for chunk in batch),
    )
    with collector_paused():
        extents = [each.finished() for plan in plans for each in running[plan.name]]
    return replace(manifest, extents=extents), plans


def _spread(batches: Sequence[_Batch], beside: Sequence[Beside]) -> list[_Batch | Beside]:
    """Return both lists merged, the shorter one spread evenly over the longer."""
    both: tuple[Sequence[_Batch | Beside], ...] = (batches, beside)
    jobs = [(number / len(each), job) for each in both for number, job in enumerate(each)]
    return [job for _, job in sorted(jobs, key=lambda placed: placed[0])]


def seal(whole: Manifest, plans: Sequence[FilePlan], format: Format, draft: Draft) -> None:
    """Write the small files that complete a format, such as its index."""
    for name, content in format.seal(whole, plans).items():
        draft.reserve(name, len(content))
        draft.write(name, 0, bytes_of(content))


def _running(manifest: Manifest, extent: Extent, has_checksums: bool) -> _Running:
    spec = manifest.tensors[extent.name]
    if not has_checksums:
        return _Running(extent, spec, [], None)
    num_chunks = spec.num_chunks(extent.box, manifest.chunk_bytes)
    return _Running(extent, spec, [0] * num_chunks, Digest(spec.box_bytes(extent.box)))


def _batches(running: Sequence[_Running], chunk_bytes: int) -> Iterator[list[_Chunk]]:
    """Yield chunks to be written by one call: a large one alone, small neighbours together."""
    batch: list[_Chunk] = []
    held_bytes = 0
    for each in running:
        at, corner = each.extent.offset, each.spec.stored(each.extent.box).offset
        for index, items in enumerate(each.spec.chunks(each.extent.box, chunk_bytes)):
            box = items.moved(corner) if any(corner) else items
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


def _write_batch(source: Source, draft: Draft, job: _Batch, staging: Bytes) -> int:
    file, batch = job
    at = 0
    for chunk in batch:
        slot = staging[at : at + chunk.nbytes]
        box = chunk.running.spec.elements(chunk.box)
        data = source.read(chunk.running.extent.name, box, into=slot)
        chunk.running.add(chunk, data)
        if len(batch) == 1:
            draft.write(file, chunk.offset, data)
            return chunk.nbytes
        if not np.may_share_memory(data, slot):
            np.copyto(slot, data)
        at += chunk.nbytes
    draft.write(file, batch[0].offset, staging[:at])
    return at
