"""Rounds by NIXL and Mooncake: which engine a replica gets, what arrives, and what faults leave.

The engine's process at the source may die or hang, and a reader may die: the trainer never does, no
byte arrives late, and the next publish succeeds.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, run_python, until
from flyweight.errors import MissingDependency, PeerLost, TransportError
from flyweight.live import replica_connection, sources
from flyweight.live.remote_source import RemoteSource
from flyweight.transports.network import NetworkTransport
from flyweight.transports.network_engines import (
    MOONCAKE_INSTALL,
    NIXL_INSTALL,
    Engines,
    engines_here,
)
from flyweight.transports.nixl_agent import UnfencedRead
from netns import fleet, two_hosts
from remote_processes import MIB, PART_BYTES, TOKEN, Engine, Remote, Trainer, TrainerRank, published
from versioned_models import holds, weights

NBYTES = 8 * MIB
SENT = 6 * MIB
"""The bytes of such a model."""
MBITS = 20
TRICKLE = 2
"""A link that needs half a minute for it: what is in mid-transfer stays so."""
FULL_SPEED = 10_000
LATE_SECONDS = 2
BOTH = Engines(nixl="1.5.1", mooncake="0.3.13", rdma=())
FAST = Engines(nixl="1.5.1", mooncake="0.3.13", rdma=("mlx5_0",))


def by(engine):
    """A parameter for tests that need an engine."""
    has_it = bool(getattr(engines_here(), engine))
    install = {"nixl": NIXL_INSTALL, "mooncake": MOONCAKE_INSTALL}[engine]
    if has_it and engine == "mooncake":
        has_it = run_python("import mooncake.engine").returncode == 0
    reason = f"{engine} is not installed: {install}"
    return pytest.param(engine, marks=pytest.mark.skipif(not has_it, reason=reason))


each_engine = pytest.mark.parametrize("engine", [by("nixl"), by("mooncake")])
with_nixl = pytest.mark.parametrize("engine", [by("nixl")])


class ClosedTrainer(Trainer):
    """A trainer that can be told to close its publisher."""

    def close(self):
        self.publisher.close()


@contextmanager
def pair(hosts, engine, **options):
    """A trainer on the first host and a replica on the second, which holds version 1."""
    options = {"nbytes": NBYTES, "bucket_bytes": MIB, "network_engine": engine, **options}
    with (
        Remote(hosts.a, ClosedTrainer, hosts.a.ip, **options) as trainer,
        Remote(hosts.b, Engine, trainer.address, nbytes=NBYTES) as replica,
    ):
        published(trainer, 1, replica, strategy=f"network:{engine}")
        yield trainer, replica


@pytest.fixture
def hosts():
    with two_hosts() as hosts:
        yield hosts


def read_process(trainer):
    """Return the pid of a trainer's process that serves reads; None if there is none."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == trainer.pid and b"read_process" in (path / "cmdline").read_bytes():
                return int(path.name)
        except OSError:  # it has just ended
            continue
    return None


def killed(trainer):
    """Kill the process that serves a trainer's reads; return its pid once it is gone."""
    os.kill(pid := read_process(trainer), signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())
    return pid


