"""FlyweightTransfer: Flyweight inside a worker of vLLM, its weight transfer backend 'flyweight'.

An update has two parts. `init_transfer_engine` begins it: a thread joins the publisher, receives
the first tensors of the version and checks them, while the worker serves. `receive_weights`
completes it, once `VllmEngine` has paused the engine. The worker's own thread loads all tensors in
that one call, so no forward pass sees a half-loaded model. Ranks of one engine commit together.

`VllmEngine` polls the workers by vLLM's `collective_rpc("weight_transfer_engine")`. That calls this
object, which returns its status. Work that must not run beside vLLM's own is done in these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from flyweight.adapters.loader import Loader
from flyweight.engines.background_update import BackgroundUpdate, MainThread
from flyweight.engines.vllm_fit import check_fit
from flyweight.errors import LifecycleError, PeerRefused, TransferTimeout
from flyweight.live.curve_keys import CurveClient, CurveKeys
from flyweight.live.replica import Replica
from flyweight.spec.manifest import TensorSpec
from flyweight.stores.private_file import read_token

_SHUTDOWN_SECONDS = 5.0


@dataclass
class UpdateRequest(WeightTransferInitInfo):  # type: ignore[misc]
    """What `VllmEngine` sends to begin an update."""

    update: str
    """The id of the update."""
    address: str
    name: str
    """The name of the replica, which all ranks of the engine have in common."""
    version: int | None
    """The version to take; None: the next one that is newer than `held`."""
    held: int | None
    """The version that the engine still holds, as vLLM says."""
    may_keep: bool
    must_verify: bool
    staging_bytes: int
    timeout_seconds: float
    should_check_fit: bool
    token_file: str | None = None
    server_key_file: str | None = None


@dataclass
class UpdateStart(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `VllmEngine` sends to complete an update, while the engine is paused."""

    update: str


class FlyweightTransfer(WeightTransferEngine[UpdateRequest, UpdateStart]):  # type: ignore[misc]
    """Takes versions from a publisher, as one rank of a replica."""

    init_info_cls = UpdateRequest
    update_info_cls = UpdateStart
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._boot = token_hex(8)
        """Tells this worker from the one that was there before a restart."""
        self._main = MainThread()
        self._loader = VllmLoader(self)
        self._replica: Replica | None = None
        self._connected_by: tuple[object, ...] = ()
        self._update: BackgroundUpdate | None = None
        self._is_loaded = False

    def __call__(self) -> dict[str, Any]:
        """Return the status of the update, after doing what it needs this thread for."""
        self._main.run_waiting()
        parallel = self.parallel_config
        ranks = {"rank": parallel.rank, "engine": parallel.data_parallel_index, "boot": self._boot}
        held = None if self._replica is None else self._replica.version
        update = {"state": "idle"} if self._update is None else self._update.status()
        return {**ranks, "held": held, **update}

    def init_transfer_engine(self, init_info: UpdateRequest) -> None:
        """Begin an update in the background; it ends the one before, if that still waits."""
        if self._update is not None:
            self._update.cancel()
        request = init_info
        self._loader.staging_bytes = request.staging_bytes
        self._loader.should_check_fit = request.should_check_fit
        self._update = BackgroundUpdate(
            request.update,
            lambda: self._replica_for(request),
            self._main,
            last=self._update,
            version=request.version,
            may_keep=request.may_keep,
            must_verify=request.must_verify,
            timeout_seconds=request.timeout_seconds,
        )
        self._update.start()

    def _replica_for(self, request: UpdateRequest) -> Replica:
        """Return the replica of a request; a new one if it is to be connected otherwise."""
        by = (request.address, request.name, request.token_file, request.server_key_file)
        if self._replica is None or by != self._connected_by:
            self._close_replica()
            parallel = self.parallel_config
            name = request.name
            if parallel.data_parallel_size > 1:  # each of them is an engine of its own
                name = f"{name} dp{parallel.data_parallel_index}"
            self._replica = Replica(
                self._loader,
                request.address,
                name=name,
                rank=parallel.rank,
                num_ranks=parallel.world_size,
                token=_token(request.token_file),
                curve=_curve(request.server_key_file),
            )
            self._connected_by = by
        if self._replica.version != request.held:  # others may have written the weights since
            self._replica.forget("the engine does not hold its version any more")
        return self._replica

    def start_weight_update(self) -> None:
        """Do nothing yet: between two calls of vLLM no forward pass may see a half-loaded model."""
        self._is_loaded = False

    def receive_weights(self, update_info: UpdateStart) -> None:
        """Load the version that is staged, and commit it with the other ranks."""
        update = self._update
        if update is None or update.id != update_info.update:
            found = "none" if update is None else f"update {update.id}"
            raise LifecycleError(f"update {update_info.update} was not begun here, {found} was")
        update.complete()
        self._is_loaded = True

    def finish_weight_update(self) -> None:
        if not self._is_loaded:
            raise LifecycleError("the update was finished before its weights were received")

    def in_own_thread(self, function: Callable[[], None], *, is_load: bool = False) -> None:
        """Have the worker's own thread call a function for the update that runs."""
        assert self._update is not None
        self._update.call(function, is_load=is_load)

    def load(self, weights: Iterator[tuple[str, Any]]) -> None:
        """Load all tensors of a version into the model; called in the worker's own thread."""
        _undo_half_load(self.model)
        initialize_layerwise_reload(self.model)
        self.load_into(self.model, weights)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # before the version is committed

    def load_into(self, model: Any, weights: Iterator[tuple[str, Any]]) -> None:
        with set_current_vllm_config(self.vllm_config), disable_mtp_completeness_check():
            model.load_weights(weights)

    def shutdown(self) -> None:
        """Leave the publisher. Safe to repeat."""
        if self._update is not None:
            self._update.cancel()
            with suppress(TransferTimeout):
                self._update.join(_SHUTDOWN_SECONDS)
        self._close_replica()

    def _close_replica(self) -> None:
        if self._replica is not None:
            self._replica.close()
            self._replica = None


