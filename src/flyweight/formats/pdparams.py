"""`.pdparams`: Paddle's pickles of numpy arrays, and safetensors under the same suffix.

Pickles have no bf16 and no fp8: the first is stored as uint16, the second as int8, and only
the target knows which it is. `legacy.py` has the file names that old engines look for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from flyweight.errors import FormatError, SpecError
from flyweight.formats.budget import Budget
from flyweight.formats.decoded import DecodedStore
from flyweight.formats.pickle_values import Made, MadeDict, Span
from flyweight.formats.pickles import read_pickle
from flyweight.formats.records import LEAF_BYTES, as_format_errors, told
from flyweight.formats.safetensors import looks_like_safetensors, open_files
from flyweight.formats.stored import Stored, join_files
from flyweight.memory import Bytes, bytes_of
from flyweight.ports import Store
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.dtype import DTYPES, DType
from flyweight.spec.manifest import (
    MAX_NAME_CHARS,
    Extent,
    Leaf,
    Manifest,
    TensorSpec,
    check_name,
)

MAX_LEAVES = 1_000_000
MAX_NESTING = 32

_ARRAY = {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_FROM_BUFFER = {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
_SCALAR = {(f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")}
_ENCODE, _DTYPE = ("_codecs", "encode"), ("numpy", "dtype")
_TUPLE = {("builtins", "tuple"), ("__builtin__", "tuple")}
_BYTES = {("builtins", "bytes"), ("__builtin__", "bytes")}  # empty ones, before protocol 3
_ORDERED = ("collections", "OrderedDict")
ALLOWED = (
    _ARRAY
    | _FROM_BUFFER
    | _SCALAR
    | _TUPLE
    | _BYTES
    | {("numpy", "ndarray"), _DTYPE, _ENCODE, _ORDERED}
)
_BY_CODE = {np.dtype(each.numpy).str[1:]: each for each in DTYPES.values() if each.numpy}
"""dtypes by the code in a pickle: "f4" is f32."""
STRUCTURED_NAMES = "StructuredToParameterName@@"  # Paddle's own names of the same tensors
_SPLIT = "UnpackBigParamInfor@@"  # where protocols 2 and 3 cut arrays over 1 GiB
RESERVED_NAMES = {STRUCTURED_NAMES, _SPLIT}
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


def looks_like_pickle(head: bytes) -> bool:
    """True if a file that starts like this is a pickle of a protocol from 2 on."""
    return head[:1] == b"\x80"


def read_file(store: DecodedStore, file: str) -> tuple[Manifest, bool]:
    """Return the arrays and values of one file, and whether it is a pickle: then dtypes are raw."""
    head = store.read(file, 0, min(store.size(file), 9))
    if looks_like_safetensors(head):  # first: its length may start with a pickle's first byte
        return open_files(store, [file]).manifest, False
    if not looks_like_pickle(head):
        raise FormatError(
            f"{file!r} in {store.place!r} starts with {head!r}: neither a pickle nor safetensors"
        )
    with as_format_errors(f"pickle {file!r} in {store.place!r}"):
        return _Pickled(store, file).manifest(), True


@dataclass(frozen=True, slots=True)
class _Array:
    dtype: DType
    shape: tuple[int, ...]
    data: Span | bytes

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(prod(self.shape))


class _Pickled:
    """Reads the arrays and values that one pickle describes."""

    def __init__(self, store: DecodedStore, file: str) -> None:
        self._store, self._file = store, file
        self._count = 0
        self._budget = Budget(f"pickle {file!r} in {store.place!r}", store.size(file))

    def _refuse(self, why: str) -> FormatError:
        return FormatError(f"pickle {self._file!r} in {self._store.place!r} {why}")

    def manifest(self) -> Manifest:
        root = read_pickle(self._store, self._file, ALLOWED, budget=self._budget)
        content = root.items if isinstance(root, MadeDict) else root
        if not isinstance(content, dict):
            raise self._refuse(f"holds a {type(root).__name__}, expected a dict of arrays")
        splits = content.pop(_SPLIT, None)
        leaves: dict[str, _Array | Leaf] = {}
        for name, leaf in self._leaves("", content, 0):
            if name in leaves:
                raise self._refuse(f"has two leaves whose joined name is {name!r}")
            leaves[name] = leaf
        arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, _Array)}
        values = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, _Array)}
        joined = self._joined(splits, arrays)
        tensors, extents = {}, []
        for name, array in arrays.items():
            if name not in joined:
                tensors[name] = TensorSpec(array.dtype, array.shape)
                extents.append(self._extent(name, Box.whole(array.shape), array, 0))
        for name, shape, slices in dict.fromkeys(joined.values()):
            if name in tensors or name in values:
                raise self._refuse(f"has {name!r} twice, once in slices")
            tensors[name] = TensorSpec(arrays[slices[0]].dtype, shape)
            start = 0
            for each in slices:
                # A flat cut across rows is a few boxes, one after the other in the file.
                at = 0
                for box in boxes_of_range(shape, start, prod(arrays[each].shape)):
                    extents.append(self._extent(name, box, arrays[each], at))
                    at += tensors[name].box_bytes(box)
                start += prod(arrays[each].shape)
        return Manifest(tensors, values=values, extents=extents)

    def _extent(self, name: str, box: Box, array: _Array, skip_bytes: int) -> Extent:
        if isinstance(array.data, Span) and not array.data.is_text:
            return Extent(name, box, self._file, array.data.offset + skip_bytes)
        decode = partial(self._decoded, array)
        return Extent(name, box, self._store.add(self._file, decode), skip_bytes)

    def _decoded(self, array: _Array) -> Bytes:
        """Return the bytes of an array that its pickle wrote as text."""
        raw = array.data
        if isinstance(raw, Span):
            text = self._store.read(self._file, raw.offset, raw.nbytes)
            try:
                raw = text.decode("utf-8").encode("latin1")
            except UnicodeError as cause:
                raise self._refuse(f"has array text that is not latin1: {cause}") from cause
        if len(raw) != array.nbytes:
            raise self._refuse(f"has array text of {len(raw)} bytes, not {array.nbytes}")
        return bytes_of(raw)

    def _leaves(self, name: str, value: object, depth: int) -> Iterator[tuple[str, _Array | Leaf]]:
        self._check_limits(name, depth)
        if isinstance(value, MadeDict):
            value = value.items
        if isinstance(value, (dict, list, tuple)):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                if key != STRUCTURED_NAMES:
                    yield from self._leaves(f"{name}.{key}" if name else str(key), each, depth + 1)
            return
        if isinstance(value, Made):
            kind = (value.what.module, value.what.name)
            if kind in _TUPLE:  # (Paddle's internal name, array), as tensors in nested dicts are
                match value.args:
                    case (((str() | Span()), each),):
                        yield from self._leaves(name, each, depth + 1)
                        return
            if kind in _ARRAY | _FROM_BUFFER:
                yield check_name(name), self._array(name, value)
                return
            if kind in _SCALAR:
                yield check_name(name), self._scalar(name, value)
                return
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield check_name(name), value
            return
        raise self._refuse(f"has a {getattr(value, 'what', type(value).__name__)} at {name!r}")

    def _check_limits(self, name: str, depth: int) -> None:
        self._count += 1
        if depth > MAX_NESTING or self._count > MAX_LEAVES:
            raise self._refuse(
                f"nests {depth} deep, at most {MAX_NESTING}, or has {self._count} leaves, at most "
                f"{MAX_LEAVES}"
            )
        if len(name) > MAX_NAME_CHARS:
            check_name(name)
        self._budget.take(LEAF_BYTES + len(name))

    def _array(self, name: str, made: Made) -> _Array:
        match made.state, made.args:
            case (int(), tuple() as shape, Made() as described, bool() as is_fortran, data), _:
                pass
            case None, (data, Made() as described, tuple() as shape, "C" | "F" as order):
                is_fortran = order == "F"  # protocol 5
            case _:
                raise self._refuse(f"has an array {name!r} without shape, dtype and bytes")
        if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise self._refuse(f"has an array {name!r} of shape {told(shape)}")
        if is_fortran and sum(size > 1 for size in shape) > 1:
            # One flipped bit would say so too, and there is no checksum: refuse it.
            raise self._refuse(
                f"has an array {name!r} in column order, expected row order; save a transposed "
                f"tensor after .contiguous()"
            )
        try:
            array = _Array(self._dtype(name, described), shape, self._data(name, data))
            TensorSpec(array.dtype, shape)
        except SpecError as cause:
            raise self._refuse(f"has an array {name!r}: {cause}") from cause
        exact = isinstance(array.data, bytes) or not array.data.is_text
        nbytes = len(array.data) if isinstance(array.data, bytes) else array.data.nbytes
        # Text takes one byte for a character below 128 and two for one from there to 255.
        if nbytes != array.nbytes if exact else not array.nbytes <= nbytes <= 2 * array.nbytes:
            raise self._refuse(
                f"has {nbytes} bytes for {name!r}, {array.dtype}{list(shape)} needs {array.nbytes}"
            )
        return array

    def _dtype(self, name: str, made: Made) -> DType:
        match (made.what.module, made.what.name), made.args, made.state:
            case ("numpy", "dtype"), (str() as code, *_), (_, "<" | "|", *_) if code in _BY_CODE:
                return _BY_CODE[code]
        raise self._refuse(
            f"has an array {name!r} of dtype {told(made.args)}, state {told(made.state)}"
        )

    def _data(self, name: str, data: object) -> Span | bytes:
        if isinstance(data, Span) and not data.is_text:
            return data
        if isinstance(data, Made):
            kind = (data.what.module, data.what.name)
            if kind in _BYTES and data.args == ():
                return b""
            match kind, data.args:
                case ("_codecs", "encode"), (Span() as span, "latin1") if span.is_text:
                    return span
                case ("_codecs", "encode"), (str() as text, "latin1"):
                    try:
                        return text.encode("latin1")
                    except UnicodeEncodeError as cause:
                        raise self._refuse(f"has text for {name!r} that is not latin1") from cause
        raise self._refuse(f"has a {type(data).__name__} for the bytes of {name!r}")

    def _scalar(self, name: str, made: Made) -> Leaf:
        match made.args:
            case (Made() as described, data):
                dtype, found = self._dtype(name, described), self._data(name, data)
                if isinstance(found, Span):
                    found = self._store.read(self._file, found.offset, min(found.nbytes, 16))
                if dtype.numpy and len(found) == dtype.nbytes(1) and dtype.name[0] in "buif":
                    value: Leaf = np.frombuffer(found, dtype.numpy)[0].item()
                    return value
        raise self._refuse(f"has a scalar {name!r} that is no number")

    def _joined(
        self, splits: object, arrays: Mapping[str, _Array]
    ) -> dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]]:
        """Return (name, shape, slices) of the whole array, for each slice of a flat cut."""
        joined = {}
        for name, entry in (splits if isinstance(splits, dict) else {}).items():
            match entry:
                case {
                    "OriginShape": tuple() | list() as shape,
                    "slices": list() | tuple() as slices,
                }:
                    pass
                case _:
                    raise self._refuse(f"cut {told(name)} up and does not say how")
            if not slices or any(
                not isinstance(each, str) or each not in arrays or each in joined for each in slices
            ):
                raise self._refuse(f"cut {told(name)} into {told(slices)}, which are not all there")
            held = sum(prod(arrays[each].shape) for each in slices)
            sizes_ok = all(type(size) is int and size >= 0 for size in shape)
            if not sizes_ok or held != prod(shape) or len({arrays[s].dtype for s in slices}) != 1:
                raise self._refuse(f"cut {told(name)} of {told(shape)} into {held} elements")
            whole = (check_name(str(name)), tuple(shape), tuple(slices))
            joined.update(dict.fromkeys(slices, whole))
        return joined
