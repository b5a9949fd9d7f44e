"""The seams: what a Source, Sink, Store, Format, Engine and Weights promise.

A source has weights, a sink takes them. Both name tensors by a manifest and bytes by boxes
of those tensors; neither hands out a tensor. A store keeps the files of one directory, and a
format gives those files their meaning. An engine answers requests, and Weights bring it new
versions. Every implementation passes the
suite of its port in `tests/contracts/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from flyweight.errors import VersionError
from flyweight.memory import Bytes, Items, Staging
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Json, Manifest, TensorSpec

WINDOW_SLACK = 8192
"""How many bytes staging needs beyond a window: unbuffered reads start and end on a page."""


class Source(Protocol):
    """Has weights: a model in memory, or opened files."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def staging(self) -> Staging:
        """Memory for bytes on their way from `read`: pinned, for a GPU."""

    def boxes(self, name: str) -> Sequence[Box]:
        """Return the boxes of a tensor that are here: all of it, unless ranks share it."""

    def read(self, name: str, box: Box | None = None, *, into: Bytes | None = None) -> Bytes:
        """Return the bytes of a box inside one of `boxes`, in row-major order.

        Returns a view if host memory already has them in that order, else a copy: in `into` if
        that is given.
        """


class Block(Protocol):
    """A box of a tensor that a sink has in memory."""

    @property
    def spec(self) -> TensorSpec:
        """The dtype and shape of the whole tensor."""

    @property
    def box(self) -> Box:
        """The box, in elements of the whole tensor."""

    def items(self) -> Items | None:
        """View the box's items where they lie, or None if the CPU cannot reach them."""

    def write(self, items: Box, data: Bytes) -> None:
        """Write row-major bytes to a box, counted in items from this block's corner.

        `data` must not change until the thread that wrote has called the sink's `settle`.
        """


class Sink(Protocol):
    """Takes weights into memory that exists already."""

    @property
    def manifest(self) -> Manifest:
        """The whole tensors, also those of which only some boxes are here."""

    @property
    def staging(self) -> Staging:
        """Memory for bytes on their way to a block: pinned, for a GPU."""

    def check_writable(self) -> None:
        """Raise SpecError if a tensor cannot be written: read-only or overlapping memory."""

    def blocks(self, name: str) -> Sequence[Block]:
        """Return the blocks of a tensor that are here: all of it, unless ranks share it."""

    def settle(self) -> None:
        """Wait until everything that this thread wrote has arrived."""

    def touched(self) -> None:
        """Tell the framework that tensors were written, also if a write failed."""

    def finish(self, manifest: Manifest) -> None:
        """Take over the values that are not tensors, after the last write."""


class Store(Protocol):
    """The files of one directory. A name is a plain file name, never a path."""

    @property
    def place(self) -> str:
        """Where the files are, for messages."""

    def names(self) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return bytes for parsing: headers and manifests, never weights."""

    def window(
        self, name: str, offset: int, nbytes: int, staging: Bytes, *, may_map: bool = True
    ) -> AbstractContextManager[Bytes]:
        """Show a range of a file, read-only, until the end of the block.

        Reads into `staging`, which has `WINDOW_SLACK` bytes more than the window. Shows bytes
        that are in memory already where they lie, if `may_map`.
        """

    def is_cached(self, name: str, offset: int, nbytes: int) -> bool:
        """True if the range can be read without waiting for a disk."""

    def read_into(self, name: str, offset: int, goals: Sequence[Bytes]) -> None:
        """Read a range directly into `goals`, one after the other; best where `is_cached`."""

    def share_reads(self) -> None:
        """From now on leave what is read in the page cache, for other readers on this machine."""

    def close(self) -> None:
        """Close open files. Safe to repeat."""


class Draft(Protocol):
    """Files being written, which nobody sees before `commit`."""

    @property
    def place(self) -> str: ...

    def reserve(self, name: str, nbytes: int) -> None:
        """Create a file of that size; a full disk raises here, not half-way."""

    def write(self, name: str, offset: int, data: Bytes) -> None: ...

    def flush(self) -> None:
        """Make all files durable, but not yet visible."""

    def commit(self) -> None:
        """Make all files durable, then visible at once."""

    def abort(self) -> None:
        """Remove what was written. Safe to repeat, and after `commit`."""

    def __enter__(self) -> Draft: ...

    def __exit__(self, *raised: object) -> None:
        """Abort unless committed."""


@dataclass(frozen=True)
class FilePlan:
    """A file to be written: literal bytes at offsets, and tensors between them."""

    name: str
    nbytes: int
    literals: Sequence[tuple[int, bytes]]
    extents: Sequence[Extent]


@dataclass(frozen=True)
class Format:
    """How a manifest becomes files: two pure functions."""

    name: str
    layout: Callable[[Manifest], list[FilePlan]]
    """Return the files that hold the tensors, byte by byte."""
    seal: Callable[[Manifest, Sequence[FilePlan]], Mapping[str, bytes]]
    """Return the small files that complete them, once checksums and digests are known."""
    has_checksums: bool = False
    """True if the format keeps checksums and digests, so that they are worth computing."""
    has_values: bool = False
    """True if the format keeps values that are not tensors."""


class Engine(Protocol):
    """Answers requests with the weights of one rank, and pauses while they change.

    An exception of a method is reported to the caller of the operation, with the method's name.
    Every release has a restore, which may find nothing to do: what a failed release gave back
    in part is restored as a whole.
    """

    def pause(self, deadline: float) -> None:
        """Return once no request runs and none can start; raise TransferTimeout at the deadline.

        With a deadline in the past, pause only if nothing runs. After an error `resume` is
        called, and requests go on as before.
        """

    def resume(self, version: int | None) -> None:
        """Answer requests again, with weights of that version; caches may use it as a key."""

    def drop_cache(self) -> None:
        """Forget everything computed with the old weights; called while nothing runs."""

    def release_weights(self) -> None:
        """Free the weights' memory; the parameters stay the same objects."""

    def restore_weights(self) -> None:
        """Allocate memory for the weights again, with any content."""

    @property
    def num_running(self) -> int:
        """How many requests run at this moment."""

    def abort_requests(self) -> None:
        """End the running requests, unfinished."""

    def release_cache(self) -> None:
        """Free the memory of the key-value cache."""

    def restore_cache(self) -> None: ...

    def release_experts(self) -> None:
        """Free the buffers of expert parallelism; before the weights are released."""

    def restore_experts(self) -> None: ...

    def release_groups(self) -> None:
        """Shut communication groups down; after the weights were released."""

    def restore_groups(self) -> None:
        """Start communication groups again; before the weights are restored."""


