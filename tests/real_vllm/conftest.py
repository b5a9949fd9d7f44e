"""Fixtures of the tests with a real vLLM: models A and B, servers, and what fresh loads answer."""

import gc
import os
import warnings

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these, in an environment with vLLM")

import tiny_models
from vllm_processes import ENVIRONMENT, LONGEST, Server, fresh

import flyweight as fw

# Before vLLM is imported in this process.
os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")


def pytest_configure(config):
    # vLLM leaves sockets and files for the collector to close.
    for kind in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


def pytest_sessionfinish():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The directories of two models of the same shapes."""
    place = tmp_path_factory.mktemp("models")
    for name, seed in (("A", 1), ("B", 2)):
        tiny_models.make(place / name, seed)
    return place


@pytest.fixture(scope="session")
def started(request, models, tmp_path_factory):
    """The servers that the chosen tests need, which start at the same time, by their fixtures."""
    place = tmp_path_factory.mktemp("logs")
    kinds = {
        "first_server": {"model": models / "A", "unpacked": True, "max_model_len": LONGEST},
        "server_of_two": {"model": models / "B", "unpacked": True, "ranks": 2},
        "two_engines": {"model": models / "A", "engines": 2},
    }
    needed = {name for item in request.session.items for name in item.fixturenames}
    made = {name: Server(log=place / name, **kinds[name]) for name in kinds if name in needed}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(scope="session")
def loaded_b(started, models):
    """What model B is in a vLLM that has just loaded its files, without a backend."""
    return fresh(models / "B", unpacked=True)


@pytest.fixture(scope="session")
def first_server(loaded_b, started):
    with started["first_server"] as made:
        made.loaded = {"tokens": made.tokens(), "checksums": made.checksums()}
        yield made


@pytest.fixture
def server(first_server):
    """A server that was started with model A, whose checksums see all weights."""
    if first_server.process.poll() is not None:
        first_server.start_again()
    return first_server


@pytest.fixture(scope="session")
def loaded(first_server, loaded_b):
    """What each model is in a vLLM that has just loaded its files: its tokens and checksums."""
    found = {"A": first_server.loaded, "B": loaded_b}
    assert found["A"]["tokens"] != found["B"]["tokens"]
    return found


@pytest.fixture(scope="session")
def answers(loaded):
    """The greedy tokens of each model."""
    return {name: found["tokens"] for name, found in loaded.items()}


@pytest.fixture(scope="module")
def server_of_two(started):
    """A server of two workers, started with model B, whose checksums see all weights."""
    with started["server_of_two"] as made:
        made.loaded = made.tokens(), made.checksums()
        yield made


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/policy"


class Trainer:
    """A publisher of a model that becomes A or B, in memory that workers of vLLM map."""

    def __init__(self, models, address):
        self._models = models
        self.model = {}
        with fw.open(models / "A") as source:
            for name in source.manifest.names:
                self.model[name] = self._read(source, name)
        self.publisher = fw.Publisher(self.model, address, keep="in_place")
        self.version = 0

    @staticmethod
    def _read(source, name):
        import torch

        spec = source.manifest.spec(name)
        found = torch.frombuffer(bytearray(source.read(name)), dtype=torch.float32)
        return found.view(spec.shape).clone().share_memory_()

    def becomes(self, name):
        """Train the model into another one, and publish that; return its version."""
        self.publisher.withdraw()
        fw.load(self._models / name, into=self.model)
        self.version += 1
        self.publisher.publish(self.version)
        return self.version

    def close(self):
        self.publisher.close()


@pytest.fixture
def trainer(models, address):
    made = Trainer(models, address)
    yield made
    made.close()
