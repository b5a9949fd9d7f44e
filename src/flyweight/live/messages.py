"""The messages between a reader and a holder, after the reader has proved the token.

`docs/protocol.md` has a table of what is sent when, and of the answers. Besides these, the holder
may send `Refused` instead of any answer, and `Ended` before it closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from flyweight.digest import DigestKind
from flyweight.live.publish_id import PublishId
from flyweight.plans.tables import Boxes, Table, Tensors
from flyweight.ports import UpdateReport
from flyweight.spec.manifest import Leaf
from flyweight.spec.strict_json import Number
from flyweight.transports.address import Endpoint
from flyweight.transports.channel import Message, Messages
from flyweight.transports.device_segments import DeviceHandle
from flyweight.transports.segments import Places

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
"""How long something may take: never NaN, a deadline that no clock reaches."""
Text = Annotated[str, msgspec.Meta(max_length=512)]
Key = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class Join(Message, frozen=True):
    """The first message."""

    name: Text
    pid: int
    rank: int
    num_ranks: int
    host: Text
    serves_at: Endpoint | None
    """Where others may fetch what this reader has."""
    session: Text
    """The session that the reader is in; "" for its first connection, which gets the catalog."""


class CatalogTable(Table, frozen=True):
    """All tensors, and the blocks that the ranks of the trainer hold of them."""

    tensors: Tensors
    tied: dict[str, str]
    blocks: Boxes
    rank: bytes
    """The rank that holds each block."""
    devices: tuple[str, ...]
    """The devices that occur: the uuid of a GPU, or "" for the host."""
    device: bytes
    """The index of the device of each block."""


class Welcome(Message, frozen=True):
    session: str
    catalog: CatalogTable | None
    """None if the reader is in the session already."""
    here: Endpoint
    """Where readers on the same host find this holder, to map its memory."""
    ranks: tuple[Endpoint, ...]
    """Where the trainer's ranks are; empty if this holder is not the trainer."""
    newest: PublishId | None
    nixl: Text = ""
    """What readers need to pull by NIXL; "" if they cannot."""


class Want(Message, frozen=True):
    boxes: Boxes
    dtypes: tuple[str, ...]
    dtype: bytes
    """The dtype of each box at the reader, as an index; empty if all are the trainer's."""
    devices: tuple[str, ...]
    device: bytes
    """The index of the device of each box, as in the catalog."""
    digest: DigestKind


class Declined(Message, frozen=True):
    """The reader cannot take this model, for a reason that the trainer's report gives."""

    text: str


class Planned(Message, frozen=True):
    kind: str
    """A hash of the plan that the holder has worked out; the reader compares it with its own."""


class Wait(Message, frozen=True):
    """Wait for a version: that of an id, or of a number, or else any other than `have`."""

    id: PublishId | None
    version: int | None
    have: PublishId | None
    may_keep: bool
    """Answer at once if `have` is the newest."""
    seconds: Seconds


class Available(Message, frozen=True):
    id: PublishId
    parent: int | None
    """The version that was published before."""
    values: dict[str, Leaf]
    """What is no tensor."""
    holders: tuple[Endpoint, ...] = ()
    """Other readers of this kind that have the version or fetch it, best first."""


class Current(Message, frozen=True):
    """What the reader has is enough."""


class Cancel(Message, frozen=True):
    """Answer the `Wait` that is open now."""


class Announced(Message, frozen=True):
    id: PublishId


class Lease(Message, frozen=True):
    id: PublishId
    kinds: tuple[str, ...]
    rank: int
    """The source rank whose blocks are to be read."""
    can_map: bool
    layouts: tuple[str, ...]
    """The layouts that the reader has mapped."""
    seconds: Seconds
    """How long to wait for a version that is on its way to the holder."""
    can_pull: bool = False
    """Whether ranges are to be pulled by NIXL."""


class Layout(Message, frozen=True):
    """Memory to be mapped."""

    segments: tuple[DeviceHandle | int, ...]
    """A handle, which says how many of the files it takes, or the bytes of one file."""
    places: Places