class EngineHooks:
    """Defaults for the methods that an engine may leave out: inherit from this class."""

    @property
    def num_running(self) -> int:
        return 0

    def abort_requests(self) -> None: ...

    def release_cache(self) -> None: ...

    def restore_cache(self) -> None: ...

    def release_experts(self) -> None: ...

    def restore_experts(self) -> None: ...

    def release_groups(self) -> None: ...

    def restore_groups(self) -> None: ...


@dataclass(frozen=True)
class UpdateReport:
    """The result of an update."""

    version: int
    parent: int | None
    """The version that was published before this one."""
    nbytes: int
    seconds: float
    """From the moment at which the version was there to its commit."""
    wait_seconds: float
    """The time before that."""
    fetch_seconds: float
    """The time to lease the version, and to bring to this host, and verify, what is not here."""
    drain_seconds: float
    """The time until `before` had returned on all ranks of the engine."""
    copy_seconds: float
    """From then to the commit: one copy, with its digests."""
    verify_seconds: float
    """The part of it for digests that are not computed while bytes are copied."""
    transport: str
    """How the bytes came: 'mapped', 'filled', 'read', several joined by '+', or 'files'."""
    verified: str
    """What was checked: 'live' parameters, what a loader 'received', 'checksums', or 'nothing'."""
    overflows: int = 0
    """Finite values that became infinite by a cast."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


class RankExchange(Protocol):
    """How a source of weights hears the other ranks of its engine during an update."""

    def __call__(
        self, step: str, error: BaseException | None = None, **facts: Json
    ) -> list[dict[str, Any]]:
        """Return what each rank says at this step of the update, by rank. All ranks must call it.

        Each answer has the facts of its rank, and in "error" and "text" the class and the text of
        its error, or "". Raises LifecycleError if a rank is at something else, and PeerLost if one
        is lost or silent.
        """


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """One update of the weights."""

    version: int | None = None
    """The version to take; None: the next one that is not held."""
    timeout_seconds: float
    """How long to wait for the version."""
    begin_seconds: float | None = None
    """How long it may then take to arrive, and `before` to return; None: as long again."""
    before: Callable[[int], None] | None = None
    """Called with the version before the first write; if it raises, the old version stays."""
    is_over: Callable[[], bool] = lambda: False
    """Ends the wait early if it returns True when `Weights.wake` is called."""
    may_keep: bool = False
    """Whether the version that is held is enough, if the source confirms that it is the newest."""
    verify: bool = False
    """Whether a version without checksums is refused, before the first write."""
    is_requested: bool = True
    """False if the engine only follows its source: then other ranks may be at something else."""
    exchange: RankExchange | None = None
    """Hears the other ranks of the engine; None if there are none, or the source hears them."""

    @property
    def arrival_seconds(self) -> float:
        """`begin_seconds` with its default."""
        return self.timeout_seconds if self.begin_seconds is None else self.begin_seconds

    def check_verified(self, version: int, verified: str) -> None:
        """Raise VersionError if checksums are asked for, and nothing of a version is checked."""
        if self.verify and verified == "nothing":
            raise VersionError(
                f"version {version} has no digests, and verify=True was asked for; publish with "
                f"verify=True, or save it as a snapshot, which has checksums"
            )


class Weights(Protocol):
    """Brings versions of the weights into an engine's memory: a Replica, or something like it.

    The ranks of an engine take a version together: none writes before `before` has returned on all
    of them, and either all then hold the version, or all hold what they held before, or none holds
    a version.
    """

    @property
    def num_ranks(self) -> int | None:
        """How many ranks take versions together; None: any number, by `UpdateOptions.exchange`."""

    @property
    def version(self) -> int | None:
        """The complete version that is held; None if there is none."""

    @property
    def session(self) -> str:
        """Differs between two sources that number their versions alike."""

    @property
    def progress(self) -> float:
        """How much of the running update is done, from 0 to 1."""

    def take(self, options: UpdateOptions) -> UpdateReport:
        """Take over a version, or wait for the next one that is not held yet.

        Transfers nothing if the requested version is held already, or with `may_keep` the newest
        one; in both cases only after the source has confirmed it.
        """

    def forget(self, reason: str) -> None:
        """Hold no version from now on: the memory no longer has its bytes."""

    def wake(self) -> None:
        """Have a waiting `update` check `is_over` at once."""
