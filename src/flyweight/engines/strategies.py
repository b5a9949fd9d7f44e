"""FastDeploy's load strategies: the sources of weights, and how the models take them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from time import monotonic, perf_counter
from typing import Any

from flyweight.adapters.loader import Load, Loader
from flyweight.engines.fastdeploy_config import STRATEGIES, Deployment
from flyweight.engines.fastdeploy_models import Models
from flyweight.errors import FlyweightError, LifecycleError, SpecError, listed
from flyweight.events import emit
from flyweight.formats.stored import Stored
from flyweight.lifecycle.engine_steps import named
from flyweight.lifecycle.weights import StoredWeights
from flyweight.live import Replica
from flyweight.ports import UpdateOptions, UpdateReport, Weights
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.process_group import default_group
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.load import LoadReport
from flyweight.verbs.load_by import load_by

REPLACED = "parameters were replaced after they were filled, or lost their memory; update"
_NO_MEMORY = "parameters had no memory"


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

    def _opened(self, version: int | None) -> Stored:
        return open_source(self._path, version=version, **(self._legacy or {}))

    def _session_of(self, stored: Stored) -> str:
        if self._legacy is not None and stored.manifest.version is None:
            return "old files"  # each rank has its own, and nothing says which belong together
        return super()._session_of(stored)

    def _loaded(self, stored: Stored) -> LoadReport:
        if self._load is None:
            return super()._loaded(stored)
        self._version, self.progress = None, 0.0
        loader = Loader(self._load, "paddle", sys.modules["paddle"].get_device())
        return load_by(loader, stored, self._show)


class ModelWeights(Weights):
    """The models' weights, from a publisher or from files.

    An update gives memory to parameters that have none, lets models with loaders load, and
    succeeds only if the models then still have the tensors that were filled.
    """

    def __init__(self, models: Models, deployment: Deployment, ranks: RankAgreement) -> None:
        """Open the source of the strategy; a publisher beside files may be missing."""
        self._models = models
        num_given = named("give_memory", models.give_memory)
        self._source = _opened_source(models, deployment, ranks)
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
            names = models.unmatched if models.has_loaders else self._source.unused
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
        if isinstance(self._source, Replica):
            self._source.close()


def _opened_source(
    models: Models, deployment: Deployment, ranks: RankAgreement
) -> Replica | FileWeights:
    options, sources = deployment.options, STRATEGIES[deployment.strategy]
    load = models.load if models.has_loaders else None
    layout_rank = None if options.layout is None else deployment.rank
    store = deployment.directory if options.store is None else options.store
    if "publisher" not in sources or ("files" in sources and options.address is None):
        legacy = None
        if "old files" in sources:
            store = deployment.directory
            legacy = {
                "rank": deployment.global_rank,
                "legacy_id": deployment.gpu_id,
                "shared_directory": options.shared_directory,
            }
        return FileWeights(
            models.state,
            store,
            load=load,
            legacy=legacy,
            partial_over=options.partial_over,
            layout=options.layout,
            rank=layout_rank,
            strict=options.strict,
        )
    if options.address is None:
        raise SpecError(
            "no address of a publisher; set config.flyweight = {'address': 'unix:DIRECTORY'}, or "
            "'tcp://HOST:PORT'"
        )
    if options.partial_over is not None:
        raise SpecError(
            f"partial_over={options.partial_over} is for files, and a publisher at "
            f"{options.address} has every parameter; leave one of them out"
        )
    group = None
    if ranks.num_ranks > 1:
        group = default_group() if deployment.group is None else deployment.group
    tls = options.tls()
    return Replica(
        models.state if load is None else load,
        options.address,
        name=_replica_name(deployment, ranks),
        token=options.secret(),
        tls=tls,
        staging_bytes=options.staging_bytes,
        serve=tls is None or tls.certificate is not None,
        fallback=[store] if "files" in sources else [],
        layout=options.layout,
        layout_rank=layout_rank,
        strict=options.strict,
        framework="paddle",
        device=sys.modules["paddle"].get_device(),
        process_group=group,
    )


def _replica_name(deployment: Deployment, ranks: RankAgreement) -> str:
    """Return the name of the engine: one for all of its ranks, and of no other engine."""
    name = f"fastdeploy {os.uname().nodename}:{os.getpid()}"
    if ranks.num_ranks > 1:
        deadline = monotonic() + deployment.options.timeout_seconds
        name = str(ranks.exchange("name the engine", deadline, name=name)[0]["name"])
    return name
