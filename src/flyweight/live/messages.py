"""The messages between a publisher and its replicas.

A class has the name and the fields that its message has on the wire; `docs/protocol.md` describes
the conversation, and `frames.py` how a message becomes bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from flyweight.digest import DigestKind
from flyweight.plans.tables import Boxes, Pieces, Places, Table, Tensors
from flyweight.spec.manifest import Leaf
from flyweight.transports.cuda_ipc import CudaIpcHandle
from flyweight.transports.engine_reads import EngineHandle
from flyweight.transports.network import NetworkHandle
from flyweight.transports.network_engines import Engines
from flyweight.transports.shared_memory import SharedMemoryHandle

RemoteHandle = NetworkHandle | EngineHandle
"""Memory of another host, which is read and not mapped."""
Handle = SharedMemoryHandle | CudaIpcHandle | RemoteHandle


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(Message, frozen=True):
    """Replica: joins, with the token that proves it may."""

    token: str
    """From another host, a proof that it knows the token, for this session and `line`."""
    name: str
    pid: int
    line: str = ""
    """The name of its connection for files, by which the publisher learns of its death."""
    role: Literal["replica", "watcher", "source"] = "replica"
    """A watcher only gets the news; a source is another rank of the publisher itself."""
    rank: int = 0
    """Which of the ranks it is, of its replica or of the publisher."""
    num_ranks: int = 1
    decisions: str = ""
    """The id of the directory where a replica of several ranks stores what is decided for all."""
    host: str = ""
    """An id of its host; those of one host read from each other first."""
    can_forward: bool = False
    """True if other replicas can read from its staging."""
    serves_at: str = ""
    """Where others take the versions that it holds, if they may."""
    engines: Engines = Engines()
    """What its host has for reads over the network, besides sockets."""


class Welcome(Message, frozen=True):
    """Publisher: who it is and which tensors it has."""

    session: str
    pid: int
    started: int
    """When its process started, in clock ticks since boot; 0 if the kernel does not say."""
    tensors: Tensors
    tied: dict[str, str]
    silence_seconds: float
    """Both sides give up a peer that sends nothing for this long."""
    version: int | None
    follows: str = ""
    """The session that its versions are of, if it is a replica that serves them to others."""


class Want(Message, frozen=True):
    """Replica: the boxes that it wants, and the devices that they are on."""

    tensors: Tensors
    blocks: Boxes | None
    """None if each tensor is one block."""
    places: tuple[str, ...]
    """The devices that occur: the uuid of a GPU, or "" for the host."""
    place: bytes
    """The index of the device of each block."""
    may_leave: bool
    """True if the publisher may have tensors that the replica does not want."""
    devices: tuple[str, ...] = ()
    """The uuids of the GPUs that its process sees, and whose memory it can map."""
    is_remote: bool = False
    """True if it is on another host, or connected as if it were: it maps no memory."""
    checks_digests: bool = False
    """True if it needs the digests in `Begin`: it checks each tensor before a loader gets it."""


class Agreed(Message, frozen=True):
    """Publisher: the blocks that it has of its tensors. Both sides work out the same plan."""

    sources: Boxes | None
    """None if each tensor is one block."""
    rank: bytes
    """The rank of the publisher that holds each block."""
    places: tuple[str, ...]
    """The devices that occur: the uuid of a GPU, or "" for the host."""
    place: bytes
    """The index of the device of each block."""


class Refusal(Message, frozen=True):
    """Publisher: rejects the replica, with the name of an error class and its text."""

    kind: str
    text: str


class Ask(Message, frozen=True):
    """Replica: requests a version, or any that is newer than what it has."""

    ask: int
    """The request's number, which only grows; a round names the request that it answers."""
    version: int | None
    have: int | None
    """The complete version that it holds from this publisher."""
    held: int | None = None
    """The complete version that it holds from any publisher; older snapshots are not offered."""
    may_keep: bool = False
    """True if `have` is enough, once the publisher confirms that it is what is requested."""
    may_be_elsewhere: bool = False
    """True if it also takes the version from another replica that holds it."""


class Denied(Message, frozen=True):
    """Publisher: the requested version will never come."""

    ask: int
    kind: str
    text: str


class Kept(Message, frozen=True):
    """Publisher: confirms that the replica already has what it requests; nothing is sent."""

    ask: int


