"""Load: from files into a model that is there already, in place, checked on the way.

`match.py` pairs the names. Every rank plans its own reads, and no tensor of any rank is
touched before all have planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging import getLogger
from time import perf_counter
from typing import Literal

from flyweight.adapters.model import adapt
from flyweight.checks import check_memory_bytes, check_version
from flyweight.errors import PlanError, SpecError, TransportError, VersionError, listed
from flyweight.events import emit
from flyweight.formats import legacy
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored
from flyweight.memory import MEMORY_BYTES, collector_paused
from flyweight.plans.reshard import reshard
from flyweight.ports import Block, Sink
from flyweight.ranks.group import TIMEOUT_SECONDS, Group
from flyweight.ranks.rendezvous import location
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Json, Leaf
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.match import Matches, check_names, match
from flyweight.verbs.rank_messages import gather_ranks
from flyweight.worker_threads import default_threads

_log = getLogger("flyweight.verbs")
Extra = Literal["refuse", "report"]
_SHARED_TIMES = 1.25
"""From how many times its bytes on a machine's ranks share their reads of a checkpoint."""


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
    """Tensors of the source that the target has no use for; of several ranks, this rank's."""
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
    process_group: object = None,
    coordinator_rank: int = 0,
    layout: ModelLayout | None = None,
    rank: int | None = None,
    legacy_id: int | str | None = None,
    shared_directory: PathLike = legacy.SHARED_DIRECTORY,
    should_verify: bool = True,
    extra: Extra = "refuse",
    partial_over: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    num_threads: int | None = None,
    unbuffered: bool = True,
) -> LoadReport:
    """Fill the model's own tensors from weights at rest; nothing of it is replaced.

    Names, dtypes and shapes are matched before the first byte is written. `extra` says what
    becomes of tensors the model lacks; with `partial_over` the caller vouches that tensors the
    source lacks already hold that version. Within `memory_bytes` of extra memory, whatever the
    model's size. `unbuffered=False` leaves what is read in the page cache, for others here.

    With a process group all its ranks make the call, each fills its own tensors with the same
    version, and no tensor of any rank is touched unless all can be filled. A `layout` says what
    this rank's tensors hold of those at rest; without a group, `rank` says which rank this is.
    """
    options = _Options(
        version=version,
        layout=layout,
        rank=rank,
        legacy_id=legacy_id,
        shared_directory=shared_directory,
        should_verify=should_verify,
        extra=extra,
        partial_over=partial_over,
        memory_bytes=memory_bytes,
        num_threads=num_threads,
        unbuffered=unbuffered,
    )
    with gather_ranks(process_group, coordinator_rank, timeout_seconds, may_default=False) as group:
        return _load(source, into, options, group)


