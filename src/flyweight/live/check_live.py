"""Check live: compares digests of a version with what lies in an engine's memory, in place."""

from __future__ import annotations

from time import monotonic

import numpy as np

from flyweight.errors import PeerLost, TransferTimeout, VersionError
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Reader
from flyweight.live.report import LiveReport, LiveRow
from flyweight.live.rows import RowDigests, words_of
from flyweight.live.session import Session
from flyweight.spec.box import Box


def announced(front: Reader, version: int | None, deadline: float) -> PublishId:
    """Return the id of the newest version; wait until it is the one that is wanted."""
    while not front.channel.is_broken:
        newest = front.newest
        if newest is not None and (version is None or newest.version >= version):
            if version in (None, newest.version):
                return newest
            raise VersionError(
                f"version {version} is not at {front.channel.peer} any more, which has {newest}; "
                f"check that one, or take version {version} before it is withdrawn"
            )
        if not front.channel.wire.has_input(deadline=deadline):
            wanted = "a version" if version is None else f"version {version}"
            raise TransferTimeout(
                f"{wanted} did not come in time, {front.channel.peer} has {newest or 'none'}; "
                f"publish it, or give check_live a longer timeout_seconds"
            )
    raise PeerLost(f"{front.channel.peer} is gone; check again")


def compared(session: Session, id: PublishId, deadline: float) -> LiveReport:
    """Compare a version with what lies in the memory now, of which no byte is copied or changed."""
    started, (live, plan) = monotonic(), session.look()
    digests = session.digests(plan, id, deadline)
    if not all(digests.values()):
        raise VersionError(f"{id} has no digests to compare; publish with verify=True")
    live.synchronize(max(deadline - monotonic(), 0.001))
    boxes, catalog = plan.wanted.boxes, session.catalog
    is_equal = np.ones(len(boxes), bool)
    parts: list[list[int]] = [[] for _ in range(len(boxes))]
    for rank, stream in plan.streams.items():
        wanted = words_of(digests[rank])
        found, _ = RowDigests(stream.in_sink(live.table), plan.digest).run(deadline)
        is_equal[stream.sink[found != wanted]] = False
        for row, digest in zip(stream.sink.tolist(), wanted.tolist(), strict=True):
            parts[row].append(digest)
    rows = []
    for row, number in enumerate(boxes.tensor.tolist()):
        spec, box = catalog.tensors[catalog.names[number]], boxes.box(row)
        extra = boxes.num_dims - len(spec.shape)
        box = spec.elements(Box(box.offset[extra:], box.shape[extra:]))
        rows.append(LiveRow(catalog.names[number], box, bool(is_equal[row]), tuple(parts[row])))
    return LiveReport(id.version, id.session, plan.nbytes, monotonic() - started, tuple(rows))
