"""FlyweightTransfer: Flyweight inside a worker of vLLM, its weight transfer backend 'flyweight'.

An update has two parts. `init_transfer_engine` begins it: a thread joins the publisher, and on a
CPU receives all tensors of the version and checks them, while the worker serves. `update_weights`
completes it, once `VllmEngine` has paused the engine. The worker's own thread loads all tensors in
that one call, so no forward pass sees a half-loaded model. All workers of a server commit together:
vLLM returns the status of its first data parallel engine only, which so speaks for all of them.

`VllmEngine` polls the workers by vLLM's `collective_rpc("weight_transfer_engine")`. That calls this
object, which returns its status. Work that must not run beside vLLM's own is done in these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from logging import getLogger
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from flyweight.adapters.loader import Loader
from flyweight.engines.background_update import BackgroundUpdate, MainThread
from flyweight.engines.vllm_fit import check_fit
from flyweight.engines.vllm_reload import check_can_reload, reload_weights, take_memory
from flyweight.errors import FlyweightError, LifecycleError, PeerRefused, TransferTimeout
from flyweight.live import Replica
from flyweight.memory import Buffer, available_bytes
from flyweight.spec.manifest import TensorSpec
from flyweight.stores.private_file import read_token
from flyweight.transports.tls import Tls

_SHUTDOWN_SECONDS = 5.0
_log = getLogger("flyweight.engines")


class UpdateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `VllmEngine` sends to begin an update."""

    update: str
    """The id of the update."""
    address: str
    name: str
    """The name of the replica, which all workers of the server have in common."""
    num_engines: int
    """How many data parallel engines the server has."""
    version: int | None
    """The version to take; None: the next one that is newer than `held`."""
    held: int | None
    """The version that the engine still holds."""
    may_keep: bool
    verify: bool
    staging_bytes: int | None
    """The most memory of each worker for what comes before the pause; None: its share of half of
    what is free."""
    timeout_seconds: float
    should_check_fit: bool
    token_file: str | None
    tls: dict[str, str | bool] | None
    """The options of `Tls`, as files on the host of vLLM."""


