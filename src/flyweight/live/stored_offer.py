"""Stored offer: an opened snapshot or checkpoint as the source of a publisher.

Replicas take it at once, without a publish. Its files are read for each of them, and never mapped:
a file that is truncated must not kill an engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from weakref import WeakKeyDictionary

import numpy as np

from flyweight.casts import ITEM_BYTES, cast
from flyweight.checks import check_version
from flyweight.digest import Digest, Words
from flyweight.errors import PlanError, SpecError, TransferTimeout
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored, whole_digest
from flyweight.live.catalog import RankTable
from flyweight.live.offer import RECLAIM_SECONDS, About
from flyweight.live.plan import Plan, Stream
from flyweight.live.publish_id import PublishId
from flyweight.memory import STAGING, Bytes, items_of
from flyweight.memory_table import BufferTable
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.reshard import reshard
from flyweight.plans.tables import Boxes, Tensors, packed
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Extent
from flyweight.transports.segments import Placed, Segment
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

    def __init__(self, stored: Stored, names: Sequence[str], plan: Plan, rank: int) -> None:
        self._stored, self._names, self._digest = stored, names, plan.digest
        self.rows: Stream = plan.streams[rank]
        self._found: Words = np.zeros(len(self.rows.block), np.uint64)
        self._overflows = 0
        self._running: dict[int, Digest] = {}
        self._left: deque[tuple[int, int, int]] = deque()
        """The parts of rows that are still to be digested: row, first byte, and end."""
        for row, nbytes in enumerate(self.rows.nbytes.tolist()):
            if (known := self._known_digest(row)) is not None:
                self._found[row] = known
                continue
            self._running[row] = Digest(nbytes, plan.digest)
            for at in range(0, max(nbytes, 1), _READ_BYTES):
                self._left.append((row, at, min(at + _READ_BYTES, nbytes)))

    def _known_digest(self, row: int) -> int | None:
        name = self._names[self.rows.tensor[row]]
        spec = self._stored.manifest.tensors[name]
        is_whole = self.rows.nbytes[row] == spec.nbytes and self.rows.cast[row, 0] < 0
        return whole_digest(self._stored, name) if is_whole and self._digest == "words" else None

    def digests(self, deadline: float) -> tuple[bytes, int]:
        """Return the digests and overflows; after a timeout, the next call goes on from there."""
        while self._left:
            if monotonic() > deadline:
                raise TransferTimeout(
                    f"digests of {self._stored.store.place!r} were not computed in time; update "
                    f"again, or give update a longer timeout_seconds"
                )
            some = list(self._next_parts())
            sizes = [end - first for _, first, end in some]
            data = np.empty(sum(sizes), np.uint8)
            goals = np.split(data, np.cumsum(sizes)[:-1])
            overflows = self._read(some, goals, default_threads())
            for (row, first, end), goal in zip(some, goals, strict=True):
                self._running[row].add(first, goal)
                if end == self.rows.nbytes[row]:
                    self._found[row] = self._running.pop(row).value()
                self._left.popleft()
            self._overflows += overflows
        return self._found.astype("<u8").tobytes(), self._overflows

    def _next_parts(self) -> Iterator[tuple[int, int, int]]:
        nbytes = 0
        for row, first, end in self._left:
            nbytes += end - first
            if nbytes > _READ_BYTES:
                return
            yield row, first, end

    def read(self, start: int, stop: int, into: Bytes, *, num_threads: int) -> None:
        """Read bytes `start` to `stop` of the stream."""
        starts = self.rows.starts
        first, last = np.searchsorted(starts, start, "right") - 1, np.searchsorted(starts, stop)
        parts, goals = [], []
        for row in range(first, last):
            at = int(starts[row])
            low, high = max(start - at, 0), min(stop, int(starts[row + 1])) - at
            parts.append((row, low, high))
            goals.append(into[at + low - start : at + high - start])
        self._read(parts, goals, num_threads)

    def _read(
        self, parts: Sequence[tuple[int, int, int]], goals: Sequence[Bytes], num_threads: int
    ) -> int:
        """Read parts of rows; return how many finite values became infinite by casts."""
        reader = Reader(self._stored.store, self._stored.manifest)
        ends = [self._add(reader, *part, goal) for part, goal in zip(parts, goals, strict=True)]
        reader.run(num_threads=num_threads)
        return sum(end() for end in ends if end is not None)

    def _add(
        self, reader: Reader, row: int, low: int, high: int, goal: Bytes
    ) -> Callable[[], int] | None:
        """Have a part of a row read; return what casts or cuts it once it is there."""
        rows, name = self.rows, self._names[self.rows.tensor[row]]
        spec, width = self._stored.manifest.tensors[name], int(rows.item_bytes[row])
        before, after = rows.cast[row].tolist()
        is_cast = before >= 0
        step = 3 if spec.dtype.bits == 6 else 1  # four elements of six bits are three items
        first, end = low // width // step * step, -(-high // (width * step)) * step
        nbytes = (end - first) * spec.item_bytes
        is_exact = not is_cast and (first * width, end * width) == (low, high)
        data, at = goal if is_exact else np.empty(nbytes, np.uint8), 0
        num_dims = len(spec.shape)
        shape, corner = (
            each[row].tolist()[rows.shape.shape[1] - num_dims :]
            for each in (rows.shape, rows.offset)
        )
        for part in boxes_of_range(shape, first, end - first):
            box = part.moved(corner)
            space = data[at : at + box.num_elements * spec.item_bytes]
            # Not mapped: a file that another process truncates would end this one by SIGBUS.
            items = items_of(space, spec.item_bytes, box.shape)
            target = Target(box, items, STAGING, may_map=False)
            for extent, elements in self._extents(name, spec.elements(box)):
                reader.add(extent, elements, target)
            at += len(space)
        if is_exact:
            return None

        def finish() -> int:
            found, overflows = data, 0
            if is_cast:
                found = np.empty((end - first) * ITEM_BYTES[after], np.uint8)
                overflows = cast(data, found, (before, after))
            goal[:] = found[low - first * width : high - first * width]
            return overflows

        return finish

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
        return self._run

    def _run(self, deadline: float) -> None:
        total = self._stream.rows.total
        for start in range(0, total, _READ_BYTES):
            if monotonic() > deadline:
                raise TransferTimeout(f"{start} of {total} bytes were read from files in time")
            stop = min(start + _READ_BYTES, total)
            self._stream.read(start, stop, self._sink[start:stop], num_threads=default_threads())

    def close(self) -> None:
        """Do nothing: nothing is prepared."""


class StoredOffer:
    """A version in files, which do not change while they are offered."""

    def __init__(
        self, id: PublishId, stored: Stored, names: Sequence[str], *, should_verify: bool
    ) -> None:
        """names: those of the catalog's tensors, in order."""
        self.id, self.memory = id, stored
        self._names, self._should_verify = names, should_verify
        self._streams: WeakKeyDictionary[Plan, _StoredStream] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def lease_seconds(self) -> float:
        return RECLAIM_SECONDS

    def mappable(self, rank: int) -> tuple[Placed, BufferTable] | None:
        return None

    def segments(self, rank: int) -> Sequence[Segment]:
        return []

    def _stream(self, plan: Plan, rank: int) -> _StoredStream:
        if rank:
            raise PlanError(f"files are read by rank 0 of the publisher, not by rank {rank}")
        if plan not in self._streams:
            self._streams[plan] = _StoredStream(self.memory, self._names, plan, rank)
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

    def arrived_bytes(
        self, plan: Plan, rank: int, start: int, stop: int, seconds: float
    ) -> int | None:
        return None

    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        found = np.empty(stop - start, np.uint8)
        self._stream(plan, rank).read(start, stop, found, num_threads=1)
        return [found]

    def copies(self, plan: Plan, rank: int, sink: Bytes) -> _Fill:
        return _Fill(self._stream(plan, rank), sink)

    def confirm(self, seconds: float) -> None:
        """Do nothing: the files of a checkpoint are written once."""
