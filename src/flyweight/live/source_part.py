"""What one process offers of a published version: memory and digests for the shares of replicas.

A publisher with one rank has one part. With many ranks, each has its own, and rank 0 joins the
offers of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

from flyweight.digest import DigestKind
from flyweight.errors import FlyweightError, PlanError
from flyweight.live.bucket_slots import BucketSlots, Fill
from flyweight.live.lanes import ENGINES, MAPPED, NETWORK, Lanes, TransportChoice, lane_names
from flyweight.live.published_model import DigestKey, PublishedVersion
from flyweight.live.rank_messages import ShareOffer
from flyweight.live.source import Share


@dataclass(frozen=True)
class WantedShare:
    """A share that a round needs."""

    share: Share
    digest_kind: DigestKind
    known_lists: int
    """The number of the memory that was offered for it before; 0 if none was."""


def offer_shares(
    version: PublishedVersion,
    wanted: Sequence[WantedShare],
    slots: BucketSlots,
    *,
    transport: TransportChoice,
    should_verify: bool,
    deadline: float,
) -> tuple[list[ShareOffer], float]:
    """Return an offer for each share, and the seconds that were spent on digests.

    Digests come before the copies, so that a write between them is detected.
    """
    lanes: dict[Share, Lanes] = {}
    errors: dict[Share, str] = {}
    for each in wanted:
        try:
            lanes[each.share] = version.offers.lanes(each.share, transport)
        except PlanError as error:  # the transport is impossible for this replica only
            errors[each.share] = str(error)
    slots.lay_out(version.source, lanes)
    started = perf_counter()
    found: Mapping[DigestKey, bytes] = {}
    if should_verify:
        keys = [(each.share, each.digest_kind) for each in wanted if each.share in lanes]
        found = version.digests_of(keys, deadline)
    digest_seconds = perf_counter() - started
    offers = []
    for each in wanted:
        share = each.share
        if share in errors:
            offers.append(ShareOffer("nothing", False, 0, None, b"", errors[share]))
            continue
        try:
            offered = slots.offer(share, lanes[share], version.offers)
        except FlyweightError as error:
            if share.engine not in ENGINES:
                raise
            offers.append(ShareOffer("nothing", False, 0, None, b"", str(error)))
            continue  # the engine's process does not start, or has just ended
        is_known = offered.number == each.known_lists
        offers.append(
            ShareOffer(
                lane_names(lanes[share], share.engine),
                MAPPED in lanes[share] or NETWORK in lanes[share],
                offered.number,
                None if is_known else offered.memory,
                found.get((share, each.digest_kind), b""),
            )
        )
    return offers, digest_seconds


def fill_in_turn(
    fills: Sequence[Fill],
    *,
    is_needed: Callable[[int], bool],
    is_empty: Callable[[int], bool],
    wait_empty: Callable[[int], None],
    on_filled: Callable[[int], None],
    timeout_seconds: float,
) -> None:
    """Fill each bucket once its slot is free; devices fill one while the last is finished.

    is_needed, is_empty: whether a replica still needs a bucket; whether all have emptied it.
    wait_empty: returns once all have emptied a bucket, or raises.
    """

    def finish(fill: Fill) -> None:
        fill.run(monotonic() + timeout_seconds)
        on_filled(fill.number)

    in_slot: dict[int, int] = {}
    started: Fill | None = None
    for fill in fills:
        before = in_slot.get(fill.slot)
        is_free = before is None or is_empty(before)
        if started is not None and (started.slot == fill.slot or not is_free):
            finish(started)
            started = None
        if before is not None:
            wait_empty(before)
        if not is_needed(fill.number):
            continue
        in_slot[fill.slot] = fill.number
        fill.start()
        if started is not None:
            finish(started)
        started = fill
    if started is not None:
        finish(started)
