"""Checks of the arguments that several rooms take: each returns the value or raises SpecError."""

from __future__ import annotations

import operator
from enum import Enum
from typing import TypeVar

from flyweight.errors import SpecError

MIN_MEMORY_BYTES = 1 << 20
_MAX_SECONDS = 1e6  # what a system's clock can wait for

EnumT = TypeVar("EnumT", bound=Enum)


def check_seconds(name: str, seconds: float) -> float:
    """Return a time to wait as a float; infinity is refused, because every wait has an end."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise SpecError(f"{name} is {seconds!r}, not a number of seconds")
    if not 0 <= seconds <= _MAX_SECONDS:
        raise SpecError(f"{name} is {seconds:g}, between 0 and {_MAX_SECONDS:g} seconds are needed")
    return float(seconds)


def check_version(version: object) -> int:
    """Return a version as an int; numpy integers are accepted, booleans and strings are not."""
    if isinstance(version, bool) or not hasattr(version, "__index__"):
        raise SpecError(f"version is {version!r}, expected a whole number")
    number = operator.index(version)
    if not 0 <= number < 2**63:
        raise SpecError(f"version {number} is not a whole number from 0 to 2**63-1")
    return number


def check_memory_bytes(memory_bytes: int) -> int:
    """Return the extra memory that a verb may use."""
    if type(memory_bytes) is not int or memory_bytes < MIN_MEMORY_BYTES:
        raise SpecError(f"memory_bytes is {memory_bytes!r}, at least {MIN_MEMORY_BYTES} are needed")
    return memory_bytes


def check_threads(num_threads: int) -> int:
    """Return a number of worker threads."""
    if type(num_threads) is not int or num_threads < 1:
        raise SpecError(f"num_threads is {num_threads!r}, at least 1 is needed")
    return num_threads


def one_of(kind: type[EnumT], value: str, what: str) -> EnumT:
    """Return the member of an enum that has this value; the error lists all values."""
    try:
        return kind(value)
    except ValueError:
        names = " or ".join(repr(each.value) for each in kind)
        raise SpecError(f"{what} is {value!r}, expected {names}") from None


def check_text(name: str, text: object, *, is_secret: bool = False) -> None:
    """Raise SpecError unless a text is printable, or None; a secret is not shown."""
    if text is None or (isinstance(text, str) and text.isprintable()):
        return
    if is_secret:
        raise SpecError(f"{name} is not printable text; strip() what was read from a file")
    raise SpecError(f"{name} is {text!r}, not printable text")
