"""Zip archives as torch writes them: uncompressed entries, and a directory at the end.

This file finds where an entry's bytes are, and lays out an archive around bytes that are
not known yet. No number in an archive makes the reader leave it, or hold more of it in
memory than its directory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from flyweight.errors import FormatError
from flyweight.formats.pickle_values import Span
from flyweight.ports import Store

MAX_ENTRIES = 4096
MAX_DIRECTORY_BYTES = MAX_ENTRIES << 10
_END, _END64, _END64_AT = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_CENTRAL, _LOCAL = b"PK\1\2", b"PK\3\4"
_LOCAL_HEAD = struct.Struct("<4s5H3I2H")
_CENTRAL_HEAD = struct.Struct("<4s6H3I5H2I")
_TAIL_BYTES = 4096
_HEAD_BYTES = 512  # a local head with its name, as far as it must be looked at
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF


class Archive:
    """The entries of an archive that is a span of a file."""

    def __init__(self, store: Store, file: str, span: Span) -> None:
        self._store, self._file, self._span = store, file, span
        self._entries: dict[str, tuple[int, int]] = {}
        tail_bytes = min(span.nbytes, _TAIL_BYTES)
        self._tail_at = span.nbytes - tail_bytes
        self._tail = self._read(self._tail_at, tail_bytes)
        self._read_directory(*self._directory())

    def _refused(self, why: str) -> FormatError:
        start, end = self._span.offset, self._span.offset + self._span.nbytes
        return FormatError(
            f"archive in bytes {start}..{end} of {self._file!r} in {self._store.place!r} {why}"
        )

    def _read(self, at: int, nbytes: int) -> bytes:
        if at > self._span.nbytes or nbytes > self._span.nbytes - at:
            raise self._refused(f"is cut short: {nbytes} bytes wanted at {at}")
        return self._store.read(self._file, self._span.offset + at, nbytes)

    def _directory(self) -> tuple[int, int, int]:
        """Return the number of entries, and the offset and size of the directory."""
        tail = self._tail
        end = tail.rfind(_END)
        if end < 0 or len(tail) - end < 22:
            raise self._refused("has no directory at its end")
        count, nbytes, at = struct.unpack_from("<HII", tail, end + 10)
        if _FULL32 in (at, nbytes) or count == _FULL16:
            pointer = tail.rfind(_END64_AT, 0, end)
            record = tail.rfind(_END64, 0, max(pointer, 0))
            if pointer < 0 or record < 0 or len(tail) - record < 56:
                raise self._refused("lacks the directory of large archives")
            count, nbytes, at = struct.unpack_from("<QQQ", tail, record + 32)
        if count > MAX_ENTRIES:
            raise self._refused(f"has {count} entries, at most {MAX_ENTRIES}")
        return count, at, nbytes

    def _read_directory(self, count: int, at: int, nbytes: int) -> None:
        if nbytes > MAX_DIRECTORY_BYTES:
            raise self._refused(f"has a directory of {nbytes} bytes, at most {MAX_DIRECTORY_BYTES}")
        if at >= self._tail_at:
            directory = self._tail[at - self._tail_at : at - self._tail_at + nbytes]
        else:
            directory = self._read(at, nbytes)
        place = 0
        for _ in range(count):
            if len(directory) - place < _CENTRAL_HEAD.size:
                raise self._refused("has a directory that ends too early")
            fields = _CENTRAL_HEAD.unpack_from(directory, place)
            mark, flags, method = fields[0], fields[3], fields[4]
            packed, size, names, extras, notes, local = *fields[8:13], fields[16]
            place += _CENTRAL_HEAD.size
            name = directory[place : place + names].decode("utf-8", "replace")
            extra = directory[place + names : place + names + extras]
            packed, size, local = _widened(extra, packed, size, local)
            if mark != _CENTRAL or method != 0 or flags & 1 or packed != size:
                raise self._refused(
                    f"has {name[:80]!r} compressed or encrypted; only stored entries can be read"
                )
            if name in self._entries:
                raise self._refused(f"has {name[:80]!r} twice")
            self._entries[name] = local, size
            place += names + extras + notes

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def span(self, name: str) -> Span:
        """Return where an entry's bytes are in the file; its local head says where they start."""
        local, nbytes = self._entries[name]
        head = self._read(local, min(_HEAD_BYTES, max(self._span.nbytes - local, 0)))
        label = name.encode()
        if len(head) < _LOCAL_HEAD.size + len(label):
            raise self._refused(f"has no head for {name[:80]!r} at {local}")
        mark, *_, names, extras = _LOCAL_HEAD.unpack_from(head)
        if mark != _LOCAL or head[_LOCAL_HEAD.size :][:names] != label:
            raise self._refused(f"has another entry than {name[:80]!r} at {local}")
        start = local + _LOCAL_HEAD.size + names + extras
        if start > self._span.nbytes or nbytes > self._span.nbytes - start:
            raise self._refused(f"has {name[:80]!r} of {nbytes} bytes at {start}")
        return Span(self._span.offset + start, nbytes)


def _widened(extra: bytes, packed: int, size: int, local: int) -> tuple[int, int, int]:
    """Return the numbers of an entry; those too large for their fields are in `extra`."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
            numbers = iter(int.from_bytes(wide[n : n + 8], "little") for n in range(0, length, 8))
            size = next(numbers, size) if size == _FULL32 else size
            packed = next(numbers, packed) if packed == _FULL32 else packed
            local = next(numbers, local) if local == _FULL32 else local
        at += 4 + length
    return packed, size, local


def lay_out(
    small: Mapping[str, bytes], large: tuple[str, int] | None, *, start: int, align_bytes: int = 64
) -> tuple[bytes, bytes]:
    """Return the bytes before and after the large entry, of which only the size is known.

    The archive starts at byte `start` of its file, and the large entry is aligned in that file.
    Checksums are zero, which torch writes too if asked: they are not known yet.
    """
    head, directory = bytearray(), bytearray()

    def add(name: str, nbytes: int, align: int) -> None:
        local, label = len(head), name.encode()
        wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _FULL32 else b""
        padding = -(start + local + _LOCAL_HEAD.size + len(label) + len(wide) + 4) % align
        extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        # In both heads: method and time, then a checksum of zero, then the size twice.
        same = (0x800, 0, 0, 0, 0, min(nbytes, _FULL32), min(nbytes, _FULL32), len(label))
        head.extend(_LOCAL_HEAD.pack(_LOCAL, 0, *same, len(extra)) + label + extra)
        places = (len(wide), 0, 0, 0, 0, local)
        directory.extend(_CENTRAL_HEAD.pack(_CENTRAL, 0, 0, *same, *places) + label + wide)

    for name, data in small.items():
        add(name, len(data), 1)
        head.extend(data)
    count, large_bytes = len(small), 0
    if large is not None:
        count, large_bytes = count + 1, large[1]
        add(*large, align_bytes)
    at = len(head) + large_bytes
    tail = bytes(directory)
    if at >= _FULL32:
        tail += _END64 + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, count, count, len(directory), at)
        tail += _END64_AT + struct.pack("<IQI", 0, at + len(directory), 1)
    tail += _END + struct.pack("<4H2IH", 0, 0, count, count, len(directory), min(at, _FULL32), 0)
    return bytes(head), tail
