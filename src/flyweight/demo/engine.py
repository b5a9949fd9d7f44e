"""The demo's engine: a process that answers prompts with whatever version it holds.

    python -m flyweight.demo.engine NAME RUN SOCKETS SIZE

It begins with empty weights and knows no more than an address and a directory of snapshots.
Nobody tells it what to do after a crash: a new process is as good as the old one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from flyweight.demo.channel import Answer, Desk, Generate, Generated, Held, Question
from flyweight.demo.children import obey, say
from flyweight.demo.policy import digests, empty_policy, generate
from flyweight.demo.setting import SETTINGS, Places
from flyweight.lifecycle.cell import Cell
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.states import State
from flyweight.lifecycle.weights import NearestWeights, StoredWeights
from flyweight.lifecycle.worker import Worker
from flyweight.live.replica import Replica

_REQUEST_SECONDS = 20.0
_LOOK_SECONDS = 1.0


def serve(name: str, places: Places, size: str) -> None:
    """Serve and follow, until the parent ends."""
    torch.set_num_threads(1)
    policy = empty_policy(SETTINGS[size])
    engine = ModelEngine(policy)

    def answer(question: Question) -> Answer:
        with engine.request(_REQUEST_SECONDS) as version:
            if not isinstance(question, Generate):
                return Held(version, digests(policy))
            prompts = np.frombuffer(question.prompts, np.uint8).reshape(-1, policy.num_digits)
            return Generated(version, generate(policy, prompts, question.seed).tobytes())

    replica = Replica(policy, places.address, name=name)
    weights = NearestWeights(replica, StoredWeights(policy, places.store))
    with Worker(engine, weights, places.cell(name)) as worker:
        Desk(places.socket(name), answer)
        say("started")
        _tell(worker, places.cell(name))


def _tell(worker: Worker, path: Path) -> None:
    """Tell of each round as it ends, well or badly, as the status cell shows it."""
    num_rounds, state, bell = 0, State.CLEARED, 0
    with Cell(path) as cell:
        while True:
            bell = cell.wait_change(bell, _LOOK_SECONDS)
            slot, report = cell.record(0), worker.operations.report
            if slot is None:
                continue
            if slot.state is State.FAILED and state is not State.FAILED:
                say("failed", reason=slot.reason)
            state = slot.state
            if slot.num_rounds != num_rounds and report is not None:
                num_rounds = slot.num_rounds
                busy_seconds = report.copy_seconds + report.verify_seconds
                say(
                    "updated",
                    version=report.version,
                    origin=report.origin,
                    strategy=report.strategy,
                    nbytes=report.nbytes,
                    pause_ms=1000 * slot.pause_seconds,
                    gb_per_second=report.nbytes / 1e9 / max(busy_seconds, 1e-9),
                )


if __name__ == "__main__":
    obey()
    serve(sys.argv[1], Places(Path(sys.argv[2]), Path(sys.argv[3])), sys.argv[4])
