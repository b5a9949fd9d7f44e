"""FastDeploy's load strategies: where each takes weights from, and what it must be told for that.

One table serves every call of the manager. `ipc` and `ipc_async` differ in nothing here: the
publisher chooses how its weights go over. `rsync` has no network of its own yet; it takes
a version from the publisher if there is one, else from the store.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any

from flyweight.adapters.identity import Identity
from flyweight.adapters.loader import Loader
from flyweight.adapters.paddle_layer import memory_of
from flyweight.checks import check_seconds, check_version
from flyweight.engines.fastdeploy_engine import give_memory
from flyweight.engines.fastdeploy_loading import ModelLoading
from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    MissingDependency,
    SpecError,
    VersionError,
    listed,
)
from flyweight.events import emit
from flyweight.formats.legacy import SHARED_DIRECTORY
from flyweight.formats.snapshot import number_in
from flyweight.formats.stored import Stored
from flyweight.lifecycle.weights import NearestWeights, StoredWeights
from flyweight.live.replica import Replica
from flyweight.live.report import TIMEOUT_SECONDS
from flyweight.ports import UpdateReport, Weights
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.load import Extra, LoadReport, load

NO_MEMORY = "parameters had no memory"
REPLACED = "parameters were replaced after they were filled, or lost their memory; update"
_RSYNC_OPTIONS = ("address", "token", "store", "timeout_seconds")
_MAX_YAML_BYTES = 1 << 16
_STREAM_BYTES = 256 << 20
"""How much is read from files at a time for a model's own loader."""
_log = getLogger("flyweight.fastdeploy")


@dataclass(frozen=True, kw_only=True)
class FastDeployOptions:
    """What the old config has no place for: `config.flyweight`, a dict or object of these."""

    address: str | None = None
    """Where the trainer publishes, 'unix:DIRECTORY'; 'ipc' and 'ipc_async' need it."""
    token: str | None = None
    """The publisher's, if it was given one of its own."""
    store: PathLike | None = None
    """Versions at rest, for 'rsync'; the model's directory if it is not given."""
    shared_directory: PathLike = SHARED_DIRECTORY
    """The last place where 'ipc_snapshot' looks for old files."""
    cell: PathLike | None = None
    """A status cell of ours, by which the engine is seen and asked from outside."""
    layout: ModelLayout | None = None
    """What this engine's tensors hold of the trainer's, under which names."""
    extra: Extra = "report"
    """What becomes of tensors that a source has and the models lack."""
    load_weights: bool = True
    """Whether models that have a `load_weights` load by it; False: they are filled by name."""
    partial_over: int | None = None
    """The version that parameters which files lack already hold; None: files must have all."""
    timeout_seconds: float = 60.0
    """How long to wait for a version, and for the other ranks."""

    def __post_init__(self) -> None:
        check_seconds("timeout_seconds", self.timeout_seconds)
        if self.extra not in ("refuse", "report"):
            raise SpecError(f"extra is {self.extra!r}, not 'refuse' or 'report'")

    @classmethod
    def of(cls, config: object) -> FastDeployOptions:
        """Return what `config.flyweight` says; a key that means nothing raises SpecError."""
        told = getattr(config, "flyweight", None)
        names = [each.name for each in fields(cls)]
        if told is None or isinstance(told, cls):
            return cls() if told is None else told
        if not isinstance(told, Mapping):
            own = [name for name in getattr(told, "__dict__", ()) if not name.startswith("_")]
            _check_keys("config.flyweight", own, names)
            told = {name: getattr(told, name) for name in names if hasattr(told, name)}
        _check_keys("config.flyweight", told, names)
        return cls(**told)

    def with_rsync(self, config: object) -> FastDeployOptions:
        """Return these with what the old `rsync_config` says.

        Its other keys are for FastDeploy's own network transport: they are reported and ignored.
        """
        told = getattr(read(config, "load_config"), "rsync_config", None)
        if told is None:
            return self
        if not isinstance(told, Mapping):
            raise SpecError(f"load_config.rsync_config is a {type(told).__name__}, not a dict")
        if unknown := [str(each) for each in told if each not in _RSYNC_OPTIONS]:
            names = listed(unknown)
            _log.warning("load_config.rsync_config has %s, which mean nothing here", names)
            emit("config.ignored", where="load_config.rsync_config", names=names)
        return replace(self, **{name: told[name] for name in _RSYNC_OPTIONS if name in told})


