"""The messages between the ranks of one publisher: rank 0 leads, the others follow.

When the ranks meet, each tells rank 0 what it holds (`Holding`), and rank 0 invites them all
(`Invitation`). Then each follower connects as a replica does, with the role 'source' in its
`Hello`. In a publish it sends `Ready`, `HoldsCopy`, `Offered`, `Filled`, and `Fault` if it cannot
continue; rank 0 sends `Hold`, `Start`, `Emptied`, `Going`, `Released` and `Ended`.
"""

from __future__ import annotations

import msgspec

from flyweight.digest import DigestKind
from flyweight.errors import FlyweightError
from flyweight.live.messages import Emptied, Filled, Memory, Message
from flyweight.live.report import PublishReport
from flyweight.plans.tables import Boxes, Table, Tensors
from flyweight.spec.manifest import Leaf
from flyweight.transports.shared_memory import SharedMemoryHandle


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Follower: what it holds of the model."""

    tensors: Tensors
    """As a whole, over all ranks."""
    tied: dict[str, str]
    values: dict[str, Leaf]
    boxes: Boxes
    places: tuple[str, ...]
    """The devices that occur: the uuid of a GPU, or "" for the host."""
    place: bytes
    """The index of the device of each block."""
    settings: str
    """The options that must be the same on all ranks, as text."""


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0: where it listens, and what followers need to join it."""

    address: str
    token: str
    session: str
    num_dims: int
    """The number of dims of all tables."""


class ShareTable(Table, frozen=True):
    """The copies for a replica that read blocks of one follower."""

    number: int
    num_dims: int
    block: bytes
    """The block of each copy, as the follower numbers it."""
    offset: bytes
    shape: bytes
    source: bytes
    """The number that the replica knows the block by."""
    places: tuple[str, ...]
    place: bytes
    """The index of the device that each copy writes to."""
    devices: tuple[str, ...]
    """The GPUs that the replica's process sees."""
    engine: str
    """What a replica on another host reads by; "" for one on the publisher's host."""


class Ready(Message, frozen=True):
    """Follower: publishes a version, and does not change its model from now on.

    Rank 0 answers each with one `Ended`; what comes before the `Ended` of an earlier one is late.
    """

    version: int
    values: dict[str, Leaf]
    has_new_tensors: bool
    """True if the memory that it has offered so far is no longer that of its model."""
    kind: str = ""
    text: str = ""
    """The class and the text of the error that keeps it from publishing; empty if there is none."""


class Hold(Message, frozen=True):
    """Rank 0: copy the model to shared memory, for replicas that ask between two publishes."""

    version: int
    timeout_seconds: float


class HoldsCopy(Message, frozen=True):
    """Follower: has copied its blocks, one after the other, each at a multiple of 512 bytes."""

    version: int
    handle: SharedMemoryHandle
    digests: bytes
    """The digest of each block, if they are known."""
    digest_seconds: float


class StartedShare(Table, frozen=True):
    """A share that a round needs."""

    number: int
    digest_kind: DigestKind
    known_lists: int
    """The number of the memory that was offered for it last; 0 if none was."""
    table: ShareTable | None
    """None if it was sent before, and is one of those that both sides remember."""


class Start(Message, frozen=True):
    """Rank 0: a round begins; offer memory and digests for these shares."""

    round: int
    version: int
    shares: tuple[StartedShare, ...]
    timeout_seconds: float


class ShareOffer(Table, frozen=True):
    """What a rank offers for one share."""

    strategy: str
    """The lanes in use, as text."""
    is_mapped: bool
    """True if the replica reads the memory of the model itself."""
    lists: int
    """The number of `memory`."""
    memory: Memory | None
    """None if it was offered before, or if there is an error."""
    digests: bytes
    """The digest of each copy, 64 bits each; empty if nothing is verified."""
    error: str = ""
    """Why the transport is impossible for this replica."""


class Offered(Message, frozen=True):
    """Follower: its offer for each share of a round."""

    round: int
    offers: tuple[ShareOffer, ...]
    digest_seconds: float


class Released(Message, frozen=True):
    """Rank 0: nobody reads the model any more."""

    version: int


class Ended(Message, frozen=True):
    """Rank 0: the publish is over."""

    report: PublishReport
    error: FlyweightError | None = None
    """What ended the publish, if it failed; the report is empty then."""
    last: int | None = None
    """The version that was published last, if it changes: also if only some replicas have it."""


FromFollower = Ready | Offered | HoldsCopy | Filled
FromLeader = Hold | Start | Emptied | Released | Ended
