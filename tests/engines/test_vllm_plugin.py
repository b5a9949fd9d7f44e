"""The plugin that vLLM loads, where there is no vLLM; tests/real_vllm has the other half."""

import importlib.util
from importlib.metadata import entry_points

import pytest

from child_processes import run_python
from flyweight.engines import vllm_plugin
from flyweight.errors import MissingDependency

needs_no_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here"
)


def test_vllm_finds_the_plugin():
    (found,) = entry_points(group="vllm.general_plugins", name="flyweight")
    assert found.load() is vllm_plugin.register


@needs_no_vllm
def test_registering_without_weight_transfer_says_so_and_harms_nothing(caplog):
    for _ in range(2):
        vllm_plugin.register()
    assert "no weight transfer backends" in caplog.text


@needs_no_vllm
def test_a_backend_whose_vllm_is_missing_is_named_with_the_version_to_install():
    with pytest.raises(MissingDependency, match="was made for vLLM 0.32.0, this is no vLLM"):
        vllm_plugin.FlyweightTransfer
    with pytest.raises(AttributeError):
        vllm_plugin.Other


def test_the_plugin_is_light():
    """vLLM loads it in every process, also where the backend is not used."""
    script = (
        "import sys; from flyweight.engines import vllm_plugin; "
        "print({'torch', 'numpy', 'zmq', 'msgspec'} & set(sys.modules))"
    )
    assert run_python(script).stdout.strip() == "set()"
