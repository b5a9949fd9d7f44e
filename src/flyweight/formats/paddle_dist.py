"""Paddle's distributed checkpoints: `{uid}.metadata` and a `{rank}_{uid}.distcp` from each rank.

The metadata is a pickle of three plain classes, the data files are flat `.pdparams`.
The metadata has the true dtypes, and says which box of a tensor each array is. Paddle
writes it before the data, and lets two saves mix in one directory, so files and metadata
are compared name by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flyweight.errors import FormatError, SnapshotIncomplete, SpecError, listed
from flyweight.formats import pickle_code as code
from flyweight.formats.pdparams import RAW_MEANINGS, STRUCTURED_NAMES, pickle_plan, read_file
from flyweight.formats.records import Records, as_format_errors, place_key, shown
from flyweight.formats.stored import DecodedStore, Stored
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


class _Reader(Records):
    def __init__(self, store: Store, file: str) -> None:
        super().__init__(f"{file!r} in {store.place!r}", store.size(file))
        self._store, self._file, self._names = DecodedStore(store), file, set(store.names())
        fields = self.read_index(store, file, _ALLOWED)
        self._shards = self._read_shards(fields.get("state_dict_metadata"))
        self._replicas: dict[str, set[str]] = {}
        """By file: the tensors of which it has a copy that is not read."""
        self._places = self._read_places(fields.get("storage_metadata"))

    def _read_shards(self, value: object) -> dict[str, list[_Shard]]:
        if not isinstance(value, dict):
            raise self.refused(f"has {shown(value)} for its tensors")
        shards: dict[str, list[_Shard]] = {}
        for name in list(value):
            entries = value.pop(name)  # what is made of it may take its memory
            if not isinstance(name, str) or not isinstance(entries, list):
                raise self.refused(f"has {shown(entries)} for the shards of {shown(name)}")
            shards[check_name(name)] = [self._read_shard(name, each) for each in entries]
        return shards

    def _read_shard(self, name: str, value: object) -> _Shard:
        fields = self.fields(value, "LocalTensorMetadata")
        offset = self.numbers(fields.get("global_offset"), name)
        shape = self.numbers(fields.get("local_shape"), name)
        dtype, whole = fields.get("dtype"), fields.get("global_shape")
        if dtype is not None and (not isinstance(dtype, str) or dtype not in BY_PADDLE):
            raise self.refused(f"says that {name!r} is {shown(dtype)}")
        return _Shard(
            Box(offset, shape),
            None if dtype is None else BY_PADDLE[str(dtype)],
            None if whole is None else self.numbers(whole, name),
            self._flat(name, fields),
        )

    def _flat(self, name: str, fields: Mapping[str, object]) -> tuple[int, int] | None:
        if not fields.get("is_flattened"):
            return None
        numbers = self.numbers(fields.get("flattened_range"), name)
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise self.refused(f"has the flat range {numbers} for {name!r}")
        return numbers[0], numbers[1]

    def _read_places(self, value: object) -> dict[bytes, str]:
        """Return which file has each shard; only the first replica of each is read."""
        if not isinstance(value, dict):
            raise self.refused(f"has {shown(value)} for its files")
        places: dict[bytes, str] = {}
        while value:
            key, file = value.popitem()
            fields = self.fields(key, "LocalTensorIndex")
            name = fields.get("tensor_key")
            if not isinstance(name, str) or not isinstance(file, str):
                raise self.refused(f"has {shown(file)} for the file of {shown(name)}")
            if fields.get("replica_id") not in (None, 0):
                self._replicas.setdefault(check_file_name(file), set()).add(name)
                continue
            offset = self.numbers(fields.get("global_offset"), name)
            place = place_key(name, offset, self._flat(name, fields) or ())
            if places.setdefault(place, check_file_name(file)) != file:
                raise self.refused(
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
                        raise self.refused(f"has {name!r} as {known[place]} and as {shard}")
                    continue  # another replica's
                file = self._places.get(place)
                if file is None:
                    raise self.refused(f"names no file for {name!r} from {shard.box.offset} on")
                used[file].add(name)
                if name not in files[file]:
                    raise self._mixed(f"{file!r} lacks {name!r}, which {self._file!r} puts there")
                held, found = files[file][name]
                dtype = self._dtype(name, shard, held, file)
                if shard.dtype is None and held.dtype.name in RAW_MEANINGS:
                    raw_names.add(name)
                spec = tensors.setdefault(name, TensorSpec(dtype, whole))
                if spec.dtype != dtype:
                    raise self.refused(f"has {name!r} as {spec.dtype} and as {dtype}")
                for extent in found:
                    extents += _moved(extent, shard, spec)
        for file, arrays in files.items():
            if astray := arrays.keys() - used[file]:
                raise self._mixed(
                    f"{file!r} has {len(astray)} tensors that {self._file!r} does not put there: "
                    f"{listed(astray)}"
                )
        manifest = Manifest(tensors, extents=extents)
        check_coverage(manifest)
        return Stored(manifest, self._store, format="paddle", raw_names=raw_names)

    def _mixed(self, text: str) -> FormatError:
        return FormatError(
            f"in {self._store.place!r} {text}; another save, finished or not, is in the same "
            f"directory"
        )

    def _open(self, file: str) -> dict[str, tuple[TensorSpec, list[Extent]]]:
        """Return the arrays of a data file by name, and where their bytes are."""
        self.check_file(file, self._names)
        manifest, _ = read_file(self._store, file)
        arrays: dict[str, tuple[TensorSpec, list[Extent]]]
        arrays = {name: (spec, []) for name, spec in manifest.tensors.items()}
        for extent in manifest.extents:
            arrays[extent.name][1].append(extent)
        return arrays

    def _whole(self, name: str, shards: Sequence[_Shard]) -> tuple[int, ...]:
        whole = next((shard.whole for shard in shards if shard.whole is not None), None)
        others = [shard.whole for shard in shards if shard.whole not in (None, whole)]
        if others or not shards or len({len(shard.box.shape) for shard in shards}) > 1:
            shapes = [str(each) for each in (whole, *others)]
            raise self.refused(f"gives {name!r} the shapes {listed(shapes)}")
        if whole is None:  # releases before 3.1 do not say
            whole = tuple(map(max, zip(*(shard.box.end for shard in shards), strict=True)))
        for shard in shards:
            self.check_inside(name, shard.box, whole)
        return whole

    def _dtype(self, name: str, shard: _Shard, held: TensorSpec, file: str) -> DType:
        """Return a shard's dtype, which its array in a file may have under another name."""
        shape = shard.box.shape if shard.flat is None else (shard.flat[1] - shard.flat[0],)
        dtype = held.dtype if shard.dtype is None else shard.dtype
        meanings = {held.dtype.name, *RAW_MEANINGS.get(held.dtype.name, ())}
        if held.shape != shape or dtype.name not in meanings:
            raise FormatError(
                f"{name!r} is {held} in {file!r} and {dtype}{list(shape)} by {self._file!r} in "
                f"{self._store.place!r}"
            )
        return dtype


