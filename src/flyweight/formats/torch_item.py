"""Items: a `.distcp` file is a row of archives, one for each tensor and each value.

An item is what `torch.save` writes: a small pickle that describes the raw bytes beside it.
The pickle is read without running it. An archive is written around bytes that are not
known yet. `torch_dcp.py` reads the index, which says where each item is.
"""

from __future__ import annotations

from math import prod

from flyweight.errors import FormatError, SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.pickle_values import Global, Made, Persistent, Span
from flyweight.formats.pickles import read_pickle
from flyweight.formats.records import MAX_METADATA_BYTES, Records, shown
from flyweight.formats.zips import Archive, lay_out
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
_FIXED = {"byteorder": b"little", "version": b"3\n"}


class TorchItem:
    """An archive that is a span of a file: its pickle, and where its storages are."""

    def __init__(self, store: Store, file: str, span: Span, name: str) -> None:
        self._archive = Archive(store, file, span)
        names = self._archive.names
        # Without the directory that they are in.
        self._entries = {name.partition("/")[2]: name for name in names}
        if len({name.partition("/")[0] for name in names}) != 1 or "data.pkl" not in self._entries:
            raise FormatError(
                f"bytes {span.offset}..{span.offset + span.nbytes} of {file!r} in "
                f"{store.place!r} are no archive of torch's: {sorted(self._entries)[:5]}"
            )
        if "byteorder" in self._entries:
            order = self._archive.span(self._entries["byteorder"])
            text = store.read(file, order.offset, min(order.nbytes, 16))
            if text != b"little":
                raise FormatError(f"{file!r} in {store.place!r} has byte order {text!r}")
        self._what = f"{name!r} in {file!r} of {store.place!r}"
        pickle = self._archive.span(self._entries["data.pkl"])
        self.root = read_pickle(
            store,
            file,
            _ALLOWED,
            span=pickle,
            has_objects=True,
            max_text_bytes=MAX_METADATA_BYTES,  # a tensor's bytes are in a storage beside it
        )

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
                raise FormatError(f"{self._what} is {shown(other)}, expected a plain tensor")
        dtype, is_typed = _BY_STORAGE.get((kind.module, kind.name)), call.name == _REBUILD[1]
        if not is_typed:
            match flags:
                case [Global(module="torch", name=torch_name), *flags]:
                    dtype = BY_TORCH.get(torch_name)
                case _:
                    dtype = None
        if dtype is None or any(flags):
            marks = ", ".join(str(key) for flag in flags if isinstance(flag, dict) for key in flag)
            raise FormatError(
                f"{self._what} is of {shown(kind)}, marked {marks[:80]!r}: not a plain tensor; "
                f"save it after .resolve_conj().resolve_neg()"
            )
        records, width = Records(self._what), max(dtype.bits // 8, 1)
        shape, strides = records.numbers(shape, "shape"), records.numbers(strides, "strides")
        start, count = records.numbers((start, count), "storage")
        if len(shape) != len(strides):
            raise FormatError(f"{self._what} has shape {shape} and strides {strides}")
        if f"data/{key}" not in self._entries:
            raise FormatError(f"{self._what} has no storage {key!r}")
        data = self._archive.span(self._entries[f"data/{key}"])
        steps = tuple(width * stride for stride in strides)
        items = Buffer(data.offset + start * width, shape, steps, width, None)
        needed, count_bytes = items.span[1] - data.offset, count * width if is_typed else count
        if needed > data.nbytes or count_bytes != data.nbytes:
            raise FormatError(
                f"{self._what} needs {needed} bytes of its storage, which has {data.nbytes} of "
                f"{count_bytes}"
            )
        if items.is_folded:
            raise FormatError(f"{self._what} has strides {strides}: elements would share bytes")
        return dtype, items


def tensor_pickle(spec: TensorSpec) -> bytes:
    """Return the pickle by which torch makes a tensor from its storage."""
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


def lay_out_item(pickle: bytes, storage_bytes: int | None, start: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the storage of an item that starts at `start`.

    An item that is not a tensor has no storage: `storage_bytes` is None.
    """
    small = {"archive/data.pkl": pickle}
    small |= {f"archive/{name}": data for name, data in _FIXED.items()}
    large = None if storage_bytes is None else ("archive/data/0", storage_bytes)
    return lay_out(small, large, start=start)
