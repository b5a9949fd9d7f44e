"""Pickles, read without running them.

A pickle is a program for a small stack machine whose dangerous instructions call
any function by name. Here nothing is ever called: names off a short list become
`Made` records that say what would have been called with what, a name that is not
on the list is refused, and long byte strings become `Span`s of the file, so that
weights are not even read. What a record means, the format that asked for it decides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from flyweight.errors import FormatError
from flyweight.ports import Store

MAX_INLINE_BYTES = 64 << 10
"""Longer text stays in the file, as a span; byte strings always do."""
MAX_OPCODES = 50_000_000
_BLOCK_BYTES = 1 << 20


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
    items: dict[object, object] = field(default_factory=dict)
    """What would have been set in it, for kinds of dict."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """Something that is not in the pickle itself: a tensor's storage, by what names it."""

    what: object


class _Mark: ...


_MARK = _Mark()


def read_pickle(
    store: Store,
    file: str,
    allowed: Collection[tuple[str, str]],
    *,
    stretch: Span | None = None,
    has_objects: bool = False,
    max_text_bytes: int = MAX_INLINE_BYTES,
) -> object:
    """Return what the pickle describes: plain values, containers, `Made` records and spans.

    It is the whole file, or a stretch of it. Pickles of arrays alone have no objects that are
    made without a call, keys of a dict or kept elsewhere; those of checkpoints may. Text may be
    an array's bytes; where it never is, `max_text_bytes` lets more of it be read.
    """
    stretch = stretch or Span(0, store.size(file))
    machine = _Machine(
        store, file, allowed, stretch, has_objects=has_objects, max_text_bytes=max_text_bytes
    )
    return machine.run()


