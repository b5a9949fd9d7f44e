"""The demo's trainer: a process that learns from what the engines answer, and publishes each step.

    python -m flyweight.demo.trainer RUN SOCKETS SIZE NUM_ENGINES SEED AFTER

It goes on from the newest snapshot, if there is one, until it is told to end. Steps may be
taken twice, by a trainer and by the one after it; versions are numbered on, after those that
were told to engines, so that a number is always the same weights.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter, sleep

import numpy as np
import torch

from flyweight.demo.channel import Generate, Generated, Line
from flyweight.demo.children import obey, say
from flyweight.demo.policy import Digits, Policy, digests, improve
from flyweight.demo.setting import SETTINGS, Places, engine_names
from flyweight.errors import TransferTimeout, TransportError
from flyweight.live.publisher import Publisher
from flyweight.verbs.find import prune, versions
from flyweight.verbs.load import load
from flyweight.verbs.save import save

_ANSWER_SECONDS = 20.0
_JOIN_SECONDS = 60.0
_ROUND_SECONDS = 5.0
_REST_SECONDS = 0.05
_KEPT = 3
_STAY_SECONDS = 600.0


class Trainer:
    """The policy, its optimizer, and how far they are."""

    def __init__(self, places: Places, size: str, num_engines: int, seed: int, after: int) -> None:
        """Go on from the newest snapshot, or begin; the first version is the one after `after`."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._places, self._setting, self._seed = places, SETTINGS[size], seed
        self._names = engine_names(num_engines)
        self._lines = [Line(places.socket(name)) for name in self._names]
        self._pool = ThreadPoolExecutor(num_engines, "demo-rollouts")
        self.policy = Policy(self._setting)
        self._optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=self._setting.learning_rate, betas=(0.9, 0.95)
        )
        self.step, self.version = 0, after + 1
        self._num_reached = 0
        self.recovered = self._recover()

    def _recover(self) -> int | None:
        """Take over the newest snapshot, in place, and return its version; None without one."""
        if not versions(self._places.training):
            return None
        for each in self.policy.parameters():
            each.grad = torch.zeros_like(each)
        self._optimizer.step()  # so that its moments are there and can be loaded into
        state = self._state()
        report = load(self._places.training, into=state)
        self.step = int(str(state["step"]))
        return report.version

    def _state(self) -> dict[str, object]:
        moments = self._optimizer.state_dict()["state"]
        return {"policy": self.policy, "moments": moments, "step": self.step}

    def save(self) -> None:
        """Leave a snapshot: what engines start from, and what a trainer goes on from."""
        started = perf_counter()
        save(self.policy, self._places.store, version=self.version)
        save(self._state(), self._places.training, version=self.version)
        say("saved", version=self.version, step=self.step, seconds=perf_counter() - started)
        for path in (self._places.store, self._places.training):
            prune(path, keep=_KEPT)

    # One step.

    def train(self) -> None:
        """Take a step by what the engines answer; none if they all hold other versions.

        Either way there is a version to publish then.
        """
        started = perf_counter()
        prompts, answers, num_stale = self._rollouts()
        self.version += 1
        if not len(answers):
            return
        reward = improve(self.policy, self._optimizer, prompts, answers, self._setting.num_samples)
        self.step += 1
        say(
            "step",
            step=self.step,
            version=self.version,
            reward=reward,
            num_answers=len(answers),
            num_stale=num_stale,
            seconds=perf_counter() - started,
        )

    def _rollouts(self) -> tuple[Digits, Digits, int]:
        """Return prompts, the answers of this very version, and how many came of others."""
        setting, deadline = self._setting, monotonic() + _JOIN_SECONDS
        random = np.random.default_rng((self._seed, self.step))
        shape = setting.num_prompts, setting.num_digits
        prompts = random.integers(0, 10, shape, dtype=np.uint8)
        shares = [
            np.repeat(share, setting.num_samples, 0)
            for share in np.array_split(prompts, len(self._lines))
        ]
        seeds = [int(seed) for seed in random.integers(0, 2**62, len(shares))]
        while True:
            came = list(self._pool.map(self._ask, self._lines, shares, seeds))
            if any(came):
                break
            if monotonic() > deadline:
                raise TransferTimeout(f"no engine answered in {_JOIN_SECONDS:g} s")
            sleep(_REST_SECONDS)
        questions, answers, num_stale = [prompts[:0]], [prompts[:0]], 0
        for share, answer in zip(shares, came, strict=True):
            if answer is not None and answer.version == self.version:
                questions.append(share)
                answers.append(np.frombuffer(answer.answers, np.uint8).reshape(share.shape))
            elif answer is not None:
                num_stale += len(share)
        return np.concatenate(questions), np.concatenate(answers), num_stale

    @staticmethod
    def _ask(line: Line, prompts: Digits, seed: int) -> Generated | None:
        try:
            return line.generate(Generate(prompts.tobytes(), seed), _ANSWER_SECONDS)
        except TransportError:  # it was killed, or holds nothing yet; the others answer
            return None

    # Publishing.

    def publish(self, publisher: Publisher) -> None:
        """Give the version to every engine that is connected."""
        say("publishing", version=self.version)
        deadline = monotonic() + _JOIN_SECONDS
        while True:
            try:
                report = publisher.publish(
                    self.version,
                    num_replicas=len(publisher.replicas),
                    timeout_seconds=_ROUND_SECONDS,
                )
                break
            except TransferTimeout:  # one was killed before it asked; those that are left do
                if monotonic() > deadline:
                    raise
        self._num_reached = len(report.replicas) - len(report.failed)
        say(
            "published",
            version=self.version,
            step=self.step,
            ms=1000 * report.seconds,
            nbytes=report.nbytes,
            gb_per_second=report.gb_per_second,
            num_replicas=self._num_reached,
            failed=[f"{each.name}: {each.error}" for each in report.failed],
        )

    def gather(self, publisher: Publisher) -> None:
        """Wait until every engine is connected."""
        deadline = monotonic() + _JOIN_SECONDS
        while len(publisher.replicas) < len(self._names):
            if monotonic() > deadline:
                raise TransferTimeout(
                    f"{len(publisher.replicas)} of {len(self._names)} engines came in "
                    f"{_JOIN_SECONDS:g} s"
                )
            sleep(_REST_SECONDS)

    def finish(self, publisher: Publisher) -> None:
        """Have every engine hold the last weights, and tell what those are."""
        while self._num_reached < len(self._names):
            self.gather(publisher)
            self.version += 1
            self.publish(publisher)
        say("finished", version=self.version, step=self.step, digests=digests(self.policy))


def run(trainer: Trainer, places: Places, is_over: threading.Event, snapshot_every: int) -> None:
    """Train until told to end; then stay until the parent ends."""
    say(
        "started",
        recovered=trainer.recovered,
        step=trainer.step,
        version=trainer.version,
        num_parameters=sum(each.numel() for each in trainer.policy.parameters()),
    )
    with Publisher(trainer.policy, places.address, store=places.store) as publisher:
        trainer.gather(publisher)
        trainer.publish(publisher)
        while not is_over.is_set():
            trainer.train()
            trainer.publish(publisher)
            if trainer.step % snapshot_every == 0:
                trainer.save()
        trainer.finish(publisher)
        threading.Event().wait(_STAY_SECONDS)  # a publisher, until all was compared


if __name__ == "__main__":
    ending = threading.Event()
    obey(lambda word: ending.set())
    where = Places(Path(sys.argv[1]), Path(sys.argv[2]))
    run(
        Trainer(where, sys.argv[3], *map(int, sys.argv[4:7])),
        where,
        ending,
        SETTINGS[sys.argv[3]].snapshot_every,
    )
