"""A trainer and engines on hosts of their own, which carry out what a test asks for.

    with two_hosts() as hosts, Remote(hosts.a, Trainer) as trainer:
        with Remote(hosts.b, Engine, trainer.address) as engine:
            published(trainer, 1, engine)

A message can be stopped on its way (`stop_before`), so that a fault comes at that moment.
"""

import ctypes
import gc
import resource
import threading
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, resources
from flyweight.live import publisher as publishers
from flyweight.live.connection import Connection
from flyweight.ranks.file_store import FileStore
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.transports import tcp
from flyweight.transports.data_sockets import DataConnection
from flyweight.transports.network_engines import NIXL_INSTALL, engines_here
from versioned_models import assign, holding, weights

TOKEN = "the token of these tests"
SECONDS = LIMIT
MIB = 1 << 20
MARK = 0xA5
PART_BYTES = 8 * MIB
needs_nixl = pytest.mark.skipif(
    not engines_here().nixl, reason=f"NIXL is not installed: {NIXL_INSTALL}"
)


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
            try:
                self.made()
            except BaseException:
                self.__exit__()
                raise

    def made(self):
        """Wait until it is made, and has its address."""
        self.address = self.end()
        assert not isinstance(self.address, Raised), self.address

    def start(self, name, *args, **options):
        """Start a call; `end` returns its result."""
        self._child.send((name, args, options))

    def end(self, timeout=2 * LIMIT):
        """Return what a call returned, or Raised: it may end by a deadline of `LIMIT` of its own."""
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
        """Remember what this process uses, once that has not changed for a while.

        Threads and files of the last round end soon after it. Those that end later, as on a busy
        machine, are remembered too, so that `left` finds fewer then.
        """
        deadline, since, found = time.monotonic() + LIMIT, time.monotonic(), resources()
        while time.monotonic() < min(since + 0.5, deadline):
            time.sleep(0.02)
            if (now := resources()) != found:
                since, found = time.monotonic(), now
        self._before = found, _resident_bytes()

    def left(self, num_streams):
        """Return which threads and files came since `remember`, and how many bytes of memory.

        num_streams: how many more connections for data there may be: a thread that finds no bucket
            to fetch makes none.
        """
        (before, resident), deadline = self._before, time.monotonic() + LIMIT
        while (came := _came_since(before, num_streams)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return came, _resident_bytes() - resident


def _came_since(before, num_streams):
    before, now = _counted(before), _counted(resources())
    if now["socket"] <= before["socket"] + num_streams:
        del now["socket"], now["flyweight-data"]  # the threads that serve them
    return dict(now - before)


def _counted(found):
    return Counter([*found["threads"], *found["files"], *["mapped"] * found["mapped"]])


def _resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Trainer(Actor):
    """A publisher, by default of the weights that `versioned_models` makes."""

    def make(self, ip=None, port=0, model=None, nbytes=1 << 18, **options):
        self.model = weights(0, nbytes) if model is None else model
        if callable(model):  # what cannot be made before the process is on its host
            self.model = model()
        options = {"token": TOKEN, "timeout_seconds": LIMIT, **options}
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
        lease.wait_copied(LIMIT)
        assign(self.model, 0)
        return self._told(lease.wait(LIMIT))

    def replicas(self):
        return self.publisher.replicas

    def num_waiting(self):
        return len(self.publisher.waiting)

    def connections(self):
        """Return how many connections from other hosts are open, beside those that are closing."""
        with open("/proc/self/net/tcp") as file:
            return sum(line.split()[3] == "01" for line in list(file)[1:])

    def publish_other_memory(self, version, **options):
        """Free the model's memory, and publish a version from other memory."""
        for name, array in self.model.items():
            self.model[name] = np.zeros_like(array)
        return self.publish(version, **options)


class TrainerRank(Trainer):
    """A rank that holds some rows of a tensor whose every byte is the version."""

    def make(self, ip, rank, num_ranks, directory, **options):
        found = Rendezvous(rank, num_ranks, FileStore(directory), "trainer", host=ip)
        publishers.rendezvous_for = lambda *args: found
        rows = np.zeros((1, PART_BYTES), np.uint8)
        part = fw.Sharded(rows, (num_ranks, PART_BYTES), (rank, 0))
        return super().make(ip, model={"w": part}, **options)

    def assign(self, version):
        self.model["w"].tensor[:] = version


class Engine(Actor):
    """A replica."""

    def make(self, address, model=None, nbytes=1 << 18, name="engine", **options):
        self.model = weights(999, nbytes) if model is None else model
        self.replica = fw.Replica(self.model, address, **{"token": TOKEN, "name": name, **options})
        return address

    def update(self, version=None, **options):
        """Take a version; return its number, and how it came."""
        report = self.replica.update(version, **{"timeout_seconds": LIMIT, **options})
        return report.version, report.strategy

    def held(self, versions=range(6)):
        """Return the replica's state and version, and which version its bytes are of."""
        return self.replica.state, self.replica.version, holding(self.model, versions)

    def state(self):
        return self.replica.state, self.replica.version

    def close(self):
        self.replica.close()

    def bytes(self):
        """Return the bytes of every tensor."""
        local = {k: v.tensor if isinstance(v, fw.Sharded) else v for k, v in self.model.items()}
        return {name: np.asarray(each).tobytes() for name, each in local.items()}

    def verified(self):
        return self.replica.report.verified

    def look_at_staging(self):
        """Keep the memory that the buckets of a round arrive in, for `mark_staging`."""
        fetches = self.replica._publisher.connection.source.fetches.values()
        self._staging = {fetch.slot: fetch.into for fetch in fetches}
        return len(self._staging)

    def mark_staging(self):
        """Overwrite it, and remember the weights."""
        for each in self._staging.values():
            each.flat()[:] = MARK
        self._live = self.bytes()

    def late_bytes(self):
        """Return how many bytes have arrived since `mark_staging`, in staging and in weights."""
        staged = sum(int((each.flat() != MARK).sum()) for each in self._staging.values())
        now = self.bytes()
        found = staged, [name for name in now if now[name] != self._live[name]]
        self._staging = self._live = None
        return found

    def break_stream(self, when):
        """Let one of the next reads lose its connection before or after its first bytes."""
        read, self._is_broken = DataConnection.read, False
        tcp._MAX_RECEIVE_BYTES = 1 << 16  # or the first bytes may be all of them

        def breaking(connection, key, offset, into, *, on_progress, **options):
            def break_once(now):
                if now == when and not self._is_broken and len(into) > tcp._MAX_RECEIVE_BYTES:
                    self._is_broken = True
                    connection._socket.close()

            def progress(nbytes):
                on_progress(nbytes)
                break_once("after")

            break_once("before")
            return read(connection, key, offset, into, on_progress=progress, **options)

        DataConnection.read = breaking

    def has_broken(self):
        return self._is_broken

    def update_until_told(self):
        """Update, and close the replica meanwhile, as soon as the test lets it."""

        def close():
            self._pipe.recv()
            self.replica.close()

        thread = threading.Thread(target=close)
        thread.start()
        try:
            return self.update()
        finally:
            thread.join()


def published(trainer, version, *engines, strategy="network", **options):
    """Publish a version to engines; each must hold it, and every byte of it."""
    for each in engines:
        each.start("update", version)
    trainer.start("publish", version, num_replicas=len(engines), **options)
    assert [each.end() for each in engines] == [(version, strategy)] * len(engines)
    report = trainer.end()
    assert set(report.values()) == {strategy}
    for each in engines:
        assert each.ask("held", (version,)) == ("ready", version, version)
    return report
