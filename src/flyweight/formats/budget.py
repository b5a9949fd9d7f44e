"""Budgets: how much memory the objects that a file describes may take.

A few bytes can describe more than any memory holds, by naming the same list again and again.
"""

from __future__ import annotations

from typing import NoReturn

from flyweight.errors import FormatError

MEMORY_PER_BYTE = 7
"""Objects may take seven times the file that describes them, so that opening it takes less than
ten times as much; those of an index with many shards take five."""
MIN_BUDGET_BYTES = 8 << 20
"""Objects that a small file describes may take this much."""


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
