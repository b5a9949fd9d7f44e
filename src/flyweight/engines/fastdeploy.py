"""FastDeploy: its DynamicWeightManager, with the old calls and results, on Flyweight's parts.

The old calls move a `Operations`: `update_parameters` takes weights in and stands still,
`finalize_update` lets them be served, `clear_parameters` gives their memory back; each on
all ranks or on none. What exists only on a GPU or inside FastDeploy is reached through
`FastDeployHooks`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from errno import ENOENT
from functools import partial
from logging import getLogger
from time import monotonic, perf_counter
from typing import Any

from flyweight.engines import legacy_cells
from flyweight.engines.fastdeploy_engine import (
    FastDeployHooks,
    RunnerEngine,
    give_memory,
    named_layers,
    state_of,
)
from flyweight.engines.fastdeploy_loading import ModelLoading
from flyweight.engines.fastdeploy_weights import (
    NO_MEMORY,
    REPLACED,
    STRATEGIES,
    CheckedWeights,
    FastDeployOptions,
    Site,
    check_strategy,
    gpu_id,
    read,
    step_in,
    version_number,
)
from flyweight.engines.legacy_cells import LegacyCell, LegacyStatus, LoopWord
from flyweight.errors import FlyweightError, LifecycleError, SpecError, StoreError
from flyweight.events import emit
from flyweight.lifecycle.agreement import RankAgreement
from flyweight.lifecycle.engine_steps import named
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State, Tag
from flyweight.lifecycle.worker import Worker
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous

ModelWeightsStatus = LegacyStatus
_BEAT_SECONDS = 1.0
_log = getLogger("flyweight.fastdeploy")


class DynamicWeightManager:
    """The old manager: fills Paddle layers at construction, and again when it is told to."""

    def __init__(
        self,
        fd_config: object,
        models: object,
        local_rank: int,
        *,
        options: FastDeployOptions | None = None,
        hooks: FastDeployHooks | None = None,
    ) -> None:
        """Load by the config's strategy; raise, with nothing left open, if that does not succeed.

        A layer keeps its names, and layers of a list share one set of names; those of a dict are
        named by its keys, 'draft.NAME'. All are one version, from a source with these names.
        """
        self._strategy = check_strategy(read(fd_config, "load_config.load_strategy"))
        self.fd_config, self.local_rank = fd_config, local_rank
        self.load_config: Any = read(fd_config, "load_config")
        self.parallel_config: Any = read(fd_config, "parallel_config")
        self.rank = _whole(fd_config, "parallel_config.tensor_parallel_rank")
        self._layers = named_layers(models)
        self.model_list = [layer for _, layer in self._layers]
        self.state_dict: dict[str, object] = state_of(self._layers)
        distributed = sys.modules["paddle.distributed"]
        self.nranks: int = distributed.get_world_size()
        self.meta_src_id = gpu_id()
        self.first_load = True
        self._asked: str | None = None
        self._word: LoopWord | None = None
        self._options = FastDeployOptions.of(fd_config) if options is None else options
        if self._strategy == "rsync":
            self._options = self._options.with_rsync(fd_config)
        self._hooks = FastDeployHooks(self.parallel_config) if hooks is None else hooks
        with ExitStack() as closing:
            self._site = Site(
                state=self.state_dict,
                model_directory=str(read(fd_config, "model_config.model")),
                rank=self.rank,
                global_rank=distributed.get_rank(),
                legacy_id=self.meta_src_id,
                options=self._options,
                loading=self._loading(),
                closing=closing,
            )
            num_given = named("give_memory", lambda: give_memory(self.state_dict))
            weights = STRATEGIES[self._strategy](self._site)
            find = partial(state_of, self._layers)
            self._weights = CheckedWeights(weights, self.state_dict, find, self._site.loading)
            if num_given:
                self._weights.forget(NO_MEMORY)  # nobody can vouch for what is in it
            self._engine = RunnerEngine(
                self.state_dict,
                self._hooks,
                has_experts=self._has_experts,
                check_filled=self._weights.check_filled,
            )
            with self._engine.stopped():  # nothing runs before there are weights
                self._machine = self._made_machine(closing)
            self.update_parameters()
            self.finalize_update()
            self._closing = closing.pop_all()

    def _loading(self) -> ModelLoading | None:
        """Return the models' own loaders, if there are some and the options do not say no."""
        options = self._options
        is_wanted = options.load_weights and options.layout is None
        if not is_wanted or not ModelLoading.is_wanted(self._layers):
            return None
        if options.partial_over is not None:
            raise SpecError(
                "partial_over is for parameters that are filled by name, and a model has a "
                "load_weights of its own; set config.flyweight = {'load_weights': False}"
            )
        process = partial(self._hooks.process_after_loading, config=self.fd_config)
        return ModelLoading(self._layers, process)

    def _made_machine(self, closing: ExitStack) -> Operations:
        group, size = self._group()
        rendezvous = Rendezvous() if size == 1 else rendezvous_of(group)
        if size > 1 and rendezvous.num_ranks == 1:
            raise SpecError(
                f"the config speaks of {size} ranks, paddle.distributed of one; call "
                f"paddle.distributed.init_parallel_env first"
            )
        self._ranks = RankAgreement(replace(rendezvous, group=f"{rendezvous.group}/calls"))
        closing.callback(self._ranks.close)
        if self._options.cell is None:
            ranks = RankAgreement(rendezvous)
            closing.callback(ranks.close)
            return Operations(self._engine, self._weights, ranks, should_serve=False)
        # The loop's word says what is true; a worker that has ended must not be waited for.
        word = self._word = LoopWord(lambda: _state_of(worker))
        worker = Worker(
            self._engine,
            self._weights,
            self._options.cell,
            rank=rendezvous.rank,
            num_ranks=rendezvous.num_ranks,
            process_group=group,
            should_follow=False,
            should_serve=False,
            carry_out=word.carry_out,
        )
        closing.enter_context(worker)
        return worker.operations

    @property
    def _has_experts(self) -> bool:
        return bool(getattr(self.parallel_config, "enable_expert_parallel", False))

    def _group(self) -> tuple[object, int]:
        """Return the widest group that must serve one version together, and its size."""
        parallel = self.parallel_config
        if self._has_experts:
            return getattr(parallel, "ep_group", None), self.nranks
        size = _whole(self.fd_config, "parallel_config.tensor_parallel_size")
        return getattr(parallel, "tp_group", None), size

    # How it stands.

    @property
    def version(self) -> int | None:
        """The version that is whole on every rank; None if none is."""
        return self._machine.version

    @property
    def failure(self) -> FlyweightError | None:
        """Why there is no whole version, if an update failed."""
        return self._machine.failure

    @property
    def unmatched(self) -> list[str]:
        """Tensors that the models lack, of the files or the publisher of the last update."""
        return list(self._site.unmatched)

    @property
    def health(self) -> str:
        """The state in a word, and how far an update is."""
        state = self._machine.state.lower()
        is_updating = self._machine.state is State.UPDATING
        return f"{state}, {self._machine.percent:.0f} %" if is_updating else state

    @property
    def model_weights_status(self) -> LoopWord:
        """The status cell of `config.flyweight`, for the worker loop to look at.

        Once it was taken, requests of the cell that change weights wait for the loop.
        """
        if self._word is None:
            raise SpecError("no status cell of ours; set config.flyweight = {'cell': PATH}")
        self._word.is_watched = True
        return self._word

    # The old calls.

    def update_parameters(self, pid: int = 0, restart_process_group: bool = False) -> None:
        """Take weights in, by the strategy; `finalize_update` then lets them be served."""
        with self._call(pid, LegacyStatus.UPDATING):
            if restart_process_group:
                self.restart_communication_group()
            self._machine.pause(timeout_seconds=self._options.timeout_seconds)
            self._update(self._version_to_load())

    def finalize_update(self, pid: int = 0) -> None:
        """Serve, on all ranks or on none, and say NORMAL; the first load says nothing."""
        with self._call(pid, LegacyStatus.UPDATING, LegacyStatus.NORMAL):
            self._together("finalize", self._check_filled)
            self._machine.resume(timeout_seconds=self._options.timeout_seconds)
        self.first_load = False

    def clear_parameters(self, pid: int = 0, shutdown_process_group: bool = False) -> None:
        """Give the weights' memory back, on all ranks, and say CLEARED. Safe to repeat."""
        with (
            self._call(pid, LegacyStatus.CLEARING, LegacyStatus.CLEARED),
            self._engine.clearing(groups=shutdown_process_group),
        ):
            self._together("clear", self._clear_with_groups)

    def update_weights_by_rdma(
        self, version: int | str | None = None, verify_checksum: bool = False
    ) -> dict[str, object]:
        """Take a version in and go on as before; without one, what version.yaml says.

        `sync_cost` is what it took until the weights were in place, `update_cost` the rest: to hear
        from the other ranks, and the engine's hooks. With `verify_checksum` a source that has no
        checksums is refused; without it what can be compared is compared all the same.
        """
        named = None if version is None or version == "" else str(version)
        text = self.read_model_version_from_file() if named is None else named
        number = version_number(text)
        started = perf_counter()
        self._weights.seconds = 0.0
        with self._call(None, LegacyStatus.UPDATING):
            self._update(number, must_verify=bool(verify_checksum))
        self._asked, total = text, perf_counter() - started
        return {
            "sync_cost": self._weights.seconds,
            "update_cost": total - self._weights.seconds,
            "total_cost": total,
            "version": text,
            "rank": self.local_rank,
        }

    def read_model_version_from_file(self) -> str:
        """Return the `step` of the model directory's version.yaml; raise VersionError."""
        return step_in(self._site.model_directory)

    # The old calls, in pieces: for a runner that sleeps and wakes by itself.

    def clear_deepep_buffer(self) -> None:
        named("clear_expert_buffer", self._engine.clear_experts)

    def clear_model_weight(self) -> None:
        """Give the weights' memory back; expert buffers and groups stay."""
        with self._call(None, LegacyStatus.CLEARING), self._engine.clearing(experts=False):
            self._clear()

    def clear_communication_group(self) -> None:
        """Shut groups down once every rank has come to that."""
        self._together("shut groups down", lambda: None)
        named("shut_groups_down", self._engine.shut_groups_down)

    def restart_communication_group(self) -> None:
        """Restart the groups that are shut down, by this manager or by the runner."""
        if not self.first_load:
            named("restart_groups", self._engine.restart_groups)

    def recreate_deepep_buffer(self) -> None:
        """Have the buffers again, on all ranks."""
        if not self.first_load:
            self._together(
                "recreate buffers",
                lambda: named("recreate_expert_buffer", self._engine.recreate_experts),
            )

    def reload_model_weights(self) -> None:
        if not self.first_load:
            with self._call(None, LegacyStatus.UPDATING):
                self._update(self._version_to_load())

    check_model_weights_status = staticmethod(legacy_cells.check_model_weights_status)

    def _log_memory(self, context: str) -> None:
        """Tell listeners how much memory is in use; FastDeploy's runner calls it by this name."""
        emit("memory", context=context, text=self._hooks.memory())

    def close(self) -> None:
        """Leave the publisher and the other ranks; the models stay as they are. Safe to repeat."""
        self._closing.close()

    def __enter__(self) -> DynamicWeightManager:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # Steps.

    def _is_replaced(self) -> bool:
        """True if there is a version to serve, and the layers' tensors are not what it filled."""
        return self._machine.version is not None and not self._weights.is_filled()

    def _check_filled(self) -> None:
        """Raise, with nothing left to serve, if the layers' tensors are not those filled."""
        replaced = LifecycleError(REPLACED)
        # In a round that something else runs it may only look so.
        if self._is_replaced() and self._machine.fail(replaced, if_so=self._is_replaced):
            raise replaced

    def _version_to_load(self) -> int | None:
        """Return the version that was asked for last, for a strategy that goes by versions."""
        if self._word is not None and self._word.version is not None:
            return self._word.version
        if self._strategy != "rsync":
            return None
        text = self.read_model_version_from_file() if self._asked is None else self._asked
        return version_number(text)

    def _update(self, version: int | None, *, must_verify: bool = False) -> None:
        now = check_strategy(self.load_config.load_strategy)
        if now != self._strategy:
            raise SpecError(
                f"load_strategy was {self._strategy!r} and is {now!r}; make another manager"
            )
        self._machine.update(
            version, must_verify=must_verify, timeout_seconds=self._options.timeout_seconds
        )

    def _clear(self) -> None:
        self._machine.clear({Tag.WEIGHTS}, timeout_seconds=self._options.timeout_seconds)

    def _clear_with_groups(self) -> None:
        self._clear()
        # Weights that were cleared before without their groups.
        named("shut_groups_down", self._engine.release_groups)

    def _together(self, what: str, step: Callable[[], None]) -> None:
        """Do a step on every rank, and raise on each if it failed on one."""
        error = None
        try:
            step()
        except FlyweightError as failure:
            error = failure
        deadline = monotonic() + self._options.timeout_seconds
        verdict = self._ranks.agreed(0, "", error, deadline, what=what)
        if error is not None:
            raise error
        if not verdict.is_agreed:
            raise LifecycleError(verdict.text)

    @contextmanager
    def _call(
        self, pid: int | None, request: LegacyStatus, result: LegacyStatus | None = None
    ) -> Iterator[None]:
        """Make one old call: beat meanwhile, and say in the old cell how it ended.

        A failure has no number there. An update that failed says CLEARED, and the engine of that
        cell stays paused whatever it holds: whoever waits for NORMAL would take the old version
        for the new one. After any other failure, and where nobody waits at an old cell, the
        version from before is served again.
        """
        is_ours = self._word is not None and self._word.is_asked
        may_be_normal = is_ours or request is not LegacyStatus.UPDATING
        may_go_on = may_be_normal or not pid  # the same on all ranks, though one has the cell
        was_serving = may_go_on and self._machine.state is State.SERVING
        with ExitStack() as stack:
            cell = self._cell(pid)
            if cell is not None:
                stack.enter_context(cell)
            stack.enter_context(self._beating())
            stack.enter_context(self._engine.stopped())
            try:
                yield
            except BaseException as error:
                if self._word is not None:
                    self._word.fail(error)
                if was_serving and self._machine.state is State.PAUSED:
                    with suppress(FlyweightError):  # what is raised is the first error
                        self._machine.resume(timeout_seconds=self._options.timeout_seconds)
                is_served = may_be_normal and self._machine.state is State.SERVING
                truth = LegacyStatus.NORMAL if is_served else LegacyStatus.CLEARED
                self._settle(cell, truth, request)
                raise
            if result is not None:
                self._settle(cell, result, request)

    def _settle(self, cell: LegacyCell | None, result: LegacyStatus, request: LegacyStatus) -> None:
        if cell is not None:
            legacy_cells.settle(cell, result, of=request)
        if self._word is not None and self._word.is_asked:
            legacy_cells.settle(self._word, result, of=request)

    def _cell(self, pid: int | None) -> LegacyCell | None:
        """Return the old cell if this rank writes results; there is none for the default pid."""
        if pid is None or self.first_load or self.rank != 0:
            return None
        try:
            return LegacyCell(legacy_cells.MODEL_WEIGHTS, pid)
        except StoreError as error:
            if error.errno == ENOENT and (pid == 0 or self._word is not None):
                return None
            raise

    @contextmanager
    def _beating(self) -> Iterator[None]:
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(_BEAT_SECONDS):
                try:
                    self._hooks.beat(self._machine.percent)
                except Exception:  # of an engine's own; the next beat may succeed
                    _log.exception("the engine's beat failed")

        thread = threading.Thread(target=beat, name="flyweight-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(_BEAT_SECONDS)


def _state_of(worker: Worker) -> State:
    if worker.failure is not None:
        raise worker.failure
    return worker.operations.state


def _whole(config: object, path: str) -> int:
    found = read(config, path)
    if type(found) is not int or found < 0:
        raise SpecError(f"{path} is {found!r}, expected a whole number")
    return found