class Elsewhere(Message, frozen=True):
    """Publisher: others have the version, the nearest first; take it there, or ask again."""

    ask: int
    version: int
    addresses: tuple[str, ...]


class Withdraw(Message, frozen=True):
    """Replica: no longer waits for its request."""

    ask: int


class Memory(Table, frozen=True):
    """The memory that a round goes through."""

    handles: tuple[Handle, ...]
    places: Places
    slots: dict[int, Handle]
    """The memory of each slot of buckets."""
    bucket_slots: dict[int, int]
    """The slot in which each bucket arrives."""
    pieces: Pieces


class Begin(Message, frozen=True):
    """Publisher: starts a round. Its memory is None if it is that of the last round."""

    round: int
    ask: int
    version: int
    parent: int | None
    origin: str
    strategy: str
    should_verify: bool
    digest_kind: DigestKind
    """How both sides compute digests: XXH3 if all memory is on the host."""
    digests: bytes | None
    """The expected digests, if they never change or the replica checks them itself."""
    lists: int
    """The number of `memory`, which was sent before if it is None."""
    memory: Memory | None
    values: dict[str, Leaf]
    may_commit_alone: bool = False
    """True if the version never changes: a replica that loses the publisher commits by itself."""


class Filled(Message, frozen=True):
    """Publisher: a bucket is in its slot, ready to be read.

    A member on another host may get it again: then it reads from somebody else.
    """

    round: int
    bucket: int
    handle: NetworkHandle | None = None
    """Where another replica has it; None if it is read from the publisher."""


class Has(Message, frozen=True):
    """Replica on another host: a bucket is in its staging."""

    round: int
    bucket: int
    handle: NetworkHandle | None
    """Where others can read it; None if they cannot."""


class Unread(Message, frozen=True):
    """Replica on another host: could not read a bucket from its holder."""

    round: int
    bucket: int
    key: str
    """The key of the handle; "" for the publisher's."""
    kind: str
    text: str


class Free(Message, frozen=True):
    """Publisher: nobody needs a bucket in the replica's staging any more."""

    round: int
    bucket: int


class Emptied(Message, frozen=True):
    """Replica: has read a bucket; its slot is free."""

    round: int
    bucket: int


class Going(Message, frozen=True):
    """Publisher: the round goes on, it waits for other replicas."""

    round: int


class Drained(Message, frozen=True):
    """Replica of several ranks: no request runs here, and nothing is written before `Write`."""

    round: int


class Write(Message, frozen=True):
    """Publisher: all ranks of the replica have drained; each may overwrite its weights."""

    round: int


class Copied(Message, frozen=True):
    """Replica: everything is copied; the memory that it read may change."""

    round: int


class Done(Message, frozen=True):
    """Replica: the digests of what it holds now, one for each copy, 64 bits each."""

    round: int
    digests: bytes
    copy_seconds: float
    verify_seconds: float


class Commit(Message, frozen=True):
    """Publisher: the digests are right, the replica holds the version."""

    round: int
    digests: bytes


class Committed(Message, frozen=True):
    """Replica of several ranks: this one has stored the commit, so all of them commit."""

    round: int


class Abort(Message, frozen=True):
    """Publisher: the round is over for this replica, without a commit."""

    round: int
    kind: str
    text: str
    is_touched: bool
    """True if another rank of the replica may have written: then none keeps its version."""


class Fault(Message, frozen=True):
    """Replica: cannot continue; `is_touched` if its old version is partly overwritten."""

    round: int
    kind: str
    text: str
    is_touched: bool


class Tick(Message, frozen=True):
    """Either side: heartbeat."""

    copied_bytes: int = 0
    """How much a replica has copied in its round, as a sign of progress."""


class Bye(Message, frozen=True):
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


class News(Message, frozen=True):
    """Publisher, to watchers: its state and that of its replicas."""

    version: int | None
    round: int
    state: str
    nbytes: int
    seconds: float
    strategy: str
    replicas: tuple[ReplicaNews, ...]


InRound = Has | Unread | Emptied | Drained | Copied | Done | Committed | Fault | Tick
"""What a member says to the round that it is in."""
FromReplica = Hello | Want | Ask | Withdraw | InRound | Bye
Answer = Welcome | Agreed | Refusal | Denied | Kept | Elsewhere
"""What a publisher says to a replica outside of a round."""
FromPublisher = Answer | Begin | Filled | Free | Going | Write | Commit | Abort | Tick | Bye | News
