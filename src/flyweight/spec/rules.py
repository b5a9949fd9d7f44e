"""Rules: which tensors of a model are cut how, and the names of a rank's own tensors.

The names of a checkpoint and the tensors of an engine seldom agree: an engine joins q, k and v in
one tensor, stacks experts, and keeps each layer on one pipeline stage. A rule says so for all
tensors whose names fit its patterns. `*` in a pattern matches one word between dots, `**` any
number of them; both are numbered from 0, and other fields refer to them by number.
`model_layout.py` applies rules to a model; `docs/guides/resharding.md` has the fields by example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from flyweight.errors import FormatError, SpecError, listed
from flyweight.spec.strict_json import convert, parse_json

_STAR = re.compile(r"\{([0-9]{1,3})\}")


@dataclass(frozen=True)
class Spread:
    """Numbered tensors dealt out over axes: layers over stages, experts over ranks."""

    axes: tuple[str, ...]
    starts: tuple[int, ...] | None = None
    """The first number of each piece; None deals the numbers out evenly."""


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
    """The dim along which several names are joined."""
    groups: int = 1
    """How often the names alternate along that dim of the whole tensor, as grouped heads do."""
    stack: int | None = None
    """The star whose numbers become a dim of the rank's tensor, before all others."""

    def __post_init__(self) -> None:
        what = f"rule for {listed(self.names)}"
        if not self.names or len(self.names) != len(self.cuts):
            raise SpecError(f"{what} has {len(self.names)} names and {len(self.cuts)} cuts")
        counts = {len(re.findall(r"\*\*|\*", name)) for name in self.names}
        if len(counts) != 1:
            raise SpecError(f"{what}: names that are joined have the same number of stars")
        (count,) = counts
        used = [*self.spread, *([] if self.stack is None else [self.stack])]
        if any(not 0 <= star < count for star in used):
            raise SpecError(f"{what} has {count} stars and refers to stars {used}")
        if len(self.names) > 1 and self.local is None:
            raise SpecError(f"{what} joins {len(self.names)} names and does not name the result")
        if self.join < 0 or self.groups < 1:
            raise SpecError(f"{what} joins along dim {self.join} in {self.groups} groups")
        if self.local is not None:
            stars = [int(number) for number in _STAR.findall(self.local)]
            if re.search("[{}]", _STAR.sub("", self.local)) or max(stars, default=-1) >= count:
                raise SpecError(
                    f"{what}: local {self.local!r} does not fit; of braces it may have those of "
                    f"its {count} stars, as {{0}}"
                )


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for the names that fit, with a group for each star."""
    parts = re.split(r"(\*\*|\*)", pattern)
    words = {"**": "(.+)", "*": r"([^.]+)"}
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts))


def filled(template: str, stars: Sequence[str]) -> str:
    """Return the rank's own name for a tensor whose stars matched these words."""
    return _STAR.sub(lambda found: stars[int(found[1])], template)


_Texts = str | tuple[str, ...]
_Whole = Annotated[int, Meta(ge=0, lt=2**31)]
_Index = Annotated[int, Meta(ge=0, lt=1000)]
_Cut = dict[_Index, _Texts]


class _SpreadText(Struct, forbid_unknown_fields=True):
    axes: _Texts
    starts: tuple[_Whole, ...]


class _RuleText(Struct, forbid_unknown_fields=True):
    """A rule as people write it: a text may replace a list of one, and one cut is for all names."""

    names: _Texts
    cut: _Cut | UnsetType = UNSET
    cuts: tuple[_Cut, ...] | UnsetType = UNSET
    spread: dict[_Index, _Texts | _SpreadText] = {}
    local: str | None = None
    join: _Whole = 0
    groups: _Whole = 1
    stack: _Whole | None = None

    def __post_init__(self) -> None:
        if self.cut is not UNSET and self.cuts is not UNSET:
            raise SpecError("a rule has both 'cut', for all names, and 'cuts', one for each")

    def rule(self) -> Rule:
        names = _tuple(self.names)
        cuts = (self.cut or {},) * len(names) if self.cuts is UNSET else self.cuts
        return Rule(
            names=names,
            cuts=tuple({dim: _tuple(axes) for dim, axes in cut.items()} for cut in cuts),
            spread={star: _spread(axes) for star, axes in self.spread.items()},
            local=self.local,
            join=self.join,
            groups=self.groups,
            stack=self.stack,
        )


class _LayoutText(Struct, forbid_unknown_fields=True):
    mesh: dict[str, _Whole]
    rules: list[_RuleText]


def _tuple(texts: _Texts) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


def _spread(value: _Texts | _SpreadText) -> Spread:
    if isinstance(value, _SpreadText):
        return Spread(_tuple(value.axes), value.starts)
    return Spread(_tuple(value))


def decode_rules(text: str | bytes, what: str) -> tuple[dict[str, int], list[Rule]]:
    """Return the axes of the mesh and the rules in a JSON text; anything else raises SpecError.

    Whether the rules fit the mesh is checked by `ModelLayout`.
    """
    try:
        data = text.encode() if isinstance(text, str) else text
        layout = convert(parse_json(data, what), _LayoutText, what)
    except FormatError as cause:
        raise SpecError(str(cause)) from cause
    return layout.mesh, [each.rule() for each in layout.rules]
