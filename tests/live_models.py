"""Real processes for tests of live updates: forked, killed, stopped, and counted afterwards."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from contextlib import contextmanager

import numpy as np

from flyweight.host import state_of

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


class Child:
    """A function in a process of its own; what it returns or raises comes back by `result`."""

    def __init__(self, function, *args, context=FORK):
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_child, args=(theirs, function, args))
        self.process.start()
        theirs.close()
        self.pid = self.process.pid

    def send(self, message):
        self._ours.send(message)

    def told(self, timeout=20):
        """Return the next thing that the child told."""
        assert self._ours.poll(timeout), f"child {self.pid} told nothing in {timeout} s"
        return self._ours.recv()

    def result(self, timeout=30):
        kind, value = self.told(timeout)
        while kind != "result":
            assert kind != "error", value
            kind, value = self.told(timeout)
        self.join()
        return value

    def join(self, timeout=20):
        # Not by its sentinel, which its own children may have inherited.
        until(lambda: self.process.exitcode is not None, timeout)
        return self.process.exitcode

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def stop(self):
        """Have it stand still, and return once it does: a signal takes its time."""
        self.kill(signal.SIGSTOP)
        until(lambda: state_of(self.pid) == "T")

    def go_on(self):
        self.kill(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        if self.process.exitcode is None:
            self.go_on()
            self.process.kill()
            self.join()
        self.process.close()
        self._ours.close()


def _child(pipe, function, args):
    try:
        value = function(*args, pipe)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
    pipe.send(("result", value))
    os._exit(0)


def weights(version, nbytes=1 << 18):
    """A model whose every byte depends on its version; some tensors larger than a small bucket."""
    rng = np.random.default_rng(version)
    return {
        "embed": rng.integers(0, 256, (nbytes // 256, 128), dtype=np.uint8),
        "layer.0.w": rng.random((37, 11)).astype(np.float32),
        "layer.0.t": rng.random((40, 30)).astype(np.float32).T,
        "layer.1.w": rng.integers(0, 2**60, nbytes // 32, dtype=np.int64),
        "norm": rng.random(7),
        "scalar": np.array(rng.random()),
        "empty": np.empty((0, 3), np.float32),
    }


def assign(model, version):
    for name, array in weights(version, nbytes_of(model)).items():
        model[name][...] = array


def nbytes_of(model):
    return model["embed"].shape[0] * 256


def holds(model, version):
    """True if every byte of a model is that of a version."""
    wanted = weights(version, nbytes_of(model))
    return all(model[name].tobytes() == wanted[name].tobytes() for name in wanted)


def holding(model, candidates):
    """Return which of some versions a model holds whole, or None."""
    return next((version for version in candidates if holds(model, version)), None)


def resources():
    """Return what a process must not leak: threads, files, shared segments that are mapped."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("flyweight")]
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    kinds = sorted(f.split(":")[0] if ":" in f else f for f in files if "/dev/pts" not in f)
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:flyweight" in line for line in maps)
    return {"threads": threads, "files": kinds, "mapped": mapped}


def settled(before, seconds=5):
    """Return the resources once they are as before, or after some seconds as they are."""
    deadline = time.monotonic() + seconds
    while (now := resources()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return now


@contextmanager
def in_time(seconds, *, early=0.1):
    """Fail unless a wait of so many seconds ends when it should: neither early, nor twice as late.

    What is left above is for a busy machine: a deadline in a test is some seconds long.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        spent = time.monotonic() - started
        late = 1.8 * seconds
        assert seconds - early <= spent < late, f"{spent:.2f} s for a wait of {seconds:g} s"


def until(claim, seconds=10):
    """Wait until a claim holds; say so if it never does."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"{claim} did not come true in {seconds} s"
        time.sleep(0.005)
