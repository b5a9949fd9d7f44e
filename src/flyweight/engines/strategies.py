"""FastDeploy's load strategies: where each one gets weights from, and how the models take them.

`STRATEGIES` serves every call of the manager. `ipc` and `ipc_async` are the same here: the
publisher chooses the transport. `rsync` has no network of its own yet; it gets a version from
the publisher if there is one, else from snapshots.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from flyweight.adapters.loader import Load, Loader
from flyweight.engines.fastdeploy_config import (
    FastDeployOptions,
    gpu_id,
    read,
    read_number,
)
from flyweight.engines.fastdeploy_models import Models
from flyweight.errors import FlyweightError, LifecycleError, SpecError, listed
from flyweight.events import emit
from flyweight.formats.stored import Stored
from flyweight.lifecycle.weights import NearestWeights, StoredWeights
from flyweight.live.replica import Replica
from flyweight.ports import UpdateReport, Weights
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.load import LoadReport, load

REPLACED = "parameters were replaced after they were filled, or lost their memory; update"
NO_MEMORY = "parameters had no memory"
STRATEGIES: Mapping[str, Collection[str]] = {
    "ipc_snapshot": ("files", "old files"),
    "ipc": ("publisher",),
    "ipc_async": ("publisher",),
    "rsync": ("publisher", "files"),
}
"""The sources of each strategy, nearest first. Old files are those of FastDeploy's trainers."""
_STREAM_BYTES = 256 << 20
"""How many bytes are read from files at a time for a model's own loader."""


def check_strategy(name: object) -> str:
    """Return the name of a strategy that exists."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise SpecError(f"load_strategy is {name!r}, not one of {', '.join(STRATEGIES)}")
    return name


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the config and the environment say about this rank of the engine."""

    strategy: str
    options: FastDeployOptions
    directory: str
    """The model's directory."""
    rank: int
    """This rank among those of tensor parallelism, which is its rank in the layout."""
    global_rank: int
    """The rank in the names of old files."""
    num_global_ranks: int
    gpu_id: int | str
    """The GPU in the names of old files."""
    has_experts: bool
    """Whether expert parallelism is on."""
    group: object
    """The process group whose ranks must serve one version together; None: Paddle's default."""
    num_ranks: int
    """The number of ranks in that group."""

    @classmethod
    def of(cls, config: object, options: FastDeployOptions | None) -> Deployment:
        """Read the config; a strategy that does not exist is refused before anything else."""
        strategy = check_strategy(read(config, "load_config.load_strategy"))
        parallel: Any = read(config, "parallel_config")
        options = FastDeployOptions.of(config) if options is None else options
        distributed = sys.modules["paddle.distributed"]
        num_global_ranks: int = distributed.get_world_size()
        has_experts = bool(getattr(parallel, "enable_expert_parallel", False))
        size = "parallel_config.tensor_parallel_size"
        return cls(
            strategy=strategy,
            options=options.with_rsync(config) if strategy == "rsync" else options,
            directory=str(read(config, "model_config.model")),
            rank=read_number(config, "parallel_config.tensor_parallel_rank"),
            global_rank=distributed.get_rank(),
            num_global_ranks=num_global_ranks,
            gpu_id=gpu_id(),
            has_experts=has_experts,
            group=getattr(parallel, "ep_group" if has_experts else "tp_group", None),
            num_ranks=num_global_ranks if has_experts else read_number(config, size),
        )

    def rendezvous(self) -> Rendezvous:
        """Return where this rank finds the other ranks of the group."""
        if self.num_ranks == 1:
            return Rendezvous()
        rendezvous = rendezvous_of(self.group)
        if rendezvous.num_ranks == 1:
            raise SpecError(
                f"the config has {self.num_ranks} ranks, paddle.distributed has one; call "
                f"paddle.distributed.init_parallel_env first"
            )
        return rendezvous


