"""The seams: what a Source, a Sink, a Store and a Format promise.

A source has weights, a sink wants them. Both name tensors by a manifest and bytes
by boxes of it; neither shows a tensor. A store keeps files of one directory, and a
format says what those files mean. Whoever knows these four can guess the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from flyweight.memory import Buffer, Bytes, Staging
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

    def read(self, name: str, box: Box | None = None, *, into: Bytes | None = None) -> Bytes:
        """Return the box's bytes in row-major order.

        They are a view where they already lie so in host memory, else they are copied, to
        `into` where that is given.
        """


class Sink(Protocol):
    """Wants weights, in memory that exists already."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def staging(self) -> Staging:
        """Where bytes on their way to `write` should stand: pinned, for a GPU."""

    def host(self, name: str) -> Buffer | None:
        """Return the tensor's own memory if the CPU can write it, else None: use `write`."""

    def write(self, name: str, items: Box, data: Bytes) -> None:
        """Put row-major bytes into a box of the tensor, counted in items, for tensors not `host`.

        `data` stays as it is until the thread that wrote has called `settle`.
        """

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

    def close(self) -> None:
        """Let go of open files. Safe to repeat."""


class Draft(Protocol):
    """Files being written, which nobody sees before `commit`."""

    @property
    def place(self) -> str: ...

    def reserve(self, name: str, nbytes: int) -> None:
        """Make a file of that size; a disk without room refuses here, not half-way."""

    def write(self, name: str, offset: int, data: Bytes) -> None: ...

    def commit(self) -> None:
        """Make all files durable, then visible at once."""

    def abort(self) -> None:
        """Remove what was written. Safe to repeat, and after `commit`."""

    def __enter__(self) -> Draft: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
