"""NIXL reads, between real processes: right bytes, faults by name, and nothing that arrives late."""

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from child_processes import LIMIT, Command, in_time, resources, run_python, settled, until
from conftest import random_bytes
from flyweight.errors import HandleGone, PeerLost, TransferTimeout, TransportError
from flyweight.memory import Buffer
from flyweight.transports import nixl_agent, nixl_reads, read_server
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.nixl_agent import Agent, UnfencedRead, ucx_settings
from flyweight.transports.nixl_reads import CHUNK_BYTES, NixlReader
from flyweight.transports.read_messages import Description, Serve, decoded
from flyweight.transports.read_process import ReadProcess
from flyweight.transports.read_server import ReadServer
from flyweight.transports.shared_memory import SharedMemoryTransport
from remote_processes import needs_nixl

HERE = "127.0.0.1"
NBYTES = 8 * CHUNK_BYTES


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let a process that is slow to be run keep its connections, and answer in the end."""
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", f"{LIMIT:.0f}s")
    monkeypatch.setattr(ReadServer._ask, "__defaults__", (None, LIMIT))
    monkeypatch.setattr(read_server, "_START_SECONDS", LIMIT)


@pytest.fixture
def server():
    server = ReadServer("nixl", address=HERE)
    yield server
    if (pid := server.pid) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    server.close()


@pytest.fixture
def source(server):
    """Memory that is served: random bytes."""
    buffer = server.allocate(NBYTES)
    buffer.items()[:] = random_bytes(NBYTES)
    return buffer


@pytest.fixture
def staging():
    return Buffer.of(np.zeros(NBYTES, np.uint8))


def reader_of(server, **options):
    return NixlReader(server.describe(), address=HERE, **options)


def stat_words(pid):
    """Return what the kernel says of a process, from its state on."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stat_words(pid)[0] == "T")


def is_same(a, b):
    return bool((a.items() == b.items()).all())


def check_read(server, source, staging):
    """Read everything by a new reader, and compare."""
    staging.items()[:] = 0
    for tries_left in (2, 1, 0):
        try:
            reader = reader_of(server)
            reader.read(server.place(source), 0, staging, timeout_seconds=LIMIT)
            reader.close()
            break
        except PeerLost:  # an earlier reader's end may abort the process only now
            assert tries_left
    assert is_same(source, staging)


def test_ucx_settings_follow_the_machine():
    plain = ucx_settings(has_rdma=False, has_gpu=False, interface="eth0")
    assert (plain["UCX_TLS"], plain["UCX_NET_DEVICES"]) == ("tcp", "eth0")
    assert plain["UCX_MODULES"].startswith("^ib,")
    assert ucx_settings(has_rdma=False, has_gpu=True)["UCX_TLS"] == "tcp,cuda_copy"
    fast = ucx_settings(has_rdma=True, has_gpu=True, interface="eth0")
    assert not fast.keys() & {"UCX_TLS", "UCX_MODULES", "UCX_NET_DEVICES"}
    assert fast["UCX_TCP_USER_TIMEOUT"] == "3s"


def test_the_interface_of_an_address_is_found():
    assert nixl_agent._interface_of("127.0.0.1") == "lo"
    assert nixl_agent._interface_of("127.8.9.1") == "lo"
    assert nixl_agent._interface_of("192.0.2.1") == ""


@needs_nixl
@pytest.mark.check
def test_bytes_arrive_by_parts_and_whole_with_their_progress(server, source, staging):
    reader, place, seen = reader_of(server), server.place(source), []
    reader.read(place, 0, staging, timeout_seconds=LIMIT, on_progress=seen.append)
    assert seen == [CHUNK_BYTES] * 8
    assert is_same(source, staging)
    rng = np.random.default_rng(1)
    for nbytes in (0, 1, 7, 4097, CHUNK_BYTES + 1):
        offset = int(rng.integers(0, NBYTES - nbytes + 1))
        at = int(rng.integers(0, NBYTES - nbytes + 1))
        into = Buffer.of(staging.items()[at : at + nbytes])
        expected = staging.items().copy()
        expected[at : at + nbytes] = source.items()[offset : offset + nbytes]
        reader.read(place, offset, into, timeout_seconds=LIMIT)
        assert (staging.items() == expected).all(), nbytes
    source.items()[:] = random_bytes(NBYTES, seed=8)  # the next version, in the same memory
    reader.read(place, 0, staging, timeout_seconds=LIMIT)
    assert is_same(source, staging)
    reader.close()


