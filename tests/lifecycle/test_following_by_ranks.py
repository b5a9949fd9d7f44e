"""Two ranks that follow their trainer while an operator pauses and resumes them."""

import threading
import time
from contextlib import ExitStack

from test_operations_by_ranks import Pair

from child_processes import LIMIT, until
from flyweight.errors import FlyweightError
from flyweight.lifecycle.states import State
from versioned_models import holds

NUM_VERSIONS = 30


def test_rounds_and_operations_that_cross_do_not_hold_each_other_up(address, threads, monkeypatch):
    """A rank in a round may wait for one that pauses, and the pause for the rank in the round."""
    for module in ("operations", "update"):  # a pause has less time than a round
        monkeypatch.setattr(f"flyweight.lifecycle.{module}.ROUND_SECONDS", 3 * LIMIT)
    with ExitStack() as stack:
        pair = Pair(stack, address, threads, keep="memory")
        is_over = threading.Event()

        def follow(operations):
            while not is_over.is_set():
                try:
                    operations.follow(timeout_seconds=3 * LIMIT, is_over=is_over.is_set)
                except FlyweightError:
                    time.sleep(0.01)  # as a worker rests before it follows again

        following = [pair.one(follow, rank) for rank in range(2)]
        try:
            for version in range(1, NUM_VERSIONS + 1):
                pair.publish(version)
                for work in ("pause", "resume") if version > 1 else ():

                    def operate(operations, work=work):
                        getattr(operations, work)(timeout_seconds=LIMIT)

                    assert pair.both(operate) == [None, None]
                if version == 1:
                    until(lambda: pair.states == [State.SERVING] * 2)
            until(lambda: pair.versions == [NUM_VERSIONS] * 2)
            until(lambda: pair.states == [State.SERVING] * 2)
            assert all(holds(model, NUM_VERSIONS) for model in pair.models)
        finally:
            is_over.set()
            for replica in pair.replicas:
                replica.wake()
            for each in following:
                each.result(LIMIT)
