"""torch's distributed checkpoints: `.metadata`, which is the index, and `.distcp` files.

`.metadata` is a pickle of a few plain classes. A `.distcp` file is a row of small archives,
one for each tensor, whose raw bytes can be read where they are. torch unpickles both, which
runs whatever they say; this reader runs nothing. torch's loader checks no checksums and no
coverage; this one proves that the boxes cover every tensor before it uses them. Written is
one data file, as a job of one rank writes it, which torch's own loader reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from flyweight.errors import FormatError, SnapshotIncomplete, SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.pickle_values import Budget, Global, Made, Span
from flyweight.formats.records import Records, as_format_errors, is_leaf, place_key, shown
from flyweight.formats.stored import DecodedStore, Stored
from flyweight.formats.torch_item import DTYPE_NAMES, SIZE, TorchItem, lay_out_item, tensor_pickle
from flyweight.memory import Bytes, bytes_of, item_dtype
from flyweight.ports import FilePlan, Format, Store
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
_MODULE = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # until 2.2
_FILES_MODULE = "torch.distributed.checkpoint.filesystem"
_ALLOWED = DTYPE_NAMES | {
    (_MODULE, "Metadata"),
    (_MODULE, "MetadataIndex"),
    (_MODULE, "TensorStorageMetadata"),
    (_MODULE, "ChunkStorageMetadata"),
    (_MODULE, "TensorProperties"),
    (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "StorageMeta"),
    (_MODULE, "_MEM_FORMAT_ENCODING"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    (_FILES_MODULE, "_StorageInfo"),
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


class _Reader(Records):
    def __init__(self, store: Store) -> None:
        super().__init__(f"{METADATA!r} in {store.place!r}", store.size(METADATA))
        self._store, self._names = DecodedStore(store), set(store.names())
        fields = self.read_index(store, METADATA, _ALLOWED)
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise self.refused("has no tensors or no files")
        self._entries = entries
        del fields  # records made below reuse the memory of those that are dropped
        self._sizes: dict[str, int] = {}
        self._places = self._read_places(places)
        data_bytes = sum(self._sizes.values())
        self.values_budget = Budget(f"data of {METADATA!r} in {store.place!r}", data_bytes)

    def _read_places(self, places: dict[object, object]) -> dict[bytes, tuple[str, Span]]:
        """Return where each item is; `places` is empty afterwards."""
        found: dict[bytes, tuple[str, Span]] = {}
        while places:
            key, value = places.popitem()
            index, info = self.fields(key, "MetadataIndex"), self.fields(value, "_StorageInfo")
            name, offset = index.get("fqn"), index.get("offset")
            if not isinstance(name, str):
                raise self.refused(f"has a file for {shown(name)}")
            place = place_key(name, *([] if offset is None else [self.numbers(offset, name)]))
            if packing := info.get("transform_descriptors"):
                raise self.refused(f"has {name!r} compressed: {shown(packing)}")
            if place in found:
                raise self.refused(f"has two places for {name!r} from {shown(offset)} on")
            found[place] = self._place(name, info)
        spans = sorted((file, span.offset, span.end) for file, span in found.values())
        for (file, _, end), (other, start, _) in pairwise(spans):
            if file == other and end > start:  # torch never writes that: each would be read again
                raise self.refused(f"has two items that share bytes from {start} on of {file!r}")
        return found

    def _place(self, name: str, info: Mapping[str, object]) -> tuple[str, Span]:
        file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise self.refused(
                f"puts {name!r} into {shown(file)}, which is no file of this directory"
            )
        if file not in self._sizes:
            self.check_file(file, self._names)
            self._sizes[file] = self._store.size(file)
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            raise self.refused(
                f"has {name!r} at {shown(offset)}, {shown(nbytes)} bytes, of {file!r}"
            )
        if offset + nbytes > self._sizes[file]:
            raise SnapshotIncomplete(
                f"{file!r} in {self._store.place!r} has {self._sizes[file]} bytes, {name!r} ends "
                f"at {offset + nbytes}"
            )
        return file, Span(offset, nbytes)

    def stored(self) -> Stored:
        tensors: dict[str, TensorSpec] = {}
        values: dict[str, Leaf] = {}
        extents: list[Extent] = []
        for name in list(self._entries):
            entry = self._entries.pop(name)  # what is made of it may take its memory
            if not isinstance(name, str):
                raise self.refused(f"has an entry called {shown(name)}")
            check_name(name)
            if isinstance(entry, Made) and entry.what.name == "BytesStorageMetadata":
                for leaf, value in self._values(name):
                    # Lists may be there whole and by their elements, as we write them.
                    if leaf in values and not is_same_leaf(values[leaf], value):
                        raise self.refused(f"has two values for {leaf!r}")
                    values[leaf] = value
                continue
            tensors[name], boxes = self._tensor(name, entry)
            extents += [self._extent(name, tensors[name], box) for box in boxes]
        manifest = Manifest(tensors, values=values, extents=extents)
        check_names(manifest)
        check_coverage(manifest)
        return Stored(manifest, self._store, format="dcp")

    def _tensor(self, name: str, entry: object) -> tuple[TensorSpec, list[Box]]:
        fields = self.fields(entry, "TensorStorageMetadata")
        match fields.get("properties"):
            case Made(what=Global(name="TensorProperties"), state=(dtype, *_)):
                pass
            case other:
                raise self.refused(f"has {shown(other)} for the properties of {name!r}")
        if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in BY_TORCH:
            raise self.refused(f"says that {name!r} is {shown(dtype)}")
        whole, bits = self.numbers(fields.get("size"), name), BY_TORCH[dtype.name].bits
        shape = whole
        if bits < 8 and shape:  # torch counts packed bytes
            shape = (*shape[:-1], shape[-1] * 8 // bits)
        spec = TensorSpec(BY_TORCH[dtype.name], shape)
        chunks = fields.get("chunks")
        boxes = []
        for chunk in chunks if isinstance(chunks, list) else ():
            place = self.fields(chunk, "ChunkStorageMetadata")
            offset = self.numbers(place.get("offsets"), name)
            box = Box(offset, self.numbers(place.get("sizes"), name))
            if len(box.shape) != len(whole):
                raise self.refused(f"has {box.offset} and {box.shape} in {name!r} of {whole}")
            if box.num_elements:
                self.check_inside(name, box, whole)
                boxes.append(spec.elements(box))
        return spec, boxes

    def _extent(self, name: str, spec: TensorSpec, box: Box) -> Extent:
        held = spec.stored(box)
        place = self._places.get(place_key(name, held.offset))
        if place is None:
            raise self.refused(f"names no file for {name!r} from {box.offset} on")
        file, span = place
        item = TorchItem(self._store, file, span, name)
        dtype, items = item.tensor()
        if dtype != spec.dtype or items.shape != held.shape:
            raise item.refused(
                f"is {dtype}{list(items.shape)} there and {spec.dtype}{list(held.shape)} by "
                f"{METADATA!r}"
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
            raise self.refused(f"names no file for the value {name!r}")
        try:
            root = TorchItem(self._store, *place, name).root
        except FormatError as error:
            error.note(f"value {name!r}; only plain values, dicts and lists of them can be read")
            raise
        for inner, value in self.values(name, root):
            if not is_leaf(value):
                raise self.refused(f"has a value {inner!r} that is {shown(value)}")
            yield inner, value


# Writing.

_DATA_FILE = "__0_0.distcp"


def _pickled_values(manifest: Manifest) -> dict[str, bytes]:
    """Return the pickle of each item that is not a tensor: every value, and every list as one.

    Nested names do not tell a list from a dict. torch asks for a list by its own name and for a
    dict by the names of its elements, so both are there.
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


