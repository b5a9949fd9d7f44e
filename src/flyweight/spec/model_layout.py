"""The layout of a model: its tensors cut over a mesh by rules, as each rank has them.

The first rule that fits a tensor's name counts. Who holds which layers and experts
depends on how many there are, so a layout is asked of all tensors, never of one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flyweight.errors import PlanError, SpecError, listed
from flyweight.spec.box import Box
from flyweight.spec.layout import Held, Layout, Shard
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.rules import (
    Rule,
    Spread,
    compiled,
    decode_rules,
    filled,
    num_stars,
    stars_of,
)

MAX_RANKS = 1 << 20
_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True)
class Local:
    """A tensor as one rank has it."""

    spec: TensorSpec
    held: tuple[Held, ...]
    wholes: Mapping[str, TensorSpec]
    """The whole tensors that it holds blocks of."""


@dataclass(slots=True)
class _Match:
    """A tensor and the rule that speaks of it."""

    name: str
    rule: Rule
    which: int
    """Which of the rule's names it is."""
    stars: tuple[str, ...]


class ModelLayout:
    """A mesh and the rules that cut a model over it."""

    def __init__(self, axes: Mapping[str, int], rules: Sequence[Rule]) -> None:
        self.axes, self.rules = dict(axes), tuple(rules)
        Layout(self.axes, {})
        self.num_ranks = prod(self.axes.values())
        if self.num_ranks > MAX_RANKS:
            raise SpecError(f"a mesh of {self.num_ranks} ranks, at most {MAX_RANKS}")
        self._layouts = {
            (rule_index, which): Layout(self.axes, cut)
            for rule_index, rule in enumerate(self.rules)
            for which, cut in enumerate(rule.cuts)
        }
        self._patterns = [
            (rule_index, which, compiled(name))
            for rule_index, rule in enumerate(self.rules)
            for which, name in enumerate(rule.names)
        ]
        for rule in self.rules:
            self._check_rule(rule)
        self._num_pieces = [
            [(star, self._dealt(spread).num_pieces(0)) for star, spread in rule.spread.items()]
            for rule in self.rules
        ]
        self._uncut = Layout(self.axes, {})
        self._rule_index = {id(rule): index for index, rule in enumerate(self.rules)}

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "layout") -> ModelLayout:
        """Return the layout that a JSON text describes; anything else raises SpecError."""
        return cls(*decode_rules(text, what))

    def _check_rule(self, rule: Rule) -> None:
        what = f"rule for {listed(rule.names)}"
        if not rule.names or len(rule.names) != len(rule.cuts):
            raise SpecError(f"{what} has {len(rule.names)} names and {len(rule.cuts)} cuts")
        counts = {num_stars(name) for name in rule.names}
        if len(counts) != 1:
            raise SpecError(f"{what}: names that are joined have the same number of stars")
        (count,) = counts
        spoken = [*rule.spread, *([] if rule.stack is None else [rule.stack])]
        if any(not 0 <= star < count for star in spoken):
            raise SpecError(f"{what} has {count} stars and speaks of stars {spoken}")
        if len(rule.names) > 1 and rule.local is None:
            raise SpecError(f"{what} joins {len(rule.names)} names and does not name the result")
        if rule.join < 0 or rule.groups < 1:
            raise SpecError(f"{what} joins along dim {rule.join} in {rule.groups} groups")
        if rule.local is not None:
            named = stars_of(rule.local)
            if named is None or any(star >= count for star in named):
                raise SpecError(
                    f"{what}: local {rule.local!r} does not fit; of braces it may have those of "
                    f"its {count} stars, as {{0}}"
                )
        cut_alike = {Layout(self.axes, cut).num_pieces(rule.join) for cut in rule.cuts}
        if rule.groups > 1 and len(cut_alike) > 1:
            raise SpecError(
                f"{what} takes turns in {rule.groups} groups and cuts dim {rule.join} into "
                f"{sorted(cut_alike)} pieces; names that take turns are cut alike"
            )
        for spread in rule.spread.values():
            pieces = self._dealt(spread).num_pieces(0)
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
        """Return who holds what of each tensor; of one rank or some names, where those are given.

        `tensors` are all there are, even then: how many layers or experts there are decides who
        holds which. Tensors that are cut alike share one tuple, so a plan can treat them as one.
        """
        found: dict[tuple[object, ...], tuple[Shard, ...]] = {}
        shards: dict[str, tuple[Shard, ...]] = {}
        holders = [self._holders(rule, rank) for rule in self.rules]
        matches = self._matches(tensors)
        places = _Places(matches)
        for match in matches:
            if names is not None and match.name not in names:
                continue
            index = self._rule_index[id(match.rule)]
            pieces = tuple(
                places.piece(match, star, count) for star, count in self._num_pieces[index]
            )
            ranks = holders[index].get(pieces, ())
            if not ranks and rank is not None:
                continue
            shape = tensors[match.name].shape
            key = (index, match.which, shape, pieces)
            if key not in found:
                try:
                    # A scalar has nothing to cut: every rank that has it has all of it.
                    layout = self._layouts[index, match.which] if shape else self._uncut
                    found[key] = tuple(Shard(each, layout.box(each, shape)) for each in ranks)
                except SpecError as error:
                    error.note(f"tensor {match.name!r}")
                    raise
            shards[match.name] = found[key]
        return shards

    def _dealt(self, spread: Spread) -> Layout:
        """Return how a row of pieces is dealt out: who holds element n of it holds piece n."""
        return Layout(self.axes, {0: spread.axes})

    def _holders(self, rule: Rule, rank: int | None) -> dict[tuple[int, ...], list[int]]:
        """Return which ranks hold the tensors of which pieces, one piece for each spread."""
        dealt = [self._dealt(spread) for spread in rule.spread.values()]
        holders: dict[tuple[int, ...], list[int]] = {}
        for each in range(self.num_ranks) if rank is None else (rank,):
            pieces = tuple(one.box(each, (one.num_pieces(0),)).offset[0] for one in dealt)
            holders.setdefault(pieces, []).append(each)
        return holders

    def locals(self, tensors: Mapping[str, TensorSpec], rank: int) -> dict[str, Local]:
        """Return the tensors that `rank` has of a model of these tensors, by their own names."""
        shards = self.shards(tensors, rank=rank)
        members: dict[str, list[_Match]] = {}
        for match in self._matches(shards):
            local = match.rule.local
            name = match.name if local is None else filled(local, match.stars)
            members.setdefault(name, []).append(match)
        return {
            name: self._local(name, matches, tensors, shards) for name, matches in members.items()
        }

    def _local(
        self,
        name: str,
        matches: Sequence[_Match],
        tensors: Mapping[str, TensorSpec],
        shards: Mapping[str, Sequence[Shard]],
    ) -> Local:
        rule = matches[0].rule
        rows: dict[str, dict[int, _Match]] = {}
        for match in matches:
            row = rows.setdefault("" if rule.stack is None else match.stars[rule.stack], {})
            if match.rule is not rule or match.which in row:
                raise SpecError(f"{listed([m.name for m in matches])} all become {name!r}")
            row[match.which] = match
        dtypes = {tensors[match.name].dtype.name for match in matches}
        if len(dtypes) != 1 or any(len(row) != len(rule.names) for row in rows.values()):
            raise PlanError(
                f"{name!r} is joined of {len(rule.names)} tensors of one dtype; there are "
                f"{listed([m.name for m in matches])} of {listed(dtypes)}"
            )
        held: list[Held] = []
        shapes = set()
        for index, row in enumerate(rows[key] for key in sorted(rows, key=_number_or_text)):
            prefix = () if rule.stack is None else (index,)
            at = 0
            boxes = [(row[which].name, shards[row[which].name][0].box) for which in sorted(row)]
            for tensor, box in self._turns(rule, boxes):
                if rule.join >= len(box.shape) and len(boxes) > 1:
                    raise PlanError(f"{tensor!r} of {box.shape} has no dim {rule.join} to join")
                offset = [0] * len(box.shape)
                if len(boxes) > 1:
                    offset[rule.join] = at
                    at += box.shape[rule.join]
                place = Box((*prefix, *offset), (*(1 for _ in prefix), *box.shape))
                held.append(Held(tensor, box, place))
            whole = list(boxes[0][1].shape)
            if len(boxes) > 1:
                whole[rule.join] = at
            others = {
                tuple(s for d, s in enumerate(box.shape) if d != rule.join) for _, box in boxes
            }
            shapes.add(tuple(whole))
            if len(shapes) != 1 or (len(boxes) > 1 and len(others) != 1):
                raise PlanError(f"{name!r} is joined of {[box.shape for _, box in boxes]}")
        (shape,) = shapes
        stacked = () if rule.stack is None else (len(rows),)
        dtype = tensors[matches[0].name].dtype
        wholes = {match.name: tensors[match.name] for match in matches}
        return Local(TensorSpec(dtype, (*stacked, *shape)), tuple(held), wholes)

    def _turns(self, rule: Rule, boxes: Sequence[tuple[str, Box]]) -> Iterator[tuple[str, Box]]:
        """Yield the boxes in the order in which they stand: one after the other, or by turns."""
        layout = self._layouts[self._rule_index[id(rule)], 0]
        num_turns, rest = divmod(rule.groups, layout.num_pieces(rule.join))
        if rule.groups == 1:
            yield from boxes
            return
        if rest or any(box.shape[rule.join] % num_turns for _, box in boxes):
            raise PlanError(
                f"{rule.groups} groups over {layout.num_pieces(rule.join)} pieces of "
                f"{[box.shape for _, box in boxes]}: the groups must come out even"
            )
        for turn in range(num_turns):
            for name, box in boxes:
                length = box.shape[rule.join] // num_turns
                offset, shape = list(box.offset), list(box.shape)
                offset[rule.join] += turn * length
                shape[rule.join] = length
                yield name, Box(tuple(offset), tuple(shape))

    def _matches(self, tensors: Iterable[str]) -> list[_Match]:
        matches, lost = [], []
        # Patterns without digits cannot tell numbers apart: what fits one layer fits them all.
        is_blind = not any(re.search("[0-9]", name) for rule in self.rules for name in rule.names)
        families: dict[str, tuple[int, int, re.Pattern[str]] | None] = {}
        for name in tensors:
            family = _DIGITS.sub("0", name) if is_blind else name
            if family not in families:
                fits = (each for each in self._patterns if each[2].fullmatch(name))
                families[family] = next(fits, None)
            if (fit := families[family]) is None:
                lost.append(name)
                continue
            found = fit[2].fullmatch(name)
            assert found is not None
            matches.append(_Match(name, self.rules[fit[0]], fit[1], found.groups()))
        if lost:
            raise PlanError(
                f"no rule speaks of {len(lost)} tensors: {listed(lost)}; a last rule for '**' "
                f"gives every rank the rest"
            )
        return matches


class _Places:
    """Where each number stands among those that a rule's star takes."""

    def __init__(self, matches: Sequence[_Match]) -> None:
        numbers: dict[tuple[int, int], set[int]] = {}
        for match in matches:
            for star, spread in match.rule.spread.items():
                if not match.stars[star].isdecimal():
                    raise PlanError(
                        f"{match.name!r} has {match.stars[star]!r} where a number is dealt out"
                    )
                if spread.starts is None:
                    numbers.setdefault((id(match.rule), star), set()).add(int(match.stars[star]))
        self._index = {
            key: {number: index for index, number in enumerate(sorted(found))}
            for key, found in numbers.items()
        }

    def piece(self, match: _Match, star: int, num_pieces: int) -> int:
        number, starts = int(match.stars[star]), match.rule.spread[star].starts
        if starts is not None:
            piece = sum(start <= number for start in starts) - 1
            if piece < 0:
                raise PlanError(f"{match.name!r} comes before the first start, {starts[0]}")
            return piece
        index = self._index[id(match.rule), star]
        return index[number] // -(-len(index) // num_pieces)


def _number_or_text(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (-1, text)
