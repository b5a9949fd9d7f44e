"""FastDeployHooks: what only FastDeploy and a GPU can do; FastDeployEngine: an Engine made of it.

Everything that does not exist on a CPU is behind `FastDeployHooks`: expert buffers, NCCL groups,
the device's allocator.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from typing import Any

from flyweight.adapters import paddle_layer
from flyweight.adapters.memory_release import ModelMemory
from flyweight.engines.legacy_cells import write_live_signal
from flyweight.errors import LifecycleError

_BEAT_SECONDS = 1.0
_log = getLogger("flyweight.fastdeploy")


class FastDeployHooks:
    """What only FastDeploy and its GPU have. Override what your engine does in another way.

    The defaults call what FastDeploy calls. On a CPU they do nothing, unless the config turns on
    expert parallelism or a call shuts process groups down.
    """

    def __init__(self, parallel_config: object) -> None:
        """Use the groups and ranks of `fd_config.parallel_config`."""
        self._parallel = parallel_config

    def clear_expert_buffer(self) -> None:
        """Free the buffers of expert parallelism."""
        _expert_buffers().clear_buffer()

    def recreate_expert_buffer(self) -> None:
        """Allocate the buffers of expert parallelism again."""
        _expert_buffers().recreate_buffer()

    def shut_groups_down(self) -> None:
        """Shut down the groups of expert and tensor parallelism that are in use."""
        for group in self._groups():
            sys.modules["paddle.distributed"].shutdown_process_group(group)

    def shut_all_groups_down(self) -> None:
        """Shut down every group but Paddle's default one: the last step of a clear with groups."""
        # Paddle would fail on gloo's groups, so it must not know them meanwhile.
        groups = sys.modules["paddle.distributed.collective"]._get_group_map_by_name()
        others = {name: group for name, group in groups.items() if not _can_shut_down(group)}
        for name in others:
            del groups[name]
        try:
            sys.modules["paddle.distributed"].shutdown_process_group()
        finally:
            groups.update(others)

    def restart_groups(self) -> None:
        """Restart every group that is shut down, also those that other code shut down."""
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
        return [group for group in found if group is not None and _can_shut_down(group)]

    def process_after_loading(self, model: Any, config: object) -> None:
        """Process what a model's `load_weights` has loaded: quantize, transpose, fuse.

        Inside FastDeploy this calls FastDeploy's own function, elsewhere the method that this
        function calls on each layer.
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
        """Return the memory that the device's allocator caches."""
        paddle = sys.modules["paddle"]
        if paddle.is_compiled_with_cuda():
            paddle.device.cuda.empty_cache()

    def memory(self) -> str:
        """Return how much device memory is in use, as text."""
        paddle = sys.modules["paddle"]
        if not paddle.is_compiled_with_cuda():
            return "no GPU"
        cuda = paddle.device.cuda
        return f"{cuda.memory_allocated()} of {cuda.memory_reserved()} bytes in use"

    def beat(self, percent: float) -> None:
        """Refresh FastDeploy's live signal; called every second while a call runs."""
        parallel = self._parallel
        rank = getattr(parallel, "tensor_parallel_rank", 0)
        # The name of the signal depends on FastDeploy's version.
        for name in ("local_engine_worker_queue_port", "engine_pid"):
            id = getattr(parallel, name, None)
            if id is not None and write_live_signal(id, rank):
                return

    @property
    def num_running(self) -> int:
        """The number of requests that run now."""
        return 0

    def pause(self, deadline: float) -> None:
        """Stop requests, for an update that is requested through a status cell."""
        raise LifecycleError(
            "FastDeploy's worker loop stops requests, not this engine; pass the manager's "
            "'model_weights_status' to the loop, or pass hooks that can pause"
        )

    def resume(self, version: int | None) -> None:
        """Accept requests again, with weights of that version."""

    def abort_requests(self) -> None:
        """Abort the requests that run."""

    def drop_cache(self) -> None:
        """Drop what was computed with the old weights; FastDeploy's runner also does so itself."""

    def release_cache(self) -> None:
        """Release the memory of the key-value cache."""

    def restore_cache(self) -> None:
        """Allocate the memory of the key-value cache again."""


