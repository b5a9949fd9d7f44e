"""Paddle's distributed checkpoints: `{uid}.metadata` and a `{rank}_{uid}.distcp` from each rank.

The metadata is a pickle of three plain classes, the data files are flat `.pdparams`.
The metadata has the true dtypes, and says which box of a tensor each array is. Paddle
writes it before the data, and lets two saves mix in one directory, so files and metadata
are compared name by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flyweight.errors import FormatError, SnapshotIncomplete, SpecError, listed
from flyweight.formats import pickle_code as code
from flyweight.formats.decoded import DecodedStore
from flyweight.formats.pdparams import RAW_MEANINGS, STRUCTURED_NAMES, pickle_plan, read_file
from flyweight.formats.records import as_format_errors, place_key, read_index, shown
from flyweight.formats.stored import Stored
from flyweight.ports import FilePlan, Format, Store
from flyweight.spec.box import Box, boxes_of_range
from flyweight.spec.dtype import BY_PADDLE, DType
from flyweight.spec.manifest import (
    Extent,
    Manifest,
    TensorSpec,
    check_coverage,
    check_file_name,
    check_name,
)

_MODULES = (
    "paddle.distributed.flex_checkpoint.dcp.metadata",
    "paddle.distributed.checkpoint.metadata",  # until 3.1
)
_CLASSES = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
_ALLOWED = {(module, name) for module in _MODULES for name in _CLASSES}
_METADATA = re.compile(r"[^.].*\.metadata")
_DATA = re.compile(r"[0-9]+_(.+)\.(distcp|safetensors)")


def has_checkpoint(names: Sequence[str]) -> bool:
    return any(_METADATA.fullmatch(name) for name in names) or any(
        re.fullmatch(r"[0-9]+_.+\.distcp", name) for name in names
    )


@dataclass(frozen=True, slots=True)
class _Shard:
    """A box of a tensor, as the metadata describes it."""

    box: Box
    dtype: DType | None
    whole: tuple[int, ...] | None
    flat: tuple[int, int] | None
    """First and last + 1 element, if the array is only a range of the flattened box."""


_Arrays = dict[str, tuple[TensorSpec, list[Extent]]]
"""What a data file holds, by name: each array, and where its bytes are."""


def open_paddle(store: Store) -> Stored:
    """Open the directory's checkpoint; a second one in it, finished or not, is refused."""
    names = store.names()
    found = sorted(name for name in names if _METADATA.fullmatch(name))
    data = sorted(name for name in names if _DATA.fullmatch(name))
    if not found:
        raise SnapshotIncomplete(
            f"{store.place!r} has {len(data)} files like {data[0]!r} and no '.metadata': a save "
            f"that never finished"
        )
    if len(found) > 1:
        raise FormatError(
            f"{store.place!r} has {len(found)} saves: {listed(found)}; move each to a "
            f"directory of its own"
        )
    with as_format_errors(f"{found[0]!r} in {store.place!r}"):
        return _Reader(store, found[0]).stored(data)


