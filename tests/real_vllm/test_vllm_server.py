"""A real vLLM server, updated over HTTP while it serves, by trainers that may die."""

from time import monotonic

import numpy as np
import pytest
from dying_trainer import check_dying_trainer, check_failed_load, dying_trainer, each_kill
from vllm_processes import ENDLESS, PROMPT, Asking, Stream

import flyweight as fw
from child_processes import LIMIT, in_time
from flyweight.engines.vllm import VllmEngine, update_all
from flyweight.errors import (
    Busy,
    DigestMismatch,
    LifecycleError,
    PeerLost,
    PlanError,
    SpecError,
    TransferTimeout,
)
from flyweight.lifecycle.states import State


@pytest.fixture
def engine(server, address):
    """An engine for the server, which may hold any version when a test begins."""
    return VllmEngine(server.address, address)


def test_weights_go_from_a_to_b_and_back_and_greedy_tokens_follow(server, engine, trainer, answers):
    for name in "BAB":
        report = engine.update(trainer.becomes(name))
        assert server.tokens() == answers[name]
        assert server.version() == str(trainer.version) == str(engine.version)
        assert report.verified == "received"
        assert report.nbytes == sum(each.nbytes for each in trainer.model.values())
        assert engine.operations.state is State.SERVING
        assert not server.is_paused()


def test_a_prefix_that_was_cached_with_old_weights_is_not_used_again(
    server, engine, trainer, answers
):
    long = PROMPT * 40
    engine.update(trainer.becomes("A"))
    before = server.tokens(prompt=long)
    engine.update(trainer.becomes("B"))
    after = server.tokens(prompt=long)
    engine.update(trainer.becomes("A"))
    assert server.tokens(prompt=long) == before != after


def test_a_request_in_flight_goes_on_with_the_new_weights_if_it_is_kept(
    server, address, trainer, answers
):
    engine = VllmEngine(server.address, address, in_flight="keep")
    engine.update(old := trainer.becomes("A"))
    with Stream(server) as stream:
        engine.update(new := trainer.becomes("B"))
        assert server.tokens() == answers["B"], "while the request went on"
        tokens, ((first, start, cut), (second, again, end)) = stream.abort()
    assert (first, second) == (str(old), str(new))
    assert (start, again, end) == (0, cut, len(tokens))
    assert 0 < cut < end


def test_an_update_waits_for_a_request_in_flight_which_ends_with_the_old_weights(
    server, engine, trainer, answers, monkeypatch
):
    engine.update(old := trainer.becomes("A"))
    pause, streams = engine._control.pause, []

    def pause_with_request(*how):
        streams.append(Stream(server, count=1000))
        pause(*how)

    monkeypatch.setattr(engine._control, "pause", pause_with_request)
    engine.update(trainer.becomes("B"))
    (stream,) = streams
    assert stream.end()[1] == [(str(old), 0, 1000)]
    assert server.tokens() == answers["B"]


def test_requests_in_flight_are_aborted_if_the_user_wants_that(server, address, trainer, answers):
    engine = VllmEngine(server.address, address, in_flight="abort")
    engine.update(old := trainer.becomes("A"))
    with Stream(server) as stream:
        engine.update(trainer.becomes("B"))
        tokens, spans = stream.end()
    assert 0 < len(tokens) < ENDLESS
    assert spans == [(str(old), 0, len(tokens))]
    assert server.tokens() == answers["B"]


def test_a_pause_that_waits_too_long_for_requests_leaves_the_old_version(
    server, engine, trainer, answers, monkeypatch
):
    engine.update(old := trainer.becomes("A"))
    new, pause, given = trainer.becomes("B"), engine._control.pause, []

    def pause_soon(how, deadline):
        given.append(deadline - monotonic())
        pause(how, monotonic() + 1)

    monkeypatch.setattr(engine._control, "pause", pause_soon)
    with Stream(server) as stream:
        with pytest.raises(TransferTimeout, match="/pause"):
            engine.update(new, timeout_seconds=LIMIT)
        assert 0 < given[0] < LIMIT
        assert (engine.version, engine.operations.state) == (old, State.SERVING)
        stream.abort()
    assert server.tokens() == answers["A"]
    assert server.version() == str(old)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.pop("model.norm.weight"), "'model.norm.weight'"),
        (
            lambda model: model.pop("model.layers.1.self_attn.k_proj.weight"),
            "'model.layers.1.self_attn.qkv_proj.weight'",
        ),
        (
            lambda model: model.update({"model.norm.weight": np.ones(64, np.float32)}),
            "'model.norm.weight', f32 of shape (64,)",
        ),
        (
            lambda model: model.update({"model.foo.weight": np.ones(64, np.float32)}),
            "'model.foo.weight'",
        ),
    ],
    ids=["missing", "missing part", "shape", "unknown"],
)
def test_tensors_that_do_not_fit_are_refused_before_vllm_is_touched(
    server, engine, trainer, answers, tmp_path, change, text
):
    engine.update(version := trainer.becomes("A"))
    model = dict(trainer.model)
    change(model)
    asking = Asking(server)
    asking.start()
    with fw.Publisher(model, f"unix:{tmp_path}/other", keep="in_place") as publisher:
        publisher.publish(9)
        other = VllmEngine(server.address, f"unix:{tmp_path}/other")
        with pytest.raises(PlanError) as raised:
            other.update(9)
    assert text in str(raised.value)
    assert (other.operations.state, other.failure) == (State.SERVING, None)
    assert {tuple(each[2]) for each in asking.end()} == {tuple(answers["A"][:4])}
    assert server.version() == str(version)
    engine.update(trainer.becomes("B"))
    assert server.tokens() == answers["B"]


