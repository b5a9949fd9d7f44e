"""Messages: all that publisher and replica say to each other, typed and bounded.

Each is one frame: the mark, the protocol's number, then msgpack. The number stands
outside of what it speaks of, so that two versions of this library can still tell
each other that they differ. `docs/protocol.md` tells the conversation.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from flyweight.digest import DigestKind
from flyweight.errors import PeerRefused, SpecError, TransportError
from flyweight.spec.box import Box
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import MAX_DIMS, MAX_NAME_CHARS, Leaf, TensorSpec
from flyweight.transports.cuda_ipc import CudaIpcHandle
from flyweight.transports.shared_memory import SharedMemoryHandle

PROTOCOL = 3
MAX_MESSAGE_BYTES = 256 << 20
_MARK = b"fw"

Handle = SharedMemoryHandle | CudaIpcHandle
Numbers = tuple[int, ...]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A name and what it is, whole."""

    name: str
    dtype: str
    shape: Numbers

    @classmethod
    def of(cls, name: str, spec: TensorSpec) -> Tensor:
        return cls(name, spec.dtype.name, spec.shape)

    def spec(self) -> TensorSpec:
        if len(self.name) > MAX_NAME_CHARS or not self.name.isprintable():
            raise SpecError(f"name {self.name[:80]!r} has {len(self.name)} characters")
        return TensorSpec(dtype_named(self.dtype), self.shape)


