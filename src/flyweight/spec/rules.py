"""Rules: which tensors of a model are cut how, and the names of a rank's own tensors.

The names of a checkpoint and the tensors of an engine seldom agree: an engine joins q, k and v in
one tensor, stacks experts, and keeps each layer on one pipeline stage. A rule says so for all
tensors whose names fit its patterns. `*` in a pattern matches one word between dots, `**` any
number of them; both are numbered from 0, and other fields refer to them by number.
`model_layout.py` applies rules to a model; `docs/guides/resharding.md` has the fields by example.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from flyweight.errors import FormatError, SpecError, listed
from flyweight.spec.layout import Layout
from flyweight.spec.strict_json import convert, parse_json

_STAR = re.compile(r"\{([0-9]{1,3})\}")
_Texts = str | tuple[str, ...]
"""A text may replace a list of one."""
_Whole = Annotated[int, Meta(ge=0, lt=2**31)]
_Index = Annotated[int, Meta(ge=0, lt=1000)]
_Cut = dict[_Index, _Texts]
"""Dim to the axes that cut it."""


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbered tensors dealt out over axes: layers over stages, experts over ranks."""

    axes: _Texts
    starts: tuple[_Whole, ...]
    """The first number of each piece."""


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tensors of some names are cut, and which tensor of a rank they are part of."""

    names: _Texts
    """Patterns. Several are joined, in this order, in one tensor of the rank."""
    cut: _Cut | UnsetType = UNSET
    """For all names."""
    cuts: tuple[_Cut, ...] | UnsetType = UNSET
    """One for each name, in place of `cut`."""
    spread: dict[_Index, _Texts | Spread] = {}
    """Maps a star to the axes that its numbers distribute the tensors over."""
    local: str | None = None
    """The rank's own name, with {0} for the first star; None keeps the name."""
    join: _Whole = 0
    """The dim along which several names are joined."""
    groups: Annotated[int, Meta(ge=1, lt=2**31)] = 1
    """How often the names alternate along that dim of the whole tensor, as grouped heads do."""
    stack: _Whole | None = None
    """The star whose numbers become a dim of the rank's tensor, before all others."""


class MeshRule:
    """A rule on a mesh, checked. Each of its names has a pattern and a layout."""

    def __init__(self, rule: Rule, axes: Mapping[str, int]) -> None:
        self.names, self.local, self.stack = _tuple(rule.names), rule.local, rule.stack
        self.join, self.groups = rule.join, rule.groups
        what = f"rule for {listed(self.names)}"
        if rule.cut is not UNSET and rule.cuts is not UNSET:
            raise SpecError(f"{what} has both 'cut', for all names, and 'cuts', one for each")
        cuts = (rule.cut or {},) * len(self.names) if rule.cuts is UNSET else rule.cuts
        if not self.names or len(self.names) != len(cuts):
            raise SpecError(f"{what} has {len(self.names)} names and {len(cuts)} cuts")
        self.patterns = [_compiled(name) for name in self.names]
        counts = {pattern.groups for pattern in self.patterns}
        if len(counts) != 1:
            raise SpecError(f"{what}: names that are joined have the same number of stars")
        (count,) = counts
        used = [*rule.spread, *([] if self.stack is None else [self.stack])]
        if any(star >= count for star in used):
            raise SpecError(f"{what} has {count} stars and refers to stars {used}")
        if len(self.names) > 1 and self.local is None:
            raise SpecError(f"{what} joins {len(self.names)} names and does not name the result")
        if self.local is not None:
            stars = [int(number) for number in _STAR.findall(self.local)]
            if re.search("[{}]", _STAR.sub("", self.local)) or max(stars, default=-1) >= count:
                raise SpecError(
                    f"{what}: local {self.local!r} does not fit; of braces it may have those of "
                    f"its {count} stars, as {{0}}"
                )
        self.layouts = [
            Layout(axes, {dim: _tuple(texts) for dim, texts in cut.items()}) for cut in cuts
        ]
        num_pieces = {layout.num_pieces(self.join) for layout in self.layouts}
        if self.groups > 1 and len(num_pieces) > 1:
            raise SpecError(
                f"{what} alternates in {self.groups} groups and cuts dim {self.join} into "
                f"{sorted(num_pieces)} pieces; names that alternate are cut alike"
            )
        self.spread = {star: _Deal(what, each, axes) for star, each in rule.spread.items()}

    def local_name(self, name: str, stars: Sequence[str]) -> str:
        """Return the rank's own name for a tensor whose stars matched these words."""
        if self.local is None:
            return name
        return _STAR.sub(lambda found: stars[int(found[1])], self.local)

    def holders(self, ranks: Iterable[int]) -> dict[tuple[int, ...], list[int]]:
        """Return which of the ranks hold which pieces, one piece for each spread."""
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            pieces = tuple(deal.piece(rank) for deal in self.spread.values())
            holders.setdefault(pieces, []).append(rank)
        return holders


class _Deal:
    """A spread on a mesh."""

    def __init__(self, what: str, spread: _Texts | Spread, axes: Mapping[str, int]) -> None:
        self.starts = spread.starts if isinstance(spread, Spread) else None
        texts = _tuple(spread.axes if isinstance(spread, Spread) else spread)
        # It deals out a row of pieces as a cut does a dim: to each rank its element.
        self._layout = Layout(axes, {0: texts})
        self._num_pieces = self._layout.num_pieces(0)
        if self.starts is not None and (
            len(self.starts) != self._num_pieces or list(self.starts) != sorted(self.starts)
        ):
            raise SpecError(
                f"{what} starts {len(self.starts)} pieces at {list(self.starts)}, {list(texts)} "
                f"make {self._num_pieces}; starts only grow"
            )

    def piece(self, rank: int) -> int:
        return self._layout.box(rank, (self._num_pieces,)).offset[0]

    def pieces(self, numbers: Collection[int]) -> dict[int, int]:
        """Return the piece of each number; -1 for one before the first start."""
        if self.starts is not None:
            return {number: bisect_right(self.starts, number) - 1 for number in numbers}
        per_piece = -(-len(numbers) // self._num_pieces)
        return {number: index // per_piece for index, number in enumerate(sorted(numbers))}


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for the names that fit, with a group for each star."""
    parts = re.split(r"(\*\*|\*)", pattern)
    words = {"**": "(.+)", "*": r"([^.]+)"}
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts))


def _tuple(texts: _Texts) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


class _LayoutText(Struct, forbid_unknown_fields=True):
    mesh: dict[str, _Whole]
    rules: list[Rule]


def decode_rules(text: str | bytes, what: str) -> tuple[dict[str, int], list[Rule]]:
    """Return the axes of the mesh and the rules in a JSON text; anything else raises SpecError.

    Whether the rules fit the mesh is checked by `ModelLayout`.
    """
    try:
        data = text.encode() if isinstance(text, str) else text
        layout = convert(parse_json(data, what), _LayoutText, what)
    except FormatError as cause:
        raise SpecError(str(cause)) from cause
    return layout.mesh, layout.rules
