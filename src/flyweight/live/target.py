"""Target: where an engine wants a version, the parameters of a model or an engine's own loader.

A target says which boxes of a trainer's tensors it wants. A model's are written in place. A loader
gets whole tensors, which it places itself; `loader.py` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np

from flyweight.adapters.identity import Identity
from flyweight.adapters.loader import Framework, Loader
from flyweight.adapters.model import Model, adapt
from flyweight.adapters.rows import Rows
from flyweight.adapters.tree import is_model
from flyweight.casts import CASTABLE
from flyweight.cuda import driver
from flyweight.errors import DTypeMismatch, PlanError, SpecError, VersionError, listed
from flyweight.live.catalog import Catalog, Devices
from flyweight.live.plan import Wanted
from flyweight.memory import collector_paused
from flyweight.memory_table import NOWHERE, BufferTable, Integers
from flyweight.plans.copy_table import BoxTable, kinds_of, numbers_of
from flyweight.plans.fit import check_fit
from flyweight.spec.dtype import DType
from flyweight.spec.manifest import Leaf, Manifest, TensorSpec
from flyweight.spec.model_layout import ModelLayout

REPLACED = "tensors of the model were replaced, or have moved"


class Target(Protocol):
    """What a replica fills."""

    devices: list[int]
    """Those that its memory is on, other than the host."""
    verified: str
    """What was checked when an update has ended: 'live' parameters, or what was 'received'."""
    unused: tuple[str, ...]
    """The trainer's tensors that it leaves out."""

    @property
    def live(self) -> ModelTarget | None:
        """Where a version lies once it is taken; None if that is not known."""

    def choose(self, catalog: Catalog) -> Wanted:
        """Look at the model, and return the boxes that it wants; raise PlanError if none fit."""

    def is_current(self) -> bool:
        """True while the memory is the one that was chosen for."""


class ModelTarget:
    """The parameters of a model, or rows of its memory, written in place, box by box."""

    verified = "live"

    def __init__(
        self,
        thing: object,
        *,
        layout: ModelLayout | None,
        rank: int | None,
        strict: bool,
        cast: bool,
    ) -> None:
        is_rank = type(rank) is int and layout is not None and 0 <= rank < layout.num_ranks
        if layout is not None and not is_rank:
            raise SpecError(
                f"rank is {rank!r}; the layout is for ranks 0 to {layout.num_ranks - 1}"
            )
        self._rows = thing if isinstance(thing, Rows) else None
        self.thing, self.layout = thing if self._rows is None else self._rows.thing, layout
        self.rank = rank if layout is not None else None
        self.is_strict, self._may_cast = strict and layout is None, cast
        self._model: Model | None = None
        self._identity: Identity | None = None
        self.table = BufferTable.of([])
        """Where each wanted box lies."""
        self.devices: list[int] = []
        self.unused: tuple[str, ...] = ()

    @property
    def live(self) -> ModelTarget:
        return self

    @property
    def is_loadable(self) -> bool:
        """True if files can fill it, too."""
        return self._rows is None

    def check(self) -> None:
        """Raise SpecError for a model that cannot be written, before there is a trainer."""
        if self.layout is None and self._rows is None:
            with collector_paused():
                self._identity, self._model = Identity(self.thing), adapt(self.thing)
                self._model.check_writable()

    def choose(self, catalog: Catalog) -> Wanted:
        with collector_paused():
            identity, model = self._described(catalog)
            model.check_writable()
            names = list(_wanted_names(model.manifest, catalog.tensors, catalog.tied))
            boxes, table = model.tables(names)
            if len(lost := np.flatnonzero(table.device == NOWHERE)):
                name = names[boxes.tensor[lost[0]]]
                raise PlanError(f"{name!r} is on a device that cannot be written in place")
            specs = {name: model.manifest.spec(name) for name in names}
            devices = Devices.of(table)
            wanted, number = matched(specs, boxes, devices, catalog, may_cast=self._may_cast)
            is_left = np.ones(len(catalog.names), bool)
            is_left[number] = False
            unused = tuple(catalog.names[n] for n in np.flatnonzero(is_left).tolist())
            if unused and self.is_strict and not model.has_layout:
                raise PlanError(
                    f"the trainer has {len(unused)} tensors that the model lacks: "
                    f"{listed(unused)}; strict=False leaves them out"
                )
        self._model, self._identity, self.table, self.unused = model, identity, table, unused
        self.devices = table.devices
        return wanted

    def _described(self, catalog: Catalog) -> tuple[Identity, Model]:
        """Return the model as it is now, which takes long to describe if it has many tensors."""
        layout, rank, tensors = self.layout, self.rank, catalog.tensors
        if layout is None and self._rows is None:
            last, model = self._identity, self._model
            if last is not None and model is not None and last.is_same():
                return last, model
            return Identity(self.thing), adapt(self.thing)
        whole = {**tensors, **{name: tensors[of] for name, of in catalog.tied.items()}}
        if self._rows is not None:
            return Identity(self.thing), self._rows.model(whole)
        assert layout is not None
        assert rank is not None
        return Identity(self.thing), adapt(self.thing, lambda: layout.locals(whole, rank))

    def look(self) -> None:
        """Take the memory that the model has now for the one that will be written."""
        self._identity, self._model = Identity(self.thing), None

    def look_again(self) -> None:
        """Take other values beside the tensors; raise VersionError if tensors were replaced."""
        before, self._identity = self._identity, Identity(self.thing)
        if before is None or not self._identity.has_tensors_of(before):
            self._identity = before
            raise VersionError(f"{REPLACED} while files were read into them; update again")

    def is_current(self) -> bool:
        return self._identity is not None and self._identity.is_same()

    def check_current(self) -> None:
        """Raise VersionError unless the memory that was chosen for is still the model's."""
        if self._identity is None or not self._identity.is_in_place():
            raise VersionError(f"{REPLACED} while an update waited; update again")

    def synchronize(self, seconds: float) -> None:
        """Wait for work on any stream of a device that still uses the weights."""
        for device in self.devices:
            driver.synchronize(device, seconds)

    def touched(self) -> None:
        """Let the framework know that its tensors were written."""
        if self._model is not None:  # else files were read, and `load` has done so
            self._model.touched()

    def finish(self, values: Mapping[str, Leaf]) -> None:
        """Set what is no tensor."""
        assert self._model is not None
        self._model.finish(Manifest({}, values=values))
        if values and not self.is_current():  # setting one changes a dict, but not its tensors
            with suppress(VersionError):
                self.look_again()


