"""Trainers and engines on hosts of their own, whose links are cut, slow and lossy."""

import os
import signal
import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from child_processes import LIMIT
from live.live_processes import (
    check_holds,
    check_next_update,
    engine,
    plain,
    relay,
    shared,
    trainer,
)
from netns import fleet, two_hosts

MODEL = {f"layer.{n}": (1024, 1024) for n in range(6)}  # 24 MiB: 6 ranges
NBYTES = 4 * sum(int(np.prod(shape)) for shape in MODEL.values())
SMALL = {f"layer.{n}": (512, 1024) for n in range(4)}  # 8 MiB


class Started:
    """Starts trainers and engines on hosts."""

    def __init__(self, stack):
        self._stack = stack

    def trainer(self, host, address=None, **options):
        address = address or f"tcp://{host.ip}:0"
        return self._stack.enter_context(host.child(trainer, address, options))

    def engine(self, host, address, name="engine", **options):
        options = {"name": name, "host": host.name, **options}
        found = self._stack.enter_context(host.child(engine, address, options))
        found.told()
        return found

    def relay(self, host, address, on):
        found = self._stack.enter_context(host.child(relay, address, on))
        assert found.told() == on
        return found


@pytest.fixture
def start():
    with ExitStack() as stack:
        yield Started(stack)


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


@pytest.fixture
def pair(hosts, start):
    """Return what starts a trainer and an engine on two hosts, both with version 1."""

    def make(shapes=MODEL, **options):
        source = start.trainer(hosts.a, shapes=shapes, keep="memory", make=shared)
        sink = start.engine(hosts.b, source.told(), shapes=shapes, **options)
        check_next_update([source], [sink], 1)
        return source, sink

    return make


def publish(source, version, **options):
    source.send(("publish", version, {"timeout_seconds": LIMIT, **options}))
    assert source.told().version == version


def update(sink, version, **options):
    sink.send(("update", {"version": version, "timeout_seconds": LIMIT, **options}))


def test_memory_of_another_host_is_read_however_it_is_shared(pair):
    source, sink = pair()
    publish(source, 2)
    update(sink, 2)
    found = sink.told()
    check_holds(found, 2)
    assert found["report"].transport == "read"


def test_a_link_that_is_cut_while_bytes_come_costs_one_update_and_no_version(pair, hosts):
    source, sink = pair(stall_seconds=0.5)
    publish(source, 2)
    update(sink, 2, timeout_seconds=3, stop_at="range 3")
    assert sink.told() == "range 3"
    hosts.a.cut()
    sink.send("go on")
    found = sink.told()
    assert found["error"]
    check_holds(found, 1)
    hosts.a.heal()
    check_next_update([source], [sink], 3)


def test_a_link_that_is_cut_in_the_pause_costs_nothing(pair, hosts):
    """Everything is here, so neither network nor trainer can break the engine."""
    source, sink = pair()
    publish(source, 2)
    update(sink, 2, stop_at="before")
    assert sink.told() == "before"
    hosts.a.cut()
    sink.send("go on")
    check_holds(sink.told(), 2)
    hosts.a.heal()
    check_next_update([source], [sink], 3)


def test_a_link_that_is_cut_for_a_moment_costs_nothing(pair, hosts):
    source, sink = pair()
    publish(source, 2)
    update(sink, 2, stop_at="range 3")
    assert sink.told() == "range 3"
    hosts.a.cut()
    sink.send("go on")
    threading.Event().wait(0.3)  # however short it is, it is no error
    hosts.a.heal()
    check_holds(sink.told(), 2)


@pytest.mark.check
def test_a_slow_link_is_waited_for_while_bytes_come(pair, hosts):
    """A range takes longer than a holder may take without any progress."""
    source, sink = pair(SMALL, stall_seconds=3.0)
    publish(source, 2)
    hosts.a.rate(6)
    update(sink, 2)
    check_holds(sink.told(), 2)


@pytest.mark.check
def test_a_lossy_link_delivers_every_byte(pair, hosts):
    source, sink = pair(SMALL)
    hosts.a.lossy(3)
    for version in (2, 3):
        check_next_update([source], [sink], version)


@pytest.mark.check
def test_a_trainer_whose_host_is_cut_off_is_lost_and_found_again(pair, hosts):
    """Nobody says goodbye; the engine waits for a version all the while."""
    source, sink = pair(SMALL)
    update(sink, 2)
    source.send(("await", 1))
    assert source.told() == "waiting"
    hosts.a.cut()
    source.send(("until lost",))
    assert source.told() == "lost"
    hosts.a.heal()
    publish(source, 2, num_replicas=1)
    check_holds(sink.told(), 2)


