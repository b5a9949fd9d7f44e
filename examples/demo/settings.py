"""Sizes of the demo, and the paths that its processes share. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the policy is, and how long it is trained."""

    num_digits: int
    """How many digits a prompt has. The policy learns to repeat them backwards."""
    width: int
    num_layers: int
    learning_rate: float
    num_steps: int
    snapshot_every: int
    """How many steps lie between two snapshots."""
    num_long_prompts: int
    """How many prompts make a request that takes some tenths of a second."""
    limit_seconds: float
    """The demo gives up after this time."""


SIZES = {
    "full": Size(
        num_digits=6, width=160, num_layers=4, learning_rate=5e-4,
        num_steps=60, snapshot_every=5, num_long_prompts=400, limit_seconds=600.0,
    ),
    "fast": Size(
        num_digits=4, width=128, num_layers=2, learning_rate=2e-3,
        num_steps=24, snapshot_every=3, num_long_prompts=1200, limit_seconds=100.0,
    ),
}  # fmt: skip


class Paths(NamedTuple):
    """Snapshots and status cells lie in `run`; sockets, whose paths must be short, in `scratch`."""

    run: Path
    scratch: Path

    @property
    def address(self) -> str:
        """Where the trainer publishes."""
        return f"unix:{self.scratch / 'policy'}"

    @property
    def store(self) -> Path:
        """Snapshots of the policy, for the engines."""
        return self.run / "policy"

    @property
    def training(self) -> Path:
        """Snapshots of the policy and its optimizer, for the next trainer."""
        return self.run / "training"

    def cell(self, engine: str) -> Path:
        return self.run / f"{engine}.cell"

    def socket(self, engine: str) -> Path:
        return self.scratch / engine