class FlyweightTransfer(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Takes versions from a publisher, as one rank of a replica.

    With several workers, no call raises: vLLM would stop at the first error, and take the answers
    of the other workers for those to its next calls. So errors are in the status.
    """

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
        self._refusal: dict[str, Any] | None = None
        """The status of a request that could not be begun."""
        self._is_open = False
        """True between vLLM's calls that start and finish an update."""
        self._is_whole = True
        """False while the parameters are written, and after a load that failed."""

    def __call__(self) -> dict[str, Any]:
        """Return the status of the update, after doing what it needs this thread for."""
        self._main.run_waiting()
        parallel = self.parallel_config
        update = self._refusal
        if update is None:
            update = {"state": "idle"} if self._update is None else self._update.status()
        return {
            "rank": parallel.rank,
            "balancing": _balancing(parallel),
            "boot": self._boot,
            "is_open": self._is_open,
            "is_whole": self._is_whole,
            "held": None if self._replica is None else self._replica.version,
            **update,
        }

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Return it as it is: `init_transfer_engine` checks it, and does not raise."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Begin an update in the background, which ends the one before; or only end that."""
        cancelled = init_info.get("cancel")
        if self._update is not None and cancelled in (None, self._update.id):
            self._update.cancel()
        if cancelled is not None:
            return
        self._refusal = None
        try:
            request = msgspec.convert(init_info, UpdateRequest)
        except msgspec.ValidationError as error:
            update = str(init_info.get("update"))
            text = f"vLLM has another version of flyweight than VllmEngine, or of its API: {error}"
            self._refusal = {
                "update": update,
                "state": "failed",
                "version": None,
                "error": "SpecError",
                "text": text,
            }
            return
        self._loader.should_check_fit = request.should_check_fit
        self._update = BackgroundUpdate(
            request.update,
            lambda: self._replica_for(request),
            self._main,
            last=self._update,
            free=self._loader.spent.clear,
            version=request.version,
            may_keep=request.may_keep,
            verify=request.verify,
            timeout_seconds=request.timeout_seconds,
        )
        self._update.start()

    def _replica_for(self, request: UpdateRequest) -> Replica:
        """Return the replica of a request; a new one if it is to be connected otherwise."""
        token_file, tls = request.token_file, request.tls
        how = (request.num_engines, request.staging_bytes, token_file, tls)
        by = (request.address, request.name, *how)
        if self._replica is None or by != self._connected_by:
            self._close_replica()
            parallel = self.parallel_config
            before = parallel.data_parallel_index if request.num_engines > 1 else 0
            num_ranks = request.num_engines * parallel.world_size
            staging_bytes = request.staging_bytes
            if staging_bytes is None:
                staging_bytes = available_bytes() // (2 * num_ranks)  # all are on this host
            self._replica = Replica(
                self._loader,
                request.address,
                name=request.name,
                rank=before * parallel.world_size + parallel.rank,
                world_size=num_ranks,
                staging_bytes=staging_bytes,
                token=_token(token_file),
                tls=None if tls is None else Tls(**tls),  # type: ignore[arg-type]
                serve=tls is None or "certificate" in tls,
            )
            self._connected_by = by
        if self._replica.version != request.held:  # others may have written the weights since
            self._replica.forget("the engine does not hold its version any more")
        return self._replica

    def start_weight_update(self) -> None:
        """Do nothing yet: between two calls of vLLM no forward pass may see a half-loaded model."""
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version that is staged, and commit it with the other ranks.

        With one worker, raises what ended the update; with several, the status says so.
        """
        error: FlyweightError | None = None
        wanted = update_info.get("update")
        if self._update is None or self._update.id != wanted:
            error = LifecycleError(f"update {wanted!r} was not begun here; begin it anew")
        else:
            try:
                self._update.complete()
                self._is_whole = True
            except FlyweightError as failure:
                error = failure
                self._make_unusable()
        if error is not None:
            _log.error("the update of vLLM's weights failed: %s", error)
            if self.parallel_config.world_size == 1:
                self._is_open = False  # as vLLM does
                raise error

    def _make_unusable(self) -> None:
        """Take the memory of all parameters away, unless the old version is whole on all ranks.

        vLLM must not serve what a failed update has left, even if a user resumes it by hand: now a
        forward pass ends with an error. The next update puts the parameters back.
        """
        if self._replica is not None and self._replica.state == "FAILED":
            self._is_whole = False
            take_memory(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Do nothing: `update_weights` does all of it."""

    def finish_weight_update(self) -> None:
        """Do nothing: all was done before the version was committed."""
        self._is_open = False

    def in_own_thread(self, function: Callable[[], None], *, is_load: bool = False) -> None:
        """Have the worker's own thread call a function for the update that runs."""
        assert self._update is not None
        self._update.call(function, is_load=is_load)

    def load(self, weights: Iterator[tuple[str, Any]]) -> None:
        """Load all tensors of a version into the model; called in the worker's own thread."""
        self._is_whole = False
        load = partial(self.load_into, weights=weights)
        reload_weights(self.model, self.model_config, load)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # before the version is committed

    def load_into(self, model: Any, weights: Iterator[tuple[str, Any]]) -> Any:
        with set_current_vllm_config(self.vllm_config), disable_mtp_completeness_check():
            return model.load_weights(weights)

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
        self._transfer, self._is_loading = transfer, False
        self.spent: list[Any] = []
        """Tensors from before the pause, which are freed after it: that takes long."""
        super().__init__(self._load, "torch", str(transfer.device))

    def _load(self, weights: Iterator[tuple[str, Any]]) -> None:
        self._is_loading = True
        try:
            self._transfer.in_own_thread(partial(self._transfer.load, weights), is_load=True)
        finally:
            self._is_loading = False

    def fresh(self, spec: TensorSpec) -> tuple[Any, Buffer]:
        tensor, memory = super().fresh(spec)
        if not self._is_loading:
            self.spent.append(tensor)
        return tensor, memory

    def choose(self, tensors: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Return the tensors of each layer together; raise PlanError if vLLM cannot load them."""
        ordered = {name: tensors[name] for name in by_layers(tensors)}
        transfer = self._transfer
        check_can_reload(transfer.model)
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


def _balancing(parallel: Any) -> str:
    """Return which data parallel engines a server has: 'internal' all of them, 'external' one."""
    if parallel.data_parallel_external_lb:
        return "external"
    return "hybrid" if parallel.data_parallel_hybrid_lb else "internal"


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    token = read_token(Path(path))
    if token is None:
        raise PeerRefused(f"there is no token file {path!r} on the host of vLLM")
    return token
