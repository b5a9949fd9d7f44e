"""Rules as JSON: a mesh and its rules from a text that a user wrote.

What is not as expected is refused with SpecError, in words that lead to its place in the
text. Whether the rules fit the mesh is not looked at here.
"""

from __future__ import annotations

from flyweight.errors import FormatError, SpecError
from flyweight.spec.manifest import Json
from flyweight.spec.manifest_json import parse_json
from flyweight.spec.rules import Rule, Spread

_RULE_FIELDS = {"names", "cut", "cuts", "spread", "local", "join", "groups", "stack"}


def decode_rules(text: str | bytes, what: str) -> tuple[dict[str, int], list[Rule]]:
    """Return the axes of the mesh and the rules that the text describes."""
    try:
        record = parse_json(text.encode() if isinstance(text, str) else text, what)
    except FormatError as cause:
        raise SpecError(str(cause)) from cause
    top = _object(record, what, {"mesh", "rules"}, {"mesh", "rules"})
    mesh = _object(top["mesh"], f"mesh of {what}")
    axes = {axis: _whole(size, f"axis {axis!r}") for axis, size in mesh.items()}
    rules = top["rules"]
    if not isinstance(rules, list):
        raise SpecError(f"rules of {what} are a {type(rules).__name__}, expected a list")
    return axes, [_rule(each, f"rule {n} of {what}") for n, each in enumerate(rules)]


def _rule(value: Json, what: str) -> Rule:
    record = _object(value, what, _RULE_FIELDS, {"names"})
    names = _texts(record["names"], f"names of {what}")
    if "cut" in record and "cuts" in record:
        raise SpecError(f"{what} has both 'cut', for all names, and 'cuts', one for each")
    if "cuts" in record:
        listed_cuts = record["cuts"]
        if not isinstance(listed_cuts, list):
            raise SpecError(f"cuts of {what} are {listed_cuts!r}, expected a list")
        cuts = tuple(_cut(each, what) for each in listed_cuts)
    else:
        cuts = (_cut(record.get("cut", {}), what),) * len(names)
    spread = {}
    for star, axes in _object(record.get("spread", {}), f"spread of {what}").items():
        if isinstance(axes, dict):
            fields = _object(axes, f"spread of {what}", {"axes", "starts"}, {"axes", "starts"})
            starts = fields["starts"]
            if not isinstance(starts, list):
                raise SpecError(f"starts of {what} are {starts!r}, expected a list")
            spread[_star(star, what)] = Spread(
                _texts(fields["axes"], what), tuple(_whole(each, what) for each in starts)
            )
        else:
            spread[_star(star, what)] = Spread(_texts(axes, what))
    local = record.get("local")
    if local is not None and not isinstance(local, str):
        raise SpecError(f"local of {what} is {local!r}, expected text")
    stack = record.get("stack")
    return Rule(
        names=names,
        cuts=cuts,
        spread=spread,
        local=local,
        join=_whole(record.get("join", 0), f"join of {what}"),
        groups=_whole(record.get("groups", 1), f"groups of {what}"),
        stack=None if stack is None else _whole(stack, f"stack of {what}"),
    )


def _object(
    value: Json, what: str, known: set[str] | None = None, needed: set[str] | None = None
) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise SpecError(f"{what} is a {type(value).__name__}, expected an object")
    if (known is not None and set(value) - known) or (needed is not None and needed - set(value)):
        raise SpecError(
            f"{what} has fields {sorted(value)}, known are {sorted(known or ())}, needed "
            f"{sorted(needed or ())}"
        )
    return value


def _whole(value: Json, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise SpecError(f"{what} is {str(value)[:80]}, expected a whole number")
    return value


def _texts(value: Json, what: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise SpecError(f"{what} is {str(value)[:80]}, expected text or a list of texts")
    return tuple(each for each in texts if isinstance(each, str))


def _star(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 3:
        raise SpecError(f"{what} speaks of star {text[:80]!r}, expected its number")
    return int(text)


def _cut(value: Json, what: str) -> dict[int, tuple[str, ...]]:
    cut = _object(value, f"cut of {what}")
    return {_star(dim, what): _texts(axes, f"cut of {what}") for dim, axes in cut.items()}
