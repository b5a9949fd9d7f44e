"""Mooncake reads, between real processes; each test is a program, as Mooncake's threads never end."""

import pytest

from child_processes import run_python
from flyweight.transports.network_engines import MOONCAKE_INSTALL, engines_here

START = """
import os, signal, sys, time
import numpy as np
from flyweight.errors import *
from flyweight.memory import Buffer
from flyweight.transports import mooncake_reads
from flyweight.transports.mooncake_reads import STAGING_BYTES, MooncakeReader
from flyweight.transports.read_server import ReadServer

HERE, NBYTES = "127.0.0.1", 2 * STAGING_BYTES + 12345
server = ReadServer("mooncake", address=HERE)
source = server.allocate(NBYTES)
source.items()[:] = np.random.default_rng(1).integers(1, 255, NBYTES, dtype=np.uint8)
place = server.place(source)
into = Buffer.of(np.zeros(NBYTES, np.uint8))
def new_reader(): return MooncakeReader(server.describe(), address=HERE)
def read(**options): reader.read(place, 0, into, **{"timeout_seconds": 60, **options})
def fails(kind, **options):
    try: read(**options)
    except kind as error: return str(error)
    raise AssertionError(f"no {kind.__name__}")
reader = new_reader()
"""
END = "\nserver.close()\n"


@pytest.fixture(scope="module")
def program():
    if not engines_here().mooncake:
        pytest.skip(f"Mooncake is not installed: {MOONCAKE_INSTALL}")
    probe = run_python("import mooncake.engine")
    if probe.returncode != 0:
        pytest.skip(f"Mooncake cannot be imported: {probe.stderr.splitlines()[-1]}")

    def run(code):
        done = run_python(START + code + END)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.check
def test_bytes_arrive_whole_and_by_parts(program):
    program("""
seen = []
read(on_progress=seen.append)
assert seen == [STAGING_BYTES, STAGING_BYTES, 12345]
assert (into.items() == source.items()).all()
part = Buffer.of(into.items()[100:5000])
reader.read(place, 7, part, timeout_seconds=60)
assert (part.items() == source.items()[7:4907]).all()
reader.close(); reader.close()
assert not mooncake_reads._kept
""")


@pytest.mark.check
def test_forgotten_memory_is_gone(program):
    program("""
read()
server.forget(source)
assert "no longer served" in fails(HandleGone)
assert "closed" in fails(PeerLost)
assert not mooncake_reads._kept
""")


@pytest.mark.check
def test_a_source_that_dies_is_a_lost_peer_and_starts_again(program):
    program("""
read()
os.kill(server.pid, signal.SIGKILL)
fails((PeerLost, TransferTimeout), timeout_seconds=60)
into.items()[:] = 0
for attempt in range(3):  # Mooncake may abort the new process once, of which the reader is told
    place, reader = server.place(source), new_reader()
    try:
        read()
        break
    except PeerLost: pass
assert (into.items() == source.items()).all()
""")


@pytest.mark.check
def test_after_a_deadline_no_byte_arrives_in_the_readers_memory_and_staging_is_kept(program):
    program("""
staging = reader._staging
stop = lambda n: os.kill(server.pid, signal.SIGSTOP)
started = time.monotonic()
fails(TransferTimeout, timeout_seconds=1, on_progress=stop)
assert time.monotonic() - started < 30
before, staged = into.items().copy(), staging.copy()
source.items()[:] = 255
os.kill(server.pid, signal.SIGCONT)
time.sleep(1.5)
assert (into.items() == before).all()
assert mooncake_reads._kept[0] is staging
assert (staging != staged).any()  # late bytes, which is why it is kept
reader = new_reader()
assert reader._address != Buffer.of(staging).address
read()
assert (into.items() == 255).all()
""")


@pytest.mark.check
def test_a_process_that_keeps_too_much_staging_refuses_to_read(program):
    program("""
mooncake_reads._kept.append(np.zeros(1, np.uint8))
mooncake_reads.MAX_KEPT_BYTES = 1
try: new_reader()
except TransportError as error: assert "restart this process" in str(error)
else: raise AssertionError
""")


@pytest.mark.campaign
def test_readers_that_are_killed_in_the_middle_leave_the_source_alive(program):
    out = program("""
import subprocess
CODE = '''
import os, sys
import numpy as np
from flyweight.memory import Buffer
from flyweight.transports.mooncake_reads import MooncakeReader
import threading, time
reader = MooncakeReader(sys.argv[1].encode(), address="127.0.0.1")
into = Buffer.of(np.zeros(int(sys.argv[3]), np.uint8))
def end():
    while not reader._staging[0]: pass
    os.kill(os.getpid(), 9)
threading.Thread(target=end, daemon=True).start()
reader.read(sys.argv[2].encode(), 0, into, timeout_seconds=60)
'''
pids = {server.pid}
for _ in range(10):
    words = [sys.executable, "-c", CODE, server.describe(), server.place(source), str(NBYTES)]
    code = subprocess.run(words, timeout=60, stderr=subprocess.DEVNULL).returncode
    assert code == -9, code
    server.describe()
    pids.add(server.pid)
read()
assert (into.items() == source.items()).all()
print("processes", len(pids))
""")
    assert out == "processes 1\n"


@pytest.mark.check
def test_rdma_without_a_device_is_refused(program):
    program("""
try: mooncake_reads._engine(HERE, "rdma")
except TransportError as error: assert "no RDMA device" in str(error)
else: raise AssertionError
""")
