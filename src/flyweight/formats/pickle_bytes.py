"""The bytes of a pickle: read in blocks, only where opcodes are, and never past its end.

Weights are skipped over. Which opcode has which argument stands here; what it does, in
`pickles.py`.
"""

from __future__ import annotations

from typing import NoReturn

from flyweight.errors import FormatError
from flyweight.ports import Store

MAX_OPCODES = 50_000_000
_BLOCK_BYTES = 64 << 10
_MAX_LINE_CHARS = 1024

STOP = ord(".")
_LINES = ord("c")
_SHORT_RECALL = ord("h")
_RECALLS = {_SHORT_RECALL: 1, ord("j"): 4}
_LENGTHS = {
    ord("X"): 4, 0x8C: 1, 0x8D: 8,  # text
    ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x96: 8,  # bytes
    0x8A: 1, 0x8B: 4,  # long numbers
}  # fmt: skip
"""Opcodes with a length of so many bytes, which says how many bytes follow it."""
_FIXED = {
    **dict.fromkeys(b"()01NQRabdelstu]}\x81\x85\x86\x87\x88\x89\x93\x94", 0),
    ord("K"): 1, ord("q"): 1, 0x80: 1, ord("M"): 2, ord("J"): 4, ord("r"): 4,
    ord("G"): 8, 0x95: 8,
}  # fmt: skip
"""Opcodes with an argument of so many bytes."""


class PickleBytes:
    """A stretch of a file, read from its start on; `_next` counts within the block at hand."""

    def __init__(self, store: Store, file: str, offset: int, nbytes: int) -> None:
        self._store, self._file = store, file
        self._start, self._size = offset, offset + nbytes
        self._block, self._block_at, self._next = b"", offset, 0
        self._recalled, self._has_end = bytearray(), True

    def _refuse(self, why: str) -> NoReturn:
        raise FormatError(f"pickle {self._file!r} in {self._store.place!r} {why}")

    def _refuse_opcode(self) -> NoReturn:
        code = self._block[self._next - 1 : self._next]
        self._refuse(f"has opcode {code!r} at byte {self._at - 1}, which this format never needs")

    @property
    def _at(self) -> int:
        return self._block_at + self._next

    def _code(self) -> int:
        try:
            code = self._block[self._next]
        except IndexError:
            self._refill(1)
            code = self._block[0]
        self._next += 1
        return code

    def _take(self, nbytes: int) -> bytes:
        end = self._next + nbytes
        if end > len(self._block):
            self._refill(nbytes)
            end = nbytes
        self._next = end
        return self._block[end - nbytes : end]

    def _refill(self, nbytes: int) -> None:
        at = self._at
        self._reach(nbytes)
        length = min(max(nbytes, _BLOCK_BYTES), self._size - at)
        self._block, self._block_at, self._next = self._store.read(self._file, at, length), at, 0

    def _reach(self, nbytes: int) -> None:
        if nbytes > self._size - self._at:
            self._refuse(
                f"is cut short: {nbytes} bytes wanted at {self._at}, the file has {self._size}"
            )

    def _skip(self, nbytes: int) -> None:
        self._reach(nbytes)
        self._next += nbytes

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _line(self) -> str:
        text = bytearray()
        while (char := self._take(1)) != b"\n":
            text += char
            if len(text) > _MAX_LINE_CHARS:
                self._refuse(f"names something with more than {_MAX_LINE_CHARS} characters")
        return text.decode("utf-8", "replace")

    def _rewind(self) -> None:
        self._block, self._block_at, self._next = b"", self._start, 0

    def _find_recalled(self) -> None:
        """Note the number of each value that is recalled; others need not be kept."""
        recalled = self._recalled
        for _ in range(MAX_OPCODES):
            code = self._code()
            if code in _FIXED:
                self._next += _FIXED[code]
            elif code in _RECALLS:
                index = self._code() if code == _SHORT_RECALL else self._number(_RECALLS[code])
                if index >= len(recalled):
                    if index >= self._size - self._start:
                        self._refuse(f"recalls value {index} that was never kept")
                    recalled.extend(bytes(index + 1 - len(recalled)))
                recalled[index] = 1
            elif code in _LENGTHS:
                self._skip(self._number(_LENGTHS[code]))
            elif code == _LINES:
                self._line(), self._line()
            elif code == STOP:
                return
            else:
                self._refuse_opcode()
        self._has_end = False
        self._refuse(
            f"has more than {MAX_OPCODES} opcodes: {self._at} of {self._size} bytes are read"
        )
