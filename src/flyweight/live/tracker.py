"""Tracker: which readers fetch or have the newest version, and where each should fetch it. Pure.

The hosts of a kind form chains in the order in which their first readers heard of a version:
the first of a chain fetches from the trainer, each other one from the host before it, as the bytes
arrive. Readers of one host share what the first of them fetches.

A place is the address at which a reader serves. It keeps its position over a reconnect and a
restart, and a reader is only ever sent to places that heard of it before its own: nobody waits in a
circle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from flyweight.errors import VersionError
from flyweight.live.messages import Current, Done, Join, Result, Staged, Wait
from flyweight.live.publish_id import PublishId
from flyweight.transports.address import Endpoint

CHAIN_HOSTS = 16
MAX_HOLDERS = 8
MAX_PLACES = 4096
"""For each version; readers beyond it fetch from the trainer, and are not in the results."""
MAX_REFUSED = 100


@dataclass
class _Place:
    """An address whose reader has heard of a version. It stays of the kind that it had then."""

    address: Endpoint
    kind: str
    host: str
    position: int
    """Its position among all that have heard of it."""
    is_complete: bool | None = None
    """True once its reader has all of it; None if that has not heard of it, or has failed."""


@dataclass
class _Rank:
    """A rank of an engine that has heard of a version."""

    num_ranks: int
    is_staged: bool = False
    """True if it has fetched everything, and needs nobody any more."""
    result: Result | None = None
    """How its update ended."""


@dataclass
class _Version:
    """What is known of the newest version."""

    places: dict[Endpoint, _Place] = field(default_factory=dict)
    hosts: dict[str, dict[str, list[_Place]]] = field(default_factory=dict)
    """The same places by kind and host, in order; the first of each host is in a chain."""
    ranks: dict[tuple[str, int], _Rank] = field(default_factory=dict)
    refused: dict[str, Result] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How the updates of engines go that have heard of a version, or were refused before it."""

    results: list[Result] = field(default_factory=list)
    """One for each engine that has no rank that is missing."""
    missing: list[str] = field(default_factory=list)
    """The names of engines with ranks that have heard of it and are not done or lost."""
    needing: list[str] = field(default_factory=list)
    """Those of them that have not fetched everything.

    A rank of theirs has not, or has still to ask for the version while those that did go on.
    """


