"""The offers of all source ranks for one replica, joined: it sees one list of blocks and buckets.

The buckets and slots of the ranks are numbered in turn: of three ranks, bucket 4 of rank 1 is
number 13 to the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from flyweight.digest import DigestKind
from flyweight.errors import FlyweightError, PeerFailed, PlanError
from flyweight.live.bucket_slots import new_memory_number
from flyweight.live.messages import Handle, Memory
from flyweight.live.rank_messages import ShareOffer
from flyweight.live.source_blocks import Agreement
from flyweight.memory_table import Integers
from flyweight.plans.tables import Pieces, Places, numbers, packed_columns


@dataclass(frozen=True, eq=False)
class RoundOffer:
    """What all source ranks offer one replica for a round."""

    strategy: str
    is_mapped: bool
    """True if the replica reads the memory of this process's model itself."""
    lists: int
    """The number of `memory`."""
    memory: Memory
    digest_kind: DigestKind
    digests: bytes
    error: FlyweightError | None = None
    """Why the replica cannot be served."""


class JoinedOffers:
    """Joins the offers of all ranks for each replica; keeps the memory that was joined last."""

    def __init__(self, num_ranks: int, num_dims: int, should_verify: bool) -> None:
        self._num_ranks, self._num_dims = num_ranks, num_dims
        self._should_verify = should_verify
        self._last: WeakKeyDictionary[Agreement, tuple[object, int, Memory]] = WeakKeyDictionary()

    def join(
        self,
        agreement: Agreement,
        parts: Mapping[int, ShareOffer],
        kind: DigestKind,
        memory_of: Callable[[int, Agreement], Memory],
        *,
        is_shared: bool,
    ) -> RoundOffer:
        """Return the offers of all ranks for one replica as one.

        memory_of: returns what a rank has offered before, if it offers the same again.
        is_shared: whether each rank offers its own share, or one all of them.
        """
        errors = [each.error for each in parts.values() if each.error]
        lanes = {lane for each in parts.values() for lane in each.strategy.split("+")}
        strategy = "+".join(sorted(lanes - {"nothing"})) or "nothing"
        if errors:
            nothing = joined_memory({}, self._num_ranks, self._num_dims)
            return RoundOffer("nothing", False, 0, nothing, kind, b"", PlanError(errors[0]))
        if self._num_ranks == 1:
            (each,) = parts.values()
            assert each.memory is not None
            return RoundOffer(strategy, each.is_mapped, each.lists, each.memory, kind, each.digests)
        key = tuple((rank, each.lists) for rank, each in parts.items())
        last = self._last.get(agreement)
        if last is None or last[0] != key:
            memories = {
                rank: each.memory or memory_of(rank, agreement) for rank, each in parts.items()
            }
            memory = joined_memory(memories, self._num_ranks, self._num_dims)
            last = self._last[agreement] = key, new_memory_number(), memory
        count, digests = len(agreement.whole.source), b""
        if self._should_verify:
            shared = {rank: rows for rank, (rows, _) in agreement.shares.items()}
            digests = joined_digests(parts, shared if is_shared else {0: np.arange(count)}, count)
        is_mapped = 0 in parts and parts[0].is_mapped
        return RoundOffer(strategy, is_mapped, last[1], last[2], kind, digests)


def joined_digests(
    parts: Mapping[int, ShareOffer], rows: Mapping[int, Integers], num_copies: int
) -> bytes:
    """Return the digest of each copy; `rows` has the numbers of the copies of each rank."""
    digests = np.zeros(num_copies, np.uint64)
    for rank, each in parts.items():
        if len(each.digests) != 8 * len(rows[rank]):
            raise PeerFailed(f"source rank {rank} has digested other copies")
        digests[rows[rank]] = np.frombuffer(each.digests, np.uint64)
    return digests.tobytes()


def joined_memory(memories: Mapping[int, Memory], num_ranks: int, num_dims: int) -> Memory:
    """Return the memory of all ranks as one."""
    handles: list[Handle] = []
    slots: dict[int, Handle] = {}
    bucket_slots: dict[int, int] = {}
    places, pieces = [], []
    for rank, memory in memories.items():
        place, piece = memory.places, memory.pieces
        places.append(
            (
                numbers(place.source),
                numbers(place.handle) + len(handles),
                numbers(place.start),
                numbers(place.strides, num_dims),
            )
        )
        pieces.append(
            (
                numbers(piece.bucket) * num_ranks + rank,
                numbers(piece.source),
                numbers(piece.offset, num_dims),
                numbers(piece.shape, num_dims),
                numbers(piece.at),
            )
        )
        handles += memory.handles
        slots |= {slot * num_ranks + rank: handle for slot, handle in memory.slots.items()}
        bucket_slots |= {
            bucket * num_ranks + rank: slot * num_ranks + rank
            for bucket, slot in memory.bucket_slots.items()
        }
    return Memory(
        tuple(handles),
        Places(num_dims, *packed_columns(4, places)),
        slots,
        bucket_slots,
        Pieces(num_dims, *packed_columns(5, pieces)),
    )
