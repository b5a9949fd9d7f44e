"""Digests: a checksum for bytes on their way, and a digest for a tensor on any device.

The checksum is XXH3, the fastest hash on a CPU. The digest is a sum over words, so that any number
of threads, or a GPU, can add it up in any order:

    row r = 1024 little-endian words, the tail of the tensor padded with zeros
    T(r)  = sum over j of B[j] * g(A[j] * word[j]),   g(x) = x ^ (x >> 32)      mod 2**64
    H     = fmix(fmix(nbytes) + sum over r of fmix(T(r)) * (splitmix(r) | 1))   mod 2**64

A and B are odd, so a change of any one word always changes H: docs/format.md has the argument.
Without a GPU, T(r) may be the XXH3 of rows of 256 KiB instead, with a short last row that is not
padded: the same sum, five times as fast on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from flyweight.memory import Bytes

Words = NDArray[np.uint64]
DigestKind = Literal["words", "xxh3"]

ROW_WORDS = 1024
ROW_BYTES = 8 * ROW_WORDS
XXH3_ROW_BYTES = 256 << 10
_ROW_BYTES: dict[DigestKind, int] = {"words": ROW_BYTES, "xxh3": XXH3_ROW_BYTES}
_ROWS_AT_ONCE = 256  # numpy releases the interpreter in each call: long calls let threads run
_ROWS_IN_CACHE = 32
_MASK = 2**64 - 1
_THIRTY_TWO = np.uint64(32)


def checksum(data: Bytes) -> int:
    """Return the 64-bit XXH3 of the bytes."""
    return int(xxhash.xxh3_64_intdigest(data))


Checksum = xxhash.xxh3_64
"""The same checksum, of bytes that are added in order."""


def splitmix(index: Words) -> Words:
    """Return the `index`-th numbers of the splitmix64 sequence with seed 0."""
    x = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = x ^ (x >> np.uint64(31))
    return mixed


def fmix(x: Words) -> Words:
    """Mix 64 bits, so that each bit of `x` changes about half of the result, without collisions."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: Words = x ^ (x >> np.uint64(33))
    return mixed


