"""Replicas: boxes that several ranks hold alike, compared before a save is committed.

One rank writes a box; the others digest theirs while they write their own shares. The
digest of a box is taken over its chunks' checksums, which the writer has anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from flyweight.digest import Checksum, checksum
from flyweight.errors import FormatError, PlanError, SpecError
from flyweight.memory import Bytes
from flyweight.ports import Source
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.manifest import CHUNK_BYTES, Extent, Json, Manifest, Parcel

CheckReplicas = Literal["digest", "sampled"]
_SAMPLES, _SAMPLE_BYTES = 8, 4096


def check_option(value: object) -> None:
    """Raise unless this is a way to compare replicas."""
    if not isinstance(value, str) or value not in ("digest", "sampled"):
        raise SpecError(f"check_replicas is {value!r}, not 'digest' or 'sampled'")


def unwritten(replicas: Sequence[Parcel], share: Sequence[Parcel]) -> list[Parcel]:
    """Return the replicas that a rank holds and another rank writes."""
    own = {(parcel.name, parcel.box) for parcel in share}
    return [parcel for parcel in replicas if (parcel.name, parcel.box) not in own]


class ReplicaDigests:
    """What this rank finds of boxes that others hold too; known once all `jobs` are done.

    Samples are taken at once and leave no jobs.
    """

    def __init__(self, parcels: Sequence[Parcel] = (), samples: Sequence[int] = ()) -> None:
        self._parcels, self._samples = parcels, samples
        self._checksums = [[0] * p.spec.num_chunks(p.box, CHUNK_BYTES) for p in parcels]

    @classmethod
    def begun(
        cls, parcels: Sequence[Parcel], source: Source, check_replicas: CheckReplicas
    ) -> ReplicaDigests:
        if check_replicas == "digest":
            return cls(parcels)
        return cls(samples=[_fingerprint(source, parcel) for parcel in parcels])

    def jobs(self, source: Source) -> list[Callable[[Bytes], None]]:
        """Return the work, for any threads, each of at most a chunk and with that much staging."""
        batches: list[list[tuple[Parcel, Box, list[int], int]]] = [[]]
        held_bytes = 0
        for parcel, found in zip(self._parcels, self._checksums, strict=True):
            for index, box in enumerate(parcel.spec.chunks(parcel.box, CHUNK_BYTES)):
                nbytes = prod(box.shape) * parcel.spec.item_bytes
                if held_bytes + nbytes > CHUNK_BYTES:
                    batches.append([])
                    held_bytes = 0
                batches[-1].append((parcel, box, found, index))
                held_bytes += nbytes
        return [partial(_digest, source, batch) for batch in batches if batch]

    def values(self) -> list[int]:
        return [*self._samples, *(_digest_of(found) for found in self._checksums)]


def _digest(
    source: Source, batch: Sequence[tuple[Parcel, Box, list[int], int]], staging: Bytes
) -> None:
    for parcel, box, found, index in batch:
        spec = parcel.spec
        items = box.moved(spec.stored(parcel.box).offset)
        slot = staging[: prod(box.shape) * spec.item_bytes]
        found[index] = checksum(source.read(parcel.name, spec.elements(items), into=slot))


def _digest_of(checksums: Sequence[int]) -> int:
    return checksum(np.array(checksums, "<u8").view(np.uint8))


def _fingerprint(source: Source, parcel: Parcel) -> int:
    """Return a checksum of samples of a box: enough to tell one shard from another."""
    spec, running = parcel.spec, Checksum()
    items = spec.stored(parcel.box)
    # Six-bit elements come four to three bytes: all steps are of threes.
    total, sample = items.num_elements, max(_SAMPLE_BYTES // spec.item_bytes // 3 * 3, 3)
    step = max(total // _SAMPLES // 3 * 3, sample)
    for start in range(0, total, step):
        for box in boxes_of_range(items.shape, start, min(sample, total - start)):
            running.add(source.read(parcel.name, spec.elements(box.moved(items.offset))))
    return running.value()


Known = Mapping[tuple[str, Box], tuple[int, Json]]


def digests_of(written: Sequence[Manifest]) -> Known:
    """Return, for each box at rest, the rank that wrote it and its digest there."""
    return {
        (extent.name, extent.box): (rank, _digest_of(_checksums(extent)))
        for rank, manifest in enumerate(written)
        for extent in manifest.extents
    }


def _checksums(extent: Extent) -> Sequence[int]:
    if extent.checksums is None:
        raise FormatError(f"a rank wrote {extent.name!r} and tells no checksums of it")
    return extent.checksums


def check_same(replicas: Sequence[Sequence[Parcel]], found: Sequence[Json], known: Known) -> None:
    """Raise unless all ranks that hold a box found the same of it; both by rank.

    `known` is what the writers found, where the ranks tell of what others wrote only.
    """
    first = dict(known)
    for rank, (parcels, values) in enumerate(zip(replicas, found, strict=True)):
        if not isinstance(values, list) or len(values) != len(parcels):
            raise FormatError(f"rank {rank} compared {str(values)[:80]}, not {len(parcels)} boxes")
        for parcel, value in zip(parcels, values, strict=True):
            other, expected = first.setdefault((parcel.name, parcel.box), (rank, value))
            if type(value) is not int or type(expected) is not int:
                raise FormatError(f"rank {rank} tells {str(value)[:80]} as a digest")
            if value != expected:
                raise PlanError(
                    f"{parcel.name!r} {parcel.box.offset}..{parcel.box.end} has digest "
                    f"{expected:016x} on rank {other} and {value:016x} on rank {rank}: replicas "
                    f"that hold different bytes; if these are shards, say of what: a layout, or "
                    f"Sharded"
                )
