"""torch's distributed checkpoints: a `.metadata` and `.distcp` files, or safetensors with offsets.

`.metadata` is a pickle of a few plain classes; a `.distcp` holds, one after the other,
a small archive for each tensor, whose raw bytes can be read where they stand. torch
unpickles both, which runs whatever they say; here nothing is run. Its loader checks
no checksum and no coverage: the boxes are proved to cover every tensor before use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from flyweight.errors import FormatError, SnapshotIncomplete, SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.decoded import DecodedStore
from flyweight.formats.pickles import Global, Made, Persistent, Span, read_pickle
from flyweight.formats.records import Records, told
from flyweight.formats.safetensors import read_head
from flyweight.formats.stored import Stored
from flyweight.formats.zips import Archive, lay_out
from flyweight.memory import Buffer, Bytes, bytes_of, item_dtype
from flyweight.ports import FilePlan, Format, Store
from flyweight.spec.box import Box, strides_of
from flyweight.spec.dtype import BY_TORCH, DType
from flyweight.spec.manifest import (
    Extent,
    Json,
    Leaf,
    Manifest,
    Parcel,
    TensorSpec,
    check_coverage,
    check_name,
    check_names,
    is_same_leaf,
)
from flyweight.spec.manifest_json import parse_json

METADATA = ".metadata"
_META = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # until 2.2
_FILES = "torch.distributed.checkpoint.filesystem"
_DTYPES = {("torch", name) for name in BY_TORCH}
_SIZE = ("torch", "Size")
_ALLOWED = _DTYPES | {
    (_META, "Metadata"),
    (_META, "MetadataIndex"),
    (_META, "TensorStorageMetadata"),
    (_META, "ChunkStorageMetadata"),
    (_META, "TensorProperties"),
    (_META, "BytesStorageMetadata"),
    (_META, "StorageMeta"),
    (_META, "_MEM_FORMAT_ENCODING"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    _SIZE,
}
# What torch calls the storage of a dtype; those that are not here are told by their bytes.
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
_ITEM_ALLOWED = {*_DTYPES, *_BY_STORAGE, _REBUILD, _REBUILD_ANY, _UNTYPED, _ORDERED, _SIZE}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_SHARDED = re.compile(r"shard-([0-9]{1,9})-model-[0-9]+-of-[0-9]+\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


def has_checkpoint(names: Sequence[str]) -> bool:
    return METADATA in names or any(re.fullmatch(r"__[0-9]+_[0-9]+\.distcp", n) for n in names)


def has_safetensors(names: Sequence[str]) -> bool:
    """True for the variant whose ranks write safetensors files of their own."""
    return any(_SHARDED.fullmatch(name) for name in names)


def open_dcp(store: Store) -> Stored:
    """Open the directory's checkpoint."""
    names = store.names()
    if METADATA not in names:
        files = sorted(name for name in names if name.endswith((".distcp", ".metadata")))
        raise SnapshotIncomplete(
            f"{store.place!r} has {len(files)} files like {files[0]!r} and no {METADATA!r}: a save "
            f"that never finished, or one without collectives"
        )
    try:
        return _Reader(store).stored()
    except RecursionError as cause:
        raise FormatError(f"{METADATA!r} in {store.place!r} nests too deep") from cause
    except SpecError as cause:
        raise FormatError(f"{METADATA!r} in {store.place!r}: {cause}") from cause