@needs_nixl
@pytest.mark.check
def test_sealed_shared_memory_is_served_and_a_part_of_it(server, staging, tmp_path):
    fds = FdServer(tmp_path / "fds", token="t")
    transport = SharedMemoryTransport(fd_server=fds)
    whole = transport.allocate(NBYTES)
    whole.items()[:] = random_bytes(NBYTES)
    part = Buffer.of(whole.items()[100:])
    reader = reader_of(server)
    reader.read(server.place(part), 5, Buffer.of(staging.items()[:1000]), timeout_seconds=LIMIT)
    assert staging.items()[:1000].tolist() == whole.items()[105:1105].tolist()
    reader.close()
    transport.close()
    fds.close()


@needs_nixl
@pytest.mark.check
def test_forgotten_memory_is_gone_and_freed_and_the_rest_is_served(server, source, staging):
    other = server.allocate(1000)
    other.items()[:] = 9
    place, reader = server.place(source), reader_of(server)
    reader.read(place, 0, staging, timeout_seconds=LIMIT)
    server.forget(source)
    server.forget(source)
    with open(f"/proc/{server.pid}/maps") as maps:
        assert not [line for line in maps if "memfd:flyweight" in line and size_of(line) >= NBYTES]
    with pytest.raises(HandleGone, match="no longer"):
        reader.read(place, 0, staging, timeout_seconds=LIMIT)
    with pytest.raises(PeerLost, match="closed"):
        reader.read(place, 0, staging, timeout_seconds=LIMIT)
    small = Buffer.of(np.zeros(1000, np.uint8))
    check_read(server, other, small)


def size_of(line):
    start, end = (int(each, 16) for each in line.split()[0].split("-"))
    return end - start


@needs_nixl
@pytest.mark.check
def test_memory_forgotten_in_the_middle_of_a_read_is_gone(server, source, staging):
    reader, place = reader_of(server), server.place(source)

    def forget(nbytes):
        server.forget(source)

    with pytest.raises(HandleGone):
        reader.read(place, 0, staging, timeout_seconds=LIMIT, on_progress=forget)


@needs_nixl
@pytest.mark.check
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGABRT, marks=pytest.mark.campaign)]
)
def test_a_source_that_dies_in_the_middle_is_a_lost_peer_and_starts_again(
    server, source, staging, number
):
    reader, place = reader_of(server), server.place(source)

    def end(nbytes):
        with suppress(ProcessLookupError):
            os.kill(server.pid, number)

    with pytest.raises(PeerLost):
        reader.read(place, 0, staging, timeout_seconds=LIMIT, on_progress=end)
    check_read(server, source, staging)
    with pytest.raises(PeerLost, match="ended"):
        reader = reader_of(server)
        reader.read(place, 0, staging, timeout_seconds=LIMIT)


@needs_nixl
@pytest.mark.check
def test_every_chunk_renews_the_deadline(server, source, staging, monkeypatch):
    """By a clock that moves on once after each chunk, when its deadline has been renewed."""
    now, looks = [0.0], [0]

    def clock():
        looks[0] += 1
        now[0] += 0.9 * (looks[0] == 2)
        return now[0]

    def arrived(nbytes):
        looks[0] = 0

    reader = reader_of(server)
    monkeypatch.setattr(nixl_reads, "monotonic", clock)
    reader.read(server.place(source), 0, staging, timeout_seconds=1.0, on_progress=arrived)
    assert now[0] > 1
    assert is_same(source, staging)
    reader.close()


@needs_nixl
@pytest.mark.check
def test_a_read_that_is_over_ends_early(server, source, staging):
    seen = []
    with pytest.raises(TransferTimeout, match="given up"):
        reader_of(server).read(
            server.place(source), 0, staging, timeout_seconds=LIMIT,
            on_progress=seen.append, is_over=lambda: bool(seen),
        )  # fmt: skip


def only_release(agent):
    """A fence as NIXL's own calls would have it, which is none."""
    for transfer in agent._transfers.values():
        with suppress(*agent._errors):
            transfer.release()


