"""Fallback: where a replica finds a version while its publisher is gone.

Addresses are of relays and of other replicas, paths of snapshots and checkpoints. They are tried
in the order that the user gives, and never another version than the one that was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from flyweight.errors import FlyweightError, FormatError, SpecError, VersionError
from flyweight.formats.stored import Stored
from flyweight.live.publish_id import PublishId
from flyweight.live.target import ModelTarget
from flyweight.ports import UpdateOptions, UpdateReport
from flyweight.transports.address import Address, parse_address
from flyweight.verbs.find import PathLike, open_source
from flyweight.verbs.load import load

_SCHEMES = ("unix:", "tcp:")


def sorted_out(fallback: Sequence[PathLike]) -> tuple[list[Address], list[str]]:
    """Return the addresses and the paths of a list that has both."""
    if isinstance(fallback, (str, bytes, os.PathLike)):
        raise SpecError(f"fallback is {fallback!r}, expected a list of addresses and paths")
    texts = [os.fspath(each) for each in fallback]
    addresses = [parse_address(each) for each in texts if each.startswith(_SCHEMES)]
    return addresses, [each for each in texts if not each.startswith(_SCHEMES)]


@dataclass(frozen=True)
class StoredVersion:
    """A version in files that suits an update."""

    path: str
    id: PublishId
    is_checked: bool
    """True if the files have checksums."""


def stored_version(
    paths: Sequence[str], options: UpdateOptions, held: PublishId | None
) -> StoredVersion | None:
    """Return the version to load: the one that is asked for, or the newest that is newer.

    None if no path has it. A file that cannot be read is passed over, the next may have it.
    """
    for path in paths:
        with ExitStack() as stack:
            try:
                stored = stack.enter_context(open_source(path, version=options.version))
            except (FormatError, VersionError, OSError):
                continue
            number = stored.manifest.version
            number = 0 if number is None else number
            id = PublishId(f"files {stored.fingerprint():016x}", number)
            is_newer = held is None or number > held.version
            if options.version is None and not is_newer:
                continue
            is_checked = all(each.checksums is not None for each in stored.manifest.extents)
            return StoredVersion(path, id, is_checked)
    return None


def load_stored(found: StoredVersion, target: ModelTarget) -> UpdateReport:
    """Fill the model from files; raise if they are others than those that were found."""
    started = perf_counter()
    number = found.id.version
    with _opened(found.path, number) as stored:
        if f"files {stored.fingerprint():016x}" != found.id.session:
            raise FormatError(f"{found.path!r} has changed since version {number} was found there")
        report = load(
            stored,
            into=target.thing,
            layout=target.layout,
            rank=target.rank,
            extra="refuse" if target.is_strict else "report",
        )
    seconds = perf_counter() - started
    verified = "checksums" if report.checked_bytes else "nothing"
    return UpdateReport(
        number, None, report.nbytes, seconds, 0.0, 0.0, 0.0, seconds, 0.0, "files", verified
    )


def _opened(path: str, version: int) -> Stored:
    try:
        return open_source(path, version=version)
    except FlyweightError:
        return open_source(path)  # files without a number are their only version