@pytest.mark.parametrize("staging_bytes", [None, 0])
def test_weights_that_change_after_their_digest_are_not_loaded(
    server, trainer, answers, address, staging_bytes
):
    engine = VllmEngine(server.address, address, staging_bytes=staging_bytes)
    engine.update(trainer.becomes("B"))
    new = trainer.becomes("A")  # with digests for engines that are connected
    trainer.model["model.norm.weight"][0] += 1
    with pytest.raises(DigestMismatch, match="'model.norm.weight'"):
        engine.update(new)
    if staging_bytes is None:
        assert (engine.operations.state, server.is_paused()) == (State.SERVING, False)
        assert server.tokens() == answers["B"]
    else:
        assert (engine.operations.state, server.is_paused()) == (State.FAILED, True)
    engine.update(trainer.becomes("A"))
    assert server.tokens() == answers["A"]


def test_an_engine_that_is_not_paused_is_not_updated(server, engine, trainer, answers):
    from flyweight.ports import UpdateOptions

    engine.update(version := trainer.becomes("A"))
    for before in (None, lambda found: None):
        with pytest.raises(LifecycleError, match="paused"):
            engine.take(
                UpdateOptions(timeout_seconds=LIMIT, version=trainer.becomes("B"), before=before)
            )
    assert server.tokens() == answers["A"]
    assert (server.version(), engine.version) == (str(version), version)
    engine.update(trainer.version)
    assert server.tokens() == answers["B"]


def test_a_version_that_never_comes_leaves_everything_as_it_was(server, engine, trainer, answers):
    engine.update(version := trainer.becomes("A"))
    with in_time(1.0, early=0.3), pytest.raises(TransferTimeout):
        engine.update(version + 100, timeout_seconds=1)
    trainer.close()
    with pytest.raises((TransferTimeout, PeerLost)):
        engine.update(timeout_seconds=1)
    assert server.tokens() == answers["A"]
    assert engine.operations.state is State.SERVING


def test_a_second_controller_knows_which_version_vllm_holds(server, engine, trainer, answers):
    engine.update(version := trainer.becomes("B"))
    second = VllmEngine(server.address, engine._how["address"])
    assert (second.version, second.operations.state) == (version, State.SERVING)
    second.update(trainer.becomes("A"))
    assert server.tokens() == answers["A"]


def test_of_two_controllers_at_once_one_wins_and_the_other_is_told(
    server, engine, trainer, answers, address
):
    engine.update(trainer.becomes("A"))
    second = VllmEngine(server.address, address, name="second")
    assert engine.operations.state is second.operations.state is State.SERVING
    for name in "BA":
        results = update_all([engine, second], trainer.becomes(name), timeout_seconds=LIMIT)
        failed = [each.error for each in results if each.error is not None]
        assert len(failed) < 2
        assert all(isinstance(each, Busy | LifecycleError) for each in failed), failed
        assert server.tokens() == answers[name]


@each_kill("leasing, mapped", "filling")
def test_a_trainer_that_dies_while_its_version_is_on_its_way_costs_nothing(
    server, trainer, models, address, tmp_path, moment
):
    check_dying_trainer(server, trainer, models, address, tmp_path, moment)


def test_a_trainer_that_dies_once_its_version_is_staged_is_not_missed(
    server, trainer, models, address, tmp_path, answers
):
    VllmEngine(server.address, address).update(trainer.becomes("A"))
    elsewhere = f"unix:{tmp_path}/dying"
    with dying_trainer(models / "B", elsewhere, "filling", 7, number=-1) as process:
        engine = VllmEngine(server.address, elsewhere)
        pause = engine.pause

        def pause_without_trainer(deadline):
            process.kill()
            process.join()
            pause(deadline)

        engine.pause = pause_without_trainer
        assert engine.update(7).version == 7
    assert (engine.operations.state, server.is_paused()) == (State.SERVING, False)
    assert (server.tokens(), server.version()) == (answers["B"], "7")


def test_a_load_that_fails_leaves_the_engine_failed_until_a_whole_update(
    server, trainer, address, tmp_path
):
    check_failed_load(server, trainer, address, tmp_path)


def test_a_failed_engine_recovers_by_its_own_next_update(server, trainer, address, answers):
    engine = VllmEngine(server.address, address, staging_bytes=0)
    engine.update(trainer.becomes("B"))
    version = trainer.becomes("A")
    trainer.model["model.norm.weight"][0] += 1
    with pytest.raises(DigestMismatch):
        engine.update(version)
    assert engine.operations.state is State.FAILED
    new = trainer.becomes("A")
    assert engine.update(new).version == new
    assert engine.operations.state is State.SERVING
    assert server.tokens() == answers["A"]


def test_a_server_that_is_none_is_refused(address, server):
    with pytest.raises(PeerLost, match="reached"):
        VllmEngine("http://127.0.0.1:9", address)
    with pytest.raises(SpecError, match="address"):
        VllmEngine("unix:somewhere", address)
    with pytest.raises(SpecError, match="in_flight"):
        VllmEngine(server.address, address, in_flight="later")


def test_a_vllm_without_the_backend_is_refused_with_the_remedy(loaded_b):
    assert """--weight-transfer-config '{"backend": "flyweight"}'""" in loaded_b["refusal"]