def _moved(extent: Extent, shard: _Shard, spec: TensorSpec) -> Iterator[Extent]:
    """Yield where the boxes of the whole tensor are that an extent of a shard's array holds."""
    if shard.flat is None:
        yield replace(extent, box=extent.box.moved(shard.box.offset))
        return
    at, start = extent.offset, shard.flat[0] + extent.box.offset[0]
    for box in boxes_of_range(shard.box.shape, start, extent.box.shape[0]):
        yield Extent(extent.name, box.moved(shard.box.offset), extent.file, at)
        at += spec.dtype.nbytes(box.num_elements)


# Writing: one file, as a job of one rank would write it.

_UID = "0"


def _layout(manifest: Manifest) -> list[FilePlan]:
    for name, spec in manifest.tensors.items():
        if spec.dtype.paddle is None:
            raise SpecError(f"{name!r} is {spec.dtype}, which Paddle has no name for")
    # Only names that are listed in it become tensors again.
    listing = code.table((code.text(name), code.text(name)) for name in manifest.tensors)
    tail = code.text(STRUCTURED_NAMES) + listing
    # Paddle reads "0_0.distcp" by a short cut that turns 8-bit floats into integers.
    has_float8 = any(spec.dtype.name.startswith("f8") for spec in manifest.tensors.values())
    file = f"{int(has_float8)}_{_UID}.distcp"
    return [pickle_plan(file, manifest.tensor_boxes(), tail=tail)]


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
