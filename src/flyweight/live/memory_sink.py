"""Memory sink: the parameters of a model, written in place.

Copies and digests are prepared once, and again only when the model's tensors or the
publisher's memory have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from time import monotonic, perf_counter

import numpy as np

from flyweight.adapters.identity import Identity
from flyweight.adapters.model import Model, adapt
from flyweight.copies import BufferCopies, Copiers, PreparedCopies, PreparedDigests
from flyweight.cuda import driver
from flyweight.digest import SMALL_BYTES, Digest, DigestKind, short_digests
from flyweight.errors import PlanError, SpecError
from flyweight.live.lanes import HOST, visible_devices
from flyweight.live.messages import Want
from flyweight.live.remote_source import Arrivals, RemoteSource
from flyweight.live.replica_round import ReplicaRound, SinkResult
from flyweight.memory import collector_paused
from flyweight.memory_table import HOST as HOST_MEMORY
from flyweight.memory_table import NOWHERE, BufferTable
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.tables import Boxes, Tensors, packed
from flyweight.spec.manifest import Leaf, Manifest, TensorSpec
from flyweight.spec.model_layout import ModelLayout


class MemorySink:
    """Writes the parameters of a model in place, box by box."""

    verified, takes_all = "live", False

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
        self._memory = BufferTable.of([])
        """The memory of each wanted block."""
        self._identity: Identity | None = None
        self._prepared: _PreparedRound | None = None
        self._devices: list[int] = []
        self._is_touched = False
        """True once the framework knows that the tensors were written in this round."""

    @property
    def has_devices(self) -> bool:
        return bool(self._devices)

    def is_current(self) -> bool:
        return self._identity is not None and self._identity.is_same()

    def is_in_place(self) -> bool:
        return self._identity is not None and self._identity.is_in_place()

    def check(self) -> None:
        if self._layout is None:
            with collector_paused():
                adapt(self._thing).check_writable()

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        with collector_paused():
            return self._want(tensors, tied)

    def _want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        found = Identity(self._thing)
        if self._layout is None:
            model = adapt(self._thing)
        else:
            layout, rank = self._layout, self._rank
            assert rank is not None
            whole = {**tensors, **{name: tensors[tied[name]] for name in tied}}
            model = adapt(self._thing, lambda: layout.locals(whole, rank))
        model.check_writable()
        names = list(_wanted_names(model.manifest, tensors, tied))
        boxes, memory = model.tables(names)
        if len(lost := np.flatnonzero(memory.device == NOWHERE)):
            name = names[boxes.tensor[lost[0]]]
            raise PlanError(f"{name!r} is on a device that cannot be written in place")
        self._forget()
        self._model, self._identity, self._memory = model, found, memory
        places, place = np.unique(self._memory.device, return_inverse=True)
        self._devices = [int(device) for device in places if device != HOST_MEMORY]
        specs = {name: model.manifest.spec(name) for name in names}
        return Want(
            Tensors.of(specs),
            None if boxes.is_same(BoxTable.whole(specs.values())) else Boxes.of(boxes),
            tuple(HOST if each == HOST_MEMORY else driver.uuid(int(each)) for each in places),
            packed(place),
            self._may_leave,
            visible_devices() if self._devices else (),
        )

    def synchronize(self, deadline: float) -> None:
        assert self._model is not None
        for device in self._devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))
        self._model.settle()

    def touched(self) -> None:
        assert self._model is not None
        if not self._is_touched:
            self._model.touched()
            self._is_touched = True

    def stage(self, round_: ReplicaRound) -> None:
        """Do nothing: the weights are written in place, while the engine is paused."""

    def unstage(self) -> None:
        """Do nothing: nothing is staged."""

    def receive(self, round_: ReplicaRound) -> SinkResult:
        begin, prepared = round_.begin, self._prepare(round_.source)
        if prepared.has_doubles and not begin.should_verify:
            raise PlanError(
                "tensors that are one here are several at the publisher, and nothing is verified, "
                "so they may differ; publish with should_verify=True, or tie them there too"
            )
        digests = prepared.digests(begin.digest_kind) if begin.should_verify else None
        hashes, running = (None, None) if digests is None else (digests.hashes, digests.running())
        started = perf_counter()
        is_early = bool(prepared.buckets) and not len(round_.source.mapped.copy)
        if not is_early:
            round_.touch()
        prepared.mapped.start()
        self._is_touched = False
        if digests is not None and not prepared.buckets and prepared.mapped.is_ordered:
            digests.last.start()  # the device digests as soon as it has copied
        if self._devices and not prepared.buckets:
            self.touched()  # while the devices work
        run = partial(
            PreparedCopies.run, hashes=hashes, running=running, on_progress=round_.on_progress
        )
        spent = run(prepared.mapped, round_.deadline)
        for _ in prepared.buckets:
            number = round_.next_bucket()
            if is_early:  # until here, a publisher that cannot be read costs no version
                is_early = False
                round_.touch()
            spent += run(prepared.buckets[number], round_.deadline)
            round_.bucket_emptied(number)
        copied = perf_counter()
        if digests is None:
            return SinkResult(b"", copied - started, 0.0)
        if self._devices:
            round_.copied()
        found = digests.values(running, round_.deadline)
        verified = perf_counter() - copied + spent
        return SinkResult(found, copied - started - spent, verified)

    def _prepare(self, source: RemoteSource) -> _PreparedRound:
        """Prepare the copies, unless they are those of the last round."""
        last = self._prepared
        if last is None or (last.source, last.generation) != (source, source.generation):
            self._forget()
            with collector_paused():
                last = self._prepared = _PreparedRound(source, self._memory, self._copiers)
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

    def __init__(self, source: RemoteSource, memory: BufferTable, copiers: Copiers) -> None:
        self.source, self.generation, self._memory = source, source.generation, memory
        self.mapped = PreparedCopies(self._copies(source.mapped), copiers, source.copy_bytes)
        self.buckets = {
            number: PreparedCopies(
                self._copies(arrivals), copiers, source.copy_bytes, is_bucket=True
            )
            for number, arrivals in source.buckets.items()
        }
        copies = source.copies
        self.targets = memory.regions(copies.sink, copies.sink_offset, copies.shape)
        low, _ = memory.spans
        order = np.lexsort((low, memory.device))
        is_next = (np.diff(low[order]) == 0) & (np.diff(memory.device[order]) == 0)
        is_shared = np.zeros(len(memory), bool)
        is_shared[order[1:]] |= is_next
        is_shared[order[:-1]] |= is_next
        self.is_double = is_shared[copies.sink] & (source.copy_bytes > 0)
        """Which copies go to memory that another tensor of the publisher goes to as well."""
        self.has_doubles = bool(self.is_double.any())
        self._digests: dict[DigestKind, _RoundDigests] = {}

    def _copies(self, arrivals: Arrivals) -> BufferCopies:
        copies = self.source.copies
        offset = copies.sink_offset[arrivals.copy] + arrivals.offset
        sink = self._memory.regions(copies.sink[arrivals.copy], offset, arrivals.shape)
        return BufferCopies(
            sink, arrivals.memory, arrivals.copy, self.source.byte_offsets(arrivals)
        )

    def digests(self, kind: DigestKind) -> _RoundDigests:
        if kind not in self._digests:
            self._digests[kind] = _RoundDigests(self, kind)
        return self._digests[kind]

    def close(self) -> None:
        for each in (self.mapped, *self.buckets.values()):
            each.close()


class _RoundDigests:
    """How the digest of each copy is computed: as its bytes arrive, or after everything is copied.

    Memory that two copies write is digested after both; they must be equal.
    """

    def __init__(self, prepared: _PreparedRound, kind: DigestKind) -> None:
        targets, self._kind = prepared.targets, kind
        self._nbytes = targets.nbytes
        at_once = np.zeros(len(targets), bool)
        if kind == "xxh3":
            for each in (prepared.mapped, *prepared.buckets.values()):
                at_once[each.small_regions] = True
        at_once &= ~prepared.is_double
        is_host = (targets.device == HOST_MEMORY) & ~prepared.is_double
        self._at_once = np.flatnonzero(at_once)
        self._running: list[int] = np.flatnonzero(is_host & (self._nbytes > SMALL_BYTES)).tolist()
        is_last = ~at_once
        is_last[self._running] = False
        self._last_rows = np.flatnonzero(is_last)
        self.hashes = np.zeros(len(targets), np.uint64) if kind == "xxh3" else None
        """Takes the XXH3 of small copies as they arrive."""
        self.last = PreparedDigests(targets.take(self._last_rows))
        """The digests that are computed after everything is copied."""

    def running(self) -> dict[int, Digest]:
        """Return new digests, to which chunks of large copies are added as they arrive."""
        return {row: Digest(int(self._nbytes[row]), self._kind) for row in self._running}

    def values(self, running: Mapping[int, Digest] | None, deadline: float) -> bytes:
        """Return the digest of each copy, as they are sent."""
        found = np.zeros(len(self._nbytes), np.uint64)
        if self.hashes is not None:
            rows = self._at_once
            found[rows] = short_digests(self._nbytes[rows], self.hashes[rows])
        for row, digest in (running or {}).items():
            found[row] = digest.value()
        if len(self._last_rows):
            found[self._last_rows] = self.last.digests(self._kind, deadline)
        return found.tobytes()


def _wanted_names(
    manifest: Manifest, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]
) -> Iterator[str]:
    """Yield the names to request: for names that are one tensor here, all that differ there.

    If their bytes differ, the digests of the memory that they share cannot all be right.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.tied.items():
        aliases.setdefault(name, [name]).append(alias)
    for only in manifest.tensors:
        if only not in aliases:
            yield only
            continue
        names = aliases[only]
        known = [name for name in names if name in tensors or name in tied]
        seen = set()
        for name in known or names[:1]:
            if tied.get(name, name) not in seen:
                seen.add(tied.get(name, name))
                yield name