def _check_keys(what: str, told: Iterable[object], known: Sequence[str]) -> None:
    if unknown := [str(each) for each in told if each not in known]:
        raise SpecError(f"{what} has {listed(unknown)}; it may have {', '.join(known)}")


def read(config: object, path: str) -> object:
    """Return what the config has under dotted names; raise SpecError naming what is missing."""
    thing = config
    for word in path.split("."):
        if not hasattr(thing, word):
            raise SpecError(f"the config has no {path!r}: its {type(thing).__name__} lacks {word}")
        thing = getattr(thing, word)
    return thing


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a strategy needs to know: the parameters, whose they are, and where to look."""

    state: Mapping[str, object]
    model_directory: str
    rank: int
    """Among the ranks of the layout."""
    global_rank: int
    """By which old files are named."""
    legacy_id: int | str
    options: FastDeployOptions
    loading: ModelLoading | None = None
    """The models' own loaders; None if parameters are filled by name."""
    closing: ExitStack
    """What is to be closed with the manager."""
    unmatched: list[str] = field(default_factory=list)
    """Tensors that the models lack, of the source that was taken from last."""

    def tell_unmatched(self, names: Sequence[str]) -> None:
        """Keep which tensors the models lack, and tell listeners if there are some."""
        self.unmatched[:] = sorted(names)
        if names:
            emit("weights.unmatched", count=len(names), names=listed(names))


