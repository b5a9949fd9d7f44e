"""A real vLLM of two workers: they commit together, and hold what a fresh load holds."""

import numpy as np
import pytest
from dying_trainer import check_dying_trainer, check_failed_load, each_kill

import flyweight as fw
from flyweight.engines.vllm import VllmEngine, publish_to, update_all
from flyweight.errors import PeerLost, PlanError, TransferTimeout
from flyweight.lifecycle.states import State


def test_all_workers_hold_what_a_fresh_load_of_the_same_files_holds(
    server_of_two, trainer, address, models
):
    tokens, loaded = server_of_two.loaded
    assert len(loaded) == 2 * 17, "two workers, with all of their parameters"
    engine = VllmEngine(server_of_two.address, address)
    report = engine.update(trainer.becomes("A"))
    whole = sum(each.nbytes for each in trainer.model.values())
    assert report.nbytes == 2 * whole, "each worker reads whole tensors, and cuts them itself"
    other = server_of_two.checksums()
    assert all(other[name] != loaded[name] for name in loaded)
    assert server_of_two.tokens() != tokens
    engine.update(trainer.becomes("B"))
    assert server_of_two.checksums() == loaded
    assert server_of_two.tokens() == tokens
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(models / "A")}}
    server_of_two.call("POST", "/collective_rpc", reload)
    assert server_of_two.checksums() == other, "as vLLM loads it from its files"


def test_the_publisher_sees_one_replica_of_two_ranks(server_of_two, trainer, address):
    engine = VllmEngine(server_of_two.address, address, name="pair")
    engine.update(trainer.becomes("A"))
    assert trainer.publisher.replicas == ["pair"]


def test_both_workers_refuse_what_does_not_fit_and_none_is_touched(server_of_two, trainer, address):
    engine = VllmEngine(server_of_two.address, address)
    engine.update(version := trainer.becomes("A"))
    before = server_of_two.checksums()
    trainer.close()
    trainer.model.pop("lm_head.weight")
    with fw.Publisher(trainer.model, address, keep="in_place") as publisher:
        publisher.publish(9)
        with pytest.raises(PlanError, match="'lm_head.weight'"):
            engine.update(9)
    assert engine.operations.state is State.SERVING
    assert server_of_two.checksums() == before
    assert server_of_two.version() == str(version)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.campaign), 1])
@each_kill("filling")
def test_a_trainer_that_dies_in_mid_update_costs_neither_worker_anything(
    server_of_two, trainer, models, address, tmp_path, moment, number
):
    if moment == "announcing" and number:
        pytest.skip("a version is announced once")
    check_dying_trainer(server_of_two, trainer, models, address, tmp_path, moment, number)


def test_a_load_that_fails_leaves_both_workers_failed_until_a_whole_update(
    server_of_two, trainer, address, tmp_path
):
    check_failed_load(server_of_two, trainer, address, tmp_path)


def test_several_engines_update_at_once_and_each_has_its_result(
    server, server_of_two, trainer, answers, address, monkeypatch
):
    engine = VllmEngine(server.address, address)
    version = trainer.becomes("B")
    other = VllmEngine(server_of_two.address, address, name="other")
    lost = VllmEngine(server_of_two.address, address.replace("policy", "nobody"), name="lost")
    seen = []
    results = update_all([engine, other], version, on_end=seen.append)
    assert [each.error for each in results] == [None, None]
    assert [each.report.version for each in results] == [version, version]
    assert {each.name for each in seen} == {engine.name, "other"}
    update = lost.update
    monkeypatch.setattr(lost, "update", lambda version, **_: update(version, timeout_seconds=0.5))
    first, second = update_all([engine, lost], trainer.becomes("A"))
    assert (first.error, first.state) == (None, State.SERVING)
    assert isinstance(second.error, PeerLost | TransferTimeout)
    assert (second.name, second.report, second.state) == ("lost", None, State.SERVING)
    assert server.tokens() == answers["A"]
    assert server_of_two.version() == str(version)


def test_a_trainer_publishes_to_engines_and_one_that_is_gone_delays_nobody(
    server, models, tmp_path, answers, server_of_two
):
    place = f"unix:{tmp_path}/policy"
    with fw.open(models / "B") as source:
        model = {
            name: np.frombuffer(bytearray(source.read(name)), np.float32).reshape(
                source.manifest.spec(name).shape
            )
            for name in source.manifest.names
        }
    with fw.Publisher(model, place) as publisher:
        engine = VllmEngine(server.address, place)
        pair = VllmEngine(server_of_two.address, place)
        gone = VllmEngine(server.address, place.replace("policy", "nobody"), name="gone")
        gone._control._port = 9
        # To wait for the one that is gone would be a hang.
        first, second, third = publish_to([engine, pair, gone], publisher, 5, timeout_seconds=3600)
        assert (first.error, second.error) == (None, None)
        assert isinstance(third.error, PeerLost)
        assert server.tokens() == answers["B"]
        assert server.version() == server_of_two.version() == "5"
