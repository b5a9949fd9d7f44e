"""The old names: the files that FastDeploy's engines look for, and how to write them.

Old engines look for their rank's `.pdparams` under fixed names in four places. This search
lists the directory and compares whole names, where theirs uses patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from logging import getLogger

from flyweight.errors import FormatError, SnapshotIncomplete, SnapshotNotFound, SpecError
from flyweight.events import emit
from flyweight.formats.huggingface import split_parts
from flyweight.formats.pdparams import pickle_plan
from flyweight.formats.safetensors import file_plan as safetensors_plan
from flyweight.ports import FilePlan, Format, Store
from flyweight.spec.manifest import Manifest

_log = getLogger("flyweight.formats")
SHARED_DIRECTORY = "/shared_ipc_meta"


def legacy_format(
    *, rank: int, legacy_id: int | str, part_bytes: int | None, as_safetensors: bool
) -> Format:
    """Return the format that old engines read: one file, or parts of at most `part_bytes`."""
    names = LegacyNames(rank, legacy_id)
    plan = safetensors_plan if as_safetensors else pickle_plan

    def layout(manifest: Manifest) -> list[FilePlan]:
        if part_bytes is None:
            return [plan(names.single, manifest.tensor_boxes())]
        parts = split_parts(manifest.tensor_boxes(), part_bytes)
        return [plan(names.part(number), tensor_boxes) for number, tensor_boxes in enumerate(parts)]

    return Format("pdparams", layout, lambda manifest, plans: {})


@dataclass(frozen=True)
class LegacyNames:
    """The names old engines give a rank's files; `legacy_id` is a GPU's number or its UUID."""

    rank: int
    legacy_id: int | str

    def __post_init__(self) -> None:
        if (
            type(self.rank) is not int
            or self.rank < 0
            or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", str(self.legacy_id))
        ):
            raise SpecError(
                f"rank {self.rank!r} and legacy_id {self.legacy_id!r} make no file name; a rank is "
                f"0 or more, an id a GPU's number or UUID"
            )

    @property
    def single(self) -> str:
        return f"model_state.tp{self.rank}.{self.legacy_id}.pdparams"

    @property
    def undotted(self) -> str:
        return f"model_state.tp0{self.legacy_id}.pdparams"

    def part(self, number: int) -> str:
        return f"model_state.tp{self.rank}.{self.legacy_id}.part{number}.pdparams"

    def all(self, names: Iterable[str]) -> list[str]:
        """Return the files of this rank among `names`: parts, single file, undotted name."""
        start = f"model_state.tp{self.rank}.{self.legacy_id}."
        return sorted(
            name
            for name in names
            if name == self.undotted or (name.startswith(start) and name.endswith(".pdparams"))
        )

    def parts(self, names: Iterable[str]) -> dict[int, str]:
        """Return the parts among `names` by number; a base name must match in full."""
        prefix = f"model_state.tp{self.rank}.{self.legacy_id}.part"
        found: dict[int, str] = {}
        for name in names:
            if not name.startswith(prefix):
                continue
            match = re.fullmatch(r"([0-9]{1,9})\.pdparams", name[len(prefix) :])
            if match is None:
                emit("legacy.ignored", file=name)
                _log.warning("%r is skipped: its part number cannot be read", name)
            elif int(match[1]) in found:
                raise FormatError(f"{name!r} and {found[int(match[1])]!r} are the same part")
            else:
                found[int(match[1])] = name
        return dict(sorted(found.items()))


def find_legacy(
    model: Store | None, shared: Store | None, names: LegacyNames, *, looked_at: tuple[str, str]
) -> tuple[Store, list[str]]:
    """Return the store and the files of this rank, searched in the order of old engines.

    A directory that does not exist is None; `looked_at` names both, for the error.
    """
    if model is not None:
        here = model.names()
        if parts := names.parts(here):
            first, last = min(parts), max(parts)
            missing = [number for number in range(min(first, 1), last) if number not in parts]
            if missing:
                raise SnapshotIncomplete(
                    f"{model.place!r} has parts {list(parts)} of rank {names.rank}, id "
                    f"{names.legacy_id}; missing: {missing}"
                )
            return model, list(parts.values())
        for candidate in (names.single, names.undotted):
            if candidate in here:
                return model, [candidate]
    if shared is not None and names.single in shared.names():
        return shared, [names.single]
    model_place, shared_place = looked_at
    candidates = (names.part(0), names.part(1), names.single, names.undotted)
    tried = [f"{model_place}/{each}" for each in candidates]
    tried.append(f"{shared_place}/{names.single}")
    raise SnapshotNotFound(f"no file of this rank is there: {', '.join(tried)}")
