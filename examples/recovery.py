"""A trainer that is killed in the middle of a save, and comes back as if nothing had happened.

A process trains a small torch model and saves a version a second. It is killed with SIGKILL
while a save is half-way, twice. Each time a new process recovers the newest whole version and
goes on. At the end the weights must be, bit for bit, those of a run that was never killed.

    python examples/recovery.py [--versions 9] [--pace 1.0]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import flyweight as fw

STEPS_PER_VERSION = 5
WAIT_SECONDS = 60.0
console = Console(width=None if sys.stdout.isatty() else 110)


class Trainer:
    """A deterministic little training job: the same step always gives the same weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 2048),
            torch.nn.Tanh(),
            torch.nn.Linear(2048, 2048),
            torch.nn.Tanh(),
            torch.nn.Linear(2048, 1),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.step = 0
        self.loss = float("nan")
        self.train(1)  # so that the optimizer's moments exist and can be loaded into

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            inputs = torch.randn(64, 64, generator=generator)
            loss = ((self.model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.loss = loss.item()

    def state(self) -> dict[str, object]:
        moments = self.optimizer.state_dict()["state"]
        return {"model": self.model, "moments": moments, "step": self.step}

    def recover(self, run: Path) -> int | None:
        """Take over the newest whole version, in place; None if there is none yet."""
        if not fw.versions(run):
            return None
        state = self.state()
        report = fw.load(run, into=state)
        self.step = int(str(state["step"]))
        return report.version


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def train(run: Path, versions: int, pace: float) -> None:
    trainer = Trainer()
    recovered = trainer.recover(run)
    say(event="started", recovered=recovered, step=trainer.step)
    next_save = time.monotonic()
    for version in range(0 if recovered is None else recovered + 1, versions):
        trainer.train(STEPS_PER_VERSION)
        time.sleep(max(0.0, next_save - time.monotonic()))
        next_save = time.monotonic() + pace
        say(event="saving", version=version)
        report = fw.save(trainer.state(), run, version=version)
        say(event="saved", version=version, loss=trainer.loss, seconds=report.seconds)


@dataclass
class Life:
    """What one trainer process did before it ended."""

    recovered: int | None = None
    saved: list[int] = field(default_factory=list)
    ended: str = ""


def watch(run: Path, versions: int, pace: float, kill_at: int | None) -> Life:
    """Run one trainer; kill it in the middle of saving version `kill_at` or the next it can."""
    life = Life()
    words = [sys.executable, __file__, "--trainer", str(run)]
    words += ["--versions", str(versions), "--pace", str(pace)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        is_killed, saving = False, -1
        for line in child.stdout:  # after a kill, what it still said before
            told = json.loads(line)
            if told["event"] == "started":
                life.recovered = told["recovered"]
                was = "afresh" if life.recovered is None else f"from version {life.recovered}"
                console.print(f"  trainer {child.pid} starts {was}, at step {told['step']}")
            elif told["event"] == "saved":
                life.saved.append(told["version"])
                took = f"{1000 * told['seconds']:3.0f} ms, loss {told['loss']:.3f}"
                console.print(f"  version {told['version']:2d} saved in {took}")
            else:
                saving = told["version"]
                if kill_at is not None and saving >= kill_at and not is_killed:
                    is_killed = is_caught(run, child)
                    if is_killed:
                        child.send_signal(signal.SIGKILL)
        code = child.wait(timeout=WAIT_SECONDS)
    if is_killed:
        console.print(f"  [red]SIGKILL in the middle of saving version {saving}[/]")
        life.ended = f"killed saving {saving}"
    else:
        life.ended = "finished" if code == 0 else f"failed with {code}"
    return life


def is_caught(run: Path, child: subprocess.Popen[str]) -> bool:
    """Stop the child with a version half-written on the disk; False if it was too quick."""
    before, deadline = fw.versions(run), time.monotonic() + WAIT_SECONDS
    while child.poll() is None and fw.versions(run) == before and time.monotonic() < deadline:
        if list(run.glob(".draft-*/*.safetensors")):
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.01)  # until it has really stopped
            if list(run.glob(".draft-*/*.safetensors")):
                return True
            child.send_signal(signal.SIGCONT)
            return False
    return False


def verdicts(run: Path, versions: int, lives: list[Life], drafts: list[bool]) -> dict[str, bool]:
    """Return what must be true if nothing was lost or mixed."""
    console.print("  checking against a run that was never killed ...")
    reference, found = Trainer(), Trainer()
    reference.train(versions * STEPS_PER_VERSION)
    recovered = found.recover(run)
    ours, theirs = found.model.state_dict(), reference.model.state_dict()
    resumed = [
        later.recovered == max(earlier.saved) for earlier, later in pairwise(lives) if earlier.saved
    ]
    return {
        "each kill hit a save half-way": len(drafts) > 0 and all(drafts),
        "each new process found the newest whole version": all(resumed),
        "every version is there and whole": fw.versions(run) == list(range(versions))
        and all(fw.verify(run, version=version).is_whole for version in range(versions)),
        "nothing half-written is left": not list(run.glob(".draft-*")),
        "the last version is the last one saved": recovered == versions - 1,
        "its weights are those of a run never killed": all(
            torch.equal(ours[name], theirs[name]) for name in theirs
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=9, help="how many versions to reach")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between saves")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options.trainer, options.versions, options.pace)
        return 0
    with tempfile.TemporaryDirectory(prefix="flyweight-demo-") as scratch:
        run = Path(scratch) / "run"
        lives, drafts = [], []
        for kill_at in (options.versions // 3, 2 * options.versions // 3, None):
            console.print(f"[bold]process {len(lives) + 1}[/]")
            lives.append(watch(run, options.versions, options.pace, kill_at))
            if kill_at is not None:
                drafts.append(bool(list(run.glob(".draft-*"))))
        checks = verdicts(run, options.versions, lives, drafts)
    table = Table("process", "started from", "saved", "ended", title="what happened")
    for number, life in enumerate(lives, 1):
        start = "nothing" if life.recovered is None else f"version {life.recovered}"
        saved = f"{life.saved[0]}..{life.saved[-1]}" if life.saved else "none"
        table.add_row(str(number), start, saved, life.ended)
    console.print(table)
    for claim, holds in checks.items():
        console.print(f"  {'[green]yes[/]' if holds else '[bold red]NO[/]'}  {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
