"""A vLLM server that is killed and started again."""

import pytest

import flyweight as fw
from child_processes import until
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import PeerLost
from flyweight.lifecycle.states import State


def test_an_engine_that_is_killed_and_restarted_gets_its_version_again(
    server, trainer, address, answers, tmp_path
):
    alone = VllmEngine(server.address, address, name="without a worker")
    alone.update(trainer.becomes("A"))
    engine = VllmEngine(server.address, address)
    with fw.Worker(engine, engine, tmp_path / "cell", is_serving=True) as worker:
        trainer.becomes("B")
        until(lambda: engine.version == trainer.version)
        assert server.tokens() == answers["B"]
        server.kill()
        until(lambda: worker.operations.state is State.FAILED)
        with pytest.raises(PeerLost, match="reached"):
            alone.update(trainer.version)
        assert (alone.version, alone.operations.state) == (None, State.FAILED)
        server.start_again()
        until(lambda: worker.operations.state is State.SERVING)
        assert engine.version == trainer.version
        assert server.tokens() == answers["B"], "it caught up by itself"
        trainer.becomes("A")
        until(lambda: engine.version == trainer.version)
        until(lambda: worker.operations.state is State.SERVING)
        assert server.tokens() == answers["A"]
    trainer.becomes("B")
    with pytest.raises(PeerLost, match="restarted"):
        alone.update(trainer.version)
    assert alone.version is None
    assert alone.operations.state is State.FAILED
    assert server.is_paused()
    alone.update(trainer.version)
    assert server.tokens() == answers["B"], "without a worker, the next update brings it back"
