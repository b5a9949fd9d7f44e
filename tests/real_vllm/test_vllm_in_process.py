"""vLLM in the process of its user: an `LLM`, and an `AsyncLLM` with its event loop."""

import asyncio
import json
import subprocess
import sys

import pytest
from vllm_processes import OPTIONS, PROMPT

from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError, SpecError
from flyweight.lifecycle.states import State

pytestmark = pytest.mark.timeout(600)
SAMPLING = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def llm(models):
    from vllm import LLM

    return LLM(
        model=str(models / "A"),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        weight_transfer_config={"backend": "flyweight"},
        **OPTIONS,
    )


@pytest.fixture(scope="module")
def answers(llm, models):
    """The greedy tokens of each model, as vLLM itself loads it from its files."""
    found = {"A": tokens_of(llm)}
    for name in "BA":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models / name)})
        llm.reset_prefix_cache()
        assert found.setdefault(name, tokens_of(llm)) == tokens_of(llm)
    assert found["A"] != found["B"]
    return found


def tokens_of(llm):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": PROMPT}]
    found = llm.generate(prompts, SamplingParams(**SAMPLING), use_tqdm=False)
    return list(found[0].outputs[0].token_ids)


def test_an_llm_goes_from_a_to_b_and_back(llm, trainer, address, answers):
    engine = VllmEngine(llm, address)
    assert tokens_of(llm) == answers["A"]
    for name in "BABA":
        report = engine.update(trainer.becomes(name))
        assert report.verified == "received"
        assert tokens_of(llm) == answers[name]
        assert llm.get_weight_version() == str(trainer.version)


def test_an_llm_that_is_paused_answers_nothing_until_it_resumes(llm, trainer, address, answers):
    engine = VllmEngine(llm, address)
    engine.operations.pause()
    assert engine.is_paused
    engine.update(trainer.becomes("B"))
    assert (engine.operations.state, engine.is_paused) == (State.PAUSED, True)
    engine.operations.resume()
    assert tokens_of(llm) == answers["B"]


@pytest.mark.parametrize("staging_bytes", [0, 100_000, 1 << 30])
def test_any_amount_may_be_staged(llm, trainer, address, answers, staging_bytes):
    engine = VllmEngine(llm, address, staging_bytes=staging_bytes)
    for name in "BA":
        engine.update(trainer.becomes(name))
        assert tokens_of(llm) == answers[name]


def test_the_memory_of_weights_is_not_released(llm, trainer, address, answers):
    engine = VllmEngine(llm, address)
    engine.update(trainer.becomes("A"))
    with pytest.raises(LifecycleError, match="not released by Flyweight"):
        engine.operations.clear({"weights"})
    engine.update(trainer.becomes("B"))
    assert tokens_of(llm) == answers["B"]


def test_an_async_llm_is_updated_while_it_answers(models, trainer, address, answers, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def run():
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(models / "A"),
                skip_tokenizer_init=True,
                weight_transfer_config={"backend": "flyweight"},
                **OPTIONS,
            )
        )

        async def answer(name, count=32):
            how = SamplingParams(**{**SAMPLING, "max_tokens": count})
            found = [each async for each in llm.generate({"prompt_token_ids": PROMPT}, how, name)]
            return found[-1].outputs[0]

        try:
            with pytest.raises(SpecError, match="asyncio.to_thread"):
                VllmEngine(llm, address)
            engine = await asyncio.to_thread(VllmEngine, llm, address, in_flight="keep")
            assert list((await answer("first")).token_ids) == answers["A"]
            long = asyncio.ensure_future(answer("long", 1500))
            await asyncio.sleep(1)
            await asyncio.to_thread(engine.update, trainer.becomes("B"))
            found = await long
            assert [each.version for each in found.weight_versions] == ["default", "1"]
            assert list((await answer("second")).token_ids) == answers["B"]
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_a_vllm_without_the_backend_is_refused_with_the_remedy(models, address):
    script = """
import json, sys
from vllm import LLM
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError
model, address, options = json.loads(sys.argv[1])
llm = LLM(model=model, skip_tokenizer_init=True, **options)
try:
    VllmEngine(llm, address)
except LifecycleError as error:
    print("REFUSED", error)
"""
    given = json.dumps([str(models / "A"), address, OPTIONS])
    done = subprocess.run(
        [sys.executable, "-c", script, given], capture_output=True, text=True, timeout=240
    )
    text = done.stdout.rpartition("REFUSED")[2]
    assert """start it with --weight-transfer-config '{"backend": "flyweight"}'""" in text, (
        done.stderr
    )


def test_registering_again_changes_nothing():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from flyweight.engines import vllm_plugin

    for _ in range(2):
        vllm_plugin.register()
    found = WeightTransferEngineFactory._registry["flyweight"]()
    assert found is vllm_plugin.FlyweightTransfer


def test_other_objects_are_refused(address):
    with pytest.raises(SpecError, match="is not an address, an LLM or an AsyncLLM"):
        VllmEngine(object(), address)
