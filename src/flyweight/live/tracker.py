"""Tracker: which readers fetch or have the newest version, and where each should fetch it. Pure.

The hosts of a kind form chains in the order in which their first readers were told of a version:
the first of a chain fetches from the trainer, each other one from the host before it, as the bytes
arrive. Readers of one host share what the first of them fetches.

A place is the address at which a reader serves. It keeps its position over a reconnect and a
restart, and a reader is only ever sent to places that were told before its own: nobody waits in a
circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from flyweight.errors import VersionError
from flyweight.live.publish_id import PublishId
from flyweight.ports import UpdateReport
from flyweight.transports.address import Endpoint

Place = Endpoint | None
"""The address at which a reader serves; None if it does not."""
CHAIN_HOSTS = 16
MAX_HOLDERS = 8
MAX_PLACES = 4096
"""For each version; readers beyond it fetch from the trainer, and are not in the results."""
MAX_REFUSED = 100


class Result(msgspec.Struct, frozen=True):
    """How an update of one engine ended, or of one of its ranks."""

    name: str
    pid: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    fetch_seconds: float = 0.0
    drain_seconds: float = 0.0
    copy_seconds: float = 0.0
    verify_seconds: float = 0.0
    transport: str = ""
    overflows: int = 0
    """Finite values that became infinite by a cast."""
    error: str = ""
    is_touched: bool = False
    """True if it failed and no longer holds the version that it had."""

    @classmethod
    def of(cls, name: str, pid: int, report: UpdateReport) -> Result:
        """Return what the trainer learns of an update that succeeded."""
        fields = {each: getattr(report, each) for each in cls.__struct_fields__[2:-2]}
        return cls(name, pid, **fields)

    @classmethod
    def joined(cls, ranks: Sequence[Result]) -> Result:
        """Return the result of an engine from those of its ranks; the slowest counts."""
        return cls(
            ranks[0].name,
            ranks[0].pid,
            sum(each.nbytes for each in ranks),
            max(each.seconds for each in ranks),
            max(each.wait_seconds for each in ranks),
            max(each.fetch_seconds for each in ranks),
            max(each.drain_seconds for each in ranks),
            max(each.copy_seconds for each in ranks),
            max(each.verify_seconds for each in ranks),
            "+".join(sorted({each.transport for each in ranks if each.transport})),
            sum(each.overflows for each in ranks),
            next((each.error for each in ranks if each.error), ""),
            any(each.is_touched for each in ranks),
        )


@dataclass(frozen=True)
class _Reader:
    name: str
    rank: int
    num_ranks: int
    place: Place
    host: str

    @property
    def member(self) -> tuple[str, int]:
        return self.name, self.rank


@dataclass
class _Version:
    """What is known of the newest version. A place stays of the kind that it was told for first."""

    order: dict[Place, int] = field(default_factory=dict)
    """The position of each place among all that were told."""
    hosts: dict[str, dict[str, list[Place]]] = field(default_factory=dict)
    """The places of each kind by host, in order; the first of each host is in a chain."""
    serving: dict[Place, bool] = field(default_factory=dict)
    """The places whose reader was told and has not failed; True if it has fetched everything."""
    ended: dict[tuple[str, int], Result | None] = field(default_factory=dict)
    """The engines' ranks that were told, and how they ended; None until then."""
    staged: set[tuple[str, int]] = field(default_factory=set)
    """Those of them that have fetched everything, and need nobody any more."""
    num_ranks: dict[str, int] = field(default_factory=dict)
    refused: dict[str, Result] = field(default_factory=dict)


