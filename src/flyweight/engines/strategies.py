"""FastDeploy's load strategies: the sources of weights, and how the models take them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any

from flyweight.adapters.loader import Load, Loader
from flyweight.engines.fastdeploy_config import STRATEGIES, Deployment
from flyweight.engines.fastdeploy_models import Models
from flyweight.errors import FlyweightError, LifecycleError, SpecError, listed
from flyweight.events import emit
from flyweight.formats.stored import Stored
from flyweight.lifecycle.engine_steps import named
from flyweight.lifecycle.weights import NearestWeights, StoredWeights
from flyweight.live import Replica
from flyweight.ports import UpdateOptions, UpdateReport, Weights
from flyweight.ranks.agreement import RankAgreement
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.load import LoadReport, load

REPLACED = "parameters were replaced after they were filled, or lost their memory; update"
_NO_MEMORY = "parameters had no memory"
_STREAM_BYTES = 256 << 20
"""How many bytes are read from files at a time for a model's own loader."""


class FileWeights(StoredWeights):
    """The snapshots of a directory, or FastDeploy's old files; also for models that load."""

    rereads = True

    def __init__(
        self,
        model: object,
        path: PathLike,
        *,
        load: Load | None = None,
        legacy: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Fill `model` by name, or hand all tensors to `load` if that is given.

        `legacy` has the options of `open_source` that name old files; None: do not read any. The
        other options are those of `StoredWeights`.
        """
        super().__init__(model if load is None else {}, path, **options)
        self._load, self._legacy = load, legacy
        self.unused: tuple[str, ...] = ()
        """Tensors of the last files that the model lacks."""

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

    def __init__(
        self, models: Models, deployment: Deployment, rank: int, ranks: RankAgreement
    ) -> None:
        """Open the sources of the strategy; a publisher beside files may be missing.

        rank: this one of the ranks that serve a version together.
        """
        self._models = models
        num_given = named("give_memory", models.give_memory)
        self._replica, self._files = _opened_sources(models, deployment, rank, ranks)
        sources = [each for each in (self._replica, self._files) if each is not None]
        self._source: Weights = sources[0]
        if self._replica is not None and self._files is not None:
            self._source = NearestWeights(self._replica, self._files)
        self._report: UpdateReport | None = None
        self.unmatched: list[str] = []
        """Tensors that the source of the last update has and the models lack."""
        self.seconds = 0.0
        """How long updates have taken, in all."""
        if num_given:
            self.forget(_NO_MEMORY)

    @property
    def num_ranks(self) -> int | None:
        return self._source.num_ranks

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

    def take(self, options: UpdateOptions) -> UpdateReport:
        models, started = self._models, perf_counter()
        models.has_loaded = False
        try:
            if not models.are_unchanged():
                self.forget(REPLACED)
                models.refresh()
            if models.give_memory():
                self.forget(_NO_MEMORY)
            models.hold()
            report = self._source.take(options)
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
            source = self._files if report.strategy == "files" else self._replica
            names = models.unmatched if models.has_loaders or source is None else source.unused
            self.unmatched = sorted(names)
            if names:
                emit("weights.unmatched", count=len(names), names=listed(names))
        return report

    def forget(self, reason: str) -> None:
        self._models.let_go()
        self._source.forget(reason)

    def wake(self) -> None:
        self._source.wake()

    def close(self) -> None:
        """Disconnect from the publisher, if there is one. Safe to repeat."""
        if self._replica is not None:
            self._replica.close()


def _opened_sources(
    models: Models, deployment: Deployment, rank: int, ranks: RankAgreement
) -> tuple[Replica | None, FileWeights | None]:
    options, sources = deployment.options, STRATEGIES[deployment.strategy]
    load = models.load if models.has_loaders else None
    how: dict[str, Any] = {"layout": options.layout, "extra": options.extra}
    cut = {} if options.layout is None else {"rank": deployment.rank}
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
        files = FileWeights(
            models.state,
            path,
            load=load,
            legacy=legacy,
            partial_over=options.partial_over,
            **how,
            **cut,
        )
    if "publisher" in sources and (files is None or options.address is not None):
        if options.address is None:
            raise SpecError(
                "no address of a publisher; set config.flyweight = {'address': 'unix:DIRECTORY'}, "
                "or 'tcp://HOST:PORT'"
            )
        replica = Replica(
            models.state if load is None else load,
            options.address,
            name=_replica_name(deployment, ranks),
            rank=rank,
            num_ranks=ranks.num_ranks,
            layout_rank=None if options.layout is None else deployment.rank,
            framework="paddle",
            device=sys.modules["paddle"].get_device(),
            token=options.secret(),
            curve=options.curve(),
            **how,
        )
    return replica, files


def _replica_name(deployment: Deployment, ranks: RankAgreement) -> str:
    """Return the name of the engine: one for all of its ranks, and of no other engine."""
    name = f"fastdeploy {os.uname().nodename}:{os.getpid()}"
    if ranks.num_ranks > 1:
        deadline = monotonic() + deployment.options.timeout_seconds
        name = str(ranks.exchange("name the engine", deadline, name=name)[0]["name"])
    return name
