"""Settings: how large the demo's policy is, how it learns, and where its processes meet.

No torch here: whoever only starts processes need not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the demo."""

    num_digits: int
    """How many digits a prompt has, which are to be said backwards."""
    width: int
    num_layers: int
    learning_rate: float
    num_prompts: int
    """How many prompts a step has, over all engines."""
    num_samples: int
    """How many answers to each prompt: their mean is what an answer is compared with."""
    num_steps: int
    snapshot_every: int
    """How many steps go by between snapshots."""
    num_busy_prompts: int
    """How many prompts a long request has: enough for some tenths of a second."""
    limit_seconds: float
    """When the whole demo is given up."""


SETTINGS = {
    "full": Setting(
        num_digits=6,
        width=160,
        num_layers=4,
        learning_rate=5e-4,
        num_prompts=24,
        num_samples=8,
        num_steps=60,
        snapshot_every=5,
        num_busy_prompts=400,
        limit_seconds=600.0,
    ),
    "fast": Setting(
        num_digits=4,
        width=128,
        num_layers=2,
        learning_rate=2e-3,
        num_prompts=24,
        num_samples=8,
        num_steps=24,
        snapshot_every=3,
        num_busy_prompts=1200,
        limit_seconds=100.0,
    ),
}


@dataclass(frozen=True)
class Places:
    """Where things are: what lasts in `run`; sockets, whose paths must be short, in `sockets`."""

    run: Path
    sockets: Path

    @property
    def address(self) -> str:
        return f"unix:{self.sockets / 'policy'}"

    @property
    def store(self) -> Path:
        """Where the engines find snapshots of the policy."""
        return self.run / "policy"

    @property
    def training(self) -> Path:
        """Where the trainer finds what it needs to go on."""
        return self.run / "training"

    def cell(self, engine: str) -> Path:
        return self.run / f"{engine}.cell"

    def socket(self, engine: str) -> Path:
        return self.sockets / engine


def engine_names(num_engines: int) -> list[str]:
    return [f"engine-{number}" for number in range(1, num_engines + 1)]
