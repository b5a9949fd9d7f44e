"""Loader: gives one version to an engine's own loader, as whole tensors that it places itself.

Nobody can check what a loader does with a tensor, so its digests are compared before the loader
gets it. On a host, tensors are filled before the engine pauses, as far as they may take memory; on
a device, whose memory is the engine's, while it loads. They are filled in batches: to prepare each
of many small ones takes longer than its copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flyweight.errors import FlyweightError, TransportError, listed
from flyweight.live.plan import Plan
from flyweight.live.rows import RowCopies, check_digests, words_of
from flyweight.live.source_rank import Arrived
from flyweight.live.target import LoaderTarget
from flyweight.memory_table import BufferTable, runs_of
from flyweight.plans.copy_table import item_bytes

_BATCH_BYTES = 64 << 20
_BATCH_TENSORS = 1000


class Loading:
    """One version on its way through a loader, from memory that keeps still until the end."""

    def __init__(
        self, target: LoaderTarget, plan: Plan, arrived: Sequence[Arrived], replica: str
    ) -> None:
        self._loader, self._plan, self._replica = target.loader, plan, replica
        self._names, self._specs = list(target.specs), list(target.specs.values())
        self._arrived = arrived
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
        whole = self._plan.wanted.boxes.shape[first:end]
        table = BufferTable.of([buffer for _, buffer in fresh], whole)
        for each in self._arrived:
            self._fill(each, (first, end), table, deadline)
            if not each.digests and each.lease is not None:
                each.lease.check_lease()
        names = self._names[first:end]
        self._filled.extend((name, tensor) for name, (tensor, _) in zip(names, fresh, strict=True))

    def _fill(
        self, arrived: Arrived, tensors: tuple[int, int], table: BufferTable, deadline: float
    ) -> None:
        """Copy the rows of a source rank; raise DigestMismatch if one is wrong.

        tensors: the first one, and the end; `table` says where they are.
        """
        stream = arrived.source.stream
        low, high = np.searchsorted(stream.sink, tensors).tolist()
        if low == high:
            return
        rows, digests = np.arange(low, high), arrived.digests[8 * low : 8 * high]
        some = stream.take(rows)
        sink = replace(some, sink=some.sink - tensors[0]).in_sink(table)
        cast = None if arrived.cast is None else some.cast
        copies = RowCopies(sink, arrived.rows.take(rows), self._plan.digest, cast)
        try:
            found = copies.start(should_digest=bool(digests))(deadline)
        finally:
            copies.close()
        if found is not None:
            path = (
                f"on their way to the loader of replica {self._replica!r}, which did not get them"
            )
            check_digests(found, words_of(digests), some.sink, self._names, path)
