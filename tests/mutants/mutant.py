"""A deliberate fault, and the tests that should notice it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file` (below src/flyweight) `new` replaces the one place where `old` stands; `tests` run first."""

    claim: str
    file: str
    old: str
    new: str
    tests: str
