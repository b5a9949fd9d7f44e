"""Memory sink: the parameters of a model, written in place.

Copies and digests are prepared once, and again only when the model's tensors or the
publisher's memory have changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from time import monotonic, perf_counter

from flyweight.adapters.identity import Identity
from flyweight.adapters.model import Model, adapt
from flyweight.cuda import driver
from flyweight.digest import Digest
from flyweight.errors import PlanError, SpecError, TransportError
from flyweight.live.copies import BufferCopy, Copiers, PreparedCopies, PreparedDigests, is_small
from flyweight.live.lanes import HOST, visible_devices
from flyweight.live.messages import Block, Tensor, Want
from flyweight.live.remote_source import RemoteSource
from flyweight.live.replica_round import ReplicaRound, SinkResult
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
        self._buffers: list[Buffer] = []
        """The memory of each wanted block."""
        self._identity: Identity | None = None
        self._prepared: _PreparedRound | None = None
        self._devices: list[int] = []
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
        buffers: list[Buffer] = []
        for name in _wanted_names(model.manifest, tensors, tied):
            for block in model.blocks(name):
                buffer, box = block.buffer, block.box
                if buffer is None:
                    raise PlanError(f"{name!r} is on a device that cannot be written in place")
                place = HOST if buffer.device is None else driver.uuid(buffer.device)
                buffers.append(buffer)
                blocks.append(Block(len(specs), box.offset, box.shape, place))
            specs.append(Tensor.of(name, model.manifest.spec(name)))
        self._forget()
        self._model, self._identity, self._buffers = model, found, buffers
        self._devices = sorted({each.device for each in buffers if each.device is not None})
        visible = visible_devices() if self._devices else ()
        return Want(tuple(specs), tuple(blocks), self._may_leave, visible)

    def synchronize(self, deadline: float) -> None:
        assert self._model is not None
        for device in self._devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))
        self._model.settle()

    def touched(self) -> None:
        assert self._model is not None
        self._model.touched()

    def receive(self, round_: ReplicaRound) -> SinkResult:
        begin, prepared = round_.begin, self._prepare(round_.source)
        if prepared.has_doubles and not begin.should_verify:
            raise PlanError(
                "tensors that are one here are several at the publisher, and nothing is verified, "
                "so they may differ; publish with should_verify=True, or tie them there too"
            )
        kind = begin.digest_kind
        digests = [
            Digest(nbytes, kind) if nbytes and begin.should_verify else None
            for nbytes in prepared.added
        ]
        started = perf_counter()
        round_.touch()
        last = prepared.last_digests if begin.should_verify else None
        prepared.mapped.start()
        if last is not None and not prepared.buckets and prepared.mapped.is_ordered:
            last.start()  # the device digests as soon as it has copied
        spent = prepared.mapped.run(digests, round_.deadline, round_.on_progress)
        for _ in prepared.buckets:
            number = round_.next_bucket()
            spent += prepared.buckets[number].run(digests, round_.deadline, round_.on_progress)
            round_.bucket_emptied(number)
        copied = perf_counter()
        if last is None:
            return SinkResult((), copied - started, 0.0)
        if self._devices:
            round_.copied()
        found = [0 if each is None else each.value() for each in digests]
        values = last.digests(kind, round_.deadline)
        for number, value in zip(prepared.last, values, strict=True):
            found[number] = value
        verified = perf_counter() - copied + spent
        return SinkResult(tuple(found), copied - started - spent, verified)

    def _prepare(self, source: RemoteSource) -> _PreparedRound:
        """Prepare the copies, unless they are those of the last round."""
        last = self._prepared
        if last is None or (last.source, last.generation) != (source, source.generation):
            self._forget()
            last = self._prepared = _PreparedRound(source, self._buffers, self._copiers)
        return last

    def _forget(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
        self._prepared = None

    def finish(self, values: Mapping[str, Leaf]) -> None:
        assert self._model is not None
        self._model.finish(Manifest({}, values=values))
        before = self._identity
        if values and before is not None and not before.is_same():
            after = Identity(self._thing)  # setting a value changes the dict, but not its tensors
            self._identity = after if after.has_tensors_of(before) else before

    def close(self) -> None:
        self._forget()
        self._copiers.close()


class _PreparedRound:
    """The copies and digests of a round, for the same memory on both sides."""

    def __init__(self, source: RemoteSource, buffers: Sequence[Buffer], copiers: Copiers) -> None:
        self.source, self.generation = source, source.generation
        source.check_targets([(Box.whole(each.shape), each.item_bytes) for each in buffers])
        sink = buffers.__getitem__
        mapped = [copy for block in source.mapped for copy in source.mapped_copies(block, sink)]
        by_bucket = {n: list(source.bucket_copies(n, sink)) for n in source.bucket_numbers}
        _check_whole(source, buffers, [*mapped, *chain.from_iterable(by_bucket.values())])
        self.mapped = PreparedCopies(mapped, copiers)
        self.buckets = {
            n: PreparedCopies(each, copiers, is_bucket=True) for n, each in by_bucket.items()
        }
        self._targets = [
            sink(copy.sink).block(Box(copy.sink_offset, copy.shape)) for copy in source.copies
        ]
        times = Counter(map(id, buffers))
        doubles = [times[id(sink(copy.sink))] > 1 for copy in source.copies]
        self.has_doubles = any(doubles)
        """True if two tensors of the publisher go to the same memory: they must be equal."""
        # Memory that another copy writes too is digested after both.
        self.last = [
            n
            for n, (each, is_double) in enumerate(zip(self._targets, doubles, strict=True))
            if each.device is not None or is_double or is_small(each)
        ]
        """The copies that are digested after everything is copied."""
        self.added = [each.nbytes for each in self._targets]
        """The bytes of each copy that is digested chunk by chunk as it arrives, else 0."""
        for n in self.last:
            self.added[n] = 0

    @cached_property
    def last_digests(self) -> PreparedDigests:
        return PreparedDigests([self._targets[n] for n in self.last])

    def close(self) -> None:
        for each in (self.mapped, *self.buckets.values()):
            each.close()


def _check_whole(
    source: RemoteSource, buffers: Sequence[Buffer], copies: Sequence[BufferCopy]
) -> None:
    """Raise unless every wanted byte comes exactly as often as it is wanted."""
    found: list[list[tuple[int, int]]] = [[] for _ in source.copies]
    for each in copies:
        found[each.region].append((each.offset, each.sink.nbytes))
    filled = [0] * len(buffers)
    for copy, pieces in zip(source.copies, found, strict=True):
        at = 0
        for offset, nbytes in sorted(pieces):  # each is contiguous in the copy's own bytes
            if offset != at:
                raise TransportError(f"byte {min(at, offset)} of a copy comes twice, or never")
            at += nbytes
        if at != source.nbytes_of(copy):
            raise TransportError(f"only {at} of the {source.nbytes_of(copy)} bytes of a copy come")
        filled[copy.sink] += at
    for nbytes, buffer in zip(filled, buffers, strict=True):
        if nbytes != buffer.nbytes:
            raise TransportError(f"{nbytes} bytes come for a wanted block of {buffer.nbytes}")


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
