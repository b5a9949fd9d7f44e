"""The story: a trainer and its engines, killed at the worst moments, and whether that did harm.

However it ends, no process and no temporary directory is left.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from time import monotonic, sleep

from flyweight.demo.actors import Actor
from flyweight.demo.channel import Held, Line
from flyweight.demo.children import uninterrupted
from flyweight.demo.setting import SETTINGS, Places
from flyweight.demo.stage import Audience, Stage
from flyweight.errors import SpecError, StoreError, TransferTimeout, TransportError
from flyweight.lifecycle.states import State

_STEP_SECONDS = 60.0
_BACK_SECONDS = 60.0
_SETTLE_SECONDS = 30.0
_HUNT_SECONDS = 60.0
_HELD_SECONDS = 20.0
_LOOK_SECONDS = 0.5
_CATCH_SECONDS = 0.03
_MIN_ANSWERS = 10
"""How many requests each engine answers while there is no trainer, before one is started."""
_IN_ROUND = (State.PAUSING, State.PAUSED, State.UPDATING, State.VERIFYING)
_FEW = 4
_RISE = 0.2


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What the story is to be."""

    is_fast: bool = False
    num_steps: int | None = None
    """How many steps are trained; None for as many as go with the size."""
    seconds: float | None = None
    """After how long the story goes on to its end with fewer steps."""
    num_engines: int = 2
    seed: int = 0
    run: Path | None = None
    """Where snapshots and status cells are left; None for a directory that is removed."""
    port: int | None = None
    """Where the control server's page is; None for no server, 0 for any port."""

    @property
    def size(self) -> str:
        return "fast" if self.is_fast else "full"

    @property
    def all_steps(self) -> int:
        return SETTINGS[self.size].num_steps if self.num_steps is None else self.num_steps

    @property
    def limit_seconds(self) -> float:
        """When the whole story is given up: the longer it is to be, the later."""
        setting = SETTINGS[self.size]
        longer = max(self.all_steps / setting.num_steps, 1.0)
        return max(setting.limit_seconds * longer, 10 * (self.seconds or 0.0))

    @property
    def kills(self) -> list[tuple[float, State]]:
        """How far training is when the trainer is killed, and what engines are doing then."""
        first, second = (0.5, State.PAUSING), (0.7, State.UPDATING)
        return [first] if self.is_fast else [first, second]


def play(plot: Plot, audience: Audience) -> bool:
    """Play the story to its end, and return whether all that it claims is so."""
    if plot.port is not None:
        import_module("flyweight.server")  # it says what is missing, if something is
    setting = SETTINGS[plot.size]
    with ExitStack() as stack:
        places = _places(plot, stack)
        stage = Stage(
            places,
            plot.size,
            setting,
            audience,
            seed=plot.seed,
            limit_seconds=plot.limit_seconds,
        )
        stack.callback(stage.close)
        return _Story(plot, stage).play()


def _remove(directory: Path) -> None:
    with uninterrupted():
        shutil.rmtree(directory, ignore_errors=True)


def _places(plot: Plot, stack: ExitStack) -> Places:
    try:
        scratch = Path(tempfile.mkdtemp(prefix="flyweight-demo-"))
        stack.callback(_remove, scratch)
        run = scratch / "run" if plot.run is None else plot.run.absolute()
        if run.exists() and any(run.iterdir()):
            raise SpecError(f"{str(run)!r} is not empty; the demo needs a directory of its own")
        run.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise StoreError(cause.errno, f"no directory for the demo: {cause}") from cause
    return Places(run, scratch)


