"""DynamicWeightManager: FastDeploy's manager with its old calls and results, on Flyweight's parts.

`update_parameters` loads weights and leaves the engine paused, `finalize_update` serves them,
`clear_parameters` releases their memory; each on all ranks or on none. The calls drive a
`Operations` of `FastDeployEngine` and `ModelWeights`. `worker_loop.py` has the loop that makes
them, `strategies.py` where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from errno import ENOENT
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from flyweight.engines import worker_loop
from flyweight.engines.fastdeploy_config import (
    Deployment,
    FastDeployOptions,
    check_strategy,
    read,
    read_step,
    version_number,
)
from flyweight.engines.fastdeploy_engine import FastDeployEngine, FastDeployHooks, beating
from flyweight.engines.fastdeploy_models import Models
from flyweight.engines.legacy_cells import MODEL_WEIGHTS, LegacyCell, LegacyStatus, settle
from flyweight.engines.strategies import REPLACED, ModelWeights
from flyweight.engines.worker_loop import WorkerLoopCell
from flyweight.errors import FlyweightError, LifecycleError, PeerLost, SpecError, StoreError
from flyweight.events import emit
from flyweight.lifecycle.engine_steps import named
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State, Tag
from flyweight.lifecycle.worker import Worker
from flyweight.ranks.agreement import RankAgreement, raise_first
from flyweight.ranks.rendezvous import Rendezvous

__all__ = ["DynamicWeightManager", "FastDeployHooks", "FastDeployOptions", "ModelWeightsStatus"]

ModelWeightsStatus = LegacyStatus


class DynamicWeightManager:
    """Fills Paddle layers at construction, and again whenever FastDeploy's runner calls it.

    Args:
        fd_config: FastDeploy's config; `config.flyweight` may hold a dict of options.
        models: one layer, which keeps its names; a list of layers, which share one set of names;
            or a dict of layers, whose keys prefix their names, as in 'draft.NAME'. All are one
            version, from a source with these names.
        local_rank: repeated in the results of `update_weights_by_rdma`.
        options: used instead of `config.flyweight`.
        hooks: what only FastDeploy and a GPU can do; by default what FastDeploy does.

    The constructor loads by the config's strategy and serves. If it raises, nothing stays open.
    """

    def __init__(
        self,
        fd_config: object,
        models: object,
        local_rank: int,
        *,
        options: FastDeployOptions | None = None,
        hooks: FastDeployHooks | None = None,
    ) -> None:
        self._deployment = deployment = Deployment.of(fd_config, options)
        options = deployment.options
        self._seconds = options.timeout_seconds
        self.fd_config, self.local_rank = fd_config, local_rank
        self.load_config: Any = read(fd_config, "load_config")
        self.parallel_config: Any = read(fd_config, "parallel_config")
        self.rank, self.nranks = deployment.rank, deployment.num_global_ranks
        self.meta_src_id = deployment.gpu_id
        self._hooks = FastDeployHooks(self.parallel_config) if hooks is None else hooks
        process = partial(self._hooks.process_after_loading, config=fd_config)
        may_load = options.load_weights and options.layout is None
        filled = Models(models, process, may_load=may_load)
        if filled.has_loaders and options.partial_over is not None:
            raise SpecError(
                "partial_over is for parameters that are filled by name, and a model has a "
                "load_weights of its own; set config.flyweight = {'load_weights': False}"
            )
        self.model_list, self.state_dict = filled.layers, filled.state
        self.first_load = True
        self._version_text: str | None = None
        """The version of the last `update_weights_by_rdma`."""
        self._loop_cell: WorkerLoopCell | None = None
        with ExitStack() as closing:
            rendezvous = deployment.rendezvous()
            self._ranks = RankAgreement(replace(rendezvous, group=f"{rendezvous.group}/calls"))
            closing.callback(self._ranks.close)
            self._weights = ModelWeights(filled, deployment, self._ranks)
            closing.callback(self._weights.close)
            self._engine = FastDeployEngine(
                self._hooks,
                self.state_dict,
                has_experts=deployment.has_experts,
                check_filled=self._weights.check_filled,
            )
            with self._engine.in_call():  # there are no requests before there are weights
                self._operations = self._made_operations(rendezvous, closing)
            self.update_parameters()
            self.finalize_update()
            self._closing = closing.pop_all()

    def _made_operations(self, rendezvous: Rendezvous, closing: ExitStack) -> Operations:
        path = self._deployment.options.cell
        if path is None:
            ranks = RankAgreement(rendezvous)
            closing.callback(ranks.close)
            return Operations(self._engine, self._weights, ranks, should_serve=False)

        def state() -> State:
            if worker.failure is not None:  # the loop must not wait for a worker that has ended
                raise worker.failure
            return worker.operations.state

        self._loop_cell = WorkerLoopCell(state)
        worker = Worker(
            self._engine,
            self._weights,
            path,
            rank=rendezvous.rank,
            num_ranks=rendezvous.num_ranks,
            process_group=self._deployment.group,
            should_follow=False,
            should_serve=False,
            carry_out=self._loop_cell.carry_out,
        )
        closing.enter_context(worker)
        return worker.operations

    @property
    def version(self) -> int | None:
        """The version that is complete on every rank, or None."""
        return self._operations.version

    @property
    def failure(self) -> FlyweightError | None:
        """The error of the update that failed, if there is no complete version because of it."""
        return self._operations.failure

    @property
    def unmatched(self) -> list[str]:
        """Tensors that the source of the last update has and the models lack."""
        return list(self._weights.unmatched)

    @property
    def health(self) -> str:
        """The engine state in lower case; during an update also its progress, 'updating, 43 %'."""
        state = self._operations.state
        progress = f", {self._operations.percent:.0f} %" if state is State.UPDATING else ""
        return f"{state.lower()}{progress}"

    @property
    def model_weights_status(self) -> WorkerLoopCell:
        """The status cell of `config.flyweight["cell"]`, for the worker loop to look at.

        Once this was read, requests of the cell that change weights wait for the loop.
        """
        if self._loop_cell is None:
            raise SpecError("there is no status cell; set config.flyweight = {'cell': PATH}")
        self._loop_cell.has_loop = True
        return self._loop_cell

    # FastDeploy's calls.

    def update_parameters(self, pid: int = 0, restart_process_group: bool = False) -> None:
        """Load weights by the strategy; `finalize_update` then serves them.

        Args:
            pid: the id of the old status cell to write the result into.
            restart_process_group: restart communication groups first.
        """
        with self._call(pid, LegacyStatus.UPDATING):
            if restart_process_group:
                self.restart_communication_group()
            self._operations.pause(timeout_seconds=self._seconds)
            self._update(self._version_to_load())

    def finalize_update(self, pid: int = 0) -> None:
        """Serve, on all ranks or on none, and write NORMAL, except after the first load."""
        with self._call(pid, LegacyStatus.UPDATING, LegacyStatus.NORMAL):
            self._together("finalize", self._check_filled)
            self._operations.resume(timeout_seconds=self._seconds)
        self.first_load = False

    def clear_parameters(self, pid: int = 0, shutdown_process_group: bool = False) -> None:
        """Release the weights' memory on all ranks, and write CLEARED. Safe to repeat.

        Args:
            pid: the id of the old status cell to write the result into.
            shutdown_process_group: shut communication groups down afterwards.
        """

        def clear() -> None:
            self._clear()
            # Weights that were cleared earlier have left their groups up.
            named("shut_groups_down", self._engine.release_groups)

        cleared = LegacyStatus.CLEARED
        with self._call(pid, LegacyStatus.CLEARING, cleared, clear_groups=shutdown_process_group):
            self._together("clear", clear)

    def update_weights_by_rdma(
        self, version: int | str | None = None, verify_checksum: bool = False
    ) -> dict[str, object]:
        """Load a version, and go on as before: serving, if the engine was.

        Args:
            version: a number, or text that ends with one; None: the step of version.yaml.
            verify_checksum: refuse a source without checksums. If False, checksums are compared
                where there are some.

        Returns the version's text, this rank, and three times in seconds: `sync_cost` until the
        weights are in place, `update_cost` for the other ranks and the hooks, `total_cost`.
        """
        text = str("" if version is None else version) or self.read_model_version_from_file()
        number = version_number(text)
        started = perf_counter()
        self._weights.seconds = 0.0
        with self._call(None, LegacyStatus.UPDATING):
            self._update(number, verify=bool(verify_checksum))
        self._version_text, total = text, perf_counter() - started
        return {
            "sync_cost": self._weights.seconds,
            "update_cost": total - self._weights.seconds,
            "total_cost": total,
            "version": text,
            "rank": self.local_rank,
        }

    def read_model_version_from_file(self) -> str:
        """Return the `step` of the model directory's version.yaml; raise VersionError."""
        return read_step(self._deployment.directory)

    # The same in single steps, for a runner that sleeps and wakes by itself.

    def clear_deepep_buffer(self) -> None:
        """Free the buffers of expert parallelism."""
        named("clear_expert_buffer", self._engine.release_experts)

    def clear_model_weight(self) -> None:
        """Release the weights' memory; expert buffers and groups stay."""
        with self._call(None, LegacyStatus.CLEARING, clear_experts=False):
            self._clear()

    def clear_communication_group(self) -> None:
        """Shut communication groups down, once every rank has called this."""
        self._together("shut groups down", lambda: None)
        named("shut_groups_down", self._engine.shut_groups_down)

    def restart_communication_group(self) -> None:
        """Restart the groups that are down, whether this manager or the runner shut them down."""
        if not self.first_load:
            named("restart_groups", self._engine.restart_groups)

    def recreate_deepep_buffer(self) -> None:
        """Allocate the buffers of expert parallelism again, on all ranks."""
        if not self.first_load:
            recreate = partial(named, "recreate_expert_buffer", self._engine.recreate_experts)
            self._together("recreate buffers", recreate)

    def reload_model_weights(self) -> None:
        """Load weights by the strategy, and go on as before."""
        if not self.first_load:
            with self._call(None, LegacyStatus.UPDATING):
                self._update(self._version_to_load())

    check_model_weights_status = staticmethod(worker_loop.check_model_weights_status)

    def _log_memory(self, context: str) -> None:
        """Emit how much memory is in use. FastDeploy's runner calls this by this name."""
        emit("memory", context=context, text=self._hooks.memory())

    def close(self) -> None:
        """Disconnect from the publisher and the other ranks; the models stay. Safe to repeat."""
        self._closing.close()

    def __enter__(self) -> DynamicWeightManager:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_filled(self) -> None:
        """Fail the engine and raise if the models no longer have the tensors that were filled."""

        def is_replaced() -> bool:
            return self._operations.version is not None and not self._weights.are_filled()

        replaced = LifecycleError(REPLACED)
        # During another operation's update it only looks so: `fail` checks again after that.
        if is_replaced() and self._operations.fail(replaced, if_so=is_replaced):
            raise replaced

    def _version_to_load(self) -> int | None:
        """Return the version of the request or of the last call; None: the strategy's newest."""
        request = None if self._loop_cell is None else self._loop_cell.request
        if request is not None and request.version is not None:
            return request.version
        if self._deployment.strategy != "rsync":
            return None
        return version_number(self._version_text or self.read_model_version_from_file())

    def _update(self, version: int | None, *, verify: bool = False) -> None:
        before, now = self._deployment.strategy, check_strategy(self.load_config.load_strategy)
        if now != before:
            raise SpecError(
                f"load_strategy was {before!r} and is {now!r}; make another manager for that"
            )
        self._operations.update(version, verify=verify, timeout_seconds=self._seconds)

    def _clear(self) -> None:
        self._operations.clear({Tag.WEIGHTS}, timeout_seconds=self._seconds)

    def _together(self, what: str, step: Callable[[], None]) -> None:
        """Do a step on every rank, and raise on every rank if one of them failed."""
        error = None
        try:
            step()
        except FlyweightError as failure:
            error = failure
        try:
            said = self._ranks.exchange(what, monotonic() + self._seconds, error)
        except PeerLost as lost:
            raise (error or LifecycleError(str(lost))) from lost
        raise_first(said, error)

    @contextmanager
    def _call(
        self,
        pid: int | None,
        request: LegacyStatus,
        result: LegacyStatus | None = None,
        **clears: bool,
    ) -> Iterator[None]:
        """Run one of FastDeploy's calls: beat meanwhile, and write the result into the old cell.

        An old cell has no number for a failure. After a failed update it says CLEARED, and the
        engine stays paused even if it holds the old version: a caller that waits for NORMAL would
        take the old version for the new one. After any other failure, and if there is no old
        cell, the version from before is served again.
        """
        is_from_loop = self._loop_cell is not None and self._loop_cell.request is not None
        may_be_normal = is_from_loop or request is not LegacyStatus.UPDATING
        may_resume = may_be_normal or not pid  # equal on all ranks, though only one has the cell
        was_serving = may_resume and self._operations.state is State.SERVING
        with (
            self._legacy_cell(pid) as cell,
            beating(self._hooks, lambda: self._operations.percent),
            self._engine.in_call(**clears),
        ):
            try:
                yield
            except BaseException:
                if was_serving and self._operations.state is State.PAUSED:
                    with suppress(FlyweightError):  # the first error is the one to raise
                        self._operations.resume(timeout_seconds=self._seconds)
                is_served = may_be_normal and self._operations.state is State.SERVING
                result = LegacyStatus.NORMAL if is_served else LegacyStatus.CLEARED
                raise
            finally:
                if cell is not None and result is not None:
                    settle(cell, result, of=request)

    def _legacy_cell(self, pid: int | None) -> AbstractContextManager[LegacyCell | None]:
        """Open the old cell if this rank writes results. The default pid need not have one."""
        if pid is None or self.first_load or self.rank != 0:
            return nullcontext()
        try:
            return LegacyCell(MODEL_WEIGHTS, pid)
        except StoreError as error:
            if error.errno == ENOENT and (pid == 0 or self._loop_cell is not None):
                return nullcontext()
            raise
