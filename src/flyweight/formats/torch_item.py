"""Items: a `.distcp` file is a row of archives, one for each tensor and each value.

An item is what `torch.save` writes: a zip archive without compression, with a small pickle that
describes the raw bytes beside it. The pickle is read without running it, and no number in an
archive makes the reader leave it, or hold more of it in memory than its directory. An archive
is written around bytes that are not known yet. `torch_dcp.py` reads and writes the index.
"""

from __future__ import annotations

import struct
from math import prod

from flyweight.errors import SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.pickle_values import Global, Made, Persistent, Span
from flyweight.formats.pickles import MAX_TEXT_BYTES, read_pickle
from flyweight.formats.records import Records, shown
from flyweight.memory import Buffer
from flyweight.ports import Store
from flyweight.spec.box import Box, strides_of
from flyweight.spec.dtype import BY_TORCH, DType
from flyweight.spec.manifest import TensorSpec

DTYPE_NAMES = {("torch", name) for name in BY_TORCH}
SIZE = ("torch", "Size")
# What torch calls the storage of a dtype; other dtypes have an untyped storage.
_STORAGES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16",
    "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte",
    "bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip
_BY_STORAGE = {("torch", f"{kind}Storage"): BY_TORCH[name] for name, kind in _STORAGES.items()}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_REBUILD_ANY = ("torch._utils", "_rebuild_tensor_v3")
_UNTYPED = ("torch.storage", "UntypedStorage")
_ORDERED = ("collections", "OrderedDict")
_ALLOWED = {*DTYPE_NAMES, *_BY_STORAGE, _REBUILD, _REBUILD_ANY, _UNTYPED, _ORDERED, SIZE}

MAX_ENTRIES = 4096
MAX_DIRECTORY_BYTES = MAX_ENTRIES << 10
_END, _END64, _END64_AT = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_CENTRAL, _LOCAL = b"PK\1\2", b"PK\3\4"
_LOCAL_HEAD = struct.Struct("<4s5H3I2H")
_CENTRAL_HEAD = struct.Struct("<4s6H3I5H2I")
_TAIL_BYTES = 4096
_HEAD_BYTES = 512  # a local head with its name, as far as it must be looked at
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_ALIGN_BYTES = 64


