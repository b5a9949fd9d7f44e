"""Trainers and engines in processes of their own, which do what a test tells them over a pipe.

Every element of a model depends on its version, so a test can tell a complete version from a mix.
"""

import mmap
import os
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import count
from queue import SimpleQueue

import numpy as np

from child_processes import FORK, LIMIT, Child, until
from flyweight.adapters.sharded import Sharded
from flyweight.errors import FlyweightError
from flyweight.live import Publisher, Replica, fetch
from flyweight.live.holder import Conversation
from flyweight.live.incoming import Incoming
from flyweight.live.lease_book import LeaseBook
from flyweight.live.reader import Reader
from flyweight.live.relay import Relay
from flyweight.live.rows import RowCopies
from flyweight.live.shelf import Shelf
from flyweight.live.staging import Staging

TOKEN = "a token that nobody guesses"
SHAPES = {"embedding": (300, 40), "layer.weight": (64, 128), "layer.bias": (128,), "scale": ()}
LARGE = {f"layer.{n}": (1024, 1024) for n in range(16)}  # 64 MiB

POINTS = {
    "found": (Replica, "_fetch", "before"),
    "reclaiming": (Shelf, "reclaim", "before"),
    "withdrawn": (LeaseBook, "withdraw", "after"),
    "leasing": (Shelf, "lease", "before"),
    "leased": (Reader, "lease", "after"),
    "asking": (Reader, "wait", "before"),
    "range": (Staging, "arrived", "before"),
    "fill": (Conversation, "_fill", "before"),
    "filled": (Conversation, "_fill", "after"),
    "copy": (Incoming, "copy", "before"),
    "copied": (Incoming, "copy", "after"),
    "announcing": (Shelf, "announce", "before"),
    "serving": (Shelf, "wait_served", "before"),
    "copying": (RowCopies, "start", "before"),
}
"""The points at which tests stop a process or break something, before or after a method of ours."""


@contextmanager
def at(point, act):
    """Call `act` whenever this process comes to a point, with how often it came there before."""
    kind, name, when = POINTS[point]
    method, numbers = getattr(kind, name), count()

    @wraps(method)
    def hooked(*arguments, **options):
        number = next(numbers)
        if when == "before":
            act(number)
        found = method(*arguments, **options)
        if when == "after":
            act(number)
        return found

    setattr(kind, name, hooked)
    try:
        yield
    finally:
        setattr(kind, name, method)


def once(act, number=0):
    """Return a function for `at` that acts at one time only."""
    return lambda found: act() if found == number else None


def values(name, shape, version):
    """Return all elements of a tensor at a version."""
    seed = sum(name.encode()) + 977 * version
    numbers = np.arange(int(np.prod(shape)), dtype=np.uint32)
    return (numbers * np.uint32(2 * version + 1) + np.uint32(seed & 0xFFFFFFFF)).reshape(shape)


def shared(shape):
    """Return an array in memory that other processes can map, as torch's share_memory_ makes."""
    num_items = int(np.prod(shape))
    nbytes = 4 * max(num_items, 1)
    file = os.memfd_create("tensor")
    os.posix_fallocate(file, 0, nbytes)
    array = np.frombuffer(mmap.mmap(file, nbytes), np.uint32)[:num_items].reshape(shape)
    os.close(file)  # the mapping has a file of its own
    return array


def plain(shape):
    """Return an array in memory that no other process can map."""
    return np.zeros(shape, np.uint32)


def cut(array, dim, rank, num_ranks):
    """Return a rank's part of an array, and its offset; small tensors are whole on every rank."""
    if array.ndim < 2:
        return array, (0,) * array.ndim
    size = array.shape[dim] // num_ranks
    offset = tuple(rank * size if each == dim else 0 for each in range(array.ndim))
    index = tuple(
        slice(start, start + size) if each == dim else slice(None)
        for each, start in enumerate(offset)
    )
    return array[index], offset


