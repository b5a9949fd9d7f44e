"""The collector is paused while plans are made, and is what it was afterwards."""

import gc
import threading

import pytest

from flyweight.memory import collector_paused


def test_the_collector_comes_back_after_nested_pauses_and_errors():
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_pause_at_once_leave_it_on():
    gate = threading.Barrier(4)

    def pause():
        for _ in range(200):
            gate.wait(timeout=30)
            with collector_paused():
                assert not gc.isenabled()

    threads = [threading.Thread(target=pause) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert gc.isenabled()
