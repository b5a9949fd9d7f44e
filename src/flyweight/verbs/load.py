"""Load: from files into a model that is there already, in place, checked on the way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np

from flyweight.adapters.model import Model, adapt
from flyweight.errors import (
    DTypeMismatch,
    PlanError,
    ShapeMismatch,
    SpecError,
    VersionError,
    listed,
)
from flyweight.events import emit
from flyweight.formats import legacy, pdparams
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored
from flyweight.memory import MEMORY_BYTES, check_memory_bytes, collector_paused
from flyweight.plan.reshard import Shard, reshard
from flyweight.spec.box import Box
from flyweight.spec.dtype import DType
from flyweight.spec.manifest import Leaf, TensorSpec
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.save import default_threads


@dataclass(frozen=True)
class LoadReport:
    """What a load did."""

    place: str
    format: str
    version: int | None
    num_tensors: int
    nbytes: int
    read_bytes: int
    checked_bytes: int
    """Bytes whose checksum was compared; 0 for formats that keep none."""
    seconds: float
    unused: list[str] = field(default_factory=list)
    """Tensors of the source that the target has no use for."""
    kept: list[str] = field(default_factory=list)
    """Tensors of the target that the source lacks, left as they were."""
    partial_over: int | None = None
    """The version that the caller vouched for in what was kept."""
    values: Mapping[str, Leaf] = field(default_factory=dict)

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


def load(
    source: PathLike | Stored,
    *,
    into: object,
    version: int | None = None,
    rank: int | None = None,
    legacy_id: int | str | None = None,
    shared_directory: PathLike = legacy.SHARED_DIRECTORY,
    should_verify: bool = True,
    extra: Literal["refuse", "report"] = "refuse",
    partial_over: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    num_threads: int | None = None,
    unbuffered: bool = True,
) -> LoadReport:
    """Fill the model's own tensors from weights at rest; nothing of it is replaced.

    Names, dtypes and shapes are matched before the first byte is written. `extra` says what
    becomes of tensors the model lacks; with `partial_over` the caller vouches that tensors the
    source lacks already hold that version. Within `memory_bytes` of extra memory, whatever the
    model's size. `unbuffered=False` leaves what is read in the page cache, for others here.
    """
    started = perf_counter()
    check_memory_bytes(memory_bytes)
    if extra not in ("refuse", "report"):
        raise SpecError(f"extra is {extra!r}, not 'refuse' or 'report'")
    with ExitStack() as stack:
        with collector_paused():
            sink = adapt(into)
            sink.check_writable()
            if isinstance(source, Stored):
                stored = source
                if version is not None and stored.manifest.version != version:
                    raise VersionError(
                        f"{stored.store.place!r} holds version {stored.manifest.version}, "
                        f"not {version}"
                    )
            else:
                stored = stack.enter_context(
                    open_source(
                        source,
                        version=version,
                        rank=rank,
                        legacy_id=legacy_id,
                        shared_directory=shared_directory,
                        unbuffered=unbuffered,
                    )
                )
            matches = match(stored, sink)
            _check_names(stored, matches, extra=extra, partial_over=partial_over)
            reader = _reader(stored, sink, matches, should_verify=should_verify)
        sink.settle()  # what this thread queued on a GPU still reads the old weights
        try:
            reader.run(
                num_threads=default_threads() if num_threads is None else num_threads,
                memory_bytes=memory_bytes,
                verb="load",
            )
        finally:
            sink.touched()
        sink.finish(stored.manifest)
    report = LoadReport(
        stored.store.place,
        stored.format,
        stored.manifest.version,
        len(matches.pairs),
        sum(sink.manifest.tensors[name].nbytes for name in matches.pairs),
        reader.read_bytes,
        reader.checked_bytes,
        perf_counter() - started,
        matches.unused,
        matches.missing,
        partial_over,
        stored.manifest.values,
    )
    emit(
        "load.done",
        place=report.place,
        version=report.version,
        nbytes=report.nbytes,
        seconds=report.seconds,
    )
    return report


def _check_names(
    stored: Stored,
    matches: Matches,
    *,
    extra: Literal["refuse", "report"],
    partial_over: int | None,
) -> None:
    if matches.missing and partial_over is None:
        raise PlanError(
            f"target wants {len(matches.missing)} tensors that {stored.store.place!r} lacks: "
            f"{listed(matches.missing)}"
        )
    if matches.unused and extra == "refuse":
        raise PlanError(
            f"{stored.store.place!r} has {len(matches.unused)} tensors that the target lacks: "
            f"{listed(matches.unused)}; load with extra='report' to leave them out"
        )


def _reader(stored: Stored, sink: Model, matches: Matches, *, should_verify: bool) -> Reader:
    """Return a reader that will fill every matched tensor of the sink."""
    source_shards, sink_shards = {}, {}
    for name, source_name in matches.pairs.items():
        source_shards[name] = stored.shards(source_name)
        sink_shards[name] = [Shard(0, Box.whole(sink.manifest.tensors[name].shape))]
    targets = {name: _target(sink, name) for name in matches.pairs}
    reader = Reader(stored.store, stored.manifest, should_verify=should_verify)
    for copy in reshard(source_shards, sink_shards):
        reader.add(stored.manifest.extents[copy.source.rank], copy.box, targets[copy.name])
    return reader


def _target(sink: Model, name: str) -> Target:
    spec = sink.manifest.tensors[name]
    items = spec.stored(Box.whole(spec.shape))
    buffer = sink.host(name)
    if buffer is None:
        return Target(
            items,
            lambda box, data: sink.write(name, box, data),
            sink.staging,
            may_map=False,
            settle=sink.settle,
        )
    return Target(items, buffer.items(), sink.staging)


@dataclass(frozen=True)
class Matches:
    """Which tensor of the source fills which of the target, and who is left over."""

    pairs: Mapping[str, str]
    missing: list[str]
    unused: list[str]


def match(stored: Stored, sink: Model) -> Matches:
    """Pair the names, and raise if a pair differs in dtype or shape, all of a kind at once."""
    have, want = stored.manifest, sink.manifest
    known = set(have.names)
    aliases: dict[str, list[str]] = {name: [name] for name in want.tensors}
    for alias, name in want.tied.items():
        aliases[name].append(alias)
    pairs: dict[str, str] = {}
    missing: list[str] = []
    used: dict[str, TensorSpec] = {}
    for name, names in aliases.items():
        found = [each for each in names if each in known]
        used.update(dict.fromkeys(found, want.tensors[name]))
        if found:
            pairs[name] = found[0]
        else:
            missing.append(name)
    missing += [name for name in want.values if name not in have.values]
    _check_specs(stored, used)
    for names in aliases.values():
        _check_tied(stored, [each for each in names if each in known])
    return Matches(pairs, missing, sorted(known - used.keys()))


def _check_specs(stored: Stored, wanted: Mapping[str, TensorSpec]) -> None:
    """Raise if a tensor of the source is not what its name is in the target."""
    have = {name: stored.manifest.spec(name) for name in wanted}
    place = stored.store.place
    wrong = [n for n, spec in wanted.items() if not _is_same(stored, n, have[n].dtype, spec.dtype)]
    if wrong:
        name = wrong[0]
        raise DTypeMismatch(
            f"{name!r} is {have[name].dtype} in {place!r} and {wanted[name].dtype} in the "
            f"target; {len(wrong)} tensors differ in dtype: {listed(wrong)}"
        )
    wrong = [name for name, spec in wanted.items() if have[name].shape != spec.shape]
    if wrong:
        name = wrong[0]
        raise ShapeMismatch(
            f"{name!r} is {have[name].shape} in {place!r} and {wanted[name].shape} in the "
            f"target; {len(wrong)} tensors differ in shape: {listed(wrong)}"
        )


def _is_same(stored: Stored, name: str, have: DType, want: DType) -> bool:
    may_mean = pdparams.RAW_MEANINGS.get(have.name, ()) if name in stored.raw_names else ()
    return have == want or want.name in may_mean


def _check_tied(stored: Stored, names: list[str]) -> None:
    """Raise if names that share memory in the target hold different bytes in the source."""
    tied = stored.manifest.tied
    first, *others = dict.fromkeys(tied.get(name, name) for name in names) or [""]
    for other in others:
        if not same_bytes(stored, first, stored, other):
            raise PlanError(
                f"{first!r} and {other!r} are one tensor in the target and differ in "
                f"{stored.store.place!r}"
            )


def same_bytes(a: Stored, a_name: str, b: Stored, b_name: str) -> bool:
    """True if two tensors hold the same bytes; by digest where both have one for the whole."""
    a_digest, b_digest = whole_digest(a, a_name), whole_digest(b, b_name)
    if a_digest is not None and b_digest is not None:
        return a_digest == b_digest
    spec = a.manifest.spec(a_name)
    if spec.shape != b.manifest.spec(b_name).shape:
        return False
    for items in spec.chunks(Box.whole(spec.shape), a.manifest.chunk_bytes):
        box = spec.elements(items)
        if not np.array_equal(a.read(a_name, box), b.read(b_name, box)):
            return False
    return True


def whole_digest(stored: Stored, name: str) -> int | None:
    """Return the digest of a tensor that rests in one piece, if the format keeps digests."""
    shards = stored.shards(name)
    return stored.manifest.extents[shards[0].rank].digest if len(shards) == 1 else None
