"""`.pdparams`: Paddle's pickles of numpy arrays, and safetensors under the same suffix.

Pickles have no bf16 and no fp8: the first is stored as uint16, the second as int8, and only
the target knows which it is. `legacy.py` has the file names that old engines look for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from math import prod

import numpy as np

from flyweight.errors import FormatError, SpecError
from flyweight.formats import pickle_code as code
from flyweight.formats.pickle_values import Made, MadeDict, Span
from flyweight.formats.pickles import read_pickle
from flyweight.formats.records import Records, as_format_errors, is_leaf, shown
from flyweight.formats.safetensors import looks_like_safetensors, open_files
from flyweight.formats.stored import DecodedStore, Stored, join_files
from flyweight.memory import Bytes, bytes_of
from flyweight.ports import FilePlan, Store
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.dtype import DTYPES, DType
from flyweight.spec.manifest import Extent, Leaf, Manifest, TensorBox, TensorSpec, check_name

MAX_VALUES = 1_000_000

_CORES = ("numpy.core", "numpy._core")  # of numpy 1 and 2
_ARRAY = {(f"{core}.multiarray", "_reconstruct") for core in _CORES}
_ARRAY |= {(f"{core}.numeric", "_frombuffer") for core in _CORES}
_SCALAR = {(f"{core}.multiarray", "scalar") for core in _CORES}
_ENCODE, _DTYPE = ("_codecs", "encode"), ("numpy", "dtype")
_TUPLE = {("builtins", "tuple"), ("__builtin__", "tuple")}
_BYTES = {("builtins", "bytes"), ("__builtin__", "bytes")}  # empty ones, before protocol 3
_NAMES = {("numpy", "ndarray"), _DTYPE, _ENCODE, ("collections", "OrderedDict")}
_ALLOWED = _ARRAY | _SCALAR | _TUPLE | _BYTES | _NAMES
_KEYS = (str, int, float, type(None))
_BY_CODE = {np.dtype(each.numpy).str[1:]: each for each in DTYPES.values() if each.numpy}
"""dtypes by the code in a pickle: "f4" is f32."""
STRUCTURED_NAMES = "StructuredToParameterName@@"  # Paddle's own names of the same tensors
_SPLIT = "UnpackBigParamInfor@@"  # where protocols 2 and 3 cut arrays over 1 GiB
RAW_MEANINGS = {"u16": {"bf16"}, "i8": {"f8_e4m3", "f8_e5m2"}}
"""What the dtypes of a pickle may mean."""


def open_pdparams(store: Store, files: Iterable[str]) -> Stored:
    """Open files that together hold one model, each a pickle or safetensors by its content."""
    decoded, raw_names = DecodedStore(store), set[str]()

    def found() -> Iterator[tuple[str, Manifest]]:
        for file in files:
            manifest, is_raw = read_file(decoded, file)
            raw_names.update(manifest.tensors if is_raw else ())
            yield file, manifest

    return Stored(join_files(found(), store.place), decoded, format="pdparams", raw_names=raw_names)


def read_file(store: DecodedStore, file: str) -> tuple[Manifest, bool]:
    """Return the arrays and values of one file, and whether it is a pickle: then dtypes are raw."""
    head = store.read(file, 0, min(store.size(file), 9))
    if looks_like_safetensors(head):  # first: its length may start with a pickle's first byte
        return open_files(store, [file]).manifest, False
    if head[:1] != b"\x80":  # with which pickles start from protocol 2 on
        raise FormatError(
            f"{file!r} in {store.place!r} starts with {head!r}: neither a pickle nor safetensors"
        )
    with as_format_errors(f"pickle {file!r} in {store.place!r}"):
        return _Pickled(store, file).manifest(), True


_Data = Span | bytes
"""An array's bytes: in the file, or decoded from text already."""
_Array = tuple[TensorSpec, _Data]


