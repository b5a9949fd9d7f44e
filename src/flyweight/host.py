"""Host: which machine this is, since when it runs, and which of its files are only their user's.

Containers of one machine share its boot, and so its clock, its locks and its memory; what is
named or locked here means nothing under another boot.
"""

from __future__ import annotations

import os
import stat

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Return what tells one start of one machine from all others; nothing if that is not told."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def is_running(pid: int) -> bool:
    """True unless a process of this number has ended, or never was."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def exposure(found: os.stat_result, *, bits: int = 0o077) -> str:
    """Return whose a file is, in words, if anybody but its user has it or one of some mode bits.

    Nothing if it is this user's own, or root's, who could read and write it anyway.
    """
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid in (os.geteuid(), 0) and not mode & bits:
        return ""
    return f"is of user {found.st_uid} with mode {mode:o}"
