"""Loader: gives one version to an engine's own loader, as whole tensors that it places itself.

Nobody can check what a loader does with a tensor, so its digests are compared before the loader
gets it. On a host, tensors are filled before the engine pauses, as far as they may take memory; on
a device, whose memory is the engine's, while it loads. They are filled in batches: to prepare each
of many small ones takes longer than its copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flyweight.digest import Words
from flyweight.errors import FlyweightError, TransportError, listed
from flyweight.live.plan import Plan, Stream
from flyweight.live.rows import RowCopies, check_digests, words_of
from flyweight.live.target import LoaderTarget
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers, runs_of
from flyweight.plans.copy_table import item_bytes

if TYPE_CHECKING:
    from flyweight.live.incoming import Arrived

_BATCH_BYTES = 64 << 20
_BATCH_TENSORS = 1000


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of all source ranks, in the order of the loader's tensors."""

    stream: Stream
    """`cast` is that of what is still to be cast."""
    memory: BufferTable
    """Where they have arrived."""
    digest: Words
    has_digest: NDArray[np.bool_]

    @classmethod
    def of(cls, plan: Plan, arrived: Mapping[int, Arrived]) -> _Rows:
        streams, digests = [], []
        for rank, each in arrived.items():
            stream = plan.streams[rank]
            digests.append(words_of(each.digests or bytes(8 * len(stream.sink))))
            if each.source is None:  # in staging, which holds what was cast
                stream = replace(stream, cast=np.full_like(stream.cast, -1))
            streams.append(stream)
        rows = cls(
            Stream.joined(streams),
            BufferTable.joined([each.rows for each in arrived.values()]),
            np.concatenate(digests),
            np.repeat([bool(each.digests) for each in arrived.values()], list(map(len, digests))),
        )
        return rows.take(np.argsort(rows.stream.sink, kind="stable"))

    def take(self, rows: Integers) -> _Rows:
        memory, digest = self.memory.take(rows), self.digest[rows]
        return _Rows(self.stream.take(rows), memory, digest, self.has_digest[rows])

    def of_tensors(self, first: int, end: int) -> _Rows:
        """Return the rows of the tensors from `first` to `end`, without `end`."""
        return self.take(np.arange(*np.searchsorted(self.stream.sink, (first, end))))


class Loading:
    """One version on its way through a loader, from memory that keeps still until the end."""

    def __init__(
        self, target: LoaderTarget, plan: Plan, arrived: Mapping[int, Arrived], replica: str
    ) -> None:
        self._loader, self._plan, self._replica = target.loader, plan, replica
        self._names, self._specs = list(target.specs), list(target.specs.values())
        self._rows = _Rows.of(plan, arrived) if arrived else None  # all tensors may be empty
        self._unproved = [
            each.source for each in arrived.values() if each.source is not None and not each.digests
        ]
        self._nbytes = plan.wanted.boxes.num_items * item_bytes(self._specs)
        batch = np.cumsum(self._nbytes) // _BATCH_BYTES
        self._batches = deque(runs_of(batch, np.arange(len(batch)) // _BATCH_TENSORS))
        """The first tensor and the end of each batch."""
        self._filled: deque[tuple[str, Any]] = deque()
        self._num_taken = 0
        self.has_begun = False
        """True once the loader was called."""
        self._failure: FlyweightError | None = None

    def prepare(self, room: int, deadline: float) -> bool:
        """Fill tensors on the host that take `room` bytes at most; return True if that is all.

        Raises DigestMismatch if one is wrong.
        """
        while self._batches and not self._loader.place:
            room -= int(self._nbytes[slice(*self._batches[0])].sum())
            if room < 0:
                break
            self._fill_next(deadline)
        return not self._batches

    @property
    def progress(self) -> float:
        """How much the loader has taken, from 0 to 1."""
        return self._num_taken / max(len(self._names), 1)

    def run(self, deadline: float) -> None:
        """Call the loader; raise DigestMismatch, before it gets the tensor, if one is wrong.

        Raises TransportError if it leaves tensors, and what the loader itself raises.
        """
        self.has_begun = True
        weights = self._weights(deadline)
        try:
            self._loader.load(weights)
        except Exception:
            if self._failure is None:
                raise
        finally:
            weights.close()  # a loader that keeps it must not read memory that changes
        if self._failure is not None:  # which the loader may have caught, or wrapped
            raise self._failure
        if left := self._names[self._num_taken :]:
            raise TransportError(
                f"the loader took {self._num_taken} of {len(self._names)} tensors; it left "
                f"{listed(left)}"
            )

    def _weights(self, deadline: float) -> Generator[tuple[str, Any], None, None]:
        """Yield each tensor once all of it has arrived and its digests are right."""
        try:
            while self._filled or self._batches:
                if not self._filled:
                    self._fill_next(deadline)
                    continue
                self._num_taken += 1
                yield self._filled.popleft()  # which is the loader's alone from here on
        except FlyweightError as error:
            self._failure = error
            raise

    def _fill_next(self, deadline: float) -> None:
        """Make the tensors of the next batch, new ones: the loader may keep them."""
        first, end = self._batches.popleft()
        fresh = [self._loader.fresh(spec) for spec in self._specs[first:end]]
        if self._rows is not None:
            rows = self._rows.of_tensors(first, end)
            self._fill(rows, first, [buffer for _, buffer in fresh], deadline)
        for each in self._unproved:
            each.check_lease()
        names = self._names[first:end]
        self._filled.extend((name, tensor) for name, (tensor, _) in zip(names, fresh, strict=True))

    def _fill(self, rows: _Rows, first: int, buffers: Sequence[Buffer], deadline: float) -> None:
        stream = replace(rows.stream, sink=rows.stream.sink - first)
        whole = self._plan.wanted.boxes.shape[first : first + len(buffers)]
        sink = stream.in_sink(BufferTable.of(buffers, whole))
        copies = RowCopies(sink, rows.memory, self._plan.digest, stream.cast)
        try:
            found = copies.start(should_digest=bool(rows.has_digest.any()))(deadline)
        finally:
            copies.close()
        if found is not None:
            known, tensor = rows.has_digest, rows.stream.sink
            path = (
                f"on their way to the loader of replica {self._replica!r}, which did not get them"
            )
            check_digests(found[known], rows.digest[known], tensor[known], self._names, path)
