"""Closing either side: it ends waits, frees everything, and does not hang."""

import signal
import threading
import time

import pytest

import flyweight as fw
from child_processes import LIMIT, Child, in_time, resources, run_python, settled, until
from flyweight.errors import (
    PeerFailed,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from flyweight.events import listening
from flyweight.live import line, messages
from live_rounds import refuse_catch_up_threads, slow_loader, updated
from peers import FakePublisher
from versioned_models import weights


@pytest.mark.parametrize("options", [{}, {"hold": True}], ids=str)
def test_closing_leaves_no_thread_file_segment_or_socket(tmp_path, threads, options):
    address = f"unix:{tmp_path}/policy"
    threads.submit(int).result()
    before = resources()
    model, engine = weights(1), weights(2)
    publisher = fw.Publisher(model, address, **options)
    replica = fw.Replica(engine, address)
    updated(threads, publisher, replica, 1)
    replica.close()
    replica.close()
    publisher.close()
    publisher.close()
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == ["lock"]
    assert settled(before) == before
    with pytest.raises(TransportError, match="is closed"):
        publisher.publish(2)
    with pytest.raises(TransportError, match="is closed"):
        replica.update(2)


def test_close_ends_an_update_that_waits_in_another_thread(address, threads):
    before = resources()
    with fw.Publisher(weights(1), address) as publisher:
        replica = fw.Replica(weights(50), address)
        future = threads.submit(replica.update, timeout_seconds=2 * LIMIT)
        until(lambda: publisher.waiting)
        replica.close()
        with pytest.raises(TransportError, match="closed"):
            future.result(LIMIT)
        until(lambda: publisher.replicas == [])
        assert publisher.publish(1).replicas == ()
    threads.shutdown()
    assert settled(before)["threads"] == before["threads"]


def test_close_wakes_a_publish_that_waits_for_replicas(address, threads):
    publisher = fw.Publisher(weights(1), address)
    future = threads.submit(publisher.publish, 1, num_replicas=1, timeout_seconds=LIMIT)
    time.sleep(0.1)  # so that it waits; if it has not begun, it is closed for it all the same
    publisher.close()
    with pytest.raises(TransportError, match="is closed"):
        future.result(LIMIT)


def test_a_publisher_closed_in_mid_round_ends_it_for_the_replica(address, threads):
    with Child(slow_loader, address, 2 * LIMIT) as child:
        publisher = fw.Publisher(weights(1), address, timeout_seconds=0.5)
        until(lambda: publisher.replicas == ["slow"])
        lease = publisher.publish(1, num_replicas=1, background=True, timeout_seconds=2 * LIMIT)
        child.told()
        with in_time(0.5):  # the publisher's own time, and not the round's
            publisher.close()
        (failed,) = lease.wait(LIMIT).failed
        assert isinstance(failed.error, (PeerLost, TransferTimeout))
        child.kill()


def test_a_thread_that_cannot_start_does_not_keep_a_publisher_from_closing(address, monkeypatch):
    refuse_catch_up_threads(monkeypatch, 1)
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        with fw.Replica(weights(50), address) as replica, pytest.raises(PeerFailed):
            replica.update(timeout_seconds=LIMIT)
    fw.Publisher(weights(1), address).close()


def test_close_ends_an_update_at_a_door_that_does_not_answer(bereft, threads, monkeypatch):
    is_waiting = threading.Event()
    monkeypatch.setattr(line, "ANSWER_SECONDS", 2 * LIMIT)
    future = threads.submit(bereft.update, timeout_seconds=2 * LIMIT, is_over=is_waiting.set)
    assert is_waiting.wait(LIMIT)
    bereft.close()
    with pytest.raises(TransportError):
        future.result(LIMIT)


def test_close_ends_an_update_that_waits_for_a_welcome(address, threads):
    replica = fw.Replica(weights(50), address)
    future = threads.submit(replica.update, timeout_seconds=2 * LIMIT)
    with FakePublisher(address, b"never welcomes anybody") as publisher:
        publisher.hear_of(messages.Hello)
        replica.close()
        with pytest.raises(TransportError):
            future.result(LIMIT)


STUCK = """
import sys, threading
import numpy as np, flyweight as fw
from flyweight.events import listening
from flyweight.live import news

news._LISTENER_SECONDS = 0.2

heard = threading.Event()

def listener(event):
    if event.kind == "replica.joined":
        heard.set()
        threading.Event().wait()

with listening(listener):
    publisher = fw.Publisher({"w": np.ones(3)}, sys.argv[1])
    replica = fw.Replica({"w": np.zeros(3)}, sys.argv[1])
    heard.wait()
    replica.close()
    publisher.close()
"""


def test_a_listener_that_never_returns_keeps_neither_close_nor_the_process_from_its_end(address):
    done = run_python(STUCK, address)
    assert done.returncode == 0, done.stderr


def test_all_that_happened_before_close_has_been_told_after_it(address):
    told = []
    with listening(lambda event: told.append(event.kind)):
        with fw.Publisher(weights(1), address):
            fw.Replica(weights(50), address).close()
        assert told.count("replica.joined") == 1


@pytest.mark.parametrize("side", ["publisher", "replica"])
def test_a_signal_handler_closes_what_it_interrupts(address, side):
    before = resources()
    publisher = fw.Publisher(weights(1), address, timeout_seconds=2 * LIMIT)
    replica = fw.Replica(weights(50), address)
    call, closed = {
        "publisher": (lambda: publisher.publish(1, num_replicas=1), publisher),
        "replica": (lambda: replica.update(timeout_seconds=2 * LIMIT), replica),
    }[side]
    old = signal.signal(signal.SIGUSR1, lambda *_: closed.close())
    main = threading.main_thread().ident
    # If the signal comes before the call, that finds it closed all the same.
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(TransportError, match="closed"):
            call()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, old)
        replica.close()
        publisher.close()
    assert settled(before) == before
