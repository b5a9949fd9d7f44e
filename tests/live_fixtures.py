"""Fixtures of live updates: trainers and engines in processes, and threads for ranks."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from child_processes import LIMIT


@pytest.fixture
def processes():
    from live.live_processes import Processes

    with Processes() as found:
        yield found


@pytest.fixture
def over_tcp(monkeypatch):
    """NIXL over TCP, whose keepalives do not end what a busy machine makes slow."""
    from flyweight.live import fetch
    from flyweight.transports import nixl

    if not nixl.nixl_version():
        pytest.skip(f"no NIXL: {nixl.NIXL_INSTALL}")
    monkeypatch.setenv("FLYWEIGHT_NIXL", "tcp")
    for name in ("UCX_TCP_USER_TIMEOUT", "UCX_TCP_KEEPIDLE"):
        monkeypatch.setenv(name, f"{LIMIT:.0f}s")
    monkeypatch.setattr(nixl, "_ANSWER_SECONDS", LIMIT)
    monkeypatch.setattr(fetch, "STALL_SECONDS", LIMIT)


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
