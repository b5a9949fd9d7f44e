"""What several tests need: small models of odd tensors, and damage done to files on purpose."""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from campaign import IS_CAMPAIGN, budget

# The same examples in every run, so that none is red by chance; many others in a campaign. An example
# takes longer when the machine is busy, which is no fault of it.
hypothesis.settings.register_profile(
    "flyweight",
    deadline=None,
    derandomize=not IS_CAMPAIGN,
    database=None,
    max_examples=budget(100, 2000),
    print_blob=True,
)
hypothesis.settings.load_profile("flyweight")

RNG_SEED = 7
pytest_plugins = ["faulty_engines", "live_fixtures"]

# Hundreds of processes import flyweight: each would compile it anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return how many processes `-n auto` is: half of what tests do is waiting for others."""
    return len(os.sched_getaffinity(0)) + 2


def random_bytes(nbytes, seed=RNG_SEED):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def odd_arrays(seed=RNG_SEED):
    """Arrays of every awkward kind: scalar, empty, odd sizes, transposed, sliced, reversed."""
    rng = np.random.default_rng(seed)
    return {
        "scalar": np.array(rng.random(), dtype=np.float64),
        "empty": np.empty((0, 3), dtype=np.float32),
        "odd.bytes": rng.integers(0, 256, (7, 3), dtype=np.uint8),
        "odd.half": rng.random((5, 3, 2)).astype(np.float16),
        "transposed": rng.random((4, 6)).astype(np.float32).T,
        "sliced": rng.integers(0, 9, (8, 8), dtype=np.int64)[::2, 1::3],
        "reversed": rng.random(9)[::-1],
        "flag": np.array([True, False, True]),
        "complex": (rng.random(3) + 1j * rng.random(3)).astype(np.complex64),
    }


def zeros_like(arrays):
    """The same shapes and strides, other values."""
    blank = {}
    for name, array in arrays.items():
        fresh = np.zeros_like(array, order="K")
        blank[name] = fresh if fresh.strides == array.strides else fresh.reshape(array.shape)
    return blank


def same(a, b):
    return a.keys() == b.keys() and all(
        a[name].tobytes() == b[name].tobytes() and a[name].dtype == b[name].dtype for name in a
    )


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file, as a tired disk does."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def drop_cache(path: Path) -> None:
    """Make the next read of a file come from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def dead_draft(name, kind="draft"):
    """Return a name that a writer on this machine leaves when it is killed.

    It is that of a live draft with another token at its end.
    """
    from flyweight.stores.draft import LocalDraft

    with tempfile.TemporaryDirectory() as place, LocalDraft(Path(place) / name):
        (live,) = os.listdir(place)
    token = "0123456789abcdef"
    return f".{kind}-{live.removeprefix('.draft-')[: -len(token)]}{token}"


@pytest.fixture
def address(tmp_path):
    """Where a publisher of this test is found."""
    return f"unix:{tmp_path}/policy"


@pytest.fixture
def threads():
    """Threads for what has to wait while the test goes on."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def run(tmp_path):
    """A run with three versions of the odd arrays: 1, 2 and 5."""
    import flyweight as fw

    for version in (1, 2, 5):
        fw.save(odd_arrays(version), tmp_path / "run", version=version)
    return tmp_path / "run"


def in_own_mounts(mount, script, *arguments):
    """Run a Python script where a file system is mounted that only it sees; skip if nobody may."""
    unshare = shutil.which("unshare")
    command = f'{mount} && exec {sys.executable} -c "$0" {" ".join(map(str, arguments))}'
    words = [unshare or "unshare", "--map-root-user", "--mount", "sh", "-c", command, script]
    probe = [*words[:3], "true"]
    if unshare is None or subprocess.run(probe, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("this machine lets nobody mount a file system of their own (unshare)")
    return subprocess.run(words, capture_output=True, text=True, timeout=240)
