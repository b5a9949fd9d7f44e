"""FastDeploy's runner, as an engine that a machine drives, and what only it and a GPU can do.

`FastDeployHooks` is the one seam to what does not exist on a CPU: expert buffers, NCCL's
groups, a device's allocator. Everything else of the adapter runs anywhere.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flyweight.adapters import paddle_layer
from flyweight.adapters.memory_release import ModelMemory
from flyweight.engines.legacy_cells import tell_alive
from flyweight.errors import LifecycleError, SpecError, listed
from flyweight.ports import EngineHooks


class FastDeployHooks:
    """What only FastDeploy and its GPU have. Replace what your engine does another way.

    These defaults call what FastDeploy calls; none of them runs on a CPU without being asked for
    by the config: expert parallelism, or groups that are shut down.
    """

    def __init__(self, parallel_config: object) -> None:
        self._parallel = parallel_config

    def clear_expert_buffer(self) -> None:
        _expert_buffers().clear_buffer()

    def recreate_expert_buffer(self) -> None:
        _expert_buffers().recreate_buffer()

    def shut_groups_down(self) -> None:
        """Shut down the groups of expert and tensor parallelism that are in use."""
        for group in self._groups():
            sys.modules["paddle.distributed"].shutdown_process_group(group)

    def shut_all_groups_down(self) -> None:
        """Shut down every group but Paddle's default one: the last step of a clear with groups."""
        distributed = sys.modules["paddle.distributed"]
        with _only_groups_that_end():
            distributed.shutdown_process_group()

    def restart_groups(self) -> None:
        """Restart every group that is shut down, whoever shut it down."""
        distributed = sys.modules["paddle.distributed"]
        distributed.restart_process_group()
        for group in reversed(self._groups()):
            distributed.restart_process_group(group)

    def _groups(self) -> list[object]:
        parallel = self._parallel
        used = {
            "ep_group": bool(getattr(parallel, "enable_expert_parallel", False)),
            "tp_group": getattr(parallel, "tensor_parallel_size", 1) > 1,
        }
        found = (getattr(parallel, name, None) for name, is_used in used.items() if is_used)
        return [group for group in found if group is not None and _can_end(group)]

    def process_after_loading(self, model: Any, config: object) -> None:
        """Process what a model's `load_weights` has loaded: quantize, transpose, fuse.

        Inside FastDeploy its own function does; elsewhere what it calls on each layer is called.
        """
        if "fastdeploy" in sys.modules:
            utils = importlib.import_module("fastdeploy.model_executor.utils")
            utils.process_final_after_loading(model, config)
            return
        for layer in (*model.sublayers(), model):
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)
            elif hasattr(layer, "process_weights_after_loading"):
                layer.process_weights_after_loading()

    def empty_cache(self) -> None:
        """Return what the device's allocator keeps for itself."""
        paddle = sys.modules["paddle"]
        if paddle.is_compiled_with_cuda():
            paddle.device.cuda.empty_cache()

    def memory(self) -> str:
        """Tell how much device memory is in use."""
        cuda = sys.modules["paddle"].device.cuda
        if not sys.modules["paddle"].is_compiled_with_cuda():
            return "no GPU"
        return f"{cuda.memory_allocated()} of {cuda.memory_reserved()} bytes in use"

    def beat(self, percent: float) -> None:
        """Called every second while a call runs: keep FastDeploy's live signal going."""
        parallel = self._parallel
        rank = getattr(parallel, "tensor_parallel_rank", 0)
        for name in ("local_engine_worker_queue_port", "engine_pid"):  # by its age
            id = getattr(parallel, name, None)
            if id is not None and tell_alive(id, rank):
                return

    def pause(self, deadline: float) -> None:
        """Stop requests, for an update that is asked for through a status cell of ours."""
        raise LifecycleError(
            "FastDeploy's worker loop stops requests, not this; ask through "
            "'model_weights_status', or give hooks that can pause"
        )

    def resume(self, version: int | None) -> None:
        """Let requests run, with weights of that version."""

    def abort_requests(self) -> None:
        """End the requests that run, unfinished."""

    def drop_cache(self) -> None:
        """Forget what was computed with the old weights; the worker loop's runner does so too."""

    def release_cache(self) -> None:
        """Give the key-value cache's memory back."""

    def restore_cache(self) -> None:
        """Have the key-value cache's memory again."""


def _can_end(group: Any) -> bool:
    """False for gloo's groups: they cannot be shut down."""
    process_group = getattr(group, "process_group", None)
    return process_group is None or hasattr(process_group, "shutdown")


@contextmanager
def _only_groups_that_end() -> Iterator[None]:
    """Inside, Paddle does not know gloo's groups, on which its sweep over all groups would fail."""
    groups = sys.modules["paddle.distributed.collective"]._get_group_map_by_name()
    others = {name: group for name, group in groups.items() if not _can_end(group)}
    for name in others:
        del groups[name]
    try:
        yield
    finally:
        groups.update(others)


