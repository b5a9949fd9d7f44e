"""Replicas on hosts of their own that read from each other, and what happens when some fail."""

import os
import resource
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import flyweight as fw
from child_processes import resources, settled, until
from netns import fleet

TOKEN = "a token of the tests"
KIB, MIB = 1 << 10, 1 << 20


def model_of(nbytes, num_tensors=16):
    return {f"w{i}": np.zeros(nbytes // num_tensors // 4, np.float32) for i in range(num_tensors)}


def fill(model, version):
    for number, each in enumerate(model.values()):
        each[:] = 1000 * version + number


def holds(model, version):
    return all((each == 1000 * version + i).all() for i, each in enumerate(model.values()))


def trainer(address, nbytes, options, pipe):
    """Publish whenever the test says so: a version, the number of replicas and the time for it."""
    model = model_of(nbytes)
    with fw.Publisher(model, address, token=TOKEN, **options) as publisher:
        pipe.send(publisher.address)
        while (order := pipe.recv()) is not None:
            version, num_replicas, seconds = order
            fill(model, version)
            report = publisher.publish(version, num_replicas=num_replicas, timeout_seconds=seconds)
            failed = {each.name: str(each.error) for each in report.failed}
            pipe.send((sorted(each.name for each in report.replicas), failed, report.seconds))


def engine(address, name, nbytes, pipe):
    """Update whenever the test says so; say what is held then."""
    model, before = model_of(nbytes), resources()
    with fw.Replica(model, address, token=TOKEN, name=name) as replica:
        pipe.send("joined")
        while (order := pipe.recv()) is not None:
            error = ""
            try:
                replica.update(timeout_seconds=order)
            except fw.FlyweightError as found:
                error = f"{type(found).__name__}: {found}"
            version = replica.version
            pipe.send((version, version is None or holds(model, version), error))
    assert settled(before) == before


class Fleet:
    """A trainer and an engine on each of the other hosts."""

    def __init__(self, stack, num_members, nbytes, *, rate=None, run=engine, **options):
        self.host, self.hosts = stack.enter_context(fleet(num_members, rate=rate))
        self.nbytes, self.version = nbytes, 0
        address = f"tcp://{self.host.ip}:0"
        self.trainer = stack.enter_context(self.host.child(trainer, address, nbytes, options))
        self.address = self.trainer.told()
        self.engines = []
        for i, host in enumerate(self.hosts):  # in turn: the fan-out has the order of joining
            self.engines.append(stack.enter_context(host.child(run, self.address, f"e{i}", nbytes)))
            assert self.engines[-1].told() == "joined"

    def begin(self, seconds=20, engines=None):
        """Start a round with these engines."""
        engines = self.engines if engines is None else engines
        self.version += 1
        for each in engines:
            each.send(seconds)
        self.trainer.send((self.version, len(engines), seconds))

    def publish(self, seconds=20, engines=None):
        """Run a round; return how many times the model has left the trainer."""
        engines = self.engines if engines is None else engines
        sent = self.host.sent_bytes()
        self.begin(seconds, engines)
        names, failed, self.seconds = self.trainer.told(seconds + 20)
        assert (len(names), failed) == (len(engines), {})
        assert [each.told(seconds) for each in engines] == [(self.version, True, "")] * len(engines)
        return (self.host.sent_bytes() - sent) / self.nbytes

    def end(self, engines=None):
        for each in (*(self.engines if engines is None else engines), self.trainer):
            each.send(None)
            each.result()


@contextmanager
def fanned_out(*args, **options):
    with ExitStack() as stack:
        yield Fleet(stack, *args, **options)


def test_each_replica_of_a_chain_gets_every_version_and_the_trainer_sends_it_once():
    with fanned_out(3, 2 * MIB, bucket_bytes=128 * KIB) as fan:
        for _ in range(4):
            assert fan.publish() <= 1.1
        fan.end()
