"""Load: fill the tensors of an existing model from files, in place, and check them on the way.

`match.py` pairs the names. Every rank plans its own reads, and no tensor of any rank is
touched before all ranks have planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, get_args

from flyweight.adapters.model import adapt
from flyweight.checks import check_memory_bytes, check_version
from flyweight.errors import PlanError, SpecError, TransportError, VersionError
from flyweight.events import emit
from flyweight.formats import legacy
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored
from flyweight.host import location
from flyweight.memory import MEMORY_BYTES, collector_paused
from flyweight.plans.reshard import reshard
from flyweight.ports import Block, Sink
from flyweight.ranks.group import TIMEOUT_SECONDS, Group
from flyweight.ranks.process_group import default_group, rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Json, Leaf
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, opened
from flyweight.verbs.match import Matches, check_names, match
from flyweight.worker_threads import default_threads

Extra = Literal["refuse", "report"]
_SHARED_TIMES = 1.25
"""Ranks of one machine share their reads if together they want more than this times the bytes."""


@dataclass(frozen=True)
class LoadReport:
    """What a load read; with a process group, what this rank read."""

    place: str
    format: str
    version: int | None
    """None for formats without versions."""
    num_tensors: int
    nbytes: int
    """Bytes of the tensors that were filled."""
    read_bytes: int
    checked_bytes: int
    """Bytes whose checksum was compared; 0 for formats that keep none."""
    seconds: float
    unused: list[str] = field(default_factory=list)
    """Tensors of the source that this rank's target lacks."""
    kept: list[str] = field(default_factory=list)
    """Tensors of the target that the source lacks, left as they were."""
    partial_over: int | None = None
    """The version that the kept tensors hold, according to the caller."""
    values: Mapping[str, Leaf] = field(default_factory=dict)
    """The values of the source that are not tensors."""

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
    """Fill the model's own tensors from files; no tensor is replaced by another object.

    Names, dtypes and shapes are matched before the first byte is written.

    Args:
        source: A path that `open` accepts, or weights that are open already.
        into: The model to fill: a torch module, a Paddle layer, or nested dicts of tensors.
        version: The version to load; by default the newest.
        process_group: A process group of torch or Paddle. All its ranks make the call, each fills
            its own tensors with the same version, and no tensor of any rank is touched unless
            all can be filled. Without it this process loads alone.
        coordinator_rank: The rank that the others compare themselves with.
        layout: Which box of each whole tensor this rank holds, for models whose tensors do not
            say so themselves.
        rank: Which rank of `layout` this is, without a process group; or the rank in the file
            names, with `legacy_id`.
        legacy_id: The id in the file names of older FastDeploy engines.
        shared_directory: Where such an engine shares files with others on this machine.
        should_verify: Compare the bytes with the checksums of the source.
        extra: If the source has tensors that the model lacks: "refuse" to load, or "report" them.
        partial_over: Allow that the source lacks tensors of the model, which already hold this
            version.
        timeout_seconds: How long to wait for a rank that is silent.
        memory_bytes: The most memory to use beside the model.
        num_threads: How many threads read; by default as many as the machine needs.
        unbuffered: Read past the page cache. False leaves the bytes there, for other readers.
    """
    started = perf_counter()
    rendezvous = Rendezvous() if process_group is None else rendezvous_of(process_group)
    with ExitStack() as stack:
        group = stack.enter_context(
            join_group(rendezvous, coordinator_rank, timeout_seconds=timeout_seconds)
        )
        check_memory_bytes(memory_bytes)
        if extra not in get_args(Extra):
            raise SpecError(f"extra is {extra!r}, not 'refuse' or 'report'")
        if rank is not None and layout is None and legacy_id is None:
            raise SpecError(f"rank is {rank}, and neither a layout nor a legacy_id says what of")
        with group.working():
            stored = _open_together(
                source,
                version,
                group,
                stack,
                rank=None if legacy_id is None else rank,
                legacy_id=legacy_id,
                shared_directory=shared_directory,
                unbuffered=unbuffered,
            )
            with collector_paused():
                sink = _adapted(into, stored, layout, rank, group)
                sink.check_writable()
                matches = match(stored, sink)
            # A layout covers every tensor; those of other ranks are theirs.
            may_leave = extra == "report" or layout is not None
            may_miss = partial_over is not None
            check_names(stored, matches, group, may_miss=may_miss, may_leave=may_leave)
            with collector_paused():
                reader = _reader(stored, sink, matches, should_verify=should_verify)
            start = _share_reads(stored, reader, group)
        num_threads = default_threads() if num_threads is None else num_threads
        _fill(sink, reader, group, num_threads=num_threads, memory_bytes=memory_bytes, start=start)
        sink.finish(stored.manifest)
    return _report(
        stored, sink, reader, matches, partial_over=partial_over, seconds=perf_counter() - started
    )


