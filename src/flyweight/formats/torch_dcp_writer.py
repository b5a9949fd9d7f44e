"""Writes torch's distributed checkpoints: one data file, as a job of one rank writes it.

torch's own loader reads it. Sizes are known before bytes are, so the whole data file is laid
out first, with aligned tensors, and `.metadata` is written last.
"""

from __future__ import annotations

from collections.abc import Sequence

from flyweight.errors import SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.torch_dcp import FILES_MODULE, METADATA, METADATA_MODULE
from flyweight.formats.torch_item import SIZE, lay_out_item, tensor_pickle
from flyweight.ports import FilePlan, Format
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Leaf, Manifest

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
        return memo(code.named(METADATA_MODULE, name))

    def size(numbers: Sequence[int]) -> bytes:
        return code.called(memo(code.named(*SIZE)), code.numbers(numbers))

    get_layout = code.named("torch.serialization", "_get_layout")
    layout = code.called(get_layout, code.text("torch.strided"))
    order = code.called(code.named(METADATA_MODULE, "_MEM_FORMAT_ENCODING"), code.number(0))
    whole_tensor = code.named(METADATA_MODULE, "TensorStorageMetadata")
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
    value = code.named(METADATA_MODULE, "BytesStorageMetadata") + b")\x81"
    entries += [(code.text(name), value) for name in archives if name not in manifest.tensors]
    for name, (start, nbytes) in archives.items():
        index = {"fqn": code.text(name), "index": code.NONE}
        if name in manifest.tensors:
            index["index"] = code.number(0)
            index["offset"] = size([0] * len(manifest.tensors[name].shape))
        key = code.made(kind("MetadataIndex"), **index)
        info = code.made(
            memo(code.named(FILES_MODULE, "_StorageInfo")),
            relative_path=code.text(_DATA_FILE),
            offset=code.number(start),
            length=code.number(nbytes),
        )
        places.append((key, info))
    paths = ((code.text(name), code.pack([code.text(name)])) for name in archives)
    text = code.made(
        code.named(METADATA_MODULE, "Metadata"),
        state_dict_metadata=code.table(entries),
        planner_data=code.table(paths),
        storage_data=code.table(places),
        storage_meta=code.NONE,
        version=code.text("1.0.0"),
    )
    return {METADATA: b"\x80\x02" + text + b"."}


DCP_FORMAT = Format("dcp", lambda manifest: [_lay_out(manifest)[0]], _seal, has_values=True)
