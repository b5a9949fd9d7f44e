"""Strict JSON: text that somebody else wrote, decoded into typed values or refused.

`parse_json` refuses what JSON leaves open: duplicate keys, NaN, numbers and nesting without end.
`convert` then checks the value against a type. Both raise FormatError.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from flyweight.errors import FormatError, listed

Leaf = bool | int | float | str | None
Json = dict[str, "Json"] | list["Json"] | Leaf
T = TypeVar("T")

MAX_NUMBER = 2**63 - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_STEP = re.compile(r"\.(\w+)|\[([0-9]+|\.\.\.)\]")


class Hash(int):
    """A 64-bit checksum or digest; 16 hexadecimal digits in JSON."""

    @classmethod
    def from_json(cls, value: Json) -> Hash:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
            raise ValueError("Expected 16 hexadecimal digits")
        return cls(value, 16)


def parse_json(text: bytes, what: str) -> Json:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN, no absurd depth or number."""

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        record = dict(pairs)
        if len(record) != len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            raise FormatError(f"{what} names {listed(twice)} twice")
        return record

    def constant(word: str) -> NoReturn:
        raise FormatError(f"{what} holds {word}, which is not JSON")

    try:
        parsed: Json = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant
        )
    except (ValueError, RecursionError) as cause:
        raise FormatError(f"{what} of {len(text)} bytes is not JSON: {cause}") from cause
    return parsed


def convert(value: Json, kind: type[T], what: str) -> T:
    """Return parsed JSON as a `kind`: a type that msgspec knows, or one with a `from_json`."""
    try:
        return msgspec.convert(value, kind, dec_hook=_from_json, str_keys=True)
    except msgspec.ValidationError as cause:
        raise FormatError(f"{what}: {cause}{_found(value, str(cause))}") from cause


def _from_json(kind: type[Any], value: Json) -> object:
    return kind.from_json(value)


def _found(value: Any, message: str) -> str:
    """Return the value that an error speaks of by its path, as in "... - at `$.parts[0].bytes`"."""
    try:
        for name, index in _STEP.findall(message.rpartition("`$")[2]):
            value = value[name or int(index)]
    except (LookupError, TypeError, ValueError):  # inside of `[...]`, where msgspec hides the key
        return ""
    # Objects and lists may be large, and the message says what is wrong with them.
    return "" if isinstance(value, (dict, list)) else f", found {value!r:.80}"
