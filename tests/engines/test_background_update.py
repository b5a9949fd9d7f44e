"""An update that stages in a thread of its own and loads in the engine's thread."""

import threading
from time import monotonic

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from flyweight.adapters.loader import Loader
from flyweight.engines.background_update import BackgroundUpdate, MainThread
from flyweight.errors import DigestMismatch, LifecycleError, TransferTimeout


class Threaded(Loader):
    """A loader that the engine's thread runs, and remembers which thread did."""

    def __init__(self, load=None):
        self.update, self.loaded, self.thread = None, None, None
        self._inner = load or self.keep
        super().__init__(self._load, "numpy", "cpu")

    def keep(self, weights):
        self.thread, self.loaded = threading.get_ident(), dict(weights)

    def _load(self, weights):
        self.update.call(lambda: self._inner(weights), is_load=True)


@pytest.fixture
def main():
    return MainThread()


@pytest.fixture
def begin(address, main):
    """Begins an update of a loader."""
    made = []

    def begin(loader, id="one", kind=BackgroundUpdate, version=1, last=None):
        if not made:
            made.append(fw.Replica(loader, address, name="engine"))
        update = loader.update = kind(
            id,
            lambda: made[0],
            main,
            last=last,
            version=version,
            may_keep=False,
            verify=False,
            timeout_seconds=LIMIT,
        )
        update.start()
        return update

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def publisher(address):
    model = {"w": np.arange(1000, dtype=np.float32), "b": np.ones(3)}
    with fw.Publisher(model, address, keep="in_place") as made:
        made.publish(1)
        yield made


def wait_for(update, state):
    until(lambda: update.status()["state"] == state)
    return update.status()


def test_it_stages_without_the_engines_thread_and_loads_in_it(publisher, begin):
    loader = Threaded()
    update = begin(loader)
    assert wait_for(update, "staged")["version"] == 1
    assert loader.loaded is None
    update.complete()
    assert loader.thread == threading.get_ident()
    assert loader.loaded["w"].tobytes() == np.arange(1000, dtype=np.float32).tobytes()
    status = update.status()
    assert (status["state"], status["report"]["version"], status["error"]) == ("done", 1, "")
    assert status["report"]["verified"] == "received"


def test_completing_before_it_is_staged_waits_for_it(publisher, begin):
    update = begin(loader := Threaded())
    update.complete()
    assert loader.loaded


def test_what_the_loader_raises_is_raised_in_the_engines_thread_and_is_in_the_status(
    publisher, begin
):
    def refuse(weights):
        next(weights)
        raise ValueError("no such parameter")

    update = begin(Threaded(refuse))
    with pytest.raises(LifecycleError, match="parameter"):
        update.complete()
    status = update.status()
    assert (status["state"], status["error"]) == ("failed", "LifecycleError")
    assert "ValueError" in status["text"]


class Impatient(BackgroundUpdate):
    """Its deadline comes soon after the version is staged, however long that took."""

    def _wait_for_pause(self, version):
        self._deadline = monotonic() + 0.2
        super()._wait_for_pause(version)


def test_an_engine_that_never_pauses_ends_it_at_its_deadline(publisher, begin):
    update = begin(loader := Threaded(), kind=Impatient)
    status = wait_for(update, "failed")
    assert (status["error"], loader.loaded) == ("TransferTimeout", None)
    assert "paused" in status["text"]
    with pytest.raises(TransferTimeout):
        update.complete()


@pytest.mark.parametrize("version", [1, 99], ids=["staged", "waiting"])
def test_a_cancelled_update_ends_and_the_next_one_works(publisher, begin, version):
    loader = Threaded()
    first = begin(loader, "first", version=version)
    wait_for(first, "staged" if version == 1 else "waiting")
    first.cancel()
    second = begin(loader, "second", last=first)
    second.complete()
    assert first.status()["state"] == "failed"
    assert loader.loaded


def test_a_call_that_the_engines_thread_never_makes_is_given_up(main):
    with in_time(0.2), pytest.raises(TransferTimeout):
        main.call(lambda: None, monotonic() + 0.2, lambda: False)


def test_quick_calls_run_whenever_the_engine_lets_them_and_loads_only_in_a_pause(main):
    done, deadline = [], monotonic() + LIMIT
    threads = [
        threading.Thread(
            target=main.call,
            args=(lambda load=load: done.append(load), deadline, lambda: False),
            kwargs={"is_load": load},
        )
        for load in (True, False)
    ]
    for each in threads:
        each.start()
    until(lambda: main.run_waiting() or done)
    assert done == [False]
    main.run_until(lambda: len(done) == 2)
    for each in threads:
        each.join(LIMIT)
        assert not each.is_alive()


def test_a_wrong_digest_is_found_before_the_engine_pauses(address, begin):
    model = {"w": np.ones(100)}
    with fw.Publisher(model, address, keep="in_place") as publisher:
        publisher.publish(1)
        with fw.Replica(dict, address, name="first", framework="numpy") as first:
            first.update(1, timeout_seconds=LIMIT)  # from now on the digests are known
            model["w"][0] = 2
            update = begin(loader := Threaded())
            assert wait_for(update, "failed")["error"] == DigestMismatch.__name__
            assert loader.loaded is None
