"""The messages between a publisher and its replicas: their types, encoding and limits.

Each message is one frame: two magic bytes, the protocol's number, then msgpack. The number
is outside of the msgpack, so that two versions of the library can still tell each other
that they differ. A class has the name and the fields that its message has on the wire;
`docs/protocol.md` describes the conversation.
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
_MAGIC = b"fw"

Handle = SharedMemoryHandle | CudaIpcHandle
Numbers = tuple[int, ...]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole tensor: its name, dtype and shape."""

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
    """A box of a tensor, in elements, and its device: a GPU's uuid, or "" for the host."""

    tensor: int
    """The tensor's index in the list of tensors in the same message."""
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
    """Items of one of the publisher's blocks, and where they go in one of the replica's."""

    source: int
    sink: int
    source_offset: Numbers
    sink_offset: Numbers
    shape: Numbers


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a replica can map one of the publisher's blocks; strides are in bytes."""

    source: int
    handle: Handle
    start: int
    """The byte of the offered memory at which the first item starts."""
    strides: Numbers


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Items of one of the publisher's blocks, in row-major order from byte `at` of a bucket."""

    source: int
    offset: Numbers
    shape: Numbers
    at: int


class Bucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The contents of a bucket, and the slot that it arrives in."""

    number: int
    slot: int
    pieces: tuple[Piece, ...]


class Hello(_Message, frozen=True):
    """Replica: joins, with the token that proves it may."""

    token: str
    name: str
    pid: int
    line: str = ""
    """The name of its connection for files, by which the publisher learns of its death."""
    is_watcher: bool = False


class Welcome(_Message, frozen=True):
    """Publisher: who it is and which tensors it has."""

    session: str
    pid: int
    started: int
    """When its process started, in clock ticks since boot; 0 if the kernel does not say."""
    tensors: tuple[Tensor, ...]
    tied: dict[str, str]
    silence_seconds: float
    """Both sides give up a peer that sends nothing for this long."""
    version: int | None


class Want(_Message, frozen=True):
    """Replica: the boxes that it wants, and the devices that they are on."""

    tensors: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    may_leave: bool
    """True if the publisher may have tensors that the replica does not want."""
    devices: tuple[str, ...] = ()
    """The uuids of the GPUs that its process sees, and whose memory it can map."""


class Agreed(_Message, frozen=True):
    """Publisher: the plan. Sources are boxes of its tensors, in elements."""

    sources: tuple[Block, ...]
    copies: tuple[Copy, ...]


class Refusal(_Message, frozen=True):
    """Publisher: rejects the replica, with the name of an error class and its text."""

    kind: str
    text: str


class Ask(_Message, frozen=True):
    """Replica: requests a version, or any that it does not have."""

    ask: int
    """The request's number, which only grows; a round names the request that it answers."""
    version: int | None
    have: int | None
    """The complete version that it holds from this publisher."""
    held: int | None = None
    """The complete version that it holds from any publisher; older snapshots are not offered."""
    may_keep: bool = False
    """True if `have` is enough, once the publisher confirms that it is what is requested."""


class Denied(_Message, frozen=True):
    """Publisher: the requested version will never come."""

    ask: int
    kind: str
    text: str


class Kept(_Message, frozen=True):
    """Publisher: confirms that the replica already has what it requests; nothing is sent."""

    ask: int


class Withdraw(_Message, frozen=True):
    """Replica: no longer waits for its request."""

    ask: int


class Begin(_Message, frozen=True):
    """Publisher: starts a round. Lists that are None are those of the last round."""

    round: int
    ask: int
    version: int
    parent: int | None
    origin: str
    strategy: str
    should_verify: bool
    digest_kind: DigestKind
    """How both sides compute digests: XXH3 if all memory is on the host."""
    digests: tuple[int, ...] | None
    """The expected digests, if they are known already: the replica can then commit by itself."""
    lists: int
    """The number of the three lists below; they were sent before if they are None."""
    places: tuple[Place, ...] | None
    slots: dict[int, Handle] | None
    buckets: tuple[Bucket, ...] | None
    values: dict[str, Leaf]


class Filled(_Message, frozen=True):
    """Publisher: a bucket is in its slot, ready to be read."""

    round: int
    bucket: int


class Emptied(_Message, frozen=True):
    """Replica: has read a bucket; its slot is free."""

    round: int
    bucket: int


class Going(_Message, frozen=True):
    """Publisher: the round goes on, it waits for other replicas."""

    round: int


class Copied(_Message, frozen=True):
    """Replica: everything is copied; the memory that it read may change."""

    round: int


class Done(_Message, frozen=True):
    """Replica: the digests of what it holds now, one for each copy."""

    round: int
    digests: tuple[int, ...]
    copy_seconds: float
    verify_seconds: float


class Commit(_Message, frozen=True):
    """Publisher: the digests are right, the replica holds the version."""

    round: int
    digests: tuple[int, ...]


class Abort(_Message, frozen=True):
    """Publisher: the round is over for this replica, without a commit."""

    round: int
    kind: str
    text: str


class Fault(_Message, frozen=True):
    """Replica: cannot continue; `is_touched` if its old version is partly overwritten."""

    round: int
    kind: str
    text: str
    is_touched: bool


class Tick(_Message, frozen=True):
    """Either side: heartbeat."""


class Bye(_Message, frozen=True):
    """Either side: disconnects, and says why."""

    text: str


class ReplicaNews(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The state of a replica, as its publisher knows it."""

    name: str
    pid: int
    state: str
    version: int | None
    nbytes: int
    seconds: float
    error: str


class News(_Message, frozen=True):
    """Publisher, to watchers: its state and that of its replicas."""

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
    return _MAGIC + bytes([PROTOCOL]) + _ENCODER.encode(message)


def decode_from_replica(frame: bytes) -> FromReplica:
    return _decode(_FROM_REPLICA, frame)


def decode_from_publisher(frame: bytes) -> FromPublisher:
    return _decode(_FROM_PUBLISHER, frame)


MessageT = TypeVar("MessageT")


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], frame: bytes) -> MessageT:
    """Return the message; raise PeerRefused for another protocol, else TransportError."""
    if frame[:2] != _MAGIC or len(frame) < 3:
        raise TransportError(
            f"{len(frame)} bytes that start with {frame[:8]!r} are not a message of flyweight"
        )
    if frame[2] != PROTOCOL:
        raise PeerRefused(
            f"the other side speaks protocol {frame[2]}, this one {PROTOCOL}; install the same "
            f"version of flyweight on both"
        )
    try:
        return decoder.decode(memoryview(frame)[3:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise TransportError(f"cannot decode a message of {len(frame)} bytes: {cause}") from cause
