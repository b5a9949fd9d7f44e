"""Rules: which tensors of a model are cut how, and what a rank's own tensors are called.

The names of a checkpoint and the tensors of an engine seldom agree: q, k and v
stand side by side in one tensor, experts in a stack, layers on pipeline stages. A
rule says so for all tensors whose names fit its patterns. `*` in a pattern stands
for one word between dots, `**` for any number of them, and both are counted, from
0, so that other fields can speak of them. `model_layout.py` applies rules to a model;
`docs/guides/resharding.md` has the fields by example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_STAR = re.compile(r"\{([0-9]{1,3})\}")


@dataclass(frozen=True)
class Spread:
    """Numbered tensors dealt out over axes: layers over stages, experts over ranks."""

    axes: tuple[str, ...]
    starts: tuple[int, ...] | None = None
    """The first number of each piece; None deals the numbers there are out evenly."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the tensors of some names are cut, and which tensor of a rank they are part of."""

    names: tuple[str, ...]
    """Patterns. Several are joined, in this order, in one tensor of the rank."""
    cuts: tuple[Mapping[int, Sequence[str]], ...]
    """For each name: dim to the axes that cut it."""
    spread: Mapping[int, Spread] = field(default_factory=dict)
    """Number of a star to the axes over which the tensors are dealt out by it."""
    local: str | None = None
    """The rank's own name, with {0} for the first star; None keeps the name."""
    join: int = 0
    """The dim along which several names stand side by side."""
    groups: int = 1
    """How many times they take turns over the whole tensor, as grouped heads do."""
    stack: int | None = None
    """The star whose numbers become a dim of the rank's tensor, before all others."""


def num_stars(pattern: str) -> int:
    return len(re.findall(r"\*\*|\*", pattern))


def compiled(pattern: str) -> re.Pattern[str]:
    """Return what matches the names that fit, with a group for each star."""
    parts = re.split(r"(\*\*|\*)", pattern)
    words = {"**": "(.+)", "*": r"([^.]+)"}
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts))


def stars_of(template: str) -> list[int] | None:
    """Return the stars that a rank's own name speaks of; None if it has braces of other kinds."""
    rest = _STAR.sub("", template)
    if "{" in rest or "}" in rest:
        return None
    return [int(number) for number in _STAR.findall(template)]


def filled(template: str, stars: Sequence[str]) -> str:
    """Return the rank's own name for a tensor whose stars stand for these words."""
    return _STAR.sub(lambda found: stars[int(found[1])], template)
