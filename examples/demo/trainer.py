"""The trainer of the demo: a process that learns from the engines' answers, and publishes.

    python examples/demo/trainer.py RUN SCRATCH SIZE NUM_ENGINES SEED LAST_VERSION

It continues from the newest snapshot, if there is one. A trainer may repeat steps of the one
before it; versions go on after LAST_VERSION, so that a number always means the same weights.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter, sleep

import numpy as np
import torch
from policy import Policy, digests, improve
from processes import Requests, exit_with_parent, say
from settings import SIZES, Paths

import flyweight as fw
from flyweight.errors import TransferTimeout

_WAIT_SECONDS = 60.0
_ROUND_SECONDS = 5.0
_POLL_SECONDS = 0.05
_KEPT_SNAPSHOTS = 3
_NUM_PROMPTS = 24  # of one step, over all engines
_NUM_SAMPLES = 8  # answers to each prompt


class Trainer:
    """The policy, its optimizer, and the publisher of each version."""

    def __init__(self, paths, size, engines, seed, last_version):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._paths, self._size, self._seed = paths, size, seed
        self._engines = [Requests(paths.socket(name)) for name in engines]
        self._threads = ThreadPoolExecutor(len(engines))
        self._policy = Policy(size)
        self._optimizer = torch.optim.Adam(
            self._policy.parameters(), lr=size.learning_rate, betas=(0.9, 0.95)
        )
        self._step, self._version = 0, last_version + 1
        self._num_updated = 0

    def run(self, is_over):
        """Train until `is_over`, then see that every engine holds the last version."""
        say(
            "started",
            recovered=self._recover(),
            step=self._step,
            version=self._version,
            num_parameters=sum(each.numel() for each in self._policy.parameters()),
        )
        self._publisher = fw.Publisher(self._policy, self._paths.address)
        self._wait_for_engines()
        self._publish()
        while not is_over.is_set():
            self._train()
            self._publish()
            if self._step % self._size.snapshot_every == 0:
                self._save()
        while self._num_updated < len(self._engines):
            self._wait_for_engines()
            self._version += 1
            self._publish()
        say("finished", version=self._version, digests=digests(self._policy))

    # Snapshots.

    def _recover(self):
        """Load the newest snapshot in place, and return its version; None if there is none."""
        if not fw.versions(self._paths.training):
            return None
        for each in self._policy.parameters():
            each.grad = torch.zeros_like(each)
        self._optimizer.step()  # it creates the moments, which the snapshot is loaded into
        state = self._state()
        report = fw.load(self._paths.training, into=state)
        self._step = int(state["step"])
        return report.version

    def _state(self):
        moments = self._optimizer.state_dict()["state"]
        return {"policy": self._policy, "moments": moments, "step": self._step}

    def _save(self):
        started = perf_counter()
        fw.save(self._policy, self._paths.store, version=self._version)
        fw.save(self._state(), self._paths.training, version=self._version)
        say("saved", version=self._version, ms=1000 * (perf_counter() - started))
        for path in (self._paths.store, self._paths.training):
            fw.prune(path, keep=_KEPT_SNAPSHOTS)

    # Training.

    def _train(self):
        """Take a step with the engines' answers, unless all of them hold other versions."""
        prompts, answers, num_stale = self._rollouts()
        self._version += 1
        if not len(answers):
            return
        reward = improve(self._policy, self._optimizer, prompts, answers, _NUM_SAMPLES)
        self._step += 1
        say(
            "step",
            step=self._step,
            version=self._version,
            reward=reward,
            num_answers=len(answers),
            num_stale=num_stale,
        )

    def _rollouts(self):
        """Return prompts, the answers of this version, and the number of answers of others."""
        random = np.random.default_rng((self._seed, self._step))
        shape = _NUM_PROMPTS, self._size.num_digits
        prompts = random.integers(0, 10, shape, dtype=np.uint8)
        shares = [
            each.repeat(_NUM_SAMPLES, 0) for each in np.array_split(prompts, len(self._engines))
        ]
        seeds = random.integers(0, 2**62, len(shares)).tolist()
        questions = list(zip(shares, seeds, strict=True))
        deadline = monotonic() + _WAIT_SECONDS
        while True:
            replies = list(self._threads.map(Requests.ask, self._engines, questions))
            if any(replies):
                break
            _check_time(deadline, "no engine answered")
        asked, answers, num_stale = [prompts[:0]], [prompts[:0]], 0
        for share, reply in zip(shares, replies, strict=True):
            version, answer = reply or (None, None)
            if version == self._version:
                asked.append(share)
                answers.append(answer)
            elif reply is not None:
                num_stale += len(share)
        return np.concatenate(asked), np.concatenate(answers), num_stale

    # Publishing.

    def _publish(self):
        """Publish this version to every engine that is connected."""
        say("publishing", version=self._version)
        report = self._publisher.publish(
            self._version,
            num_replicas=len(self._publisher.replicas),
            timeout_seconds=_ROUND_SECONDS,  # for the others, if an engine is killed meanwhile
        )
        self._num_updated = len(report.replicas) - len(report.failed)
        say(
            "published",
            version=self._version,
            step=self._step,
            ms=1000 * report.seconds,
            nbytes=report.nbytes,
            num_replicas=self._num_updated,
        )

    def _wait_for_engines(self):
        deadline = monotonic() + _WAIT_SECONDS
        while len(self._publisher.replicas) < len(self._engines):
            found = f"{len(self._publisher.replicas)} of {len(self._engines)}"
            _check_time(deadline, f"{found} engines connected")


def _check_time(deadline, what):
    if monotonic() > deadline:
        raise TransferTimeout(f"{what} in {_WAIT_SECONDS:g} s")
    sleep(_POLL_SECONDS)


if __name__ == "__main__":
    ending = threading.Event()
    exit_with_parent(lambda word: ending.set())
    run, scratch, size, *numbers = sys.argv[1:]
    num_engines, seed, last_version = map(int, numbers)
    names = [f"engine-{number}" for number in range(1, num_engines + 1)]
    Trainer(Paths(Path(run), Path(scratch)), SIZES[size], names, seed, last_version).run(ending)
    threading.Event().wait(600)  # the publisher stays until the parent has compared all weights
