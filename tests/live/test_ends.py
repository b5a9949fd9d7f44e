"""Ends: close at any time, also in a signal handler, and Ctrl-C; nothing stays behind."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest

from child_processes import LIMIT, run_python, until
from flyweight.errors import FlyweightError, TransportError, VersionError
from flyweight.live import Publisher
from live.live_processes import TOKEN, at, free_address, once
from live.one_process import (
    check_next_update,
    fill,
    holds,
    in_background,
    is_free,
    mappable,
    model,
    raising,
    reader,
)

ADDRESS = "tcp://127.0.0.1:0"
WAYS = ["mapped", "filled", "read"]


@pytest.fixture(params=WAYS)
def pair(request):
    """Return a publisher, its weights, a replica of it and its arrays."""
    transport = request.param
    weights, arrays = (mappable if transport == "mapped" else model)(1), model()
    with (
        Publisher(weights, ADDRESS, token=TOKEN) as source,
        reader(arrays, source.address, transport, name="engine") as sink,
    ):
        yield source, weights, sink, arrays


@contextmanager
def on_signal(act):
    """Call a function in a handler of SIGUSR1, in the main thread."""
    before = signal.signal(signal.SIGUSR1, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGUSR1)


def test_close_in_a_signal_handler_ends_a_publish(pair):
    source, _, _, _ = pair
    with on_signal(source.close), at("serving", once(interrupt)):
        report = source.publish(1, num_replicas=1, timeout_seconds=600)  # it would hang
    assert report.version == 1
    with pytest.raises(TransportError, match="is closed"):
        source.publish(2)
    weights = model(2)
    with Publisher(weights, source.address, token=TOKEN) as again:
        assert again.publish(1).version == 1


def test_close_in_a_signal_handler_ends_a_wait_for_a_version(pair):
    source, weights, sink, _ = pair
    with (
        on_signal(sink.close),
        in_background(lambda: until(lambda: source.waiting) or interrupt()),
        pytest.raises(FlyweightError),
    ):
        sink.update(timeout_seconds=600)
    until(lambda: not source.replicas)
    check_next_update(source, weights)


def test_close_in_a_signal_handler_ends_a_wait_for_a_publisher():
    sink = reader(model(), free_address())
    is_waiting = threading.Event()

    def is_over():
        is_waiting.set()
        return False

    with (
        on_signal(sink.close),
        in_background(lambda: is_waiting.wait(LIMIT) and interrupt()),
        pytest.raises(FlyweightError),
    ):
        sink.update(timeout_seconds=600, is_over=is_over)


@pytest.mark.parametrize("point", ["found", "leased"])
def test_a_connection_that_ends_in_the_middle_of_an_update_leaves_all_of_it_or_nothing(pair, point):
    source, weights, sink, arrays = pair
    with in_background(sink.update, timeout_seconds=LIMIT) as result:
        until(lambda: source.waiting)
        with at(point, once(lambda: sink._link.session.front.channel.shut())):
            source.publish(1, timeout_seconds=LIMIT)
            found = result()
    is_error = isinstance(found, FlyweightError)
    assert is_error or found.transport == "read", found  # it had all that it needs
    assert holds(arrays, 0 if is_error else 1)
    check_next_update(source, weights, (sink, arrays))


def test_close_can_be_repeated_and_ends_use(pair):
    source, _, sink, _ = pair
    for each in (sink, source):
        each.close()
        each.close()
    with pytest.raises(TransportError, match="is closed"):
        sink.update()
    with pytest.raises(TransportError, match="is closed"):
        source.publish(1)


def test_an_interrupted_publish_withdraws_its_offer_on_all_ranks():
    """FAULTS 5; invariant 6; and its number is used up on all of them."""
    address, sources = free_address(), {}
    weights = [model(1), {"c": model(1)["a"]}]

    def make(rank):
        sources[rank] = Publisher(
            weights[rank], address, token=TOKEN, rank=rank, world_size=2, keep="in_place"
        )

    with in_background(make, 1):
        make(0)
    arrays = {**model(), "c": model()["a"]}

    def publish(version):
        with in_background(sources[1].publish, version, timeout_seconds=LIMIT) as other:
            try:
                mine = sources[0].publish(version, timeout_seconds=LIMIT)
            except BaseException as error:
                mine = error
            return mine, other()

    with sources[0], sources[1], reader(arrays, address, "filled") as sink:
        with at("announcing", once(raising(KeyboardInterrupt()))):
            mine, other = publish(1)
        assert isinstance(mine, KeyboardInterrupt)
        assert isinstance(other, FlyweightError), other
        for each in sources.values():
            assert is_free(each, 1)
        assert all(isinstance(each, VersionError) for each in publish(1))
        for each in weights:
            fill(each, 2)
        assert [each.version for each in publish(2)] == [2, 2]
        assert sink.update(timeout_seconds=LIMIT).version == 2
        assert holds(arrays, 2)


def test_an_object_of_a_forked_parent_is_refused_in_the_child(pair):
    source, weights, sink, arrays = pair
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (sink.update, lambda: source.publish(1), source.withdraw):
            try:
                use()
            except TransportError as error:
                refused += "belongs to process" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    check_next_update(source, weights, (sink, arrays))


EXITS = """
import weakref
from flyweight.live import Replica

class Engine:
    pass

engine, replicas = Engine(), []
weakref.finalize(engine, lambda: [(each.wake(), each.close()) for each in replicas])
replicas.append(Replica(dict, "unix:nowhere", framework="numpy"))
"""


def test_a_replica_is_woken_and_closed_by_a_hook_of_an_interpreter_that_exits(tmp_path):
    done = run_python(EXITS, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
