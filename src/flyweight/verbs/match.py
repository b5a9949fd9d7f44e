"""Match: which tensor of a checkpoint fills which tensor of a model. Strict both ways.

Names, dtypes and shapes are compared before a byte is read. Tensors that the model ties are filled
once, so the checkpoint must hold the same bytes under all their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from logging import getLogger

from flyweight.errors import PlanError, listed
from flyweight.events import emit
from flyweight.formats import pdparams
from flyweight.formats.stored import Stored, same_bytes
from flyweight.plans.fit import check_fit
from flyweight.ports import Sink
from flyweight.ranks.group import Group
from flyweight.spec.dtype import DType
from flyweight.spec.manifest import TensorSpec

_log = getLogger("flyweight.verbs")


@dataclass(frozen=True)
class Matches:
    """Which tensor of the source fills which tensor of the target, and what is left over."""

    pairs: Mapping[str, str]
    """The source's name for each of the target's."""
    missing: list[str]
    """Names of the target that the source lacks."""
    unused: list[str]
    """Names of the source that the target lacks."""


def match(stored: Stored, sink: Sink) -> Matches:
    """Pair the names. Raises if pairs differ in dtype or shape, and lists all that do."""
    have, want = stored.manifest, sink.manifest
    known = set(have.names)
    aliases: dict[str, list[str]] = {name: [name] for name in want.tensors}
    for alias, name in want.tied.items():
        aliases[name].append(alias)
    pairs: dict[str, str] = {}
    missing: list[str] = []
    used: dict[str, TensorSpec] = {}
    for name, names in aliases.items():
        found = [each for each in names if each in known]
        used.update(dict.fromkeys(found, want.tensors[name]))
        if found:
            pairs[name] = found[0]
        else:
            missing.append(name)
    missing += [name for name in want.values if name not in have.values]

    def is_same(name: str, have: DType, want: DType) -> bool:
        meanings = pdparams.RAW_MEANINGS.get(have.name, ()) if name in stored.raw_names else ()
        return have == want or want.name in meanings

    check_fit(
        {name: have.spec(name) for name in used},
        used,
        source=f"in {stored.store.place!r}",
        sink="in the target",
        is_same=is_same,
    )
    for names in aliases.values():
        _check_tied(stored, [each for each in names if each in known])
    return Matches(pairs, missing, sorted(known - used.keys()))


def _check_tied(stored: Stored, names: list[str]) -> None:
    """Raise if names that share memory in the target hold different bytes in the source."""
    tied = stored.manifest.tied
    first, *others = dict.fromkeys(tied.get(name, name) for name in names) or [""]
    for other in others:
        if not same_bytes(stored, first, stored, other):
            raise PlanError(
                f"{first!r} and {other!r} are one tensor in the target and differ in "
                f"{stored.store.place!r}"
            )


def check_names(
    stored: Stored, matches: Matches, group: Group, *, may_miss: bool, may_leave: bool
) -> None:
    """Raise for tensors that the source lacks on this rank, and for those that no rank uses.

    Every rank must call this. `may_miss` allows the former. `may_leave` allows the latter, of which
    the coordinator warns.
    """
    place = stored.store.place
    if matches.missing and not may_miss:
        raise PlanError(
            f"target wants {len(matches.missing)} tensors that {place!r} lacks: "
            f"{listed(matches.missing)}"
        )
    # Each rank sends one letter per name: x if it uses the tensor.
    names, unused = sorted(stored.manifest.names), set(matches.unused)
    letters = "".join("-" if name in unused else "x" for name in names)
    answers = [str(each) for each in group.gather("names", letters)]
    for rank, each in enumerate(answers):
        if len(each) != len(names):
            raise PlanError(
                f"rank {rank} sees {len(each)} tensors in {place!r}, rank {group.rank} "
                f"{len(names)}: not the same files"
            )
    left = [
        name for n, name in enumerate(names) if answers and all(each[n] == "-" for each in answers)
    ]
    if not left:
        return
    if not may_leave:
        raise PlanError(
            f"{place!r} has {len(left)} tensors that the target lacks: {listed(left)}; load with "
            f"extra='report' to leave them out"
        )
    emit("load.unused", place=place, num_tensors=len(left), names=listed(left))
    _log.warning("%r has %d tensors that the target lacks: %s", place, len(left), listed(left))