class _Pickled(Records):
    """The arrays and values that one pickle describes."""

    def __init__(self, store: DecodedStore, file: str) -> None:
        what = f"pickle {file!r} in {store.place!r}"
        super().__init__(what, store.size(file), max_values=MAX_VALUES)
        self._store, self._file = store, file

    def manifest(self) -> Manifest:
        root = read_pickle(self._store, self._file, _ALLOWED, budget=self.budget)
        content = root.items if isinstance(root, MadeDict) else root
        if not isinstance(content, dict):
            raise self.refused(f"holds a {type(root).__name__}, expected a dict of arrays")
        splits = content.pop(_SPLIT, {})
        arrays: dict[str, _Array] = {}
        values: dict[str, Leaf] = {}
        for name, value in self.values("", content, keys=_KEYS, skipped=STRUCTURED_NAMES):
            if name in arrays or name in values:
                raise self.refused(f"has two values whose joined name is {name!r}")
            found = self._array_or_leaf(name, value)
            if isinstance(found, tuple):
                arrays[name] = found
            else:
                values[name] = found
        cuts = list(self._read_cuts(splits, arrays))
        used = {each for _, _, slices in cuts for each in slices}
        uncut = ((name, arrays[name][0].shape, [name]) for name in arrays if name not in used)
        tensors: dict[str, TensorSpec] = {}
        extents: list[Extent] = []
        for name, shape, slices in chain(uncut, cuts):
            if name in tensors or name in values:
                raise self.refused(f"has {name!r} twice, once in slices")
            spec = tensors[name] = TensorSpec(arrays[slices[0]][0].dtype, shape)
            start = 0
            for each in slices:
                length, (file, at) = prod(arrays[each][0].shape), self._place(*arrays[each])
                # A flat cut across rows is a few boxes, one after the other in the file.
                is_cut = len(slices) > 1
                for box in boxes_of_range(shape, start, length) if is_cut else [Box.whole(shape)]:
                    extents.append(Extent(name, box, file, at))
                    at += spec.box_bytes(box)
                start += length
        return Manifest(tensors, values=values, extents=extents)

    def _place(self, spec: TensorSpec, data: _Data) -> tuple[str, int]:
        """Return the file and the offset from which an array's bytes can be read."""
        if isinstance(data, Span) and not data.is_text:
            return self._file, data.offset

        def decode() -> Bytes:
            raw = data
            if isinstance(raw, Span):
                text = self._store.read(self._file, raw.offset, raw.nbytes)
                try:
                    raw = text.decode("utf-8").encode("latin1")
                except UnicodeError as cause:
                    raise self.refused(f"has array text that is not latin1: {cause}") from cause
            if len(raw) != spec.nbytes:
                raise self.refused(f"has array text of {len(raw)} bytes, not {spec.nbytes}")
            return bytes_of(raw)

        return self._store.add(self._file, decode), 0

    def _array_or_leaf(self, name: str, value: object) -> _Array | Leaf:
        match value:  # (Paddle's internal name, array), as tensors in nested dicts are
            case Made(args=((str() | Span(), each),)) if _name(value) in _TUPLE:
                value = each
        if is_leaf(value):
            return value
        if isinstance(value, Made) and _name(value) in _ARRAY:
            return self._array(name, value)
        if isinstance(value, Made) and _name(value) in _SCALAR:
            return self._scalar(name, value)
        raise self.refused(f"has {shown(value)} at {name!r}")

    def _array(self, name: str, made: Made) -> _Array:
        match made.state, made.args:
            case (int(), tuple() as shape, Made() as described, bool() as is_fortran, data), _:
                pass
            case None, (data, Made() as described, tuple() as shape, "C" | "F" as order):
                is_fortran = order == "F"  # protocol 5
            case _:
                raise self.refused(f"has an array {name!r} without shape, dtype and bytes")
        shape = self.numbers(shape, name)
        if is_fortran and sum(size > 1 for size in shape) > 1:
            # One flipped bit would say so too, and there is no checksum: refuse it.
            raise self.refused(
                f"has an array {name!r} in column order, expected row order; save a transposed "
                f"tensor after .contiguous()"
            )
        with as_format_errors(f"{self.what} has an array {name!r}"):
            spec = TensorSpec(self._dtype(name, described), shape)
        found = self._data(name, data)
        nbytes = found.nbytes if isinstance(found, Span) else len(found)
        # Text takes one byte for a character below 128 and two for one from there to 255.
        most_bytes = spec.nbytes * (2 if isinstance(found, Span) and found.is_text else 1)
        if not spec.nbytes <= nbytes <= most_bytes:
            raise self.refused(f"has {nbytes} bytes for {name!r}, {spec} needs {spec.nbytes}")
        return spec, found

    def _dtype(self, name: str, made: Made) -> DType:
        match made.args, made.state:
            case (str() as kind, *_), (_, "<" | "|", *_):
                if _name(made) == _DTYPE and kind in _BY_CODE:
                    return _BY_CODE[kind]
        raise self.refused(
            f"has an array {name!r} of dtype {shown(made.args)}, state {shown(made.state)}"
        )

    def _data(self, name: str, data: object) -> _Data:
        if isinstance(data, Span) and not data.is_text:
            return data
        match data:
            case Made(args=()) if _name(data) in _BYTES:
                return b""
            case Made(args=(Span(is_text=True) as span, "latin1")) if _name(data) == _ENCODE:
                return span
            case Made(args=(str() as text, "latin1")) if _name(data) == _ENCODE:
                try:
                    return text.encode("latin1")
                except UnicodeEncodeError as cause:
                    raise self.refused(f"has text for {name!r} that is not latin1") from cause
        raise self.refused(f"has a {type(data).__name__} for the bytes of {name!r}")

    def _scalar(self, name: str, made: Made) -> Leaf:
        match made.args:
            case (Made() as described, data):
                dtype, found = self._dtype(name, described), self._data(name, data)
                if isinstance(found, Span):
                    found = self._store.read(self._file, found.offset, min(found.nbytes, 16))
                if dtype.numpy and len(found) == dtype.nbytes(1) and dtype.name[0] in "buif":
                    value: Leaf = np.frombuffer(found, dtype.numpy)[0].item()
                    return value
        raise self.refused(f"has a scalar {name!r} that is no number")

    def _read_cuts(
        self, splits: object, arrays: Mapping[str, _Array]
    ) -> Iterator[tuple[str, tuple[int, ...], list[str]]]:
        """Yield the name, the shape and the slices of each array that is cut into flat slices."""
        used: set[str] = set()
        for key, entry in (splits if isinstance(splits, dict) else {}).items():
            match entry:
                case {"OriginShape": shape, "slices": [_, *_] as slices}:
                    name, shape = check_name(str(key)), self.numbers(shape, str(key)[:80])
                case _:
                    raise self.refused(f"cut {shown(key)} up and does not say how")
            for each in slices:
                if not isinstance(each, str) or each not in arrays or each in used:
                    raise self.refused(
                        f"cut {name!r} into {shown(slices)}, which are not all there"
                    )
                used.add(each)
            held = sum(prod(arrays[each][0].shape) for each in slices)
            if held != prod(shape) or len({arrays[each][0].dtype for each in slices}) != 1:
                raise self.refused(f"cut {name!r} of {shape} into {held} elements")
            yield name, shape, list(slices)


