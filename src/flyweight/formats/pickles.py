"""Pickles, read without running them.

A pickle is a program for a small stack machine whose dangerous instructions call
any function by name. Here nothing is ever called: names off a short list become
`Made` records that say what would have been called with what, a name that is not
on the list is refused, and long byte strings become `Span`s of the file, so that
weights are not even read. What a record means, the format that asked for it decides.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from sys import getrefcount, getsizeof
from typing import NoReturn

from flyweight.errors import FormatError
from flyweight.formats.budget import Budget
from flyweight.formats.pickle_bytes import STOP, PickleBytes
from flyweight.ports import Store

MAX_INLINE_BYTES = 64 << 10
"""Longer text stays in the file, as a span; byte strings always do."""
_SLOT_BYTES = 32  # of the stack, and of the lists through which it goes into a container
_ENTRY_BYTES = 150  # of a dict that grows: its new table and its old one


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that stand in the file; `is_text` if they are UTF-8 of a string."""

    offset: int
    nbytes: int
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Global:
    """A function or class, by name only."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What calling `what` with `args` would have made, and the state it would have been given."""

    what: Global
    args: object
    state: object = None
    names: tuple[str, ...] | None = None
    """The names of its fields; their values are the state."""


@dataclass(slots=True, eq=False)
class MadeDict(Made):
    """A kind of dict, and what would have been set in it."""

    items: dict[object, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Persistent:
    """Something that is not in the pickle itself: a tensor's storage, by what names it."""

    what: object


class _Mark: ...


_MARK = _Mark()
_INT = frozenset([int])
_SIZE = Global("torch", "Size")  # a tuple, and read as one
_ORDERED = Global("collections", "OrderedDict")


def read_pickle(
    store: Store,
    file: str,
    allowed: Collection[tuple[str, str]],
    *,
    stretch: Span | None = None,
    has_objects: bool = False,
    max_text_bytes: int = MAX_INLINE_BYTES,
    budget: Budget | None = None,
) -> object:
    """Return what the pickle describes: plain values, containers, `Made` records and spans.

    It is the whole file, or a stretch of it. Pickles of arrays alone have no objects that are
    made without a call, keys of a dict or kept elsewhere; those of checkpoints may. Text may be
    an array's bytes; where it never is, `max_text_bytes` lets more of it be read. What the objects
    take comes off the budget, which is one of the pickle's size unless another is given.
    """
    stretch = stretch or Span(0, store.size(file))
    machine = _Machine(
        store, file, allowed, stretch, has_objects=has_objects, max_text_bytes=max_text_bytes
    )
    return machine.run(budget or Budget(f"pickle {file!r} in {store.place!r}", stretch.nbytes))


class _Machine(PickleBytes):
    def __init__(
        self,
        store: Store,
        file: str,
        allowed: Collection[tuple[str, str]],
        stretch: Span,
        *,
        has_objects: bool,
        max_text_bytes: int,
    ) -> None:
        super().__init__(store, file, stretch.offset, stretch.nbytes)
        self._allowed, self._has_objects = allowed, has_objects
        self._max_text_bytes = max_text_bytes
        self._stack: list[object] = []
        self._num_puts = 0
        self._shapes: deque[tuple[object, ...]] = deque(maxlen=4)
        self._globals: dict[tuple[str, str], Global] = {}
        self._names: dict[tuple[object, ...], tuple[str, ...]] = {}

    def run(self, budget: Budget) -> object:
        self._budget, self._left = budget, budget.left
        # Only values that are recalled are kept; places are theirs, in the order of their numbers.
        try:
            self._find_recalled()
        except FormatError:
            if not self._has_end:
                raise  # else it is refused below, at the same byte, with the last name read
        self._rewind()
        self._places = array("I", accumulate(self._recalled))
        self._memo: list[object] = [_MARK] * sum(self._recalled)
        self._left -= 5 * len(self._recalled) + 8 * len(self._memo)
        actions, stack = _OBJECT_ACTIONS if self._has_objects else _ACTIONS, self._stack
        while True:  # it ends, or is refused, after at most MAX_OPCODES
            try:  # as _code() does, which would cost a call
                code = self._block[self._next]
            except IndexError:
                self._refill(1)
                code = self._block[0]
            self._next += 1
            if code == STOP:
                return self._result()
            actions[code](self)
            if self._left < _SLOT_BYTES * len(stack):
                self._budget.refuse()

    def _refuse(self, why: str) -> NoReturn:
        keys = ".".join(self._keys())[:200]
        super()._refuse(why + (f"; the last name read is {keys!r}" if keys else ""))

    def _keys(self) -> Iterator[str]:
        """Yield the key read last in each dict that is being filled, the outermost first."""
        stack = self._stack
        for index, goal in enumerate(stack):
            at = index + 1
            if not isinstance(goal, (dict, Made)) or (index and stack[at : at + 1] != [_MARK]):
                continue
            at += stack[at : at + 1] == [_MARK]
            key = None
            while at < len(stack) and isinstance(text := stack[at], str):
                key = text
                if isinstance(stack[at + 1] if at + 1 < len(stack) else None, Global):
                    break  # a value that is not whole yet: what follows on the stack is part of it
                at += 2
            if key is not None:
                yield key

    def _result(self) -> object:
        if len(self._stack) != 1:
            self._refuse(f"ends with {len(self._stack)} values, expected 1")
        if self._at != self._size:
            self._refuse(f"ends at byte {self._at}, the file has {self._size}")
        self._budget.left = self._left
        return self._pop()

    # The stack.

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _new(self, value: object) -> None:
        """Push an object that was just made; memory is given out by 16 bytes."""
        self._left -= (getsizeof(value) + 15) & -16
        self._stack.append(value)

    def _top(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            self._refuse(f"takes a value that is not there, before byte {self._at}")
        return self._stack[-1]

    def _pop(self) -> object:
        self._top()
        return self._stack.pop()

    def _to_mark(self) -> list[object]:
        stack, at = self._stack, len(self._stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            self._refuse(f"goes back to a mark that is not there, before byte {self._at}")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def text(self, width: int) -> None:
        nbytes = self._code() if width == 1 else self._number(width)
        if nbytes > self._max_text_bytes:
            self._span(nbytes, is_text=True)
            return
        try:
            self._new(self._take(nbytes).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            self._refuse(f"has text that is not UTF-8 before byte {self._at}")

    def data(self, width: int) -> None:
        self._span(self._number(width), is_text=False)

    def _span(self, nbytes: int, *, is_text: bool) -> None:
        at = self._at
        self._skip(nbytes)
        self._left -= 32 if nbytes <= 256 else 64  # its numbers; small ones are shared
        self._new(Span(at, nbytes, is_text))

    def signed(self) -> None:
        self._new(int.from_bytes(self._take(4), "little", signed=True))

    def long(self, width: int) -> None:
        nbytes = int.from_bytes(self._take(width), "little", signed=width > 1)
        if not 0 <= nbytes <= 16:
            self._refuse(f"has a number of {nbytes} bytes, at most 16")
        self._new(int.from_bytes(self._take(nbytes), "little", signed=True))

    def float(self) -> None:
        self._new(struct.unpack(">d", self._take(8))[0])

    def proto(self) -> None:
        version = self._number(1)
        if not 2 <= version <= 5:
            self._refuse(f"is of protocol {version}, expected 2 to 5")

    def frame(self) -> None:
        self._take(8)  # its length, which only helps readers that buffer

    def drop(self) -> None:
        self._pop()

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self._refuse(
                f"names something by a {type(module).__name__} and a {type(name).__name__}"
            )
        key = module, name
        if key not in self._globals:
            if key not in self._allowed:
                self._refuse(
                    f"names {module}.{name}, which is not on the list of what this format needs"
                )
            self._globals[key] = Global(module, name)
        self._push(self._globals[key])

    def line_global(self) -> None:
        self.name(self._line(), self._line())

    def stack_global(self) -> None:
        name = self._pop()
        self.name(self._pop(), name)

    def reduce(self) -> None:
        args, what = self._pop(), self._pop()
        if not isinstance(what, Global) or not isinstance(args, tuple):
            self._refuse(f"calls a {type(what).__name__} before byte {self._at}")
        if what == _SIZE and len(args) == 1 and isinstance(args[0], (tuple, list)):
            self._push(args[0])
            if getrefcount(args) <= 2:  # ours, and the one of the call: nobody else has it
                self._left += getsizeof(args)
        elif what == _ORDERED:
            self._left -= getsizeof({})
            self._new(MadeDict(what, args))
        else:
            self._new(Made(what, args))

    def persistent(self) -> None:
        self._new(Persistent(self._pop()))

    def build(self) -> None:
        state, made = self._pop(), self._pop()
        if not isinstance(made, Made) or made.state is not None:
            self._refuse(f"gives state to a {type(made).__name__} before byte {self._at}")
        self._push(made)
        if not self._has_objects or not isinstance(state, dict):
            made.state = state
            return
        # Objects of a class share the names of their fields, which takes less than a dict each.
        made.names, made.state = self._field_names(tuple(state)), tuple(state.values())
        self._budget.num_records += 1
        self._left -= getsizeof(made.state)
        if getrefcount(state) <= 2:  # as above
            self._left += getsizeof(state)

    def _field_names(self, keys: tuple[object, ...]) -> tuple[str, ...]:
        if keys not in self._names:
            names = tuple(key for key in keys if isinstance(key, str))
            if len(names) != len(keys):
                self._refuse(f"has a field without a name before byte {self._at}")
            self._left -= getsizeof(names) + _ENTRY_BYTES
            self._names[keys] = names
        return self._names[keys]

    def put(self, index: int) -> None:
        value = self._top()
        self._num_puts += 1
        if index < len(self._recalled) and self._recalled[index]:
            self._memo[self._places[index] - 1] = value

    def recall(self, index: int) -> None:
        is_found = index < len(self._places)  # else it was refused when recalls were counted
        value = self._memo[self._places[index] - 1] if is_found else _MARK
        if value is _MARK:
            self._refuse(f"recalls value {index} that was never kept")
        self._stack.append(value)

    def pack(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        if len(values) < count or any(value is _MARK for value in values):
            self._refuse(f"takes a value that is not there, before byte {self._at}")
        del self._stack[-count:]
        self._new_tuple(values)

    def pop_mark(self) -> None:
        self._to_mark()

    def mark_tuple(self) -> None:
        self._new_tuple(tuple(self._to_mark()))

    def _new_tuple(self, values: tuple[object, ...]) -> None:
        """Push a tuple, or the same one that was made just before: shards are of one shape."""
        if len(values) <= 8 and _INT.issuperset(map(type, values)):
            for known in self._shapes:
                if known == values:
                    self._push(known)
                    return
            self._shapes.append(values)
        self._new(values)

    def mark_list(self) -> None:
        self._new(self._to_mark())

    def mark_dict(self) -> None:
        values = self._to_mark()
        self._new({})
        self._set(values)

    def append(self) -> None:
        self._extend([self._pop()])

    def appends(self) -> None:
        self._extend(self._to_mark())

    def _extend(self, values: list[object]) -> None:
        goal = self._top()
        if not isinstance(goal, list):
            self._refuse(f"appends to a {type(goal).__name__} before byte {self._at}")
        self._left += getsizeof(goal)
        goal.extend(values)
        self._left -= getsizeof(goal)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._to_mark())

    def _set(self, values: list[object]) -> None:
        made = self._top()
        goal = made.items if isinstance(made, MadeDict) else made
        if not isinstance(goal, dict) or len(values) % 2:
            self._refuse(f"sets items of a {type(made).__name__} before byte {self._at}")
        self._check_growth(goal, len(values) // 2)
        self._left += getsizeof(goal)
        pairs = iter(values)
        for key, value in zip(pairs, pairs, strict=True):
            if type(key) is not str:
                self._check_key(key)
            if key in goal:
                self._refuse(f"has a key twice before byte {self._at}")
            goal[key] = value
        self._left -= getsizeof(goal)

    def _check_growth(self, goal: dict[object, object], count: int) -> None:
        """Refuse if there is no memory for a larger table, beside the one that it replaces."""
        num_slots = 1 << (3 * len(goal) // 2).bit_length()
        is_full = 3 * (len(goal) + count) > 2 * num_slots
        if self._left < _ENTRY_BYTES * count + (2 * getsizeof(goal) if is_full else 0):
            self._budget.refuse()

    def _check_key(self, key: object) -> None:
        """Refuse keys that are no plain values, and numbers that can be made to share a hash."""
        is_object = self._has_objects and isinstance(key, Made)
        if not is_object and not isinstance(key, (int, float, type(None))):
            self._refuse(f"has a {type(key).__name__} for a key before byte {self._at}")
        # From here on numbers share the hashes of others, and a dict of them takes hours.
        # Smaller ones have hashes of their own; of floats some thirty share one.
        if isinstance(key, int) and abs(key) >= sys.hash_info.modulus:
            self._refuse(
                f"has the number {key} for a key before byte {self._at}, at most "
                f"{sys.hash_info.modulus - 1}"
            )


_Action = Callable[[_Machine], None]
_ACTIONS: list[_Action] = [_Machine._refuse_opcode] * 256
for _code, _action in (
    (b"\x80", _Machine.proto),
    (b"\x95", _Machine.frame),
    (b"(", lambda m: m._push(_MARK)),
    (b"0", _Machine.drop),
    (b"1", _Machine.pop_mark),
    (b"N", lambda m: m._push(None)),
    (b"\x88", lambda m: m._push(True)),
    (b"\x89", lambda m: m._push(False)),
    (b"J", _Machine.signed),
    (b"K", lambda m: m._push(m._code())),
    (b"M", lambda m: m._new(m._number(2))),
    (b"\x8a", lambda m: m.long(1)),
    (b"\x8b", lambda m: m.long(4)),
    (b"G", _Machine.float),
    (b"X", lambda m: m.text(4)),
    (b"\x8c", lambda m: m.text(1)),
    (b"\x8d", lambda m: m.text(8)),
    (b"B", lambda m: m.data(4)),
    (b"C", lambda m: m.data(1)),
    (b"\x8e", lambda m: m.data(8)),
    (b"\x96", lambda m: m.data(8)),
    (b"]", lambda m: m._new([])),
    (b"a", _Machine.append),
    (b"e", _Machine.appends),
    (b"l", _Machine.mark_list),
    (b"}", lambda m: m._new({})),
    (b"d", _Machine.mark_dict),
    (b"s", _Machine.set_item),
    (b"u", _Machine.set_items),
    (b")", lambda m: m._push(())),
    (b"t", _Machine.mark_tuple),
    (b"\x85", lambda m: m.pack(1)),
    (b"\x86", lambda m: m.pack(2)),
    (b"\x87", lambda m: m.pack(3)),
    (b"q", lambda m: m.put(m._code())),
    (b"r", lambda m: m.put(m._number(4))),
    (b"\x94", lambda m: m.put(m._num_puts)),
    (b"h", lambda m: m.recall(m._code())),
    (b"j", lambda m: m.recall(m._number(4))),
    (b"c", _Machine.line_global),
    (b"\x93", _Machine.stack_global),
    (b"R", _Machine.reduce),
    (b"b", _Machine.build),
):
    _ACTIONS[_code[0]] = _action
_OBJECT_ACTIONS = list(_ACTIONS)
_OBJECT_ACTIONS[0x81] = _Machine.reduce  # NEWOBJ: nothing is called here either way
_OBJECT_ACTIONS[ord("Q")] = _Machine.persistent
