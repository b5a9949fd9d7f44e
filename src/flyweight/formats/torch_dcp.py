"""torch's distributed checkpoints: `.metadata`, which is the index, and `.distcp` files.

`.metadata` is a pickle of a few plain classes. A `.distcp` file is a row of small archives,
one for each tensor, whose raw bytes can be read where they are. torch unpickles both, which
runs whatever they say; this reader runs nothing. torch's loader checks no checksums and no
coverage; this one proves that the boxes cover every tensor before it uses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from flyweight.errors import FormatError, SnapshotIncomplete
from flyweight.formats.budget import Budget
from flyweight.formats.decoded import DecodedStore
from flyweight.formats.pickle_values import Global, Made, Span
from flyweight.formats.records import as_format_errors, is_leaf, place_key, read_index, shown
from flyweight.formats.stored import Stored
from flyweight.formats.torch_item import DTYPE_NAMES, SIZE, TorchItem
from flyweight.memory import Bytes, bytes_of, item_dtype
from flyweight.ports import Store
from flyweight.spec.box import Box
from flyweight.spec.dtype import BY_TORCH
from flyweight.spec.manifest import (
    Extent,
    Leaf,
    Manifest,
    TensorSpec,
    check_coverage,
    check_name,
    check_names,
    is_same_leaf,
)

METADATA = ".metadata"
METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # until 2.2
FILES_MODULE = "torch.distributed.checkpoint.filesystem"
_ALLOWED = DTYPE_NAMES | {
    (METADATA_MODULE, "Metadata"),
    (METADATA_MODULE, "MetadataIndex"),
    (METADATA_MODULE, "TensorStorageMetadata"),
    (METADATA_MODULE, "ChunkStorageMetadata"),
    (METADATA_MODULE, "TensorProperties"),
    (METADATA_MODULE, "BytesStorageMetadata"),
    (METADATA_MODULE, "StorageMeta"),
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    (FILES_MODULE, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    SIZE,
}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


def has_checkpoint(names: Sequence[str]) -> bool:
    return METADATA in names or any(re.fullmatch(r"__[0-9]+_[0-9]+\.distcp", n) for n in names)


def open_dcp(store: Store) -> Stored:
    """Open the directory's checkpoint."""
    names = store.names()
    if METADATA not in names:
        files = sorted(name for name in names if name.endswith((".distcp", ".metadata")))
        raise SnapshotIncomplete(
            f"{store.place!r} has {len(files)} files like {files[0]!r} and no {METADATA!r}: a save "
            f"that never finished, or one without collectives"
        )
    with as_format_errors(f"{METADATA!r} in {store.place!r}"):
        return _Reader(store).stored()


