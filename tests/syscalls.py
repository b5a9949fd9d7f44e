"""Runs a save and counts, records or cuts short every system call that changes the disk.

    python syscalls.py kill N RUN VERSION        SIGKILL at call N, or in the middle of it;
                                                 N,cached and N,direct choose the way to write
    python syscalls.py record FILE RUN VERSION   append each call, as JSON lines, to FILE

Several processes may record to one file: each makes its call and writes its line under one
lock, so the lines are in the order of the calls. Only the functions of `os` that the store uses
are wrapped; the calls and the signal are real.
"""

import base64
import fcntl
import json
import os
import signal
import sys
import threading

import numpy as np

import flyweight as fw
from flyweight.stores import draft_file

CALLS = (
    "mkdir", "open", "posix_fallocate", "pwrite", "fsync", "rename", "link", "unlink", "rmdir",
)  # fmt: skip
lock = threading.RLock()


def weights(version):
    """Large enough for several chunks and parts, small enough to do a hundred times."""
    rng = np.random.default_rng(version)
    return {
        "large": rng.integers(0, 256, 5 << 20, dtype=np.uint8),
        "small": rng.random((100, 7)),
        "other": rng.integers(0, 9, (3, 400_000)),
    }


def changes_the_disk(name, args):
    return name != "open" or bool(args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))


def wrap(act):
    for name in CALLS:
        original = getattr(os, name)

        def wrapped(*args, _name=name, _original=original, **kwargs):
            if not changes_the_disk(_name, args):
                return _original(*args, **kwargs)
            with lock:
                return act(_name, _original, args, kwargs)

        setattr(os, name, wrapped)


def kill_at(number):
    count = 0

    def act(name, original, args, kwargs):
        nonlocal count
        if count == number:
            if name == "pwrite":  # a torn write: half of it reached the file
                half = len(args[1]) // 2 // 4096 * 4096
                original(args[0], args[1][:half], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return original(*args, **kwargs)

    wrap(act)


def record_to(path):
    log = open(path, "a")  # noqa: SIM115

    def told(value, kwargs):
        if isinstance(value, (bytes, memoryview)):
            return base64.b64encode(bytes(value)).decode()
        if isinstance(value, (str, os.PathLike)):  # a name in a directory, or a path
            return os.path.join(place_of(kwargs.get("dir_fd")) or "", os.fspath(value))
        return value

    def act(name, original, args, kwargs):
        fcntl.flock(log, fcntl.LOCK_EX)
        try:
            place, known = place_of(args[0]), [told(each, kwargs) for each in args]
            result = original(*args, **kwargs)
            log.write(json.dumps([name, place, known, told(result, {})]) + "\n")
            log.flush()
            return result
        finally:
            fcntl.flock(log, fcntl.LOCK_UN)

    wrap(act)


def place_of(fd):
    return os.readlink(f"/proc/self/fd/{fd}") if isinstance(fd, int) else None


def main(mode, how, run, version):
    num_threads = 2
    if how.endswith((",cached", ",direct")):  # the same calls in every run, so that all are tried
        how, _, way = how.partition(",")
        draft_file.FAST_RATE = 0.0 if way == "cached" else float("inf")
        num_threads = 1
    kill_at(int(how)) if mode == "kill" else record_to(how)
    fw.save(
        weights(int(version)),
        run,
        version=int(version),
        part_bytes=6 << 20,
        num_threads=num_threads,
    )
    print("saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
