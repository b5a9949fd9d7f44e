"""What a server of reads, its process and its readers say to each other.

A `Description` and a `Place` come from another host. They have limits, and everything that they say
about memory is checked against each other. Two fields go on to the engine's C++ code as they are
(`connection` and `key`), so both must come from a peer that has proved the token.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from flyweight.errors import PeerLost, TransportError
from flyweight.spec.strict_json import Number

MAX_PLACES = 4096
MAX_TEXT_BYTES = 8192
"""How long a description or a place may be."""
MAX_MESSAGE_BYTES = 1 << 16


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach an engine's process."""

    engine: str
    session: str
    """The name of the process: a place of another session means nothing to it."""
    connection: bytes
    register: Number
    """Where the words of the places are."""
    key: bytes
    """What the engine's reader needs to read the register."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that an engine's process serves."""

    session: str
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PLACES)]
    word: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    """What the register has in the slot as long as the place exists."""
    address: Number
    nbytes: Number
    region: tuple[Number, Number]
    """The registered memory that the bytes lie in: an address and a number of bytes."""
    key: bytes


class Serve(msgspec.Struct, frozen=True, tag="serve", forbid_unknown_fields=True):
    """To the process, with a file: map it and serve it."""

    slot: int
    offset: int
    nbytes: int


class Forget(msgspec.Struct, frozen=True, tag="forget", forbid_unknown_fields=True):
    """To the process: stop to serve a file."""

    slot: int


class Served(msgspec.Struct, frozen=True, tag="served", forbid_unknown_fields=True):
    """From the process: where the file is mapped there, and what readers need."""

    address: Number
    key: bytes
    connection: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """From the process: an error, by the name of its class."""

    kind: str
    text: str


_Text = TypeVar("_Text", Description, Place)


def decoded(kind: type[_Text], text: bytes) -> _Text:
    """Return a description or a place that a peer sent; raise TransportError if it is none."""
    what = kind.__name__.lower()
    if len(text) > MAX_TEXT_BYTES:
        raise TransportError(f"{what} of {len(text)} bytes, at most {MAX_TEXT_BYTES} are read")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise TransportError(f"what should be a {what} is none: {cause}") from None


def checked_place(text: bytes, session: str, offset: int, nbytes: int) -> Place:
    """Return a place; raise TransportError unless it has those bytes and belongs to a session."""
    place = decoded(Place, text)
    start, size = place.region
    if not start <= place.address <= place.address + place.nbytes <= start + size:
        raise TransportError("place speaks of bytes outside of its own memory")
    if not 0 <= offset <= offset + nbytes <= place.nbytes:
        raise TransportError(
            f"bytes {offset}..{offset + nbytes} are wanted of a place of {place.nbytes} bytes"
        )
    if place.session != session:
        raise PeerLost("place belongs to a process that has ended, or to another one")
    return place