def _name(made: Made) -> tuple[str, str]:
    return made.what.module, made.what.name


# Writing.

_RAW = {"bf16": "u2", "f8_e4m3": "i1", "f8_e5m2": "i1"}  # dtypes that numpy has no name for


def _array_head(spec: TensorSpec, shape: tuple[int, ...]) -> bytes:
    """Return the opcodes before an array's bytes: rebuild an empty one, then its state."""
    if spec.dtype.numpy is None and spec.dtype.name not in _RAW:
        raise SpecError(f"a .pdparams pickle cannot hold {spec.dtype}; write it as safetensors")
    kind = _RAW.get(spec.dtype.name) or np.dtype(spec.dtype.numpy).str[1:]
    order = "|" if spec.item_bytes == 1 else "<"
    # numpy 1 and 2 both know the array builder under this name.
    rebuild = code.named("numpy.core.multiarray", "_reconstruct")
    ndarray = code.named("numpy", "ndarray")
    dtype = code.called(code.named("numpy", "dtype"), code.text(kind), code.FALSE, code.TRUE)
    fields = (code.number(3), code.text(order), code.NONE, code.NONE, code.NONE)
    dtype += code.pack((*fields, code.number(-1), code.number(-1), code.number(0))) + b"b"
    nbytes = struct.pack("<Q", spec.dtype.nbytes(prod(shape)))
    array = code.called(rebuild, ndarray, code.numbers([0]), b"C\x01b")
    return array + b"(" + code.number(1) + code.numbers(shape) + dtype + b"\x89\x8e" + nbytes


def pickle_plan(file: str, tensor_boxes: Iterable[TensorBox], *, tail: bytes = b"") -> FilePlan:
    """Lay out a pickle that `paddle.load` reads: a dict of arrays, protocol 4, and a last entry."""
    literals: list[tuple[int, bytes]] = []
    extents = []
    pending, at = b"\x80\x04}(", 0
    for tensor_box in tensor_boxes:
        if tensor_box.key in (STRUCTURED_NAMES, _SPLIT):
            raise SpecError(f"a tensor is called {tensor_box.key!r}, which Paddle keeps for itself")
        pending += code.text(tensor_box.key) + _array_head(tensor_box.spec, tensor_box.box.shape)
        literals.append((at, pending))
        at += len(pending)
        extents.append(Extent(tensor_box.name, tensor_box.box, file, at))
        at += tensor_box.nbytes
        pending = b"tb"
    pending += tail + b"u."
    literals.append((at, pending))
    return FilePlan(file, at + len(pending), literals, extents)