def _fmix_int(x: int) -> int:
    """Return `fmix` of one number."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33


_ROW_NUMBERS = np.arange(64, dtype=np.uint64)
_COLUMNS = np.arange(ROW_WORDS, dtype=np.uint64)
_A = splitmix(_COLUMNS) | np.uint64(1)
_B = splitmix(_COLUMNS + np.uint64(ROW_WORDS)) | np.uint64(1)
# Repeated for a whole block: numpy multiplies arrays of one shape faster than it broadcasts.
_A_ROWS, _B_ROWS = (np.tile(table, (_ROWS_AT_ONCE, 1)) for table in (_A, _B))


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.mixed = np.empty((_ROWS_AT_ONCE, ROW_WORDS), np.uint64)
        self.shifted = np.empty_like(self.mixed)


_scratch = _Scratch()


def _word_sums(data: Bytes) -> Words:
    """Return T of each of these whole rows."""
    words = data.view("<u8").reshape(-1, ROW_WORDS)
    sums = np.empty(len(words), np.uint64)
    # A small tensor is digested by one thread, in steps that stay in its core's cache.
    step = _ROWS_AT_ONCE if len(words) > _ROWS_AT_ONCE else _ROWS_IN_CACHE
    for start in range(0, len(words), step):
        some = words[start : start + step]
        mixed, shifted = _scratch.mixed[: len(some)], _scratch.shifted[: len(some)]
        np.multiply(some, _A_ROWS[: len(some)], out=mixed)
        np.right_shift(mixed, _THIRTY_TWO, out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        np.multiply(mixed, _B_ROWS[: len(some)], out=mixed)
        np.add.reduce(mixed, axis=1, out=sums[start : start + len(some)])
    return sums


def _xxh3_sums(data: Bytes) -> Words:
    """Return T of each row, the last of which may be short."""
    starts = range(0, len(data), XXH3_ROW_BYTES)
    return np.array([checksum(data[at : at + XXH3_ROW_BYTES]) for at in starts], np.uint64)


def _terms(rows: Words, sums: Words) -> Words:
    """Return the terms that rows add to the digest; `rows` are their numbers in the tensor."""
    terms: Words = fmix(sums) * (splitmix(rows) | np.uint64(1))
    return terms


def _sum_of_rows(kind: DigestKind, first_row: int, data: Bytes) -> int:
    """Return the sum over rows, where the first is row `first_row` of its tensor."""
    sums = _word_sums(data) if kind == "words" else _xxh3_sums(data)
    rows = np.arange(first_row, first_row + len(sums), dtype=np.uint64)
    return int(np.add.reduce(_terms(rows, sums)))


class Digest:
    """Adds up the digest of `nbytes` bytes, which any thread adds in any order."""

    def __init__(self, nbytes: int, kind: DigestKind = "words") -> None:
        self._nbytes, self._left, self._sum = nbytes, nbytes, 0
        self._kind, self._row_bytes = kind, _ROW_BYTES[kind]
        self._edges: dict[int, tuple[Bytes, int]] = {}
        self._lock = threading.Lock()

    def add(self, offset: int, data: Bytes) -> None:
        """Add the bytes at `offset` of the tensor; each byte must be added exactly once."""
        size = self._row_bytes
        head = min(-offset % size, len(data))
        body = (len(data) - head) // size * size
        total = 0
        if body:
            total = _sum_of_rows(self._kind, (offset + head) // size, data[head : head + body])
        with self._lock:
            self._sum += total
            self._left -= len(data)
            self._edge(offset, data[:head])
            self._edge(offset + head + body, data[head + body :])

    def _edge(self, offset: int, data: Bytes) -> None:
        """Keep a part of a row until the rest of the row has been added."""
        if not len(data):
            return
        row, start = divmod(offset, self._row_bytes)
        whole = min(self._row_bytes, self._nbytes - row * self._row_bytes)
        if len(data) == whole and self._kind == "xxh3":  # a short last row, complete
            self._sum += _sum_of_rows(self._kind, row, data)
            return
        edge, held = self._edges.pop(row, (np.zeros(self._row_bytes, np.uint8), 0))
        edge[start : start + len(data)] = data
        held += len(data)
        if held == whole:
            self._sum += _sum_of_rows(
                self._kind, row, edge if self._kind == "words" else edge[:whole]
            )
        else:
            self._edges[row] = edge, held

    def value(self) -> int:
        """Return the digest; all bytes must have been added."""
        assert self._left == 0, f"{self._left} of {self._nbytes} bytes were never added"
        return _ended(self._nbytes, self._sum)


def _ended(nbytes: int, total: int) -> int:
    return _fmix_int((_fmix_int(nbytes) + total) & _MASK)


SMALL_BYTES = 16 * ROW_BYTES
"""Tensors up to this size are digested together: a call of numpy costs more than their bytes."""


def small_digests(tensors: Sequence[Bytes], kind: DigestKind = "words") -> list[int]:
    """Return the digest of each of many small tensors."""
    if kind == "xxh3":
        sizes = np.array([len(data) for data in tensors], np.int64)
        digests: list[int] = short_digests(sizes, list(map(checksum, tensors))).tolist()
        return digests
    found: list[int] = []
    batch: list[Bytes] = []
    num_rows = 0
    for data in tensors:
        if batch and num_rows + _num_rows(data) > _ROWS_AT_ONCE:
            found += _together(batch, num_rows)
            batch, num_rows = [], 0
        batch.append(data)
        num_rows += _num_rows(data)
    return found + _together(batch, num_rows)


def short_digests(sizes: NDArray[np.int64], hashes: Sequence[int] | Words) -> Words:
    """Return the digests, of kind 'xxh3', of tensors whose bytes have these checksums.

    Each tensor must be at most one row, 256 KiB.
    """
    sums, nbytes = np.asarray(hashes, np.uint64), sizes.astype(np.uint64)
    terms = np.where(nbytes == 0, np.uint64(0), _terms(np.zeros(len(sums), np.uint64), sums))
    return fmix(fmix(nbytes) + terms)


def _num_rows(data: Bytes) -> int:
    return max(-(-len(data) // ROW_BYTES), 1)  # an empty tensor gets a row of zeros


def _together(batch: Sequence[Bytes], num_rows: int) -> list[int]:
    if not batch:
        return []
    padded = np.zeros(num_rows * ROW_BYTES, np.uint8)
    rows, starts, at = np.empty(num_rows, np.uint64), [], 0
    for data in batch:
        starts.append(at)
        padded[at * ROW_BYTES : at * ROW_BYTES + len(data)] = data
        rows[at : at + _num_rows(data)] = _ROW_NUMBERS[: _num_rows(data)]
        at += _num_rows(data)
    sums = np.add.reduceat(_terms(rows, _word_sums(padded)), starts)
    return [
        _ended(len(data), int(total) if len(data) else 0)
        for data, total in zip(batch, sums, strict=True)
    ]


def digest(data: Bytes, kind: DigestKind = "words") -> int:
    """Return the digest of a whole tensor's bytes."""
    running = Digest(len(data), kind)
    running.add(0, data)
    return running.value()
