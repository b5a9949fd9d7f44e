"""The process that holds the network namespaces of `netns.py`, and clears them at the end.

It runs alone, as `python netns_guard.py PARENT COUNT`, with nothing but the standard library. The
namespaces have no names: they exist as long as this process, or another one in them. So nothing
stays behind when tests end, however they end: this process also sees the death of its parent.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
_KILL_SECONDS = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(flags):
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become_root_of_own_namespace():
    """Enter a new user namespace, as its root: there everyone may make network namespaces."""
    user, group = os.getuid(), os.getgid()
    _unshare(CLONE_NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as map_file:
            map_file.write(text)


def _make(count):
    """Make namespaces; return their files, and that of the user namespace if there is a new one."""
    user, namespaces = None, []
    for _ in range(count):
        try:
            _unshare(CLONE_NEWNET)
        except PermissionError:
            if user is not None:
                raise
            _become_root_of_own_namespace()
            user = os.open("/proc/self/ns/user", os.O_RDONLY)
            _unshare(CLONE_NEWNET)
        namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    return namespaces, user


def _processes_in(namespaces):
    """Return the processes in these namespaces, without this one."""
    wanted = {os.fstat(each).st_ino for each in namespaces}
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}/ns/net").st_ino in wanted:
                found.append(int(name))
        except OSError:  # it has ended, or belongs to someone else
            continue
    return [pid for pid in found if pid != os.getpid()]


def _kill_all_in(namespaces):
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := _processes_in(namespaces)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def main():
    parent, count = map(int, sys.argv[1:])
    parent_file = os.pidfd_open(parent)
    try:
        namespaces, user = _make(count)
    except OSError as cause:
        print(json.dumps({"error": str(cause)}), flush=True)
        return
    print(json.dumps({"namespaces": namespaces, "user": user}), flush=True)
    # Both, since a fork of the parent may keep the other end of the input open.
    select.select([sys.stdin, parent_file], [], [])
    _kill_all_in(namespaces)


if __name__ == "__main__":
    main()
