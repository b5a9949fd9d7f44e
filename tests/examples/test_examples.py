"""Every example runs, and says that all went well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from child_processes import LIMIT

pytestmark = pytest.mark.check

EXAMPLES = Path(__file__).parents[2] / "examples"


SLOW_DISK = """
import os, time
fsync = os.fsync
def slow(fd):
    time.sleep(0.3)
    return fsync(fd)
os.fsync = slow
"""


def test_the_recovery_example_loses_and_mixes_nothing(tmp_path):
    """On a disk so slow that each kill finds a save half-way."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "recovery.py", "--versions", "4", "--pace", "0"],
        capture_output=True, text=True, timeout=4 * LIMIT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL") == 2
    assert done.stdout.count("  yes  ") == 6


def test_the_live_example_ends_with_every_engine_holding_what_the_trainer_holds():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "live.py", "--width", "128"],
        capture_output=True, text=True, timeout=4 * LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("to 2 replicas") == 12
    assert "engine 1 was killed" in done.stdout
    assert done.stdout.count("  yes  ") == 2


def test_no_example_is_forgotten():
    """Files are run here, `demo` in test_demo.py, and `vllm_rl.py` in tests/real_vllm."""
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__")
    assert names == ["demo", "live.py", "recovery.py", "vllm_rl.py"]
