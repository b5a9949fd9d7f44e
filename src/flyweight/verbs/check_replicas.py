"""Compare the boxes that several ranks hold, before a save is committed.

One rank writes a box; the others compute the digest of their copy while they write their own
files. The digest of a box is the checksum of its chunks' checksums, which the writer has anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from flyweight.digest import checksum
from flyweight.errors import FormatError, PlanError
from flyweight.formats.writer import Beside
from flyweight.memory import Bytes
from flyweight.ports import Source
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.manifest import CHUNK_BYTES, Manifest, TensorBox

CheckReplicas = Literal["digest", "sampled"]
_SAMPLES, _SAMPLE_BYTES = 8, 4096
_Read = tuple[str, Box, int, list[int], int]
"""A box of a tensor and its bytes; the list that its checksum goes to, and where in it."""


def checksum_jobs(
    source: Source, tensor_boxes: Sequence[TensorBox], check_replicas: CheckReplicas
) -> tuple[list[Beside], list[list[int]]]:
    """Return jobs for any threads, and the checksums of each box, complete once all jobs have run.

    With "digest" every byte of a box is read, with "sampled" a few kilobytes of it. Each job reads
    at most a chunk, into the staging that it gets.
    """
    checksums: list[list[int]] = []
    batches: list[list[_Read]] = []
    left_bytes = -1
    for each in tensor_boxes:
        spec, corner = each.spec, each.spec.stored(each.box).offset
        is_sampled = check_replicas == "sampled"
        cut = list(_samples(each) if is_sampled else spec.chunks(each.box, CHUNK_BYTES))
        checksums.append([0] * len(cut))
        for index, items in enumerate(cut):
            nbytes = prod(items.shape) * spec.item_bytes
            if nbytes > left_bytes:
                batches.append([])
                left_bytes = CHUNK_BYTES
            box = spec.elements(items.moved(corner))
            batches[-1].append((each.name, box, nbytes, checksums[-1], index))
            left_bytes -= nbytes
    return [partial(_run, source, batch) for batch in batches], checksums


def _samples(tensor_box: TensorBox) -> Iterator[Box]:
    """Yield samples of a box, in items counted from its corner: enough to tell shards apart."""
    items = tensor_box.spec.stored(tensor_box.box)
    # Four six-bit elements fill three bytes, so every step is a multiple of three.
    sample = max(_SAMPLE_BYTES // tensor_box.spec.item_bytes // 3 * 3, 3)
    step = max(items.num_elements // _SAMPLES // 3 * 3, sample)
    for start in range(0, items.num_elements, step):
        length = min(sample, items.num_elements - start)
        yield from boxes_of_range(items.shape, start, length)


def _run(source: Source, batch: Sequence[_Read], staging: Bytes) -> None:
    for name, box, nbytes, checksums, index in batch:
        checksums[index] = checksum(source.read(name, box, into=staging[:nbytes]))


def digest_of(checksums: Sequence[int]) -> int:
    """Return the digest of a box from the checksums of its chunks or samples."""
    return checksum(np.array(checksums, "<u8").view(np.uint8))


def check_same(
    tensor_boxes: Sequence[Sequence[TensorBox]],
    digests: Sequence[Sequence[int]],
    written: Sequence[Manifest],
) -> None:
    """Raise PlanError unless all ranks have the same digest of each box.

    `tensor_boxes` and `digests` are what each rank compared, by rank. `written` has the files of
    each rank with their checksums, for boxes of which only ranks that did not write them sent one.
    """
    first: dict[tuple[str, Box], tuple[int, int]] = {}  # a rank with the box, and its digest
    for rank, manifest in enumerate(written):
        for extent in manifest.extents:
            assert extent.checksums is not None  # those of a snapshot are never left out
            first[extent.name, extent.box] = rank, digest_of(extent.checksums)
    for rank, (boxes, values) in enumerate(zip(tensor_boxes, digests, strict=True)):
        if len(values) != len(boxes):
            raise FormatError(f"rank {rank} sent {len(values)} digests of {len(boxes)} boxes")
        for tensor_box, value in zip(boxes, values, strict=True):
            other, expected = first.setdefault((tensor_box.name, tensor_box.box), (rank, value))
            if value != expected:
                raise PlanError(
                    f"{tensor_box.name!r} {tensor_box.box.offset}..{tensor_box.box.end} has digest "
                    f"{expected:016x} on rank {other} and {value:016x} on rank {rank}: replicas "
                    f"that hold different bytes; if these are shards, say of what: a layout, or "
                    f"Sharded"
                )
