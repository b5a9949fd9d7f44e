"""Writing torch's distributed checkpoints: one data file, as a job of one rank would write it.

torch's own loader reads it. Sizes are known before bytes are: the data file is laid out
whole, tensors aligned, and `.metadata` goes last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flyweight.errors import SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.torch_dcp import FILES_MODULE, METADATA, METADATA_MODULE
from flyweight.formats.torch_item import SIZE, lay_out_item, tensor_pickle
from flyweight.ports import FilePlan, Format
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Leaf, Manifest

_DATA_FILE = "__0_0.distcp"


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
        pending += b"".join(lay_out_item(pickle, None, len(pending)))
        at = len(pending)
    for name, spec in manifest.tensors.items():
        try:
            head, tail = lay_out_item(tensor_pickle(spec), spec.nbytes, at)
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
        return code.called(memo(code.named(*SIZE)), code.numbers(numbers))

    entries, places = [], []
    layout = code.called(
        code.named("torch.serialization", "_get_layout"), code.text("torch.strided")
    )
    order = code.called(code.named(METADATA_MODULE, "_MEM_FORMAT_ENCODING"), code.number(0))
    for name, spec in manifest.tensors.items():
        shape = spec.stored(Box.whole(spec.shape)).shape
        kind = memo(code.named(METADATA_MODULE, "TensorProperties")) + b")\x81"
        dtype = memo(code.named("torch", str(spec.dtype.torch)))
        fields = (dtype, memo(layout), code.FALSE, memo(order), code.FALSE)
        properties = kind + code.pack(fields) + b"b"
        whole = size(shape)
        chunk = code.made(
            memo(code.named(METADATA_MODULE, "ChunkStorageMetadata")),
            offsets=size([0] * len(shape)),
            sizes=size(shape),
        )
        entry = code.named(METADATA_MODULE, "TensorStorageMetadata")
        entries.append(
            (
                code.text(name),
                code.made(entry, properties=properties, size=whole, chunks=code.row([chunk])),
            )
        )
    raw = code.named(METADATA_MODULE, "BytesStorageMetadata") + b")\x81"
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
                code.made(memo(code.named(METADATA_MODULE, "MetadataIndex")), **index),
                code.made(
                    memo(code.named(FILES_MODULE, "_StorageInfo")),
                    relative_path=code.text(_DATA_FILE),
                    offset=code.number(start),
                    length=code.number(nbytes),
                ),
            )
        )
    paths = ((code.text(name), code.pack([code.text(name)])) for name in spans)
    text = code.made(
        code.named(METADATA_MODULE, "Metadata"),
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
        spans[name] = at, sum(map(len, lay_out_item(pickle, None, at)))
        at += spans[name][1]
    for name, spec in manifest.tensors.items():
        head, tail = lay_out_item(tensor_pickle(spec), spec.nbytes, at)
        spans[name] = at, len(head) + spec.nbytes + len(tail)
        at += spans[name][1]
    return spans


DCP_FORMAT = Format("dcp", _layout, _seal, has_values=True)
