"""A trainer and engines on hosts of their own, which carry out what a test asks for.

    with two_hosts() as hosts, Remote(hosts.a, Trainer) as trainer:
        with Remote(hosts.b, Engine, trainer.address) as engine:
            published(trainer, 1, engine)

A message can be stopped on its way (`stop_before`), so that a fault comes at that moment.
"""

import resource
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import flyweight as fw
from child_processes import resources, settled, until
from flyweight.live import messages
from flyweight.live import publisher as publishers
from flyweight.live.connection import Connection
from flyweight.ranks.file_store import FileStore
from flyweight.ranks.rendezvous import Rendezvous
from source_rank_processes import assign_part, part_of
from versioned_models import assign, holding, nbytes_of, weights

TOKEN = "the token of these tests"
SECONDS = 20
MIB = 1 << 20


@dataclass(frozen=True)
class Raised:
    """What a call in another process raised."""

    kind: str
    text: str


class Remote:
    """A process on a host that carries out calls, one after the other."""

    def __init__(self, host, kind, *args, is_awaited=True, **options):
        self._child = host.child(_carry_out, kind, args, options)
        self.kill, self.stop, self.go_on = self._child.kill, self._child.stop, self._child.go_on
        self.pid, self.join = self._child.pid, self._child.join
        if is_awaited:
            self.made()

    def made(self):
        """Wait until it is made, and has its address."""
        self.address = self.end()
        if isinstance(self.address, Raised):
            self.__exit__()
            raise AssertionError(self.address)

    def start(self, name, *args, **options):
        """Start a call; `end` returns its result."""
        self._child.send((name, args, options))

    def end(self, timeout=SECONDS):
        """Return what a call returned, or Raised."""
        kind, value = self._child.told(timeout)
        assert kind == "done", value
        return value

    def ask(self, name, *args, **options):
        self.start(name, *args, **options)
        return self.end()

    def stopped(self):
        """Wait until the process comes to the message that it stops before."""
        assert self._child.told() == ("stopped", None)

    def pass_on(self):
        """Let it send the message."""
        self._child.send("go on")

    @property
    def has_ended(self):
        """True if `end` returns at once."""
        return self._child.has_told

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._child.__exit__(*raised)


def _carry_out(kind, args, options, pipe):
    def answer(function, *args, **options):
        try:
            found = function(*args, **options)
        except Exception as error:
            found = Raised(type(error).__name__, str(error))
        pipe.send(("done", found))

    actor = kind(pipe)
    answer(actor.make, *args, **options)
    while (command := pipe.recv()) is not None:
        name, args, options = command
        answer(getattr(actor, name), *args, **options)


class Actor:
    """What trainers and engines have in common."""

    def __init__(self, pipe):
        self._pipe, self.is_armed = pipe, False
        self._before = None

    def stop_before(self, kind):
        """Stop before the next message of a kind, until the test lets it pass."""
        send, pipe = Connection.send, self._pipe
        self.is_armed = True

        def stopping_send(connection, message, to=b""):
            if self.is_armed and type(message).__name__ == kind:
                self.is_armed = False
                pipe.send(("stopped", None))
                pipe.recv()
            return send(connection, message, to)

        Connection.send = stopping_send

    def remember(self):
        """Remember what this process uses now."""
        time.sleep(0.05)  # a thread of the last round may end just now
        self._before = resources(), _resident_bytes()

    def left(self):
        """Return which threads and files came since `remember`, and how many bytes of memory."""
        before, resident = self._before
        now = settled(before)
        changed = {key: (before[key], now[key]) for key in before if before[key] != now[key]}
        return changed, _resident_bytes() - resident


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Trainer(Actor):
    """A publisher, by default of the weights that `versioned_models` makes."""

    def make(self, ip=None, port=0, model=None, nbytes=1 << 18, **options):
        self.model = weights(0, nbytes) if model is None else model
        if callable(model):  # what cannot be made before the process is on its host
            self.model = model()
        options = {"token": TOKEN, "timeout_seconds": SECONDS, **options}
        self.publisher = fw.Publisher(self.model, f"tcp://{ip}:{port}", **options)
        return self.publisher.address

    def publish(self, version, **options):
        """Publish a version; return how it reached each replica, or why it did not."""
        self.assign(version)
        return self._told(self.publisher.publish(version, **options))

    def assign(self, version):
        if isinstance(self.model, dict) and "embed" in self.model:
            assign(self.model, version)

    @staticmethod
    def _told(report):
        return {each.name: str(each.error or each.strategy) for each in report.replicas}

    def lease(self, version, **options):
        """Publish in the background, and change the weights as soon as that is allowed."""
        assign(self.model, version)
        lease = self.publisher.publish(version, background=True, **options)
        lease.wait_copied(SECONDS)
        assign(self.model, 0)
        return self._told(lease.wait(SECONDS))

    def wait_for(self, number):
        """Wait until that many replicas wait for a version."""
        until(lambda: len(self.publisher.waiting) >= number)

    def replicas(self):
        return self.publisher.replicas

    def replace(self):
        """Put other memory in the place of the model's, and give the old one back."""
        for name in list(self.model):
            self.model[name] = np.full_like(self.model[name], 0)

    def close(self):
        self.publisher.close()


class TrainerRank(Trainer):
    """One of three ranks that hold a model together."""

    def make(self, ip, rank, directory, **options):
        self.rank = rank
        found = Rendezvous(rank, 3, FileStore(directory), "trainer", host=ip)
        publishers.rendezvous_for = lambda *args: found
        return super().make(ip, model=part_of(rank, 0), **options)

    def assign(self, version):
        assign_part(self.model, self.rank, version)


class Engine(Actor):
    """A replica."""

    def make(self, address, model=None, nbytes=1 << 18, name="engine", **options):
        self.model = weights(999, nbytes) if model is None else model
        self.replica = fw.Replica(self.model, address, **{"token": TOKEN, "name": name, **options})
        return address

    def update(self, version=None, **options):
        """Take a version; return its number, and how it came."""
        report = self.replica.update(version, **{"timeout_seconds": SECONDS, **options})
        return report.version, report.strategy

    def held(self, versions=range(6)):
        """Return the replica's state and version, and which version its bytes are of."""
        return self.replica.state, self.replica.version, holding(self.model, versions)

    def bytes(self):
        """Return the bytes of every tensor."""
        local = {k: v.tensor if isinstance(v, fw.Sharded) else v for k, v in self.model.items()}
        return {name: np.asarray(each).tobytes() for name, each in local.items()}

    def verified(self):
        return self.replica.report.verified

    def close(self):
        self.replica.close()


def published(trainer, version, *engines, strategy="network", **options):
    """Publish a version to engines; each must hold it, and every byte of it."""
    for each in engines:
        each.start("update")
    trainer.start("publish", version, num_replicas=len(engines), **options)
    assert [each.end() for each in engines] == [(version, strategy)] * len(engines)
    report = trainer.end()
    assert set(report.values()) == {strategy}
    for each in engines:
        assert each.ask("held", (version,)) == ("ready", version, version)
    return report
