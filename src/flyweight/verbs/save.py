"""Save: from a live model to files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, overload

from flyweight.adapters.model import Model, adapt
from flyweight.checks import check_memory_bytes
from flyweight.errors import SpecError
from flyweight.formats import legacy
from flyweight.formats.huggingface import PART_BYTES
from flyweight.formats.stored import Stored
from flyweight.formats.writer import seal, write
from flyweight.memory import MEMORY_BYTES, collector_paused
from flyweight.ports import Format, Source
from flyweight.ranks.group import TIMEOUT_SECONDS, Group
from flyweight.spec.manifest import Manifest, TensorSpec
from flyweight.spec.model_layout import ModelLayout
from flyweight.stores.draft import LocalDraft
from flyweight.stores.legacy_draft import legacy_draft
from flyweight.stores.local import LocalStore, as_path
from flyweight.verbs.background import (
    BackgroundSave,
    WhenBusy,
    check_idle,
    start_background,
    wait_for_background,
)
from flyweight.verbs.check_replicas import CheckReplicas, check_option
from flyweight.verbs.commit import SaveReport, begin_version, emit_done
from flyweight.verbs.find import PathLike, check_no_version, open_source
from flyweight.verbs.rank_messages import gather_ranks
from flyweight.worker_threads import default_threads


@overload
def save(
    model: object,
    path: PathLike,
    *,
    version: int | None = None,
    process_group: object = None,
    coordinator_rank: int = 0,
    layout: ModelLayout | None = None,
    like: PathLike | Stored | None = None,
    background: Literal[False] = False,
    when_busy: WhenBusy = "wait",
    check_replicas: CheckReplicas = "digest",
    timeout_seconds: float = TIMEOUT_SECONDS,
    part_bytes: int = PART_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    num_threads: int | None = None,
) -> SaveReport: ...


@overload
def save(
    model: object,
    path: PathLike,
    *,
    version: int | None = None,
    process_group: object = None,
    coordinator_rank: int = 0,
    layout: ModelLayout | None = None,
    like: PathLike | Stored | None = None,
    background: Literal[True],
    when_busy: WhenBusy = "wait",
    check_replicas: CheckReplicas = "digest",
    timeout_seconds: float = TIMEOUT_SECONDS,
    part_bytes: int = PART_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    num_threads: int | None = None,
) -> BackgroundSave: ...


def save(
    model: object,
    path: PathLike,
    *,
    version: int | None = None,
    process_group: object = None,
    coordinator_rank: int = 0,
    layout: ModelLayout | None = None,
    like: PathLike | Stored | None = None,
    background: bool = False,
    when_busy: WhenBusy = "wait",
    check_replicas: CheckReplicas = "digest",
    timeout_seconds: float = TIMEOUT_SECONDS,
    part_bytes: int = PART_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    num_threads: int | None = None,
) -> SaveReport | BackgroundSave:
    """Save a version of the model under `path`; durable and visible when this returns.

    Without a version, the next after the newest. A version is never overwritten, and numbers
    only grow. A save that is killed leaves the versions before it as they were. With a process
    group all its ranks make the call, each writes its own share, and all fail if one does. Tensors
    that several ranks hold alike are compared before the commit: all their bytes, or with
    `check_replicas="sampled"` a few. A `layout` says what this rank's tensors hold of the tensors
    that the checkpoint `like` names.

    With `background` this returns once the weights are copied to staging memory as large as this
    rank's share; the model may change at once, and the handle tells the rest. `when_busy` says
    what to do while such a save still runs in this process.
    """
    return _save(
        model,
        path,
        _Options(
            version=version,
            layout=layout,
            like=like,
            background=background,
            when_busy=when_busy,
            check_replicas=check_replicas,
            timeout_seconds=timeout_seconds,
            part_bytes=part_bytes,
            memory_bytes=memory_bytes,
            num_threads=num_threads,
        ),
        lambda: gather_ranks(process_group, coordinator_rank, timeout_seconds, may_default=False),
    )


def save_state_dict(
    state_dict: Mapping[str, object],
    path: PathLike,
    process_group: object = None,
    coordinator_rank: int = 0,
    *,
    version: int | None = None,
    background: bool = False,
    when_busy: WhenBusy = "wait",
    check_replicas: CheckReplicas = "digest",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> SaveReport | BackgroundSave:
    """Save a state dict that all ranks hold together, nested dicts and plain values included.

    Without a process group, the one that was initialised; alone if none was. Every rank must make
    the call. Otherwise as `save`.
    """
    return _save(
        state_dict,
        path,
        _Options(
            version=version,
            background=background,
            when_busy=when_busy,
            check_replicas=check_replicas,
            timeout_seconds=timeout_seconds,
        ),
        lambda: gather_ranks(process_group, coordinator_rank, timeout_seconds, may_default=True),
    )


@dataclass(frozen=True, kw_only=True)
class _Options:
    version: int | None
    layout: ModelLayout | None = None
    like: PathLike | Stored | None = None
    background: bool
    when_busy: WhenBusy
    check_replicas: CheckReplicas
    timeout_seconds: float
    part_bytes: int = PART_BYTES
    memory_bytes: int = MEMORY_BYTES
    num_threads: int | None = None


def _save(
    model: object, path: PathLike, options: _Options, meet: Callable[[], Group]
) -> SaveReport | BackgroundSave:
    if options.when_busy not in ("wait", "refuse"):
        raise SpecError(f"when_busy is {options.when_busy!r}, not 'wait' or 'refuse'")
    check_option(options.check_replicas)
    check_memory_bytes(options.memory_bytes)
    if options.when_busy == "wait":
        wait_for_background(options.timeout_seconds)
    with ExitStack() as stack:
        group = stack.enter_context(meet())
        check_idle()
        with collector_paused():
            source = _adapted(model, options.layout, options.like, group)
        if not options.background:
            return save_version(
                source,
                path,
                version=options.version,
                part_bytes=options.part_bytes,
                memory_bytes=options.memory_bytes,
                num_threads=options.num_threads,
                group=group,
                check_replicas=options.check_replicas,
            )
        pending = stack.enter_context(
            begin_version(
                source,
                path,
                version=options.version,
                part_bytes=options.part_bytes,
                group=group,
                check_replicas=options.check_replicas,
            )
        )
        return start_background(
            source,
            pending,
            stack,
            memory_bytes=options.memory_bytes,
            num_threads=options.num_threads,
        )


def _adapted(
    model: object, layout: ModelLayout | None, like: PathLike | Stored | None, group: Group
) -> Model:
    if layout is None:
        if like is not None:
            raise SpecError("like is given without a layout, which would use it")
        source = adapt(model, may_be_empty=group.num_ranks > 1)
    else:
        if like is None:
            raise SpecError("a layout needs `like`, a checkpoint with the whole tensors' shapes")
        if layout.num_ranks != group.num_ranks:
            raise SpecError(
                f"the layout is for {layout.num_ranks} ranks, the group has {group.num_ranks}"
            )
        tensors = _tensors_like(like)
        source = adapt(model, lambda: layout.locals(tensors, group.rank))
    source.settle()  # what this thread queued on a GPU may still be writing the weights
    return source


def _tensors_like(like: PathLike | Stored) -> Mapping[str, TensorSpec]:
    if isinstance(like, Stored):
        return like.manifest.untied().tensors
    with open_source(like) as stored:
        return stored.manifest.untied().tensors


def save_version(
    source: Source,
    path: PathLike,
    *,
    version: int | None,
    part_bytes: int,
    memory_bytes: int,
    num_threads: int | None,
    group: Group,
    check_replicas: CheckReplicas = "digest",
    verb: str = "save",
) -> SaveReport:
    """Save a version of any source, or of what the ranks of a group hold together."""
    started = perf_counter()
    check_memory_bytes(memory_bytes)
    with begin_version(
        source,
        path,
        version=version,
        part_bytes=part_bytes,
        group=group,
        check_replicas=check_replicas,
    ) as pending:
        report = pending.write(
            source,
            memory_bytes=memory_bytes,
            num_threads=num_threads,
            started=started,
            verb=verb,
            beside=pending.found.jobs(source),
        )
    emit_done(verb, report)
    return report


def save_files(
    source: Source,
    manifest: Manifest,
    format: Format,
    begin: Callable[[], LocalDraft],
    *,
    memory_bytes: int,
    num_threads: int | None,
    verb: str = "save",
) -> SaveReport:
    """Write a manifest's tensors in a format, to a draft that is then committed."""
    started = perf_counter()
    check_memory_bytes(memory_bytes)
    with begin() as draft:
        whole, plans = write(
            source,
            manifest,
            format,
            draft,
            num_threads=default_threads() if num_threads is None else num_threads,
            memory_bytes=memory_bytes,
            verb=verb,
        )
        seal(whole, plans, format, draft)
        draft.commit()
        report = SaveReport(
            draft.place,
            manifest.version,
            len(whole.tensors),
            len({extent.file for extent in whole.extents}),
            whole.nbytes,
            perf_counter() - started,
            [] if format.has_values else sorted(manifest.values),
        )
    emit_done(verb, report)
    return report


