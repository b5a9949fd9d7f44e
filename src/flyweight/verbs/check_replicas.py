"""Compare the boxes that several ranks hold, before a save is committed.

One rank writes a box; the others compute the digest of their copy while they write their own
files. The digest of a box is the checksum of its chunks' checksums, which the writer has anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from flyweight.digest import checksum
from flyweight.errors import FormatError, PlanError
from flyweight.memory import Bytes
from flyweight.ports import Source
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.manifest import CHUNK_BYTES, Manifest, TensorBox

CheckReplicas = Literal["digest", "sampled"]
_SAMPLES, _SAMPLE_BYTES = 8, 4096


class ReplicaDigests:
    """The digests of boxes that other ranks hold too, complete once all `jobs` have run.

    With `"digest"` every byte of a box is read, with `"sampled"` a few kilobytes of it.
    """

    def __init__(self, tensor_boxes: Sequence[TensorBox], check_replicas: CheckReplicas) -> None:
        cut = _samples if check_replicas == "sampled" else _chunks
        self._reads = [(each, list(cut(each))) for each in tensor_boxes]
        self._checksums = [[0] * len(boxes) for _, boxes in self._reads]

    def jobs(self, source: Source) -> list[Callable[[Bytes], None]]:
        """Return work for any threads; each job reads at most a chunk, into the staging it gets."""
        batches: list[list[tuple[TensorBox, Box, list[int], int]]] = [[]]
        batch_bytes = 0
        for (tensor_box, boxes), checksums in zip(self._reads, self._checksums, strict=True):
            for index, box in enumerate(boxes):
                nbytes = prod(box.shape) * tensor_box.spec.item_bytes
                if batch_bytes + nbytes > CHUNK_BYTES:
                    batches.append([])
                    batch_bytes = 0
                batches[-1].append((tensor_box, box, checksums, index))
                batch_bytes += nbytes
        return [partial(_checksum_boxes, source, batch) for batch in batches if batch]

    def values(self) -> tuple[int, ...]:
        return tuple(map(_digest_of, self._checksums))


def _chunks(tensor_box: TensorBox) -> Iterator[Box]:
    """Yield the chunks of a box, in items counted from its corner."""
    return tensor_box.spec.chunks(tensor_box.box, CHUNK_BYTES)


def _samples(tensor_box: TensorBox) -> Iterator[Box]:
    """Yield samples of a box, in items counted from its corner: enough to tell shards apart."""
    items = tensor_box.spec.stored(tensor_box.box)
    # Four six-bit elements fill three bytes, so every step is a multiple of three.
    sample = max(_SAMPLE_BYTES // tensor_box.spec.item_bytes // 3 * 3, 3)
    step = max(items.num_elements // _SAMPLES // 3 * 3, sample)
    for start in range(0, items.num_elements, step):
        length = min(sample, items.num_elements - start)
        yield from boxes_of_range(items.shape, start, length)


def _checksum_boxes(
    source: Source, batch: Sequence[tuple[TensorBox, Box, list[int], int]], staging: Bytes
) -> None:
    for tensor_box, box, checksums, index in batch:
        spec = tensor_box.spec
        items = box.moved(spec.stored(tensor_box.box).offset)
        into = staging[: prod(box.shape) * spec.item_bytes]
        checksums[index] = checksum(source.read(tensor_box.name, spec.elements(items), into=into))


def _digest_of(checksums: Sequence[int]) -> int:
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
            first[extent.name, extent.box] = rank, _digest_of(extent.checksums)
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