class Tracker:
    """What the front knows about its readers. A reader is the number of its connection.

    If two connections are from the same place, or the same rank of an engine, then the newer one
    counts: the older one's process has gone, and its end was not seen yet.
    """

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}
        self._at: dict[Place | tuple[str, int], list[int]] = {}
        """The readers at each place and of each rank of an engine, the newest last."""
        self._waiting: dict[int, tuple[str, PublishId | None, int | None]] = {}
        self._newest: PublishId | None = None
        self._version = _Version()
        self._refused: dict[str, Result] = {}

    @property
    def newest(self) -> PublishId | None:
        return self._newest

    def replicas(self) -> list[str]:
        """Return the names of the engines that are connected."""
        return sorted({each.name for each in self._readers.values()})

    def waiting(self) -> list[str]:
        """Return the names of the engines that wait for a version."""
        return sorted({self._readers[reader].name for reader in self._waiting})

    # What readers do.

    def join(
        self,
        reader: int,
        name: str,
        rank: int,
        num_ranks: int,
        *,
        serves_at: Place,
        host: str,
    ) -> None:
        """Add one rank of an engine; its connections for bytes are none of the tracker's."""
        joined = self._readers[reader] = _Reader(name, rank, num_ranks, serves_at, host)
        self._at.setdefault(joined.member, []).append(reader)
        self._at.setdefault(serves_at, []).append(reader)
        self._version.serving.pop(serves_at, None)  # until the reader that is there now is told

    def lose(self, reader: int) -> None:
        """Forget a reader whose connection has closed; how its update ended is kept."""
        gone, version = self._readers[reader], self._version
        if self._is_newest(reader, gone.place):
            version.serving.pop(gone.place, None)
        if self._is_newest(reader, gone.member) and version.ended.get(gone.member, 0) is None:
            text = f"PeerLost: rank {gone.rank} of {gone.name!r} died, or its lease was ended"
            version.ended[gone.member] = Result(gone.name, error=text)
        for key in (gone.place, gone.member):
            self._at[key].remove(reader)
            if not self._at[key]:
                del self._at[key]
        del self._readers[reader]
        self._waiting.pop(reader, None)

    def wait(
        self, reader: int, kind: str, have: PublishId | None, version: int | None = None
    ) -> None:
        """Count a reader among those that wait, for any version but `have` or for one number."""
        self._waiting[reader] = kind, have, version

    def stop_waiting(self, reader: int) -> None:
        self._waiting.pop(reader, None)

    def answer(
        self,
        reader: int,
        kind: str,
        wanted: PublishId | None,
        have: PublishId | None,
        *,
        is_offered: bool,
    ) -> tuple[Endpoint, ...] | None:
        """Return where a reader may fetch the newest version, best first; None lets it wait.

        The trainer is the last resort, and not in the list. Raises VersionError if the version that
        the reader wants cannot come any more.

        wanted: the version to wait for; None: any but `have`. `is_offered`: by the trainer.
        """
        newest = self._newest
        if newest is None or (wanted is None and newest == have):
            return None
        if wanted is None and have is not None and have.follows(newest):  # this front lags behind
            return None
        if wanted not in (None, newest):
            assert wanted is not None
            is_ahead = wanted.session == newest.session and wanted.version > newest.version
            if is_ahead:
                return None
            raise VersionError(
                f"{wanted} cannot come any more: the newest is {newest}; update without a version, "
                f"or to that one"
            )
        holders = self._holders(reader, kind)
        if not is_offered and not holders:
            return None
        self._tell(reader, kind)
        return holders

    def staged(self, reader: int, id: PublishId) -> None:
        """Note that a rank that was told of the newest version has fetched all of it."""
        me, version = self._readers[reader], self._version
        if id != self._newest:
            return
        if me.member in version.ended and self._is_newest(reader, me.member):
            version.staged.add(me.member)
        if me.place in version.serving and self._is_newest(reader, me.place):
            version.serving[me.place] = True

    def maps(self, reader: int) -> None:
        """Note that a reader maps the newest version, so that there is nothing to fetch from it."""
        place = self._readers[reader].place
        if self._is_newest(reader, place):
            self._version.serving.pop(place, None)

    def done(self, reader: int, id: PublishId, result: Result) -> None:
        """Note how the update of a rank that was told of the newest version has ended."""
        me, version = self._readers[reader], self._version
        if id != self._newest:
            return
        if me.member in version.ended and self._is_newest(reader, me.member):
            version.ended[me.member] = result
        if me.place in version.serving and self._is_newest(reader, me.place):
            version.serving[me.place] = True
            if result.error:
                del version.serving[me.place]

    # What the publisher does.

    def announce(self, id: PublishId) -> None:
        """Begin a version, and note that all readers that wait for one were told."""
        self._newest, self._version = id, _Version(refused=self._refused)
        self._refused = {}
        for reader, (kind, have, version) in self._waiting.items():
            if have != id and version in (None, id.version):
                self._tell(reader, kind)

    def refused(self, name: str, text: str) -> None:
        """Have an engine that was refused in the results of the next version; keep the latest."""
        self._refused.pop(name, None)
        self._refused[name] = Result(name, error=text)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def missing(self, id: PublishId) -> list[str]:
        """Return the names of the engines with ranks that were told and are not done or lost."""
        ended = self._version.ended if id == self._newest else {}
        return sorted({name for (name, _), result in ended.items() if result is None})

    def needing(self, id: PublishId) -> list[str]:
        """Return the names of the missing engines that have not fetched everything.

        A rank of theirs has not, or has still to ask for the version while those that did go on.
        """
        version, told = self._version, dict[str, list[tuple[str, int]]]()
        for each in version.ended if id == self._newest else ():
            told.setdefault(each[0], []).append(each)
        found = []
        for name, ranks in told.items():
            ended = [version.ended[each] for each in ranks]
            is_staged = version.staged.issuperset(
                each for each in ranks if version.ended[each] is None
            )
            has_failed = any(each is not None and each.error for each in ended)
            lacks_ranks = len(ranks) < version.num_ranks[name] and not has_failed
            if None in ended and (lacks_ranks or not is_staged):
                found.append(name)
        return sorted(found)

    def results(self, id: PublishId) -> list[Result]:
        """Return one result for each engine that was told and is not missing, or was refused."""
        if id != self._newest:
            return []
        engines: dict[str, list[Result]] = {}
        for name, rank in sorted(self._version.ended):
            if (result := self._version.ended[name, rank]) is not None:
                engines.setdefault(name, []).append(result)
        for name in self.missing(id):
            engines.pop(name, None)
        found = [self._joined(name, ranks) for name, ranks in engines.items()]
        return [*found, *self._version.refused.values()]

    def _joined(self, name: str, ranks: list[Result]) -> Result:
        result, num_ranks = Result.joined(ranks), self._version.num_ranks[name]
        if result.error or len(ranks) >= num_ranks:
            return result
        text = f"PeerLost: {len(ranks)} of {num_ranks} ranks of {name!r} asked for the version"
        return msgspec.structs.replace(result, error=text)

    # How both meet.

    def _tell(self, reader: int, kind: str) -> None:
        me, version = self._readers[reader], self._version
        place, order, ended = me.place, version.order, version.ended
        if place and place not in order and len(order) < MAX_PLACES:
            order[place] = len(order)
            version.hosts.setdefault(kind, {}).setdefault(me.host, []).append(place)
        if self._is_newest(reader, place):
            version.serving.pop(place, None)
            if place in version.hosts.get(kind, {}).get(me.host, ()):
                version.serving[place] = False
        if self._is_newest(reader, me.member) and (me.member in ended or len(ended) < MAX_PLACES):
            ended[me.member], version.num_ranks[me.name] = None, me.num_ranks
            version.staged.discard(me.member)
            for each in (self._refused, version.refused):
                each.pop(me.name, None)

    def _holders(self, reader: int, kind: str) -> tuple[Endpoint, ...]:
        """Return the places where a reader may fetch, all told before its own, best first."""
        me, version = self._readers[reader], self._version
        at = version.order.get(me.place, len(version.order))
        if at >= MAX_PLACES:
            return ()
        hosts = version.hosts.get(kind, {})
        line = list(hosts)
        number = line.index(me.host) if me.host in hosts else len(line) if me.place else 0
        above = reversed(line[number - number % CHAIN_HOSTS : number])
        complete = (
            each for host in reversed(line) for each in hosts[host] if version.serving.get(each)
        )
        found: list[Endpoint] = []
        for place in chain(hosts.get(me.host, ()), (hosts[host][0] for host in above), complete):
            is_serving = place in version.serving
            if is_serving and version.order[place] < at and place not in found:
                assert place is not None
                found.append(place)
            if len(found) == MAX_HOLDERS:
                break
        return tuple(found)

    def _is_newest(self, reader: int, key: Place | tuple[str, int]) -> bool:
        return self._at[key][-1] == reader
