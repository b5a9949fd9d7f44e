"""The directory of a user on this host that the ranks of an engine share, and the proof of it.

Ranks in different containers may each have a directory of the same name. So each rank says which
one it sees, and the publisher refuses an engine whose ranks see different ones.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flyweight.errors import SpecError, StoreError
from flyweight.host import boot_id, exposure

VARIABLE = "FLYWEIGHT_RUN_DIR"


def run_directory() -> Path:
    """Return the private directory of this user for files of running processes, and make it.

    It is $FLYWEIGHT_RUN_DIR, otherwise $XDG_RUNTIME_DIR/flyweight, otherwise /tmp/flyweight-UID.
    """
    chosen, session = os.environ.get(VARIABLE, ""), os.environ.get("XDG_RUNTIME_DIR", "")
    if chosen:
        path = Path(chosen).absolute()
    elif os.path.isabs(session) and os.path.isdir(session):
        path = Path(session) / "flyweight"
    else:
        path = Path(f"/tmp/flyweight-{os.geteuid()}")  # noqa: S108 - its owner is checked
    try:
        path.mkdir(mode=0o700, parents=bool(chosen), exist_ok=True)
        # Others may make links in /tmp; what the user chose may be one.
        found = os.stat(path, follow_symlinks=bool(chosen))
    except OSError as cause:
        raise StoreError(
            cause.errno, f"cannot make directory {str(path)!r}: {cause.strerror}; set {VARIABLE}"
        ) from cause
    if not stat.S_ISDIR(found.st_mode):
        raise SpecError(f"{str(path)!r} is not a directory; set {VARIABLE}")
    if whose := exposure(found):
        raise SpecError(
            f"directory {str(path)!r} {whose}; the ranks of an engine need one that belongs to "
            f"user {os.geteuid()} with mode 700: chmod 700 it, or set {VARIABLE}"
        )
    return path


def directory_id(directory: Path) -> str:
    """Return an id that is the same for all processes that see this directory, and for no others.

    The first two numbers are those of `stat -c %d:%i DIRECTORY`. The kernel numbers devices and
    their files, for all its containers; another kernel has another boot.
    """
    try:
        found = os.stat(directory)
    except OSError as cause:
        text = f"cannot look at directory {str(directory)!r}: {cause.strerror}"
        raise StoreError(cause.errno, text) from cause
    return f"{found.st_dev}:{found.st_ino}@{boot_id() or os.uname().nodename}"
