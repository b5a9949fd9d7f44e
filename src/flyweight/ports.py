"""The seams: what a Source, a Sink, a Store, a Format, a Transport and an Engine promise.

A source has weights, a sink wants them. Both name tensors by a manifest and bytes
by boxes of it; neither shows a tensor. A store keeps files of one directory, and a
format says what those files mean. An engine answers requests with weights, and stands
still while they change. Whoever knows these can guess the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flyweight.memory import Buffer, Bytes, Items, Staging
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Manifest

WINDOW_SLACK = 8192
"""What staging must have beyond a window: unbuffered reads start and end on a page."""


class Source(Protocol):
    """Has weights: a model in memory, or files that were opened."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def staging(self) -> Staging:
        """Where bytes on their way from `read` should stand: pinned, for a GPU."""

    def boxes(self, name: str) -> Sequence[Box]:
        """Return what of a tensor is here: all of it, unless ranks share it."""

    def read(self, name: str, box: Box | None = None, *, into: Bytes | None = None) -> Bytes:
        """Return the bytes of a box inside one of `boxes`, in row-major order.

        They are a view where they already lie so in host memory, else they are copied, to
        `into` where that is given.
        """


class Block(Protocol):
    """A box of a tensor that is in memory here."""

    @property
    def box(self) -> Box:
        """In elements of the whole tensor."""

    def items(self) -> Items | None:
        """View the box's items where they lie, if the CPU can reach them, else None."""

    def write(self, items: Box, data: Bytes) -> None:
        """Put row-major bytes into a box, counted in items from this block's corner.

        `data` stays as it is until the thread that wrote has called the sink's `settle`.
        """


class Sink(Protocol):
    """Wants weights, in memory that exists already."""

    @property
    def manifest(self) -> Manifest:
        """Whole tensors, also those of which only some boxes are here."""

    @property
    def staging(self) -> Staging:
        """Where bytes on their way to a block should stand: pinned, for a GPU."""

    def blocks(self, name: str) -> Sequence[Block]:
        """Return what of a tensor is here: all of it, unless ranks share it."""

    def settle(self) -> None:
        """Wait until what this thread wrote has arrived."""

    def touched(self) -> None:
        """Tell the framework that tensors were written, whether or not the writing went well."""

    def finish(self, manifest: Manifest) -> None:
        """Take over what is not bytes, after the last write: values, for dicts that hold some."""


class Store(Protocol):
    """Files of one directory. Names are plain: no file here has a path."""

    @property
    def place(self) -> str:
        """Where this is, for people."""

    def names(self) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return bytes for parsing: heads and manifests, never weights."""

    def window(
        self, name: str, offset: int, nbytes: int, staging: Bytes, *, may_map: bool = True
    ) -> AbstractContextManager[Bytes]:
        """Show a stretch of a file, read-only, until the end of the block.

        What has to be read is read into `staging`, which has `WINDOW_SLACK` bytes more than the
        window; what lies in memory already is shown there if `may_map`.
        """

    def is_cached(self, name: str, offset: int, nbytes: int) -> bool:
        """True if this stretch can be had without waiting for a disk."""

    def read_into(self, name: str, offset: int, goals: Sequence[Bytes]) -> None:
        """Read a stretch straight into `goals`, one after the other; best where `is_cached`."""

    def share_reads(self) -> None:
        """From now on leave what is read in memory, for others on this machine who want it too."""

    def close(self) -> None:
        """Let go of open files. Safe to repeat."""


HandleT = TypeVar("HandleT")


class Transport(Protocol[HandleT]):
    """Shows memory of one process to others, by handles that survive JSON."""

    def offer(self, buffer: Buffer) -> HandleT:
        """Let whoever has the handle read the buffer's bytes, until `release`.

        What lies in memory that others can map is shown where it lies, and the buffer's owner is
        kept until then; other bytes are copied once.
        """

    def release(self, handle: HandleT) -> None:
        """Take an offer back: it cannot be opened any more. Safe to repeat.

        Who has it open keeps it: memory of our own stays until the last reader lets go.
        """

    def open(self, handle: HandleT) -> Buffer:
        """Return the offered bytes, read-only; raise HandleGone if they are no longer offered.

        They stay mapped until `shut`, so that to open them again costs nothing.
        """

    def close_handle(self, handle: HandleT) -> None:
        """Let go of what was opened. Safe to repeat."""

    def close(self) -> None:
        """Release every offer and shut all that is open. Safe to repeat."""


class Engine(Protocol):
    """Answers requests with the weights of one rank; told when to stand still.

    Whatever a method raises is told to whoever asked, with the method's name. What a release gave
    back half-way is restored whole: `restore_weights` and the like may find nothing to do.
    """

    def pause(self, deadline: float) -> None:
        """Return once no request runs and none can start; raise TransferTimeout at the deadline.

        A deadline that has passed asks for a pause only if nothing runs. After an error,
        `resume` is called: requests go on as before.
        """

    def resume(self, version: int | None) -> None:
        """Answer requests again, with weights of that version: what caches are keyed by."""

    def drop_cache(self) -> None:
        """Forget what was computed with the weights so far; called while nothing runs."""

    def release_weights(self) -> None:
        """Give the weights' memory back; whoever holds the parameters goes on holding them."""

    def restore_weights(self) -> None:
        """Have memory for the weights again, whatever is in it."""

    @property
    def num_running(self) -> int:
        """How many requests run at this moment."""

    def abort_requests(self) -> None:
        """End the requests that run, unfinished."""

    def release_cache(self) -> None:
        """Give the memory of the key-value cache back."""

    def restore_cache(self) -> None: ...

    def release_experts(self) -> None:
        """Free the buffers of expert parallelism; before the weights go."""

    def restore_experts(self) -> None: ...

    def release_groups(self) -> None:
        """Shut communication groups down; after the weights went."""

    def restore_groups(self) -> None:
        """Start communication groups again; before the weights come."""


class EngineHooks:
    """What an engine may leave out: inherit from it, and write what you have."""

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


class Draft(Protocol):
    """Files being written, which nobody sees before `commit`."""

    @property
    def place(self) -> str: ...

    def reserve(self, name: str, nbytes: int) -> None:
        """Make a file of that size; a disk without room refuses here, not half-way."""

    def write(self, name: str, offset: int, data: Bytes) -> None: ...

    def flush(self) -> None:
        """Make all files durable, and not yet visible."""

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
    """How bytes rest. Opening reads only heads; laying out is pure; sealing says what goes last."""

    name: str
    layout: Callable[[Manifest], list[FilePlan]]
    """The files that will hold these tensors, byte by byte."""
    seal: Callable[[Manifest, Sequence[FilePlan]], Mapping[str, bytes]]
    """The small files that make them whole, once checksums and digests are known."""
    has_checksums: bool = False
    """True if the format keeps checksums and digests, so that they are worth computing."""
    has_values: bool = False
    """True if the format keeps values that are no tensors."""
