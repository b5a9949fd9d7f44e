"""Device memory by process, as the driver counts it.

Free memory of the whole device also changes when another process ends: that of an earlier test
gives its context back some time after it was joined.
"""

import os
import subprocess

import pytest


def used_bytes(pid=None):
    """Return what a process takes on all devices, to the MiB; its kernels must be done."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    wanted = os.getpid() if pid is None else pid
    rows = [line.split(",") for line in told.splitlines()]
    found = [int(used) for number, used in rows if int(number) == wanted]
    if not found:
        pytest.skip("the driver does not tell what this process uses: another PID namespace")
    return sum(found) << 20
