"""Loader sink: an engine's own loader, which is given whole tensors and places them itself.

Nobody else can check what it does with them, so the tensors that it is given are digested.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from time import perf_counter
from typing import Any

from flyweight.adapters.loader import Loader
from flyweight.errors import TransportError, listed
from flyweight.live.copies import BufferCopy, Copiers, PreparedCopies, PreparedDigests
from flyweight.live.lanes import HOST, visible_devices
from flyweight.live.messages import Block, Tensor, Want
from flyweight.live.replica_round import ReplicaRound, SinkResult
from flyweight.memory import Buffer
from flyweight.spec.box import Box
from flyweight.spec.manifest import Leaf, TensorSpec


class LoaderSink:
    """Gives whole tensors to an engine's loader, in the publisher's order."""

    verified = "received"

    def __init__(self, loader: Loader) -> None:
        self.loader, self.copiers = loader, Copiers()
        self.specs: dict[str, TensorSpec] = {}

    @property
    def has_devices(self) -> bool:
        return self.loader.place != HOST

    def is_current(self) -> bool:
        return bool(self.specs)

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        self.specs = dict(tensors)
        place = self.loader.place
        return Want(
            tuple(Tensor.of(name, spec) for name, spec in tensors.items()),
            tuple(
                Block(n, (0,) * len(spec.shape), spec.shape, place)
                for n, spec in enumerate(tensors.values())
            ),
            False,
            visible_devices() if self.has_devices else (),
        )

    def receive(self, round_: ReplicaRound) -> SinkResult:
        started = perf_counter()
        loading = _Loading(self, round_)
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
        seconds = perf_counter() - started - loading.verify_seconds
        digests = tuple(loading.digests) if round_.begin.should_verify else ()
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
    """One round through a loader, which makes each tensor when the loader asks for it."""

    def __init__(self, sink: LoaderSink, round_: ReplicaRound) -> None:
        self._sink, self._round, self._source = sink, round_, round_.source
        self._specs = list(sink.specs.values())
        self.digests = [0] * len(self._source.copies)
        self.verify_seconds = 0.0
        self.num_taken = 0
        self._fresh: dict[int, tuple[Any, Buffer]] = {}
        wholes = [Box.whole(spec.shape) for spec in self._specs]
        pairs = list(zip(self._specs, wholes, strict=True))
        self._source.check_targets([(spec.stored(each), spec.item_bytes) for spec, each in pairs])
        self._missing_bytes = [spec.box_bytes(each) for spec, each in pairs]
        self._by_sink: dict[int, list[int]] = {}
        for number, copy in enumerate(self._source.copies):
            self._by_sink.setdefault(copy.sink, []).append(number)
        self._buckets_left = len(self._source.bucket_numbers)

    def weights(self) -> Generator[tuple[str, Any], None, None]:
        """Yield each tensor once all of it has arrived."""
        source = self._source
        for sink, name in enumerate(self._sink.specs):
            for block in {source.copies[n].source for n in self._by_sink.get(sink, [])}:
                if block in source.mapped:
                    self._run(list(source.mapped_copies(block, self._buffer)))
            while self._missing_bytes[sink] > 0 and self._buckets_left:
                number = self._round.next_bucket()
                self._run(list(source.bucket_copies(number, self._buffer)))
                self._round.bucket_emptied(number)
                self._buckets_left -= 1
            if self._missing_bytes[sink]:
                raise TransportError(f"{self._missing_bytes[sink]} bytes of {name!r} never came")
            self._buffer(sink)  # a tensor without bytes has no copies
            if self._round.begin.should_verify:
                self._digest(sink)
            tensor, _ = self._fresh.pop(sink)
            self.num_taken += 1
            yield name, tensor

    def _buffer(self, sink: int) -> Buffer:
        """Return new memory for a tensor: the loader may keep it."""
        if sink not in self._fresh:
            self._fresh[sink] = self._sink.loader.fresh(self._specs[sink])
        return self._fresh[sink][1]

    def _run(self, copies: Sequence[BufferCopy]) -> None:
        prepared = PreparedCopies(copies, self._sink.copiers)
        nothing = [None] * len(self.digests)
        prepared.run(nothing, self._round.deadline, self._round.on_progress)
        prepared.close()
        for each in copies:
            self._missing_bytes[self._source.copies[each.region].sink] -= each.sink.nbytes

    def _digest(self, sink: int) -> None:
        started = perf_counter()
        numbers = self._by_sink.get(sink, [])
        copies = [self._source.copies[n] for n in numbers]
        buffer = self._buffer(sink)
        targets = [buffer.block(Box(copy.sink_offset, copy.shape)) for copy in copies]
        found = PreparedDigests(targets).digests(
            self._round.begin.digest_kind, self._round.deadline
        )
        for number, value in zip(numbers, found, strict=True):
            self.digests[number] = value
        self.verify_seconds += perf_counter() - started
