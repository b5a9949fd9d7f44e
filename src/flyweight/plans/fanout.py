"""Fan-out: which replica reads from which, so that a trainer sends its weights once per group.

A group is replicas that want the same bytes in the same buckets. Each host of a group is a chain,
and the last replica of it gives the bytes to `degree` other hosts; with one, the whole group is a
chain. So the bytes of a group enter each host once. Replicas that cannot forward read from those
that can. The order is that of the list: the same list always makes the same fan-out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Annotated, Literal

from msgspec import Meta, Struct

from flyweight.errors import FormatError, SpecError, listed
from flyweight.spec.strict_json import Json, convert, parse_json

TRAINER = ""
"""The name of the root. No replica has it."""
FORWARDER_SLOTS = 3
"""A bucket stays while it arrives and two others read it, so one slot fills only with three."""
MAX_NODES, MAX_TEXT_BYTES, _MAX_CHARACTERS = 4096, 1 << 20, 255

_Text = Annotated[str, Meta(min_length=1, max_length=_MAX_CHARACTERS)]


class Node(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica that reads weights over the network."""

    name: _Text
    host: _Text
    group: Annotated[str, Meta(max_length=_MAX_CHARACTERS)] = ""
    """Replicas of a group want the same bytes in the same buckets."""
    can_forward: bool = True
    num_slots: Annotated[int, Meta(ge=1)] = FORWARDER_SLOTS
    """How many buckets fit into its staging."""

    @property
    def is_forwarder(self) -> bool:
        return self.can_forward and self.num_slots >= FORWARDER_SLOTS


