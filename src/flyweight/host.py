"""The host: its boot, its processes, its limit on open files, and who may access a file.

Containers of one machine share its boot, and therefore its clock, locks and memory. A process
number or a lock has no meaning under another boot.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import stat
import struct
from contextlib import suppress

from flyweight.errors import StoreError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OPEN_FILES = "/proc/self/fd"
_SPARE_FILES = 64
_LOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37  # Linux; not every build of Python names them


def boot_id() -> str:
    """Return this boot's id, or "" if the kernel does not provide one."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def identity() -> str:
    """Return a name of this host that other hosts do not have: the boot's id.

    FLYWEIGHT_HOST overrides it, for containers that share a kernel but no memory.
    """
    return os.environ.get("FLYWEIGHT_HOST") or boot_id()


def location() -> str:
    """Return an id of this network namespace, and the host's name, which containers may share."""
    network, boot = "unknown", boot_id()
    with suppress(OSError):
        network = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}" if boot else network
    return f"{network} {socket.gethostname()}"


def opened(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file and return its descriptor, with a raised limit on open files if necessary."""
    try:
        return os.open(path, flags)
    except OSError as cause:
        if cause.errno != errno.EMFILE or not raise_file_limit():
            raise
        return os.open(path, flags)


def raise_file_limit() -> bool:
    """Raise the soft limit on open files to the hard limit; False if that changes nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system's own limit was lowered meanwhile
        return False
    return True


def make_room(file: int) -> None:
    """Raise the limit on open files if this one, the lowest that was free, comes near to it."""
    if file + _SPARE_FILES >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        raise_file_limit()


def has_room(num_files: int) -> bool:
    """True if this process may open so many more files, after raising its limit.

    Open files are counted: a trial would take descriptors away from other threads.
    """
    raise_file_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Not counted: descriptors from before the limit was lowered, and that of the listing.
        num_open = sum(int(name) < limit for name in os.listdir(_OPEN_FILES)) - 1
    except OSError as cause:
        if cause.errno in (errno.EMFILE, errno.ENFILE):
            return False
        raise
    return num_open + num_files <= limit


def reason(cause: Exception) -> str:
    """Return the operating system's text, with the remedy if the limit on files is the cause."""
    if not isinstance(cause, OSError):
        return str(cause)
    hint = "; raise the limit, ulimit -n" if cause.errno == errno.EMFILE else ""
    return f"{cause.strerror or cause}{hint}"


def exposure(found: os.stat_result, *, bits: int = 0o077) -> str:
    """Return the owner and mode of a file, in words, if users other than this one may access it.

    Return "" if the file belongs to this user or to root, and has none of the mode `bits`.
    """
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid in (os.geteuid(), 0) and not mode & bits:
        return ""
    return f"is of user {found.st_uid} with mode {mode:o}"


def locked(file: int, offset: int, nbytes: int) -> bool:
    """Lock a range of bytes (0 for all); return False if another open file holds a lock there.

    The lock belongs to the open file description: it ends with the last process that holds it, also
    if that is killed, and a forked child's close does not end it.
    """
    return _lock_call(file, _F_OFD_SETLK, offset, nbytes) is not None


def locked_bytes(file: int, offset: int) -> int | None:
    """Return the length (0 for all) of another open file's lock on a byte; None without a lock.

    Neither waits nor locks. The kernel answers for processes of every PID namespace.
    """
    found = _lock_call(file, _F_OFD_GETLK, offset, 1)
    if found is None:
        return None
    kind, _, _, nbytes, _ = _LOCK.unpack(found)
    return None if kind == fcntl.F_UNLCK else int(nbytes)


def _lock_call(file: int, call: int, offset: int, nbytes: int) -> bytes | None:
    """Return the kernel's answer, or None if another open file holds the lock."""
    try:
        return fcntl.fcntl(file, call, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, nbytes, 0))
    except OSError as cause:
        if cause.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise StoreError(cause.errno, f"cannot lock a file: {cause.strerror}") from cause