class _Reader:
    def __init__(self, store: Store, file: str) -> None:
        self._store, self._file, self._names = DecodedStore(store), file, set(store.names())
        self._records, fields = read_index(store, file, _ALLOWED)
        self._refused, self._fields = self._records.refused, self._records.fields
        self._numbers = self._records.numbers
        self._shards = self._read_shards(fields.get("state_dict_metadata"))
        self._replicas: dict[str, set[str]] = {}
        """By file: the tensors of which it has a copy that is not read."""
        self._places = self._read_places(fields.get("storage_metadata"))

    def _read_shards(self, value: object) -> dict[str, list[_Shard]]:
        if not isinstance(value, dict):
            raise self._refused(f"has {shown(value)} for its tensors")
        shards: dict[str, list[_Shard]] = {}
        for name in list(value):
            entries = value.pop(name)  # what is made of it may take its memory
            if not isinstance(name, str) or not isinstance(entries, list):
                raise self._refused(f"has {shown(entries)} for the shards of {str(name)[:80]!r}")
            shards[check_name(name)] = [self._read_shard(name, each) for each in entries]
        return shards

    def _read_shard(self, name: str, value: object) -> _Shard:
        fields = self._fields(value, "LocalTensorMetadata")
        offset = self._numbers(fields.get("global_offset"), name)
        shape = self._numbers(fields.get("local_shape"), name)
        dtype, whole = fields.get("dtype"), fields.get("global_shape")
        if dtype is not None and (not isinstance(dtype, str) or dtype not in BY_PADDLE):
            raise self._refused(f"says that {name!r} is {shown(dtype)}")
        return _Shard(
            Box(offset, shape),
            None if dtype is None else BY_PADDLE[str(dtype)],
            None if whole is None else self._numbers(whole, name),
            self._flat(name, fields),
        )

    def _flat(self, name: str, fields: Mapping[str, object]) -> tuple[int, int] | None:
        if not fields.get("is_flattened"):
            return None
        numbers = self._numbers(fields.get("flattened_range"), name)
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise self._refused(f"has the flat range {numbers} for {name!r}")
        return numbers[0], numbers[1]

    def _read_places(self, value: object) -> dict[bytes, str]:
        """Return which file has each shard; only the first replica of each is read."""
        if not isinstance(value, dict):
            raise self._refused(f"has {shown(value)} for its files")
        places: dict[bytes, str] = {}
        while value:
            key, file = value.popitem()
            fields = self._fields(key, "LocalTensorIndex")
            name = fields.get("tensor_key")
            if not isinstance(name, str):
                raise self._refused(f"has a file for {shown(name)}")
            if fields.get("replica_id") not in (None, 0):
                self._replicas.setdefault(check_file_name(file), set()).add(name)
                continue
            offset = self._numbers(fields.get("global_offset"), name)
            place = place_key(name, offset, self._flat(name, fields) or ())
            if not isinstance(file, str):
                raise self._refused(f"has {shown(file)} for the file of {name!r}")
            if places.setdefault(place, check_file_name(file)) != file:
                raise self._refused(
                    f"has {name!r} from {offset} on in both {places[place]!r} and {file!r}"
                )
        return places

    def stored(self, data: Sequence[str]) -> Stored:
        tensors: dict[str, TensorSpec] = {}
        extents: list[Extent] = []
        raw_names = set()
        files = {file: self._open(file) for file in sorted({*self._places.values(), *data})}
        used = {file: set(self._replicas.get(file, ())) for file in files}
        for name, shards in self._shards.items():
            whole = self._whole(name, shards)
            known: dict[bytes, _Shard] = {}
            for shard in shards:
                place = place_key(name, shard.box.offset, shard.flat or ())
                if known.setdefault(place, shard) is not shard:
                    if known[place] != shard:
                        raise self._refused(f"has {name!r} as {known[place]} and as {shard}")
                    continue  # another replica's
                file = self._places.get(place)
                if file is None:
                    raise self._refused(f"names no file for {name!r} from {shard.box.offset} on")
                used[file].add(name)
                dtype, is_raw, places = self._in_file(name, shard, file, files[file])
                if is_raw:
                    raw_names.add(name)
                spec = tensors.setdefault(name, TensorSpec(dtype, whole))
                if spec.dtype != dtype:
                    raise self._refused(f"has {name!r} as {spec.dtype} and as {dtype}")
                extents += places
        for file, found in files.items():
            if astray := found.keys() - used[file]:
                raise FormatError(
                    f"{file!r} in {self._store.place!r} has {len(astray)} tensors that "
                    f"{self._file!r} does not put there: {listed(astray)}; another save, finished "
                    f"or not, is in the same directory"
                )
        manifest = Manifest(tensors, extents=extents)
        check_coverage(manifest)
        return Stored(manifest, self._store, format="paddle", raw_names=raw_names)

    def _open(self, file: str) -> _Arrays:
        """Return the arrays of a data file, by name."""
        self._records.check_file(file, self._names)
        manifest, _ = read_file(self._store, file)
        found: _Arrays = {name: (spec, []) for name, spec in manifest.tensors.items()}
        for extent in manifest.extents:
            found[extent.name][1].append(extent)
        return found

    def _whole(self, name: str, shards: Sequence[_Shard]) -> tuple[int, ...]:
        whole = next((shard.whole for shard in shards if shard.whole is not None), None)
        others = [shard.whole for shard in shards if shard.whole not in (None, whole)]
        if others or not shards or len({len(shard.box.shape) for shard in shards}) > 1:
            shapes = [str(each) for each in (whole, *others)]
            raise self._refused(f"gives {name!r} the shapes {listed(shapes)}")
        if whole is None:  # releases before 3.1 do not say
            whole = shards[0].box.end
            for shard in shards:
                whole = tuple(map(max, whole, shard.box.end))
        for shard in shards:
            self._records.check_inside(name, shard.box, whole)
        return whole

    def _in_file(
        self, name: str, shard: _Shard, file: str, arrays: _Arrays
    ) -> tuple[DType, bool, list[Extent]]:
        """Return a shard's dtype, whether only the target knows it, and where its bytes are."""
        if name not in arrays:
            raise FormatError(
                f"{file!r} in {self._store.place!r} lacks {name!r}, which {self._file!r} puts there"
            )
        spec, found = arrays[name]
        flat = shard.flat
        expected = shard.box.shape if flat is None else (flat[1] - flat[0],)
        if spec.shape != expected:
            raise FormatError(
                f"{name!r} is {spec.shape} in {file!r} and {expected} by {self._file!r} in "
                f"{self._store.place!r}"
            )
        dtype = spec.dtype if shard.dtype is None else shard.dtype
        if dtype != spec.dtype and dtype.name not in RAW_MEANINGS.get(spec.dtype.name, ()):
            raise FormatError(
                f"{name!r} is {spec.dtype} in {file!r} and {dtype} by {self._file!r} in "
                f"{self._store.place!r}"
            )
        is_raw = shard.dtype is None and spec.dtype.name in RAW_MEANINGS
        extents = []
        for extent in found:
            if flat is None:
                box = extent.box.moved(shard.box.offset)
                extents.append(replace(extent, box=box, checksums=None, digest=None))
                continue
            at, start = extent.offset, flat[0] + extent.box.offset[0]
            for box in boxes_of_range(shard.box.shape, start, extent.box.shape[0]):
                extents.append(Extent(name, box.moved(shard.box.offset), extent.file, at))
                at += spec.box_bytes(Box.whole((box.num_elements,)))
        return dtype, is_raw, extents


