"""Compare: verify that files hold what was written, and list how two checkpoints differ."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import isfinite, nan
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.digest import Digest
from flyweight.errors import ChecksumMismatch
from flyweight.formats import snapshot
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored, whole_digest
from flyweight.memory import MEMORY_BYTES, STAGING, Bytes, items_of
from flyweight.spec.box import Box, strides_of
from flyweight.spec.dtype import DType
from flyweight.spec.manifest import Extent, Leaf, Manifest, TensorSpec, is_same_leaf
from flyweight.verbs.find import PathLike, opened
from flyweight.worker_threads import default_threads


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found."""

    place: str
    format: str
    version: int | None
    num_tensors: int
    read_bytes: int
    checked_bytes: int
    """0 for formats that keep no checksums: then only their structure was checked."""
    seconds: float
    damage: list[str] = field(default_factory=list)
    """One line per chunk or tensor that is wrong."""

    @property
    def is_whole(self) -> bool:
        return not self.damage


def verify(
    source: PathLike | Stored, *, version: int | None = None, memory_bytes: int = MEMORY_BYTES
) -> VerifyReport:
    """Read everything, and compare it with all checksums and digests that the format keeps.

    Files that do not open raise. Damage inside the tensors is listed in the report.

    Args:
        source: A path that `open` accepts, or weights that are open already.
        version: The version to open; by default the newest.
        memory_bytes: The most memory to use.
    """
    damage: list[str] = []
    damaged: set[tuple[str, int]] = set()
    lock, started = threading.Lock(), perf_counter()

    def on_damage(extent: Extent, error: ChecksumMismatch) -> None:
        with lock:
            damage.append(str(error))
            damaged.add((extent.file, extent.offset))

    with opened(source, version=version) as stored:
        manifest, place = stored.manifest, stored.store.place
        if stored.format == "snapshot":
            snapshot.check_for_others(stored)
        reader = Reader(stored.store, manifest, on_damage=on_damage)
        digests = [(each, _add_digest(reader, manifest, each)) for each in manifest.extents]
        reader.run(num_threads=default_threads(), memory_bytes=memory_bytes, verb="verify")
    for extent, running in digests:
        if extent.digest is None or (extent.file, extent.offset) in damaged:
            continue
        if (found := running.value()) != extent.digest:
            damage.append(
                f"{extent.name!r} in {place!r} has digest {found:016x}, {extent.digest:016x} was "
                f"committed"
            )
    return VerifyReport(
        place,
        stored.format,
        manifest.version,
        len(manifest.tensors),
        reader.read_bytes,
        reader.checked_bytes,
        perf_counter() - started,
        sorted(damage),
    )


def _add_digest(reader: Reader, manifest: Manifest, extent: Extent) -> Digest:
    """Return a digest that is complete once the reader, which this adds the extent to, has run."""
    spec = manifest.tensors[extent.name]
    items = spec.stored(extent.box)
    strides = strides_of(items.shape)
    running = Digest(spec.box_bytes(extent.box))

    def add(place: Box, data: Bytes) -> None:
        if extent.digest is not None:
            start = sum(a * b for a, b in zip(place.offset, strides, strict=True))
            running.add(start * spec.item_bytes, data)

    reader.add(extent, extent.box, Target(items, add, STAGING))
    return running


@dataclass(frozen=True)
class TensorDiff:
    """How one tensor differs."""

    name: str
    num_elements: int
    """Elements, or bytes for dtypes that pack several elements into one."""
    num_different: int
    max_distance: float | None
    """None for dtypes without numbers, and if a difference is not finite."""
    mean_distance: float | None


@dataclass(frozen=True)
class DiffReport:
    """How two checkpoints differ."""

    only_a: list[str]
    only_b: list[str]
    other_spec: dict[str, tuple[str, str]]
    changed: list[TensorDiff]
    changed_values: dict[str, tuple[Leaf, Leaf]]
    """Values that are not tensors and that both have."""
    num_same: int

    @property
    def is_same(self) -> bool:
        lists = (self.only_a, self.only_b, self.other_spec, self.changed, self.changed_values)
        return not any(lists)


