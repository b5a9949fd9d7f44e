"""Two ranks that follow their trainer while an operator pauses and resumes them."""

import threading
import time
from contextlib import ExitStack

from test_operations_by_ranks import Pair

from child_processes import until
from flyweight.errors import FlyweightError
from flyweight.lifecycle.states import State
from versioned_models import holds

SECONDS, NUM_VERSIONS = 20, 30


def test_rounds_and_operations_that_cross_do_not_hold_each_other_up(address, threads):
    """A rank in a round may wait for one that pauses, and the pause for the rank in the round."""
    with ExitStack() as stack:
        pair = Pair(stack, address, threads, hold=True)
        is_over = threading.Event()

        def follow(operations):
            while not is_over.is_set():
                try:
                    operations.follow(timeout_seconds=SECONDS, is_over=is_over.is_set)
                except FlyweightError:
                    time.sleep(0.01)

        following = [pair.one(follow, rank) for rank in range(2)]
        try:
            slowest = 0.0
            for version in range(1, NUM_VERSIONS + 1):
                pair.publish(version)
                started = time.monotonic()
                for work in ("pause", "resume") if version > 1 else ():

                    def operate(operations, work=work):
                        getattr(operations, work)(timeout_seconds=SECONDS)

                    assert pair.both(operate) == [None, None]
                slowest = max(slowest, time.monotonic() - started)
                if version == 1:
                    until(lambda: pair.states == [State.SERVING] * 2)
            assert slowest < 5
            until(lambda: pair.versions == [NUM_VERSIONS] * 2, SECONDS)
            until(lambda: pair.states == [State.SERVING] * 2, SECONDS)
            assert all(holds(model, NUM_VERSIONS) for model in pair.models)
        finally:
            is_over.set()
            for replica in pair.replicas:
                replica.wake()
            for each in following:
                each.result(SECONDS)
