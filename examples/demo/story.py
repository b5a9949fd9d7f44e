"""The story of the demo: a trainer and engines are killed at the worst moments. Does it do harm?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic

from processes import Requests
from settings import SIZES, Size
from supervisor import Supervisor

from flyweight.errors import TransferTimeout

_HUNT_SECONDS = 60.0
_COMPARE_SECONDS = 20.0
_FREEZE_SECONDS = 0.03
_MIN_ANSWERS = 10
"""How many requests each engine answers without a trainer, before a new trainer is started."""
_UPDATING = ("PAUSING", "PAUSED", "UPDATING", "VERIFYING")
_NUM_MEAN_STEPS = 4
_MIN_RISE = 0.2


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    is_fast: bool = False
    wanted_steps: int | None = None
    """How many steps to train; None for as many as belong to the size."""
    seconds: float | None = None
    """When to go on to the end, even with fewer steps."""
    num_engines: int = 2
    seed: int = 0
    run: Path | None = None
    """Where to leave snapshots and status cells; None for a directory that is removed."""
    port: int | None = None
    """The port of the control server's page; None for no server, 0 for any port."""

    @property
    def size_name(self) -> str:
        return "fast" if self.is_fast else "full"

    @property
    def size(self) -> Size:
        return SIZES[self.size_name]

    @property
    def num_steps(self) -> int:
        return self.size.num_steps if self.wanted_steps is None else self.wanted_steps

    @property
    def limit_seconds(self) -> float:
        """When to give up: the longer the story, the later."""
        times = max(self.num_steps / self.size.num_steps, 1.0)
        return max(self.size.limit_seconds * times, 10 * (self.seconds or 0.0))