def save_legacy(
    model: object,
    directory: PathLike,
    *,
    rank: int,
    legacy_id: int | str,
    part_bytes: int | None = None,
    as_safetensors: bool | None = None,
    shared_directory: PathLike = legacy.SHARED_DIRECTORY,
    memory_bytes: int = MEMORY_BYTES,
) -> SaveReport:
    """Save under the names old engines look for: one file, or parts of at most `part_bytes`.

    Unless `as_safetensors` chooses, the files are what an old engine reads at that place: a pickle
    in the shared directory, safetensors everywhere else.

    The files of an earlier save go first: the old layout has no commit, and a reader must rather
    find files missing than two saves mixed. For a while, then, there is nothing to load.
    """
    directory = as_path(directory)
    is_shared = directory.resolve() == as_path(shared_directory).resolve()
    if is_shared and part_bytes is not None:
        raise SpecError(
            f"the shared directory {str(directory)!r} is read as one file, and part_bytes is "
            f"{part_bytes}; leave it out"
        )
    if as_safetensors is None:
        as_safetensors = not is_shared
    source = adapt(model)
    source.settle()
    manifest = source.manifest.untied()
    names = legacy.LegacyNames(rank, legacy_id)
    format = legacy.legacy_format(
        rank=rank, legacy_id=legacy_id, part_bytes=part_bytes, as_safetensors=as_safetensors
    )
    format.layout(manifest)  # refuses what it cannot hold before anything is made
    check_no_version(directory)

    def stale() -> Iterator[str]:
        """Yield the files of an earlier save; at the commit, since another may have come first."""
        present = LocalStore(directory).names()
        yield from (*names.parts(present).values(), *({names.single} & set(present)))

    def begin() -> LocalDraft:
        return legacy_draft(directory, stale=stale)

    return save_files(source, manifest, format, begin, memory_bytes=memory_bytes, num_threads=None)