class VllmLoader(Loader):
    """vLLM's own loader, which runs in the worker's thread and gets tensors layer by layer."""

    should_check_fit = True

    def __init__(self, transfer: FlyweightTransfer) -> None:
        self._transfer = transfer
        super().__init__(self._load, "torch", str(transfer.device))

    def _load(self, weights: Iterator[tuple[str, Any]]) -> None:
        self._transfer.in_own_thread(partial(self._transfer.load, weights), is_load=True)

    def choose(self, tensors: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Return the tensors of each layer together; raise PlanError if vLLM cannot load them."""
        ordered = {name: tensors[name] for name in by_layers(tensors)}
        transfer = self._transfer
        # vLLM itself demands all weights at its start only if they are not quantized.
        if self.should_check_fit and transfer.model_config.quantization is None:
            check = partial(check_fit, transfer.model, ordered, load=transfer.load_into)
            transfer.in_own_thread(check)
        return ordered


def by_layers(names: Mapping[str, object]) -> list[str]:
    """Return names with those of a layer together, in the order of the layers.

    A layer is the outermost number in a name. Names without one keep their place before or after
    the layers. vLLM keeps all tensors of a layer until the last of them is there.
    """
    stacks: dict[str, int] = {}

    def place(name: str) -> tuple[int, int, int]:
        before: list[str] = []
        for part in name.split("."):
            if part.isdecimal():
                return 1, stacks.setdefault(".".join(before), len(stacks)), int(part)
            before.append(part)
        return 2 if stacks else 0, 0, 0

    places = {name: place(name) for name in names}
    return sorted(names, key=places.__getitem__)


def _undo_half_load(model: Any) -> None:
    """Put back the tensors of layers that a load which failed has left without memory.

    vLLM would go on with what such a layer got then: it would count those elements twice, and take
    the layer for complete before it is.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    token = read_token(Path(path))
    if token is None:
        raise PeerRefused(f"there is no token file {path!r} on the host of vLLM")
    return token


def _curve(path: str | None) -> CurveClient | None:
    return None if path is None else CurveClient(CurveKeys.read_public(path))