def load_state_dict(
    state_dict: Mapping[str, object],
    path: PathLike,
    process_group: object = None,
    coordinator_rank: int = 0,
    *,
    version: int | None = None,
    extra: Extra = "report",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LoadReport:
    """Fill a state dict's own tensors and values, whatever layout they have on this rank.

    A checkpoint may have more tensors: `unused` of the report names those that this rank lacks,
    and the coordinator warns of those that every rank lacks. `extra="refuse"` raises for them.
    Without a process group, the one that was initialised; alone if none was. Every rank must make
    the call. Otherwise as `load`.
    """
    options = _Options(version=version, extra=extra)
    with gather_ranks(process_group, coordinator_rank, timeout_seconds, may_default=True) as group:
        return _load(path, state_dict, options, group)


@dataclass(frozen=True, kw_only=True)
class _Options:
    version: int | None
    layout: ModelLayout | None = None
    rank: int | None = None
    legacy_id: int | str | None = None
    shared_directory: PathLike = legacy.SHARED_DIRECTORY
    should_verify: bool = True
    extra: Extra
    partial_over: int | None = None
    memory_bytes: int = MEMORY_BYTES
    num_threads: int | None = None
    unbuffered: bool = True


def _load(source: PathLike | Stored, into: object, options: _Options, group: Group) -> LoadReport:
    started = perf_counter()
    check_memory_bytes(options.memory_bytes)
    if options.extra not in ("refuse", "report"):
        raise SpecError(f"extra is {options.extra!r}, not 'refuse' or 'report'")
    if options.rank is not None and options.layout is None and options.legacy_id is None:
        raise SpecError(
            f"rank is {options.rank}, and neither a layout nor a legacy_id says what of"
        )
    with ExitStack() as stack:
        with group.working():
            stored = _opened(source, options, group, stack)
            with collector_paused():
                sink = _adapted(into, stored, options, group)
                sink.check_writable()
                matches = match(stored, sink)
            left = check_names(
                stored,
                matches,
                group,
                may_miss=options.partial_over is not None,
                # A layout speaks of every tensor; those of other ranks are theirs.
                may_leave=options.extra == "report" or options.layout is not None,
            )
            with collector_paused():
                reader = _reader(stored, sink, matches, should_verify=options.should_verify)
            starting_at = _sharing(stored, reader, group)
        sink.settle()  # what this thread queued on a GPU still reads the old weights
        try:
            reader.run(
                num_threads=default_threads()
                if options.num_threads is None
                else options.num_threads,
                memory_bytes=options.memory_bytes,
                verb="load",
                tick=group.tick,
                starting_at=starting_at,
            )
        finally:
            sink.touched()
        try:
            _agree(group, "loaded")
        except TransportError as error:
            error.note("this rank was filled, another was not: the model is not whole")
            raise
        sink.finish(stored.manifest)
        if left:
            _tell_unused(stored.store.place, left)
    report = LoadReport(
        stored.store.place,
        stored.format,
        stored.manifest.version,
        len(matches.pairs),
        sum(
            sink.manifest.tensors[name].box_bytes(block.box)
            for name in matches.pairs
            for block in sink.blocks(name)
        ),
        reader.read_bytes,
        reader.checked_bytes,
        perf_counter() - started,
        matches.unused,
        matches.missing,
        options.partial_over,
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


def _tell_unused(place: str, names: list[str]) -> None:
    text = listed(names)
    emit("load.unused", place=place, num_tensors=len(names), names=text)
    _log.warning("%r has %d tensors that the target lacks: %s", place, len(names), text)


def _agree(group: Group, step: str) -> None:
    """Return once every rank has come this far."""
    group.gather(step, None)
    group.broadcast(step, None)


def _sharing(stored: Stored, reader: Reader, group: Group) -> float:
    """Return where to start reading, once every rank has planned.

    Ranks of one machine that want much the same bytes leave them in the page cache for each other,
    and start at different places, so that each byte comes off the disk once.
    """
    message: Json = {"where": location(), "bytes": reader.wanted_bytes}
    told = group.gather("planned", message)
    wanted: Counter[str] = Counter()
    neighbours: dict[str, list[int]] = {}
    for rank, each in enumerate(told):
        match each:
            case {"where": str() as place, "bytes": int() as nbytes}:
                wanted[place] += nbytes
                neighbours.setdefault(place, []).append(rank)
    starts: list[Json] = [None] * group.num_ranks
    for place, ranks in neighbours.items():
        if len(ranks) > 1 and wanted[place] > _SHARED_TIMES * stored.manifest.nbytes:
            for index, rank in enumerate(ranks):
                starts[rank] = index / len(ranks)
    start = group.scatter("go", starts)
    if not isinstance(start, (int, float)):
        return 0.0
    stored.store.share_reads()
    return float(start)


def _opened(source: PathLike | Stored, options: _Options, group: Group, stack: ExitStack) -> Stored:
    """Return the opened source, of the version that the coordinator found."""
    version = None if options.version is None else check_version(options.version)
    for rank, wanted in enumerate(group.gather("version", version)):
        if wanted != version:
            raise VersionError(
                f"rank {rank} loads version {wanted}, rank {group.rank} version {version}"
            )
    if group.num_ranks == 1:
        return _open(source, version, options, stack)
    if group.is_coordinator:
        stored = _open(source, version, options, stack)
        group.broadcast("open", stored.manifest.version)
    else:
        found = group.broadcast("open", None)
        stored = _open(source, found if isinstance(found, int) else version, options, stack)
    if options.legacy_id is not None:
        return stored  # every rank has files of its own
    # Ranks may see the files by different paths; what they see must be the same.
    seen = [stored.store.place, f"{stored.fingerprint():016x}"]
    for rank, each in enumerate(group.gather("opened", list(seen))):
        match each:
            case [str(), found] if found == seen[1]:
                continue
        raise PlanError(
            f"rank {rank} opened {str(each)[:200]}, rank {group.rank} {seen}: not the same weights"
        )
    return stored


def _open(
    source: PathLike | Stored, version: int | None, options: _Options, stack: ExitStack
) -> Stored:
    if not isinstance(source, Stored):
        return stack.enter_context(
            open_source(
                source,
                version=version,
                rank=None if options.legacy_id is None else options.rank,
                legacy_id=options.legacy_id,
                shared_directory=options.shared_directory,
                unbuffered=options.unbuffered,
            )
        )
    if version is not None and source.manifest.version != version:
        raise VersionError(
            f"{source.store.place!r} holds version {source.manifest.version}, not {version}"
        )
    return source


def _adapted(into: object, stored: Stored, options: _Options, group: Group) -> Sink:
    layout = options.layout
    if layout is None:
        return adapt(into, may_be_empty=group.num_ranks > 1)
    rank = options.rank
    if group.num_ranks > 1:
        if layout.num_ranks != group.num_ranks or rank not in (None, group.rank):
            raise SpecError(
                f"the layout is for {layout.num_ranks} ranks and rank is {rank}; the group has "
                f"{group.num_ranks}, this is rank {group.rank}"
            )
        rank = group.rank
    if rank is None or not 0 <= rank < layout.num_ranks:
        raise SpecError(f"rank is {rank}; the layout is for ranks 0 to {layout.num_ranks - 1}")
    tensors, number = stored.manifest.untied().tensors, rank
    return adapt(into, lambda: layout.locals(tensors, number))


def _reader(stored: Stored, sink: Sink, matches: Matches, *, should_verify: bool) -> Reader:
    """Return a reader that will fill every matched tensor of the sink."""
    source_shards, sink_shards, targets = {}, {}, {}
    for name, source_name in matches.pairs.items():
        blocks = sink.blocks(name)
        source_shards[name] = stored.shards(source_name)
        sink_shards[name] = [Shard(index, block.box) for index, block in enumerate(blocks)]
        targets[name] = [_target(sink, block) for block in blocks]
    reader = Reader(stored.store, stored.manifest, should_verify=should_verify)
    for copy in reshard(source_shards, sink_shards).copies():
        extent = stored.manifest.extents[copy.source.rank]
        reader.add(extent, copy.box, targets[copy.name][copy.sink.rank])
    return reader


def _target(sink: Sink, block: Block) -> Target:
    box, items = block.spec.stored(block.box), block.items()
    if items is None:
        return Target(box, block.write, sink.staging, may_map=False, settle=sink.settle)
    return Target(box, items, sink.staging)
