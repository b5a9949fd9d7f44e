"""JoinedCopies: the copies that all source ranks hold of a version, as one source.

Rank 0 maps the copies of the other ranks and offers them as its own, so that it can serve a
replica between two publishes without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flyweight.live.lanes import Offers, Transports
from flyweight.live.published_model import PublishedVersion
from flyweight.live.source import PublishedSource
from flyweight.live.source_blocks import SourceBlocks
from flyweight.live.source_rank import SourceRank
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.shared_memory import SharedMemoryHandle, SharedMemoryTransport


class JoinedCopies:
    """The copies of the last version that was held."""

    def __init__(self, blocks: SourceBlocks, files: FdServer, transports: Transports) -> None:
        self._blocks, self._files, self._transports = blocks, files, transports
        self._joined: tuple[list[SharedMemoryHandle], PublishedSource, Offers] | None = None
        """The source, and the handles that it is made of."""

    def join(self, own: PublishedVersion, followers: Sequence[SourceRank]) -> PublishedVersion:
        """Return the copies of a version as one, which this process can read.

        own: the copy that this process holds; `SourceRank.copy` is that of a follower.
        """
        copies = [each.copy for each in followers if each.copy is not None]
        handles = [each.handle for each in copies]
        if self._joined is None or self._joined[0] != handles:
            memories = [own.source.memory]
            for follower, copy in zip(followers, copies, strict=True):
                assert follower.files is not None
                follower.pass_on_files(self._files)
                memory = SharedMemoryTransport(fd_connection=follower.files).open(copy.handle)
                memories.append(self._blocks.copied_memory(follower.rank, memory))
            source = self._blocks.joined_copy(own.source, memories)
            self.close()
            self._joined = handles, source, Offers(source, self._transports)
        _, source, offers = self._joined
        digests = None
        if own.whole_digests is not None and all(each.digests for each in copies):
            parts = [np.frombuffer(each.digests, np.uint64) for each in copies]
            digests = self._blocks.joined_words([own.whole_digests, *parts])
        return replace(own, source=source, offers=offers, whole_digests=digests)

    def close(self) -> None:
        """Offer the copies no more. Safe to repeat."""
        if self._joined is not None:
            self._joined[2].close()
        self._joined = None
