"""The hosts that network tests run on: links carry bytes, fail and heal, and nothing stays."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

import netns
from child_processes import FORK, LIMIT, SPAWN, Command, until

MIB = 1 << 20
BLOCK = bytes(range(256)) * 256
ON_THE_WIRE = 1514 / 1448
"""Bytes of a full packet over its payload."""


def serve(ip, pipe):
    """Send as many bytes as each who connects asks for."""
    with socket.create_server((ip, 0)) as server:
        pipe.send(server.getsockname()[1])
        while True:
            link, _ = server.accept()
            with link:
                for _ in range(int(link.recv(20)) // len(BLOCK)):
                    link.sendall(BLOCK)


def read(ip, port, nbytes, pipe):
    """Return the seconds of a read, and whether every byte came, in order."""
    got, started = bytearray(), time.monotonic()
    with socket.create_connection((ip, port), timeout=LIMIT) as link:
        link.sendall(str(nbytes).encode())
        while more := link.recv(MIB):
            got += more
    return time.monotonic() - started, got == BLOCK * (nbytes // len(BLOCK))


def count(ip, port, pipe):
    """Read without end; tell how many bytes have come, whenever asked."""
    with socket.create_connection((ip, port), timeout=LIMIT) as link:
        link.sendall(str(1 << 40).encode())
        link.settimeout(0.01)
        got = 0
        while True:
            with suppress(TimeoutError):
                got += len(link.recv(MIB))
            if pipe.poll():
                pipe.send((pipe.recv(), got))


def nap(pipe):
    pipe.send("here")
    signal.pause()


def where(pipe):
    """Return the name and the namespace of this process's host, which can talk to itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=LIMIT).close()
    return os.environ["FLYWEIGHT_HOST"], os.stat("/proc/self/ns/net").st_ino


def asked(counter):
    """Return how many bytes a counter has by now."""
    counter.send("count")
    return counter.told()[1]


def gets_nothing(counter):
    """True if a counter's bytes stay the same for a while; a busy machine may need more of it."""
    before = asked(counter)
    time.sleep(0.2)
    return asked(counter) == before


@pytest.fixture
def hosts():
    with netns.two_hosts() as hosts:
        yield hosts


@pytest.fixture
def port(hosts):
    """The port of a server on the first host."""
    with hosts.a.child(serve, hosts.a.ip) as server:
        yield server.told()


def timed_read(reader, source, port, nbytes):
    with reader.child(read, source.ip, port, nbytes) as child:
        seconds, is_right = child.result()
    assert is_right
    return seconds


def test_a_process_of_each_kind_is_on_its_host(hosts):
    here = os.stat("/proc/self/ns/net").st_ino
    seen = []
    for host in hosts:
        with host.child(where, context=FORK) as forked, host.child(where, context=SPAWN) as spawned:
            name, namespace = forked.result()
            assert spawned.result() == (name, namespace)
        program = "echo $FLYWEIGHT_HOST $OTHER; stat -L -c %i /proc/self/ns/net"
        with host.command("sh", "-c", program, OTHER="1") as command:
            assert [command.line(), command.line()] == [f"{host.name} 1", str(namespace)]
        assert name == host.name
        seen.append(namespace)
    assert len({here, *seen}) == 3


def test_bytes_pass_and_are_counted_where_they_leave(hosts, port):
    sent = [host.sent_bytes() for host in hosts]
    timed_read(hosts.b, hosts.a, port, 4 * MIB)
    sent = [host.sent_bytes() - before for host, before in zip(hosts, sent, strict=True)]
    assert 1 < sent[0] / (4 * MIB) < 1.5
    assert sent[1] < 0.5 * sent[0]


@pytest.mark.parametrize("cut", [0, 1], ids=["source", "reader"])
def test_a_cut_stops_a_connection_and_heal_resumes_it(hosts, port, cut):
    hosts.a.rate(100)
    with hosts.b.child(count, hosts.a.ip, port) as counter:
        until(lambda: asked(counter) > MIB)
        hosts[cut].cut()
        until(lambda: gets_nothing(counter))  # but for what the link's queues still hold
        before = asked(counter)
        hosts[cut].heal()
        until(lambda: asked(counter) > before + MIB)


