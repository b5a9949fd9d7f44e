"""Each rank of a trainer, killed or stopped at every message of a publish.

After each, the other ranks have an error that names the rank, or the report; replicas hold one
version whole or say that they hold none; and new publishers serve the same replicas.
"""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.errors import FlyweightError, VersionError
from source_rank_processes import NBYTES, SIGNALS, holds_whole, source_rank
from versioned_models import weights

SECONDS = {"kill": LIMIT, "stop": 3.0}
"""How long the second publish may take. The end of a rank that is killed is noticed without it."""
SILENCE_SECONDS = {"kill": 2 * LIMIT, "stop": 10.0}


class Engine:
    """A replica of one or two ranks in this process, and the weights of each rank."""

    def __init__(self, address, num_ranks, stack, pool):
        self.name, self.pool = f"tp{num_ranks}", pool
        self.models, self.replicas = [], []
        for rank in range(num_ranks):
            model = weights(99, NBYTES)
            options = {"name": self.name}
            if num_ranks > 1:
                rows = [(0, 100), (100, 256)][rank]
                part = np.ascontiguousarray(model["embed"][slice(*rows)])
                model["embed"] = fw.Sharded(part, (256, 128), (rows[0], 0))
                options |= {"rank": rank, "num_ranks": num_ranks}
            self.models.append(model)
            self.replicas.append(stack.enter_context(fw.Replica(model, address, **options)))

    def update(self, version, timeout_seconds=LIMIT, is_over=lambda: False):
        return [
            self.pool.submit(each.update, version, timeout_seconds=timeout_seconds, is_over=is_over)
            for each in self.replicas
        ]

    def wake(self):
        for each in self.replicas:
            each.wake()

    def held(self, versions):
        """Return the version that this engine holds; None if it says that it holds none.

        Fails if it holds a mixture.
        """
        found = {(each.state, each.version) for each in self.replicas}
        assert len(found) == 1, found
        ((state, version),) = found
        if state == "failed":
            assert version is None
            for each in self.replicas:
                with pytest.raises(VersionError):
                    each.check_servable()
            return None
        assert version in versions, (version, versions)
        whole = dict(self.models[0])
        if len(self.models) > 1:
            parts = [each["embed"].tensor for each in self.models]
            whole["embed"] = np.concatenate(parts)
            rest = [{n: e for n, e in m.items() if n != "embed"} for m in self.models]
            assert all(rest[0][n].tobytes() == rest[1][n].tobytes() for n in rest[0])
        assert holds_whole(whole, version), (state, version)
        return version


def call(children, name, *arguments, **options):
    for each in children:
        each.send((name, arguments, options))


def answers(children, name):
    found = []
    for each in children:
        told, result, _ = each.told(2 * LIMIT)
        assert told == name, (told, result)
        found.append(result)
    return found


def enumerate_faults(address, victim, how, kind, options, numbers):
    """Let a fault happen at each number, until a publish gets through without it."""
    outcomes = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(8))
        engines = [Engine(address, num_ranks, stack, pool) for num_ranks in (1, 2)]
        for turn, number in enumerate(numbers):
            point = f"{how} rank {victim} {kind} {number}"
            first, second = 2 * turn + 1, 2 * turn + 2
            with ExitStack() as ranks:
                made = {
                    "timeout_seconds": LIMIT,
                    "silence_seconds": SILENCE_SECONDS[how],
                    **options,
                }
                children = [
                    ranks.enter_context(Child(source_rank, address, rank, made))
                    for rank in range(3)
                ]
                outcome = one_fault(
                    point, children, engines, (first, second), victim, kind, number, how
                )
                outcomes.append((number, *outcome))
                if outcome[0] == "completed":
                    break
    return outcomes


def one_fault(point, children, engines, versions, victim, kind, number, how):
    first, second = versions
    others = [each for rank, each in enumerate(children) if rank != victim]
    call(children, "start")
    answers(children, "start")
    call(children, "make")
    assert answers(children, "make") == [None] * 3, point
    updates = [u for each in engines for u in each.update(first)]
    call(children, "publish", first, num_replicas=2)
    reports = answers(children, "publish")
    assert reports == [(first, [])] * 3, (point, reports)
    for each in updates:
        assert each.result(LIMIT).version == first
    assert [each.held(versions) for each in engines] == [first, first], point

    call([children[victim]], "arm", kind, number, SIGNALS[how])
    answers([children[victim]], "arm")
    is_over = threading.Event()
    updates = [u for each in engines for u in each.update(second, SECONDS[how], is_over.is_set)]
    call(children, "publish", second, num_replicas=2, timeout_seconds=SECONDS[how])
    results = answers(others, "publish")
    for result in results:
        if isinstance(result, Exception):
            assert isinstance(result, FlyweightError), (point, repr(result))
            assert f"source rank {victim}" in str(result) or (
                "source ranks have not" in str(result) and str(victim) in str(result)
            ), (point, repr(result))
    is_over.set()
    until(lambda: have_ended(engines, updates))
    held = [each.held(versions) for each in engines]
    for result in results:
        if not isinstance(result, Exception):
            failed = [name for name, _ in result[1]]
            assert result[0] == second
            for engine, version in zip(engines, held, strict=True):
                assert (version == second) == (engine.name not in failed), (point, result, held)
    if how == "stop":
        resume(children[victim])
    try:
        answers([children[victim]], "publish")
        call([children[victim]], "was_stopped")
        (was_stopped,) = answers([children[victim]], "was_stopped")
        what = "stopped" if was_stopped else "completed"
    except (EOFError, ConnectionResetError):
        what = "killed"
    call(others, "close")
    answers(others, "close")
    if what != "killed":
        call([children[victim]], "close")
        answers([children[victim]], "close")
    return what, held == [second, second], [type(each).__name__ for each in results]


def have_ended(engines, updates):
    """Wake the engines, which look whether it is over; return whether their updates have ended."""
    for each in engines:
        each.wake()
    return not wait(updates, 0.05).not_done


def resume(child):
    """Resume a child that has stopped itself, or will."""

    def has_gone_on():
        child.go_on()
        return child.has_told

    until(has_gone_on)


BUCKETS = {"bucket_bytes": 16384, "depth": 1}


@pytest.mark.check
@pytest.mark.parametrize(
    ("victim", "how", "kind", "numbers"),
    [
        (0, "kill", "before", [2, 12]),
        (0, "kill", "received", [6]),
        (1, "kill", "before", [0, 1]),
        (2, "stop", "before", [1]),
    ],
)
def test_a_rank_that_ends_at_a_message_is_named_and_no_version_is_mixed(
    address, victim, how, kind, numbers
):
    outcomes = enumerate_faults(address, victim, how, kind, {}, numbers)
    assert [each[1] for each in outcomes] == [{"kill": "killed", "stop": "stopped"}[how]] * len(
        numbers
    )


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [BUCKETS, {"hold": True}], ids=["bucketed", "held"])
@pytest.mark.parametrize("kind", ["before", "received", "after"])
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_ends_at_any_message_is_named_and_no_version_is_mixed(
    address, victim, how, kind, options
):
    outcomes = enumerate_faults(address, victim, how, kind, options, range(90))
    assert outcomes[-1][1] == "completed"
    assert len(outcomes) > 2
