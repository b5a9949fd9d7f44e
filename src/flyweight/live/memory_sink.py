"""Memory sink: live parameters, written in place, box by box.

Copies and digests are prepared once, and again only when the model's tensors or the
publisher's memory are no longer the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, perf_counter

from flyweight.adapters.identity import Identity
from flyweight.adapters.model import Model, ModelBlock, adapt
from flyweight.cuda import driver
from flyweight.digest import Digest
from flyweight.errors import PlanError, SpecError, TransportError
from flyweight.live.copies import Copiers, Move, Moves, Regions, SmallRegions, is_small
from flyweight.live.intake import Intake
from flyweight.live.lanes import HOST
from flyweight.live.messages import Begin, Block, Copy, Tensor, Want
from flyweight.live.sinks import Feed, Taken, checked_kind, seen_devices
from flyweight.memory import Buffer
from flyweight.spec.box import Box
from flyweight.spec.manifest import Leaf, Manifest, TensorSpec
from flyweight.spec.model_layout import ModelLayout


class MemorySink:
    """Live parameters, written in place by box."""

    verified = "live"

    def __init__(
        self,
        thing: object,
        *,
        layout: ModelLayout | None = None,
        rank: int | None = None,
        may_leave: bool = False,
    ) -> None:
        self._thing, self._layout, self._rank = thing, layout, rank
        self._may_leave = may_leave or layout is not None
        is_rank = type(rank) is int and layout is not None and 0 <= rank < layout.num_ranks
        if layout is not None and not is_rank:
            raise SpecError(
                f"rank is {rank!r}; the layout is for ranks 0 to {layout.num_ranks - 1}"
            )
        self._copiers = Copiers()
        self._model: Model | None = None
        self._blocks: list[ModelBlock] = []
        self._identity: Identity | None = None
        self._prepared: tuple[Intake, int] | None = None
        self._mapped = Moves((), self._copiers)
        self._buckets: dict[int, Moves] = {}
        self._last: list[int] = []
        """The copies that are digested after all is copied."""
        self._has_doubles = False
        """True if some memory is filled by two tensors of the publisher, which must be equal."""
        self._small = SmallRegions({})
        self._added: list[int] = []
        """The bytes of each copy that is digested piece by piece as it comes, else 0."""
        self._devices: list[int] = []
        self._regions: Regions | None = None
        if layout is None:
            adapt(thing).check_writable()  # what is wrong with it should be said at once

    @property
    def has_devices(self) -> bool:
        return bool(self._devices)

    def is_current(self) -> bool:
        return self._identity is not None and self._identity.is_same()

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        found = Identity(self._thing)
        if self._layout is None:
            model = adapt(self._thing)
        else:
            layout, rank = self._layout, self._rank
            assert rank is not None
            whole = {**tensors, **{name: tensors[tied[name]] for name in tied}}
            model = adapt(self._thing, lambda: layout.locals(whole, rank))
        model.check_writable()
        specs: list[Tensor] = []
        blocks: list[Block] = []
        self._blocks = []
        for name in _wanted_names(model.manifest, tensors, tied):
            for block in model.blocks(name):
                if block.buffer is None:
                    raise PlanError(f"{name!r} is on a device that cannot be written in place")
                self._blocks.append(block)
                blocks.append(
                    Block(len(specs), block.box.offset, block.box.shape, _place(block.buffer))
                )
            specs.append(Tensor.of(name, model.manifest.spec(name)))
        self._model, self._identity, self._prepared = model, found, None
        devices = (block.buffer.device for block in self._blocks if block.buffer is not None)
        self._devices = sorted({each for each in devices if each is not None})
        return Want(tuple(specs), tuple(blocks), self._may_leave, seen_devices(self._devices))

    def settle(self, deadline: float) -> None:
        assert self._model is not None
        for device in self._devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))
        self._model.settle()

    def touched(self) -> None:
        assert self._model is not None
        self._model.touched()

    def take(self, intake: Intake, begin: Begin, feed: Feed) -> Taken:
        self._prepare(intake)
        kind = checked_kind(self, begin)
        if self._has_doubles and not begin.should_verify:
            raise PlanError(
                "tensors that are one here are several at the publisher, and nothing is verified: "
                "whether they are equal is not known; publish with should_verify=True, or tie them "
                "there too"
            )
        digests = [
            Digest(nbytes, kind) if nbytes and begin.should_verify else None
            for nbytes in self._added
        ]
        started, spent = perf_counter(), 0.0
        feed.touch()
        regions = self._live_regions(intake) if begin.should_verify else None
        self._mapped.start()
        if regions is not None and not self._buckets and self._mapped.is_ordered:
            regions.start()  # the device goes on to read what it has copied by itself
        spent += self._mapped.run(digests, feed.deadline, feed.advance)
        missing = set(self._buckets)
        while missing:
            number = feed.next()
            if number not in missing:
                raise TransportError(f"bucket {number} was not announced, or came twice")
            missing.remove(number)
            spent += self._buckets[number].run(digests, feed.deadline, feed.advance)
            feed.emptied(number)
        copied = perf_counter()
        if not begin.should_verify:
            return Taken((), copied - started, 0.0)
        if self._devices:
            feed.copied()
        found = [0 if each is None else each.value() for each in digests]
        for number, value in self._small.digests(kind):
            found[number] = value
        if regions is not None:
            values = regions.digests(kind, feed.deadline)
            for number, value in zip(self._last, values, strict=True):
                found[number] = value
        verified = perf_counter() - copied + spent
        return Taken(tuple(found), copied - started - spent, verified)

    def _live_regions(self, intake: Intake) -> Regions | None:
        """Return what is digested after all was copied."""
        if self._regions is None and self._last:
            self._regions = Regions([self._region(intake.copies[n]) for n in self._last])
        return self._regions

    def _buffer(self, sink: int) -> Buffer:
        buffer = self._blocks[sink].buffer
        assert buffer is not None
        return buffer

    def _region(self, copy: Copy) -> Buffer:
        return self._buffer(copy.sink).block(Box(copy.sink_offset, copy.shape))

    def _prepare(self, intake: Intake) -> None:
        """Make the lists of copies, unless they are those of the last round."""
        key = intake, intake.generation
        if self._prepared is not None and self._prepared == key:
            return
        for copy in intake.copies:
            if not 0 <= copy.sink < len(self._blocks):
                raise TransportError(f"{copy} is for block {copy.sink} of {len(self._blocks)}")
            whole = Box.whole(self._buffer(copy.sink).shape)
            if not whole.contains(Box(copy.sink_offset, copy.shape)):
                raise TransportError(f"{copy} writes outside of its block of {whole.shape}")
        mapped = [
            move
            for source, buffer in intake.mapped.items()
            for move in intake.moves(source, Box.whole(buffer.shape), buffer, self._buffer)
        ]
        by_bucket = {
            number: [
                move
                for source, box, buffer in intake.pieces(number)
                for move in intake.moves(source, box, buffer, self._buffer)
            ]
            for number in intake.bucket_numbers
        }
        self._check_whole(intake, mapped, by_bucket)
        self._forget()
        self._mapped = Moves(mapped, self._copiers)
        self._buckets = {
            n: Moves(each, self._copiers, is_bucket=True) for n, each in by_bucket.items()
        }
        regions = [self._region(copy) for copy in intake.copies]
        times = Counter(map(id, self._blocks))
        doubles = [times[id(self._blocks[copy.sink])] > 1 for copy in intake.copies]
        self._has_doubles = any(doubles)
        # What another copy may write again must not be digested before that.
        is_last = [
            each.device is not None or (is_double and not is_small(each))
            for each, is_double in zip(regions, doubles, strict=True)
        ]
        self._last = [n for n, each in enumerate(is_last) if each]
        self._small = SmallRegions(
            {n: each for n, each in enumerate(regions) if not is_last[n] and is_small(each)}
        )
        self._added = [
            0 if is_last[n] or is_small(each) else each.nbytes for n, each in enumerate(regions)
        ]
        self._regions = None
        self._prepared = key

    def _forget(self) -> None:
        for each in (self._mapped, *self._buckets.values()):
            each.close()
        self._mapped, self._buckets, self._regions = Moves((), self._copiers), {}, None

    def _check_whole(
        self, intake: Intake, mapped: Sequence[Move], by_bucket: Mapping[int, Sequence[Move]]
    ) -> None:
        """Raise unless every byte that is wanted comes exactly as often as it is wanted."""
        found: list[list[tuple[int, int]]] = [[] for _ in intake.copies]
        for move in (*mapped, *(each for moves in by_bucket.values() for each in moves)):
            found[move.region].append((move.offset, move.sink.nbytes))
        filled = [0] * len(self._blocks)
        for copy, pieces in zip(intake.copies, found, strict=True):
            at = 0
            for offset, nbytes in sorted(pieces):  # each is contiguous in the copy's own bytes
                if offset != at:
                    raise TransportError(
                        f"byte {min(at, offset)} of a copy is to come twice, or not"
                    )
                at += nbytes
            if at != intake.nbytes(copy):
                raise TransportError(
                    f"{at} of the {intake.nbytes(copy)} bytes of a copy are to come"
                )
            filled[copy.sink] += at
        for number, nbytes in enumerate(filled):
            if nbytes != self._buffer(number).nbytes:
                raise TransportError(
                    f"{nbytes} of the {self._buffer(number).nbytes} bytes of a wanted block are "
                    f"to come"
                )

    def finish(self, values: Mapping[str, Leaf]) -> None:
        assert self._model is not None
        self._model.finish(Manifest({}, values=values))
        before = self._identity
        if values and before is not None and not before.is_same():
            after = Identity(self._thing)  # they hang anew, and nothing else may
            self._identity = after if after.has_tensors_of(before) else before

    def close(self) -> None:
        self._prepared = None
        self._forget()
        self._copiers.close()


def _place(buffer: Buffer) -> str:
    return HOST if buffer.device is None else driver.uuid(buffer.device)


def _wanted_names(
    manifest: Manifest, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]
) -> Iterator[str]:
    """Yield the names to ask for: of names that are one tensor here, all that differ there.

    If what they bring differs, the digests of the one memory they share will not all fit.
    """
    aliases: dict[str, list[str]] = {name: [name] for name in manifest.tensors}
    for alias, name in manifest.tied.items():
        aliases[name].append(alias)
    for names in aliases.values():
        known = [name for name in names if name in tensors or name in tied]
        seen = set()
        for name in known or names[:1]:
            if tied.get(name, name) not in seen:
                seen.add(tied.get(name, name))
                yield name
