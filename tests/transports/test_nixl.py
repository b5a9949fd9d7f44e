"""Weights by NIXL, over TCP: right bytes, faults that cost no weights, and nothing that arrives late."""

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import trustme

from child_processes import (
    LIMIT,
    Child,
    Command,
    exit_code,
    path_without,
    run_python,
    until,
)
from conftest import random_bytes
from flyweight.errors import PeerLost, SpecError, TransferTimeout, TransportError
from flyweight.live import Publisher, fetch
from flyweight.transports import nixl
from flyweight.transports.nixl import (
    NUM_SLOTS,
    SLOT_BYTES,
    NixlPuller,
    NixlServer,
    Window,
    nixl_here,
    nixl_version,
)
from flyweight.transports.segments import Segment
from flyweight.transports.tls import Tls
from live.live_processes import LARGE, TOKEN, check_holds, check_next_update, shared
from live.one_process import check_next_update as check_all
from live.one_process import holds, model, reader, taken

HERE = "127.0.0.1"
ADDRESS = "tcp://127.0.0.1:0"


def nixl_processes(pid):
    """Return the processes of NIXL that a process has started: by their role."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if parent == pid and b"flyweight.transports.nixl_process" in words:
            found[words[-2].decode()] = int(path.name)
    return found


# Every way of a trainer's memory to an engine.


@pytest.mark.parametrize("keep", ["memory", "in_place"])
def test_casts_and_tensors_of_all_sizes_come_by_rdma(over_tcp, keep):
    """Large parts are pulled from where they lie, small and cast ones are packed, in one range."""
    sizes = {f"t{n}": n for n in (1, 7, 100, 5000, 40_000, 1_000_000, 1_500_001)}
    source = {name: shared((n,)) for name, n in sizes.items()}
    for name, n in sizes.items():
        source[name][:] = random_bytes(4 * n, seed=n).view(np.uint32)
    source["cast"] = np.linspace(-9, 9, 100_000, dtype=np.float32)
    sink = {name: np.zeros_like(each) for name, each in source.items()}
    sink["cast"] = np.zeros(100_000, ml_dtypes.bfloat16)
    with (
        Publisher(source, ADDRESS, token=TOKEN, keep=keep) as publisher,
        reader(sink, publisher.address, "rdma", cast=True) as replica,
    ):
        published, (report,) = taken(publisher, 1, replica)
        assert report.transport == published.replicas[0].transport == "rdma"
        for name in sizes:
            assert np.array_equal(source[name], sink[name]), name
        assert np.array_equal(source["cast"].astype(ml_dtypes.bfloat16), sink["cast"])


def test_engines_pull_from_the_staging_of_another_one(over_tcp):
    source = {"w": random_bytes(3 << 20)}
    first, late = ({"w": np.zeros_like(source["w"])} for _ in range(2))
    with (
        Publisher(source, ADDRESS, token=TOKEN, keep="in_place") as publisher,
        reader(first, publisher.address, "rdma") as serving,
    ):
        publisher.publish(1)
        serving.update(timeout_seconds=LIMIT)
        publisher.withdraw()
        with reader(late, publisher.address, "rdma") as replica:
            assert replica.update(timeout_seconds=LIMIT).transport == "rdma"
    assert np.array_equal(late["w"], source["w"])


# Which engines use it.


@pytest.mark.parametrize("where", ["both", "trainer", "engine"])
def test_auto_takes_rdma_where_both_hosts_have_it_and_else_sockets(over_tcp, monkeypatch, where):
    sink = model()
    monkeypatch.setenv("FLYWEIGHT_NIXL", "" if where == "engine" else "tcp")
    with Publisher(model(3), ADDRESS, token=TOKEN, keep="in_place") as publisher:
        publisher.publish(1)
        monkeypatch.setenv("FLYWEIGHT_HOST", "another")
        monkeypatch.setenv("FLYWEIGHT_NIXL", "" if where == "trainer" else "tcp")
        with reader(sink, publisher.address) as replica:
            report = replica.update(timeout_seconds=LIMIT)
    assert report.transport == ("rdma" if where == "both" else "read")
    assert holds(sink, 3)


def test_rdma_that_was_asked_for_and_that_the_trainer_lacks_is_refused(over_tcp, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("FLYWEIGHT_NIXL")
        publisher = Publisher(model(3), ADDRESS, token=TOKEN, keep="in_place")
    sink = model()
    with publisher, reader(sink, publisher.address, "rdma") as replica:
        publisher.publish(1)
        with pytest.raises(PeerLost, match="'rdma' was asked for"):
            replica.update(timeout_seconds=LIMIT)
    assert holds(sink, 0)


def test_rdma_without_a_device_is_refused_with_the_remedy(over_tcp, monkeypatch):
    monkeypatch.delenv("FLYWEIGHT_NIXL")
    monkeypatch.setattr(nixl, "_RDMA", "/nowhere")
    assert nixl_here() == ""
    with pytest.raises(TransportError, match="FLYWEIGHT_NIXL=tcp"):
        reader(model(), "tcp://127.0.0.1:9", "rdma")
    monkeypatch.setattr(nixl, "_RDMA", "/proc/self/fd")  # as if it had devices
    assert nixl_here() == f"{nixl_version()} rdma"


def test_a_misspelt_variable_is_refused(monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_NIXL", "udp")
    with pytest.raises(SpecError, match="'udp'"):
        Publisher(model(), ADDRESS, token=TOKEN)


WITHOUT = """
import sys
sys.path[:] = sys.argv[1:]
import numpy as np
import flyweight as fw
from flyweight.transports.nixl import nixl_here
assert nixl_here() == ""
try:
    fw.Replica({"a": np.zeros(3)}, "tcp://127.0.0.1:9", token="token", transport="rdma")