class _Reader:
    def __init__(self, store: Store) -> None:
        self._store, self._names = DecodedStore(store), set(store.names())
        self._sizes: dict[str, int] = {}
        self._records = Records(f"{METADATA!r} in {store.place!r}")
        self._refused, self._fields = self._records.refused, self._records.fields
        self._records.check_size(store.size(METADATA))
        root = read_pickle(self._store, METADATA, _ALLOWED, has_objects=True)
        fields = self._fields(root, "Metadata")
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise self._refused("has no tensors or no files")
        self._entries = entries
        self._places = self._read_places(places)
        self._check_apart()

    def _size(self, value: object, name: str) -> tuple[int, ...]:
        if isinstance(value, Made) and (value.what.module, value.what.name) == _SIZE:
            match value.args:
                case (numbers,):
                    value = numbers
        return self._records.numbers(value, name)

    def _read_places(
        self, places: Mapping[object, object]
    ) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, Span]]:
        found: dict[tuple[str, tuple[int, ...] | None], tuple[str, Span]] = {}
        for key, value in places.items():
            index, info = self._fields(key, "MetadataIndex"), self._fields(value, "_StorageInfo")
            name, offset = index.get("fqn"), index.get("offset")
            if not isinstance(name, str):
                raise self._refused(f"has a file for {told(name)}")
            place = (name, None if offset is None else self._size(offset, name))
            if info.get("transform_descriptors"):
                raise self._refused(f"has {name!r} packed: {told(info['transform_descriptors'])}")
            if place in found:
                raise self._refused(f"has two places for {name!r} from {place[1]} on")
            found[place] = self._place(name, info)
        return found

    def _check_apart(self) -> None:
        """Raise if two items share bytes: torch never writes that, and each would be read anew."""
        spans = sorted((file, span.offset, span.nbytes) for file, span in self._places.values())
        for (file, offset, nbytes), (other, start, _) in pairwise(spans):
            if file == other and offset + nbytes > start:
                raise self._refused(f"has two items that share bytes from {start} on of {file!r}")

    def _place(self, name: str, info: Mapping[str, object]) -> tuple[str, Span]:
        file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            told_file = told(file)
            raise self._refused(
                f"puts {name!r} into {told_file}, which is no file of this directory"
            )
        if file not in self._sizes:
            if file not in self._names:
                raise SnapshotIncomplete(
                    f"{METADATA!r} in {self._store.place!r} names {file!r}, which is not there"
                )
            self._sizes[file] = self._store.size(file)
        size = self._sizes[file]
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            raise self._refused(
                f"has {name!r} at {told(offset)}, {told(nbytes)} bytes, of {file!r}"
            )
        if offset + nbytes > size:
            raise SnapshotIncomplete(
                f"{file!r} in {self._store.place!r} has {size} bytes, {name!r} ends at "
                f"{offset + nbytes}"
            )
        return file, Span(offset, nbytes)

    def stored(self) -> Stored:
        tensors: dict[str, TensorSpec] = {}
        values: dict[str, Leaf] = {}
        extents: list[Extent] = []
        for name, entry in self._entries.items():
            if not isinstance(name, str):
                raise self._refused(f"has an entry called {told(name)}")
            check_name(name)
            if isinstance(entry, Made) and entry.what.name == "BytesStorageMetadata":
                for leaf, value in self._values(name):
                    # Lists may be there whole and by their elements, as we write them.
                    if leaf in values and not is_same_leaf(values[leaf], value):
                        raise self._refused(f"has two values for {leaf!r}")
                    values[leaf] = value
                continue
            tensors[name], boxes = self._tensor(name, entry)
            for box in boxes:
                if box.num_elements:
                    extents.append(self._extent(name, tensors[name], box))
        manifest = Manifest(tensors, values=values, extents=extents)
        check_names(manifest)
        check_coverage(manifest)
        return Stored(manifest, self._store, format="dcp")

    def _tensor(self, name: str, entry: object) -> tuple[TensorSpec, list[Box]]:
        fields = self._fields(entry, "TensorStorageMetadata")
        match fields.get("properties"):
            case Made(what=Global(name="TensorProperties"), state=(dtype, *_)):
                pass
            case other:
                raise self._refused(f"has {told(other)} for the properties of {name!r}")
        spec = _spec(self._dtype(name, dtype), self._size(fields.get("size"), name))
        chunks = fields.get("chunks")
        boxes = []
        for chunk in chunks if isinstance(chunks, list) else ():
            corner = self._fields(chunk, "ChunkStorageMetadata")
            offset = self._size(corner.get("offsets"), name)
            shape = self._size(corner.get("sizes"), name)
            if len(offset) != len(shape) or len(shape) != len(spec.shape):
                raise self._refused(f"has {offset} and {shape} in {name!r} of {spec.shape}")
            if spec.dtype.bits < 8:
                offset, shape = _unpacked(spec.dtype, offset), _unpacked(spec.dtype, shape)
            box = Box(offset, shape)
            if box.num_elements and not Box.whole(spec.shape).contains(box):
                raise self._refused(
                    f"has {box.offset}..{box.end} of {name!r}, which is {spec.shape}"
                )
            boxes.append(box)
        return spec, boxes

    def _dtype(self, name: str, value: object) -> DType:
        if isinstance(value, Global) and value.module == "torch" and value.name in BY_TORCH:
            return BY_TORCH[value.name]
        raise self._refused(f"says that {name!r} is {told(value)}")

    def _extent(self, name: str, spec: TensorSpec, box: Box) -> Extent:
        packed = spec.stored(box).offset if spec.dtype.bits < 8 else box.offset
        if (name, packed) not in self._places:
            raise self._refused(f"names no file for {name!r} from {box.offset} on")
        file, item = self._places[name, packed]
        what = f"{name!r} in {file!r} of {self._store.place!r}"
        archive, entries, root = self._archive(file, item)
        dtype, key, count_bytes, start, shape, strides = _rebuilt(root, what)
        if dtype != spec.dtype or shape != spec.stored(box).shape:
            raise FormatError(
                f"{what} is {dtype}{list(shape)} there and {spec.dtype}"
                f"{list(spec.stored(box).shape)} by {METADATA!r}"
            )
        if f"data/{key}" not in entries:
            raise FormatError(f"{what} has no storage {key!r}")
        data, width = archive.span(entries[f"data/{key}"]), spec.item_bytes
        steps = tuple(width * stride for stride in strides)
        items = Buffer(start * width, shape, steps, width, None)
        if items.span[1] > data.nbytes or count_bytes != data.nbytes:
            raise FormatError(
                f"{what} needs {items.span[1]} bytes of its storage, which has {data.nbytes} of "
                f"{count_bytes}"
            )
        if items.is_folded:
            raise FormatError(f"{what} has strides {strides}: elements would share bytes")
        if _is_row_major(shape, strides):
            return Extent(name, box, file, data.offset + start * width)

        def straightened() -> Bytes:
            """Return the bytes of a tensor that was saved with other strides, row-major."""
            low, high = items.span
            raw = bytes_of(self._store.read(file, data.offset + low, high - low))
            view = np.ndarray(shape, item_dtype(width), raw, strides=steps)
            return np.ascontiguousarray(view).reshape(-1).view(np.uint8)

        return Extent(name, box, self._store.add(file, straightened), 0)

    def _archive(self, file: str, item: Span) -> tuple[Archive, dict[str, str], object]:
        """Return an item's archive, its entries without the directory they are in, its pickle."""
        archive = Archive(self._store, file, item)
        entries = {name.partition("/")[2]: name for name in archive.names}
        if (
            len({name.partition("/")[0] for name in archive.names}) != 1
            or "data.pkl" not in entries
        ):
            raise FormatError(
                f"bytes {item.offset}..{item.offset + item.nbytes} of {file!r} in "
                f"{self._store.place!r} are no archive of torch's: {sorted(entries)[:5]}"
            )
        if "byteorder" in entries:
            order = archive.span(entries["byteorder"])
            text = self._store.read(file, order.offset, min(order.nbytes, 16))
            if text != b"little":
                raise FormatError(f"{file!r} in {self._store.place!r} has byte order {text!r}")
        pickle = archive.span(entries["data.pkl"])
        root = read_pickle(self._store, file, _ITEM_ALLOWED, stretch=pickle, has_objects=True)
        return archive, entries, root

    def _values(self, name: str) -> list[tuple[str, Leaf]]:
        if (name, None) not in self._places:
            raise self._refused(f"names no file for the value {name!r}")
        file, item = self._places[name, None]
        try:
            *_, root = self._archive(file, item)
        except FormatError as error:
            error.note(f"value {name!r}; only plain values, dicts and lists of them can be read")
            raise
        return self._records.leaves(name, root)


