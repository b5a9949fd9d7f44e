"""Holders: replicas that serve the newest version, for one that asks between two publishes."""

from __future__ import annotations

from collections.abc import Iterable

from flyweight.live.member import Member
from flyweight.plans.fanout import Holder, nearest

MAX_ADDRESSES = 4
"""How many are named at most: each one that does not answer costs the replica some seconds."""
MAX_ADDRESS_CHARS = 300


def addresses_elsewhere(
    asker: Member,
    version: int | None,
    members: Iterable[Member],
    *,
    only_near: bool,
    is_remote: bool,
) -> list[str]:
    """Return where a replica can take the newest version, the nearest first; maybe nowhere.

    version: the newest version.
    only_near: only replicas on its own host count, since the publisher can give the version too.
    is_remote: whether it is on another host than the publisher.
    """
    request, host = asker.request, asker.hello.host
    if request is None or not request.may_be_elsewhere or asker.hello.num_ranks > 1:
        return []
    if version is None or request.version not in (None, version) or request.have == version:
        return []
    if only_near and not is_remote:
        return []
    found = []
    for each in members:
        address, is_near = each.hello.serves_at, bool(host) and each.hello.host == host
        is_free = each.version == version and each.round is None and each is not asker
        is_reachable = is_near or (address.startswith("tcp:") and not only_near)
        if is_free and is_reachable and 0 < len(address) <= MAX_ADDRESS_CHARS:
            found.append(Holder(address, each.hello.host, "replica"))
    return [each.name for each in nearest(found, host)][:MAX_ADDRESSES]
