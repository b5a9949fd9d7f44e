"""Host: which machine this is, how many files it lets us open, and which are only their user's.

Containers of one machine share its boot, and so its clock, its locks and its memory; what is
named or locked here means nothing under another boot.
"""

from __future__ import annotations

import errno
import os
import resource
import stat

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OPEN_FILES = "/proc/self/fd"


def boot_id() -> str:
    """Return what tells one start of one machine from all others; nothing if that is not told."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def state_of(pid: int) -> str:
    """Return the letter that the kernel has for what a process does; nothing if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def birth_of(pid: int | None = None) -> tuple[int, int] | None:
    """Return the number of a process and its start in clock ticks since boot; None if not seen.

    This process by default. A process that gets the same number later has another start. In a
    container a process has another number than it is seen by from outside: its own is returned.
    """
    at = "/proc/self" if pid is None else f"/proc/{pid}"
    try:
        with open(f"{at}/stat", encoding="utf-8", errors="replace") as file:
            started = int(file.read().rpartition(")")[2].split()[19])
        with open(f"{at}/status", encoding="utf-8", errors="replace") as file:
            numbers = [line.split()[-1] for line in file if line.startswith("NSpid:")]
        return int(numbers[0]), started
    except (OSError, IndexError, ValueError):
        return None


def is_running(pid: int) -> bool:
    """True unless a process of this number has ended, or never was."""
    return state_of(pid) not in ("", "Z", "X")


def opened(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor; the limit on this process's files is raised if that is in the way."""
    try:
        return os.open(path, flags)
    except OSError as cause:
        if cause.errno != errno.EMFILE or not raise_file_limit():
            raise
        return os.open(path, flags)


def raise_file_limit() -> bool:
    """Let this process have as many files open as it may; False if it might already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system's own limit was lowered since
        return False
    return True


def has_room(num_files: int) -> bool:
    """True if this process may open so many more files, its limit raised as far as that goes.

    They are counted: to open them for a trial would take them from other threads meanwhile.
    """
    raise_file_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Numbers from before a limit was lowered do not count, nor does the listing's own.
        num_open = sum(int(name) < limit for name in os.listdir(_OPEN_FILES)) - 1
    except OSError as cause:
        if cause.errno in (errno.EMFILE, errno.ENFILE):
            return False
        raise
    return num_open + num_files <= limit


def reason(cause: OSError) -> str:
    """Return what the operating system says, and what helps if it is its limit on files."""
    hint = "; raise the limit, ulimit -n" if cause.errno == errno.EMFILE else ""
    return f"{cause.strerror or cause}{hint}"


def exposure(found: os.stat_result, *, bits: int = 0o077) -> str:
    """Return whose a file is, in words, if anybody but its user has it or one of some mode bits.

    Nothing if it is this user's own, or root's, who could read and write it anyway.
    """
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid in (os.geteuid(), 0) and not mode & bits:
        return ""
    return f"is of user {found.st_uid} with mode {mode:o}"