def _spec(dtype: DType, packed: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a tensor whose shape is told as torch does: packed bytes, not elements."""
    return TensorSpec(dtype, _unpacked(dtype, packed) if dtype.bits < 8 else packed)


def _unpacked(dtype: DType, numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers[:-1], numbers[-1] * 8 // dtype.bits) if numbers else numbers


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    wanted = strides_of(shape)
    return not prod(shape) or all(
        n == 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True)
    )


def _rebuilt(
    root: object, what: str
) -> tuple[DType, str, int, int, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, storage and its bytes, start, shape and strides that a pickle speaks of."""
    match root:
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
                *rest,
            ),
        ):
            pass
        case _:
            raise FormatError(f"{what} is {told(root)}, expected a plain tensor")
    if (call.module, call.name) == _REBUILD:
        dtype = _BY_STORAGE.get((kind.module, kind.name))
        flags = rest
    else:
        match rest:
            case [Global(module="torch", name=name), *flags]:
                dtype = BY_TORCH.get(name)
            case _:
                dtype, flags = None, []
    if dtype is None or any(flags):
        marks = ", ".join(str(key) for flag in flags if isinstance(flag, dict) for key in flag)
        raise FormatError(
            f"{what} is of {told(kind)}, marked {marks[:80]!r}: not a plain tensor; save it after "
            f".resolve_conj().resolve_neg()"
        )
    records = Records(what)
    shape, strides = records.numbers(shape, "shape"), records.numbers(strides, "strides")
    start, count = records.numbers((start, count), "storage")
    if len(shape) != len(strides):
        raise FormatError(f"{what} has shape {shape} and strides {strides}")
    is_typed = (call.module, call.name) == _REBUILD
    count_bytes = count * max(dtype.bits // 8, 1) if is_typed else count
    return dtype, key, count_bytes, start, shape, strides


# The safetensors variant: ranks write files of their own, with the offset of each shard.


def open_safetensors_shards(store: Store) -> Stored:
    """Open files whose heads tell where each tensor starts in the whole one.

    No file tells how large the whole is, so a last rank's file that is gone is not noticed.
    """
    files = sorted(name for name in store.names() if _SHARDED.fullmatch(name))
    ranks = {int(match[1]) for name in files if (match := _SHARDED.fullmatch(name))}
    if ranks != set(range(1, len(ranks) + 1)):
        raise SnapshotIncomplete(f"{store.place!r} has files of ranks {sorted(ranks)[:20]}")
    try:
        return _open_shards(store, files)
    except SpecError as cause:
        raise FormatError(f"{store.place!r}: {cause}") from cause


def _open_shards(store: Store, files: Sequence[str]) -> Stored:
    tensors: dict[str, TensorSpec] = {}
    extents: list[Extent] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        head, what = read_head(store, file), f"{file!r} in {store.place!r}"
        offsets = _sharding_offsets(head.notes, what)
        for extent in head.extents:
            name, spec = extent.name, head.tensors[extent.name]
            if len(offsets.get(name, ())) != len(spec.shape) or name not in offsets:
                raise FormatError(
                    f"{name!r} of {what} is {spec.shape} and starts at {offsets.get(name)}"
                )
            box = Box(offsets[name], spec.shape)
            known = tensors.setdefault(name, spec)
            if known.dtype != spec.dtype or len(known.shape) != len(spec.shape):
                raise FormatError(f"{name!r} is {known} in one file and {spec} in {file!r}")
            shapes[name] = tuple(map(max, shapes.get(name, (0,) * len(box.shape)), box.end))
            if box.num_elements:
                extents.append(Extent(name, box, file, extent.offset))
    whole = {name: TensorSpec(spec.dtype, shapes[name]) for name, spec in tensors.items()}
    manifest = Manifest(whole, extents=extents)
    check_coverage(manifest)
    return Stored(manifest, store, format="dcp safetensors")


def _sharding_offsets(notes: Mapping[str, Json], what: str) -> dict[str, tuple[int, ...]]:
    """Return where the tensors of a file start in the whole ones, as its head says."""
    text = notes.get(_SHARDING)
    record = parse_json(text.encode(), f"{_SHARDING} of {what}") if isinstance(text, str) else None
    if not isinstance(record, dict):
        raise FormatError(f"head of {what} has no {_SHARDING}, which tells where its tensors start")
    offsets: dict[str, tuple[int, ...]] = {}
    for name, entry in record.items():
        match entry:
            case {"saved_offsets": list() as numbers}:
                offsets[name] = Records(f"{_SHARDING} of {what}").numbers(numbers, name)
            case _:
                raise FormatError(f"{_SHARDING} of {what} has {told(entry)} for {name!r}")
    return offsets


def sharding_notes(parcels: Sequence[Parcel]) -> dict[str, str]:
    """Return what torch's reader of this variant looks for in a head: where each tensor starts.

    It knows one box of a tensor in a file; a file with more of them is not for it.
    """
    offsets: dict[str, Json] = {p.name: {"saved_offsets": list(p.box.offset)} for p in parcels}
    if len(offsets) != len(parcels):
        return {}
    return {_SHARDING: json.dumps(offsets, separators=(",", ":")), "DCP_VERSION": "1.0"}


# Writing: one data file, as a job of one rank would write it.

_DATA_FILE = "__0_0.distcp"
_FIXED = {"byteorder": b"little", "version": b"3\n"}


def _tensor_pickle(spec: TensorSpec) -> bytes:
    torch_name = spec.dtype.torch
    if torch_name is None:
        raise SpecError(f"{spec.dtype} has no name in torch")
    shape = spec.stored(Box.whole(spec.shape)).shape
    is_typed = torch_name in _STORAGES
    kind = (
        code.named("torch", f"{_STORAGES[torch_name]}Storage")
        if is_typed
        else code.named(*_UNTYPED)
    )
    count = prod(shape) if is_typed else spec.nbytes
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


def _archive(pickle: bytes, large_bytes: int | None, start: int) -> tuple[bytes, bytes]:
    small = {"archive/data.pkl": pickle}
    small |= {f"archive/{name}": data for name, data in _FIXED.items()}
    large = None if large_bytes is None else ("archive/data/0", large_bytes)
    return lay_out(small, large, start=start)


def _items(manifest: Manifest) -> dict[str, bytes]:
    """Return the pickle of each item that is no tensor: every value, and lists of them whole.

    Nested names do not tell a list from a dict, and torch asks for the one by its own name and for
    the other by those of its elements: both are there.
    """
    items = {name: b"\x80\x02" + code.leaf(value) + b"." for name, value in manifest.values.items()}
    lists: dict[str, dict[str, Leaf]] = {}
    for name, value in manifest.values.items():
        above, _, key = name.rpartition(".")
        if above and key.isdecimal():
            lists.setdefault(above, {})[key] = value
    for name, found in lists.items():
        if name not in manifest.tensors and found.keys() == {str(n) for n in range(len(found))}:
            values = (code.leaf(found[str(n)]) for n in range(len(found)))
            items.setdefault(name, b"\x80\x02" + code.row(values) + b".")
    return items


def _layout(manifest: Manifest) -> list[FilePlan]:
    literals: list[tuple[int, bytes]] = []
    extents, pending = [], bytearray()
    at = pending_at = 0
    for pickle in _items(manifest).values():
        pending += b"".join(_archive(pickle, None, len(pending)))
        at = len(pending)
    for name, spec in manifest.tensors.items():
        try:
            head, tail = _archive(_tensor_pickle(spec), spec.nbytes, at)
        except SpecError as error:
            error.note(f"tensor {name!r}")
            raise
        literals.append((pending_at, bytes(pending + head)))
        at += len(head)
        extents.append(Extent(name, Box.whole(spec.shape), _DATA_FILE, at))
        at += spec.nbytes
        pending, pending_at = bytearray(tail), at
        at += len(tail)
    literals.append((pending_at, bytes(pending)))
    return [FilePlan(_DATA_FILE, at, literals, extents)]


def _seal(manifest: Manifest, plans: Sequence[FilePlan]) -> dict[str, bytes]:
    memo = code.Memo()

    def size(numbers: Sequence[int]) -> bytes:
        return code.called(memo(code.named(*_SIZE)), code.numbers(numbers))

    entries, places = [], []
    layout = code.called(
        code.named("torch.serialization", "_get_layout"), code.text("torch.strided")
    )
    order = code.called(code.named(_META, "_MEM_FORMAT_ENCODING"), code.number(0))
    for name, spec in manifest.tensors.items():
        shape = spec.stored(Box.whole(spec.shape)).shape
        kind = memo(code.named(_META, "TensorProperties")) + b")\x81"
        dtype = memo(code.named("torch", str(spec.dtype.torch)))
        fields = (dtype, memo(layout), code.FALSE, memo(order), code.FALSE)
        properties = kind + code.pack(fields) + b"b"
        whole = size(shape)
        chunk = code.made(
            memo(code.named(_META, "ChunkStorageMetadata")),
            offsets=size([0] * len(shape)),
            sizes=size(shape),
        )
        entry = code.named(_META, "TensorStorageMetadata")
        entries.append(
            (
                code.text(name),
                code.made(entry, properties=properties, size=whole, chunks=code.row([chunk])),
            )
        )
    raw = code.named(_META, "BytesStorageMetadata") + b")\x81"
    pickles = _items(manifest)
    entries += [(code.text(name), raw) for name in pickles]
    spans = _spans(manifest, pickles)
    for name, (start, nbytes) in spans.items():
        index = {"fqn": code.text(name), "index": code.NONE}
        if name in manifest.tensors:
            index = {"fqn": code.text(name), "index": code.number(0)}
            index["offset"] = size([0] * len(manifest.tensors[name].shape))
        places.append(
            (
                code.made(memo(code.named(_META, "MetadataIndex")), **index),
                code.made(
                    memo(code.named(_FILES, "_StorageInfo")),
                    relative_path=code.text(_DATA_FILE),
                    offset=code.number(start),
                    length=code.number(nbytes),
                ),
            )
        )
    paths = ((code.text(name), code.pack([code.text(name)])) for name in spans)
    text = code.made(
        code.named(_META, "Metadata"),
        state_dict_metadata=code.table(entries),
        planner_data=code.table(paths),
        storage_data=code.table(places),
        storage_meta=code.NONE,
        version=code.text("1.0.0"),
    )
    return {METADATA: b"\x80\x02" + text + b"."}


def _spans(manifest: Manifest, pickles: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
    """Return where each value's and each tensor's archive stands in the file."""
    spans, at = {}, 0
    for name, pickle in pickles.items():
        spans[name] = at, sum(map(len, _archive(pickle, None, at)))
        at += spans[name][1]
    for name, spec in manifest.tensors.items():
        head, tail = _archive(_tensor_pickle(spec), spec.nbytes, at)
        spans[name] = at, len(head) + spec.nbytes + len(tail)
        at += spans[name][1]
    return spans


DCP_FORMAT = Format("dcp", _layout, _seal, has_values=True)