@dataclass(frozen=True)
class FanOut:
    """Who reads from whom; `fan_out` makes it."""

    nodes: Mapping[str, Node]
    parents: Mapping[str, str]
    """Whom each replica reads from: a replica's name, or TRAINER."""
    _children: Mapping[str, Sequence[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        children: dict[str, list[str]] = {TRAINER: [], **{name: [] for name in self.nodes}}
        for name, parent in self.parents.items():
            children[parent].append(name)
        object.__setattr__(self, "_children", children)

    def parent(self, name: str) -> str:
        return self.parents[name]

    def children(self, name: str) -> Sequence[str]:
        return self._children[name]

    def ancestors(self, name: str) -> Iterator[str]:
        """Yield the parent, its parent and so on. The trainer comes last."""
        while name != TRAINER:
            name = self.parents[name]
            yield name

    def depth(self, name: str) -> int:
        """Return how many hops the bytes take from the trainer to a replica."""
        return sum(1 for _ in self.ancestors(name))

    def without(self, name: str) -> FanOut:
        """Return the fan-out without a lost replica; its children read from its parent."""
        nodes = {each: node for each, node in self.nodes.items() if each != name}
        parents = self._bypassed(name)
        del parents[name]
        return FanOut(nodes, parents)

    def as_leaf(self, name: str, *, at_trainer: bool = False) -> FanOut:
        """Return the fan-out in which a slow replica forwards no more; its parent does instead.

        at_trainer: it also reads from the trainer, so that no other replica waits for it.
        """
        parents = self._bypassed(name)
        if at_trainer:
            parents[name] = TRAINER
        return FanOut(self.nodes, parents)

    def _bypassed(self, name: str) -> dict[str, str]:
        above = self.parents[name]
        return {each: above if it == name else it for each, it in self.parents.items()}

    def num_sent(self) -> dict[str, int]:
        """Return how many times the bytes of each group leave the trainer."""
        sent = {node.group: 0 for node in self.nodes.values()}
        for name in self.children(TRAINER):
            sent[self.nodes[name].group] += 1
        return sent

    def record(self, group_bytes: Mapping[str, int] | None = None) -> dict[str, object]:
        """Return the fan-out as plain data: a record for each group, and one for each link.

        group_bytes: what one replica of each group reads; without it the bytes are None.
        """

        def nbytes(group: str, count: int = 1) -> int | None:
            return None if group_bytes is None else count * group_bytes[group]

        num_sent, hops_of = self.num_sent(), dict[str, list[int]]()
        links, hops, todo = [], {TRAINER: 0}, [*reversed(self.children(TRAINER))]
        while todo:  # each replica after the one that it reads from
            name = todo.pop()
            todo += reversed(self.children(name))
            node, parent = self.nodes[name], self.parents[name]
            hops[name] = hops[parent] + 1
            hops_of.setdefault(node.group, []).append(hops[name])
            links.append(
                {
                    "name": name,
                    "host": node.host,
                    "group": node.group,
                    "reads_from": parent,
                    "num_hops": hops[name],
                    "nbytes": nbytes(node.group),
                }
            )
        groups = [
            {
                "group": group,
                "num_replicas": len(found),
                "num_hops": max(found),
                "num_sent": num_sent[group],
                "sent_bytes": nbytes(group, num_sent[group]),
            }
            for group, found in hops_of.items()
        ]
        return {"groups": groups, "links": links}


def fan_out(nodes: Iterable[Node], *, degree: int = 1) -> FanOut:
    """Return who reads from whom. `degree`: how many hosts read from one host."""
    known: dict[str, Node] = {}
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        if node.name == TRAINER or node.name in known:
            raise SpecError(f"replica {node.name!r} is there twice, or has the trainer's name")
        known[node.name] = node
        groups.setdefault(node.group, []).append(node)
    if degree < 1:
        raise SpecError(f"degree is {degree}, at least one host must read from the one before it")
    parents: dict[str, str] = {}
    for group in groups.values():
        chains: dict[str, list[str]] = {}
        for node in group:
            if node.is_forwarder:
                chains.setdefault(node.host, []).append(node.name)
        ends = [chain[-1] for chain in chains.values()]
        for number, chain in enumerate(chains.values()):
            above = ends[(number - 1) // degree] if number else TRAINER
            parents |= zip(chain, [above, *chain], strict=False)
        # From the end on, where nobody reads yet, and then in turns.
        forwarders = [name for chain in chains.values() for name in chain]
        turns = {host: cycle(reversed(chain)) for host, chain in chains.items()}
        anywhere = cycle(reversed(forwarders or [TRAINER]))
        for node in group:
            if not node.is_forwarder:
                parents[node.name] = next(turns.get(node.host, anywhere))
    return FanOut(known, parents)


class Holder(Struct, frozen=True):
    """One that holds a version, for a replica that asks between two rounds."""

    name: str
    host: str
    kind: Literal["replica", "trainer", "snapshot"]
    num_readers: int = 0


_KINDS = ("replica", "trainer", "snapshot")


def nearest(holders: Iterable[Holder], host: str) -> list[Holder]:
    """Return the holders in the order to ask: on this host, replicas, the trainer, a snapshot.

    Of holders that are equally near, the one with the fewest readers comes first.
    """
    return sorted(
        holders,
        key=lambda each: (
            each.host != host,
            _KINDS.index(each.kind),
            each.num_readers,
            each.name,
        ),
    )


def decode_nodes(text: bytes, what: str) -> list[Node]:
    """Return the replicas in a file: a JSON list of them, or a line `NAME HOST [GROUP]` for each.

    `what` names the file in errors. Raises FormatError.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise FormatError(f"{what} has more than {MAX_TEXT_BYTES} bytes")
    is_json = text.lstrip().startswith(b"[")
    records = parse_json(text, what) if is_json else _records(text, what)
    assert isinstance(records, list)
    if not 1 <= len(records) <= MAX_NODES:
        raise FormatError(f"{what} has {len(records)} replicas, expected 1 to {MAX_NODES}")
    nodes = convert(records, list[Node], what)
    texts = [text for node in nodes for text in (node.name, node.host, node.group)]
    if odd := [text for text in texts if not text.isprintable()]:
        raise FormatError(f"{what} has characters that cannot be printed: {listed(odd)}")
    counts = Counter(node.name for node in nodes)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise FormatError(f"{what} names {listed(twice)} twice")
    return nodes


def _records(text: bytes, what: str) -> list[Json]:
    """Return what the lines of a text say; blank lines and those that start with # say nothing."""
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError as cause:
        raise FormatError(f"{what} is not UTF-8: {cause}") from cause
    records: list[Json] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if not 2 <= len(words) <= 3:
            raise FormatError(f"{what}, line {number}: {len(words)} words, not NAME HOST [GROUP]")
        records.append(dict(zip(("name", "host", "group"), words, strict=False)))
    return records
