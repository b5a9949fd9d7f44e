"""vLLM in the process of its user: an `LLM`, and an `AsyncLLM` with its event loop.

Its model has experts and a tied head, which vLLM packs in ways of their own.
"""

import asyncio

import pytest
from kinds_of_models import SAMPLING, Kind, tokens_of
from vllm_processes import ENDLESS, LONGEST, OPTIONS, PROMPT

import flyweight as fw
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError, SpecError, TransportError
from flyweight.lifecycle.states import State


@pytest.fixture(scope="module")
def kind(tmp_path_factory):
    return Kind("tied experts", tmp_path_factory.mktemp("kind"))


@pytest.fixture(scope="module")
def models(kind):
    """The directories of A and B, for the fixture `trainer`."""
    return kind.place


@pytest.fixture
def llm(kind):
    return kind.llm


@pytest.fixture
def answers(kind):
    """The greedy tokens of each model, as vLLM itself has loaded it from its files."""
    assert kind.loaded["A"] != kind.loaded["B"]
    return kind.loaded


def test_an_llm_goes_from_a_to_b_and_back(llm, trainer, address, answers):
    assert tokens_of(llm) == answers["A"]
    engine = VllmEngine(llm, address)
    for name in "BABA":
        report = engine.update(trainer.becomes(name))
        assert report.verified == "received"
        assert tokens_of(llm) == answers[name]
        assert llm.get_weight_version() == str(trainer.version)


def test_the_tensors_of_a_model_may_have_other_names_than_those_of_its_files(kind, answers):
    assert kind.of_models["A"].keys() != kind.of_files["A"].keys()
    assert kind.updated(kind.of_models, "BA") == [answers["B"], answers["A"]]


def test_an_llm_that_is_paused_answers_nothing_until_it_resumes(llm, trainer, address, answers):
    engine = VllmEngine(llm, address)
    engine.operations.pause()
    assert engine.is_paused
    engine.update(trainer.becomes("B"))
    assert (engine.operations.state, engine.is_paused) == (State.PAUSED, True)
    engine.operations.resume()
    assert tokens_of(llm) == answers["B"]


@pytest.mark.parametrize("staging_bytes", [0, 100_000, 1 << 30])
def test_of_memory_that_is_mapped_any_amount_may_be_copied_before_the_pause(
    llm, trainer, address, answers, staging_bytes
):
    engine = VllmEngine(llm, address, staging_bytes=staging_bytes)
    for name in "BA":
        assert engine.update(trainer.becomes(name)).transport == "mapped"
        assert tokens_of(llm) == answers[name]


def test_what_cannot_be_mapped_must_fit_and_is_refused_before_vllm_is_touched(
    llm, trainer, address, answers
):
    engine = VllmEngine(llm, address)
    engine.update(version := trainer.becomes("A"))
    trainer.close()
    model = {name: each.clone() for name, each in trainer.model.items()}
    nbytes = sum(each.nbytes for each in model.values())
    with fw.Publisher(model, address, keep="in_place") as publisher:
        publisher.publish(version + 1)
        small = VllmEngine(llm, address, staging_bytes=nbytes - 1)
        with pytest.raises(TransportError, match=f"{nbytes}.*staging_bytes"):
            small.update(version + 1)
        assert (small.operations.state, small.version) == (State.SERVING, version)
        assert tokens_of(llm) == answers["A"]
        assert VllmEngine(llm, address, staging_bytes=nbytes).update().transport == "filled"
        assert tokens_of(llm) == answers["A"]


def test_the_memory_of_weights_is_not_released(llm, trainer, address, answers):
    engine = VllmEngine(llm, address)
    engine.update(trainer.becomes("A"))
    with pytest.raises(LifecycleError, match="released"):
        engine.operations.clear({"weights"})
    engine.update(trainer.becomes("B"))
    assert tokens_of(llm) == answers["B"]


def test_an_async_llm_is_updated_while_it_answers(kind, trainer, address, answers, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def run():
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(kind.place / "A"),
                skip_tokenizer_init=True,
                weight_transfer_config={"backend": "flyweight"},
                **{**OPTIONS, "max_model_len": LONGEST},
            )
        )

        def answer(name, count=32):
            how = SamplingParams(**SAMPLING, max_tokens=count)
            return llm.generate({"prompt_token_ids": PROMPT}, how, name)

        async def last(outputs):
            return [each async for each in outputs][-1].outputs[0]

        try:
            with pytest.raises(SpecError, match="to_thread"):
                VllmEngine(llm, address)
            engine = await asyncio.to_thread(VllmEngine, llm, address, in_flight="keep")
            assert list((await last(answer("first"))).token_ids) == answers["A"]
            endless = answer("endless", ENDLESS)
            await anext(endless)
            await asyncio.to_thread(engine.update, trainer.becomes("B"))
            assert list((await last(answer("second"))).token_ids) == answers["B"]
            await llm.abort("endless")
            spans = (await last(endless)).weight_versions
            assert [each.version for each in spans] == ["default", "1"]
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_registering_again_changes_nothing():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from flyweight.engines import vllm_plugin

    for _ in range(2):
        vllm_plugin.register()
    found = WeightTransferEngineFactory._registry["flyweight"]()
    assert found is vllm_plugin.FlyweightTransfer


def test_other_objects_are_refused(address):
    with pytest.raises(SpecError, match="LLM"):
        VllmEngine(object(), address)
