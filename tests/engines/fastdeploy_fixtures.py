"""Fixtures of the FastDeploy drop-in's tests, which name this module in `pytest_plugins`."""

import secrets
from pathlib import Path

import pytest
from fastdeploy_nets import Net, config

import flyweight as fw
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.engines.legacy_cells import MODEL_WEIGHTS, LegacyCell


@pytest.fixture
def open_manager():
    """Makes managers that are closed with the test."""
    made = []

    def make(*args, **options):
        made.append(DynamicWeightManager(*args, 0, **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def pid():
    """An engine of this test's own; its cells are removed afterwards."""
    number = secrets.randbits(40)
    yield number
    for path in Path("/dev/shm").glob(f"*.{number}"):
        path.unlink()


@pytest.fixture
def cell(pid):
    with LegacyCell.create(MODEL_WEIGHTS, pid) as cell:
        yield cell


@pytest.fixture
def source(address, tmp_path):
    """Version 1, in files and at a publisher; with what a manager is told of them."""
    fw.save(Net(1), tmp_path, version=1)
    with fw.Publisher(Net(1), address, keep="memory") as publisher:
        publisher.publish(1)
        yield lambda strategy, **more: config(tmp_path, strategy, address=address, **more)