def in_mid_transfer(hosts, trainer, *replicas, timeout_seconds=LIMIT):
    """Begin to publish version 2, and return when a part of it is sent and hardly more is."""
    before = hosts.a.sent_bytes()
    hosts.a.rate(MBITS)
    for each in replicas:
        each.start("update")
    trainer.start("publish", 2, num_replicas=len(replicas), timeout_seconds=timeout_seconds)
    until(lambda: hosts.a.sent_bytes() - before > SENT // 8)
    hosts.a.rate(TRICKLE)


def assert_failed(trainer, replica, *kinds):
    """Assert that the round has failed, by one of these errors, and that no mixture is served."""
    raised, report = replica.end(), trainer.end()
    assert raised.kind in kinds, raised
    assert report["engine"].startswith("network") is False, report
    state, version, found = replica.ask("held")
    assert (state, version) == ("failed", None) or (state == "ready" and version == found)


# Which engine.


@pytest.fixture
def joined(monkeypatch, threads):
    """Publishes to a replica of another host, as it seems; returns its error, and the report."""

    def publish(ours, theirs, wanted):
        monkeypatch.setattr(sources, "engines_here", lambda: ours)
        monkeypatch.setattr(replica_connection, "engines_here", lambda: theirs)
        monkeypatch.setenv("FLYWEIGHT_HOST", "a")
        options, target = {"token": TOKEN, "name": "engine"}, weights(2)
        with fw.Publisher(
            weights(1), "tcp://127.0.0.1:0", token=TOKEN, network_engine=wanted
        ) as publisher:
            monkeypatch.setenv("FLYWEIGHT_HOST", "b")
            try:
                replica = fw.Replica(target, publisher.address, **options)
            except fw.FlyweightError as error:
                return error, publisher.publish(1)
            with replica:
                update = threads.submit(replica.update, timeout_seconds=LIMIT)
                report = publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
                if (error := update.exception(LIMIT)) is None:
                    assert holds(target, 1)
                return error, report

    return publish


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        (BOTH, BOTH, "auto"),
        (FAST, BOTH, "auto"),
        (FAST, FAST, "sockets"),
        (Engines(), FAST, "auto"),
    ],
)
def test_without_rdma_or_by_choice_sockets_are_used(joined, ours, theirs, wanted):
    before = set(sys.modules)
    raised, report = joined(ours, theirs, wanted)
    assert raised is None
    assert [each.strategy for each in report.replicas] == ["network"]
    added = set(sys.modules) - before
    assert not any(name.startswith(("nixl", "mooncake")) for name in added)


@pytest.mark.parametrize("wanted", ["nixl", "mooncake"])
@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "where"),
    [
        (Engines(), BOTH, MissingDependency, "here;"),
        (BOTH, Engines(), TransportError, "at the peer;"),
    ],
)
def test_a_replica_without_the_engine_is_refused(joined, ours, theirs, wanted, kind, where):
    raised, report = joined(ours, theirs, wanted)
    assert type(raised) is kind
    (failed,) = report.failed
    for text in (str(raised), str(failed.error)):
        assert f"'{wanted}'" in text
        assert where in text
        assert "pip install" in text


def test_an_engine_that_does_not_start_fails_the_replicas_that_need_it(no_network_engine, joined):
    raised, report = joined(BOTH, BOTH, "mooncake")
    (failed,) = report.failed
    for text in (str(raised), str(failed.error)):
        assert "needs Mooncake" in text


# What arrives.


@pytest.mark.parametrize("should_verify", [True, False])
@pytest.mark.check
@each_engine
def test_versions_arrive_in_place(hosts, engine, should_verify):
    with pair(hosts, engine, should_verify=should_verify) as (trainer, replica):
        first = read_process(trainer)
        for version in (2, 3):
            published(trainer, version, replica, strategy=f"network:{engine}")
        assert replica.ask("verified") == ("live" if should_verify else "nothing")
        assert read_process(trainer) == first
        trainer.ask("close")
        assert first is not None
        assert read_process(trainer) is None


@pytest.mark.check
@with_nixl
def test_a_held_version_arrives_between_two_publishes(hosts, engine):
    with pair(hosts, engine, hold=True) as (trainer, _), ExitStack() as stack:
        for _ in range(2):
            late = stack.enter_context(Remote(hosts.b, Engine, trainer.address, nbytes=NBYTES))
            assert late.ask("update") == (1, "network:nixl")
            assert late.ask("held") == ("ready", 1, 1)


@pytest.mark.check
@with_nixl
def test_all_ranks_of_a_trainer_are_read(tmp_path, engine):
    with fleet(2) as (first, (second, third)), ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Remote(
                    host, TrainerRank, first.ip, rank, 2, tmp_path / "ranks",
                    is_awaited=False, network_engine=engine,
                )
            )
            for rank, host in enumerate((first, second))
        ]  # fmt: skip
        for each in ranks:
            each.made()
        model = {"w": np.zeros((2, PART_BYTES), np.uint8)}
        replica = stack.enter_context(Remote(third, Engine, ranks[0].address, model=model))
        for version in (1, 2, 3):
            for each in ranks:
                each.start("publish", version, num_replicas=1)
            assert replica.ask("update", version) == (version, "network:nixl")
            assert [each.end() for each in ranks] == [{"engine": "network:nixl"}] * 2
            assert replica.ask("bytes")["w"] == bytes([version]) * 2 * PART_BYTES
            if version == 2:
                killed(ranks[1])