class Part:
    """A model, or one rank's part of it, whose whole tensors have known values."""

    def __init__(self, shapes, make=plain, rank=0, num_ranks=1, dim=0):
        self.shapes, self.cut = shapes, (dim, rank, num_ranks)
        self.arrays, self.model = {}, {}
        for name, shape in shapes.items():
            part, offset = cut(np.empty(shape, np.uint8), *self.cut)
            self.arrays[name] = array = make(part.shape)
            self.model[name] = array if num_ranks == 1 else Sharded(array, shape, offset)

    def fill(self, version):
        for name, array in self.arrays.items():
            array[...] = cut(values(name, self.shapes[name], version), *self.cut)[0]

    def is_complete(self, version):
        return all(
            np.array_equal(array, cut(values(name, self.shapes[name], version), *self.cut)[0])
            for name, array in self.arrays.items()
        )


def trainer(address, options, pipe):
    """Publish versions when told to; `("publish", version, options)` is answered with a report.

    stop_at: tell the test a point, such as "fill" or "serving", and wait there for a word.
    waiting: how many engines must wait for a version before it is published.
    """
    ranks = options.get("rank", 0), options.get("world_size", 1)
    part = Part(options.pop("shapes", SHAPES), options.pop("make", plain), *ranks)
    with Publisher(part.model, address, token=TOKEN, **options) as publisher, ExitStack() as stops:
        pipe.send(publisher.address)
        running, words = threading.Thread(), SimpleQueue()
        running.start()

        def publish(version, kwargs):
            stops.enter_context(_stopping(kwargs.pop("stop_at", None), pipe, words.get))
            num_waiting = kwargs.pop("waiting", 0) * (publisher.rank == 0)
            until(lambda: len(publisher.waiting) >= num_waiting)
            try:
                return publisher.publish(version, **kwargs)
            except FlyweightError as error:
                return error

        while True:
            match pipe.recv():
                case "publish", version, kwargs:
                    part.fill(version)
                    work = lambda *given: pipe.send(publish(*given))  # noqa: E731
                    running = threading.Thread(target=work, args=(version, kwargs))
                    running.start()
                case "publish in the background", version, kwargs:
                    part.fill(version)
                    running = threading.Thread(target=publish, args=(version, kwargs))
                    running.start()
                case "go on" as word:
                    words.put(word)
                case ("end of publish",):
                    running.join(LIMIT)
                    pipe.send("ended")
                case "train", version:
                    part.fill(version)
                    pipe.send("trained")
                case "await", number:
                    until(lambda number=number: len(publisher.waiting) >= number)
                    pipe.send("waiting")
                case ("until lost",):
                    until(lambda: not publisher.replicas)
                    pipe.send("lost")
                case ("withdraw",):
                    publisher.withdraw()
                    pipe.send("withdrawn")
                case ("fork",):
                    child = os.fork()
                    if child == 0:
                        signal.pause()
                    pipe.send(child)
                case ("is an engine waiting",):
                    until(lambda: publisher.waiting)
                    pipe.send("waiting")
                case ("sent bytes",):
                    pipe.send(publisher.shelf.all_sent_bytes())
                case ("close",):
                    publisher.close()
                    pipe.send("closed")


