"""Fixtures of live updates: a model of one tensor, and peers that are not what they seem."""

import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, path_without, until
from live_rounds import CONTENT, telling_publisher
from peers import FakeReplica, shared
from remote_processes import TOKEN
from versioned_models import weights


@pytest.fixture
def collected():
    """Leave no mapping behind to tests that count files."""
    gc.freeze()  # what is there already, as of PyTorch, would take long to look through
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture
def engine():
    return {"w": np.zeros_like(CONTENT)}


@pytest.fixture
def bereft(address):
    """A replica whose publisher stands still, which it has noticed."""
    with Child(telling_publisher, address) as trainer:
        assert trainer.told() == ("up", None)
        with fw.Replica(weights(50), address) as replica:
            assert trainer.told() == ("joined", None)
            trainer.stop()
            until(lambda: not replica.is_connected)
            yield replica


@pytest.fixture
def fake(address):
    """A publisher, and a replica of ours that takes part in its rounds."""
    with (
        fw.Publisher(
            {"w": shared(CONTENT)}, address, timeout_seconds=LIMIT, silence_seconds=2 * LIMIT
        ) as publisher,
        FakeReplica(address) as replica,
    ):
        replica.join()
        yield publisher, replica


@pytest.fixture
def pool():
    """Threads for the ranks of engines."""
    with ThreadPoolExecutor(16) as made:
        yield made


@pytest.fixture
def no_network_engine(monkeypatch, tmp_path):
    """An interpreter, and a path for modules, without NIXL and Mooncake."""
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))  # not that of a venv
    monkeypatch.setattr(sys, "path", path_without(("nixl", "mooncake"), tmp_path))


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Makes a publisher for other hosts, and replicas that connect as if on those."""
    monkeypatch.setenv("FLYWEIGHT_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FLYWEIGHT_HOST", "trainer")
    with ExitStack() as stack:

        def make(model, **options):
            options = {"token": TOKEN, "timeout_seconds": LIMIT, **options}
            made = stack.enter_context(fw.Publisher(model, "tcp://127.0.0.1:0", **options))
            made.replica = lambda target, name, **options: replica(made, target, name, options)
            return made

        def replica(publisher, target, name, options):
            with monkeypatch.context() as elsewhere:
                elsewhere.setenv("FLYWEIGHT_HOST", f"host of {name}")
                made = fw.Replica(target, publisher.address, name=name, token=TOKEN, **options)
            return stack.enter_context(made)

        yield make