class FileWeights(StoredWeights):
    """The snapshots of a directory, or FastDeploy's old files; also for models that load."""

    rereads = True

    def __init__(
        self,
        model: object,
        path: PathLike,
        options: FastDeployOptions = FastDeployOptions(),  # noqa: B008 - it is frozen
        *,
        rank: int | None = None,
        load: Load | None = None,
        legacy: Mapping[str, Any] | None = None,
    ) -> None:
        """Fill `model` by name, or hand all tensors to `load` if that is given.

        `legacy` has the options of `open_source` that name old files; None: do not read any.
        """
        super().__init__(
            model if load is None else {},
            path,
            layout=options.layout,
            rank=rank,
            extra=options.extra,
            partial_over=options.partial_over,
        )
        self._load, self._legacy = load, legacy
        self.unused: tuple[str, ...] = ()
        """Tensors of the last files that the model lacks."""

    @property
    def report(self) -> UpdateReport | None:
        return self._report

    def _opened(self, version: int | None) -> Stored:
        return open_source(self._path, version=version, **(self._legacy or {}))

    def _session_of(self, stored: Stored) -> str:
        if self._legacy is not None and stored.manifest.version is None:
            return "old files"  # each rank has its own, and nothing says which belong together
        return super()._session_of(stored)

    def _loaded(self, stored: Stored) -> LoadReport:
        if self._load is None:
            report = super()._loaded(stored)
            self.unused = tuple(report.unused)
            return report
        started, reports = perf_counter(), list[LoadReport]()
        self._version, self.progress = None, 0.0
        self._load(self._tensors(stored, self._load, reports))
        counts = ("num_tensors", "nbytes", "read_bytes", "checked_bytes")
        sums = {name: sum(getattr(each, name) for each in reports) for name in counts}
        return replace(reports[-1], **sums, seconds=perf_counter() - started)

    def _tensors(
        self, stored: Stored, function: Load, reports: list[LoadReport]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of files, reading a bounded number of bytes at a time."""
        loader = Loader(function, "paddle", sys.modules["paddle"].get_device())
        left = list(stored.manifest.tensors.items())[::-1]
        total = max(sum(spec.nbytes for _, spec in left), 1)
        while left:
            fresh: dict[str, Any] = {}
            nbytes = 0
            while left and (not fresh or nbytes + left[-1][1].nbytes <= _STREAM_BYTES):
                name, spec = left.pop()
                fresh[name], nbytes = loader.fresh(spec)[0], nbytes + spec.nbytes
            reports.append(load(stored, into=fresh, extra="report"))
            self.progress += nbytes / total
            for name in list(fresh):
                yield name, fresh.pop(name)


class ModelWeights(Weights):
    """The models' weights, from a publisher, from files, or from the nearer of both.

    An update gives memory to parameters that have none, lets models with loaders load, and
    succeeds only if the models then still have the tensors that were filled.
    """

    def __init__(self, models: Models, replica: Replica | None, files: FileWeights | None) -> None:
        sources = [each for each in (replica, files) if each is not None]
        self._models, self._sources = models, sources
        self._source: Weights = sources[0]
        if replica is not None and files is not None:
            self._source = NearestWeights(replica, files)
        self._report: UpdateReport | None = None
        self.unmatched: list[str] = []
        """Tensors that the source of the last update has and the models lack."""
        self.seconds = 0.0
        """How long updates have taken, in all."""

    @property
    def version(self) -> int | None:
        return self._source.version

    @property
    def session(self) -> str:
        return self._source.session

    @property
    def progress(self) -> float:
        return self._source.progress

    def are_filled(self) -> bool:
        """True if the tensors that the models have now hold a version."""
        return self.version is not None and self._models.are_unchanged()

    def check_filled(self) -> None:
        """Raise LifecycleError unless the models' tensors hold a version."""
        if not self.are_filled():
            raise LifecycleError(REPLACED)

    def update(self, version: int | None = None, **options: Any) -> UpdateReport:
        models, started = self._models, perf_counter()
        models.has_loaded = False
        try:
            if not models.are_unchanged():
                self.forget(REPLACED)
                models.refresh()
            if models.give_memory():
                self.forget(NO_MEMORY)
            models.hold()
            report = self._source.update(version, **options)
            if models.has_loaded:
                models.process()
        except BaseException as error:
            if models.has_loaded:  # the source may think that nothing was written yet
                self.forget(f"its models failed to load: {error}")
            if isinstance(error, FlyweightError) or not isinstance(error, Exception):
                raise
            # Paddle may raise anything, and the other ranks must hear of it.
            raise LifecycleError(f"{type(error).__name__}: {error}") from error
        finally:
            self.seconds += perf_counter() - started
        if not models.are_unchanged():
            self.forget(REPLACED)
            raise LifecycleError(REPLACED)
        if report is not self._report:  # else the version was held, and nothing was transferred
            self._report = report
            self._tell_unmatched()
        return report

    def _tell_unmatched(self) -> None:
        names: Collection[str] = self._models.unmatched
        if not self._models.has_loaders:
            names = next(each.unused for each in self._sources if each.report is self._report)
        self.unmatched = sorted(names)
        if names:
            emit("weights.unmatched", count=len(names), names=listed(names))

    def forget(self, reason: str) -> None:
        self._models.let_go()
        self._source.forget(reason)

    def wake(self) -> None:
        self._source.wake()

    def close(self) -> None:
        """Disconnect from the publisher, if there is one. Safe to repeat."""
        for each in self._sources:
            if isinstance(each, Replica):
                each.close()


def open_weights(deployment: Deployment, models: Models) -> ModelWeights:
    """Open the sources of the deployment's strategy; a publisher beside files may be missing."""
    options, sources = deployment.options, STRATEGIES[deployment.strategy]
    load = models.load if models.has_loaders else None
    rank = None if options.layout is None else deployment.rank
    replica = files = None
    if "files" in sources:
        path = deployment.directory if options.store is None else options.store
        legacy = None
        if "old files" in sources:
            path = deployment.directory
            legacy = {
                "rank": deployment.global_rank,
                "legacy_id": deployment.gpu_id,
                "shared_directory": options.shared_directory,
            }
        files = FileWeights(models.state, path, options, rank=rank, load=load, legacy=legacy)
    if "publisher" in sources and (files is None or options.address is not None):
        if options.address is None:
            raise SpecError(
                "no address of a publisher; set config.flyweight = {'address': 'unix:DIRECTORY'}"
            )
        replica = Replica(
            models.state if load is None else load,
            options.address,
            name=f"fastdeploy rank {deployment.global_rank}",
            layout=options.layout,
            rank=rank,
            extra=options.extra,
            framework="paddle",
            device=sys.modules["paddle"].get_device(),
            token=options.token,
        )
    return ModelWeights(models, replica, files)
