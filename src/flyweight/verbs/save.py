"""Save: write a live model to files that appear all at once or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, TypedDict, get_args, overload

from flyweight.adapters.model import Model, adapt
from flyweight.errors import SpecError
from flyweight.formats import legacy
from flyweight.formats.huggingface import PART_BYTES
from flyweight.formats.stored import Stored
from flyweight.memory import MEMORY_BYTES, collector_paused
from flyweight.ranks.group import TIMEOUT_SECONDS, Group
from flyweight.ranks.process_group import default_group, rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.spec.model_layout import ModelLayout
from flyweight.stores.draft import LegacyDraft
from flyweight.stores.local import LocalStore, as_path
from flyweight.verbs.agree import begin_version
from flyweight.verbs.background import (
    BackgroundSave,
    WhenBusy,
    check_idle,
    start_background,
    wait_for_background,
)
from flyweight.verbs.check_replicas import CheckReplicas
from flyweight.verbs.commit import PendingCommit, SaveOptions, SaveReport, write_and_commit
from flyweight.verbs.find import PathLike, check_no_version, opened

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SaveKeywords(TypedDict, total=False):
    """The keywords of `save` but `background`, which decides what it returns."""

    version: int | None
    process_group: object
    coordinator_rank: int
    layout: ModelLayout | None
    like: PathLike | Stored | None
    when_busy: WhenBusy
    check_replicas: CheckReplicas
    timeout_seconds: float
    part_bytes: int
    memory_bytes: int
    num_threads: int | None


@overload
def save(
    model: object,
    path: PathLike,
    *,
    background: Literal[False] = False,
    **options: Unpack[SaveKeywords],
) -> SaveReport: ...


@overload
def save(
    model: object, path: PathLike, *, background: Literal[True], **options: Unpack[SaveKeywords]
) -> BackgroundSave: ...


@overload
def save(
    model: object, path: PathLike, *, background: bool, **options: Unpack[SaveKeywords]
) -> SaveReport | BackgroundSave: ...


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
    """Save a version of the model under `path`; it is durable and visible when this returns.

    A version is never overwritten, and version numbers only grow. A save that is killed leaves
    the earlier versions as they were.

    Args:
        model: A torch module, a Paddle layer, or nested dicts of tensors and plain values.
        path: The directory of the run. Each version is a directory in it.
        version: The number of the version; by default one more than the newest.
        process_group: A process group of torch or Paddle. All its ranks make the call, each
            writes its own share, and all fail if one does. Without it this process saves alone.
        coordinator_rank: The rank that assigns the shares and commits.
        layout: Which box of each whole tensor this rank holds, for models whose tensors do not
            say so themselves. Needs `like`.
        like: A checkpoint with the names and shapes of the whole tensors that `layout` cuts.
        background: Return a `BackgroundSave` once the weights are copied to staging memory, which
            is as large as this rank's share. The model may change at once.
        when_busy: While a background save of this process runs: "wait" for it, or "refuse" with
            a StoreError.
        check_replicas: How to compare tensors that several ranks hold, before the commit: all
            their bytes ("digest"), or a few kilobytes of each ("sampled").
        timeout_seconds: How long to wait for a rank that is silent.
        part_bytes: The most bytes of one file.
        memory_bytes: The most memory to use beside the model and the staging.
        num_threads: How many threads write; by default as many as the machine needs.
    """
    if when_busy not in get_args(WhenBusy):
        raise SpecError(f"when_busy is {when_busy!r}, not 'wait' or 'refuse'")
    if when_busy == "wait":
        wait_for_background(timeout_seconds)
    with ExitStack() as stack:
        rendezvous = Rendezvous() if process_group is None else rendezvous_of(process_group)
        group = stack.enter_context(
            join_group(rendezvous, coordinator_rank, timeout_seconds=timeout_seconds)
        )
        options = SaveOptions(
            version=version,
            check_replicas=check_replicas,
            part_bytes=part_bytes,
            memory_bytes=memory_bytes,
            num_threads=num_threads,
        )
        check_idle()
        with collector_paused():
            source = _adapted(model, layout, like, group)
        pending = begin_version(source, path, options, group)
        if not background:
            return write_and_commit(pending)
        stack.enter_context(pending.draft)
        return start_background(source, pending, stack)


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
    """Save a state dict that all ranks hold together. Every rank must make the call.

    Args:
        state_dict: Tensors and plain values by name; dicts may be nested.
        path: The directory of the run.
        process_group: By default the process group that torch or Paddle initialised; if there is
            none, this process saves alone.
        coordinator_rank: As in `save`, like the arguments after it: `version`, `background`,
            `when_busy`, `check_replicas`, `timeout_seconds`.
    """
    return save(
        state_dict,
        path,
        process_group=default_group() if process_group is None else process_group,
        coordinator_rank=coordinator_rank,
        version=version,
        background=background,
        when_busy=when_busy,
        check_replicas=check_replicas,
        timeout_seconds=timeout_seconds,
    )


def _adapted(
    model: object, layout: ModelLayout | None, like: PathLike | Stored | None, group: Group
) -> Model:
    """Return the model as a source, after all work queued on its device is done."""
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
        with opened(like) as stored:
            tensors = stored.manifest.untied().tensors
        source = adapt(model, lambda: layout.locals(tensors, group.rank))
    source.settle()  # kernels that this thread queued on a GPU may still write the weights
    return source


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
    """Save under the file names that older FastDeploy engines look for.

    The files of an earlier save are removed first: this layout has no commit, and a reader must
    find files missing rather than two saves mixed. In between there is nothing to load.

    Args:
        model: A torch module, a Paddle layer, or nested dicts of tensors.
        directory: Where to put the files.
        rank: The rank in the file names.
        legacy_id: The id in the file names.
        part_bytes: The most bytes of one file; by default everything goes to one file.
        as_safetensors: Write safetensors, or pickles. By default what an older engine reads at
            that place: a pickle in the shared directory, safetensors everywhere else.
        shared_directory: The directory that engines on this machine share.
        memory_bytes: The most memory to use beside the model.
    """
    options = SaveOptions(memory_bytes=memory_bytes)
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
    format.layout(manifest)  # refuses what the format cannot hold before anything is written
    check_no_version(directory)

    def earlier_files() -> Iterator[str]:
        present = LocalStore(directory).names()
        yield from (*names.parts(present).values(), *({names.single} & set(present)))

    draft = LegacyDraft(directory, stale=earlier_files)
    return write_and_commit(PendingCommit(source, options, draft, manifest, format))
