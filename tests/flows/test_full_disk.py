"""A disk that fills up, at the start of a save or in the middle: told with numbers, nothing lost."""

import pytest

from child_processes import run_python
from conftest import in_own_mounts

SCRIPT = """
import os, sys, shutil, numpy as np
import flyweight as fw
from flyweight.errors import StoreError

run = os.path.join(sys.argv[1], "run")

def room():
    if sys.argv[2:] == ["alone"]:
        return shutil.disk_usage(run).free
    # Others write to this disk as well.
    files = (os.path.join(place, each) for place, _, names in os.walk(run) for each in names)
    return -sum(512 * os.lstat(file).st_blocks for file in files)

small = {"w": np.arange(1000.0)}
large = {f"w{i}": np.full(2 << 20, i, np.uint8) for i in range(8)}
fw.save(small, run, version=1)
before = room()
try:
    fw.save(large, run, version=2)
except StoreError as error:
    print("refused:", error)
assert fw.versions(run) == [1], fw.versions(run)
assert os.listdir(run) == ["v0000000001"], os.listdir(run)
after = room()
assert after >= before - 65536, (before, after)
target = {"w": np.zeros(1000)}
assert fw.load(run, into=target).version == 1
assert (target["w"] == small["w"]).all()
fw.save(small, run, version=2)
print("went on")
"""


def test_a_disk_without_room_refuses_before_writing_and_the_run_goes_on(tmp_path):
    """On a real file system of 8 MiB, mounted where only the child sees it."""
    mount = f"mount -t tmpfs -o size=8m none {tmp_path}"
    done = in_own_mounts(mount, SCRIPT, tmp_path, "alone")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused:" in done.stdout
    assert "No space left on device" in done.stdout
    assert "free" in done.stdout
    assert done.stdout.endswith("went on\n")


@pytest.mark.check
@pytest.mark.parametrize("limit_kib", [1, 8, 100, 2000])
def test_a_write_that_fails_half_way_is_told_and_leaves_nothing(tmp_path, limit_kib):
    """A limit on file sizes fails the write itself, at whatever byte it is reached."""
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"def tighten(): resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_kib} << 10, -1))\n"
        "def loosen(): resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
    )
    code = limit + SCRIPT.replace("try:\n", "tighten()\ntry:\n").replace(
        "assert fw.versions(run) == [1]", "loosen()\nassert fw.versions(run) == [1]"
    )
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert done.stdout.endswith("went on\n")
