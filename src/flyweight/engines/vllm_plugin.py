"""What vLLM loads in each of its processes: it learns that there is a backend 'flyweight'."""

from __future__ import annotations

from logging import getLogger

BACKEND = "flyweight"
_log = getLogger("flyweight.engines")


def register() -> None:
    """Register the backend with vLLM; it is imported once vLLM uses it. Safe to repeat.

    A vLLM that has no backends to register is left as it is: other plugins must still load.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415
    except ImportError:
        _log.warning("this vLLM has no weight transfer backends; flyweight was not registered")
        return
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "flyweight.engines.vllm_worker", "FlyweightTransfer"
        )
    except ValueError:  # it is registered already: vLLM may load its plugins again
        _log.debug("the weight transfer backend %s is registered already", BACKEND)