def engine(address, options, pipe):
    """Update when told to; `("update", options)` is answered with what the replica then holds.

    stop_at: tell the test "before" or a point, such as "copy" or "range 5", and wait there.
    stall_seconds: how long a holder may make no progress.
    num_connections: how many bring ranges; one brings them in order.
    host: the name of a host of its own: it maps no memory of others.
    is_spoiled: whether it passes wrong bytes on.
    """
    os.environ["FLYWEIGHT_HOST"] = options.pop("host", "")  # one of its own, or that of all
    if options.pop("is_spoiled", False):  # what it passes on is wrong
        Staging.parts = lambda self, plan, rank, start, stop: [np.full(stop - start, 7, np.uint8)]
    ranks = options.get("rank", 0), options.get("world_size", 1)
    part = Part(options.pop("shapes", SHAPES), options.pop("make", plain), *ranks, dim=1)
    fetch.STALL_SECONDS = options.pop("stall_seconds", LIMIT)
    fetch.NUM_CONNECTIONS = options.pop("num_connections", fetch.NUM_CONNECTIONS)
    with Replica(part.model, address, **{"token": TOKEN, **options}) as replica:
        pipe.send(replica.serves_at)
        while True:
            _, kwargs = pipe.recv()
            stop_at = kwargs.pop("stop_at", None)
            error, report = None, None

            def before(version, stop_at=stop_at):
                if stop_at == "before":
                    _stop(pipe, stop_at, pipe.recv)

            with _stopping(stop_at if stop_at != "before" else None, pipe, pipe.recv):
                try:
                    report = replica.update(before=before, **kwargs)
                except FlyweightError as found:
                    error = f"{type(found).__name__}: {found}"
            version = replica.version
            is_complete = version is not None and part.is_complete(version)
            found = {"version": version, "is_complete": is_complete, "state": str(replica.state)}
            pipe.send({**found, "error": error, "report": report})


def relay(address, on, pipe):
    """Run a relay, and say where it serves once it does."""
    found = Relay(address, on, token=TOKEN)

    def tell():
        until(lambda: found.holder is not None)
        pipe.send(found.address)

    threading.Thread(target=tell).start()
    found.run()


def _stop(pipe, point, hear):
    pipe.send(point)
    assert hear() == "go on"


@contextmanager
def _stopping(stop_at, pipe, hear):
    """Tell the test once this process comes to a point, and wait there for a word."""
    if stop_at is None:
        yield
        return
    point, _, number = stop_at.partition(" ")
    with at(point, once(lambda: _stop(pipe, stop_at, hear), int(number or 0))):
        yield


def check_holds(found, version):
    """Check that an engine holds a version, every element of it."""
    assert found["version"] == version, found
    assert found["is_complete"], found


def check_next_update(trainers, engines, version):
    """Check that all of them work together after a fault: invariant 12 of the protocol.

    Engines have as many ranks as the trainer.
    """
    num_engines = len(engines) // len(trainers)
    for each in engines:
        each.send(("update", {"version": version, "timeout_seconds": LIMIT}))
    for each in trainers:
        each.send(("publish", version, {"num_replicas": num_engines, "timeout_seconds": LIMIT}))
    for each in engines:
        check_holds(each.told(), version)
    for each in trainers:
        report = each.told()
        assert not isinstance(report, FlyweightError), report
        assert not report.failed, report


def free_address():
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


class Processes:
    """Starts trainers and engines, and ends them with the test."""

    def __init__(self):
        self._stack = ExitStack()

    def trainer(self, address="tcp://127.0.0.1:0", **options):
        return self._stack.enter_context(Child(trainer, address, options, context=FORK))

    def engine(self, address, **options):
        return self._stack.enter_context(Child(engine, address, options, context=FORK))

    def relay(self, address, on):
        found = self._stack.enter_context(Child(relay, address, on, context=FORK))
        assert isinstance(said := found.told(), str), said
        return found

    def pair(self, *, transport="auto", name="engine", shapes=SHAPES, **options):
        """Return a trainer and an engine of it."""
        source = self.trainer(shapes=shapes, **options)
        sink = self.engine(source.told(), name=name, transport=transport, shapes=shapes)
        sink.told()
        return source, sink

    def ranks(self, address, transport="auto", **source):
        """Return two ranks of a trainer, cut by rows, and two of an engine, cut by columns."""
        trainers = [self.trainer(address, rank=rank, world_size=2, **source) for rank in (0, 1)]
        for each in trainers:
            each.told()
        options = {"name": "engine", "transport": transport, "world_size": 2}
        engines = [self.engine(address, rank=rank, **options) for rank in (0, 1)]
        for each in engines:
            each.told()
        return trainers, engines

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._stack.close()
