"""The bytes of a pickle: read in blocks, only where opcodes are, and never past its end.

This file knows which opcode has which argument; `pickles.py` knows what each one does.
"""

from __future__ import annotations

from typing import NoReturn

from flyweight.errors import FormatError
from flyweight.ports import Store

MAX_OPCODES = 50_000_000
_BLOCK_BYTES = 64 << 10
MAX_LINE_CHARS = 1024

GLOBAL, STOP = ord("c"), ord(".")
_RECALLS = {ord("h"): 1, ord("j"): 4}
_COUNTED = {
    ord("X"): 4, 0x8C: 1, 0x8D: 8,  # text
    ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x96: 8,  # bytes
    0x8A: 1, 0x8B: 4,  # long numbers
}  # fmt: skip
"""Opcodes with a length of so many bytes, which says how many bytes follow it."""
_FIXED = {
    **dict.fromkeys(b"()01NQRabdelstu]}\x81\x85\x86\x87\x88\x89\x93\x94", 0),
    **dict.fromkeys(b"Kq\x80", 1), ord("M"): 2, ord("J"): 4, ord("r"): 4, ord("G"): 8, 0x95: 8,
}  # fmt: skip
"""Opcodes with an argument of so many bytes."""
WIDTHS = {**_FIXED, **_COUNTED, **_RECALLS, GLOBAL: 0, STOP: 0}
"""All opcodes that are read, and the width of their argument, or of the length of one."""


class PickleBytes:
    """The bytes of one pickle, which may be a span inside a larger file."""

    def __init__(self, store: Store, file: str, offset: int, nbytes: int) -> None:
        self._store, self._file = store, file
        self._start, self.end = offset, offset + nbytes
        self._block, self._block_at, self._next = b"", offset, 0

    def refuse(self, why: str) -> NoReturn:
        raise FormatError(f"pickle {self._file!r} in {self._store.place!r} {why}")

    def refuse_opcode(self, code: int) -> NoReturn:
        self.refuse(
            f"has opcode {bytes([code])!r} before byte {self.at}, which this format never needs"
        )

    def refuse_length(self) -> NoReturn:
        self.refuse(f"has more than {MAX_OPCODES} opcodes: {self.at} of {self.end} bytes are read")

    @property
    def at(self) -> int:
        """The offset in the file of the next byte."""
        return self._block_at + self._next

    def byte(self) -> int:
        try:
            code = self._block[self._next]
        except IndexError:
            self._refill(1)
            code = self._block[0]
        self._next += 1
        return code

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def take(self, nbytes: int) -> bytes:
        end = self._next + nbytes
        if end > len(self._block):
            self._refill(nbytes)
            end = nbytes
        self._next = end
        return self._block[end - nbytes : end]

    def skip(self, nbytes: int) -> None:
        self._check_inside(nbytes)
        self._next += nbytes

    def line(self) -> str:
        """Return the text up to the end of the line, which is left behind."""
        max_chars = MAX_LINE_CHARS + 1
        if (end := self._block.find(b"\n", self._next, self._next + max_chars)) < 0:
            self._refill(1)  # the line may go on after the block
            end = self._block.find(b"\n", 0, max_chars)
        if end < 0:
            self._check_inside(max_chars)
            self.refuse(f"names something with more than {MAX_LINE_CHARS} characters")
        return self.take(end + 1 - self._next)[:-1].decode("utf-8", "replace")

    def find_recalled(self, recalled: bytearray) -> None:
        """Set `recalled[n]` for each number n by which a kept value is recalled."""
        for _ in range(MAX_OPCODES):
            code = self.byte()
            if code in _FIXED:
                self._next += _FIXED[code]
            elif code in _RECALLS:
                number = self.byte() if _RECALLS[code] == 1 else self.number(_RECALLS[code])
                if number >= len(recalled):
                    if number >= self.end - self._start:
                        self.refuse(f"recalls value {number} that was never kept")
                    recalled.extend(bytes(number + 1 - len(recalled)))
                recalled[number] = 1
            elif code in _COUNTED:
                self.skip(self.number(_COUNTED[code]))
            elif code == GLOBAL:
                self.line(), self.line()
            elif code == STOP:
                return
            else:
                self.refuse_opcode(code)
        self.refuse_length()

    def rewind(self) -> None:
        self._block, self._block_at, self._next = b"", self._start, 0

    def _refill(self, nbytes: int) -> None:
        at = self.at
        self._check_inside(nbytes)
        length = min(max(nbytes, _BLOCK_BYTES), self.end - at)
        self._block, self._block_at, self._next = self._store.read(self._file, at, length), at, 0

    def _check_inside(self, nbytes: int) -> None:
        if nbytes > self.end - self.at:
            self.refuse(
                f"is cut short: {nbytes} bytes are needed at {self.at}, the file ends at {self.end}"
            )