class LoaderTarget:
    """A function that takes whole tensors, in the order that it chooses."""

    verified = "received"
    unused: tuple[str, ...] = ()

    def __init__(self, loader: Loader, *, cast: bool) -> None:
        self.loader, self._may_cast = loader, cast
        self.live = None
        if loader.rows is not None:
            self.live = ModelTarget(loader.rows, layout=None, rank=None, strict=False, cast=cast)
        self.specs: dict[str, TensorSpec] = {}
        device = None if not loader.place else driver.device_named(loader.place)
        self.devices = [] if device is None else [device]

    def choose(self, catalog: Catalog) -> Wanted:
        self.specs = dict(self.loader.choose(catalog.tensors))
        whole = BoxTable.whole(self.specs.values())
        devices = Devices((self.loader.place,), np.zeros(len(whole), np.int64))
        wanted, _ = matched(self.specs, whole, devices, catalog, may_cast=self._may_cast)
        return wanted

    def is_current(self) -> bool:
        """A loader finds the weights itself."""
        return True


def target_of(
    thing: object,
    layout: ModelLayout | None,
    rank: int,
    *,
    strict: bool,
    cast: bool,
    framework: Framework,
    device: str,
) -> ModelTarget | LoaderTarget:
    """Return the target that a user means: a model, or a function that loads tensors."""
    if callable(thing) and not is_model(thing):
        thing = Loader(thing, framework, device)
    if layout is not None and isinstance(thing, (Loader, Rows)):
        raise SpecError(f"{type(thing).__name__} knows its boxes itself; a layout is for models")
    if isinstance(thing, Loader):
        return LoaderTarget(thing, cast=cast)
    return ModelTarget(thing, layout=layout, rank=rank, strict=strict, cast=cast)


def matched(
    specs: Mapping[str, TensorSpec],
    boxes: BoxTable,
    devices: Devices,
    catalog: Catalog,
    *,
    may_cast: bool,
) -> tuple[Wanted, Integers]:
    """Return boxes of tensors as they are wanted, and the number of each tensor in the catalog.

    Raises PlanError unless the trainer has all of them, in the same shapes and dtypes.
    """
    names = list(specs)
    number = numbers_of(names, catalog.names, catalog.tied)
    if (number < 0).any():
        missing = [names[n] for n in np.flatnonzero(number < 0).tolist()]
        raise PlanError(f"the trainer lacks {len(missing)} tensors: {listed(missing)}")
    have, have_kind = kinds_of(catalog.tensors.values())
    want, want_kind = kinds_of(specs.values())
    have_kind = have_kind[number]
    pairs = np.unique(have_kind * len(want) + want_kind).tolist()
    dtype = np.full(len(names), -1)
    if any(have[pair // len(want)] != want[pair % len(want)] for pair in pairs):
        found = {name: have[n] for name, n in zip(names, have_kind.tolist(), strict=True)}

        def is_same(name: str, have: DType, want: DType) -> bool:
            return have == want or (may_cast and {have.name, want.name} <= set(CASTABLE))

        try:
            check_fit(found, specs, source="at the trainer", sink="here", is_same=is_same)
        except DTypeMismatch as error:
            if not may_cast:
                error.note(f"Replica(..., cast=True) casts between {', '.join(CASTABLE)}")
            raise
        here, there = (np.array([each.dtype.name for each in kinds]) for kinds in (want, have))
        differs = here[want_kind] != there[have_kind]
        dtype[differs] = numbers_of(here.tolist(), CASTABLE)[want_kind][differs]
    found_boxes = BoxTable(number[boxes.tensor], boxes.offset, boxes.shape)
    return Wanted(found_boxes, dtype[boxes.tensor], devices, devices.digest), number


def _wanted_names(
    manifest: Manifest, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]
) -> Iterator[str]:
    """Yield the names to ask for: for names that are one tensor here, all that differ there.

    If their bytes differ, the digests of the memory that they share cannot all be right.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.tied.items():
        aliases.setdefault(name, [name]).append(alias)
    for only in manifest.tensors:
        if only not in aliases:
            yield only
            continue
        names = aliases[only]
        known = [name for name in names if name in tensors or name in tied]
        seen = set()
        for name in known or names[:1]:
            if tied.get(name, name) not in seen:
                seen.add(tied.get(name, name))
                yield name