def test_a_link_is_no_faster_than_its_rate(hosts, port):
    hosts.b.rate(200)
    expected = 4 * MIB * ON_THE_WIRE * 8 / 200e6
    assert timed_read(hosts.b, hosts.a, port, 4 * MIB) > 0.85 * expected


def receive(ip, pipe):
    """Return how many datagrams come before one that says that they are over."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind((ip, 0))
        pipe.send(("port", end.getsockname()[1]))
        num = 0
        while end.recv(100) != b"over":
            num += 1
        return num


def send(ip, port, num, pipe):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        for _ in range(num):
            end.sendto(b"datagram", (ip, port))
        while True:  # each of them may be lost
            time.sleep(0.02)
            end.sendto(b"over", (ip, port))


def received(source, reader, num):
    """Send datagrams to another host, and return how many arrive."""
    with (
        reader.child(receive, reader.ip) as receiver,
        source.child(send, reader.ip, receiver.told()[1], num),
    ):
        return receiver.result()


def test_a_lossy_link_loses_its_share_both_ways_until_it_is_healed(hosts):
    assert received(hosts.a, hosts.b, 1) == 1  # both know each other's hardware address
    hosts.b.lossy(50)
    assert 50 < received(hosts.a, hosts.b, 200) < 150
    assert 50 < received(hosts.b, hosts.a, 200) < 150
    hosts.b.lossy(20)
    assert 110 < received(hosts.a, hosts.b, 200) < 200
    hosts.b.heal()
    assert received(hosts.a, hosts.b, 200) == 200


def test_all_bytes_pass_a_lossy_link(hosts, port):
    hosts.a.lossy(2)
    timed_read(hosts.b, hosts.a, port, MIB)


def test_members_of_a_fleet_reach_each_other():
    with netns.fleet(2, rate=500) as (trainer, members):
        for source in (trainer, members[0]):
            with source.child(serve, source.ip) as server:
                timed_read(members[1], source, server.told(), MIB)


def machine():
    """Return what a network may leave on this machine."""
    words = ("netns", "list"), ("-brief", "link")
    return [
        subprocess.run(["ip", *each], capture_output=True, timeout=LIMIT).stdout for each in words
    ]


def test_nothing_stays_after_a_failure():
    before = machine()
    with pytest.raises(KeyError), netns.two_hosts() as hosts:
        command = hosts.a.command("sh", "-c", "echo here; exec sleep 60")
        child = hosts.b.child(nap)
        assert (command.line(), child.told()) == ("here", "here")
        child.stop()
        raise KeyError
    with command, child:
        assert (command.join(), child.join()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert not os.path.exists(hosts.a._network)
    assert machine() == before


_PROGRAM = """
import netns, sys, test_netns
with netns.two_hosts() as hosts, hosts.a.child(test_netns.nap) as child:
    with hosts.b.command("sh", "-c", "echo; exec sleep 60") as command:
        child.told(), command.line()
        print(child.pid, command.pid, hosts.a._network, hosts.a._user, flush=True)
        sys.stdin.readline()
"""


def is_running(pid):
    """Whether a process has not ended; one that nobody has waited for has."""
    return os.path.exists(f"/proc/{pid}/ns/net")


def test_nothing_stays_after_a_killed_run():
    with Command(sys.executable, "-c", _PROGRAM, PYTHONPATH=os.path.dirname(__file__)) as run:
        *pids, guard_file, _ = run.line().split()
        assert all(map(is_running, pids))
        assert os.path.exists(guard_file)
        run.kill()
        until(lambda: not any(map(is_running, pids)) and not os.path.exists(guard_file))


@pytest.mark.check
def test_hosts_are_made_without_root():
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become less, and setpriv")
    less = ["setpriv", "--bounding-set=-sys_admin,-sys_ptrace"]
    with Command(
        *less, sys.executable, "-c", _PROGRAM, PYTHONPATH=os.path.dirname(__file__)
    ) as run:
        *pids, _, user = run.line().split()
        assert user != "None"
        here = os.stat("/proc/self/ns/user").st_ino
        assert all(os.stat(f"/proc/{pid}/ns/user").st_ino != here for pid in pids)
        run.end()
        assert not any(map(is_running, pids))
