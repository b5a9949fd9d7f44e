"""Fixtures of live updates: trainers and engines in processes, and threads for ranks."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def processes():
    from live.live_processes import Processes

    with Processes() as found:
        yield found


@pytest.fixture
def collected():
    """Leave no mapping behind to tests that count files."""
    gc.freeze()  # what is there already, as of PyTorch, would take long to look through
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture
def pool():
    """Threads for the ranks of engines."""
    with ThreadPoolExecutor(16) as made:
        yield made