class _Machine:
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
        self._store, self._file, self._allowed = store, file, allowed
        self._has_objects, self._max_text_bytes = has_objects, max_text_bytes
        self._at, self._size = stretch.offset, stretch.offset + stretch.nbytes
        self._block, self._block_at = b"", 0
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        for _ in range(MAX_OPCODES):
            code = self._take(1)
            if code == b".":
                return self._stop()
            action = _ACTIONS.get(code)
            if action is None and self._has_objects:
                action = _OBJECT_ACTIONS.get(code)
            if action is None:
                self._refuse(
                    f"has opcode {code!r} at byte {self._at - 1}, which this format never needs"
                )
            action(self)
        return self._refuse(f"has more than {MAX_OPCODES} opcodes")

    def _refuse(self, why: str) -> NoReturn:
        keys = ".".join(self._keys())[:200]
        last = f"; the last name read is {keys!r}" if keys else ""
        raise FormatError(f"pickle {self._file!r} in {self._store.place!r} {why}{last}")

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

    def _stop(self) -> object:
        if len(self._stack) != 1:
            self._refuse(f"ends with {len(self._stack)} values, expected 1")
        if self._at != self._size:
            self._refuse(f"ends at byte {self._at}, the file has {self._size}")
        return self._pop()

    # Bytes of the file. Weights are skipped over, so blocks are read only where opcodes are.

    def _take(self, nbytes: int) -> bytes:
        self._reach(nbytes)
        start = self._at - self._block_at
        if start < 0 or start + nbytes > len(self._block):
            length = min(max(nbytes, _BLOCK_BYTES), self._size - self._at)
            self._block, self._block_at = self._store.read(self._file, self._at, length), self._at
            start = 0
        self._at += nbytes
        return self._block[start : start + nbytes]

    def _reach(self, nbytes: int) -> None:
        if nbytes > self._size - self._at:
            self._refuse(
                f"is cut short: {nbytes} bytes wanted at {self._at}, the file has {self._size}"
            )

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack(kind, self._take(struct.calcsize(kind)))
        return int(value)

    def _line(self) -> str:
        text = bytearray()
        while (char := self._take(1)) != b"\n":
            text += char
            if len(text) > 1024:
                self._refuse("names something with more than 1024 characters")
        return text.decode("utf-8", "replace")

    # The stack.

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            self._refuse(f"takes a value that is not there, before byte {self._at}")
        return self._stack.pop()

    def _to_mark(self) -> list[object]:
        values: list[object] = []
        while self._stack:
            value = self._stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(value)
        return self._refuse(f"goes back to a mark that is not there, before byte {self._at}")

    def text(self, kind: str) -> None:
        nbytes = self._number(kind)
        if nbytes > self._max_text_bytes:
            self._span(nbytes, is_text=True)
            return
        try:
            self._push(self._take(nbytes).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            self._refuse(f"has text that is not UTF-8 before byte {self._at}")

    def data(self, kind: str) -> None:
        self._span(self._number(kind), is_text=False)

    def _span(self, nbytes: int, *, is_text: bool) -> None:
        self._reach(nbytes)
        self._push(Span(self._at, nbytes, is_text))
        self._at += nbytes

    def long(self, kind: str) -> None:
        nbytes = self._number(kind)
        if not 0 <= nbytes <= 16:
            self._refuse(f"has a number of {nbytes} bytes")
        self._push(int.from_bytes(self._take(nbytes), "little", signed=True))

    def float(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def proto(self) -> None:
        version = self._number("B")
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
        if (module, name) not in self._allowed:
            self._refuse(
                f"names {module}.{name}, which is not on the list of what this format needs"
            )
        self._push(Global(module, name))

    def line_global(self) -> None:
        self.name(self._line(), self._line())

    def stack_global(self) -> None:
        name = self._pop()
        self.name(self._pop(), name)

    def reduce(self) -> None:
        args, what = self._pop(), self._pop()
        if not isinstance(what, Global) or not isinstance(args, tuple):
            self._refuse(f"calls a {type(what).__name__} before byte {self._at}")
        self._push(Made(what, args))

    def persistent(self) -> None:
        self._push(Persistent(self._pop()))

    def build(self) -> None:
        state, made = self._pop(), self._pop()
        if not isinstance(made, Made) or made.state is not None:
            self._refuse(f"gives state to a {type(made).__name__} before byte {self._at}")
        made.state = state
        self._push(made)

    def put(self, index: int) -> None:
        value = self._pop()
        self._memo[index] = value
        self._push(value)

    def recall(self, index: int) -> None:
        if index not in self._memo:
            self._refuse(f"recalls value {index} that was never kept")
        self._push(self._memo[index])

    def pack(self, count: int) -> None:
        self._push(tuple(reversed([self._pop() for _ in range(count)])))

    def pop_mark(self) -> None:
        self._to_mark()

    def mark_tuple(self) -> None:
        self._push(tuple(self._to_mark()))

    def mark_list(self) -> None:
        self._push(self._to_mark())

    def mark_dict(self) -> None:
        values = self._to_mark()
        self._push({})
        self._set(values)

    def append(self) -> None:
        self._extend([self._pop()])

    def appends(self) -> None:
        self._extend(self._to_mark())

    def _extend(self, values: list[object]) -> None:
        goal = self._pop()
        if not isinstance(goal, list):
            self._refuse(f"appends to a {type(goal).__name__} before byte {self._at}")
        goal.extend(values)
        self._push(goal)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._to_mark())

    def _set(self, values: list[object]) -> None:
        made = self._pop()
        goal = made.items if isinstance(made, Made) else made
        if not isinstance(goal, dict) or len(values) % 2:
            self._refuse(f"sets items of a {type(made).__name__} before byte {self._at}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            is_object = self._has_objects and isinstance(key, Made)
            if not is_object and not isinstance(key, (str, int, float, bool, type(None))):
                self._refuse(f"has a {type(key).__name__} for a key before byte {self._at}")
            if key in goal:
                self._refuse(f"has a key twice before byte {self._at}")
            goal[key] = value
        self._push(made)


_Action = Callable[[_Machine], None]
_ACTIONS: dict[bytes, _Action] = {
    b"\x80": _Machine.proto,
    b"\x95": _Machine.frame,
    b"(": lambda m: m._push(_MARK),
    b"0": _Machine.drop,
    b"1": _Machine.pop_mark,
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(m._number("<i")),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"\x8a": lambda m: m.long("<B"),
    b"\x8b": lambda m: m.long("<i"),
    b"G": _Machine.float,
    b"X": lambda m: m.text("<I"),
    b"\x8c": lambda m: m.text("<B"),
    b"\x8d": lambda m: m.text("<Q"),
    b"B": lambda m: m.data("<I"),
    b"C": lambda m: m.data("<B"),
    b"\x8e": lambda m: m.data("<Q"),
    b"\x96": lambda m: m.data("<Q"),
    b"]": lambda m: m._push([]),
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"l": _Machine.mark_list,
    b"}": lambda m: m._push({}),
    b"d": _Machine.mark_dict,
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b")": lambda m: m._push(()),
    b"t": _Machine.mark_tuple,
    b"\x85": lambda m: m.pack(1),
    b"\x86": lambda m: m.pack(2),
    b"\x87": lambda m: m.pack(3),
    b"q": lambda m: m.put(m._number("<B")),
    b"r": lambda m: m.put(m._number("<I")),
    b"\x94": lambda m: m.put(len(m._memo)),
    b"h": lambda m: m.recall(m._number("<B")),
    b"j": lambda m: m.recall(m._number("<I")),
    b"c": _Machine.line_global,
    b"\x93": _Machine.stack_global,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
}
_OBJECT_ACTIONS: dict[bytes, _Action] = {
    b"\x81": _Machine.reduce,  # NEWOBJ: nothing is called here either way
    b"Q": _Machine.persistent,
}
