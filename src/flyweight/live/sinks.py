"""The sink of a replica, by what the user gives it: a model, or an engine's loader."""

from __future__ import annotations

from flyweight.adapters.loader import Framework, Loader
from flyweight.adapters.tree import is_model
from flyweight.errors import SpecError
from flyweight.live.loader_sink import LoaderSink
from flyweight.live.memory_sink import MemorySink
from flyweight.live.replica_round import UpdateSink
from flyweight.spec.model_layout import ModelLayout


def sink_for(
    target: object,
    cut: tuple[ModelLayout | None, int | None],
    *,
    extra: str,
    framework: Framework,
    device: str,
) -> UpdateSink:
    """Return the sink; `Replica` explains the arguments. `cut` is a layout and a rank of it."""
    layout, rank = cut
    if extra not in ("refuse", "report"):
        raise SpecError(f"extra is {extra!r}, not 'refuse' or 'report'")
    if callable(target) and not is_model(target):
        target = Loader(target, framework, device)
    if isinstance(target, Loader):
        if layout is not None:
            raise SpecError("a loader takes whole tensors; a layout is for models")
        return LoaderSink(target)
    return MemorySink(target, layout=layout, rank=rank, may_leave=extra == "report")
