"""What a pickle describes, beyond plain values and containers: records of what it would make."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the file; `is_text` if they are UTF-8 of a string."""

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
    """What a call of `what` with `args` would have made, and the state it would have been given."""

    what: Global
    args: object
    state: object = None
    names: tuple[str, ...] | None = None
    """The names of its fields; their values are the state."""


@dataclass(slots=True, eq=False)
class MadeDict(Made):
    """A kind of dict, and the items that would have been set in it."""

    items: dict[object, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object outside of the pickle, such as a tensor's storage, by its id."""

    what: object
