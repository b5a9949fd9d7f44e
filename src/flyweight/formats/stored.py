"""An opened checkpoint of any format: one manifest, whose extents say where the bytes are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from flyweight.digest import Checksum
from flyweight.errors import FormatError, PlanError, SpecError, listed
from flyweight.formats.reader import Reader, Target
from flyweight.memory import STAGING, Bytes, bytes_for, items_of
from flyweight.plans.reshard import reshard
from flyweight.ports import Store
from flyweight.spec.box import Box
from flyweight.spec.dtype import dtype_named
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Extent, Leaf, Manifest, TensorSpec

_SAMPLES, _SAMPLE_BYTES = 16, 4096


class Stored:
    """A source in a store. Reads are checked wherever the format has checksums."""

    staging = STAGING

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        *,
        format: str,
        raw_names: Collection[str] = (),
    ) -> None:
        self._manifest = manifest
        self.store = store
        self.format = format
        self.raw_names = raw_names
        """Tensors whose dtype u16 may mean bf16, and i8 fp8: only the target knows."""
        self._shards: dict[str, list[Shard]] = {name: [] for name in manifest.tensors}
        for index, extent in enumerate(manifest.extents):
            self._shards[extent.name].append(Shard(index, extent.box))

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def assuming(self, dtypes: Mapping[str, str]) -> Stored:
        """Return the same source with some dtypes read as others of the same width."""
        new_dtypes = {dtype_named(old).name: dtype_named(new) for old, new in dtypes.items()}
        for old, new in dtypes.items():
            if dtype_named(old).bits != dtype_named(new).bits:
                raise SpecError(f"{old} and {new} differ in width; one cannot be read as the other")
        tensors = {
            name: replace(spec, dtype=new_dtypes.get(spec.dtype.name, spec.dtype))
            for name, spec in self._manifest.tensors.items()
        }
        manifest = replace(self._manifest, tensors=tensors)
        return Stored(manifest, self.store, format=self.format)

    def shards(self, name: str) -> list[Shard]:
        """Return the boxes in the files; a shard's rank is the number of its extent."""
        return self._shards[self._manifest.tied.get(name, name)]

    def boxes(self, name: str) -> list[Box]:
        """Return the whole tensor: any box can be read, however the files cut it."""
        return [Box.whole(self._manifest.spec(name).shape)]

    def read(
        self,
        name: str,
        box: Box | None = None,
        *,
        into: Bytes | None = None,
        should_verify: bool = True,
    ) -> Bytes:
        """Return the box's bytes, row-major and checked; in `into` if that is given."""
        if name not in self._manifest.tensors and name not in self._manifest.tied:
            count = len(self._manifest.names)
            raise PlanError(f"{name!r} is not among the {count} tensors of {self.store.place!r}")
        spec = self._manifest.spec(name)
        box = Box.whole(spec.shape) if box is None else box
        items, nbytes = spec.stored(box), spec.box_bytes(box)
        data = bytes_for(nbytes, into)
        if not nbytes:
            return data
        target = Target(items, items_of(data, spec.item_bytes, items.shape), STAGING)
        plan = reshard({name: self.shards(name)}, {name: [Shard(0, box)]})
        reader = Reader(self.store, self._manifest, should_verify=should_verify)
        for copy in plan.copies():
            reader.add(self._manifest.extents[copy.source.rank], copy.box, target)
        reader.run(num_threads=1)
        return data

    def fingerprint(self) -> int:
        """Return a checksum of the manifest, and of samples of files without checksums.

        Where a format has checksums the manifest covers every byte. Elsewhere, weights that differ
        only between the samples have the same fingerprint.
        """
        running, manifest = Checksum(), self._manifest
        content = [
            [(name, str(spec)) for name, spec in sorted(manifest.tensors.items())],
            sorted(manifest.tied.items()),
            sorted((name, repr(value)) for name, value in manifest.values.items()),
            sorted(
                (e.name, e.box.offset, e.box.shape, e.file, e.offset, e.checksums)
                for e in manifest.extents
            ),
        ]
        running.update(repr(content).encode())
        unchecked = {e.file.partition("#")[0] for e in manifest.extents if e.checksums is None}
        for file in sorted(unchecked):
            size = self.store.size(file)
            for at in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                sample = self.store.read(file, at, min(_SAMPLE_BYTES, size - at))
                running.update(sample)
        return running.intdigest()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def join_files(files: Iterable[tuple[str, Manifest]], place: str) -> Manifest:
    """Return the manifest of files that together hold one model; no name may be in two of them."""
    tensors: dict[str, TensorSpec] = {}
    values: dict[str, Leaf] = {}
    extents: list[Extent] = []
    for file, found in files:
        names = found.tensors.keys() | found.values.keys()
        if doubled := names & (tensors.keys() | values.keys()):
            raise FormatError(
                f"{len(doubled)} tensors of {file!r} are in another file of {place!r} too: "
                f"{listed(doubled)}; files of two saves may be mixed"
            )
        tensors |= found.tensors
        values |= found.values
        extents += found.extents
    return Manifest(tensors, values=values, extents=extents)


def same_bytes(a: Stored, a_name: str, b: Stored, b_name: str) -> bool:
    """True if two tensors hold the same bytes; by digest if both have one of the whole tensor."""
    a_digest, b_digest = whole_digest(a, a_name), whole_digest(b, b_name)
    if a_digest is not None and b_digest is not None:
        return a_digest == b_digest
    spec = a.manifest.spec(a_name)
    if spec.shape != b.manifest.spec(b_name).shape:
        return False
    for items in spec.chunks(Box.whole(spec.shape), a.manifest.chunk_bytes):
        box = spec.elements(items)
        if not np.array_equal(a.read(a_name, box), b.read(b_name, box)):
            return False
    return True


def whole_digest(stored: Stored, name: str) -> int | None:
    """Return the digest of a tensor that is one extent, if the format has digests."""
    shards = stored.shards(name)
    return stored.manifest.extents[shards[0].rank].digest if len(shards) == 1 else None