class Tracker:
    """What the front knows about its readers. A reader is the number of its connection.

    If two connections are from the same place, or the same rank of an engine, then the newer one
    counts: the older one's process has gone, and its end was not seen yet.
    """

    def __init__(self) -> None:
        self._readers: dict[int, Join] = {}
        self._at: dict[Endpoint | tuple[str, int] | None, list[int]] = {}
        """The readers at each place and of each rank of an engine, the newest last."""
        self._waiting: dict[int, tuple[str, Wait]] = {}
        self.newest: PublishId | None = None
        self._version = _Version()
        self._refused: dict[str, Result] = {}

    def replicas(self) -> list[str]:
        """Return the names of the engines that are connected."""
        return sorted({each.name for each in self._readers.values()})

    def waiting(self) -> list[str]:
        """Return the names of the engines that wait for a version."""
        return sorted({self._readers[reader].name for reader in self._waiting})

    # What readers do.

    def join(self, reader: int, join: Join) -> None:
        """Add one rank of an engine; its connections for bytes are none of the tracker's."""
        self._readers[reader] = join
        for key in (join.serves_at, (join.name, join.rank)):
            self._at.setdefault(key, []).append(reader)
        self.maps(reader)  # nobody fetches there until the reader that is there now hears of it

    def lose(self, reader: int) -> None:
        """Forget a reader whose connection has closed; how its update ended is kept."""
        self.maps(reader)
        (_, rank), gone = self._known(reader), self._readers.pop(reader)
        if rank is not None and rank.result is None:
            text = f"PeerLost: rank {gone.rank} of {gone.name!r} died, or its lease was ended"
            rank.result = Result(gone.name, error=text)
        for key in (gone.serves_at, (gone.name, gone.rank)):
            self._at[key].remove(reader)
            if not self._at[key]:
                del self._at[key]
        self._waiting.pop(reader, None)

    def wait(self, reader: int, kind: str, wait: Wait) -> None:
        """Count a reader among those that wait."""
        self._waiting[reader] = kind, wait

    def stop_waiting(self, reader: int) -> None:
        self._waiting.pop(reader, None)

    def answer(
        self, reader: int, kind: str, wait: Wait, *, is_offered: bool
    ) -> Current | tuple[Endpoint, ...] | None:
        """Return where a reader may fetch the newest version, best first; None lets it wait.

        The trainer is the last resort, and not in the list. Raises VersionError if the version that
        the reader wants cannot come any more.

        is_offered: whether the trainer offers the newest version.
        """
        newest, have, wanted = self.newest, wait.have, wait.id
        if newest is not None and wait.version is not None:
            wanted = PublishId(newest.session, wait.version)
        if have is not None and (have == wanted or (have == newest and wait.may_keep)):
            return Current()  # what an id names never changes
        if newest is None:
            return None
        if wanted is None:
            if have is not None and (have == newest or have.follows(newest)):  # it lags behind
                return None
        elif wanted.follows(newest):
            return None
        elif wanted != newest:
            raise VersionError(
                f"{wanted} cannot come any more: the newest is {newest}; update without a version, "
                f"or to that one"
            )
        holders = self._holders(reader, kind)
        if not is_offered and not holders:
            return None
        self._tell(reader, kind)
        return holders

    def note(self, reader: int, said: Staged | Done) -> None:
        """Note that a rank that has heard of the newest version has all of it, or how it ended."""
        place, rank = self._known(reader)
        result = said.result if isinstance(said, Done) else None
        if said.id != self.newest:
            return
        if rank is not None:
            rank.is_staged, rank.result = True, result or rank.result
        if place is not None and place.is_complete is not None:
            place.is_complete = None if result and result.error else True

    def maps(self, reader: int) -> None:
        """Note that there is nothing to fetch from a reader: it maps the newest version, say."""
        place, _ = self._known(reader)
        if place is not None:
            place.is_complete = None

    # What the publisher does.

    def announce(self, id: PublishId) -> None:
        """Begin a version, and note that all readers that wait for one hear of it."""
        self.newest, self._version = id, _Version(refused=self._refused)
        self._refused = {}
        for reader, (kind, wait) in self._waiting.items():
            if wait.have != id and wait.version in (None, id.version):
                self._tell(reader, kind)

    def refused(self, name: str, text: str) -> None:
        """Have an engine that was refused in the results of the next version; keep the latest."""
        self._refused.pop(name, None)
        self._refused[name] = Result(name, error=text)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def outcome(self, id: PublishId) -> Outcome:
        """Return how the updates of all engines that have heard of a version go."""
        found, engines = Outcome(), dict[str, list[_Rank]]()
        if id != self.newest:
            return found
        for name, rank in sorted(self._version.ranks):
            engines.setdefault(name, []).append(self._version.ranks[name, rank])
        for name, ranks in engines.items():
            results = [each.result for each in ranks if each.result is not None]
            num_ranks = max(each.num_ranks for each in ranks)
            lacks_ranks = len(ranks) < num_ranks and not any(each.error for each in results)
            if len(results) < len(ranks):
                found.missing.append(name)
                if lacks_ranks or any(not each.is_staged for each in ranks if not each.result):
                    found.needing.append(name)
                continue
            result = Result.joined(results)
            if lacks_ranks:
                few = f"{len(ranks)} of {num_ranks} ranks of {name!r} asked for the version"
                result = replace(result, error=f"PeerLost: {few}")
            found.results.append(result)
        found.results.extend(self._version.refused.values())
        return found

    # How both meet.

    def _known(self, reader: int) -> tuple[_Place | None, _Rank | None]:
        """Return what a version has of a reader's place and rank; None if a newer one has it."""
        me, version = self._readers[reader], self._version
        key = me.name, me.rank
        place = version.places.get(me.serves_at) if me.serves_at else None
        rank = version.ranks.get(key)
        is_newest = [self._at[each][-1] == reader for each in (me.serves_at, key)]
        return place if is_newest[0] else None, rank if is_newest[1] else None

    def _tell(self, reader: int, kind: str) -> None:
        me, version = self._readers[reader], self._version
        address, places, ranks = me.serves_at, version.places, version.ranks
        if address and address not in places and len(places) < MAX_PLACES:
            place = places[address] = _Place(address, kind, me.host, len(places))
            version.hosts.setdefault(kind, {}).setdefault(me.host, []).append(place)
        known, _ = self._known(reader)
        if known is not None:
            is_same = (known.kind, known.host) == (kind, me.host)
            known.is_complete = False if is_same else None
        key = me.name, me.rank
        if self._at[key][-1] == reader and (key in ranks or len(ranks) < MAX_PLACES):
            ranks[key] = _Rank(me.num_ranks)
            for each in (self._refused, version.refused):
                each.pop(me.name, None)

    def _holders(self, reader: int, kind: str) -> tuple[Endpoint, ...]:
        """Return the places where a reader may fetch, all earlier than its own, best first."""
        me, version = self._readers[reader], self._version
        mine = version.places.get(me.serves_at) if me.serves_at else None
        at = len(version.places) if mine is None else mine.position
        if at >= MAX_PLACES:
            return ()
        hosts = version.hosts.get(kind, {})
        line = list(hosts)
        number = line.index(me.host) if me.host in hosts else len(line) if me.serves_at else 0
        above = reversed(line[number - number % CHAIN_HOSTS : number])
        complete = (each for host in reversed(line) for each in hosts[host] if each.is_complete)
        found: list[Endpoint] = []
        for place in chain(hosts.get(me.host, ()), (hosts[host][0] for host in above), complete):
            is_serving = place.is_complete is not None
            if is_serving and place.position < at and place.address not in found:
                found.append(place.address)
            if len(found) == MAX_HOLDERS:
                break
        return tuple(found)
