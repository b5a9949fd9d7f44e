"""The layout of a model: its tensors cut over a mesh by rules, as each rank has them.

The first rule that fits a tensor's name counts. Which rank holds which layers and experts depends
on how many there are, so every method takes all tensors of the model, even to lay out one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flyweight.errors import PlanError, SpecError, listed
from flyweight.spec.box import Box
from flyweight.spec.layout import HeldBox, Layout, Shard
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.rules import Rule, compiled, decode_rules, filled

MAX_RANKS = 1 << 20
_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True)
class Local:
    """A tensor as one rank has it."""

    spec: TensorSpec
    held: tuple[HeldBox, ...]
    wholes: Mapping[str, TensorSpec]
    """The whole tensors that it holds boxes of."""


@dataclass(slots=True)
class _Match:
    """A tensor and the rule that fits its name."""

    name: str
    rule: int
    """Index of the rule."""
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
        self._layouts = [[Layout(self.axes, cut) for cut in rule.cuts] for rule in self.rules]
        # A spread deals out a row of pieces as a cut does a dim: to each rank its element.
        self._deals = [
            {star: Layout(self.axes, {0: spread.axes}) for star, spread in rule.spread.items()}
            for rule in self.rules
        ]
        self._patterns = [
            (index, which, compiled(name))
            for index, rule in enumerate(self.rules)
            for which, name in enumerate(rule.names)
        ]
        for index in range(len(self.rules)):
            self._check_rule(index)

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "layout") -> ModelLayout:
        """Return the layout in a JSON text; `what` names the text in errors.

        Raises SpecError if the text is not JSON, or does not describe a layout.
        """
        return cls(*decode_rules(text, what))

    def _check_rule(self, index: int) -> None:
        """Raise unless the rule fits the mesh."""
        rule = self.rules[index]
        what = f"rule for {listed(rule.names)}"
        num_pieces = {layout.num_pieces(rule.join) for layout in self._layouts[index]}
        if rule.groups > 1 and len(num_pieces) > 1:
            raise SpecError(
                f"{what} alternates in {rule.groups} groups and cuts dim {rule.join} into "
                f"{sorted(num_pieces)} pieces; names that alternate are cut alike"
            )
        for star, spread in rule.spread.items():
            pieces = self._deals[index][star].num_pieces(0)
            if spread.starts is not None and (
                len(spread.starts) != pieces or list(spread.starts) != sorted(spread.starts)
            ):
                raise SpecError(
                    f"{what} starts {len(spread.starts)} pieces at {list(spread.starts)}, "
                    f"{list(spread.axes)} make {pieces}; starts only grow"
                )

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
        holders = [self._holders(index, ranks) for index in range(len(self.rules))]
        matches = self._matches(tensors)
        for match, pieces in zip(matches, self._pieces(matches), strict=True):
            if names is not None and match.name not in names:
                continue
            if -1 in pieces:
                spreads = self.rules[match.rule].spread.values()
                first = [spread.starts[0] for spread in spreads if spread.starts]
                raise PlanError(f"{match.name!r} comes before the first start, {first}")
            holding = holders[match.rule].get(pieces, ())
            if not holding and rank is not None:
                continue
            shape = tensors[match.name].shape
            key = (match.rule, match.which, shape, pieces)
            if key not in found:
                try:
                    # A scalar cannot be cut: every rank that has it has all of it.
                    layout = self._layouts[match.rule][match.which] if shape else self._uncut
                    found[key] = tuple(Shard(each, layout.box(each, shape)) for each in holding)
                except SpecError as error:
                    error.note(f"tensor {match.name!r}")
                    raise
            shards[match.name] = found[key]
        return shards

    def _holders(self, index: int, ranks: Iterable[int]) -> dict[tuple[int, ...], list[int]]:
        """Return which ranks hold which pieces of a rule's tensors, one piece for each spread."""
        deals = [(deal, (deal.num_pieces(0),)) for deal in self._deals[index].values()]
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            pieces = tuple(deal.box(rank, row).offset[0] for deal, row in deals)
            holders.setdefault(pieces, []).append(rank)
        return holders

    def _pieces(self, matches: Sequence[_Match]) -> Iterator[tuple[int, ...]]:
        """Yield the piece that each tensor belongs to, for each spread of its rule."""
        numbers: dict[tuple[int, int], set[int]] = {}
        for match in matches:
            for star in self._deals[match.rule]:
                if not match.stars[star].isdecimal():
                    raise PlanError(
                        f"{match.name!r} has {match.stars[star]!r} where a number is dealt out"
                    )
                numbers.setdefault((match.rule, star), set()).add(int(match.stars[star]))
        pieces: dict[tuple[int, int], dict[int, int]] = {}
        for (rule, star), found in numbers.items():
            starts = self.rules[rule].spread[star].starts
            per_piece = -(-len(found) // self._deals[rule][star].num_pieces(0))
            pieces[rule, star] = {
                number: index // per_piece if starts is None else bisect_right(starts, number) - 1
                for index, number in enumerate(sorted(found))
            }
        for match in matches:
            places = [(star, int(match.stars[star])) for star in self._deals[match.rule]]
            yield tuple(pieces[match.rule, star][number] for star, number in places)

    def locals(self, tensors: Mapping[str, TensorSpec], rank: int) -> dict[str, Local]:
        """Return the tensors that `rank` has of a model of these tensors, by their own names."""
        shards = self.shards(tensors, rank=rank)
        members: dict[str, list[_Match]] = {}
        for match in self._matches(shards):
            local = self.rules[match.rule].local
            name = match.name if local is None else filled(local, match.stars)
            members.setdefault(name, []).append(match)
        boxes = {name: shard.box for name, (shard,) in shards.items()}
        return {
            name: self._local(name, matches, tensors, boxes) for name, matches in members.items()
        }

    def _local(
        self,
        name: str,
        matches: Sequence[_Match],
        tensors: Mapping[str, TensorSpec],
        boxes: Mapping[str, Box],
    ) -> Local:
        """Return one tensor of a rank: the boxes of its matches joined along a dim, and stacked."""
        rule = self.rules[matches[0].rule]
        rows = self._rows(name, matches)
        dtypes = {tensors[match.name].dtype.name for match in matches}
        if len(dtypes) != 1 or any(len(row) != len(rule.names) for row in rows):
            raise PlanError(
                f"{name!r} is joined of {len(rule.names)} tensors of one dtype; there are "
                f"{listed([m.name for m in matches])} of {listed(dtypes)}"
            )
        held: list[HeldBox] = []
        shapes = set()
        for index, row in enumerate(rows):
            joined = [(each, boxes[each]) for each in row]
            shapes.add(_joined_shape(name, [box.shape for _, box in joined], rule.join))
            stacked = () if rule.stack is None else (index,)
            at = 0
            for tensor, box in self._in_order(matches[0], joined):
                offset = [0] * len(box.shape)
                if len(joined) > 1:
                    offset[rule.join] = at
                    at += box.shape[rule.join]
                place = Box((*stacked, *offset), (*(1 for _ in stacked), *box.shape))
                held.append(HeldBox(tensor, box, place))
        if len(shapes) != 1:
            raise PlanError(f"{name!r} is a stack of different shapes: {sorted(shapes)[:5]}")
        (shape,) = shapes
        wholes = {match.name: tensors[match.name] for match in matches}
        spec = TensorSpec(
            wholes[matches[0].name].dtype, shape if rule.stack is None else (len(rows), *shape)
        )
        return Local(spec, tuple(held), wholes)

    def _rows(self, name: str, matches: Sequence[_Match]) -> list[list[str]]:
        """Return the names that are joined, in the rule's order, for each index of the stack."""
        rule = self.rules[matches[0].rule]
        rows: dict[str, dict[int, str]] = {}
        for match in matches:
            row = rows.setdefault("" if rule.stack is None else match.stars[rule.stack], {})
            if match.rule != matches[0].rule or match.which in row:
                raise SpecError(f"{listed([m.name for m in matches])} all become {name!r}")
            row[match.which] = match.name
        return [
            [rows[star][which] for which in sorted(rows[star])]
            for star in sorted(rows, key=lambda each: (int(each) if each.isdecimal() else -1, each))
        ]

    def _in_order(
        self, match: _Match, boxes: Sequence[tuple[str, Box]]
    ) -> Iterator[tuple[str, Box]]:
        """Yield the boxes as they follow each other: one after the other, or in groups."""
        rule = self.rules[match.rule]
        num_pieces = self._layouts[match.rule][0].num_pieces(rule.join)
        num_groups, rest = divmod(rule.groups, num_pieces)
        if rule.groups == 1:
            yield from boxes
            return
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

    def _matches(self, tensors: Iterable[str]) -> list[_Match]:
        matches, unmatched = [], []
        # Patterns without digits cannot tell numbers apart: what fits one layer fits them all.
        is_blind = not any(re.search("[0-9]", name) for rule in self.rules for name in rule.names)
        families: dict[str, tuple[int, int, re.Pattern[str]] | None] = {}
        for name in tensors:
            family = _DIGITS.sub("0", name) if is_blind else name
            if family not in families:
                fits = (each for each in self._patterns if each[2].fullmatch(name))
                families[family] = next(fits, None)
            if (fit := families[family]) is None:
                unmatched.append(name)
                continue
            rule, which, pattern = fit
            found = pattern.fullmatch(name)
            assert found is not None
            matches.append(_Match(name, rule, which, found.groups()))
        if unmatched:
            raise PlanError(
                f"no rule fits {len(unmatched)} tensors: {listed(unmatched)}; a last rule for '**' "
                f"gives every rank the rest"
            )
        return matches


def _joined_shape(name: str, shapes: Sequence[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    """Return the shape of some boxes side by side along `dim`."""
    if len(shapes) == 1:
        return shapes[0]
    if any(dim >= len(shape) for shape in shapes):
        raise PlanError(f"{name!r} is joined of {list(shapes)}: one has no dim {dim} to join")
    sides = {(shape[:dim], shape[dim + 1 :]) for shape in shapes}
    if len(sides) != 1:
        raise PlanError(f"{name!r} is joined of {list(shapes)}, which differ beside dim {dim}")
    ((before, after),) = sides
    return (*before, sum(shape[dim] for shape in shapes), *after)
