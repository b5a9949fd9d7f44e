"""Loader sink: an engine's own loader, which is given whole tensors and places them itself.

Nobody else can check what it does with them. So each tensor is checked before the loader gets it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from flyweight.adapters.loader import Loader
from flyweight.copies import BufferCopies, Copiers, PreparedCopies, PreparedDigests
from flyweight.digest import Words
from flyweight.errors import DigestMismatch, TransportError, listed
from flyweight.live.lanes import HOST, visible_devices
from flyweight.live.messages import Want
from flyweight.live.remote_source import Arrivals
from flyweight.live.replica_round import ReplicaRound, SinkResult
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers
from flyweight.plans.tables import Tensors, packed
from flyweight.spec.manifest import Leaf, TensorSpec


class LoaderSink:
    """Gives whole tensors to an engine's loader, in the order that it chooses."""

    verified, takes_all = "received", True

    def __init__(self, loader: Loader) -> None:
        self.loader, self.copiers = loader, Copiers()
        self.specs: dict[str, TensorSpec] = {}
        self._loading: _Loading | None = None

    @property
    def has_devices(self) -> bool:
        return self.loader.place != HOST

    def is_current(self) -> bool:
        return bool(self.specs)

    def is_in_place(self) -> bool:
        """Return True: a loader finds the weights itself."""
        return True

    def check(self) -> None:
        """Do nothing: a loader makes its own tensors."""

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        self.specs = dict(self.loader.choose(tensors))
        return Want(
            Tensors.of(self.specs),
            None,
            (self.loader.place,),
            packed([0] * len(self.specs)),
            False,
            visible_devices() if self.has_devices else (),
            checks_digests=True,
        )

    def stage(self, round_: ReplicaRound) -> None:
        self._loading = _Loading(self, round_)
        self._loading.stage(self.loader.staging_bytes)

    def unstage(self) -> None:
        self._loading = None

    def receive(self, round_: ReplicaRound) -> SinkResult:
        loading, started = self._loading, perf_counter()
        assert loading is not None
        staged_seconds = loading.copy_seconds, loading.verify_seconds
        round_.touch()
        weights = loading.weights()
        try:
            self.loader.load(weights)
        finally:
            weights.close()  # a loader that keeps it must not read messages of later rounds
        left = list(self.specs)[loading.num_taken :]
        if left:
            raise TransportError(
                f"the loader took {loading.num_taken} of {len(self.specs)} tensors; it left "
                f"{listed(left)}"
            )
        verify_seconds = loading.verify_seconds - staged_seconds[1]
        seconds = staged_seconds[0] + perf_counter() - started - verify_seconds
        digests = loading.digests.tobytes() if round_.begin.should_verify else b""
        return SinkResult(digests, seconds, loading.verify_seconds)

    def synchronize(self, deadline: float) -> None:
        """Do nothing: only the loader knows what reads its weights."""

    def touched(self) -> None:
        """Do nothing: the loader has written the weights itself."""

    def finish(self, values: Mapping[str, Leaf]) -> None:
        """Do nothing: a loader takes tensors only."""

    def close(self) -> None:
        self.copiers.close()