class Story:
    """Plays the story, and notes what it claims and whether that is true."""

    def __init__(self, options, supervisor: Supervisor):
        self._options, self._supervisor = options, supervisor
        self._claims = {}

    def play(self):
        """Play the story to its end, and return whether all its claims are true."""
        supervisor = self._supervisor
        self._tell_beginning()
        supervisor.start()
        users = [engine.users for engine in supervisor.engines]
        supervisor.until("first answers", lambda: all(each.num_answered for each in users))
        self._tell_example()
        self._train_until(0.25)
        self._kill_engine(supervisor.engines[0])
        self._train_until(0.5)
        self._kill_trainer()
        self._train_until(1.0)
        rows = self._compare()
        self._claim_rise()
        is_well = all(self._claims.values())
        supervisor.tell("ended", "", is_well=is_well, claims=self._claims, replicas=rows)
        return is_well

    def _tell_beginning(self):
        options, paths = self._options, self._supervisor.paths
        engines = f"{options.num_engines} engine{'s' if options.num_engines > 1 else ''}"
        self._supervisor.tell(
            "began",
            f"a trainer and {engines}, each a process: to say {options.size.num_digits} digits "
            f"backwards, by policy gradient, in {options.num_steps} steps",
            num_engines=options.num_engines,
            num_steps=options.num_steps,
            num_digits=options.size.num_digits,
            seed=options.seed,
            run=str(paths.run),
            address=paths.address,
        )

    def _tell_example(self):
        example = self._supervisor.engines[0].users.example
        self._supervisor.tell("example", f"engine-1 answers  [bold]{example}[/]", text=example)

    def _train_until(self, progress):
        """Let the trainer do this fraction of its steps, or use this fraction of the time."""
        supervisor, seconds = self._supervisor, self._options.seconds

        def is_done():
            if seconds is not None and monotonic() - supervisor.began >= progress * seconds:
                return True
            return supervisor.latest["published"]["step"] >= progress * self._options.num_steps

        while not is_done():
            supervisor.until(
                "the trainer's next step",
                lambda last=supervisor.latest["published"]: supervisor.latest["published"] != last,
            )
        supervisor.until("the engines' reports", lambda: supervisor.pending_step is None)

    # An engine is killed.

    def _kill_engine(self, engine):
        """Kill an engine, and see that the process that replaces it catches up."""
        supervisor, killed, pid = self._supervisor, monotonic(), engine.child.pid
        text = f"[bold red]SIGKILL[/] {engine.name}, process {pid}, which held version "
        fields = {"process": engine.name, "pid": pid, "version": engine.version}
        supervisor.tell("killed", f"{text}{engine.version}", **fields)
        engine.child.kill()
        supervisor.until(
            f"{engine.name} to come back",
            lambda: engine.child.pid != pid and any(each["is_live"] for each in engine.updates),
        )
        last, seconds = engine.updates[-1], monotonic() - killed
        supervisor.tell(
            "caught_up",
            f"[green]{engine.name} is back[/] {seconds:.1f} s after the kill, with version "
            f"{last['version']}",
            process=engine.name,
            version=last["version"],
            after_seconds=seconds,
        )
        self._claims[f"{engine.name}, killed, came back by itself and caught up"] = True

    # The trainer is killed.

    def _kill_trainer(self):
        """Kill the trainer in the middle of a publish, and see what the engines do without it.

        They have fetched the version to their own host before they pause, so they need no trainer.
        """
        supervisor, engines = self._supervisor, self._supervisor.engines
        failures = {engine.name: engine.num_failures for engine in engines}
        self._freeze_trainer()
        held = {engine.name: engine.version for engine in engines}
        version = self._kill_frozen_trainer(held)
        killed = monotonic()
        counts = {engine.name: engine.users.num_answered for engine in engines}
        for engine in engines:
            engine.users.versions.clear()
        supervisor.until(
            "the engines to serve again", lambda: all(each.state == "SERVING" for each in engines)
        )
        for engine in engines:
            self._tell_stayed(engine, version, held[engine.name], monotonic() - killed)
        enough = {engine: engine.users.num_answered + _MIN_ANSWERS for engine in engines}
        supervisor.until(
            "answers without a trainer",
            lambda: all(each.users.num_answered >= enough[each] for each in engines),
        )
        supervisor.start_trainer()
        supervisor.until("the trainer to come back", lambda: "started" in supervisor.latest)
        answered = {each.name: each.users.num_answered - counts[each.name] for each in engines}
        total, seconds = sum(answered.values()), monotonic() - killed
        versions = sorted(set().union(*(engine.users.versions.copy() for engine in engines)))
        supervisor.tell(
            "answered",
            f"{total} requests were answered in {seconds:.1f} s without a trainer, with version "
            f"{' and '.join(map(str, versions))}",
            num_answered=answered,
            versions=versions,
            absent_seconds=seconds,
        )
        supervisor.until("the trainer to publish", lambda: "published" in supervisor.latest)
        claim = f"the trainer, killed while it published version {version}, came back; "
        claim += f"{total} requests were answered meanwhile"
        self._claims[claim] = min(answered.values()) >= _MIN_ANSWERS
        is_whole = all(engine.num_failures == failures[engine.name] for engine in engines)
        self._claims["no engine lost its weights by that"] = is_whole

    def _freeze_trainer(self):
        """Stop the trainer while all engines are in the middle of an update.

        A stopped trainer cannot finish its publish, so what is seen then is true when it is killed.
        """
        supervisor, deadline = self._supervisor, monotonic() + _HUNT_SECONDS
        first = supervisor.engines[0]

        def are_all_updating():
            return all(engine.state in _UPDATING for engine in supervisor.engines)

        self._send_long_requests(True)  # which an engine drains for a while
        while monotonic() < deadline:
            supervisor.until(f"{first.name} to be PAUSING", lambda: first.state == "PAUSING")
            supervisor.trainer.freeze()
            supervisor.wait(are_all_updating, _FREEZE_SECONDS)
            supervisor.handle_messages()
            if first.state == "PAUSING" and are_all_updating():
                return
            supervisor.trainer.unfreeze()
        raise TransferTimeout(f"no publish was seen on all engines at once in {_HUNT_SECONDS:g} s")

    def _kill_frozen_trainer(self, held):
        """Kill the trainer, and return the version that it was publishing."""
        supervisor, pid = self._supervisor, self._supervisor.trainer.pid
        states = {engine.name: engine.state for engine in supervisor.engines}
        supervisor.is_kill_expected = True
        supervisor.trainer.kill()
        self._send_long_requests(False)
        supervisor.until("the trainer's end", lambda: supervisor.trainer is None)
        version = supervisor.latest["publishing"]["version"]
        engines = ", ".join(
            f"{name} {state}" + ("" if held[name] is None else f" with {held[name]}")
            for name, state in states.items()
        )
        supervisor.tell(
            "killed",
            f"[bold red]SIGKILL[/] trainer, process {pid}, in the middle of publishing version "
            f"{version}: {engines}",
            process="trainer",
            pid=pid,
            version=version,
            engines=states,
            held=held,
        )
        return version

    def _send_long_requests(self, should_send):
        for engine in self._supervisor.engines:
            engine.users.send_long = should_send

    def _tell_stayed(self, engine, version, held, seconds):
        """Tell what an engine serves after the trainer was killed while it published `version`."""
        text = f"[green]{engine.name}"
        if engine.version == version:
            text += f" serves version {version}[/]: it had fetched all of it"
        else:
            text += f" still serves version {engine.version}[/]: nothing of {version} was written"
        self._supervisor.tell(
            "stayed",
            text,
            process=engine.name,
            version=engine.version,
            held=held,
            was_taken=engine.version == version,
            after_seconds=seconds,
        )

    # The end.

    def _compare(self):
        """End the training, and compare the weights of every process, bit for bit."""
        supervisor = self._supervisor
        supervisor.trainer.send("end")
        supervisor.until("the last version", lambda: "finished" in supervisor.latest)
        finished, rows = supervisor.latest["finished"], []
        for engine in supervisor.engines:
            requests, held = Requests(supervisor.paths.socket(engine.name)), None
            deadline = monotonic() + _COMPARE_SECONDS
            while held is None or (held[0] != finished["version"] and monotonic() < deadline):
                held = requests.ask("digests") or (None, {})
            requests.close()
            different = differing((finished["version"], finished["digests"]), held)
            rows.append(engine.result(held[0], different))
            self._claims[f"{engine.name} holds bit for bit what the trainer holds"] = not different
        self._tell_example()
        return rows

    def _claim_rise(self):
        rewards = [reward for _, reward in sorted(self._supervisor.rewards.items())]
        first, last = fmean(rewards[:_NUM_MEAN_STEPS]), fmean(rewards[-_NUM_MEAN_STEPS:])
        self._claims[f"the reward rose, from {first:.2f} to {last:.2f}"] = last > first + _MIN_RISE


def differing(expected, held):
    """Compare two pairs of a version and its digests; return what differs, by name."""
    if held[0] != expected[0]:
        return [f"version {held[0]}, expected {expected[0]}"]
    names = sorted({*expected[1], *held[1]})
    return [name for name in names if held[1].get(name) != expected[1].get(name)]
