"""Drafts of files that appear one by one in a directory that exists: the names old engines read.

A directory per version is renamed as one. Old engines look for fixed names in a directory of
their own, so there the old files go first, and then each new file gets its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flyweight.stores.draft import (
    LocalDraft,
    lock_directory,
    name_taken,
    open_directory,
    sync_directory,
)

TURN_SECONDS = 30.0  # a turn is some unlinks, links and a sync: milliseconds


def legacy_draft(
    directory: str | os.PathLike[str], *, stale: Callable[[], Iterable[str]] = tuple
) -> LocalDraft:
    """Return a draft whose commit puts its files into `directory`, after those of `stale` are gone.

    If a name is taken by a file that is not stale, nothing goes and nothing appears. Writers into
    one directory take turns to commit, and `stale` is called within the turn, so that it finds
    what the last writer left.
    """
    place = Path(directory)

    def appear(hidden: Path, names: Sequence[str]) -> None:
        with _turn(place):
            old = set(stale())
            if any(os.path.lexists(place / name) for name in names if name not in old):
                raise name_taken()
            # First all that is old goes, so that no reader ever finds old and new together.
            for name in old:
                (place / name).unlink(missing_ok=True)
            sync_directory(place)
            for name in names:
                _give_name(hidden / name, place / name)

    return LocalDraft(place, parent=place, appear=appear)


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: only one writer at a time replaces files in it."""
    fd, deadline = open_directory(directory), time.monotonic() + TURN_SECONDS
    try:
        while True:
            try:
                lock_directory(fd)
                break
            except BlockingIOError as cause:
                if time.monotonic() > deadline:
                    text = f"another save has had its lock for {TURN_SECONDS:g} s; save again"
                    raise TimeoutError(errno.ETIMEDOUT, text) from cause
                time.sleep(0.01)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile would keep it
        os.close(fd)


def _give_name(hidden: Path, place: Path) -> None:
    """Give a file its name, which must be free; by rename where there are no hard links."""
    try:
        os.link(hidden, place)
    except OSError as cause:
        if cause.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.rename(hidden, place)