class Leased(Message, frozen=True):
    id: PublishId
    rank: int
    seconds: Seconds
    """How long the holder keeps the memory still, at least."""
    digests: tuple[bytes, ...]
    """For each kind, the digest of each of its rows; empty if the trainer does not verify."""
    overflows: tuple[int, ...]
    """For each kind, how many finite values became infinite by casts."""
    layout: str
    """Names the memory to be mapped; "" if the reader must fetch the bytes."""
    mapped: Layout | None
    """None if the reader has mapped the layout already."""


class Read(Message, frozen=True):
    kind: str
    start: int
    nbytes: int
    seconds: Seconds
    """How long to wait for bytes that are on their way to the holder."""
    slot: int | None = None
    """The reader can pull the bytes, and now pulls nothing from this slot of its own."""


class Data(Message, frozen=True):
    """The bytes follow, without a frame."""


class Pull(Message, frozen=True):
    """The bytes lie where NIXL finds them, until the lease ends or the slot is used again."""

    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=64)]
    pieces: Annotated[tuple[tuple[Number, Number], ...], msgspec.Meta(max_length=1024)]
    """Addresses there, and numbers of bytes."""


class Later(Message, frozen=True):
    """The bytes did not arrive in time. A reader asks again only if the holder makes progress."""

    arrived_bytes: int


class Fill(Message, frozen=True):
    """Write the leased stream of a kind to memory of the reader, from its beginning.

    The open file of the memory comes with it, unless it is the one that was filled last.
    """

    kind: str
    nbytes: int
    """The size of the memory."""
    seconds: Seconds


class TakeRing(Message, frozen=True):
    """Let the leased stream come through a ring on a device."""

    device: Text
    seconds: Seconds


class Ringed(Message, frozen=True):
    """The ring is this reader's until its lease ends."""

    segment: DeviceHandle


class Pack(Message, frozen=True):
    """Write a bucket of the leased stream of a kind to its slot of the ring."""

    kind: str
    bucket: int
    seconds: Seconds


class Release(Message, frozen=True):
    """End the lease. As a request: did it run until now?"""

    seconds: Seconds


class Confirmed(Message, frozen=True):
    """What was asked for is done.

    After `Fill` and `Pack` the bytes are there, and nothing more is written there for this request.
    After `Release` the lease ran until now: all that was read is the version.
    """


class Staged(Message, frozen=True):
    """The reader has all of the version; it needs nobody any more."""

    id: PublishId


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
        times = [each for each in cls.__struct_fields__ if each.endswith("seconds")]
        return cls(
            ranks[0].name,
            ranks[0].pid,
            nbytes=sum(each.nbytes for each in ranks),
            transport="+".join(sorted({each.transport for each in ranks if each.transport})),
            overflows=sum(each.overflows for each in ranks),
            error=next((each.error for each in ranks if each.error), ""),
            is_touched=any(each.is_touched for each in ranks),
            **{time: max(getattr(each, time) for each in ranks) for time in times},
        )


class Done(Message, frozen=True):
    """How an update ended."""

    id: PublishId
    result: Result


class Post(Message, frozen=True):
    """Keep a text for the other ranks of an engine or of the trainer.

    Without a text, ask for it; the answer is a `Post`, too.
    """

    key: Text
    text: Text | None = None


class Watch(Message, frozen=True):
    """Send news whenever something changes."""


class ReplicaNews(Table, frozen=True):
    """A replica, as the front knows it."""

    name: str
    rank: int
    pid: int
    state: str = "EMPTY"
    version: int | None = None
    seconds: Seconds = 0.0
    """How long its last update took."""
    error: str = ""


class News(Message, frozen=True):
    version: int | None
    state: str
    replicas: tuple[ReplicaNews, ...]


MESSAGES = Messages(
    Join, Welcome, Want, Declined, Planned, Wait, Available, Current, Cancel, Announced, Lease,
    Leased, Read, Data, Pull, Later, Fill, TakeRing, Ringed, Pack, Release, Confirmed, Staged,
    Done, Post, Watch, News,
)  # fmt: skip