# Writing: one file, as a job of one rank would write it.

_UID = "0"


def _data_file(manifest: Manifest) -> str:
    # Paddle reads "0_0.distcp" by a short cut that turns 8-bit floats into integers.
    has_float8 = any(spec.dtype.name.startswith("f8") for spec in manifest.tensors.values())
    return f"{int(has_float8)}_{_UID}.distcp"


def _layout(manifest: Manifest) -> list[FilePlan]:
    for name, spec in manifest.tensors.items():
        if spec.dtype.paddle is None:
            raise SpecError(f"{name!r} is {spec.dtype}, which Paddle has no name for")
    # Only names that are listed in it become tensors again.
    listing = code.table((code.text(name), code.text(name)) for name in manifest.tensors)
    tail = code.text(STRUCTURED_NAMES) + listing
    return [pickle_plan(_data_file(manifest), manifest.tensor_boxes(), tail=tail)]


def _seal(manifest: Manifest, plans: Sequence[FilePlan]) -> dict[str, bytes]:
    memo = code.Memo()
    kinds = {name: code.named(_MODULES[0], name) for name in _CLASSES}
    not_flat = {"is_flattened": code.FALSE, "flattened_range": code.NONE}
    shards, places = [], []
    for extent in manifest.extents:
        name, spec = code.text(extent.name), manifest.tensors[extent.name]
        offset, shape = code.numbers(extent.box.offset), code.numbers(extent.box.shape)
        shard = code.made(
            memo(kinds["LocalTensorMetadata"]),
            global_offset=offset,
            local_shape=shape,
            dtype=code.text(str(spec.dtype.paddle)),
            global_shape=code.numbers(spec.shape),
            **not_flat,
        )
        shards.append((name, code.row([shard])))
        key = code.made(
            memo(kinds["LocalTensorIndex"]),
            tensor_key=name,
            global_offset=offset,
            **not_flat,
            replica_id=code.NONE,
            local_shape=shape,
        )
        places.append((key, code.text(extent.file)))
    paths = ((code.text(name), code.pack([code.text(name)])) for name in manifest.tensors)
    text = code.made(
        kinds["Metadata"],
        state_dict_metadata=code.table(shards),
        storage_metadata=code.table(places),
        flat_mapping=code.table(paths),
    )
    return {f"{_UID}.metadata": b"\x80\x04" + text + b"."}


PADDLE_FORMAT = Format("paddle", _layout, _seal)