@pytest.mark.check
def test_an_engine_whose_host_lost_its_power_costs_no_publish(pair, hosts, start):
    source, sink = pair(SMALL)
    update(sink, 2)
    source.send(("await", 1))
    assert source.told() == "waiting"
    hosts.b.cut()
    sink.kill()
    sink.join()
    source.send(("until lost",))
    assert source.told() == "lost"
    publish(source, 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_ends_while_bytes_come_leaves_the_old_version(pair, hosts, start, how):
    source, sink = pair(stall_seconds=0.5)
    publish(source, 2)
    update(sink, 2, timeout_seconds=3, stop_at="range 3")
    assert sink.told() == "range 3"
    os.kill(source.pid, how)
    sink.send("go on")
    found = sink.told()
    assert found["error"]
    check_holds(found, 1)
    if how == signal.SIGSTOP:
        source.go_on()
        check_next_update([source], [sink], 3)


def test_a_wrong_token_gets_nothing_over_the_line(hosts, start):
    source = start.trainer(hosts.a, shapes=MODEL, keep="memory")
    address = source.told()
    publish(source, 1)
    before = hosts.a.sent_bytes()
    with hosts.b.child(refused, address) as stranger:
        assert "another token" in stranger.result()
    assert hosts.a.sent_bytes() - before < 10_000
    sink = start.engine(hosts.b, address, shapes=MODEL)
    check_next_update([source], [sink], 2)


def refused(address, pipe):
    from flyweight.errors import PeerRefused
    from flyweight.live import Replica
    from live.live_processes import Part

    try:
        Replica(Part(MODEL).model, address, token="a wrong token")
    except PeerRefused as error:
        return str(error)
    return ""


@contextmanager
def chain(start, num_engines, **options):
    """Give a trainer, engines on hosts of their own that wait for version 1 in order, and hosts."""
    with fleet(num_engines) as hosts:
        source = start.trainer(hosts.trainer, shapes=MODEL)
        address = source.told()
        sinks = []
        for number, host in enumerate(hosts.members):
            name = f"engine {number}"
            sinks.append(start.engine(host, address, name, shapes=MODEL, **options))
        yield source, sinks, hosts


def all_wait(source, sinks, version, **stops):
    for number, sink in enumerate(sinks):
        update(sink, version, stop_at=stops.get(f"at_{number}"))
        source.send(("await", number + 1))
        assert source.told() == "waiting"


def test_the_trainers_link_carries_the_weights_once_for_all_hosts(start):
    with chain(start, 3) as (source, sinks, hosts):
        before = hosts.trainer.sent_bytes()
        for version in (1, 2):
            all_wait(source, sinks, version)
            publish(source, version, num_replicas=3)
            for sink in sinks:
                check_holds(sink.told(), version)
        assert hosts.trainer.sent_bytes() - before < 1.15 * 2 * NBYTES


@pytest.mark.parametrize("fault", ["killed", "stopped", "cut off"])
def test_a_parent_that_is_lost_costs_the_hosts_behind_it_nothing(start, fault):
    with chain(start, 3, stall_seconds=0.5) as (source, sinks, hosts):
        all_wait(source, sinks, 1, at_0="range 3")
        source.send(("publish", 1, {"timeout_seconds": LIMIT, "num_replicas": 2}))
        assert sinks[0].told() == "range 3"
        if fault == "killed":
            sinks[0].kill()
        elif fault == "stopped":
            sinks[0].stop()
        else:
            hosts.members[0].cut()
        for sink in sinks[1:]:
            check_holds(sink.told(), 1)
        if fault != "killed":
            sinks[0].kill()
            sinks[0].join()
        assert source.told().version == 1
        if fault == "cut off":
            hosts.members[0].heal()
        check_next_update([source], sinks[1:], 2)


def test_a_relay_reads_each_version_once_for_all_engines_of_its_host(hosts, start, tmp_path):
    source = start.trainer(hosts.a, shapes=MODEL)
    address, on = source.told(), f"unix:{tmp_path}/relay"
    start.relay(hosts.b, address, on)
    sinks = [start.engine(hosts.b, on, name, shapes=MODEL) for name in ("one", "two")]
    before = hosts.a.sent_bytes()
    for version in (1, 2):
        for sink in sinks:
            update(sink, version)
        publish(source, version, num_replicas=1)
        for sink in sinks:
            found = sink.told()
            check_holds(found, version)
            assert found["report"].transport == "mapped"
    assert hosts.a.sent_bytes() - before < 1.15 * 2 * NBYTES


def test_ranks_on_several_hosts_commit_together_or_not_at_all(start):
    """Two ranks of the trainer, and two of the engine, each on a host of its own."""
    with fleet(3) as (first, (second, *others)):
        address = f"tcp://{first.ip}:9400"
        sources = [
            start.trainer(host, address, rank=rank, world_size=2, make=plain)
            for rank, host in enumerate((first, second))
        ]
        for each in reversed(sources):
            assert isinstance(found := each.told(), str), found
        sinks = [
            start.engine(host, address, rank=rank, world_size=2) for rank, host in enumerate(others)
        ]
        check_next_update(sources, sinks, 1)
        for sink, stop in zip(sinks, (None, "before"), strict=True):
            update(sink, 2, stop_at=stop)
        for each in sources:
            each.send(("publish", 2, {"timeout_seconds": LIMIT, "waiting": 1}))
        assert sinks[1].told() == "before"
        sinks[1].kill()
        found = sinks[0].told()
        assert "PeerLost" in found["error"]
        check_holds(found, 1)
        for each in sources:
            assert each.told().version == 2
        sinks[1] = start.engine(others[1], address, rank=1, world_size=2)
        check_next_update(sources, sinks, 3)
