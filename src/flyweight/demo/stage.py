"""The stage: the demo's processes, started anew when they end, and what is heard of them.

Everything that happens is told to one audience, as an event with fields. All waits are made
here, each with a deadline, and hear what the processes tell meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from html import escape
from pathlib import Path
from queue import Empty
from time import monotonic

from flyweight.demo.actors import Actor
from flyweight.demo.children import Child, Inbox, Told, uninterrupted
from flyweight.demo.setting import Places, Setting, engine_names
from flyweight.errors import PeerFailed, PeerLost, PeerRefused, TransferTimeout

Audience = Callable[[str, Mapping[str, object]], None]
"""Hears what happens: the kind of event, and its fields."""

_HEAR_SECONDS = 0.05
_JOIN_SECONDS = 0.5
"""How long the line of a step waits for the engines to tell of theirs."""
_START_SECONDS = 90.0
_MAX_RESTARTS = 5


class Stage:
    """A trainer, engines with their users, and a control server if there is to be one."""

    def __init__(
        self,
        places: Places,
        size: str,
        setting: Setting,
        audience: Audience,
        *,
        seed: int,
        limit_seconds: float,
    ) -> None:
        self.places, self._size, self._setting, self._seed = places, size, setting, seed
        self._audience, self.began = audience, monotonic()
        self._limit_seconds = limit_seconds
        self._inbox: Inbox = Inbox()
        self._closing = ExitStack()
        self.actors: list[Actor] = []
        self.trainer: Child | None = None
        self.is_doomed = False
        """Whether the trainer's end is part of the story."""
        self.told: dict[str, Told] = {}
        """What the present trainer told last, of each kind of event."""
        self.rewards: dict[int, float] = {}
        """The mean reward of each step."""
        self._step: tuple[Told, float] | None = None
        self._page = ""

    def tell(self, event: str, **fields: object) -> None:
        self._audience(event, {"seconds": round(monotonic() - self.began, 3), **fields})

    # Processes.

    def _child(self, name: str, *words: str) -> Child:
        return Child(name, words, self.places.sockets / f"{name}.log", self._inbox)

    def open(self, num_engines: int, port: int | None) -> None:
        """Start all, and return once the first version is in the engines."""
        where = str(self.places.run), str(self.places.sockets), self._size
        for name in engine_names(num_engines):
            with uninterrupted():
                actor = Actor.of(
                    name,
                    self.places,
                    self._setting,
                    lambda name: self._child(name, "flyweight.demo.engine", name, *where),
                )
                self._closing.callback(actor.close)
            self.actors.append(actor)
        self.start_trainer()
        if port is not None:
            self._open_page(port)
        self.until(lambda: "published" in self.told, _START_SECONDS, "the first version")

    def start_trainer(self) -> None:
        """Start a trainer, which goes on from the newest snapshot and the last number."""
        where = str(self.places.run), str(self.places.sockets), self._size
        last = self.told.get("publishing", {}).get("version", -1)
        more = str(len(self.actors)), str(self._seed), str(last)
        self.told = {}
        with uninterrupted():
            self.trainer = self._child("trainer", "flyweight.demo.trainer", *where, *more)
            self._closing.callback(self.trainer.close)

    def _open_page(self, port: int) -> None:
        words = ["flyweight.demo.page", "serve", "--json", "--port", str(port)]
        words += ["--run", str(self.places.sockets), "--store", str(self.places.store)]
        for actor in self.actors:
            words += ["--replica", f"{actor.name}={self.places.cell(actor.name)}"]
        with uninterrupted():
            self._closing.callback(self._child("server", *words).close)
        self.until(lambda: bool(self._page), _START_SECONDS, "the control server's page")
        self.tell("page", page=self._page, opener=str(self._write_opener()))

    def _write_opener(self) -> Path:
        """Write a file that leads a browser to the page, and return it.

        Whoever opens the address itself shows its token to everybody who lists processes.
        """
        path = self.places.sockets / "page.html"
        if stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
            raise PeerRefused(f"{str(path.parent)!r} can be read by others; it would hold a token")
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with open(file, "w", encoding="ascii") as page:
            page.write(f'<meta http-equiv="refresh" content="0; url={escape(self._page)}">\n')
        return path

    # Waits.

    def until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        """Hear what processes tell until something is so; raise TransferTimeout if it never is."""
        deadline = monotonic() + seconds
        while not is_so():
            self.hear(_HEAR_SECONDS)
            if monotonic() > deadline:
                raise TransferTimeout(f"the demo waited {seconds:g} s for {what}")
            if monotonic() > self.began + self._limit_seconds:
                raise TransferTimeout(
                    f"the demo took {self._limit_seconds:g} s, and still waited for {what}"
                )

    def hear(self, seconds: float) -> None:
        """Hear one thing, if something is told in that time."""
        try:
            child, told = self._inbox.get(timeout=seconds)
        except Empty:
            pass
        else:
            if child is self.trainer:
                self._hear_trainer(child, told)
            elif child.name == "server":
                self._hear_server(child, told)
            for actor in self.actors:
                if child is actor.child:
                    self._hear_engine(actor, told)
        self._tell_step()

    @property
    def has_told(self) -> bool:
        """Whether all that was heard of the last step has been told."""
        return self._step is None

    def hear_all(self) -> None:
        """Hear all that was told by now."""
        while not self._inbox.empty():
            self.hear(0.0)

    def _hear_server(self, child: Child, told: Told | None) -> None:
        if told is None:
            raise PeerLost(f"the control server ended with {child.code}: {child.last_words()}")
        self._page = told["page"]

    def _hear_trainer(self, child: Child, told: Told | None) -> None:
        self._tell_step(should_wait=False)
        if told is None:
            if not self.is_doomed:
                raise PeerFailed(f"the trainer ended with {child.code}: {child.last_words()}")
            self.trainer, self.is_doomed = None, False
            return
        self.told[told["event"]] = told
        match told["event"]:
            case "started":
                self.tell("trainer", pid=child.pid, **{k: told[k] for k in told if k != "event"})
            case "step":
                self.rewards[told["step"]] = told["reward"]
            case "published" if told["version"] == self.told.get("step", {}).get("version"):
                self._step = told, monotonic() + _JOIN_SECONDS
            case "saved":
                self.tell("saved", version=told["version"], ms=1000 * told["seconds"])

    def _hear_engine(self, actor: Actor, told: Told | None) -> None:
        if told is None:
            if actor.num_restarts == _MAX_RESTARTS:
                words = actor.child.last_words()
                raise PeerFailed(f"{actor.name} ended {_MAX_RESTARTS + 1} times: {words}")
            with uninterrupted():
                actor.restart()
            self.tell("restarted", process=actor.name, pid=actor.child.pid)
        elif told["event"] == "updated":
            actor.updated(told)
        elif told["event"] == "failed":
            actor.num_failures += 1
            self.tell("failed", process=actor.name, reason=told["reason"])

    def _tell_step(self, *, should_wait: bool = True) -> None:
        """Tell of a step once the engines told of its version too, or should have."""
        if self._step is None:
            return
        published, deadline = self._step
        version = published["version"]
        pauses = {
            actor.name: actor.since_start[-1]["pause_ms"]
            for actor in self.actors
            if actor.since_start and actor.since_start[-1]["version"] == version
        }
        if should_wait and len(pauses) < published["num_replicas"] and monotonic() < deadline:
            return
        self._step = None
        step = self.told["step"]
        self.tell(
            "step",
            step=published["step"],
            reward=step["reward"],
            version=version,
            num_answers=step["num_answers"],
            num_stale=step["num_stale"],
            publish_ms=published["ms"],
            nbytes=published["nbytes"],
            pauses_ms=pauses,
        )

    def close(self) -> None:
        """End every process. Safe to repeat."""
        with uninterrupted():
            self._closing.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
