"""The engine of the demo: a process that answers prompts with whatever version it holds.

    python examples/demo/engine.py NAME RUN SCRATCH SIZE

It starts with empty weights. It knows the trainer's address and the directory of snapshots, which
it loads while no trainer answers, so a new process can replace one that was killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import torch
from policy import Policy, digests, generate
from processes import answer_requests, exit_with_parent, say
from settings import SIZES, Paths

import flyweight as fw
from flyweight.errors import LifecycleError
from flyweight.events import listening
from flyweight.lifecycle.states import State

_REQUEST_SECONDS = 20.0


def main(name, paths, size):
    torch.set_num_threads(1)
    policy = Policy(size)
    for each in policy.parameters():
        torch.nn.init.zeros_(each)
    engine = fw.ModelEngine(policy)

    def answer(question):
        try:
            with engine.request(_REQUEST_SECONDS) as version:
                if question == "digests":
                    return version, digests(policy)
                prompts, seed = question
                return version, generate(policy, prompts, seed)
        except LifecycleError:  # there are no weights yet
            return None

    replica = fw.Replica(policy, paths.address, name=name, fallback=[paths.store])
    worker = fw.Worker(engine, replica, paths.cell(name))
    with listening(StateReporter(worker)), worker:
        answer_requests(paths.socket(name), answer)


class StateReporter:
    """Tells the parent of each change of the engine's state, and of each version it took."""

    def __init__(self, worker):
        self._worker, self._report, self._paused_at = worker, None, None

    def __call__(self, event):
        if event.kind != "state.changed":
            return
        operations, state = self._worker.operations, event.fields["state"]
        is_incomplete = state in (State.UPDATING, State.VERIFYING)
        version = None if is_incomplete else operations.version
        say("state", state=state, version=version, reason=str(operations.failure or ""))
        if state == State.PAUSING:
            self._paused_at = perf_counter()
        elif state == State.FAILED:
            self._paused_at = None
        elif state == State.SERVING:
            if operations.report is not self._report:
                self._report = operations.report
                self._tell_update(self._report)
            self._paused_at = None

    def _tell_update(self, report):
        pause = None if self._paused_at is None else 1000 * (perf_counter() - self._paused_at)
        say(
            "updated",
            version=report.version,
            is_live=report.transport != "files",
            pause_ms=pause,  # None after a start: there were no weights to answer with
            gb_per_second=report.nbytes / 1e9 / max(report.copy_seconds, 1e-9),
        )


if __name__ == "__main__":
    exit_with_parent()
    main(sys.argv[1], Paths(Path(sys.argv[2]), Path(sys.argv[3])), SIZES[sys.argv[4]])
