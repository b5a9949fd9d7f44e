"""Fallback: where a replica finds a version that its publisher does not have, or if it is gone.

Addresses are of relays and of other replicas, paths of snapshots and checkpoints. They are tried
in the order that the user gives, and never another version than the one that was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from flyweight.errors import FormatError, SpecError, StoreError, VersionError
from flyweight.formats.stored import Stored
from flyweight.live.messages import Available, Done, Staged
from flyweight.live.publish_id import PublishId
from flyweight.live.target import LoaderTarget, ModelTarget
from flyweight.ports import UpdateOptions
from flyweight.transports.address import Address, parse_address
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.load import Extra, check_loadable, load
from flyweight.verbs.load_by import load_by, showing_progress

_SCHEMES = ("unix:", "tcp:")
_SLOW_BYTES = 64 << 20
"""Files are expected to be read at so many bytes in a second, at least."""


def sorted_out(fallback: Sequence[PathLike]) -> tuple[list[Address], list[str]]:
    """Return the addresses and the paths of a list that has both."""
    if isinstance(fallback, (str, bytes, os.PathLike)):
        raise SpecError(f"fallback is {fallback!r}, expected a list of addresses and paths")
    texts = [os.fspath(each) for each in fallback]
    addresses = [parse_address(each) for each in texts if each.startswith(_SCHEMES)]
    return addresses, [each for each in texts if not each.startswith(_SCHEMES)]


@dataclass(frozen=True, eq=False)
class StoredVersion:
    """A version in opened files."""

    stored: Stored
    id: PublishId

    @property
    def verified(self) -> str:
        """What a load checks: 'checksums', or 'nothing'."""
        has_checksums = all(each.checksums is not None for each in self.stored.manifest.extents)
        return "checksums" if has_checksums else "nothing"


def stored_version(
    paths: Sequence[str],
    options: UpdateOptions,
    held: PublishId | None,
    files: ExitStack,
    missing: list[str],
) -> StoredVersion | None:
    """Return the version that was asked for, or the newest of the first path that has a newer one.

    Else the one that is held already, if a path has it. What was opened is closed with `files`;
    `missing` gets the reasons why a path was passed over.
    """
    found = None
    for path in paths:
        try:
            stored = files.enter_context(open_source(path, version=options.version))
            number = 0 if stored.manifest.version is None else stored.manifest.version
            is_newer = held is None or number > held.version
            if options.version is None and held is not None and number < held.version:
                missing.append(f"{path!r} has nothing newer than version {number}")
                continue
            id = PublishId(f"files {stored.fingerprint():016x}", number)
        except (FormatError, VersionError, StoreError) as error:
            missing.append(str(error))
            continue
        if id != held and (options.version is not None or is_newer):
            return StoredVersion(stored, id)
        missing.append(f"{path!r} has nothing newer than version {number}")
        if id == held:
            found = StoredVersion(stored, id)
            if options.version is not None:
                break
    return found


def check_fits(found: StoredVersion, target: ModelTarget | LoaderTarget) -> None:
    """Raise PlanError or SpecError unless a version in files can be loaded; write nothing."""
    if not found.stored.manifest.names:
        raise SpecError(f"{found.stored.store.place!r} holds no tensors")
    if isinstance(target, LoaderTarget):
        target.loader.choose(found.stored.manifest.tensors)
        return
    check_loadable(
        found.stored,
        target.thing,
        layout=target.layout,
        rank=target.rank,
        extra=_extra(target),
    )


class StoredIncoming:
    """A version in files on its way into a model or a loader: what `Incoming` is for memory."""

    transport = "files"
    verify_seconds, overflows = 0.0, 0

    def __init__(self, found: StoredVersion, target: ModelTarget | LoaderTarget) -> None:
        self.id, self.verified = found.id, found.verified
        self._stored, self._target = found.stored, target
        self.about = Available(found.id, found.stored.manifest.parent, {})
        self.nbytes = found.stored.manifest.nbytes
        self.read_seconds = self.nbytes / _SLOW_BYTES
        self.unused: tuple[str, ...] = ()
        self.progress = 0.0

    def check_time(self, deadline: float) -> None:
        """Do nothing: files stay."""

    def copy(self, deadline: float, check: Callable[[], None]) -> None:
        """Fill the model, or hand the tensors to the loader."""
        check()
        target = self._target

        def show(done: float) -> None:
            self.progress = done

        if isinstance(target, LoaderTarget):
            report = load_by(target.loader, self._stored, show)
        else:
            with showing_progress(show):
                report = load(
                    self._stored,
                    into=target.thing,
                    layout=target.layout,
                    rank=target.rank,
                    extra=_extra(target),
                )
            target.look_again()
        self.nbytes, self.unused = report.nbytes, tuple(report.unused)

    def tell(self, message: Staged | Done) -> None:
        """Do nothing: no trainer waits."""

    def close(self) -> None:
        """Do nothing: who opened the files closes them."""


def _extra(target: ModelTarget) -> Extra:
    return "refuse" if target.is_strict else "report"