@needs_nixl
@pytest.mark.check
@pytest.mark.parametrize("is_fenced", [True, False])
def test_after_a_deadline_not_one_byte_arrives(server, source, staging, is_fenced, monkeypatch):
    """The source stops, the read fails, the source changes and goes on.

    A reader that releases its transfers and keeps the agent must show late bytes here, or this
    test could not fail.
    """
    agents = []
    if not is_fenced:
        monkeypatch.setattr(Agent, "close", lambda self: (only_release(self), agents.append(self)))
    reader, place = reader_of(server), server.place(source)

    with in_time(1.0), pytest.raises(TransferTimeout, match="NIXL"):
        reader.read(
            place, 0, staging, timeout_seconds=1, on_progress=lambda nbytes: stop(server.pid)
        )
    before = staging.items().copy()
    source.items()[:] ^= 0xFF
    os.kill(server.pid, signal.SIGCONT)

    def is_written():
        for agent in agents[:1]:
            agent.pump()
        return bool((staging.items() != before).any())

    if is_fenced:
        # The source goes on, and the same memory serves the next reader.
        check_read(server, source, Buffer.of(np.zeros(NBYTES, np.uint8)))
        assert not is_written()
    else:
        until(is_written)
    monkeypatch.undo()
    for agent in agents:
        agent.close()


FORKS = f"""
import gc, os, signal, sys
from contextlib import suppress
import numpy as np
from flyweight.memory import Buffer
from flyweight.transports.nixl_reads import NixlReader

reader = NixlReader(sys.argv[1].encode(), address={HERE!r})
staging, num_forks = np.zeros({NBYTES}, np.uint8), 0

def fork(nbytes):
    global num_forks
    num_forks += 1
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        with suppress(BaseException):
            reader.close()
            reader._agent = None
            gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

reader.read(bytes.fromhex(sys.argv[2]), 0, Buffer.of(staging), timeout_seconds=60, on_progress=fork)
reader.close()
assert num_forks == 8
staging.tofile(sys.argv[3])
"""
"""A small process: one with frameworks takes long to fork."""


@needs_nixl
@pytest.mark.check
def test_the_end_of_a_forked_child_does_not_disturb_a_reader(server, source, tmp_path):
    path, place = tmp_path / "read", server.place(source)
    done = run_python(FORKS, server.describe().decode(), place.hex(), path)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == source.items().tobytes()


@needs_nixl
@pytest.mark.check
def test_an_agent_that_something_keeps_alive_is_no_fence_and_says_so(server):
    agent = Agent(address=HERE)
    kept = agent._agent.agent
    with pytest.raises(UnfencedRead, match="end"):
        agent.close()
    del kept


@needs_nixl
@pytest.mark.check
def test_a_stopped_process_does_not_hang_its_starter(server, source, monkeypatch):
    server.describe()
    stop(server.pid)
    monkeypatch.setattr(ReadServer._ask, "__defaults__", (None, 0.5))
    with in_time(0.5), pytest.raises(TransferTimeout, match="answer"):
        server.place(source)
    assert server.pid is None


@needs_nixl
@pytest.mark.check
@pytest.mark.parametrize("num_times", [2, pytest.param(20, marks=pytest.mark.campaign)])
def test_readers_that_leave_in_the_middle_cost_nobody_but_themselves(
    server, source, staging, num_times
):
    pids = set()
    for _ in range(num_times):
        leave_early(server, source, staging)
        pids.add(server.pid)
    check_read(server, source, staging)
    pids.add(server.pid)
    # A reader waits for its transfers before it leaves; else about five processes are aborted.
    assert len(pids) <= 2


def leave_early(server, source, staging):
    seen = []
    with pytest.raises((TransferTimeout, PeerLost)):
        reader_of(server).read(
            server.place(source), 0, staging, timeout_seconds=LIMIT,
            on_progress=seen.append, is_over=lambda: bool(seen),
        )  # fmt: skip


DIES = f"""
import os, sys, signal
import numpy as np
from flyweight.memory import Buffer
from flyweight.transports.nixl_reads import NixlReader
description, place = (each.encode() for each in sys.argv[1:])
reader = NixlReader(description, address={HERE!r})
into = Buffer.of(np.zeros({NBYTES}, np.uint8))
reader.read(place, 0, into, timeout_seconds=60, on_progress=lambda n: os.kill(0 or os.getpid(), 9))
"""


