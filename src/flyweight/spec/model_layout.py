"""The layout of a model: its tensors cut over a mesh by rules, as each rank has them.

The first rule that fits a tensor's name counts. Which rank holds which layers and experts depends
on how many there are, so every method takes all tensors of the model, even to lay out one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flyweight.errors import PlanError, SpecError, listed
from flyweight.spec.box import Box
from flyweight.spec.layout import Layout, Shard
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.rules import MeshRule, Rule, decode_rules

MAX_RANKS = 1 << 20
_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a whole tensor, and where it lies in the tensor that a rank has."""

    name: str
    """Of the whole tensor; the same on every rank."""
    spec: TensorSpec
    """Of the whole tensor."""
    box: Box
    """In the whole tensor."""
    place: Box
    """In the rank's own: the same shape, but for leading dims of 1 that one of them lacks."""


@dataclass(frozen=True)
class Local:
    """A tensor as one rank has it."""

    spec: TensorSpec
    held: tuple[HeldBox, ...]


@dataclass(slots=True)
class _Match:
    """A tensor and the rule that fits its name."""

    name: str
    rule: MeshRule
    which: int
    """Index among the rule's names."""
    stars: tuple[str, ...]


class ModelLayout:
    """A mesh and the rules that cut a model over it.

    `axes` maps the name of each axis of the mesh to its size, in rank order, as in
    `{"pp": 2, "tp": 4}`. `rules` are tried in order. `from_json` reads both from a text, whose
    fields `docs/guides/resharding.md` explains.
    """

    def __init__(self, axes: Mapping[str, int], rules: Sequence[Rule]) -> None:
        self.axes, self.rules = dict(axes), tuple(rules)
        self._uncut = Layout(self.axes, {})
        self.num_ranks = self._uncut.num_ranks
        if self.num_ranks > MAX_RANKS:
            raise SpecError(f"a mesh of {self.num_ranks} ranks, at most {MAX_RANKS}")
        self._rules = [MeshRule(rule, self.axes) for rule in self.rules]
        # Patterns without digits cannot tell numbers apart: what fits one layer fits them all.
        names = [name for rule in self._rules for name in rule.names]
        self._is_blind = not any(map(_DIGITS.search, names))

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "layout") -> ModelLayout:
        """Return the layout in a JSON text; `what` names the text in errors.

        Raises SpecError if the text is not JSON, or does not describe a layout.
        """
        return cls(*decode_rules(text, what))

    def shards(
        self,
        tensors: Mapping[str, TensorSpec],
        *,
        rank: int | None = None,
        names: Collection[str] | None = None,
    ) -> dict[str, tuple[Shard, ...]]:
        """Return which rank holds which box of each tensor.

        `tensors` are all tensors of the model. `rank` and `names` restrict the result to one rank
        and to some names. Tensors that are cut alike share one tuple, so that a plan can treat them
        as one.
        """
        found: dict[tuple[object, ...], tuple[Shard, ...]] = {}
        shards: dict[str, tuple[Shard, ...]] = {}
        ranks = range(self.num_ranks) if rank is None else (rank,)
        holders = {rule: rule.holders(ranks) for rule in self._rules}
        matches = self._matches(tensors)
        for match, pieces in zip(matches, _pieces(matches), strict=True):
            if names is not None and match.name not in names:
                continue
            if -1 in pieces:
                first = [deal.starts[0] for deal in match.rule.spread.values() if deal.starts]
                raise PlanError(f"{match.name!r} comes before the first start, {first}")
            holding = holders[match.rule].get(pieces, ())
            if not holding and rank is not None:
                continue
            shape = tensors[match.name].shape
            key = (match.rule, match.which, shape, pieces)
            if key not in found:
                try:
                    # A scalar cannot be cut: every rank that has it has all of it.
                    layout = match.rule.layouts[match.which] if shape else self._uncut
                    found[key] = tuple(Shard(each, layout.box(each, shape)) for each in holding)
                except SpecError as error:
                    error.note(f"tensor {match.name!r}")
                    raise
            shards[match.name] = found[key]
        return shards

    def locals(self, tensors: Mapping[str, TensorSpec], rank: int) -> dict[str, Local]:
        """Return the tensors that `rank` has of a model of these tensors, by their own names."""
        shards = self.shards(tensors, rank=rank)
        members: dict[str, list[_Match]] = {}
        for match in self._matches(shards):
            members.setdefault(match.rule.local_name(match.name, match.stars), []).append(match)
        boxes = {name: shard.box for name, (shard,) in shards.items()}
        return {name: _local(name, matches, tensors, boxes) for name, matches in members.items()}

    def _matches(self, tensors: Iterable[str]) -> list[_Match]:
        matches, unmatched = [], []
        families: dict[str, tuple[MeshRule, int] | None] = {}
        for name in tensors:
            family = _DIGITS.sub("0", name) if self._is_blind else name
            if family not in families:
                families[family] = self._fit(name)
            if (fit := families[family]) is None:
                unmatched.append(name)
                continue
            rule, which = fit
            found = rule.patterns[which].fullmatch(name)
            assert found is not None
            matches.append(_Match(name, rule, which, found.groups()))
        if unmatched:
            raise PlanError(
                f"no rule fits {len(unmatched)} tensors: {listed(unmatched)}; a last rule for '**' "
                f"gives every rank the rest"
            )
        return matches

    def _fit(self, name: str) -> tuple[MeshRule, int] | None:
        for rule in self._rules:
            for which, pattern in enumerate(rule.patterns):
                if pattern.fullmatch(name):
                    return rule, which
        return None