def diff(a: PathLike | Stored, b: PathLike | Stored) -> DiffReport:
    """Compare two checkpoints tensor by tensor. Tensors with equal digests are not read.

    Args:
        a: A path that `open` accepts, or weights that are open already.
        b: The same, for the other side.
    """
    with opened(a) as left, opened(b) as right:
        names_a, names_b = set(left.manifest.names), set(right.manifest.names)
        both, other_spec, changed = names_a & names_b, {}, []
        for name in sorted(both):
            spec, other = left.manifest.spec(name), right.manifest.spec(name)
            digests = {whole_digest(left, name), whole_digest(right, name)}
            if spec != other:
                other_spec[name] = str(spec), str(other)
            elif None in digests or len(digests) > 1:
                found = _tensor_diff(left, right, name, spec)
                if found.num_different:
                    changed.append(found)
        x, y = left.manifest.values, right.manifest.values
    return DiffReport(
        sorted(names_a - names_b),
        sorted(names_b - names_a),
        other_spec,
        changed,
        {n: (x[n], y[n]) for n in sorted(x.keys() & y.keys()) if not is_same_leaf(x[n], y[n])},
        len(both) - len(other_spec) - len(changed),
    )


def _tensor_diff(a: Stored, b: Stored, name: str, spec: TensorSpec) -> TensorDiff:
    num_different, largest, total = 0, 0.0, 0.0
    for items in spec.chunks(Box.whole(spec.shape), a.manifest.chunk_bytes):
        box = spec.elements(items)
        left, right = a.read(name, box), b.read(name, box)
        width = spec.item_bytes
        differ = np.flatnonzero(
            items_of(left, width, (-1,)) != items_of(right, width, (-1,))
            if width <= 8
            else (left.reshape(-1, width) != right.reshape(-1, width)).any(axis=1)
        )
        if not len(differ):
            continue
        num_different += len(differ)
        x, y = numbers(left, spec.dtype), numbers(right, spec.dtype)
        if x is None or y is None:
            total = nan
            continue
        with np.errstate(all="ignore"):
            distance = np.abs(x[differ] - y[differ])
            largest, total = max(largest, float(distance.max())), total + float(distance.sum())
    count = spec.stored(Box.whole(spec.shape)).num_elements
    has_numbers = isfinite(total)
    mean = total / count if has_numbers and count else None
    return TensorDiff(name, count, num_different, largest if has_numbers else None, mean)


def numbers(data: Bytes, dtype: DType) -> NDArray[Any] | None:
    """Return the bytes as numbers, or None for packed dtypes."""
    if dtype.numpy is not None:
        kind = np.complex128 if dtype.name.startswith("c") else np.float64
        return data.view(dtype.numpy).astype(kind)
    if dtype.name == "bf16":
        wide = data.view("<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    if dtype.name.startswith("f8_"):
        table: NDArray[np.float64] = _FLOAT8[dtype.name][data]
        return table
    return None


def _float8(exponent_bits: int, bias: int, nan_codes: list[int]) -> NDArray[np.float64]:
    """Return the value of each of the 256 codes of an 8-bit float without infinities."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (codes & 0x7F) >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    value[nan_codes] = np.nan
    return np.where(codes >= 0x80, -value, value)


_FLOAT8 = {
    "f8_e4m3": _float8(4, 7, [0x7F, 0xFF]),
    "f8_e5m2": (np.arange(256, dtype="<u2") << 8).view("<f2").astype(np.float64),
    "f8_e4m3fnuz": _float8(4, 8, [0x80]),
    "f8_e5m2fnuz": _float8(5, 16, [0x80]),
    "f8_e8m0": np.append(2.0 ** (np.arange(255.0) - 127), np.nan),
}
