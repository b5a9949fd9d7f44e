"""Actors: the engines of the story as their supervisor sees them, and the users who ask them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from flyweight.demo.channel import Generate, Line
from flyweight.demo.children import Child, Told
from flyweight.demo.setting import Places, Setting
from flyweight.errors import TransportError
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.states import State

_DIGITS = bytes((3, 1, 4, 1, 5, 9, 2, 6))
_REST_SECONDS = 0.05
_ANSWER_SECONDS = 20.0


class Users:
    """Ask one engine for answers, one request after the other, and count what comes."""

    def __init__(self, line: Line, setting: Setting) -> None:
        self._line, self._prompt = line, _DIGITS[: setting.num_digits]
        self._num_busy_prompts = setting.num_busy_prompts
        self.num_answered = 0
        self.versions: set[int] = set()
        """Versions that answered; emptied by whoever wants to know from then on."""
        self.example = ""
        """The last prompt, and its answer."""
        self.are_busy = False
        """Whether requests are long, so that one always runs."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="demo-users", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        seed = 0
        while not self._is_over.wait(0.0 if self.are_busy else _REST_SECONDS):
            num_prompts = self._num_busy_prompts if self.are_busy else 1
            try:
                came = self._line.generate(
                    Generate(self._prompt * num_prompts, seed), _ANSWER_SECONDS
                )
            except TransportError:  # it was killed, or has no weights yet
                self._is_over.wait(_REST_SECONDS)
                continue
            seed += 1
            self.num_answered += 1
            if came.version is not None:
                self.versions.add(came.version)
            self.example = f"{_text(self._prompt)} → {_text(came.answers[: len(self._prompt)])}"

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(_ANSWER_SECONDS)
        self._line.close()


def _text(digits: bytes) -> str:
    return "".join(str(each) for each in digits)


@dataclass
class Actor:
    """One engine: the process that it is at the moment, and what all of them did."""

    name: str
    start: Callable[[str], Child]
    cell: Cell
    users: Users
    num_restarts: int = 0
    num_failures: int = 0
    since_start: list[Told] = field(default_factory=list)
    """What the present process told of its updates."""
    pauses_ms: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.child = self.start(self.name)

    @classmethod
    def of(
        cls, name: str, places: Places, setting: Setting, start: Callable[[str], Child]
    ) -> Actor:
        users = Users(Line(places.socket(name)), setting)
        return cls(name, start, Cell(places.cell(name)), users)

    @property
    def slot(self) -> RankRecord:
        """How the engine stands, by its status cell."""
        found = self.cell.record(0)
        return RankRecord() if found is None else found

    @property
    def version(self) -> int | None:
        return self.slot.version

    @property
    def is_serving(self) -> bool:
        return self.slot.state is State.SERVING and self.slot.is_alive

    def restart(self) -> None:
        """Put a fresh process in the place of one that ended."""
        self.child.close()
        self.num_restarts += 1
        self.since_start = []
        self.child = self.start(self.name)

    def updated(self, told: Told) -> None:
        self.since_start.append(told)
        # The first version after a start stops nobody: there were no weights to answer with.
        if len(self.since_start) > 1:
            self.pauses_ms.append(told["pause_ms"])
        if told["origin"] == "published":
            self.speeds.append(told["gb_per_second"])

    def result(self, version: int | None, differing: list[str]) -> dict[str, object]:
        """Return the row of the table that the story ends with."""
        return {
            "name": self.name,
            "version": version,
            "num_rounds": len(self.pauses_ms) + self.num_restarts + 1,
            "median_pause_ms": median(self.pauses_ms) if self.pauses_ms else None,
            "max_pause_ms": max(self.pauses_ms, default=None),
            "gb_per_second": median(self.speeds) if self.speeds else None,
            "num_answered": self.users.num_answered,
            "num_restarts": self.num_restarts,
            "differing": differing,
            "is_same": not differing,
        }

    def close(self) -> None:
        self.child.close()
        self.users.close()
        self.cell.close()
