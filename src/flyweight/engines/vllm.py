"""Flyweight for vLLM: what a trainer imports to bring its weights into running engines.

`vllm_engine.py` controls one vLLM from outside, `vllm_fleet.py` several at once. Inside of vLLM,
`vllm_plugin.py` registers the backend and `vllm_worker.py` is the replica.
"""

from __future__ import annotations

from flyweight.engines.vllm_engine import VllmEngine
from flyweight.engines.vllm_fleet import EngineUpdate, publish_to, update_all

__all__ = ["EngineUpdate", "VllmEngine", "publish_to", "update_all"]