@needs_nixl
@pytest.mark.check
@pytest.mark.parametrize("num_times", [2, pytest.param(20, marks=pytest.mark.campaign)])
def test_readers_that_are_killed_in_the_middle_cost_nobody_but_themselves(
    server, source, staging, num_times
):
    for _ in range(num_times):
        place = server.place(source).decode()
        done = run_python(DIES, server.describe().decode(), place)
        assert done.returncode in (-9, 1), done.stderr  # 1: the process was aborted by the last one
    check_read(server, source, staging)


READS = f"""
import sys
import numpy as np
from flyweight.memory import Buffer
from flyweight.transports.nixl_reads import NixlReader
from flyweight.transports.read_server import ReadServer
server = ReadServer("nixl", address={HERE!r})
source = server.allocate(100)
source.items()[:] = 7
reader = NixlReader(server.describe(), address={HERE!r})
into = Buffer.of(np.zeros(100, np.uint8))
reader.read(server.place(source), 0, into, timeout_seconds=60)
assert into.items().tolist() == [7] * 100
if sys.argv[1] == "close":
    reader.close()
    server.close()
else:
    print(server.pid, flush=True)
    sys.stdin.readline()
"""


@needs_nixl
@pytest.mark.check
def test_a_process_with_a_server_and_a_reader_ends_with_0_and_prints_nothing():
    done = run_python(READS, "close")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_nixl
@pytest.mark.check
def test_the_process_ends_with_the_one_that_started_it():
    with Command(sys.executable, "-c", READS, "wait") as program:
        pid = int(program.line())
        stop(pid)  # so that it cannot see the end of its connection
        program.kill()
        until(lambda: not os.path.exists(f"/proc/{pid}"))


@needs_nixl
@pytest.mark.check
def test_the_process_ends_with_0_and_has_no_secrets_in_its_environment(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    process, fd = ReadProcess("nixl", HERE), os.memfd_create("test")
    os.truncate(fd, 4096)
    process.ask(Serve(0, 0, 4096), fd, LIMIT)
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    os.close(fd)
    assert process.close() == 0


@needs_nixl
@pytest.mark.check
def test_the_process_outlives_the_thread_that_first_needed_it(server, source, staging):
    thread = threading.Thread(target=server.describe)
    thread.start()
    thread.join()
    pid = server.pid
    check_read(server, source, staging)
    assert server.pid == pid


@needs_nixl
@pytest.mark.campaign
def test_an_idle_process_takes_little_time(server, source, staging):
    reader = reader_of(server)
    reader.read(server.place(source), 0, staging, timeout_seconds=LIMIT)
    time.sleep(0.6)  # until it has seen that nobody reads
    before = cpu_seconds(server.pid)
    time.sleep(1)  # a process that gets no time meanwhile takes none
    assert cpu_seconds(server.pid) - before <= 0.1
    reader.close()


def cpu_seconds(pid):
    words = stat_words(pid)
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@needs_nixl
@pytest.mark.check
@pytest.mark.parametrize("num_times", [2, pytest.param(10, marks=pytest.mark.campaign)])
def test_files_threads_and_memory_are_back_after_many_readers(source, server, staging, num_times):
    check_read(server, source, staging)  # the first agent starts a thread that UCX keeps
    gc.collect()  # what errors of other tests keep
    before, rss = resources(), anonymous_bytes()
    for _ in range(num_times):
        check_read(server, source, staging)
    gc.collect()
    assert settled(before) == before
    assert anonymous_bytes() - rss < 32 << 20


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


@needs_nixl
@pytest.mark.check
@pytest.mark.parametrize("connection", [b"", b"\0" * 300, b"x" * 300], ids=len)
def test_a_connection_that_nixl_cannot_read_is_refused(server, source, connection):
    found = decoded(Description, server.describe())
    damaged = msgspec.structs.replace(found, connection=connection)
    with pytest.raises(PeerLost, match="add_remote_agent"):
        NixlReader(msgspec.json.encode(damaged), address=HERE)


@needs_nixl
@pytest.mark.check
def test_device_memory_needs_its_option(server, source):
    into = Buffer.flat_at(4096, 10, None, device=0)
    with pytest.raises(TransportError, match="device 0"):
        reader_of(server).read(server.place(source), 0, into, timeout_seconds=LIMIT)
