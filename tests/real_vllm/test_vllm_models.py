"""Kinds of models whose weights vLLM packs, shares, derives from others, or cannot reload."""

import json
import os
import subprocess
import sys

import kinds_of_models
import pytest

pytestmark = pytest.mark.timeout(600)


def run(kind, **how):
    done = subprocess.run(
        [sys.executable, kinds_of_models.__file__, json.dumps([kind, how])],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.rpartition("FOUND")[2])


@pytest.mark.parametrize("kind", ["tied", "experts", "latent attention"])
def test_each_kind_of_model_answers_as_one_that_was_loaded_afresh(kind):
    answers = run(kind)
    loaded = answers["loaded"]
    assert loaded["A"] != loaded["B"]
    wanted = [loaded["B"], loaded["A"], loaded["B"]]
    assert answers["files"] == wanted
    assert answers["models"] == wanted


def test_a_model_whose_loader_writes_past_a_reload_is_refused_before_it_is_touched():
    error = run("written by itself")["files"]
    assert "PlanError: vLLM cannot reload GptOssForCausalLM" in error
    assert "which a reload does not see: 'model.layers.0.attn.sinks'" in error
    assert error.endswith("SERVING")


def test_without_that_check_such_a_model_fails_instead_of_serving_old_weights():
    error = run("written by itself", should_check_fit=False)["files"]
    assert "that its loader has written were lost: 'model.layers.0.attn.sinks'" in error
    assert error.endswith("FAILED")
