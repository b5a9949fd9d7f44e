"""Kinds of models whose weights vLLM packs, shares, derives from others, or cannot reload."""

import json
import subprocess
import sys

import kinds_of_models
import pytest
from vllm_processes import START_SECONDS


def run(kind, check):
    done = subprocess.run(
        [sys.executable, kinds_of_models.__file__, kind, check],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.rpartition("FOUND")[2])


@pytest.mark.parametrize(
    "kind",
    [
        "latent attention",  # from whose weights vLLM derives others
        # test_vllm_in_process.py has experts with a tied head.
        pytest.param("tied", marks=pytest.mark.campaign),
        pytest.param("experts", marks=pytest.mark.campaign),
    ],
)
def test_each_kind_of_model_answers_as_one_that_was_loaded_afresh(kind):
    answers = run(kind, "updates")
    loaded = answers["loaded"]
    assert loaded["A"] != loaded["B"]
    wanted = [loaded["B"], loaded["A"], loaded["B"]]
    assert answers["files"] == wanted
    assert answers["models"] == wanted


def test_a_model_whose_loader_writes_past_a_reload_is_refused_or_fails():
    """Refused before it is touched; without that check it fails, and serves no old weights."""
    refused, failed = run("written by itself", "refusals")
    assert (refused[0], refused[2]) == ("PlanError", "SERVING")
    assert failed[2] == "FAILED"
    assert all("'model.layers.0.attn.sinks'" in text for _, text, _ in (refused, failed))
