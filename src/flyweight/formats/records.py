"""Records: the objects that the pickles of checkpoints describe, read with limits.

A pickle of a few bytes can describe more than any memory holds, by naming the same
list again and again. So nothing here walks or prints more of a value than it must.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TypeGuard

from flyweight.errors import FormatError, SnapshotIncomplete, SpecError
from flyweight.formats.pickle_values import Budget, Global, Made, MadeDict, Span
from flyweight.formats.pickles import read_pickle
from flyweight.ports import Store
from flyweight.spec.box import Box
from flyweight.spec.manifest import MAX_DIMS, Leaf, check_name

MAX_METADATA_BYTES = 1 << 30
MAX_VALUES = 2_000_000
MAX_NESTING = 32
RECORD_BYTES = 200
"""Memory that a reader takes for one record: for its place, its box and its extent."""
VALUE_BYTES = 300
"""Memory that a reader takes for one value, its name aside."""


def place_key(name: str, *numbers: tuple[int, ...]) -> bytes:
    """Return a key for a part of a tensor: tuples of numbers can be made to share one hash."""
    counted = [each for some in numbers for each in (len(some), *some)]
    return struct.pack(f"<{len(counted)}q", *counted) + name.encode("utf-8", "surrogatepass")


@contextmanager
def as_format_errors(what: str) -> Iterator[None]:
    """Raise FormatError for whatever is wrong with the description of `what`."""
    try:
        yield
    except RecursionError as cause:
        raise FormatError(f"{what} nests too deep") from cause
    except SpecError as cause:
        raise FormatError(f"{what}: {cause}") from cause


def shown(value: object) -> str:
    """Return a few words for an error: what a value is, never all that is in it."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, (bool, int, float, type(None))):
        return str(value)[:80]
    if isinstance(value, Made):
        return str(value.what)[:200]
    if isinstance(value, Global):
        return str(value)[:200]
    if isinstance(value, Span):
        return f"{value.nbytes} bytes of {'text' if value.is_text else 'data'}"
    if isinstance(value, (tuple, list)) and len(value) <= 8 and all(is_leaf(v) for v in value):
        return str(value)[:200]
    return f"a {type(value).__name__}"


def is_leaf(value: object) -> TypeGuard[Leaf]:
    return value is None or isinstance(value, (bool, int, float, str))


class Records:
    """Reads the records of one file, called `what` in errors; its size bounds their memory."""

    def __init__(self, what: str, nbytes: int = 0, *, max_values: int | None = None) -> None:
        self.what, self._num_values = what, 0
        self._max_values = MAX_VALUES if max_values is None else max_values
        self.budget = self.values_budget = Budget(what, nbytes)
        """The memory for records, and for values, which may be in other files."""

    def read_index(
        self, store: Store, file: str, allowed: Collection[tuple[str, str]]
    ) -> dict[str, object]:
        """Return the fields of a checkpoint's index, which is a pickled `Metadata`."""
        if (size := store.size(file)) > MAX_METADATA_BYTES:
            raise self.refused(f"has {size} bytes, at most {MAX_METADATA_BYTES}")
        root = read_pickle(store, file, allowed, has_objects=True, budget=self.budget)
        return self.fields(root, "Metadata")

    def refused(self, why: str) -> FormatError:
        return FormatError(f"{self.what} {why}")

    def fields(self, value: object, kind: str) -> dict[str, object]:
        """Return the fields of an object of a class, by name."""
        self.budget.take_record(RECORD_BYTES)
        if isinstance(value, Made) and value.what.name == kind and value.names is not None:
            assert isinstance(value.state, tuple)
            return dict(zip(value.names, value.state, strict=True))
        raise self.refused(f"has {shown(value)} where a {kind} is expected")

    def check_inside(self, name: str, box: Box, whole: tuple[int, ...]) -> None:
        """Raise unless a box of a tensor lies within its shape."""
        if len(whole) != len(box.shape) or not Box.whole(whole).contains(box):
            raise self.refused(f"has {box.offset}..{box.end} of {name!r}, which is {whole}")

    def check_file(self, file: str, names: Collection[str]) -> None:
        """Raise unless a file that the index names is among those of the directory."""
        if file not in names:
            raise SnapshotIncomplete(f"{self.what} names {file!r}, which is not there")

    def numbers(self, value: object, name: str) -> tuple[int, ...]:
        """Return a shape or an offset."""
        if isinstance(value, (tuple, list)) and len(value) > MAX_DIMS:
            raise self.refused(f"has {len(value)} numbers for {name!r}, at most {MAX_DIMS}")
        if isinstance(value, (tuple, list)) and all(
            type(each) is int and 0 <= each < 2**63 for each in value
        ):
            if isinstance(value, list):  # unlike a tuple it may be recalled, and is copied
                self.budget.take(8 * len(value))
            return tuple(value)
        raise self.refused(f"has the numbers {shown(value)} for {name!r}")

    def values(
        self,
        name: str,
        value: object,
        *,
        keys: tuple[type, ...] = (str, int),
        skipped: str | None = None,
        depth: int = 0,
    ) -> Iterator[tuple[str, object]]:
        """Yield what is in nested dicts and lists by its joined name, without the key `skipped`.

        `keys` are the types that a dict's key may have.
        """
        self._num_values += 1
        if depth > MAX_NESTING or self._num_values > self._max_values:
            raise self.refused(
                f"has a value {name[:80]!r} that nests too deep or is too large: depth {depth}, at "
                f"most {MAX_NESTING}, and {self._num_values} values, at most {self._max_values}"
            )
        self.values_budget.take(VALUE_BYTES + len(name))
        if isinstance(value, MadeDict):
            value = value.items
        if not isinstance(value, (dict, list, tuple)):
            yield check_name(name), value
            return
        if name:  # a pickle as a whole has none
            check_name(name)
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(key, keys):
                raise self.refused(f"has {shown(key)} for a key in {name!r}")
            if key != skipped:
                inner = f"{name}.{key}" if name else str(key)
                yield from self.values(inner, each, keys=keys, skipped=skipped, depth=depth + 1)
