"""A vLLM server that is killed and started again."""

import time

import pytest
from vllm_processes import Server

import flyweight as fw
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import PeerLost
from flyweight.lifecycle.states import State

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def start(models, tmp_path):
    """Starts a server of model A, at the same port each time."""
    made = []

    def start():
        port = made[0].port if made else None
        made.append(Server(models / "A", tmp_path / "log", unpacked=True, port=port))
        return made[-1].wait()

    yield start
    for each in made:
        each.close()


def until(is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_engine_that_is_killed_and_restarted_gets_its_version_again(
    start, trainer, address, answers, tmp_path
):
    server = start()
    engine = VllmEngine(server.address, address)
    trainer.becomes("B")
    with fw.Worker(engine, engine, tmp_path / "cell", is_serving=True) as worker:
        operations = worker.operations
        until(lambda: engine.version == trainer.version)
        assert server.tokens() == answers["B"]
        server.kill()
        until(lambda: operations.state is State.FAILED)
        server = start()
        until(lambda: operations.state is State.SERVING)
        assert engine.version == trainer.version
        assert server.tokens() == answers["B"], "it caught up by itself"
        trainer.becomes("A")
        until(lambda: engine.version == trainer.version)
        until(lambda: operations.state is State.SERVING)
        assert server.tokens() == answers["A"]
    engine.update(trainer.becomes("B"))
    server.kill()
    with pytest.raises(PeerLost, match="cannot be reached"):
        engine.update(trainer.version, timeout_seconds=2)
    server = start()
    with pytest.raises(PeerLost, match="was restarted"):
        engine.update(trainer.version)
    assert engine.version is None
    assert engine.operations.state is State.FAILED
    engine.update(trainer.version)
    assert server.tokens() == answers["B"], "without a worker, the next update brings it back"
