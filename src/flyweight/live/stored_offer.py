"""Stored offer: an opened snapshot or checkpoint as the source of a publisher.

Replicas take it at once, without a publish. Its files are read for each of them, and never mapped:
a file that is truncated must not kill an engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from weakref import WeakKeyDictionary

import numpy as np

from flyweight.checks import check_version
from flyweight.digest import Digest, Words
from flyweight.errors import PlanError, SpecError, TransferTimeout
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored, whole_digest
from flyweight.live.buckets import Bucket, pieces_of
from flyweight.live.catalog import RankTable
from flyweight.live.offer import COPY_SECONDS, About, Served
from flyweight.live.plan import Plan
from flyweight.live.publish_id import PublishId
from flyweight.live.rows import RowCopies
from flyweight.memory import STAGING, Buffer, Bytes, items_of
from flyweight.memory_table import runs_of
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.reshard import reshard
from flyweight.plans.tables import Boxes, Tensors, packed
from flyweight.spec.box import Box
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Extent
from flyweight.worker_threads import default_threads

_READ_BYTES = 64 << 20
"""Digests and fills read so much at once, by several threads."""


class StoredModel:
    """What a publisher has that reads files: all tensors, whole, in one rank."""

    def __init__(self, stored: Stored, version: int | None) -> None:
        """Take the version of the files, which `version` replaces; 0 if there is neither."""
        found = stored.manifest.version if version is None else check_version(version)
        self.stored, self.version = stored, 0 if found is None else found
        self.about = About(stored.manifest.parent, stored.manifest.values)
        if not stored.manifest.tensors:
            raise SpecError(f"{stored.store.place!r} holds no tensors")

    def table(self, rank: int) -> RankTable:
        manifest = self.stored.manifest
        boxes = BoxTable.whole(manifest.tensors.values())
        zeros = packed([0] * len(boxes))
        return RankTable(
            Tensors.of(manifest.tensors),
            dict(manifest.tied),
            Boxes.of(boxes),
            zeros,
            ("",),
            zeros,
            dict(manifest.values),
        )


class _StoredStream:
    """The stream of a plan, from files."""

    def __init__(self, stored: Stored, names: Sequence[str], plan: Plan) -> None:
        self._stored, self._rows, self._digest = stored, plan.streams[0], plan.digest
        self._names = [names[n] for n in self._rows.tensor.tolist()]
        """The tensor of each row."""
        self._specs = [stored.manifest.tensors[name] for name in self._names]
        self._item_bytes = np.array([each.item_bytes for each in self._specs], np.int64)
        # Four elements of six bits are three items.
        self._step = np.array([3 if each.dtype.bits == 6 else 1 for each in self._specs], np.int64)
        known = [self._known_digest(row) for row in range(len(self._names))]
        self._found: Words = np.array([each or 0 for each in known], np.uint64)
        self._overflows = 0
        self._running: dict[int, Digest] = {}
        is_known = np.array([each is not None for each in known], bool)
        self._left = deque(
            part
            for first, end in runs_of(is_known)
            if not is_known[first]
            for part in self._rows.parts(first, end, _READ_BYTES)
        )
        """The ranges that are still to be digested."""

    def _known_digest(self, row: int) -> int | None:
        rows, nbytes = self._rows, self._specs[row].nbytes
        is_known = self._digest == "words" and rows.nbytes[row] == nbytes and rows.cast[row, 0] < 0
        return whole_digest(self._stored, self._names[row]) if is_known else None

    def digests(self, deadline: float) -> tuple[bytes, int]:
        """Return the digests and overflows; after a timeout, the next call goes on from there."""
        rows = self._rows
        while self._left:
            if monotonic() > deadline:
                raise TransferTimeout(
                    f"digests of {self._stored.store.place!r} were not computed in time; update "
                    f"again, or give update a longer timeout_seconds"
                )
            start, stop = self._left[0]
            data = np.empty(stop - start, np.uint8)
            overflows = self.read(start, data, deadline, num_threads=default_threads())
            columns = (each.tolist() for each in rows.range(start, stop))
            for row, low, high in zip(*columns, strict=True):
                nbytes, at = int(rows.nbytes[row]), int(rows.starts[row]) - start
                digest = self._running.setdefault(row, Digest(nbytes, self._digest))
                digest.add(low, data[at + low : at + high])
                if high == nbytes:
                    self._found[row] = self._running.pop(row).value()
            self._left.popleft()
            self._overflows += overflows
        return self._found.astype("<u8").tobytes(), self._overflows

    def fill(self, sink: Bytes, deadline: float) -> None:
        """Read the whole stream."""
        for start, stop in self._rows.parts(0, len(self._names), _READ_BYTES):
            if monotonic() > deadline:
                raise TransferTimeout(f"{start} of {len(sink)} bytes were read from files in time")
            self.read(start, sink[start:stop], deadline, num_threads=default_threads())

    def read(self, start: int, sink: Bytes, deadline: float, *, num_threads: int) -> int:
        """Read a range of the stream; return how many finite values became infinite by casts."""
        rows = self._rows
        row, low, high = rows.range(start, start + len(sink))
        unit = rows.item_bytes[row] * self._step[row]
        first, end = low // unit * self._step[row], -(-high // unit) * self._step[row]
        pieces = pieces_of(rows.shape, self._item_bytes, row, first, end)
        cast, skipped = rows.cast[pieces.row], int(low[0] % unit[0])
        is_cast = bool((cast >= 0).any())
        is_exact = not is_cast and pieces.nbytes == len(sink)
        data = sink if is_exact else np.empty(pieces.nbytes, np.uint8)
        self._read_pieces(pieces, data, num_threads)
        if is_exact:
            return 0
        found, overflows = data, 0
        if is_cast:
            packed = pieces_of(rows.shape, rows.item_bytes, row, first, end)
            found = np.empty(packed.nbytes, np.uint8)
            tables = packed.packed_at(Buffer.of(found)), pieces.packed_at(Buffer.of(data))
            copies = RowCopies(*tables, cast=cast)
            copies.start(should_digest=False)(deadline)
            overflows = copies.overflows
        sink[:] = found[skipped : skipped + len(sink)]
        return overflows

    def _read_pieces(self, pieces: Bucket, data: Bytes, num_threads: int) -> None:
        reader, rows = Reader(self._stored.store, self._stored.manifest), self._rows
        offset, shape = pieces.offset + rows.offset[pieces.row], pieces.shape
        columns = (pieces.row.tolist(), offset.tolist(), shape.tolist(), pieces.start.tolist())
        for row, corner, sizes, at in zip(*columns, strict=True):
            spec = self._specs[row]
            extra = len(sizes) - len(spec.shape)
            box = Box(tuple(corner[extra:]), tuple(sizes[extra:]))
            space = data[at : at + box.num_elements * spec.item_bytes]
            items = items_of(space, spec.item_bytes, box.shape)
            # Not mapped: a file that another process truncates would end this one by SIGBUS.
            target = Target(box, items, STAGING, may_map=False)
            for extent, elements in self._extents(self._names[row], spec.elements(box)):
                reader.add(extent, elements, target)
        reader.run(num_threads=num_threads)

    def _extents(self, name: str, box: Box) -> Iterator[tuple[Extent, Box]]:
        """Yield where a box, in elements, is stored."""
        shards, extents = self._stored.shards(name), self._stored.manifest.extents
        if len(shards) == 1:
            yield extents[shards[0].rank], box
            return
        for copy in reshard({name: shards}, {name: [Shard(0, box)]}).copies():
            yield extents[copy.source.rank], copy.box


class _Fill:
    """Reads a whole stream into memory that a reader shares."""

    def __init__(self, stream: _StoredStream, sink: Bytes) -> None:
        self._stream, self._sink = stream, sink

    def start(self, *, should_digest: bool) -> Callable[[float], None]:
        return partial(self._stream.fill, self._sink)

    def close(self) -> None:
        """Do nothing: nothing is prepared."""


class StoredOffer(Served):
    """A version in files, which do not change while they are offered."""

    memory: Stored

    def __init__(
        self, id: PublishId, stored: Stored, names: Sequence[str], *, should_verify: bool
    ) -> None:
        """names: those of the catalog's tensors, in order."""
        self.id, self.memory = id, stored
        self._names, self._should_verify = names, should_verify
        self._streams: WeakKeyDictionary[Plan, _StoredStream] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def _stream(self, plan: Plan, rank: int) -> _StoredStream:
        if rank:
            raise PlanError(f"files are read by rank 0 of the publisher, not by rank {rank}")
        if plan not in self._streams:
            self._streams[plan] = _StoredStream(self.memory, self._names, plan)
        return self._streams[plan]

    def digests(self, plan: Plan, rank: int, deadline: float) -> tuple[bytes, int]:
        if not self._should_verify:
            return b"", 0
        if not self._lock.acquire(timeout=max(deadline - monotonic(), 0)):
            raise TransferTimeout(f"digests of {self.id} are computed for another reader")
        try:
            return self._stream(plan, rank).digests(deadline)
        finally:
            self._lock.release()

    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        found, deadline = np.empty(stop - start, np.uint8), monotonic() + COPY_SECONDS
        self._stream(plan, rank).read(start, found, deadline, num_threads=1)
        return [found]

    def copies(self, plan: Plan, rank: int, sink: Bytes) -> _Fill:
        return _Fill(self._stream(plan, rank), sink)
