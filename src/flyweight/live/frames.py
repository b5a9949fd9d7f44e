"""Frames: how a message becomes bytes, and back.

A frame is two magic bytes, the protocol's number, then msgpack. The number is outside of the
msgpack, so that two versions of the library can still tell each other that they differ.
"""

from __future__ import annotations

from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from flyweight.errors import FlyweightError, PeerRefused, TransportError, error_named
from flyweight.live import messages, rank_messages
from flyweight.live.messages import Message, Want
from flyweight.memory import collector_paused

PROTOCOL = 6
MAX_MESSAGE_BYTES = 256 << 20
MAX_HELLO_BYTES = 64 << 10
"""What a sender that has not shown the token may send. Most of it is room for the names of RDMA
devices: 66 texts of 200 characters, of up to four bytes each."""
_MAGIC = b"fw"
_LARGE_BYTES = 1 << 20  # a list of very many tensors

Frame = bytes | bytearray | memoryview
FromReplica = messages.FromReplica | rank_messages.FromFollower
"""What a publisher receives: followers connect to rank 0 as replicas do."""
FromPublisher = messages.FromPublisher | rank_messages.FromLeader


def _plain(error: object) -> tuple[str, str]:
    """Return an error as the name of its class and its text."""
    if not isinstance(error, FlyweightError):
        raise TypeError(f"a message cannot contain {type(error).__name__}")
    return type(error).__name__, str(error)


def _error(kind: type, plain: object) -> FlyweightError:
    return error_named(*msgspec.convert(plain, tuple[str, str]))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_FROM_REPLICA: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(
    FromReplica, dec_hook=_error
)
_FROM_PUBLISHER: msgspec.msgpack.Decoder[FromPublisher] = msgspec.msgpack.Decoder(
    FromPublisher, dec_hook=_error
)


def encode(message: Message) -> bytearray:
    frame = bytearray((*_MAGIC, PROTOCOL))
    try:
        _ENCODER.encode_into(message, frame, 3)
    except UnicodeEncodeError:  # an error may name a path that is not UTF-8
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain)
        _ENCODER.encode_into(_escaped(plain), frame, 3)
    return frame


def _escaped(plain: Any) -> Any:
    """Return the same with escapes in texts that are not UTF-8, wherever they are in it."""
    match plain:
        case str():
            return plain.encode(errors="backslashreplace").decode()
        case list() | tuple():
            return [_escaped(each) for each in plain]
        case dict():
            return {_escaped(key): _escaped(each) for key, each in plain.items()}
    return plain


def digest_of(want: Want) -> bytes:
    """Return a hash that is equal for replicas that want the same, and for no others."""
    names, tensors = want.tensors.names, msgspec.structs.replace(want.tensors, names=())
    found = blake2b(encode(msgspec.structs.replace(want, tensors=tensors)))
    for first in range(0, len(names), 1024):  # not all at once, which would take much memory
        found.update(_ENCODER.encode(names[first : first + 1024]))
    return found.digest()


def check_length(frame: Frame) -> None:
    """Raise PeerRefused if a frame is too long for a Hello: to decode it may take gigabytes."""
    if len(frame) > MAX_HELLO_BYTES:
        raise PeerRefused(
            f"the first message must be Hello, which has at most {MAX_HELLO_BYTES} bytes; this one "
            f"has {len(frame)}"
        )


def decode_from_replica(frame: Frame) -> FromReplica:
    return _decode(_FROM_REPLICA, frame)


def decode_from_publisher(frame: Frame) -> FromPublisher:
    return _decode(_FROM_PUBLISHER, frame)


MessageT = TypeVar("MessageT")


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], frame: Frame) -> MessageT:
    """Return the message; raise PeerRefused for another protocol, else TransportError."""
    if frame[:2] != _MAGIC or len(frame) < 3:
        raise TransportError(
            f"{len(frame)} bytes that start with {bytes(frame[:8])!r} are not a message of "
            f"flyweight"
        )
    if frame[2] != PROTOCOL:
        raise PeerRefused(
            f"the other side speaks protocol {frame[2]}, this one {PROTOCOL}; install the same "
            f"version of flyweight on both"
        )
    try:
        with collector_paused() if len(frame) > _LARGE_BYTES else nullcontext():
            return decoder.decode(memoryview(frame)[3:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise TransportError(f"cannot decode a message of {len(frame)} bytes: {cause}") from cause