class Block(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box of a tensor, in elements, and where it lies: a GPU's uuid, or "" for the host."""

    tensor: int
    """Its number in the list of tensors that comes with it."""
    offset: Numbers
    shape: Numbers
    place: str = ""

    def box(self) -> Box:
        if len(self.offset) != len(self.shape) or len(self.shape) > MAX_DIMS:
            raise SpecError(f"box of {len(self.shape)} dims at {self.offset}")
        if min((*self.offset, *self.shape), default=0) < 0:
            raise SpecError(f"box {self.shape} at {self.offset} is negative")
        return Box(self.offset, self.shape)


class Copy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Items of a block of the publisher, and of the replica's block that they go to."""

    source: int
    sink: int
    source_offset: Numbers
    sink_offset: Numbers
    shape: Numbers


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a block of the publisher can be read: items in an offered span, strides in bytes."""

    source: int
    handle: Handle
    start: int
    """Where in the span its first item stands."""
    strides: Numbers


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Items of a block of the publisher, row-major at byte `at` of a bucket."""

    source: int
    offset: Numbers
    shape: Numbers
    at: int


class Bucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What will be in a bucket, and in which slot it will come."""

    number: int
    slot: int
    pieces: tuple[Piece, ...]


class Hello(_Message, frozen=True):
    """Replica: here I am."""

    token: str
    name: str
    pid: int
    line: str = ""
    is_watcher: bool = False


class Welcome(_Message, frozen=True):
    """Publisher: this is what I have."""

    session: str
    pid: int
    started: int
    """When its process started, in clock ticks since boot; 0 if its kernel does not say."""
    tensors: tuple[Tensor, ...]
    tied: dict[str, str]
    silence_seconds: float
    """Who is not heard of for so long is given up, by both sides."""
    version: int | None


class Want(_Message, frozen=True):
    """Replica: this is what I want of it, and where it lies here."""

    tensors: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    may_leave: bool
    """True if there may be tensors that it does not want."""
    devices: tuple[str, ...] = ()
    """The uuids of the GPUs that it sees, and could map memory of."""


class Agreed(_Message, frozen=True):
    """Publisher: so you get it. Sources are boxes of its tensors, in elements."""

    sources: tuple[Block, ...]
    copies: tuple[Copy, ...]


class Refusal(_Message, frozen=True):
    """Publisher: we do not fit."""

    kind: str
    text: str


class Ask(_Message, frozen=True):
    """Replica: I am ready for this version, or for any that I do not have."""

    ask: int
    """A number that grows; a round says which ask it answers."""
    version: int | None
    have: int | None
    """What it holds whole, of this publisher."""
    held: int | None = None
    """What it holds whole, of whichever: a snapshot that is older is no news."""
    may_keep: bool = False
    """True if `have` is enough, once the publisher says that it is what is asked for."""


class Denied(_Message, frozen=True):
    """Publisher: that you will never get."""

    ask: int
    kind: str
    text: str


class Kept(_Message, frozen=True):
    """Publisher: the version that you have is the one you ask for; nothing has to be sent."""

    ask: int


class Withdraw(_Message, frozen=True):
    """Replica: I no longer wait."""

    ask: int


class Begin(_Message, frozen=True):
    """Publisher: a round starts. Lists are those of the last round where they are None."""

    round: int
    ask: int
    version: int
    parent: int | None
    origin: str
    strategy: str
    should_verify: bool
    digest_kind: DigestKind
    """How both sides make digests: by XXH3 where all memory is the host's."""
    digests: tuple[int, ...] | None
    """Where they are known already and nothing is to come, the replica can end by itself."""
    lists: int
    """The number of the three lists; sent before if they are None."""
    places: tuple[Place, ...] | None
    slots: dict[int, Handle] | None
    buckets: tuple[Bucket, ...] | None
    values: dict[str, Leaf]


class Filled(_Message, frozen=True):
    """Publisher: a bucket is in its slot."""

    round: int
    bucket: int


class Emptied(_Message, frozen=True):
    """Replica: and out of it."""

    round: int
    bucket: int


class Going(_Message, frozen=True):
    """Publisher: it is not over; others keep me waiting."""

    round: int


class Copied(_Message, frozen=True):
    """Replica: all is copied; what was read may change."""

    round: int


class Done(_Message, frozen=True):
    """Replica: these are the digests of what I hold now, copy by copy."""

    round: int
    digests: tuple[int, ...]
    copy_seconds: float
    verify_seconds: float


class Commit(_Message, frozen=True):
    """Publisher: they are the right ones; the version is yours."""

    round: int
    digests: tuple[int, ...]


class Abort(_Message, frozen=True):
    """Publisher: the round is over, and nothing came of it for you."""

    round: int
    kind: str
    text: str


class Fault(_Message, frozen=True):
    """Replica: I cannot go on."""

    round: int
    kind: str
    text: str
    is_touched: bool


class Tick(_Message, frozen=True):
    """Either: I live."""


class Bye(_Message, frozen=True):
    """Either: I go."""

    text: str


class ReplicaNews(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a replica stands, as its publisher knows it."""

    name: str
    pid: int
    state: str
    version: int | None
    nbytes: int
    seconds: float
    error: str


class News(_Message, frozen=True):
    """Publisher, to watchers: how things stand."""

    version: int | None
    round: int
    state: str
    nbytes: int
    seconds: float
    strategy: str
    replicas: tuple[ReplicaNews, ...]


FromReplica = Hello | Want | Ask | Withdraw | Emptied | Copied | Done | Fault | Tick | Bye
FromPublisher = (
    Welcome
    | Agreed
    | Refusal
    | Denied
    | Kept
    | Begin
    | Filled
    | Going
    | Commit
    | Abort
    | Tick
    | Bye
    | News
)
Message = FromReplica | FromPublisher

_ENCODER = msgspec.msgpack.Encoder()
_FROM_REPLICA: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(FromReplica)
_FROM_PUBLISHER: msgspec.msgpack.Decoder[FromPublisher] = msgspec.msgpack.Decoder(FromPublisher)


def encode(message: Message) -> bytes:
    return _MARK + bytes([PROTOCOL]) + _ENCODER.encode(message)


def decode_from_replica(frame: bytes) -> FromReplica:
    return _decode(_FROM_REPLICA, frame)


def decode_from_publisher(frame: bytes) -> FromPublisher:
    return _decode(_FROM_PUBLISHER, frame)


MessageT = TypeVar("MessageT")


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], frame: bytes) -> MessageT:
    """Return the message; raise PeerRefused for another protocol, TransportError for garbage."""
    if frame[:2] != _MARK or len(frame) < 3:
        raise TransportError(f"{len(frame)} bytes that start with {frame[:8]!r} are no message")
    if frame[2] != PROTOCOL:
        raise PeerRefused(
            f"the other side speaks protocol {frame[2]}, this one {PROTOCOL}; install the same "
            f"version of flyweight on both"
        )
    try:
        return decoder.decode(memoryview(frame)[3:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise TransportError(f"{len(frame)} bytes are no message: {cause}") from cause