class _Reader:
    def __init__(self, store: Store) -> None:
        self._store, self._names = DecodedStore(store), set(store.names())
        self._sizes: dict[str, int] = {}
        self._records, fields = read_index(store, METADATA, _ALLOWED)
        self._refused, self._fields = self._records.refused, self._records.fields
        self._numbers = self._records.numbers
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise self._refused("has no tensors or no files")
        self._entries = entries
        del fields  # records made below reuse the memory of those that are dropped
        self._places = self._read_places(places)
        self._records.values_budget = Budget(
            f"data of {METADATA!r} in {store.place!r}", sum(self._sizes.values())
        )
        self._check_apart()

    def _read_places(self, places: dict[object, object]) -> dict[bytes, tuple[str, Span]]:
        """Return where each item is; `places` is empty afterwards."""
        found: dict[bytes, tuple[str, Span]] = {}
        while places:
            key, value = places.popitem()
            index, info = self._fields(key, "MetadataIndex"), self._fields(value, "_StorageInfo")
            name, offset = index.get("fqn"), index.get("offset")
            if not isinstance(name, str):
                raise self._refused(f"has a file for {shown(name)}")
            corner = () if offset is None else self._numbers(offset, name)
            place = place_key(name) if offset is None else place_key(name, corner)
            if info.get("transform_descriptors"):
                raise self._refused(
                    f"has {name!r} compressed: {shown(info['transform_descriptors'])}"
                )
            if place in found:
                raise self._refused(f"has two places for {name!r} from {corner} on")
            found[place] = self._place(name, info)
        return found

    def _check_apart(self) -> None:
        """Raise if two items share bytes: torch never writes that, and each would be read again."""
        spans = sorted((file, span.offset, span.nbytes) for file, span in self._places.values())
        for (file, offset, nbytes), (other, start, _) in pairwise(spans):
            if file == other and offset + nbytes > start:
                raise self._refused(f"has two items that share bytes from {start} on of {file!r}")

    def _place(self, name: str, info: Mapping[str, object]) -> tuple[str, Span]:
        file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise self._refused(
                f"puts {name!r} into {shown(file)}, which is no file of this directory"
            )
        if file not in self._sizes:
            self._records.check_file(file, self._names)
            self._sizes[file] = self._store.size(file)
        size = self._sizes[file]
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            raise self._refused(
                f"has {name!r} at {shown(offset)}, {shown(nbytes)} bytes, of {file!r}"
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
        for name in list(self._entries):
            entry = self._entries.pop(name)  # what is made of it may take its memory
            if not isinstance(name, str):
                raise self._refused(f"has an entry called {shown(name)}")
            check_name(name)
            if isinstance(entry, Made) and entry.what.name == "BytesStorageMetadata":
                for leaf, value in self._values(name):
                    # Lists may be there whole and by their elements, as we write them.
                    if leaf in values and not is_same_leaf(values[leaf], value):
                        raise self._refused(f"has two values for {leaf!r}")
                    values[leaf] = value
                continue
            tensors[name], boxes = self._tensor(name, entry)
            extents += [self._extent(name, tensors[name], box) for box in boxes]
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
                raise self._refused(f"has {shown(other)} for the properties of {name!r}")
        if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in BY_TORCH:
            raise self._refused(f"says that {name!r} is {shown(dtype)}")
        shape, bits = self._numbers(fields.get("size"), name), BY_TORCH[dtype.name].bits
        if bits < 8 and shape:  # torch counts packed bytes
            shape = (*shape[:-1], shape[-1] * 8 // bits)
        spec = TensorSpec(BY_TORCH[dtype.name], shape)
        chunks = fields.get("chunks")
        boxes = []
        for chunk in chunks if isinstance(chunks, list) else ():
            corner = self._fields(chunk, "ChunkStorageMetadata")
            offset = self._numbers(corner.get("offsets"), name)
            shape = self._numbers(corner.get("sizes"), name)
            if len(offset) != len(shape) or len(shape) != len(spec.shape):
                raise self._refused(f"has {offset} and {shape} in {name!r} of {spec.shape}")
            box = spec.elements(Box(offset, shape))
            if box.num_elements:
                self._records.check_inside(name, box, spec.shape)
                boxes.append(box)
        return spec, boxes

    def _extent(self, name: str, spec: TensorSpec, box: Box) -> Extent:
        held = spec.stored(box)
        place = self._places.get(place_key(name, held.offset))
        if place is None:
            raise self._refused(f"names no file for {name!r} from {box.offset} on")
        file, span = place
        dtype, items = TorchItem(self._store, file, span, name).tensor()
        if dtype != spec.dtype or items.shape != held.shape:
            raise FormatError(
                f"{name!r} in {file!r} of {self._store.place!r} is {dtype}{list(items.shape)} "
                f"there and {spec.dtype}{list(held.shape)} by {METADATA!r}"
            )
        if items.is_contiguous:
            return Extent(name, box, file, items.address)

        def decode() -> Bytes:
            """Return the row-major bytes of a tensor that was saved with other strides."""
            low, high = items.span
            raw = bytes_of(self._store.read(file, low, high - low))
            view = np.ndarray(items.shape, item_dtype(items.item_bytes), raw, strides=items.strides)
            return np.ascontiguousarray(view).reshape(-1).view(np.uint8)

        return Extent(name, box, self._store.add(file, decode), 0)

    def _values(self, name: str) -> Iterator[tuple[str, Leaf]]:
        place = self._places.get(place_key(name))
        if place is None:
            raise self._refused(f"names no file for the value {name!r}")
        try:
            root = TorchItem(self._store, *place, name).root
        except FormatError as error:
            error.note(f"value {name!r}; only plain values, dicts and lists of them can be read")
            raise
        for inner, value in self._records.values(name, root):
            if not is_leaf(value):
                raise self._refused(f"has a value {inner!r} that is {shown(value)}")
            yield inner, value