class TorchItem(Records):
    """An archive that is a span of a file: its pickle, and where its storages are."""

    def __init__(self, store: Store, file: str, span: Span, name: str) -> None:
        place = f"bytes {span.offset}..{span.end} of {file!r} in {store.place!r}"
        super().__init__(f"{name!r}, the archive in {place},")
        self._store, self._file, self._span = store, file, span
        entries = self._read_directory()
        # Without the directory that they are in.
        self._entries = {name.partition("/")[2]: (name, *place) for name, place in entries.items()}
        if len(roots := {name.partition("/")[0] for name in entries}) != 1:
            raise self.refused(f"has the directories {sorted(roots)[:5]}, expected one")
        if "byteorder" in self._entries:
            order = self._entry("byteorder")
            text = store.read(file, order.offset, min(order.nbytes, 16))
            if text != b"little":
                raise self.refused(f"has byte order {text!r}")
        pickle = self._entry("data.pkl")
        self.root = read_pickle(
            store,
            file,
            _ALLOWED,
            span=pickle,
            has_objects=True,
            max_text_bytes=MAX_TEXT_BYTES,  # a tensor's bytes are in a storage beside it
        )

    def _read(self, at: int, nbytes: int) -> bytes:
        if at > self._span.nbytes or nbytes > self._span.nbytes - at:
            raise self.refused(f"is cut short: {nbytes} bytes wanted at {at}")
        return self._store.read(self._file, self._span.offset + at, nbytes)

    def _read_directory(self) -> dict[str, tuple[int, int]]:
        """Return where the local head of each entry is, and how many bytes the entry has."""
        tail_at = max(self._span.nbytes - _TAIL_BYTES, 0)
        tail = self._read(tail_at, self._span.nbytes - tail_at)
        end = tail.rfind(_END)
        if end < 0 or len(tail) - end < 22:
            raise self.refused("has no directory at its end")
        count, nbytes, at = struct.unpack_from("<HII", tail, end + 10)
        if _FULL32 in (at, nbytes) or count == _FULL16:
            record = tail.rfind(_END64, 0, max(tail.rfind(_END64_AT, 0, end), 0))
            if record < 0 or len(tail) - record < 56:
                raise self.refused("lacks the directory of large archives")
            count, nbytes, at = struct.unpack_from("<QQQ", tail, record + 32)
        if count > MAX_ENTRIES or nbytes > MAX_DIRECTORY_BYTES:
            raise self.refused(
                f"has a directory of {count} entries, at most {MAX_ENTRIES}, and {nbytes} bytes, "
                f"at most {MAX_DIRECTORY_BYTES}"
            )
        directory = tail[at - tail_at :][:nbytes] if at >= tail_at else self._read(at, nbytes)
        entries: dict[str, tuple[int, int]] = {}
        place = 0
        for _ in range(count):
            if len(directory) - place < _CENTRAL_HEAD.size:
                raise self.refused("has a directory that ends too early")
            fields = _CENTRAL_HEAD.unpack_from(directory, place)
            mark, flags, method = fields[0], fields[3], fields[4]
            packed, size, names, extras, notes, local = *fields[8:13], fields[16]
            place += _CENTRAL_HEAD.size
            name = directory[place : place + names].decode("utf-8", "replace")
            extra = directory[place + names : place + names + extras]
            packed, size, local = _widened(extra, packed, size, local)
            if mark != _CENTRAL or method != 0 or flags & 1 or packed != size:
                raise self.refused(
                    f"has {name[:80]!r} compressed or encrypted; only stored entries can be read"
                )
            if name in entries:
                raise self.refused(f"has {name[:80]!r} twice")
            entries[name] = local, size
            place += names + extras + notes
        return entries

    def _entry(self, key: str) -> Span:
        """Return where an entry's bytes are in the file; its local head says where they start."""
        if key not in self._entries:
            raise self.refused(f"has no {key[:80]!r}, only {sorted(self._entries)[:5]}")
        name, local, nbytes = self._entries[key]
        head = self._read(local, min(_HEAD_BYTES, max(self._span.nbytes - local, 0)))
        label = name.encode()
        if len(head) < _LOCAL_HEAD.size + len(label):
            raise self.refused(f"has no head for {name[:80]!r} at {local}")
        mark, *_, names, extras = _LOCAL_HEAD.unpack_from(head)
        if mark != _LOCAL or head[_LOCAL_HEAD.size :][:names] != label:
            raise self.refused(f"has another entry than {name[:80]!r} at {local}")
        start = local + _LOCAL_HEAD.size + names + extras
        if start > self._span.nbytes or nbytes > self._span.nbytes - start:
            raise self.refused(f"has {name[:80]!r} of {nbytes} bytes at {start}")
        return Span(self._span.offset + start, nbytes)

    def tensor(self) -> tuple[DType, Buffer]:
        """Return the tensor's dtype, and where its items are in the file; raise if it is none."""
        match self.root:
            case Made(
                what=Global() as call,
                args=(
                    Persistent(
                        what=("storage", Global() as kind, str() as key, str(), int() as count, *_)
                    ),
                    int() as start,
                    tuple() as shape,
                    tuple() as strides,
                    bool(),
                    _,
                    *flags,
                ),
            ):
                pass
            case other:
                raise self.refused(f"is {shown(other)}, expected a plain tensor")
        dtype, is_typed = _BY_STORAGE.get((kind.module, kind.name)), call.name == _REBUILD[1]
        if not is_typed:
            match flags:
                case [Global(module="torch", name=torch_name), *flags]:
                    dtype = BY_TORCH.get(torch_name)
                case _:
                    dtype = None
        if dtype is None or any(flags):
            names = (key for flag in flags if isinstance(flag, dict) for key in flag)
            marks = ", ".join(key for key in names if isinstance(key, str))
            raise self.refused(
                f"is of {shown(kind)}, marked {marks[:80]!r}: not a plain tensor; save it after "
                f".resolve_conj().resolve_neg()"
            )
        shape, strides = self.numbers(shape, "shape"), self.numbers(strides, "strides")
        start, count = self.numbers((start, count), "storage")
        if len(shape) != len(strides):
            raise self.refused(f"has shape {shape} and strides {strides}")
        data, width = self._entry(f"data/{key}"), max(dtype.bits // 8, 1)
        steps = tuple(width * stride for stride in strides)
        items = Buffer(data.offset + start * width, shape, steps, width, None)
        needed, count_bytes = items.span[1] - data.offset, count * width if is_typed else count
        if needed > data.nbytes or count_bytes != data.nbytes:
            raise self.refused(
                f"needs {needed} bytes of its storage, which has {data.nbytes} of {count_bytes}"
            )
        if items.is_folded:
            raise self.refused(f"has strides {strides}: elements would share bytes")
        return dtype, items


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


# Writing.


def tensor_pickle(spec: TensorSpec) -> bytes:
    """Return the pickle by which torch makes a tensor from its storage."""
    torch_name = spec.dtype.torch
    if torch_name is None:
        raise SpecError(f"{spec.dtype} has no name in torch")
    shape = spec.stored(Box.whole(spec.shape)).shape
    if is_typed := torch_name in _STORAGES:
        kind, count = code.named("torch", f"{_STORAGES[torch_name]}Storage"), prod(shape)
    else:
        kind, count = code.named(*_UNTYPED), spec.nbytes
    storage = code.pack(
        [code.text("storage"), kind, code.text("0"), code.text("cpu"), code.number(count)]
    )
    args = [
        storage + b"Q",
        code.number(0),
        code.numbers(shape),
        code.numbers(strides_of(shape)),
        code.FALSE,
        code.called(code.named(*_ORDERED)),
    ]
    if not is_typed:
        args.append(code.named("torch", torch_name))
    call = code.named(*(_REBUILD if is_typed else _REBUILD_ANY))
    return b"\x80\x02" + code.called(call, *args) + b"."


def lay_out_item(pickle: bytes, storage_bytes: int | None, start: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the storage of an item that starts at byte `start`.

    The storage is aligned in the file. An item that is not a tensor has none: `storage_bytes` is
    None. Checksums are zero, which torch writes too if asked: they are not known yet.
    """
    head, directory = bytearray(), bytearray()

    def add(entry: str, nbytes: int, data: bytes, align: int = 1) -> None:
        local, label = len(head), f"archive/{entry}".encode()
        wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _FULL32 else b""
        padding = -(start + local + _LOCAL_HEAD.size + len(label) + len(wide) + 4) % align
        extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        # In both heads: method and time, then a checksum of zero, then the size twice.
        same = (0x800, 0, 0, 0, 0, min(nbytes, _FULL32), min(nbytes, _FULL32), len(label))
        head.extend(_LOCAL_HEAD.pack(_LOCAL, 0, *same, len(extra)) + label + extra + data)
        places = (len(wide), 0, 0, 0, 0, local)
        directory.extend(_CENTRAL_HEAD.pack(_CENTRAL, 0, 0, *same, *places) + label + wide)

    small = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
    for entry, data in small.items():
        add(entry, len(data), data)
    if storage_bytes is not None:
        add("data/0", storage_bytes, b"", _ALIGN_BYTES)
    count, at = len(small) + (storage_bytes is not None), len(head) + (storage_bytes or 0)
    tail = bytes(directory)
    if at >= _FULL32:
        tail += _END64 + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, count, count, len(directory), at)
        tail += _END64_AT + struct.pack("<IQI", 0, at + len(directory), 1)
    tail += _END + struct.pack("<4H2IH", 0, 0, count, count, len(directory), min(at, _FULL32), 0)
    return bytes(head), tail
