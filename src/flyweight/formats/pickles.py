"""Pickles, read without running them.

A pickle is a program for a small stack machine whose dangerous instructions call
any function by name. This reader never calls anything. A name on a short list becomes
a `Made` record, which says what would have been called with which arguments; any other
name is refused. Long byte strings become `Span`s of the file, so weights are not even
read. The format that asked for a pickle decides what its records mean.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import accumulate
from sys import getrefcount, getsizeof

from flyweight.errors import FormatError
from flyweight.formats import pickle_bytes
from flyweight.formats.pickle_bytes import STOP, WIDTHS, PickleBytes
from flyweight.formats.pickle_values import Budget, Global, Made, MadeDict, Persistent, Span
from flyweight.ports import Store

MAX_INLINE_BYTES, MAX_TEXT_BYTES = 64 << 10, 1 << 30
"""Longer text stays in the file, as a span; byte strings always do. The second limit is for items
of checkpoints, where text is never an array's bytes."""
_SLOT_BYTES = 32  # of the stack, and of the lists through which values go into a container
_ENTRY_BYTES = 150  # of a dict that grows: its new table and its old one


_MARK: object = object()
_INT = frozenset([int])
_SIZE = Global("torch", "Size")  # a tuple, and read as one
_ORDERED = Global("collections", "OrderedDict")


def read_pickle(
    store: Store,
    file: str,
    allowed: Collection[tuple[str, str]],
    *,
    span: Span | None = None,
    has_objects: bool = False,
    max_text_bytes: int = MAX_INLINE_BYTES,
    budget: Budget | None = None,
) -> object:
    """Return what the pickle describes: plain values, containers, `Made` records and spans.

    Args:
        store, file: Where the pickle is.
        allowed: The (module, name) pairs that it may name.
        span: The bytes of the file that are the pickle; the whole file by default.
        has_objects: Whether it may make objects without a call, use them as keys of a dict, or
            refer to objects outside of it. Checkpoints do, pickles of arrays do not.
        max_text_bytes: Longer text stays in the file as a span.
        budget: The memory that its objects may take; by default that of a file of its size.
    """
    span = span or Span(0, store.size(file))
    machine = _Machine(
        PickleBytes(store, file, span.offset, span.nbytes),
        allowed,
        has_objects=has_objects,
        max_text_bytes=max_text_bytes,
        budget=budget or Budget(f"pickle {file!r} in {store.place!r}", span.nbytes),
    )
    try:
        return machine.run()
    except FormatError as error:
        if keys := ".".join(machine.last_keys())[:200]:
            error.note(f"the last name read is {keys!r}")
        raise


