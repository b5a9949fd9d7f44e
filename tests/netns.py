"""Hosts for tests and benchmarks: network namespaces on a switch, with links that can fail.

Each host is a namespace with one address. The switch is a bridge in a namespace of its own, so
nothing is visible to the rest of the machine, and any number of tests can run beside each other.
A process on a host has its name in FLYWEIGHT_HOST, and so shares no memory with other hosts.

    with two_hosts() as hosts, hosts.a.child(serve, hosts.a.ip) as server:
        port = server.told()
        with hosts.b.child(read, hosts.a.ip, port) as reader:
            hosts.a.cut()

Everything is gone after the `with` statement, processes included, and after the death of the
process that ran it (`netns_guard.py`). Without root, user namespaces are used.
"""

import ctypes
import itertools
import json
import os
import pickle
import select
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from child_processes import FORK, LIMIT, Child, Command

_GUARD = Path(__file__).with_name("netns_guard.py")
_LATENCY = "50ms"
_TABLE = "bridge flyweight"
_PROGRAMS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # users often lack the last two
_counter = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """A namespace with an address; it can be sent to other processes."""

    name: str
    ip: str
    _network: str
    """The file of its namespace."""
    _user: str | None
    """The file of the user namespace that all hosts belong to, unless the tests run as root."""
    _switch: str
    """The file of the switch's namespace."""
    _port: str
    """The name of its port at the switch."""

    @property
    def prefix(self):
        """The words before a command that put it on this host; its process id stays the same."""
        return _prefix(self._network, self._user)

    def command(self, *words, **environment):
        """Start a program on this host."""
        return Command(*self.prefix, *words, **{"FLYWEIGHT_HOST": self.name, **environment})

    def child(self, function, *args, context=FORK):
        """Start a function in a process on this host; the function gets a pipe, as in Child."""
        if context is FORK:
            return Child(_forked, self, function, args, context=context)
        # Pickled: modules that start threads must be imported after `enter`.
        return Child(_spawned, self, pickle.dumps((function, args)), context=context)

    def enter(self):
        """Put this process on the host, before it starts threads. There is no way back."""
        for path in (self._user, self._network):
            if path is not None:
                file = os.open(path, os.O_RDONLY)
                if _libc.setns(file, 0) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, f"{os.strerror(number)}: setns {path}")
                os.close(file)
        os.environ["FLYWEIGHT_HOST"] = self.name

    def cut(self):
        """Drop every packet to and from this host; it sees no change of its own link."""
        self._at_switch("ip", "link", "set", self._port, "nomaster")

    def heal(self):
        """Undo `cut` and `lossy`."""
        self._at_switch("ip", "link", "set", self._port, "master", "switch")
        if _found("nft"):
            # Added first, as a table that does not exist cannot be deleted.
            self._at_switch("nft", f"add table {self._table}; delete table {self._table}")

    def rate(self, mbit):
        """Limit the link to that many Mbit/s, each way. TCP gets 1448 of each 1514 bytes."""
        _needed("tc")
        burst = min(max(mbit * 1_000_000 // 8 // 200, 70_000), 1 << 18)  # 5 ms; one packet of GSO
        limit = f"root tbf rate {mbit}mbit burst {burst} latency {_LATENCY}"
        _run(self._network, self._user, "tc", *f"qdisc replace dev eth0 {limit}".split())
        self._at_switch("tc", *f"qdisc replace dev {self._port} {limit}".split())

    def lossy(self, percent):
        """Drop that share of the packets to and from this host, at random."""
        _needed("nft")
        drop = f"numgen random mod 1000 < {round(10 * percent)} drop"
        self._at_switch("nft", "; ".join([
            f"add table {self._table}",
            f"add chain {self._table} both {{ type filter hook forward priority 0; }}",
            f"flush chain {self._table} both",
            f"add rule {self._table} both iifname {self._port} {drop}",
            f"add rule {self._table} both oifname {self._port} {drop}",
        ]))  # fmt: skip

    def drop(self, rule):
        """Drop what arrives at this host, if it fits a rule of nftables."""
        _needed("nft")
        _run(
            self._network, self._user, "nft",
            "add table inet test; add chain inet test in { type filter hook input priority 0; }; "
            f"add rule inet test in {rule} drop",
        )  # fmt: skip

    def sent_bytes(self):
        """Return how many bytes have left this host, with what TCP sent again.

        Headers are counted once for packets that the kernel would cut only later.
        """
        shown = _run(
            self._network, self._user, "ip", "-json", "-statistics", "link", "show", "eth0"
        )
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]

    @property
    def _table(self):
        return f"{_TABLE}-{self._port}"

    def _at_switch(self, *words):
        _run(self._switch, self._user, *words)


class TwoHosts(NamedTuple):
    a: Host
    b: Host


class Fleet(NamedTuple):
    trainer: Host
    members: tuple[Host, ...]


@contextmanager
def two_hosts():
    """Two hosts on one switch, without a limit of the rate."""
    with _hosts(["a", "b"]) as hosts:
        yield TwoHosts(*hosts)


@contextmanager
def fleet(num_members, rate=None):
    """A trainer's host and one for each member; `rate` is in Mbit/s, for each link and way."""
    labels = ["trainer", *(f"member{i}" for i in range(num_members))]
    with _hosts(labels) as (trainer, *members):
        for host in () if rate is None else (trainer, *members):
            host.rate(rate)
        yield Fleet(trainer, tuple(members))


@contextmanager
def _hosts(labels):
    _needed("ip")
    _needed("nsenter")
    words = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(len(labels) + 1)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as guard:  # in a session of its own: Ctrl-C must not end it before the tests
        try:
            yield _joined(labels, guard.pid, _reply(guard))
        finally:
            try:
                guard.communicate(b"\n", timeout=LIMIT)
            finally:
                guard.kill()


def _reply(guard):
    """Return the line that the guard begins with; skip the test if there are no namespaces."""
    assert select.select([guard.stdout], [], [], LIMIT)[0], "the guard said nothing"
    line = guard.stdout.readline()
    assert line, f"the guard ended with {guard.wait(LIMIT)}"
    reply = json.loads(line)
    if "error" in reply:
        pytest.skip(f"this machine does not let us make network namespaces: {reply['error']}")
    return reply


def _joined(labels, guard_pid, reply):
    """Connect the namespaces, and return the hosts."""
    switch, *networks = (f"/proc/{guard_pid}/fd/{file}" for file in reply["namespaces"])
    user = None if reply["user"] is None else f"/proc/{guard_pid}/fd/{reply['user']}"
    number = next(_counter)
    hosts = [
        Host(f"{label}-{os.getpid()}-{number}", f"10.13.0.{i + 1}", network, user, switch, f"port{i}")
        for i, (label, network) in enumerate(zip(labels, networks, strict=True))
    ]  # fmt: skip
    lines = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
    for host, network in zip(hosts, networks, strict=True):
        lines.append(f"link add {host._port} type veth peer name eth0 netns {network}")
        lines.append(f"link set {host._port} master switch up")
    _run(switch, user, "ip", "-batch", "-", text="\n".join(lines))
    for host, network in zip(hosts, networks, strict=True):
        lines = ["link set lo up", f"addr add {host.ip}/24 dev eth0", "link set eth0 up"]
        _run(network, user, "ip", "-batch", "-", text="\n".join(lines))
    return hosts


def _prefix(network, user):
    # The user is the new namespace's root already, and may not change its groups.
    enter_user = [] if user is None else [f"--user={user}", "--preserve-credentials"]
    return ["nsenter", *enter_user, f"--net={network}", "--"]


def _run(network, user, *words, text=None):
    """Run a command in a namespace and return its output; raise with its errors if it fails."""
    command = [*_prefix(network, user), _found(words[0]), *words[1:]]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def _found(program):
    return shutil.which(program, path=_PROGRAMS)


def _needed(program):
    if _found(program) is None:
        pytest.skip(f"{program} is not installed")


def _forked(host, function, args, pipe):
    host.enter()
    return function(*args, pipe)


def _spawned(host, pickled, pipe):
    host.enter()
    function, args = pickle.loads(pickled)
    return function(*args, pipe)