def _pieces(matches: Sequence[_Match]) -> Iterator[tuple[int, ...]]:
    """Yield the piece that each tensor belongs to, for each spread of its rule."""
    numbers: dict[tuple[MeshRule, int], set[int]] = {}
    for match in matches:
        for star in match.rule.spread:
            if not match.stars[star].isdecimal():
                raise PlanError(
                    f"{match.name!r} has {match.stars[star]!r} where a number is dealt out"
                )
            numbers.setdefault((match.rule, star), set()).add(int(match.stars[star]))
    pieces = {(rule, star): rule.spread[star].pieces(n) for (rule, star), n in numbers.items()}
    for match in matches:
        rule = match.rule
        yield tuple(pieces[rule, star][int(match.stars[star])] for star in rule.spread)


def _local(
    name: str,
    matches: Sequence[_Match],
    tensors: Mapping[str, TensorSpec],
    boxes: Mapping[str, Box],
) -> Local:
    """Return one tensor of a rank: the boxes of its matches joined along a dim, and stacked."""
    rule = matches[0].rule
    rows = _rows(name, matches)
    dtypes = {match.name: tensors[match.name].dtype for match in matches}
    if len(set(dtypes.values())) != 1 or any(len(row) != len(rule.names) for row in rows):
        raise PlanError(
            f"{name!r} is joined of {len(rule.names)} tensors of one dtype; there are "
            f"{listed(dtypes)} of {listed({dtype.name for dtype in dtypes.values()})}"
        )
    held: list[HeldBox] = []
    shapes = set()
    for index, row in enumerate(rows):
        joined = [(each, boxes[each]) for each in row]
        shapes.add(_joined_shape(name, [box.shape for _, box in joined], rule))
        at = 0
        for tensor, box in _in_order(rule, joined):
            offset, shape = [0] * len(box.shape), list(box.shape)
            if len(joined) > 1:
                offset[rule.join] = at
                at += shape[rule.join]
            if rule.stack is not None:
                offset, shape = [index, *offset], [1, *shape]
            place = Box(tuple(offset), tuple(shape))
            held.append(HeldBox(tensor, tensors[tensor], box, place))
    if len(shapes) != 1:
        raise PlanError(f"{name!r} is a stack of different shapes: {sorted(shapes)[:5]}")
    (whole,) = shapes
    dtype = dtypes[matches[0].name]
    return Local(
        TensorSpec(dtype, whole if rule.stack is None else (len(rows), *whole)), tuple(held)
    )


def _rows(name: str, matches: Sequence[_Match]) -> list[list[str]]:
    """Return the names that are joined, in the rule's order, for each index of the stack."""
    rule = matches[0].rule
    rows: dict[str, dict[int, str]] = {}
    for match in matches:
        row = rows.setdefault("" if rule.stack is None else match.stars[rule.stack], {})
        if match.rule is not rule or match.which in row:
            raise SpecError(f"{listed([m.name for m in matches])} all become {name!r}")
        row[match.which] = match.name
    return [
        [rows[star][which] for which in sorted(rows[star])]
        for star in sorted(rows, key=lambda each: (int(each) if each.isdecimal() else -1, each))
    ]


def _in_order(rule: MeshRule, boxes: Sequence[tuple[str, Box]]) -> Iterator[tuple[str, Box]]:
    """Yield the boxes as they follow each other: one after the other, or in groups."""
    if rule.groups == 1:
        yield from boxes
        return
    num_pieces = rule.layouts[0].num_pieces(rule.join)
    num_groups, rest = divmod(rule.groups, num_pieces)
    if rest or any(box.shape[rule.join] % num_groups for _, box in boxes):
        raise PlanError(
            f"{rule.groups} groups over {num_pieces} pieces of "
            f"{[box.shape for _, box in boxes]}: the groups must come out even"
        )
    for group in range(num_groups):
        for name, box in boxes:
            length = box.shape[rule.join] // num_groups
            offset, shape = list(box.offset), list(box.shape)
            offset[rule.join] += group * length
            shape[rule.join] = length
            yield name, Box(tuple(offset), tuple(shape))


def _joined_shape(name: str, shapes: Sequence[tuple[int, ...]], rule: MeshRule) -> tuple[int, ...]:
    """Return the shape of some boxes side by side along a dim."""
    if len(shapes) == 1 and rule.groups == 1:
        return shapes[0]
    dim = rule.join
    if any(dim >= len(shape) for shape in shapes):
        raise PlanError(f"{name!r} is joined of {list(shapes)}: one has no dim {dim} to join")
    sides = {(shape[:dim], shape[dim + 1 :]) for shape in shapes}
    if len(sides) != 1:
        raise PlanError(f"{name!r} is joined of {list(shapes)}, which differ beside dim {dim}")
    ((before, after),) = sides
    return (*before, sum(shape[dim] for shape in shapes), *after)