class _Machine:
    def __init__(
        self,
        data: PickleBytes,
        allowed: Collection[tuple[str, str]],
        *,
        has_objects: bool,
        max_text_bytes: int,
        budget: Budget,
    ) -> None:
        self.data, self._refuse = data, data.refuse
        self._allowed, self._has_objects = allowed, has_objects
        self._max_text_bytes = max_text_bytes
        self._budget, self._left = budget, budget.left
        self._stack: list[object] = []
        self._recalled = bytearray()
        self.num_puts = 0
        self._shapes: deque[tuple[object, ...]] = deque(maxlen=4)
        self._globals: dict[tuple[str, str], Global] = {}
        self._names: dict[tuple[object, ...], tuple[str, ...]] = {}

    def run(self) -> object:
        # Only values that are recalled are kept, in the order of their numbers. If bytes are wrong,
        # the loop below finds it again, and by then the last name read is known.
        data, stack = self.data, self._stack
        with suppress(FormatError):
            data.find_recalled(self._recalled)
        self._places = array("I", accumulate(self._recalled))
        self._memo = [_MARK] * sum(self._recalled)
        self._left -= 5 * len(self._recalled) + 8 * len(self._memo)
        actions = _OBJECTS_BY_OPCODE if self._has_objects else _BY_OPCODE
        data.rewind()
        for _ in range(pickle_bytes.MAX_OPCODES):
            code = data.byte()
            if code not in actions:
                data.refuse_opcode(code)
            if code == STOP:
                break
            action, width = actions[code]
            if width == 0:
                action(self, 0)
            else:
                action(self, data.byte() if width == 1 else data.number(width))
            if self._left < _SLOT_BYTES * len(stack):
                self._budget.refuse()
        else:
            data.refuse_length()
        if len(stack) != 1:
            self._refuse(f"ends with {len(stack)} values, expected 1")
        if data.at != data.end:
            self._refuse(f"ends at byte {data.at}, the file has {data.end}")
        self._budget.left = self._left
        return self.pop()

    def last_keys(self) -> Iterator[str]:
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
                    break  # a value that is not complete: what follows on the stack belongs to it
                at += 2
            if key is not None:
                yield key

    def push(self, value: object) -> None:
        self._stack.append(value)

    def new(self, value: object) -> None:
        """Push an object that was just made; memory is given out by 16 bytes."""
        self._left -= (getsizeof(value) + 15) & -16
        self._stack.append(value)

    def top(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            self._refuse(f"takes a value that is not there, before byte {self.data.at}")
        return self._stack[-1]

    def pop(self) -> object:
        self.top()
        return self._stack.pop()

    def to_mark(self) -> list[object]:
        stack, at = self._stack, len(self._stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            self._refuse(f"goes back to a mark that is not there, before byte {self.data.at}")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            self._refuse(f"is of protocol {version}, expected 2 to 5")

    def text(self, nbytes: int) -> None:
        if nbytes > self._max_text_bytes:
            self.span(nbytes, is_text=True)
            return
        try:
            self.new(self.data.take(nbytes).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            self._refuse(f"has text that is not UTF-8 before byte {self.data.at}")

    def span(self, nbytes: int, *, is_text: bool = False) -> None:
        at = self.data.at
        self.data.skip(nbytes)
        self._left -= 32 if nbytes <= 256 else 64  # its numbers; small ones are shared
        self.new(Span(at, nbytes, is_text))

    def unsigned(self, value: int) -> None:
        if value > 256:
            self.new(value)
        else:
            self._stack.append(value)  # Python has one object for each small number

    def signed(self, value: int) -> None:
        self.unsigned(value) if value < 1 << 31 else self.new(value - (1 << 32))

    def long(self, nbytes: int) -> None:
        if nbytes > 16:
            self._refuse(f"has a number of {nbytes} bytes, at most 16")
        self.new(int.from_bytes(self.data.take(nbytes), "little", signed=True))

    def float(self, bits: int) -> None:
        self.new(struct.unpack(">d", bits.to_bytes(8, "little"))[0])

    def put(self, index: int) -> None:
        value = self.top()
        self.num_puts += 1
        if index < len(self._recalled) and self._recalled[index]:
            self._memo[self._places[index] - 1] = value

    def recall(self, index: int) -> None:
        is_found = index < len(self._places)  # else `_find_recalled` stopped there
        value = self._memo[self._places[index] - 1] if is_found else _MARK
        if value is _MARK:
            self._refuse(f"recalls value {index} that was never kept")
        self._stack.append(value)

    def stack_global(self) -> None:
        name = self.pop()
        self.name(self.pop(), name)

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self._refuse(
                f"names something by a {type(module).__name__} and a {type(name).__name__}"
            )
        key = module, name
        if key not in self._globals:
            if key not in self._allowed:
                self._refuse(
                    f"names {module}.{name}, which is not on the list of names this format needs"
                )
            self._globals[key] = Global(module, name)
        self._stack.append(self._globals[key])

    def reduce(self) -> None:
        args, what = self.pop(), self.pop()
        if not isinstance(what, Global) or not isinstance(args, tuple):
            self._refuse(f"calls a {type(what).__name__} before byte {self.data.at}")
        if what == _SIZE and len(args) == 1 and isinstance(args[0], (tuple, list)):
            self._stack.append(args[0])
            if getrefcount(args) <= 2:  # ours, and the one of the call: nobody else has it
                self._left += getsizeof(args)
        elif what == _ORDERED:
            self._left -= getsizeof({})
            self.new(MadeDict(what, args))
        else:
            self.new(Made(what, args))

    def build(self) -> None:
        state, made = self.pop(), self.pop()
        if not isinstance(made, Made) or made.state is not None:
            self._refuse(f"gives state to a {type(made).__name__} before byte {self.data.at}")
        self._stack.append(made)
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
                self._refuse(f"has a field without a name before byte {self.data.at}")
            self._left -= getsizeof(names) + _ENTRY_BYTES
            self._names[keys] = names
        return self._names[keys]

    def pack(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        if len(values) < count or any(value is _MARK for value in values):
            self._refuse(f"takes a value that is not there, before byte {self.data.at}")
        del self._stack[-count:]
        self.new_tuple(values)

    def new_tuple(self, values: tuple[object, ...]) -> None:
        """Push a tuple, or an equal one that was made just before: most shards have one shape."""
        if len(values) <= 8 and _INT.issuperset(map(type, values)):
            for known in self._shapes:
                if known == values:
                    self._stack.append(known)
                    return
            self._shapes.append(values)
        self.new(values)

    def extend(self, values: list[object]) -> None:
        goal = self.top()
        if not isinstance(goal, list):
            self._refuse(f"appends to a {type(goal).__name__} before byte {self.data.at}")
        self._left += getsizeof(goal)
        goal.extend(values)
        self._left -= getsizeof(goal)

    def new_dict(self, values: list[object]) -> None:
        self.new({})
        self.set(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set([key, value])

    def set(self, values: list[object]) -> None:
        made = self.top()
        goal = made.items if isinstance(made, MadeDict) else made
        if not isinstance(goal, dict) or len(values) % 2:
            self._refuse(f"sets items of a {type(made).__name__} before byte {self.data.at}")
        self._check_growth(goal, len(values) // 2)
        self._left += getsizeof(goal)
        pairs = iter(values)
        for key, value in zip(pairs, pairs, strict=True):
            if type(key) is not str:
                self._check_key(key)
            if key in goal:
                self._refuse(f"has a key twice before byte {self.data.at}")
            goal[key] = value
        self._left -= getsizeof(goal)

    def _check_growth(self, goal: dict[object, object], count: int) -> None:
        """Refuse if there is no memory for a larger table, beside the one that it replaces."""
        num_slots = 1 << (3 * len(goal) // 2).bit_length()
        is_full = 3 * (len(goal) + count) > 2 * num_slots
        if self._left < _ENTRY_BYTES * count + (2 * getsizeof(goal) if is_full else 0):
            self._budget.refuse()

    def _check_key(self, key: object) -> None:
        """Refuse keys that are not plain values, and numbers that can be made to share a hash."""
        is_object = self._has_objects and isinstance(key, Made)
        if not is_object and not isinstance(key, (int, float, type(None))):
            self._refuse(f"has a {type(key).__name__} for a key before byte {self.data.at}")
        # From here on numbers share the hashes of others, and a dict of them takes hours.
        # Smaller ones have hashes of their own; of floats some thirty share one.
        if isinstance(key, int) and abs(key) >= sys.hash_info.modulus:
            self._refuse(
                f"has the number {key} for a key before byte {self.data.at}, at most "
                f"{sys.hash_info.modulus - 1}"
            )


_Action = Callable[[_Machine, int], object]
_ACTIONS: dict[bytes, _Action] = {
    b"\x80": _Machine.protocol,
    b"\x95": lambda m, n: None,  # the length of a frame, which only helps readers that buffer
    b"(": lambda m, n: m.push(_MARK),
    b"0": lambda m, n: m.pop(),
    b"1": lambda m, n: m.to_mark(),
    b"N": lambda m, n: m.push(None),
    b"\x88": lambda m, n: m.push(True),
    b"\x89": lambda m, n: m.push(False),
    b"KM": _Machine.unsigned,
    b"J": _Machine.signed,
    b"\x8a\x8b": _Machine.long,
    b"G": _Machine.float,
    b"X\x8c\x8d": _Machine.text,
    b"BC\x8e\x96": _Machine.span,
    b"]": lambda m, n: m.new([]),
    b"l": lambda m, n: m.new(m.to_mark()),
    b"a": lambda m, n: m.extend([m.pop()]),
    b"e": lambda m, n: m.extend(m.to_mark()),
    b"}": lambda m, n: m.new({}),
    b"d": lambda m, n: m.new_dict(m.to_mark()),
    b"s": lambda m, n: m.set_item(),
    b"u": lambda m, n: m.set(m.to_mark()),
    b")": lambda m, n: m.push(()),
    b"t": lambda m, n: m.new_tuple(tuple(m.to_mark())),
    b"\x85": lambda m, n: m.pack(1),
    b"\x86": lambda m, n: m.pack(2),
    b"\x87": lambda m, n: m.pack(3),
    b"qr": _Machine.put,
    b"\x94": lambda m, n: m.put(m.num_puts),
    b"hj": _Machine.recall,
    b"c": lambda m, n: m.name(m.data.line(), m.data.line()),
    b"\x93": lambda m, n: m.stack_global(),
    b"R": lambda m, n: m.reduce(),
    b"b": lambda m, n: m.build(),
    b".": lambda m, n: None,
}
"""What each opcode does; `n` is its number, and 0 if it has none."""
_BY_OPCODE = {code: (action, WIDTHS[code]) for codes, action in _ACTIONS.items() for code in codes}
_OBJECTS_BY_OPCODE: dict[int, tuple[_Action, int]] = {
    **_BY_OPCODE,
    0x81: (lambda m, n: m.reduce(), 0),  # a new object; nothing is called here either way
    ord("Q"): (lambda m, n: m.new(Persistent(m.pop())), 0),
}
