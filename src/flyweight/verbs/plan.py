"""Plan: which rank or file would give which bytes to which rank, without moving any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from flyweight.checks import check_memory_bytes
from flyweight.errors import SpecError
from flyweight.formats.reader import WINDOW_BYTES
from flyweight.formats.stored import Stored
from flyweight.memory import MEMORY_BYTES, collector_paused
from flyweight.plans.reshard import Plan, reshard
from flyweight.ports import WINDOW_SLACK
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, opened
from flyweight.worker_threads import default_threads


@dataclass(frozen=True)
class PlanReport:
    """What a plan moves. Bytes are those of the tensors, whichever way they travel."""

    place: str
    num_tensors: int
    num_copies: int
    nbytes: int
    """All bytes that move; a tensor that several ranks hold counts for each of them."""
    sources: list[str]
    """The name of each source: a rank, or a file."""
    num_sink_ranks: int
    pairs: list[tuple[int, int, int]]
    """(source, sink, bytes) for each pair between which bytes move."""
    sink_bytes: list[int]
    """What each sink rank holds afterwards."""
    extra_bytes: int
    """The most memory that a sink rank needs beside that while it loads."""
    seconds: float
    plan: Plan = field(repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a sink rank needs."""
        return max(self.sink_bytes, default=0) + self.extra_bytes

    @property
    def staging_bytes(self) -> int:
        """What a sink rank stages at most if it takes the tensors from a publisher on another host.

        `Replica(staging_bytes=)` must allow it. Casts change it.
        """
        return max(self.sink_bytes, default=0)

    @property
    def source_bytes(self) -> list[int]:
        """What each source gives."""
        given = [0] * len(self.sources)
        for source, _, nbytes in self.pairs:
            given[source] += nbytes
        return given

    def record(self, *, has_copies: bool = False) -> dict[str, object]:
        """Return the report as plain data, with `has_copies` every single copy too."""
        fields = {name: value for name, value in vars(self).items() if name != "plan"}
        fields |= {
            "peak_bytes": self.peak_bytes,
            "staging_bytes": self.staging_bytes,
            "source_bytes": self.source_bytes,
        }
        if has_copies:
            fields["copies"] = [
                {
                    "name": copy.name,
                    "source": copy.source.rank,
                    "sink": copy.sink.rank,
                    "offset": list(copy.box.offset),
                    "shape": list(copy.box.shape),
                }
                for copy in self.plan.copies()
            ]
        return fields


def plan(
    source: PathLike | Stored,
    *,
    into: ModelLayout,
    source_layout: ModelLayout | None = None,
    rank: int | None = None,
    version: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> PlanReport:
    """Return the plan that would fill the ranks of `into`, or raise if something does not fit.

    Args:
        source: A path that `open` accepts, or weights that are open already.
        into: The layout of the ranks to fill.
        source_layout: The layout of the ranks that hold the tensors named in `source`. By default
            the tensors come from the files of `source`.
        rank: Plan for this rank of `into` only.
        version: The version to open; by default the newest.
        memory_bytes: The memory that each rank may use beside its tensors.
    """
    check_memory_bytes(memory_bytes)
    if rank is not None and not 0 <= rank < into.num_ranks:
        raise SpecError(f"rank {rank} of a layout of {into.num_ranks} ranks")
    with opened(source, version=version) as stored, collector_paused():
        started, manifest = perf_counter(), stored.manifest.untied()
        sink = into.shards(manifest.tensors, rank=rank)
        held: Mapping[str, Sequence[Shard]]
        if source_layout is None:
            names, held = _files(stored)
        else:
            names = [f"rank {each}" for each in range(source_layout.num_ranks)]
            held = source_layout.shards(manifest.tensors, names=None if rank is None else sink)
        made = reshard(held, sink)
        pairs = made.pairs({name: spec.dtype.bits for name, spec in manifest.tensors.items()})
    return PlanReport(
        stored.store.place,
        len(sink),
        made.num_copies,
        sum(pairs.values()),
        names,
        into.num_ranks,
        sorted((a, b, nbytes) for (a, b), nbytes in pairs.items()),
        _sink_bytes(manifest.tensors, sink, into.num_ranks),
        min(memory_bytes, default_threads() * (WINDOW_BYTES + WINDOW_SLACK), manifest.nbytes),
        perf_counter() - started,
        made,
    )


def _files(stored: Stored) -> tuple[list[str], Mapping[str, Sequence[Shard]]]:
    """Return the names of the files, and the shards of each tensor by number of the file."""
    # A tensor that must be decoded first has a file name of its own, with a '#' in it.
    of_extent = [extent.file.partition("#")[0] for extent in stored.manifest.extents]
    files = sorted(set(of_extent))
    number = {file: index for index, file in enumerate(files)}
    return files, {
        name: [Shard(number[of_extent[shard.rank]], shard.box) for shard in stored.shards(name)]
        for name in stored.manifest.names
    }


def _sink_bytes(
    tensors: Mapping[str, TensorSpec], sink: Mapping[str, tuple[Shard, ...]], num_ranks: int
) -> list[int]:
    held = [0] * num_ranks
    alike = Counter((id(shards), tensors[name]) for name, shards in sink.items())
    by_id = {id(shards): shards for shards in sink.values()}
    for (shards, spec), count in alike.items():
        for shard in by_id[shards]:
            held[shard.rank] += count * spec.box_bytes(shard.box)
    return held