except ImportError as error:
    print(error)
"""


def test_rdma_without_nixl_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_NIXL", "tcp")
    done = run_python(WITHOUT, *path_without(("nixl",), tmp_path))
    assert "pip install --no-deps nixl-cu12==1.5.1" in done.stdout, done.stderr


def test_nothing_goes_in_clear_by_nixl_where_tls_is_asked_for(over_tcp, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority")
    authority.issue_cert(HERE).private_key_and_cert_chain_pem.write_to_path(tmp_path / "own")
    own = tmp_path / "own"
    tls, sink = Tls(certificate=own, key=own, authority=tmp_path / "authority"), model()
    with pytest.raises(SpecError, match="does not encrypt"):
        reader(model(), "tcp://127.0.0.1:9", "rdma", tls=tls)
    with Child(publish_encrypted, tls) as trainer:
        with reader(sink, trainer.told(), "auto", tls=tls) as replica:
            report = replica.update(timeout_seconds=LIMIT)
        assert report.transport == "read"
        assert holds(sink, 3)
        assert not nixl_processes(os.getpid()) | nixl_processes(trainer.pid)


def publish_encrypted(tls, pipe):
    os.environ["FLYWEIGHT_HOST"] = "another"
    with Publisher(model(3), ADDRESS, token=TOKEN, tls=tls, keep="in_place") as publisher:
        publisher.publish(1)
        pipe.send(publisher.address)
        pipe.recv()


# Faults: a process of NIXL, or the holder, is killed or stopped in the middle.


def stopped_in_the_middle(processes, transport, **options):
    """Return a trainer, and an engine that has a third of the model and waits."""
    trainer = processes.trainer(keep="memory", shapes=LARGE)
    address = trainer.told()
    engine = processes.engine(
        address, name="engine", host="another", transport=transport, shapes=LARGE, **options
    )
    engine.told()
    engine.send(("update", {"timeout_seconds": LIMIT, "stop_at": "range 5"}))
    trainer.send(("publish", 1, {"timeout_seconds": LIMIT}))
    trainer.told()
    assert engine.told() == "range 5"
    return trainer, engine, address


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("role", ["serve", "pull"])
def test_without_nixl_on_either_side_the_rest_comes_over_sockets(processes, over_tcp, role, number):
    stall = 2.0 if number == signal.SIGSTOP else LIMIT
    trainer, engine, _ = stopped_in_the_middle(processes, "auto", stall_seconds=stall)
    before = nixl_processes(engine.pid)["pull"]
    os.kill(nixl_processes((trainer if role == "serve" else engine).pid)[role], number)
    engine.send("go on")
    found = engine.told()
    check_holds(found, 1)
    assert found["report"].transport == "rdma+read"
    assert not os.path.exists(f"/proc/{before}")  # it can write no more
    if (role, number) == ("serve", signal.SIGSTOP):
        os.kill(nixl_processes(trainer.pid)[role], signal.SIGCONT)
    for version in range(2, 22):
        engine.send(("update", {"timeout_seconds": LIMIT}))
        trainer.send(("publish", version, {"num_replicas": 1, "timeout_seconds": LIMIT}))
        found = engine.told()
        check_holds(found, version)
        if found["report"].transport == "rdma":  # both have a process again
            break
        assert found["report"].transport in ("read", "rdma+read")  # it starts slowly
    else:
        raise AssertionError("nothing comes by NIXL again")


@pytest.mark.parametrize("role", ["serve", "pull"])
def test_rdma_that_was_asked_for_fails_before_the_pause(processes, over_tcp, role):
    trainer, engine, _ = stopped_in_the_middle(processes, "rdma")
    os.kill(nixl_processes((trainer if role == "serve" else engine).pid)[role], signal.SIGKILL)
    engine.send("go on")
    found = engine.told()
    assert "PeerLost" in found["error"]
    assert (found["version"], found["state"]) == (None, "EMPTY")
    check_next_update([trainer], [engine], 2)


@pytest.mark.parametrize("transport", ["rdma", "auto"])
def test_memory_that_a_process_may_still_write_is_given_up(over_tcp, monkeypatch, transport):
    """A process that is not seen to end is no fence: the update fails, and nothing uses its memory."""
    weights, sink = model(1), model()
    with Publisher(weights, ADDRESS, token=TOKEN, keep="memory") as publisher:
        monkeypatch.setenv("FLYWEIGHT_HOST", "another")
        with reader(sink, publisher.address, transport) as replica:
            check_all(publisher, weights, (replica, sink))
            assert replica.report.transport == "rdma"
            version, session = replica.version, replica._link.session
            (memory,) = [each.memory for each in replica._link.shelf._offers.values()]
            pulling = nixl_processes(os.getpid())["pull"]
            os.kill(pulling, signal.SIGSTOP)
            publisher.publish(version + 1)
            with monkeypatch.context() as patch:
                patch.setattr(fetch, "STALL_SECONDS", 1.0)
                patch.setattr(subprocess.Popen, "kill", lambda process: None)
                with pytest.raises(TransportError):
                    replica.update(timeout_seconds=LIMIT)
                assert replica.version == version
            check_all(publisher, weights, (replica, sink))
            (after,) = [each.memory for each in replica._link.shelf._offers.values()]
            assert after is not memory
            assert replica._link.session is not session
            until(lambda: not os.path.exists(f"/proc/{pulling}"))


# The processes.


@contextmanager
def both_sides():
    server, puller = NixlServer(), NixlPuller()
    window = Window(server)
    try:
        yield server, window, puller
    finally:
        for each in (server, puller):
            each.close()


def pull(puller, keys, pieces, into, start, stop):
    options = {"stall_seconds": LIMIT, "deadline": time.monotonic() + LIMIT}
    puller.pull(keys, pieces, into, start, stop, **options)


def pulled(window, puller, parts, into, *, slot=0, start=1):
    """Return the bytes of parts, as they are pulled."""
    stop = start + sum(map(len, parts))
    into.bytes[:] = 0
    pull(puller, *window.place(parts, slot), into, start, stop)
    assert not into.bytes[:start].any()
    assert not into.bytes[stop:].any()
    return into.bytes[start:stop].copy()


def space(nbytes):
    return Segment.allocate(nbytes, is_writable_by_readers=True)


def test_parts_arrive_in_their_order_from_segments_and_slots(over_tcp):
    # The kernel maps what comes later, and is larger, below it.
    outside = [np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)]
    outside[0][:] = random_bytes(1 << 20, seed=5)
    with both_sides() as (_, window, puller):
        into = space(8 << 20)
        segments = [Segment.allocate(3 << 20, is_writable_by_readers=n > 0) for n in range(2)]
        for number, each in enumerate(segments):
            each.bytes[:] = random_bytes(3 << 20, seed=number)
        window.cover(segments, LIMIT)
        first, second = (each.bytes for each in segments)
        outside.append(random_bytes(1 << 20, seed=6))
        small = random_bytes(100)
        parts = [small, first[5:1_000_005], first[7:50], *outside, second[-(1 << 20) :], small]
        found = pulled(window, puller, parts, into)
        assert np.array_equal(found, np.concatenate(parts))
        keys, pieces = window.place([first[:1_000_000], first[1_000_000:2_000_000]], 0)
        assert (len(keys), [size for _, size in pieces]) == (1, [2_000_000])  # nothing was packed


def test_a_slot_keeps_its_bytes_while_the_others_are_packed(over_tcp):
    with both_sides() as (_, window, puller):
        window.cover([], LIMIT)
        into, data = space(SLOT_BYTES), [random_bytes(SLOT_BYTES, seed=n) for n in range(NUM_SLOTS)]
        placed = [window.place([each], slot) for slot, each in enumerate(data)]
        for (keys, pieces), expected in zip(placed, data, strict=True):
            pull(puller, keys, pieces, into, 0, SLOT_BYTES)
            assert np.array_equal(into.bytes, expected)


def tried_again(window, puller, source, into):
    """Return the beginning of memory that is served, also if the last reader aborted its process."""
    for tries_left in (2, 1, 0):
        try:
            window.cover([source], LIMIT)
            pull(puller, *window.place([source.bytes[: into.nbytes]], 0), into, 0, into.nbytes)
            break
        except PeerLost:
            assert tries_left
    return into.bytes


@pytest.mark.parametrize("is_fenced", [True, False])
def test_after_a_pull_that_was_too_late_not_one_byte_arrives(over_tcp, is_fenced, monkeypatch):
    """The server stops, the pull fails, the memory changes and the server goes on.

    Without the end of the process, late bytes must show here, or this test could not fail.
    """
    with both_sides() as (_, window, puller):
        source, into = space(64 << 20), space(64 << 20)
        window.cover([source], LIMIT)
        keys, ((address, _),) = window.place([source.bytes[: 1 << 20]], 0)
        pull(puller, keys, [(address, 1 << 20)], into, 0, 1 << 20)  # so that both are connected
        os.kill(serving := nixl_processes(os.getpid())["serve"], signal.SIGSTOP)
        with monkeypatch.context() as patch:
            if not is_fenced:
                patch.setattr(nixl._Process, "end", lambda process: True)
            options = {"stall_seconds": 1.0, "deadline": time.monotonic() + LIMIT}
            with pytest.raises(TransferTimeout):
                puller.pull(keys, [(address, 64 << 20)], into, 0, 64 << 20, **options)
        before = into.bytes.copy()
        source.bytes[:] = 7
        os.kill(serving, signal.SIGCONT)
        if is_fenced:
            found = tried_again(window, puller, source, space(1 << 20))
            assert (found == 7).all()
            assert np.array_equal(into.bytes, before)
        else:
            until(lambda: not np.array_equal(into.bytes, before))


@pytest.mark.parametrize(
    "lie", ["more bytes", "fewer bytes", "no key", "not its memory", "not a key"]
)
def test_what_a_holder_says_wrongly_writes_nothing(over_tcp, lie):
    with both_sides() as (_, window, puller):
        window.cover([], LIMIT)
        (key,), ((address, nbytes),) = window.place([random_bytes(1000)], 0)
        keys, pieces = {
            "more bytes": ([key], [(address, nbytes + 1)]),
            "fewer bytes": ([key], [(address, nbytes - 1)]),
            "no key": ([], [(address, nbytes)]),
            "not its memory": ([key], [(address + (1 << 40), nbytes)]),
            "not a key": ([b"x" * 300], [(address, nbytes)]),
        }[lie]
        into = space(2000)
        with pytest.raises(TransportError):
            pull(puller, keys, pieces, into, 0, 1000)
        assert not into.bytes.any()
        assert puller.is_fenced
        small = random_bytes(10)
        assert np.array_equal(pulled(window, puller, [small], into), small)  # by another process


@pytest.mark.parametrize(("nbytes", "slot"), [(SLOT_BYTES + 1, 0), (1, -1), (1, NUM_SLOTS)])
def test_what_does_not_fit_into_a_slot_of_the_readers_is_refused(over_tcp, nbytes, slot):
    with both_sides() as (*_, window, _):
        window.cover([], LIMIT)
        with pytest.raises(SpecError, match="slot"):
            window.place([random_bytes(nbytes)], slot)


def test_memory_that_was_freed_can_be_pulled_no_more(over_tcp):
    with both_sides() as (*_, window, _):
        segment = Segment.allocate(1 << 20)
        window.cover([segment], LIMIT)
        serving = nixl_processes(os.getpid())["serve"]
        del segment
        until(lambda: not os.path.exists(f"/proc/{serving}"))

        def serves_anew():  # once its end was noticed here too
            window.cover([], LIMIT)
            return nixl_processes(os.getpid()).get("serve", serving) != serving

        until(serves_anew)


def test_a_process_has_no_secrets_in_its_environment_and_ends_with_its_user(over_tcp, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    with both_sides() as (server, window, puller):
        window.cover([], LIMIT)
        puller.running()
        into, small = space(99), random_bytes(9)
        for pid in nixl_processes(os.getpid()).values():
            assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert exit_code(lambda: server.close() or puller.close()) == 0  # in a forked child
        assert np.array_equal(pulled(window, puller, [small], into), small)
    assert not nixl_processes(os.getpid())


STARTS = """
import sys
from flyweight.transports.nixl import NixlServer
server = NixlServer()
server.running()
print(flush=True)
sys.stdin.readline()
"""


def test_a_process_ends_with_the_one_that_started_it_even_if_it_is_stopped(over_tcp):
    with Command(sys.executable, "-c", STARTS) as program:
        program.line()
        pid = nixl_processes(program.pid)["serve"]
        os.kill(pid, signal.SIGSTOP)
        program.kill()
        until(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.parametrize(
    ("executable", "says"), [("/nowhere/python", "No such file"), ("/bin/false", "exit code 1")]
)
def test_a_process_that_does_not_start_is_lost_by_name(monkeypatch, executable, says):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(PeerLost, match=says):
        NixlServer().running()
