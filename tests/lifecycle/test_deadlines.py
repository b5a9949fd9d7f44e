"""Waits end at their deadline, not before it and not at one that is further away.

All waits of a test begin together, each in a thread of its own, so that each test takes as
long as one wait.
"""

import threading
from contextlib import ExitStack, contextmanager
from time import monotonic

import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from fakes import FakeRendezvousStore
from flyweight.errors import Busy, LifecycleError, PeerLost, TransferTimeout
from flyweight.lifecycle.cell import Cell, Request
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import Signal, State
from flyweight.lifecycle.weights import StoredWeights
from flyweight.ports import UpdateOptions
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous
from versioned_models import weights

SECONDS = 0.5


def check_waits(waits, threads):
    """Start all waits at once; each must raise its error, or return its value, in its time."""

    def timed(expected, wait):
        with in_time(SECONDS):
            if isinstance(expected, type):
                with pytest.raises(expected):
                    wait()
            else:
                assert wait() == expected

    futures = {name: threads.submit(timed, *each) for name, each in waits.items()}
    failures = {name: future.exception(LIMIT) for name, future in futures.items()}
    assert {name: failure for name, failure in failures.items() if failure} == {}


@contextmanager
def request(engine, threads):
    """A request that runs to the end of the block."""
    began, may_end = threading.Event(), threading.Event()

    def answer():
        with engine.request(LIMIT):
            began.set()
            assert may_end.wait(LIMIT)

    running = threads.submit(answer)
    assert began.wait(LIMIT)
    try:
        yield
    finally:
        may_end.set()
        running.result(LIMIT)


@pytest.fixture
def store(tmp_path):
    for version in (1, 2):
        fw.save(weights(version), tmp_path / "run", version=version)
    return tmp_path / "run"


def serving(store):
    """An engine that serves version 1 of a store."""
    model = weights(0)
    engine = fw.ModelEngine(model)
    operations = Operations(engine, StoredWeights(model, store))
    operations.update(1, timeout_seconds=LIMIT)
    assert operations.state is State.SERVING
    return operations, engine


def test_waits_for_a_cell_end_at_their_deadline(tmp_path, threads):
    """C21"""
    with Cell(tmp_path / "e.cell") as cell:
        cell.write_request(Request(number=1, signal=Signal.PAUSE))
        bell = cell.wait_change(0, 0)
        waits = {
            "wait": (TransferTimeout, lambda: cell.wait(lambda slots: False, SECONDS)),
            "next_request": (None, lambda: cell.next_request(1, SECONDS)),
            "wait_change": (bell, lambda: cell.wait_change(bell, SECONDS)),
        }
        check_waits(waits, threads)


def test_what_waits_for_requests_that_run_ends_at_its_deadline(store, threads):
    """C24, C32: of four engines, each with a request that does not end."""
    with ExitStack() as stack:
        machines, engines = zip(*(serving(store) for _ in range(4)), strict=True)
        for engine in engines:
            stack.enter_context(request(engine, threads))
        pausing, clearing, updating, _ = machines
        waits = {
            "pause": (TransferTimeout, lambda: pausing.pause(timeout_seconds=SECONDS)),
            "clear": (TransferTimeout, lambda: clearing.clear(timeout_seconds=SECONDS)),
            "update": (TransferTimeout, lambda: updating.update(2, timeout_seconds=SECONDS)),
            "engine": (TransferTimeout, lambda: engines[3].pause(monotonic() + SECONDS)),
        }
        check_waits(waits, threads)
        assert [operations.state for operations in machines[:3]] == [State.SERVING] * 3


def test_what_waits_for_its_turn_ends_at_its_deadline(store, threads):
    """C24, C31: while a pause waits that has more time."""
    operations, engine = serving(store)
    with request(engine, threads):
        pausing = threads.submit(operations.pause, timeout_seconds=3 * LIMIT)
        until(lambda: operations.state is State.PAUSING)
        waits = {
            "request": (LifecycleError, lambda: engine.request(SECONDS).__enter__()),
            "pause": (Busy, lambda: operations.pause(timeout_seconds=SECONDS)),
            "resume": (Busy, lambda: operations.resume(timeout_seconds=SECONDS)),
            "clear": (Busy, lambda: operations.clear(timeout_seconds=SECONDS)),
            "restore": (Busy, lambda: operations.restore(timeout_seconds=SECONDS)),
            "update": (Busy, lambda: operations.update(2, timeout_seconds=SECONDS)),
        }
        check_waits(waits, threads)
    pausing.result(LIMIT)
    assert operations.state is State.PAUSED


def test_what_waits_for_a_version_ends_at_its_deadline(store, tmp_path, address, threads):
    """C24: a publisher that has none, and stores that have none that is newer."""
    followed, nearest, asked = weights(0), weights(0), weights(0)
    stored = StoredWeights(followed, store)
    options = {"before": lambda version: None, "is_over": lambda: False}
    stored.take(UpdateOptions(version=2, timeout_seconds=LIMIT, **options))
    with (
        fw.Publisher(weights(0), address),
        fw.Replica(nearest, address, fallback=[tmp_path / "empty"]) as both,
        fw.Replica(asked, address) as second,
    ):
        operations = Operations(fw.ModelEngine(asked), second)
        waits = {
            "stored": (
                TransferTimeout,
                lambda: stored.take(UpdateOptions(timeout_seconds=SECONDS, **options)),
            ),
            "nearest": (
                TransferTimeout,
                lambda: both.take(UpdateOptions(timeout_seconds=SECONDS, **options)),
            ),
            "operations": (TransferTimeout, lambda: operations.update(timeout_seconds=SECONDS)),
        }
        check_waits(waits, threads)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hears_nobody_ends_a_little_after_its_deadline(threads, rank):
    """C24: it listens for the others' last words; a tenth of the time more is for noticing."""
    store = FakeRendezvousStore()
    ranks = [RankAgreement(Rendezvous(each, 2, store, "two")) for each in range(2)]

    def agree(each, seconds):
        return ranks[each].agree("pause", monotonic() + seconds)

    assert [len(said) for said in threads.map(agree, (0, 1), (LIMIT, LIMIT))] == [2, 2]
    try:
        waits = {"lost": (PeerLost, lambda: agree(rank, SECONDS))}
        check_waits(waits, threads)
    finally:
        for parting in [threads.submit(each.close) for each in ranks]:
            parting.result(LIMIT)
