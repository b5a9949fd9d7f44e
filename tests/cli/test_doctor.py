"""`flyweight doctor` where the kernel itself says no: file systems and filters, nothing patched."""

import json
import platform

import pytest

from child_processes import LIMIT, path_without, run_python
from conftest import in_own_mounts

# Both outputs by one process: each would import torch again, to ask it for GPUs.
RUN = """
import json, sys
from click.testing import CliRunner
from flyweight.cli import main
place = sys.argv[1]
for more in ([], ["--json"]):
    done = CliRunner().invoke(main, ["doctor", place, *more])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""
MOVE = """
import numpy as np
import flyweight as fw
saved = {"w": np.arange(1 << 18, dtype=np.int64)}
fw.save(saved, place + "/run", version=1)
loaded = {"w": np.zeros(1 << 18, np.int64)}
fw.load(fw.open(place + "/run"), into=loaded)
print(json.dumps(loaded["w"].tobytes() == saved["w"].tobytes()))
"""
# A filter for system calls in the kernel's own language: `mmap` of a file, shared, only to be read,
# is refused as file systems without mappings do; all else is as ever.
FILTER = """
import ctypes, struct
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 19  # ENODEV
def step(code, k, yes=0, no=0):
    return struct.pack("<HBBI", code, yes, no, k)
load, equal, give = 0x20, 0x15, 0x06
steps = [
    step(load, 0), step(equal, NUMBER, 0, 5),  # the system call
    step(load, 16 + 8 * 2), step(equal, 1, 0, 3),  # what for: PROT_READ
    step(load, 16 + 8 * 3), step(equal, 1, 0, 1),  # how: MAP_SHARED
    step(give, REFUSE), step(give, ALLOW),
]
code = ctypes.create_string_buffer(b"".join(steps))
program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
zero = [ctypes.c_ulong(0)] * 3
assert libc.prctl(38, ctypes.c_ulong(1), *zero) == 0, ctypes.get_errno()  # no new privileges
if libc.prctl(22, ctypes.c_ulong(2), ctypes.create_string_buffer(program), 0, 0):
    raise SystemExit("this kernel takes no filter: errno " + str(ctypes.get_errno()))
import mmap, tempfile
with tempfile.TemporaryFile() as file:
    file.write(b"x")
    file.flush()
    try:
        mmap.mmap(file.fileno(), 1, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        assert error.errno == 19, error
    else:
        raise SystemExit("the filter lets mmap through")
"""


def told(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.check
def test_a_file_system_that_refuses_o_direct_is_told_of_and_works(tmp_path):
    """ramfs opens no file with O_DIRECT; everything goes through the page cache then."""
    mount = f"mount -t ramfs none {tmp_path}"
    text, data, is_whole = told(in_own_mounts(mount, RUN + MOVE, tmp_path))
    assert (text[0], text[2], data[0], data[2]) == (0, "", 0, "")
    assert "unbuffered_writes no" in text[1]
    assert "unbuffered_reads no" in text[1]
    disk = json.loads(data[1])["disk"]
    assert (disk["unbuffered_writes"], disk["unbuffered_reads"]) == (False, False)
    assert is_whole


@pytest.mark.parametrize(
    ("options", "says"),
    [("ro", "Read-only file system"), ("size=64k", "No space left on device")],
)
def test_a_file_system_that_takes_nothing_is_exit_code_6(tmp_path, options, says):
    mount = f"mount -t tmpfs -o {options} none {tmp_path}"
    text, data = told(in_own_mounts(mount, RUN, tmp_path))
    assert (text[0], text[1], data[0], data[1]) == (6, "", 6, "")
    assert text[2].startswith("StoreError: ")
    assert says in text[2]
    assert str(tmp_path) in text[2]
    assert json.loads(data[2])["exit_code"] == 6


@pytest.mark.check
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of mmap")
def test_a_kernel_that_refuses_to_map_files_is_told_of_and_works(tmp_path):
    """What is in the page cache is read like everything else."""
    number = {"x86_64": 9, "aarch64": 222}[platform.machine()]
    script = FILTER.replace("NUMBER", str(number)) + RUN + MOVE
    done = run_python(script, tmp_path, timeout=3 * LIMIT)
    if "takes no filter" in done.stderr:
        pytest.skip(done.stderr.strip())
    text, data, is_whole = told(done)
    assert (text[0], text[2], data[0], data[2]) == (0, "", 0, "")
    assert "mapped_reads no" in text[1]
    assert json.loads(data[1])["disk"]["mapped_reads"] is False
    assert is_whole


NETWORK = """
import json, sys
sys.path[:] = sys.argv[1:]
from click.testing import CliRunner
from flyweight.cli import main
for more in ([], ["--json"]):
    done = CliRunner().invoke(main, ["doctor", *more])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
print(json.dumps(sorted(sys.modules)))
"""


def test_without_nixl_doctor_says_how_to_install_it_and_imports_none(tmp_path):
    bare = path_without(("nixl",), tmp_path)
    text, data, modules = told(run_python(NETWORK, *bare, timeout=3 * LIMIT))
    assert (text[0], text[2], data[0], data[2]) == (0, "", 0, "")
    assert "read: transport 'rdma' needs NIXL" in " ".join(text[1].split())
    network = json.loads(data[1])["network"]
    assert network["transport"] == "read"
    assert "pip install --no-deps nixl" in network["why"]
    assert not {each.split(".")[0] for each in modules} & {"nixl_cu12", "nixl_cu13"}


BROKEN = """
import json, os
from flyweight.transports import nixl
nixl.nixl_version = lambda: "1.5.1"
nixl.rdma_devices = lambda: ("card",)
environment = nixl._environment
nixl._environment = lambda: {**environment(), "PYTHONPATH": os.environ["BROKEN"]}
from flyweight.verbs.describe import _network
print(json.dumps(_network()))
"""


def test_nixl_that_breaks_at_its_start_is_named_and_not_chosen(tmp_path, monkeypatch):
    """The process ends as if a library had crashed in it; this one goes on."""
    package = tmp_path / "flyweight"
    package.mkdir()
    (package / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setenv("BROKEN", str(tmp_path))
    (network,) = told(run_python(BROKEN))
    assert network["transport"] == "read"
    assert network["why"] == "the process of NIXL ended with SIGSEGV"
    assert network["rdma"] == ["card"]