class PublishedWeights(Replica):
    """A publisher's versions; tells what the models lack."""

    def __init__(self, site: Site) -> None:
        options = site.options
        if options.address is None:
            raise SpecError(
                "no address of a publisher; set config.flyweight = {'address': 'unix:DIRECTORY'}"
            )
        loading = site.loading
        super().__init__(
            site.state if loading is None else loading.load,
            options.address,
            name=f"fastdeploy rank {site.global_rank}",
            layout=options.layout,
            rank=None if options.layout is None else site.rank,
            extra=options.extra,
            framework="paddle",
            device=sys.modules["paddle"].get_device(),
            token=options.token,
        )
        self._site = site

    def update(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        before: Callable[[int], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
        may_keep: bool = False,
        must_verify: bool = False,
    ) -> UpdateReport:
        held = self.report
        report = super().update(
            version,
            timeout_seconds=timeout_seconds,
            before=before,
            is_over=is_over,
            may_keep=may_keep,
            must_verify=must_verify,
        )
        if report is not held:  # else nothing was taken
            loading = self._site.loading
            self._site.tell_unmatched(self.unused if loading is None else loading.unmatched)
        return report


class SnapshotWeights(StoredWeights):
    """Versions at rest, ours first, then under the old names; tells what the models lack."""

    rereads = True

    def __init__(self, site: Site, path: PathLike, *, may_be_legacy: bool) -> None:
        options = site.options
        super().__init__(
            site.state if site.loading is None else {},
            path,
            layout=options.layout,
            rank=None if options.layout is None else site.rank,
            extra=options.extra,
            partial_over=options.partial_over,
        )
        self._site, self._may_be_legacy = site, may_be_legacy

    def _opened(self, version: int | None) -> Stored:
        return open_source(
            self._path,
            version=version,
            rank=self._site.global_rank if self._may_be_legacy else None,
            legacy_id=self._site.legacy_id if self._may_be_legacy else None,
            shared_directory=self._site.options.shared_directory,
        )

    def _session_of(self, stored: Stored) -> str:
        if self._may_be_legacy and stored.manifest.version is None:
            return "old files"  # of each rank its own: nothing in them says which belong together
        return super()._session_of(stored)

    def _loaded(self, stored: Stored) -> LoadReport:
        loading = self._site.loading
        report = super()._loaded(stored) if loading is None else self._handed(stored, loading)
        self._site.tell_unmatched(report.unused)
        return report

    def _handed(self, stored: Stored, loading: ModelLoading) -> LoadReport:
        """Hand what rests in files to the models' own loaders, a few tensors at a time."""
        started, reports = perf_counter(), list[LoadReport]()
        loader = Loader(loading.load, "paddle", sys.modules["paddle"].get_device())
        self._version, self.progress = None, 0.0
        loading.load(self._stream(stored, loader, reports))
        return replace(
            reports[-1],
            num_tensors=sum(each.num_tensors for each in reports),
            nbytes=sum(each.nbytes for each in reports),
            read_bytes=sum(each.read_bytes for each in reports),
            checked_bytes=sum(each.checked_bytes for each in reports),
            seconds=perf_counter() - started,
            unused=loading.unmatched,
        )

    def _stream(
        self, stored: Stored, loader: Loader, reports: list[LoadReport]
    ) -> Iterator[tuple[str, Any]]:
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


class CheckedWeights:
    """A strategy's weights; gives parameters memory to be filled, and looks whether they keep it.

    Counts the seconds that the strategy took. Memory that was
    filled is held until the next update: given out again, it would look as it did.
    """

    def __init__(
        self,
        weights: Weights,
        state: dict[str, object],
        find: Callable[[], Mapping[str, object]] | None = None,
        loading: ModelLoading | None = None,
    ) -> None:
        """Fill what is in `state`, which each update makes what `find` returns by then.

        With `loading` models do so themselves, and may replace what is in `state` meanwhile.
        """
        self._weights, self._state = weights, state
        self._find, self._loading = find, loading
        if loading is not None:
            loading.on_begin = self._release
        self._identity: Identity | None = None
        self._memory: list[object] = []
        self.seconds = 0.0

    @property
    def version(self) -> int | None:
        return self._weights.version

    @property
    def session(self) -> str:
        return self._weights.session

    @property
    def progress(self) -> float:
        return self._weights.progress

    def is_filled(self) -> bool:
        """True if the tensors that the models have by now hold a version."""
        return self.version is not None and self._is_current()

    def check_filled(self) -> None:
        """Raise unless they are: what is asked before they are served."""
        if not self.is_filled():
            raise LifecycleError(REPLACED)

    def _is_current(self) -> bool:
        """False if tensors that were filled are others by now, or lie elsewhere."""
        is_found = self._find is None or _are_same(self._find(), self._state)
        return is_found and (self._identity is None or self._identity.is_same())

    def _look(self) -> None:
        """Have the tensors that the models have by now; if they are others, nothing is held."""
        if self._is_current():
            return
        self.forget(REPLACED)
        self._adopt()

    def _adopt(self) -> None:
        """Have the tensors that the models have by now."""
        if self._find is not None:
            found = self._find()
            self._state.clear()
            self._state.update(found)  # in place: who fills it sees that it has changed

    def _release(self) -> None:
        """Hold no memory: what a loader replaces is to be free before the next comes."""
        self._identity, self._memory = None, []

    def _hold(self) -> None:
        """From now on these tensors are to be filled, and the memory that they have."""
        self._identity = Identity(self._state)
        self._memory = [memory_of(each) for each in self._state.values()]

    def update(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
        may_keep: bool = False,
        must_verify: bool = False,
    ) -> UpdateReport:
        started = perf_counter()
        try:
            self._look()
            if give_memory(self._state):
                self.forget(NO_MEMORY)
            self._hold()
            report = self._updated(
                version,
                timeout_seconds=timeout_seconds,
                before=before,
                is_over=is_over,
                may_keep=may_keep,
                must_verify=must_verify,
            )
        except FlyweightError:
            raise
        except Exception as cause:  # a framework's: the other ranks must hear of it all the same
            raise LifecycleError(f"{type(cause).__name__}: {cause}") from cause
        finally:
            self.seconds += perf_counter() - started
        if not self._is_current():
            self.forget(REPLACED)
            raise LifecycleError(REPLACED)
        return report

    def _updated(self, version: int | None, **options: Any) -> UpdateReport:
        """Update the source, and have loaders process what they loaded; both or nothing."""
        loading = self._loading
        if loading is None:
            return self._weights.update(version, **options)
        loading.is_begun = False
        try:
            report = self._weights.update(version, **options)
            if loading.is_begun:
                loading.process()
                self._adopt()
                self._hold()
        except BaseException as error:
            if loading.is_begun:  # whatever the source thinks of it
                self.forget(f"its models failed to load: {error}")
            raise
        return report

    def forget(self, reason: str) -> None:
        self._release()
        self._weights.forget(reason)

    def wake(self) -> None:
        self._weights.wake()


def _are_same(found: Mapping[str, object], known: Mapping[str, object]) -> bool:
    return found.keys() == known.keys() and all(found[name] is known[name] for name in known)


def _snapshot(site: Site) -> Weights:
    return SnapshotWeights(site, site.model_directory, may_be_legacy=True)


def _publisher(site: Site) -> Replica:
    return site.closing.enter_context(PublishedWeights(site))


def _nearest(site: Site) -> Weights:
    path = site.model_directory if site.options.store is None else site.options.store
    stored = SnapshotWeights(site, path, may_be_legacy=False)
    return stored if site.options.address is None else NearestWeights(_publisher(site), stored)


STRATEGIES: Mapping[str, Callable[[Site], Weights]] = {
    "ipc_snapshot": _snapshot,
    "ipc": _publisher,
    "ipc_async": _publisher,
    "rsync": _nearest,
}


def check_strategy(name: object) -> str:
    """Return the name of a strategy that exists."""
    if name not in STRATEGIES:
        raise SpecError(f"load_strategy is {name!r}, not one of {', '.join(STRATEGIES)}")
    assert isinstance(name, str)
    return name


def gpu_id() -> int | str:
    """Return the physical GPU's number, or its UUID: what old files are named by."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    selected = os.environ.get("FLAGS_selected_gpus") or "0"  # noqa: SIM112 - its name
    devices = [each.strip() for each in visible.split(",")]
    if not selected.isdigit() or int(selected) >= len(devices):
        raise SpecError(
            f"FLAGS_selected_gpus is {selected!r}, CUDA_VISIBLE_DEVICES {visible!r} has "
            f"{len(devices)} devices"
        )
    found = devices[int(selected)]
    return int(found) if found.isdigit() else found


def version_number(text: str) -> int:
    """Return the number of the version that a text names: the one that ends it."""
    number = number_in(text)
    if number is None:
        raise VersionError(
            f"version is {text!r}, expected a whole number, or text that ends with one"
        )
    return check_version(number)


def step_in(directory: str) -> str:
    """Return the `step` of a directory's version.yaml as text."""
    file = Path(directory) / "version.yaml"
    remedy = f"write 'step: NUMBER' to {str(file)!r}, or pass version="
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_YAML_BYTES + 1)
    except FileNotFoundError as cause:
        raise VersionError(
            f"no version was given, and there is no {str(file)!r}; {remedy}"
        ) from cause
    except OSError as cause:
        raise VersionError(f"cannot read {str(file)!r}: {cause}; {remedy}") from cause
    if len(data) > _MAX_YAML_BYTES:
        raise VersionError(f"{str(file)!r} has more than {_MAX_YAML_BYTES} bytes; {remedy}")
    step = _step(data, str(file), remedy)
    if type(step) not in (int, str) or number_in(str(step)) is None:
        raise VersionError(
            f"step is {step!r} in {str(file)!r}, expected a number, or text that ends with one; "
            f"{remedy}"
        )
    return str(step)