class _Story:
    def __init__(self, plot: Plot, stage: Stage) -> None:
        self._plot, self._stage = plot, stage
        self._claims: dict[str, bool] = {}

    def play(self) -> bool:
        stage, plot = self._stage, self._plot
        stage.tell(
            "began",
            num_engines=plot.num_engines,
            num_steps=plot.all_steps,
            num_digits=SETTINGS[plot.size].num_digits,
            seed=plot.seed,
            run=str(stage.places.run),
            address=stage.places.address,
        )
        stage.open(plot.num_engines, plot.port)
        stage.until(self._have_answered, _BACK_SECONDS, "a first answer of every engine")
        stage.tell("example", text=stage.actors[0].users.example)
        self._until_progress(0.25)
        self._kill_engine(stage.actors[0])
        for progress, moment in plot.kills:
            self._until_progress(progress)
            self._kill_trainer(moment)
        self._until_progress(1.0)
        rows = self._compare()
        self._claim_rise()
        is_well = all(self._claims.values())
        stage.tell("ended", is_well=is_well, claims=self._claims, replicas=rows)
        return is_well

    def _have_answered(self) -> bool:
        return all(actor.users.num_answered > 0 for actor in self._stage.actors)

    def _until_progress(self, progress: float) -> None:
        """Let training go on until so much of it is done."""
        stage, limit = self._stage, self._plot.seconds

        def is_there() -> bool:
            if limit is not None and monotonic() - stage.began >= progress * limit:
                return True
            return bool(stage.told["published"]["step"] >= progress * self._plot.all_steps)

        def is_beyond(version: int) -> bool:
            return bool(stage.told["published"]["version"] > version)

        while not is_there():
            version = stage.told["published"]["version"]
            stage.until(partial(is_beyond, version), _STEP_SECONDS, "the trainer's next step")
        stage.until(lambda: stage.has_told, _STEP_SECONDS, "the engines to tell of the step")

    # An engine is killed.

    def _kill_engine(self, actor: Actor) -> None:
        """Kill an engine, and see the next process in its place catch up."""
        stage, killed = self._stage, monotonic()
        stage.tell("killed", process=actor.name, pid=actor.child.pid, version=actor.version)
        before = actor.num_restarts
        actor.child.kill()
        stage.until(
            lambda: actor.num_restarts > before and bool(actor.since_start),
            _BACK_SECONDS,
            f"{actor.name} to come back",
        )
        first = actor.since_start[0]
        stage.tell(
            "back",
            process=actor.name,
            version=first["version"],
            origin=first["origin"],
            after_seconds=monotonic() - killed,
        )
        stage.until(
            lambda: actor.since_start[-1]["origin"] == "published",
            _BACK_SECONDS,
            f"{actor.name} to catch up",
        )
        last = actor.since_start[-1]
        stage.tell(
            "caught_up",
            process=actor.name,
            version=last["version"],
            after_seconds=monotonic() - killed,
        )
        self._claims[f"{actor.name}, killed, came back by itself and caught up"] = True

    # The trainer is killed.

    def _kill_trainer(self, moment: State) -> None:
        """Kill the trainer in the middle of a publish, and see what becomes of the engines."""
        stage, actors = self._stage, self._stage.actors
        failures = {actor.name: actor.num_failures for actor in actors}
        version, held = self._catch_publish(moment)
        killed, counts = monotonic(), {actor.name: actor.users.num_answered for actor in actors}
        for actor in actors:
            actor.users.versions.clear()
        stage.until(
            lambda: all(actor.is_serving for actor in actors),
            _SETTLE_SECONDS,
            "the engines to serve without a trainer",
        )
        stage.hear_all()
        for actor in actors:
            stage.tell(
                "stayed",
                process=actor.name,
                version=actor.version,
                held=held[actor.name],
                was_taken=actor.version == version,
                was_touched=actor.num_failures > failures[actor.name],
                after_seconds=monotonic() - killed,
            )
        enough = {a.name: a.users.num_answered + _MIN_ANSWERS for a in actors}
        stage.until(
            lambda: all(a.users.num_answered >= enough[a.name] for a in actors),
            _SETTLE_SECONDS,
            "answers without a trainer",
        )
        stage.start_trainer()
        stage.until(lambda: "started" in stage.told, _BACK_SECONDS, "the trainer to come back")
        answered = {a.name: a.users.num_answered - counts[a.name] for a in actors}
        stage.tell(
            "answered",
            num_answered=answered,
            versions=sorted(set[int]().union(*(a.users.versions.copy() for a in actors))),
            absent_seconds=monotonic() - killed,
        )
        stage.until(lambda: "published" in stage.told, _BACK_SECONDS, "the trainer to publish")
        claim = f"the trainer, killed while it published version {version}, came back; "
        claim += f"{sum(answered.values())} requests were answered meanwhile"
        self._claims[claim] = min(answered.values()) >= _MIN_ANSWERS

    def _catch_publish(self, moment: State) -> tuple[int, dict[str, int | None]]:
        """Kill the trainer while the first engine is in that state, and all are in the round.

        Returns the version that was under way, and what each engine held. A trainer that stands
        still cannot end its publish: what is seen then is so when it dies.
        """
        stage, deadline = self._stage, monotonic() + _HUNT_SECONDS
        trainer, first = stage.trainer, stage.actors[0]
        assert trainer is not None
        self._keep_busy(moment is State.PAUSING)
        while True:
            stage.hear_all()
            try:
                first.cell.wait(lambda slots: first.slot.state is moment, _LOOK_SECONDS)
            except TransferTimeout:
                if monotonic() > deadline:
                    raise
                continue
            trainer.stop()
            if self._is_caught(moment):
                break
            trainer.go_on()
        slots = {actor.name: actor.slot for actor in stage.actors}
        stage.is_doomed = True
        trainer.kill()
        self._keep_busy(False)
        stage.until(lambda: stage.trainer is None, _SETTLE_SECONDS, "the trainer's end")
        version = stage.told["publishing"]["version"]
        stage.tell(
            "killed",
            process="trainer",
            pid=trainer.pid,
            version=version,
            engines={name: slot.state for name, slot in slots.items()},
            held={name: slot.version for name, slot in slots.items()},
        )
        return version, {name: slot.version for name, slot in slots.items()}

    def _is_caught(self, moment: State) -> bool:
        """True if the round that the trainer stands still in has come to every engine."""
        stage, deadline = self._stage, monotonic() + _CATCH_SECONDS
        while stage.actors[0].slot.state is moment:
            if all(actor.slot.state in _IN_ROUND for actor in stage.actors):
                return True
            if monotonic() > deadline:
                break
            sleep(0.001)
        return False

    def _keep_busy(self, are_busy: bool) -> None:
        for actor in self._stage.actors:
            actor.users.are_busy = are_busy

    # The end.

    def _compare(self) -> list[dict[str, object]]:
        """End training, and compare what every process holds, bit for bit."""
        stage = self._stage
        assert stage.trainer is not None
        stage.trainer.send("end")
        stage.until(lambda: "finished" in stage.told, _STEP_SECONDS, "the last version")
        finished = stage.told["finished"]
        wanted = Held(finished["version"], finished["digests"])
        rows = []
        for actor in stage.actors:
            held = self._held(actor, wanted.version)
            different = differing(wanted, held)
            rows.append(actor.result(held.version, different))
            self._claims[f"{actor.name} holds bit for bit what the trainer holds"] = not different
        stage.tell("example", text=stage.actors[0].users.example)
        return rows

    def _held(self, actor: Actor, version: int | None) -> Held:
        """Return what an engine holds, once it is that version, or after a while whatever it is."""
        deadline = monotonic() + _HELD_SECONDS
        line = Line(self._stage.places.socket(actor.name))
        try:
            while True:
                try:
                    held = line.held(_HELD_SECONDS)
                except TransportError:
                    held = Held(None, {})
                if held.version == version or monotonic() > deadline:
                    return held
                self._stage.hear(0.05)
        finally:
            line.close()

    def _claim_rise(self) -> None:
        rewards = [self._stage.rewards[step] for step in sorted(self._stage.rewards)]
        first, last = fmean(rewards[:_FEW]), fmean(rewards[-_FEW:])
        claim = f"the reward rose, from {first:.2f} to {last:.2f}"
        self._claims[claim] = last > first + _RISE


def differing(wanted: Held, held: Held) -> list[str]:
    """Return what is not the same: a version, or weights by name; nothing if every bit is."""
    if held.version != wanted.version:
        return [f"version {held.version}, expected {wanted.version}"]
    names: Sequence[str] = sorted({*wanted.digests, *held.digests})
    digests: Mapping[str, int] = held.digests
    return [name for name in names if digests.get(name) != wanted.digests.get(name)]
