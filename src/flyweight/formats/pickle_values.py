"""What a pickle describes beyond plain values and containers, and how much memory it may take.

A few bytes can describe more than any memory holds, by naming the same list again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from flyweight.errors import FormatError

MEMORY_PER_BYTE = 7
"""Objects may take seven times the file that describes them, so that opening it takes less than
ten times as much; those of an index with many shards take five."""
MIN_BUDGET_BYTES = 8 << 20
"""Objects that a small file describes may take this much."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the file; `is_text` if they are UTF-8 of a string."""

    offset: int
    nbytes: int
    is_text: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Global:
    """A function or class, by name only."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What a call of `what` with `args` would have made, and the state it would have been given."""

    what: Global
    args: object
    state: object = None
    names: tuple[str, ...] | None = None
    """The names of its fields; their values are the state."""


@dataclass(slots=True, eq=False)
class MadeDict(Made):
    """A kind of dict, and the items that would have been set in it."""

    items: dict[object, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object outside of the pickle, such as a tensor's storage, by its id."""

    what: object


class Budget:
    """The memory that is left for the objects that a file of `nbytes` describes."""

    def __init__(self, what: str, nbytes: int) -> None:
        self._what, self._nbytes = what, nbytes
        self._limit = self.left = max(MIN_BUDGET_BYTES, MEMORY_PER_BYTE * nbytes)
        self.num_records = 0
        """Records that have taken memory and are not read yet."""

    def take(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            self.refuse()

    def take_record(self, nbytes: int) -> None:
        """Take memory for what is made of a record, unless it replaces the record itself.

        A record that is recalled again and again is replaced only once.
        """
        if self.num_records:
            self.num_records -= 1
        else:
            self.take(nbytes)

    def refuse(self) -> NoReturn:
        raise FormatError(
            f"{self._what} has {self._nbytes} bytes and describes objects of more than "
            f"{self._limit}, the most that a file of this size may take"
        )
