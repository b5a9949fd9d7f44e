"""An engine that fails where it is meant to, with a real trainer beside it."""

import threading
from contextlib import ExitStack, contextmanager

import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import LifecycleError
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State, Tag
from versioned_models import assign, holds, weights

WEIGHTS, KV_CACHE = frozenset({Tag.WEIGHTS}), frozenset({Tag.KV_CACHE})
STEPS = (
    "pause", "abort_requests", "drop_cache", "release_cache", "restore_cache", "release_experts",
    "release_weights", "release_groups", "restore_groups", "restore_weights", "restore_experts",
)  # fmt: skip


class FaultyEngine(ModelEngine):
    """A plain engine that writes down what it is told, and fails where it is meant to."""

    def __init__(self, model):
        super().__init__(model)
        self.calls, self.faults = [], {}

    def resume(self, version):
        self.note(f"resume {version}", "resume")
        super().resume(version)

    def note(self, what, step):
        self.calls.append(what)
        if step in self.faults:
            raise self.faults[step]


def _noted(step):
    def method(self, *args):
        self.note(step, step)
        return getattr(super(FaultyEngine, self), step)(*args)

    return method


for _step in STEPS:
    setattr(FaultyEngine, _step, _noted(_step))


class Room:
    """A trainer, its publisher, and an engine that is driven by hand."""

    def __init__(self, stack, address, *, nbytes=1 << 16, **options):
        self.trainer, self.model = weights(0, nbytes), weights(0, nbytes)
        self.publisher = stack.enter_context(fw.Publisher(self.trainer, address, keep="memory"))
        self.replica = stack.enter_context(fw.Replica(self.model, address))
        self.engine = FaultyEngine(self.model)
        self.operations = Operations(self.engine, self.replica, **options)

    def publish(self, version):
        assign(self.trainer, version)
        self.publisher.publish(version)

    def update(self, version, **options):
        self.publish(version)
        return self.operations.update(version, timeout_seconds=LIMIT, **options)

    def serves(self, version):
        """True if a request is answered, with all of a version."""
        with self.engine.request(LIMIT) as answered:
            return answered == version and holds(self.model, version)

    def is_shut(self):
        """True if no request is answered."""
        try:
            with self.engine.request(0):
                return False
        except LifecycleError:
            return True

    def done(self, work):
        """Return what the engine is told in some work."""
        start = len(self.engine.calls)
        work()
        return self.engine.calls[start:]

    @contextmanager
    def request(self, threads):
        """A request that runs until the block ends; yields a future of what it was answered with."""
        began, may_end = threading.Event(), threading.Event()

        def answer():
            with self.engine.request(LIMIT) as version:
                began.set()
                assert may_end.wait(LIMIT)
                return version, holds(self.model, version)

        future = threads.submit(answer)
        assert began.wait(LIMIT)
        try:
            yield future, may_end
        finally:
            may_end.set()


@pytest.fixture
def room(address):
    with ExitStack() as stack:
        yield Room(stack, address)


@pytest.fixture
def serving(room):
    room.update(1)
    assert room.operations.state is State.SERVING
    return room