def _can_shut_down(group: Any) -> bool:
    """Return False for groups of gloo, which cannot be shut down."""
    process_group = getattr(group, "process_group", None)
    return process_group is None or hasattr(process_group, "shutdown")


def _expert_buffers() -> Any:
    return importlib.import_module("fastdeploy.model_executor.layers.moe.ep").DeepEPBufferManager


@contextmanager
def beating(hooks: FastDeployHooks, percent: Callable[[], float]) -> Iterator[None]:
    """Within the block, call `hooks.beat` every second from a thread."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_SECONDS):
            try:
                hooks.beat(percent())
            except Exception:  # the hook is not ours, and the next beat may succeed
                _log.exception("the engine's beat failed")

    thread = threading.Thread(target=beat, name="flyweight-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_BEAT_SECONDS)


class FastDeployEngine:
    """FastDeploy's runner as an `Engine`; remembers which buffers and groups are down."""

    def __init__(
        self,
        hooks: FastDeployHooks,
        state: Mapping[str, Any],
        *,
        has_experts: bool,
        check_filled: Callable[[], None],
    ) -> None:
        """Drive `hooks`, and release the memory of `state`; `resume` calls `check_filled` first."""
        self._hooks, self._state = hooks, state
        self._has_experts, self._check_filled = has_experts, check_filled
        self._to_release: dict[str, Any] = {}
        self._memory = ModelMemory(self._to_release)
        self._should_clear_experts, self._should_clear_groups = True, False
        self._are_experts_down = self._are_groups_down = False
        self._thread = threading.local()
        self.abort_requests, self.drop_cache = hooks.abort_requests, hooks.drop_cache
        self.release_cache, self.restore_cache = hooks.release_cache, hooks.restore_cache

    @contextmanager
    def in_call(self, *, clear_experts: bool = True, clear_groups: bool = False) -> Iterator[None]:
        """Run an old call, whose caller has stopped requests: this thread need not pause them.

        `clear_experts` and `clear_groups` say what else a release of weights takes down.
        """
        self._thread.has_stopped_requests = True
        self._should_clear_experts, self._should_clear_groups = clear_experts, clear_groups
        try:
            yield
        finally:
            self._thread.has_stopped_requests = False
            self._should_clear_experts, self._should_clear_groups = True, False

    @property
    def num_running(self) -> int:
        return self._hooks.num_running

    def pause(self, deadline: float) -> None:
        if not getattr(self._thread, "has_stopped_requests", False):
            self._hooks.pause(deadline)

    def resume(self, version: int | None) -> None:
        self._check_filled()
        self._hooks.resume(version)

    def release_weights(self) -> None:
        self._to_release.update(
            {name: each for name, each in self._state.items() if paddle_layer.has_memory(each)}
        )
        try:
            self._memory.release()
        finally:
            self._to_release.clear()  # do not keep tensors alive that are replaced meanwhile
        self._hooks.empty_cache()

    def restore_weights(self) -> None:
        self._memory.restore()

    def release_experts(self) -> None:
        if self._should_clear_experts and self._has_experts and not self._are_experts_down:
            self._hooks.clear_expert_buffer()
            self._are_experts_down = True

    def restore_experts(self) -> None:
        if self._are_experts_down:
            self.recreate_experts()

    def release_groups(self) -> None:
        if self._should_clear_groups and not self._are_groups_down:
            self.shut_groups_down()
            self._hooks.shut_all_groups_down()

    def restore_groups(self) -> None:
        if self._are_groups_down:
            self.restart_groups()

    # A runner may call these by name, also for groups and buffers that it took down itself.

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
