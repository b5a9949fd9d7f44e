"""Memory sink: the parameters of a model, written in place.

Copies and digests are prepared once, and again only when the model's tensors or the
publisher's memory have changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from time import monotonic, perf_counter

from flyweight.adapters.identity import Identity
from flyweight.adapters.model import Model, ModelBlock, adapt
from flyweight.cuda import driver
from flyweight.digest import Digest
from flyweight.errors import PlanError, SpecError, TransportError
from flyweight.live.copies import (
    BufferCopy,
    Copiers,
    PreparedCopies,
    PreparedDigests,
    SmallDigests,
    is_small,
)
from flyweight.live.lanes import HOST
from flyweight.live.messages import Block, Copy, Tensor, Want
from flyweight.live.remote_source import RemoteSource
from flyweight.live.sink import SinkResult, SinkRound, checked_kind, visible_devices
from flyweight.memory import Buffer
from flyweight.spec.box import Box
from flyweight.spec.manifest import Leaf, Manifest, TensorSpec
from flyweight.spec.model_layout import ModelLayout


class MemorySink:
    """Writes the parameters of a model in place, box by box."""

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
        self._prepared: tuple[RemoteSource, int] | None = None
        self._mapped = PreparedCopies((), self._copiers)
        self._buckets: dict[int, PreparedCopies] = {}
        self._last: list[int] = []
        """The copies that are digested after everything is copied."""
        self._has_doubles = False
        """True if two tensors of the publisher go to the same memory: they must be equal."""
        self._small = SmallDigests({})
        self._added: list[int] = []
        """The bytes of each copy that is digested chunk by chunk as it arrives, else 0."""
        self._devices: list[int] = []
        self._digests: PreparedDigests | None = None
        if layout is None:
            adapt(thing).check_writable()  # raise now rather than at the first update

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
        return Want(tuple(specs), tuple(blocks), self._may_leave, visible_devices(self._devices))

    def synchronize(self, deadline: float) -> None:
        assert self._model is not None
        for device in self._devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))
        self._model.settle()

    def touched(self) -> None:
        assert self._model is not None
        self._model.touched()

    def receive(self, round_: SinkRound) -> SinkResult:
        source, begin = round_.source, round_.begin
        self._prepare(source)
        kind = checked_kind(self, begin)
        if self._has_doubles and not begin.should_verify:
            raise PlanError(
                "tensors that are one here are several at the publisher, and nothing is verified, "
                "so they may differ; publish with should_verify=True, or tie them there too"
            )
        digests = [
            Digest(nbytes, kind) if nbytes and begin.should_verify else None
            for nbytes in self._added
        ]
        started, spent = perf_counter(), 0.0
        round_.touch()
        last = self._last_digests(source) if begin.should_verify else None
        self._mapped.start()
        if last is not None and not self._buckets and self._mapped.is_ordered:
            last.start()  # the device digests as soon as it has copied
        spent += self._mapped.run(digests, round_.deadline, round_.on_progress)
        missing = set(self._buckets)
        while missing:
            number = round_.next_bucket()
            if number not in missing:
                raise TransportError(f"bucket {number} was not announced, or came twice")
            missing.remove(number)
            spent += self._buckets[number].run(digests, round_.deadline, round_.on_progress)
            round_.bucket_emptied(number)
        copied = perf_counter()
        if not begin.should_verify:
            return SinkResult((), copied - started, 0.0)
        if self._devices:
            round_.copied()
        found = [0 if each is None else each.value() for each in digests]
        for number, value in self._small.digests(kind):
            found[number] = value
        if last is not None:
            values = last.digests(kind, round_.deadline)
            for number, value in zip(self._last, values, strict=True):
                found[number] = value
        verified = perf_counter() - copied + spent
        return SinkResult(tuple(found), copied - started - spent, verified)

    def _last_digests(self, source: RemoteSource) -> PreparedDigests | None:
        """Return the digests that are computed after everything is copied."""
        if self._digests is None and self._last:
            self._digests = PreparedDigests([self._target(source.copies[n]) for n in self._last])
        return self._digests

    def _buffer(self, sink: int) -> Buffer:
        buffer = self._blocks[sink].buffer
        assert buffer is not None
        return buffer

    def _target(self, copy: Copy) -> Buffer:
        return self._buffer(copy.sink).block(Box(copy.sink_offset, copy.shape))

    def _prepare(self, source: RemoteSource) -> None:
        """Prepare the copies, unless they are those of the last round."""
        key = source, source.generation
        if self._prepared is not None and self._prepared == key:
            return
        buffers = [self._buffer(number) for number in range(len(self._blocks))]
        source.check_targets([(Box.whole(each.shape), each.item_bytes) for each in buffers])
        mapped = [
            copy for block in source.mapped for copy in source.mapped_copies(block, self._buffer)
        ]
        by_bucket = {
            number: list(source.bucket_copies(number, self._buffer))
            for number in source.bucket_numbers
        }
        self._check_whole(source, [*mapped, *chain.from_iterable(by_bucket.values())])
        self._forget()
        self._mapped = PreparedCopies(mapped, self._copiers)
        self._buckets = {
            n: PreparedCopies(each, self._copiers, is_bucket=True) for n, each in by_bucket.items()
        }
        targets = [self._target(copy) for copy in source.copies]
        times = Counter(map(id, self._blocks))
        doubles = [times[id(self._blocks[copy.sink])] > 1 for copy in source.copies]
        self._has_doubles = any(doubles)
        # Memory that another copy writes too is digested after both.
        is_last = [
            each.device is not None or (is_double and not is_small(each))
            for each, is_double in zip(targets, doubles, strict=True)
        ]
        self._last = [n for n, each in enumerate(is_last) if each]
        self._small = SmallDigests(
            {n: each for n, each in enumerate(targets) if not is_last[n] and is_small(each)}
        )
        self._added = [
            0 if is_last[n] or is_small(each) else each.nbytes for n, each in enumerate(targets)
        ]
        self._prepared = key

    def _forget(self) -> None:
        for each in (self._mapped, *self._buckets.values()):
            each.close()
        self._mapped, self._buckets, self._digests = PreparedCopies((), self._copiers), {}, None

    def _check_whole(self, source: RemoteSource, copies: Sequence[BufferCopy]) -> None:
        """Raise unless every wanted byte comes exactly as often as it is wanted."""
        found: list[list[tuple[int, int]]] = [[] for _ in source.copies]
        for each in copies:
            found[each.region].append((each.offset, each.sink.nbytes))
        filled = [0] * len(self._blocks)
        for copy, pieces in zip(source.copies, found, strict=True):
            at = 0
            for offset, nbytes in sorted(pieces):  # each is contiguous in the copy's own bytes
                if offset != at:
                    raise TransportError(f"byte {min(at, offset)} of a copy comes twice, or never")
                at += nbytes
            if at != source.nbytes_of(copy):
                raise TransportError(
                    f"only {at} of the {source.nbytes_of(copy)} bytes of a copy come"
                )
            filled[copy.sink] += at
        for number, nbytes in enumerate(filled):
            if nbytes != self._buffer(number).nbytes:
                raise TransportError(
                    f"{nbytes} bytes come for a wanted block of {self._buffer(number).nbytes}"
                )

    def finish(self, values: Mapping[str, Leaf]) -> None:
        assert self._model is not None
        self._model.finish(Manifest({}, values=values))
        before = self._identity
        if values and before is not None and not before.is_same():
            after = Identity(self._thing)  # setting a value changes the dict, but not its tensors
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
    """Yield the names to request: for names that are one tensor here, all that differ there.

    If their bytes differ, the digests of the memory that they share cannot all be right.
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