def check_loadable(
    stored: Stored,
    into: object,
    *,
    layout: ModelLayout | None = None,
    rank: int | None = None,
    extra: Extra = "refuse",
) -> None:
    """Raise PlanError or SpecError if `load` with these arguments would; read no tensor."""
    group = Group()
    with collector_paused():
        sink = _adapted(into, stored, layout, rank, group)
        sink.check_writable()
        matches = match(stored, sink)
    may_leave = extra == "report" or layout is not None
    if matches.missing or (matches.unused and not may_leave):
        check_names(stored, matches, group, may_miss=False, may_leave=may_leave)


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

    Every rank must make the call. The checkpoint may have more tensors: `unused` of the report
    names those that this rank lacks, and the coordinator logs a warning about those that every
    rank lacks.

    Args:
        state_dict: The tensors and values to fill, by name; dicts may be nested.
        path: A path that `open` accepts.
        process_group: By default the process group that torch or Paddle initialised; if there is
            none, this process loads alone.
        coordinator_rank: As in `load`, like `version` and `timeout_seconds`.
        extra: If the checkpoint has tensors that no rank has: "report" them, or "refuse" to load.
    """
    return load(
        path,
        into=state_dict,
        process_group=default_group() if process_group is None else process_group,
        coordinator_rank=coordinator_rank,
        version=version,
        extra=extra,
        timeout_seconds=timeout_seconds,
    )


def _open_together(
    source: PathLike | Stored,
    version: int | None,
    group: Group,
    stack: ExitStack,
    *,
    legacy_id: int | str | None,
    **options: Any,
) -> Stored:
    """Open the source on every rank, in the version that the coordinator finds.

    Raises unless all ranks opened the same weights. Their paths may differ, and legacy files do.
    """
    version = None if version is None else check_version(version)
    for rank, wanted in enumerate(group.gather("version", version)):
        if wanted != version:
            raise VersionError(
                f"rank {rank} loads version {wanted}, rank {group.rank} version {version}"
            )
    if not group.is_coordinator:
        found = group.broadcast("open", None)
        version = found if isinstance(found, int) else version
    stored = stack.enter_context(opened(source, version=version, legacy_id=legacy_id, **options))
    if group.is_coordinator:
        group.broadcast("open", stored.manifest.version)
    if group.num_ranks > 1 and legacy_id is None:
        ours: list[Json] = [stored.store.place, f"{stored.fingerprint():016x}"]
        for rank, theirs in enumerate(group.gather("opened", ours)):
            if not isinstance(theirs, list) or theirs[1:] != ours[1:]:
                raise PlanError(
                    f"rank {rank} opened {str(theirs)[:200]}, rank {group.rank} {ours}: not the "
                    f"same weights"
                )
    return stored


def _adapted(
    into: object, stored: Stored, layout: ModelLayout | None, rank: int | None, group: Group
) -> Sink:
    if layout is None:
        return adapt(into, may_be_empty=group.num_ranks > 1)
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
    """Return a reader that fills every matched tensor of the sink."""
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


@dataclass(frozen=True)
class PlannedMessage:
    """From each rank to the coordinator: it can be filled, and where it will read how much."""

    where: str
    bytes: int


def _share_reads(stored: Stored, reader: Reader, group: Group) -> float:
    """Return where in the files to start reading, once every rank has planned.

    Ranks of one machine that want much the same bytes leave them in the page cache for each other,
    and start at different places, so that each byte is read from the disk once.
    """
    machines: defaultdict[str, dict[int, int]] = defaultdict(dict)  # bytes wanted, by rank
    message = PlannedMessage(location(), reader.wanted_bytes)
    for rank, each in enumerate(group.gather_typed("planned", message)):
        machines[each.where][rank] = each.bytes
    starts: list[Json] = [None] * group.num_ranks
    for wanted in machines.values():
        if len(wanted) > 1 and sum(wanted.values()) > _SHARED_TIMES * stored.manifest.nbytes:
            for index, rank in enumerate(wanted):
                starts[rank] = index / len(wanted)
    start = group.scatter("go", starts)
    if not isinstance(start, (int, float)):
        return 0.0
    stored.store.share_reads()
    return float(start)


def _fill(
    sink: Sink, reader: Reader, group: Group, *, num_threads: int, memory_bytes: int, start: float
) -> None:
    """Write this rank's tensors, and return once every rank has written its own."""
    sink.settle()  # kernels that this thread queued on a GPU still read the old weights
    try:
        reader.run(
            num_threads=num_threads,
            memory_bytes=memory_bytes,
            verb="load",
            tick=group.tick,
            starting_at=start,
        )
    finally:
        sink.touched()
    try:
        group.gather("loaded", None)
        group.broadcast("loaded", None)
    except TransportError as error:
        error.note("this rank was filled, another was not: the model is not whole")
        raise


def _report(
    stored: Stored,
    sink: Sink,
    reader: Reader,
    matches: Matches,
    *,
    partial_over: int | None,
    seconds: float,
) -> LoadReport:
    """Return the report, and emit the event that ends a load."""
    specs, place, version = sink.manifest.tensors, stored.store.place, stored.manifest.version
    nbytes = sum(
        specs[name].box_bytes(block.box) for name in matches.pairs for block in sink.blocks(name)
    )
    emit("load.done", place=place, version=version, nbytes=nbytes, seconds=seconds)
    return LoadReport(
        place,
        stored.format,
        version,
        len(matches.pairs),
        nbytes,
        reader.read_bytes,
        reader.checked_bytes,
        seconds,
        matches.unused,
        matches.missing,
        partial_over,
        stored.manifest.values,
    )
