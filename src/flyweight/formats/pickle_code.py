"""Writes the opcodes of a pickle, without making the objects that it describes.

Each function returns opcodes that leave one value on the stack. Files of other
frameworks need no more than these, and any reader of protocol 2 accepts them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from flyweight.spec.manifest import Leaf

NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def leaf(value: Leaf) -> bytes:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, int):
        return number(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return text(value)


def named(module: str, name: str) -> bytes:
    """A function or class, the way protocol 2 spells it."""
    return f"c{module}\n{name}\n".encode()


def pack(values: Iterable[bytes]) -> bytes:
    """A tuple of values."""
    return b"(" + b"".join(values) + b"t"


def numbers(values: Iterable[int]) -> bytes:
    return pack(map(number, values))


def row(values: Iterable[bytes]) -> bytes:
    """A list of values."""
    return b"](" + b"".join(values) + b"e"


def table(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A dict."""
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def called(what: bytes, *args: bytes) -> bytes:
    return what + pack(args) + b"R"


def made(what: bytes, **state: bytes) -> bytes:
    """An object of a class that is given its fields."""
    return what + b")\x81" + table((text(key), value) for key, value in state.items()) + b"b"


class Memo:
    """Writes each value once, and recalls it by a number afterwards."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __call__(self, code: bytes) -> bytes:
        if code in self._numbers:
            return b"j" + struct.pack("<I", self._numbers[code])
        self._numbers[code] = len(self._numbers)
        return code + b"r" + struct.pack("<I", self._numbers[code])
