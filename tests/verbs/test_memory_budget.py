"""The memory budget holds for any number of threads: more threads, less memory for each."""

import json

import numpy as np
import pytest

import flyweight as fw
from child_processes import run_python
from conftest import drop_cache, random_bytes

pytestmark = pytest.mark.check

SIDE = 6000  # a float32 matrix of 137 MiB, whose chunks are 4 MiB
BUDGET = 40 << 20
OVERHEAD = 4 << 20
"""Stacks of threads, and what Python takes for plans and pieces."""

MEASURE = """
import os, sys, threading
cores = int(sys.argv[1])
os.sched_getaffinity = lambda pid: set(range(cores))
import numpy as np, flyweight as fw

def anonymous():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line[:8] in ("RssAnon:", "RssShmem")) << 10

def peak_of(work):
    peak, done = [0], threading.Event()
    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
    watcher = threading.Thread(target=watch)
    before = anonymous()
    watcher.start()
    work()
    done.set()
    watcher.join()
    return peak[0] - before
"""


def peak_bytes(code, *arguments, cores=2):
    """Run code in a process of its own, on a machine that has so many cores as far as it knows."""
    done = run_python(MEASURE + code, cores, *arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("budget")
    matrix = random_bytes(4 * SIDE * SIDE).view(np.float32).reshape(SIDE, SIDE)
    small = {f"s{n}": random_bytes(50_000, n) for n in range(200)}
    fw.save({"w": matrix, **small}, place / "run")
    fw.save({"w": random_bytes(4)}, place / "tiny")
    for format in ("hf", "dcp", "paddle"):
        fw.convert(place / "run", place / format, to=format)
    return place


def forget(path):
    for file in path.rglob("*"):
        if file.is_file():
            drop_cache(file)


LOAD = """
place, num_threads, budget, side, is_turned = sys.argv[2], *map(int, sys.argv[3:7])
fw.load(place + "/../tiny", into={"w": np.ones(4, np.uint8)}, num_threads=num_threads)
target = {"w": np.ones((side, side), np.float32)}
if is_turned:
    target = {"w": target["w"].T}
target |= {f"s{n}": np.ones(50_000, np.uint8) for n in range(200)}
print(peak_of(lambda: fw.load(place, into=target, num_threads=num_threads, memory_bytes=budget)))
"""


@pytest.mark.parametrize("num_threads", [16, 64])
@pytest.mark.parametrize("format", ["run", "hf", "dcp", "paddle"])
def test_a_load_by_many_threads_stays_within_its_budget(saved, format, num_threads):
    """From the disk, into memory that has the same order: windows are bounced or mapped."""
    forget(saved / format)
    peak = peak_bytes(LOAD, saved / format, num_threads, BUDGET, SIDE, 0)
    assert peak < BUDGET + OVERHEAD


@pytest.mark.parametrize("num_threads", [16, 64])
def test_a_load_into_another_order_by_many_threads_stays_within_its_budget(saved, num_threads):
    forget(saved / "run")
    peak = peak_bytes(LOAD, saved / "run", num_threads, BUDGET, SIDE, 1)
    assert peak < BUDGET + OVERHEAD


SAVE = """
place, num_threads, budget, side, is_turned = sys.argv[2], *map(int, sys.argv[3:7])
source = {"w": np.ones((side, side), np.float32)}
if is_turned:
    source = {"w": source["w"].T}
source |= {f"s{n}": np.ones(50_000, np.uint8) for n in range(200)}
fw.save({"w": np.ones(4)}, place + "-tiny", num_threads=num_threads)
print(peak_of(lambda: fw.save(source, place, num_threads=num_threads, memory_bytes=budget)))
"""


@pytest.mark.parametrize("is_turned", [0, 1])
@pytest.mark.parametrize("num_threads", [16, 64])
def test_a_save_by_many_threads_stays_within_its_budget(tmp_path, num_threads, is_turned):
    peak = peak_bytes(SAVE, tmp_path / "run", num_threads, BUDGET, SIDE, is_turned)
    assert peak < BUDGET + OVERHEAD


CONVERT = """
place, goal, to, budget = *sys.argv[2:5], int(sys.argv[5])
fw.convert(place + "/../tiny", goal + "-tiny", to=to)
print(peak_of(lambda: fw.convert(place, goal, to=to, memory_bytes=budget)))
"""


@pytest.mark.parametrize(("format", "to"), [("run", "hf"), ("run", "dcp"), ("dcp", "snapshot")])
def test_a_conversion_on_many_cores_stays_within_its_budget(saved, tmp_path, format, to):
    forget(saved / format)
    peak = peak_bytes(CONVERT, saved / format, tmp_path / "out", to, BUDGET, cores=64)
    assert peak < BUDGET + OVERHEAD