class _Loading:
    """One round through a loader: tensors that are staged, then each one when it is asked for."""

    def __init__(self, sink: LoaderSink, round_: ReplicaRound) -> None:
        self._sink, self._round, self._source = sink, round_, round_.source
        self._specs = list(sink.specs.values())
        self.digests = np.zeros(len(self._source.copies), np.uint64)
        self._expected = _expected_digests(round_, len(self.digests))
        self.copy_seconds = self.verify_seconds = 0.0
        self.num_taken = self._num_arrived = 0
        """How many tensors the loader has taken, and how many are complete."""
        self._fresh: dict[int, tuple[Any, Buffer]] = {}
        sinks, copies = self._source.sinks, self._source.copies
        self._missing_bytes = np.bincount(
            copies.sink, weights=self._source.copy_bytes, minlength=len(sinks)
        ).astype(np.int64)
        self._ends = np.searchsorted(copies.sink, np.arange(len(sinks) + 1))
        """The copies of each tensor lie between two of these: they are in the tensors' order."""
        self._mapped_ends = np.searchsorted(self._source.mapped.copy, self._ends)
        self._buckets_left = len(self._source.buckets)

    def stage(self, nbytes: int) -> None:
        """Receive and check the first tensors, as many as fit into that many bytes."""
        started = perf_counter()
        for spec in self._specs:
            nbytes -= spec.nbytes
            if nbytes < 0:
                break
            self._arrive()
        self.copy_seconds += perf_counter() - started - self.verify_seconds

    def weights(self) -> Generator[tuple[str, Any], None, None]:
        """Yield each tensor once all of it has arrived and its digest is right."""
        for sink, name in enumerate(self._sink.specs):
            if self._num_arrived == sink:
                self._arrive()
            tensor, _ = self._fresh.pop(sink)
            self.num_taken += 1
            yield name, tensor

    def _arrive(self) -> None:
        """Receive the next tensor, and check it."""
        sink, ends = self._num_arrived, self._mapped_ends
        self._run(self._source.mapped.take(np.arange(ends[sink], ends[sink + 1])))
        while self._missing_bytes[sink] > 0 and self._buckets_left:
            number = self._round.next_bucket()
            self._run(self._source.buckets[number])
            self._round.bucket_emptied(number)
            self._buckets_left -= 1
        if self._missing_bytes[sink]:
            missing, name = self._missing_bytes[sink], self._name(sink)
            raise TransportError(f"{missing} bytes of {name!r} never came")
        self._buffer(sink)  # a tensor without bytes has no copies
        if self._expected is not None:
            self._check(sink, self._expected)
        self._num_arrived += 1

    def _name(self, sink: int) -> str:
        return list(self._sink.specs)[sink]

    def _buffer(self, sink: int) -> Buffer:
        """Return new memory for a tensor: the loader may keep it."""
        if sink not in self._fresh:
            self._fresh[sink] = self._sink.loader.fresh(self._specs[sink])
        return self._fresh[sink][1]

    def _targets(self, copy: Integers, offset: Integers, shape: Integers) -> BufferTable:
        """Return where some items of copies go."""
        copies = self._source.copies
        sinks, rows = np.unique(copies.sink[copy], return_inverse=True)
        memory = BufferTable.of(
            [self._buffer(sink) for sink in sinks.tolist()], self._source.sinks.shape[sinks]
        )
        return memory.regions(rows, copies.sink_offset[copy] + offset, shape)

    def _run(self, arrivals: Arrivals) -> None:
        if not len(arrivals.copy):
            return
        sink = self._targets(arrivals.copy, arrivals.offset, arrivals.shape)
        copies = BufferCopies.whole(sink, arrivals.memory, np.arange(len(arrivals.copy)))
        prepared = PreparedCopies(copies, self._sink.copiers, sink.nbytes)
        prepared.run(self._round.deadline, on_progress=self._round.on_progress)
        prepared.close()
        np.subtract.at(self._missing_bytes, self._source.copies.sink[arrivals.copy], sink.nbytes)

    def _check(self, sink: int, expected: Words) -> None:
        """Digest a tensor, and raise DigestMismatch unless it is what was published."""
        started = perf_counter()
        copy = np.arange(self._ends[sink], self._ends[sink + 1])
        shape = self._source.copies.shape[copy]
        targets = self._targets(copy, np.zeros_like(shape), shape)
        found = self.digests[copy] = PreparedDigests(targets).digests(
            self._round.begin.digest_kind, self._round.deadline
        )
        self.verify_seconds += perf_counter() - started
        if len(wrong := np.flatnonzero(found != expected[copy])):
            row = wrong[0]
            raise DigestMismatch(
                f"{self._name(sink)!r} of version {self._round.begin.version} arrived with digest "
                f"{found[row]:016x}, the publisher has {expected[copy][row]:016x}; the loader did "
                f"not get it"
            )


def _expected_digests(round_: ReplicaRound, num_copies: int) -> Words | None:
    """Return the publisher's digest of each copy; None if the round does not verify."""
    if not round_.begin.should_verify:
        return None
    digests = round_.begin.digests
    if digests is None or len(digests) != 8 * num_copies:
        found = "no" if digests is None else len(digests) // 8
        raise TransportError(f"the publisher sends {found} digests for {num_copies} copies")
    return np.frombuffer(digests, np.uint64)