@pytest.mark.check
@with_nixl
def test_replicas_pass_on_what_came_by_an_engine(engine):
    with fleet(2) as (host, members), ExitStack() as stack:
        options = {"nbytes": NBYTES, "bucket_bytes": MIB, "network_engine": engine}
        trainer = stack.enter_context(Remote(host, Trainer, host.ip, **options))
        replicas = [
            stack.enter_context(
                Remote(each, Engine, trainer.address, name=each.name, nbytes=NBYTES)
            )
            for each in members
        ]
        published(trainer, 1, *replicas, strategy="network:nixl")
        sent = host.sent_bytes()
        published(trainer, 2, *replicas, strategy="network:nixl")
        assert SENT < host.sent_bytes() - sent < 1.3 * SENT


# Faults.


@pytest.mark.check
@each_engine
def test_a_read_process_that_is_killed_between_rounds_is_started_again(hosts, engine):
    with pair(hosts, engine) as (trainer, replica):
        for version in (2, 3):
            first = killed(trainer)
            published(trainer, version, replica, strategy=f"network:{engine}")
            assert read_process(trainer) != first


@pytest.mark.check
@each_engine
def test_a_read_process_that_is_killed_within_a_round_fails_that_round(hosts, engine):
    with pair(hosts, engine) as (trainer, replica):
        in_mid_transfer(hosts, trainer, replica)
        os.kill(read_process(trainer), signal.SIGKILL)
        assert_failed(trainer, replica, "PeerLost")
        hosts.a.rate(FULL_SPEED)
        published(trainer, 3, replica, strategy=f"network:{engine}")


@pytest.mark.check
@each_engine
def test_a_replica_that_is_killed_in_mid_read_harms_no_trainer(hosts, engine):
    with pair(hosts, engine) as (trainer, victim):
        in_mid_transfer(hosts, trainer, victim)
        victim.kill()
        assert "gone" in trainer.end()["engine"]
        hosts.a.rate(FULL_SPEED)
        with Remote(hosts.b, Engine, trainer.address, nbytes=NBYTES) as replica:
            for version in (3, 4):  # the end of the victim may abort the process only now
                replica.start("update")
                trainer.ask("publish", version, num_replicas=1)
                if getattr(replica.end(), "kind", "") != "PeerLost":
                    break
            published(trainer, 5, replica, strategy=f"network:{engine}")


@pytest.mark.check
@each_engine
def test_a_read_process_that_hangs_sends_nothing_late(hosts, engine):
    with pair(hosts, engine) as (trainer, replica):
        assert replica.ask("look_at_staging") > 1
        in_mid_transfer(hosts, trainer, replica, timeout_seconds=LATE_SECONDS)
        os.kill(hung := read_process(trainer), signal.SIGSTOP)
        assert_failed(trainer, replica, "TransferTimeout")
        replica.ask("mark_staging")
        trainer.ask("assign", 3)
        hosts.a.rate(FULL_SPEED)
        os.kill(hung, signal.SIGCONT)
        time.sleep(1)  # what arrives later than this is not seen here
        assert replica.ask("late_bytes") == (0, [])
        published(trainer, 4, replica, strategy=f"network:{engine}")


@pytest.mark.parametrize(
    ("error", "is_reused"),
    [(PeerLost, True), (TransportError, True), (UnfencedRead, False), (ValueError, False)],
)
def test_staging_that_may_still_be_written_is_not_used_again(joined, monkeypatch, error, is_reused):
    """An error of our own code is not expected, so nobody knows what it leaves behind."""
    kept, close = [], RemoteSource.close

    def fetch(*args, **options):
        raise error("of this test")

    def look_and_close(self):
        kept.append(len(self._staging_slots))
        close(self)

    monkeypatch.setattr(NetworkTransport, "fetch", fetch)
    monkeypatch.setattr(RemoteSource, "close", look_and_close)
    raised, _ = joined(BOTH, BOTH, "auto")
    assert "of this test" in str(raised)
    assert [bool(each) for each in kept] == [is_reused]