def _expert_buffers() -> Any:
    return importlib.import_module("fastdeploy.model_executor.layers.moe.ep").DeepEPBufferManager


class RunnerEngine(EngineHooks):
    """FastDeploy's runner, as far as a machine must know it."""

    def __init__(
        self,
        state: Mapping[str, Any],
        hooks: FastDeployHooks,
        *,
        has_experts: bool,
        check_filled: Callable[[], None],
    ) -> None:
        """Drive `hooks`; what `check_filled` raises is not served."""
        self._check_filled = check_filled
        self._state, self._hooks, self._has_experts = state, hooks, has_experts
        self._to_release: dict[str, Any] = {}
        self._memory = ModelMemory(self._to_release)
        self._takes_groups, self._takes_experts = False, True
        self._are_experts_down = self._are_groups_down = False
        self._here = threading.local()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, this thread may change weights: who makes an old call has stopped requests."""
        self._here.is_stopped = True
        try:
            yield
        finally:
            self._here.is_stopped = False

    @contextmanager
    def clearing(self, *, experts: bool = True, groups: bool = False) -> Iterator[None]:
        """Inside, weights that are released take expert buffers and process groups with them."""
        self._takes_experts, self._takes_groups = experts, groups
        try:
            yield
        finally:
            self._takes_experts, self._takes_groups = True, False

    def pause(self, deadline: float) -> None:
        if not getattr(self._here, "is_stopped", False):
            self._hooks.pause(deadline)

    def resume(self, version: int | None) -> None:
        self._check_filled()
        self._hooks.resume(version)

    def drop_cache(self) -> None:
        self._hooks.drop_cache()

    def release_weights(self) -> None:
        self._to_release.update(
            {n: each for n, each in self._state.items() if paddle_layer.has_memory(each)}
        )
        try:
            self._memory.release()
        finally:
            self._to_release.clear()  # tensors that are replaced meanwhile must not live on by it
        self._hooks.empty_cache()

    def restore_weights(self) -> None:
        self._memory.restore()

    def abort_requests(self) -> None:
        self._hooks.abort_requests()

    def release_cache(self) -> None:
        self._hooks.release_cache()

    def restore_cache(self) -> None:
        self._hooks.restore_cache()

    def release_experts(self) -> None:
        if self._takes_experts:
            self.clear_experts()

    def restore_experts(self) -> None:
        if self._are_experts_down:
            self.recreate_experts()

    def release_groups(self) -> None:
        if self._takes_groups and not self._are_groups_down:
            self.shut_groups_down()
            self._hooks.shut_all_groups_down()

    def restore_groups(self) -> None:
        if self._are_groups_down:
            self.restart_groups()

    # What a runner asks for by name is done whatever this engine remembers.

    def clear_experts(self) -> None:
        if self._has_experts and not self._are_experts_down:
            self._hooks.clear_expert_buffer()
            self._are_experts_down = True

    def recreate_experts(self) -> None:
        if self._has_experts:
            self._hooks.recreate_expert_buffer()
        self._are_experts_down = False

    def shut_groups_down(self) -> None:
        self._hooks.shut_groups_down()
        self._are_groups_down = True

    def restart_groups(self) -> None:
        self._hooks.restart_groups()
        self._are_groups_down = False


def named_layers(models: object) -> list[tuple[str, Any]]:
    """Return the layers, each with what goes before its names."""
    if isinstance(models, Mapping):
        return [(f"{name}.", layer) for name, layer in models.items()]
    if isinstance(models, Sequence):
        return [("", layer) for layer in models]
    return [("", models)]


def state_of(layers: Sequence[tuple[str, Any]]) -> dict[str, object]:
    """Return all layers' live tensors by name."""
    state: dict[str, object] = {}
    clashing = []
    for prefix, layer in layers:
        found = paddle_layer.state_of(layer)
        if found is None:
            raise SpecError(f"models has a {type(layer).__name__}, expected Paddle layers")
        for name, tensor in found.items():
            if state.setdefault(f"{prefix}{name}", tensor) is not tensor:
                clashing.append(name)
    if clashing:
        raise SpecError(
            f"{len(clashing)} names are in several models: {listed(clashing)}; pass a dict of "
            f"models, its keys go before their names"
        )
    if not state:
        raise SpecError("models have no parameters")
    return state


def give_memory(state: Mapping[str, Any]) -> int:
    """Give memory to tensors that have none, and return how many. What is in it is anything.

    FastDeploy makes its models under `paddle.LazyGuard`, and others may have cleared them.
    """
    return sum(paddle_layer.give_memory([tensor]) for tensor in state.values())