def _lay_out(manifest: Manifest) -> tuple[FilePlan, dict[str, tuple[int, int]]]:
    """Return the data file, and where the archive of each value and tensor is: offset, bytes."""
    literals: list[tuple[int, bytes]] = []
    extents: list[Extent] = []
    places: dict[str, tuple[int, int]] = {}
    at, pending = 0, bytearray()  # what stands between two tensors is written as one
    for name, pickle in _pickled_values(manifest).items():
        pending += b"".join(lay_out_item(pickle, None, at))
        places[name] = at, len(pending) - at
        at = len(pending)
    for name, spec in manifest.tensors.items():
        try:
            head, tail = lay_out_item(tensor_pickle(spec), spec.nbytes, at)
        except SpecError as error:
            error.note(f"tensor {name!r}")
            raise
        pending += head
        start = at + len(head)
        literals.append((start - len(pending), bytes(pending)))
        extents.append(Extent(name, Box.whole(spec.shape), _DATA_FILE, start))
        places[name] = at, len(head) + spec.nbytes + len(tail)
        at, pending = at + places[name][1], bytearray(tail)
    literals.append((at - len(pending), bytes(pending)))
    return FilePlan(_DATA_FILE, at, literals, extents), places


def _seal(manifest: Manifest, plans: Sequence[FilePlan]) -> dict[str, bytes]:
    memo = code.Memo()  # of what is spelled out once: in the order of the pickle

    def kind(name: str) -> bytes:
        return memo(code.named(_MODULE, name))

    def size(numbers: Sequence[int]) -> bytes:
        return code.called(memo(code.named(*SIZE)), code.numbers(numbers))

    get_layout = code.named("torch.serialization", "_get_layout")
    layout = code.called(get_layout, code.text("torch.strided"))
    order = code.called(code.named(_MODULE, "_MEM_FORMAT_ENCODING"), code.number(0))
    whole_tensor = code.named(_MODULE, "TensorStorageMetadata")
    entries, places = [], []
    for name, spec in manifest.tensors.items():
        shape = spec.stored(Box.whole(spec.shape)).shape
        properties = kind("TensorProperties") + b")\x81"
        dtype = memo(code.named("torch", str(spec.dtype.torch)))
        fields = (dtype, memo(layout), code.FALSE, memo(order), code.FALSE)
        properties += code.pack(fields) + b"b"
        whole, chunk_kind = size(shape), kind("ChunkStorageMetadata")
        chunk = code.made(chunk_kind, offsets=size([0] * len(shape)), sizes=size(shape))
        chunks = code.row([chunk])
        entry = code.made(whole_tensor, properties=properties, size=whole, chunks=chunks)
        entries.append((code.text(name), entry))
    _, archives = _lay_out(manifest)
    value = code.named(_MODULE, "BytesStorageMetadata") + b")\x81"
    entries += [(code.text(name), value) for name in archives if name not in manifest.tensors]
    for name, (start, nbytes) in archives.items():
        index = {"fqn": code.text(name), "index": code.NONE}
        if name in manifest.tensors:
            index["index"] = code.number(0)
            index["offset"] = size([0] * len(manifest.tensors[name].shape))
        key = code.made(kind("MetadataIndex"), **index)
        info = code.made(
            memo(code.named(_FILES_MODULE, "_StorageInfo")),
            relative_path=code.text(_DATA_FILE),
            offset=code.number(start),
            length=code.number(nbytes),
        )
        places.append((key, info))
    paths = ((code.text(name), code.pack([code.text(name)])) for name in archives)
    text = code.made(
        code.named(_MODULE, "Metadata"),
        state_dict_metadata=code.table(entries),
        planner_data=code.table(paths),
        storage_data=code.table(places),
        storage_meta=code.NONE,
        version=code.text("1.0.0"),
    )
    return {METADATA: b"\x80\x02" + text + b"."}


DCP_FORMAT = Format("dcp", lambda manifest: [_lay_out(manifest)[0]], _seal, has_values=True)
