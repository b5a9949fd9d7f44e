"""LeaseBook: which reader reads which version of a holder. Pure state: no sockets, no threads.

free ──offer──► offered ──withdraw──► withdrawn ──last lease ends──► free

The memory of a version may be written only while it is free. A lease ends by release, by the
reader's death, or because the holder ends it at a deadline; an ended lease cannot be released.
"""

from __future__ import annotations

from flyweight.errors import HandleGone, VersionError, listed
from flyweight.live.publish_id import PublishId


class LeaseBook:
    """A reader is the number of its connection. It has one lease at a time."""

    def __init__(self) -> None:
        self._offered: set[PublishId] = set()
        self._leases: dict[int, PublishId] = {}
        """The version that each reader reads."""

    @property
    def offered(self) -> set[PublishId]:
        """The versions that can be leased."""
        return set(self._offered)

    def offer(self, id: PublishId) -> None:
        assert self.is_free(id), f"{id} is in use"
        self._offered.add(id)

    def take(self, id: PublishId, reader: int) -> None:
        """Begin a lease, or go on with it; raise VersionError if the reader has another one."""
        if id not in self._offered:
            there = listed([str(each) for each in self._offered]) or "none"
            raise VersionError(f"{id} is not offered any more; offered: {there}")
        if self._leases.setdefault(reader, id) != id:
            raise VersionError(f"{self._leases[reader]} is leased; release it, then lease {id}")

    def release(self, id: PublishId, reader: int) -> None:
        """End a lease; raise HandleGone unless it ran until now."""
        if self._leases.get(reader) != id:
            raise HandleGone(f"the lease of {id} has ended; the memory may have changed")
        del self._leases[reader]

    def lose(self, reader: int) -> None:
        """End the lease of a reader whose connection has closed, if it has one."""
        self._leases.pop(reader, None)

    def withdraw(self, id: PublishId) -> None:
        """Give no new leases; those that run go on."""
        self._offered.discard(id)

    def end(self, id: PublishId) -> set[int]:
        """Withdraw a version and end all its leases; return the readers that had one."""
        self.withdraw(id)
        readers = self.readers(id)
        for reader in readers:
            del self._leases[reader]
        return readers

    def readers(self, id: PublishId) -> set[int]:
        return {reader for reader, leased in self._leases.items() if leased == id}

    def leased(self, reader: int | None) -> PublishId | None:
        """Return the version that a reader reads, if any."""
        return None if reader is None else self._leases.get(reader)

    def is_free(self, id: PublishId) -> bool:
        """True if nobody reads the memory of a version, and nobody can begin to."""
        return id not in self._offered and id not in self._leases.values()
