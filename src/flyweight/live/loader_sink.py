"""Loader sink: an engine's own loader, which is handed whole tensors and puts them where it likes.

What it does with them nobody else can check, so what it was handed is digested.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from time import perf_counter
from typing import Any

from flyweight.adapters.loader import Loader
from flyweight.errors import TransportError, listed
from flyweight.live.copies import Copiers, Move, Moves, Regions
from flyweight.live.intake import Intake
from flyweight.live.lanes import HOST
from flyweight.live.messages import Begin, Block, Tensor, Want
from flyweight.live.sinks import Feed, Taken, checked_kind, seen_devices
from flyweight.memory import Buffer
from flyweight.spec.box import Box
from flyweight.spec.manifest import Leaf, TensorSpec


class LoaderSink:
    """An engine's own loader, which takes whole named tensors in the publisher's order."""

    verified = "received"

    def __init__(self, loader: Loader) -> None:
        self.loader, self.copiers = loader, Copiers()
        self.names: list[str] = []
        self.specs: list[TensorSpec] = []

    @property
    def has_devices(self) -> bool:
        return self.loader.place != HOST

    def is_current(self) -> bool:
        return bool(self.names)

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        self.names, self.specs = list(tensors), list(tensors.values())
        place = self.loader.place
        return Want(
            tuple(Tensor.of(name, spec) for name, spec in tensors.items()),
            tuple(
                Block(n, (0,) * len(spec.shape), spec.shape, place)
                for n, spec in enumerate(self.specs)
            ),
            False,
            seen_devices([0] if self.has_devices else []),
        )

    def take(self, intake: Intake, begin: Begin, feed: Feed) -> Taken:
        started = perf_counter()
        feed.touch()
        round_ = _Loading(self, intake, begin, feed)
        weights = round_.weights()
        try:
            self.loader.load(weights)
        finally:
            weights.close()  # a loader that keeps it must not take messages of later rounds
        if round_.left:
            raise TransportError(
                f"the loader took {len(self.names) - len(round_.left)} of {len(self.names)} "
                f"tensors; it left {listed(round_.left)}"
            )
        taken = perf_counter() - started - round_.verify_seconds
        return Taken(
            tuple(round_.digests) if begin.should_verify else (), taken, round_.verify_seconds
        )

    def settle(self, deadline: float) -> None:
        """A loader knows itself what reads its weights."""

    def touched(self) -> None:
        """It has written them itself."""

    def finish(self, values: Mapping[str, Leaf]) -> None:
        """A loader takes tensors only."""

    def close(self) -> None:
        self.copiers.close()


class _Loading:
    """One round through a loader: tensors are made as it asks for them."""

    def __init__(self, sink: LoaderSink, intake: Intake, begin: Begin, feed: Feed) -> None:
        self._sink, self._intake, self._begin, self._feed = sink, intake, begin, feed
        self._kind = checked_kind(sink, begin)
        self.digests = [0] * len(intake.copies)
        self.verify_seconds = 0.0
        self.left = list(sink.names)
        self._fresh: dict[int, tuple[Any, Buffer]] = {}
        self._missing = [0] * len(sink.names)
        self._by_sink: dict[int, list[int]] = {}
        for number, copy in enumerate(intake.copies):
            self._missing[copy.sink] += intake.nbytes(copy)
            self._by_sink.setdefault(copy.sink, []).append(number)
        self._to_come = len(intake.bucket_numbers)

    def _buffer(self, sink: int) -> Buffer:
        """Return memory for a tensor, fresh: the loader may keep it as long as it likes."""
        if sink not in self._fresh:
            self._fresh[sink] = self._sink.loader.fresh(self._sink.specs[sink])
        return self._fresh[sink][1]

    def _run(self, moves: Sequence[Move]) -> None:
        deadline = self._feed.deadline
        prepared = Moves(moves, self._sink.copiers)
        prepared.run([None] * len(self.digests), deadline, self._feed.advance)
        prepared.close()
        for move in moves:
            self._missing[self._intake.copies[move.region].sink] -= move.sink.nbytes

    def weights(self) -> Generator[tuple[str, Any], None, None]:
        """Yield each tensor once all of it is here."""
        intake = self._intake
        for sink, name in enumerate(self._sink.names):
            for source in {intake.copies[n].source for n in self._by_sink.get(sink, [])}:
                if source in intake.mapped:
                    buffer = intake.mapped[source]
                    whole = Box.whole(buffer.shape)
                    self._run(list(intake.moves(source, whole, buffer, self._buffer)))
            while self._missing[sink] > 0 and self._to_come:
                self._pour()
            if self._missing[sink]:
                raise TransportError(f"{self._missing[sink]} bytes of {name!r} never came")
            self._buffer(sink)  # one without bytes is a tensor too
            if self._begin.should_verify:
                self._verify(sink)
            tensor, _ = self._fresh.pop(sink)
            self.left.remove(name)
            yield name, tensor

    def _pour(self) -> None:
        number = self._feed.next()
        self._run(
            [
                move
                for source, box, buffer in self._intake.pieces(number)
                for move in self._intake.moves(source, box, buffer, self._buffer)
            ]
        )
        self._feed.emptied(number)
        self._to_come -= 1

    def _verify(self, sink: int) -> None:
        started = perf_counter()
        numbers = self._by_sink.get(sink, [])
        copies = [self._intake.copies[n] for n in numbers]
        buffer = self._buffer(sink)
        regions = Regions([buffer.block(Box(c.sink_offset, c.shape)) for c in copies])
        found = regions.digests(self._kind, self._feed.deadline)
        for number, value in zip(numbers, found, strict=True):
            self.digests[number] = value
        self.verify_seconds += perf_counter() - started