def _step(data: bytes, file: str, remedy: str) -> object:
    """Return what a YAML mapping has as its one `step`."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as cause:
        raise MissingDependency(
            f"{file!r} is read by PyYAML; pip install 'flyweight[fastdeploy]', or pass version="
        ) from cause
    try:
        root, found = yaml.compose(data, yaml.SafeLoader), yaml.safe_load(data)
    except Exception as cause:  # PyYAML lets others through, such as KeyError for "!!bool 7"
        why = f"{type(cause).__name__}: {cause}"
        raise VersionError(f"{file!r} is no YAML: {why}; {remedy}") from cause
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise VersionError(f"{file!r} holds a {kind}, not a mapping; {remedy}")
    # A library that reads YAML takes the last of two; which one was meant nobody knows.
    steps = [value.value for key, value in root.value if key.value == "step"]
    if len(steps) != 1:
        raise VersionError(f"{file!r} has {len(steps)} values for 'step'; {remedy}")
    step = found["step"]
    if isinstance(step, int) and step.bit_length() > 63:
        bits = step.bit_length()
        raise VersionError(f"step has {bits} bits in {file!r}, a version at most 63; {remedy}")
    if type(step) is int and steps[0].lstrip("+-").lstrip("0") != str(abs(step)).lstrip("0"):
        raise VersionError(
            f"step is written {steps[0]!r} in {file!r}, which YAML takes for {step}; {remedy}"
        )
    return step
