"""An opened checkpoint of any format: one manifest, whose extents say where the bytes are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
        self.manifest = manifest
        self.store = store
        self.format = format
        self.raw_names = raw_names
        """Tensors whose dtype u16 may mean bf16, and i8 fp8: only the target knows."""
        self._shards: dict[str, list[Shard]] = {name: [] for name in manifest.tensors}
        for index, extent in enumerate(manifest.extents):
            self._shards[extent.name].append(Shard(index, extent.box))

    def assuming(self, dtypes: Mapping[str, str]) -> Stored:
        """Return the same source with some dtypes read as others of the same width."""
        new_dtypes = {dtype_named(old).name: dtype_named(new) for old, new in dtypes.items()}
        for old, new in dtypes.items():
            if dtype_named(old).bits != dtype_named(new).bits:
                raise SpecError(f"{old} and {new} differ in width; one cannot be read as the other")
        tensors = {
            name: replace(spec, dtype=new_dtypes.get(spec.dtype.name, spec.dtype))
            for name, spec in self.manifest.tensors.items()
        }
        manifest = replace(self.manifest, tensors=tensors)
        return Stored(manifest, self.store, format=self.format)

    def shards(self, name: str) -> list[Shard]:
        """Return the boxes in the files; a shard's rank is the number of its extent."""
        return self._shards[self.manifest.tied.get(name, name)]

    def boxes(self, name: str) -> list[Box]:
        """Return the whole tensor: any box can be read, however the files cut it."""
        return [Box.whole(self.manifest.spec(name).shape)]

    def read(
        self,
        name: str,
        box: Box | None = None,
        *,
        into: Bytes | None = None,
        should_verify: bool = True,
    ) -> Bytes:
        """Return the box's bytes, row-major and checked; in `into` if that is given."""
        if name not in self.manifest.tensors and name not in self.manifest.tied:
            count = len(self.manifest.names)
            raise PlanError(f"{name!r} is not among the {count} tensors of {self.store.place!r}")
        spec = self.manifest.spec(name)
        box = Box.whole(spec.shape) if box is None else box
        items, nbytes = spec.stored(box), spec.box_bytes(box)
        data = bytes_for(nbytes, into)
        if not nbytes:
            return data
        target = Target(items, items_of(data, spec.item_bytes, items.shape), STAGING)
        plan = reshard({name: self.shards(name)}, {name: [Shard(0, box)]})
        reader = Reader(self.store, self.manifest, should_verify=should_verify)
        for copy in plan.copies():
            reader.add(self.manifest.extents[copy.source.rank], copy.box, target)
        reader.run(num_threads=1)
        return data

    def fingerprint(self) -> int:
        """Return a checksum of the manifest, and of samples of files without checksums.

        Where a format has checksums the manifest covers every byte. Elsewhere, weights that differ
        only between the samples have the same fingerprint.
        """
        running, manifest = Checksum(), self.manifest
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


class DecodedStore:
    """A store with extra files: arrays that are not stored row-major, decoded when they are read.

    Such an array cannot be read in ranges, so it is decoded as a whole; only the last one is kept.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._decoders: dict[str, Callable[[], Bytes]] = {}
        self._last: tuple[str, Bytes] | None = None
        # All else is the store's own.
        self.place, self.names, self.size = store.place, store.names, store.size
        self.read, self.read_into = store.read, store.read_into
        self.share_reads, self.close = store.share_reads, store.close

    def add(self, file: str, decode: Callable[[], Bytes]) -> str:
        """Add a file whose bytes `decode` makes, and return its name."""
        name = f"{file}#{len(self._decoders)}"
        self._decoders[name] = decode
        return name

    def window(
        self, name: str, offset: int, nbytes: int, staging: Bytes, *, may_map: bool = True
    ) -> AbstractContextManager[Bytes]:
        if name not in self._decoders:
            return self._store.window(name, offset, nbytes, staging, may_map=may_map)
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = name, self._decoders[name]()
            return nullcontext(self._last[1][offset : offset + nbytes])

    def is_cached(self, name: str, offset: int, nbytes: int) -> bool:
        return name not in self._decoders and self._store.is_cached(name, offset, nbytes)
