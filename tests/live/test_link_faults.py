"""Faults between hosts: links that are cut, slow or lossy, processes that die, and strangers.

After each: no call hangs, no replica serves a mixture of versions, the next publish
succeeds once the fault is over, and both sides have the memory, threads and files of before.
"""

import itertools
import os
import signal
import socket
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
import zmq

from child_processes import LIMIT, until
from flyweight.live import connection as connections
from flyweight.live import frames, messages
from flyweight.transports import data_sockets, tcp
from netns import fleet, two_hosts
from remote_processes import (
    MIB,
    PART_BYTES,
    TOKEN,
    Actor,
    Engine,
    Raised,
    Remote,
    Trainer,
    TrainerRank,
    published,
)

NBYTES = 8 * MIB
SENT = 6 * MIB
"""The bytes of such a model."""
MBITS = 20
"""A link that needs 2.5 s for it."""
TRICKLE = 2
"""A link that needs half a minute for it: what is in mid-transfer stays so."""
FULL_SPEED = 10_000
BUCKETS = {"nbytes": NBYTES, "bucket_bytes": MIB}
LATE_SECONDS = 12
"""The time that a publish is given if a replica has to be late; the others may pause for 3 s."""


@pytest.fixture
def hosts():
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def quick(monkeypatch):
    """Let links count as cut after one second, in processes that are started from now on."""
    monkeypatch.setattr(tcp, "LOST_SECONDS", 1)


@contextmanager
def pair(hosts, engine_options=None, **options):
    """A trainer on the first host and an engine on the second, which holds version 1."""
    with Remote(hosts.a, Trainer, hosts.a.ip, **{**BUCKETS, **options}) as trainer:
        made = {"nbytes": options.get("nbytes", NBYTES), **(engine_options or {})}
        with Remote(hosts.b, Engine, trainer.address, **made) as engine:
            published(trainer, 1, engine)
            trainer.ask("remember"), engine.ask("remember")
            yield trainer, engine


def begin(trainer, version, *engines, **options):
    """Start a round that a fault will end."""
    for each in engines:
        each.start("update")
    trainer.start("publish", version, num_replicas=len(engines), **options)


def in_mid_transfer(host, begin_round, *args, **options):
    """Begin a round, and return when a host has sent a part of the model and hardly sends more."""
    before = host.sent_bytes()
    host.rate(MBITS)
    begin_round(*args, **options)
    until(lambda: host.sent_bytes() - before > SENT // 8)
    host.rate(TRICKLE)


def is_whole_or_failed(engine):
    """True if an engine holds a whole version, or says that it holds none."""
    state, version, found = engine.ask("held")
    return (state, version) == ("failed", None) or (state == "ready" and version == found)


def assert_as_before(*processes, num_streams=1):
    """Assert that processes have the threads, files and memory of before the fault.

    num_streams: how many more connections there may be.
    """
    for each in processes:
        changed, nbytes = each.ask("left", num_streams)
        assert changed == {}, changed
        assert nbytes < 2 * MIB


# Links.


def cut_in_mid_transfer(trainer, engine, host):
    in_mid_transfer(host, begin, trainer, 2, engine)
    host.cut()


def cut_before(kind):
    def cut(trainer, engine, host):
        trainer.ask("stop_before", kind)
        begin(trainer, 2, engine)
        trainer.stopped()
        host.cut()
        trainer.pass_on()

    return cut


CUTS = {
    "transfer": cut_in_mid_transfer,
    "Begin": cut_before("Begin"),
    "Filled": cut_before("Filled"),
    "Commit": cut_before("Commit"),
}


CUT_OPTIONS = [{}, {"hold": True}, {"transport": "host"}, {"should_verify": False}]
CHECKED_CUTS = [("transfer", {}), ("Begin", {"hold": True}), ("Commit", {"should_verify": False})]


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        pytest.param(
            moment,
            options,
            marks=pytest.mark.check if (moment, options) in CHECKED_CUTS else pytest.mark.campaign,
        )
        for moment in CUTS
        for options in CUT_OPTIONS
    ],
    ids=str,
)
def test_a_link_that_is_cut_fails_the_round_and_no_later_one(hosts, quick, moment, options):
    with pair(hosts, silence_seconds=2 * LIMIT, **options) as (trainer, engine):
        CUTS[moment](trainer, engine, hosts.a)
        report = trainer.end()
        assert set(report) == {"engine"}
        assert "late" not in report["engine"]  # only the cut ended it
        if moment != "Begin":
            assert engine.end().kind == "PeerLost"
            assert is_whole_or_failed(engine)
            assert "network" not in report.values() or moment == "Commit"
        hosts.a.heal()
        hosts.a.rate(FULL_SPEED)
        if moment == "Begin":  # the engine still waits for a version, whoever publishes it
            if "hold" not in options:
                trainer.start("publish", 3, num_replicas=1)
            if isinstance(found := engine.end(), Raised):
                assert found.kind == "PeerLost"  # the message has come after all, but nothing else
                assert is_whole_or_failed(engine)
                found = engine.ask("update")
            assert found == (2 if "hold" in options else 3, "network")
            assert "hold" in options or trainer.end() == {"engine": "network"}
        published(trainer, 4, engine)
        assert_as_before(trainer, engine)


@pytest.mark.check
def test_a_short_cut_ends_no_round(hosts):
    with pair(hosts) as (trainer, engine):
        cut_in_mid_transfer(trainer, engine, hosts.a)
        time.sleep(0.5)  # how long it is cut
        hosts.a.heal()
        hosts.a.rate(FULL_SPEED)
        assert trainer.end() == {"engine": "network"}
        assert engine.end() == (2, "network")
        assert engine.ask("held") == ("ready", 2, 2)
        assert_as_before(trainer, engine)


@pytest.mark.check
def test_no_byte_arrives_late(hosts, quick):
    """Neither in weights nor in the memory that the next round's buckets go to."""
    with pair(hosts) as (trainer, engine):
        assert engine.ask("look_at_staging") > 1
        cut_in_mid_transfer(trainer, engine, hosts.a)
        assert trainer.end()["engine"] != "network"
        assert engine.end().kind == "PeerLost"
        assert is_whole_or_failed(engine)
        trainer.ask("assign", 3)
        engine.ask("mark_staging")
        hosts.a.heal()
        hosts.a.rate(FULL_SPEED)
        time.sleep(1.5)  # TCP repeats what was lost, at intervals; a later repeat is not seen here
        assert engine.ask("late_bytes") == (0, [])
        published(trainer, 4, engine)
        assert_as_before(trainer, engine)


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(2, marks=pytest.mark.check), pytest.param(5, marks=pytest.mark.campaign)],
)
def test_a_slow_link_is_waited_for_while_bytes_come(hosts, seconds):
    """The round takes more than twice its time: what counts is that it makes progress."""
    nbytes = 2 * MIB
    with pair(hosts, nbytes=nbytes) as (trainer, engine):
        for version, tried in enumerate((seconds, 2 * seconds, 4 * seconds), start=2):
            hosts.a.rate(round(nbytes * 0.75 * 8 / 1e6 / (2.2 * tried), 3))
            started = time.monotonic()
            begin(trainer, version, engine, timeout_seconds=tried)
            report, spent = trainer.end(), time.monotonic() - started
            found = engine.end()
            if report == {"engine": "network"}:  # else the machine was too slow for that time
                break
        assert report == {"engine": "network"}
        assert spent > 2 * tried
        assert found == (version, "network")
        assert engine.ask("held") == ("ready", version, version)


@pytest.mark.check
def test_a_lossy_link_delivers_every_byte(hosts):
    with pair(hosts, nbytes=MIB) as (trainer, engine):
        hosts.a.lossy(3)
        for version in (2, 3):
            published(trainer, version, engine)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_stream_fails_the_round_unless_no_byte_had_come(hosts, when):
    """Nothing is verified here: only the error keeps a bucket that never came from being served."""
    with pair(hosts, should_verify=False, nbytes=MIB) as (trainer, engine):
        engine.ask("break_stream", when)
        begin(trainer, 2, engine)
        report, found = trainer.end(), engine.end()
        assert engine.ask("has_broken")
        if when == "before":  # the trainer may close a connection just before it is used again
            assert (report, found) == ({"engine": "network"}, (2, "network"))
            assert engine.ask("held") == ("ready", 2, 2)
        else:
            assert found.kind == "PeerLost"
            assert "ended after" in found.text
            assert "ended after" in report["engine"]
            state, version, bytes_of = engine.ask("held")
            # A replica whose first bucket did not come has written nothing.
            assert (state, version) == ("failed", None) or (state, version, bytes_of) == (
                "ready",
                1,
                1,
            )
        published(trainer, 3, engine)
        assert_as_before(trainer, engine)


@pytest.mark.check
def test_connections_to_a_host_that_lost_its_power_are_closed(hosts, quick, monkeypatch):
    """Nobody says goodbye, and the link stays silent."""
    monkeypatch.setattr(data_sockets, "UNREAD_SECONDS", 2)
    options = connections._TCP_OPTIONS
    monkeypatch.setitem(options, zmq.TCP_MAXRT, options[zmq.TCP_MAXRT] // 10)
    with pair(hosts, silence_seconds=2 * LIMIT) as (trainer, engine):
        assert trainer.ask("connections") > 2
        hosts.b.cut()
        engine.kill()
        engine.join()
        until(lambda: trainer.ask("replicas") == [])
        until(lambda: trainer.ask("connections") == 0)


# Processes.


def restarted(stack, hosts, address):
    """A trainer at the port of another one."""
    port = int(address.rpartition(":")[2])
    return stack.enter_context(Remote(hosts.a, Trainer, hosts.a.ip, port, **BUCKETS))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"hold": True}, marks=pytest.mark.campaign)], ids=str
)
def test_a_trainer_that_is_killed_in_mid_transfer_may_start_again(hosts, options):
    with ExitStack() as stack:
        trainer, engine = stack.enter_context(pair(hosts, **options))
        in_mid_transfer(hosts.a, begin, trainer, 2, engine)
        trainer.kill()
        assert engine.end().kind == "PeerLost"
        assert is_whole_or_failed(engine)
        hosts.a.rate(FULL_SPEED)
        trainer = restarted(stack, hosts, trainer.address)
        published(trainer, 1, engine)
        assert_as_before(engine)


@pytest.mark.check
def test_a_trainer_that_is_stopped_in_mid_transfer_is_given_up(hosts):
    """What it sends when it goes on arrives nowhere."""
    with pair(hosts, silence_seconds=3) as (trainer, engine):
        engine.ask("look_at_staging")
        in_mid_transfer(hosts.a, begin, trainer, 2, engine)
        trainer.stop()
        found = engine.end()
        assert found.kind == "TransferTimeout"
        assert "silent" in found.text
        assert is_whole_or_failed(engine)
        engine.ask("mark_staging")
        trainer.go_on()
        assert trainer.end()["engine"] != "network"
        trainer.ask("assign", 3)
        time.sleep(0.5)  # what arrives later than this is not seen here
        assert engine.ask("late_bytes") == (0, [])
        hosts.a.rate(FULL_SPEED)
        published(trainer, 4, engine)
        assert_as_before(trainer, engine)


@contextmanager
def two_engines():
    """A trainer with a slow link and two engines, each on a host of its own."""
    with fleet(2) as (host, members), ExitStack() as stack:
        options = {"silence_seconds": 2 * LIMIT, **BUCKETS}
        trainer = stack.enter_context(Remote(host, Trainer, host.ip, **options))
        engines = [
            stack.enter_context(Remote(each, Engine, trainer.address, name=name, nbytes=NBYTES))
            for each, name in zip(members, ("first", "second"), strict=True)
        ]
        published(trainer, 1, *engines)
        for each in (trainer, *engines):
            each.ask("remember")
        yield trainer, engines, members, host


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.campaign),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.check),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.campaign),
    ],
)
def test_a_replica_that_fails_in_mid_transfer_fails_no_other(victim, number):
    """Nor does it delay another for much longer than the publish is given."""
    with two_engines() as (trainer, engines, members, host), ExitStack() as stack:
        other, name = engines[1 - victim], ("first", "second")[victim]
        seconds = LIMIT if number == signal.SIGKILL else LATE_SECONDS
        in_mid_transfer(host, begin, trainer, 2, *engines, timeout_seconds=seconds)
        engines[victim].kill(number)
        host.rate(FULL_SPEED)
        assert other.end() == (2, "network")
        report = trainer.end()
        assert other.ask("held") == ("ready", 2, 2)
        assert sorted(report) == ["first", "second"]
        if number == signal.SIGKILL:
            assert f"'{name}', process {engines[victim].pid}" in report[name]
            assert "gone" in report[name]
            engines[victim] = stack.enter_context(
                Remote(members[victim], Engine, trainer.address, name=name, nbytes=NBYTES)
            )
        else:
            assert f"'{name}' is late" in report[name]
            engines[victim].go_on()
            assert engines[victim].end().kind in ("TransferTimeout", "PeerLost")
            assert is_whole_or_failed(engines[victim])
        published(trainer, 3, *engines)
        assert_as_before(trainer, other, num_streams=4)  # they read from each other too


def ranks_at(stack, hosts, directory, **options):
    """A trainer of a rank on each host."""
    options = {"bucket_bytes": MIB, "is_awaited": False, **options}
    ranks = [
        stack.enter_context(
            Remote(host, TrainerRank, hosts[0].ip, rank, len(hosts), directory, **options)
        )
        for rank, host in enumerate(hosts)
    ]
    for each in ranks:
        each.made()
    return ranks


def taken_from(ranks, engine, version):
    """Publish a version from all ranks of a trainer; the engine must have it whole."""
    for each in ranks:
        each.start("publish", version, num_replicas=1)
    assert engine.ask("update", version) == (version, "network")
    assert [each.end() for each in ranks] == [{"engine": "network"}] * len(ranks)
    assert engine.ask("bytes")["w"] == bytes([version]) * len(ranks) * PART_BYTES


@pytest.mark.parametrize(
    ("number", "should_verify"),
    [
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.check),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.check),
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.campaign),
        pytest.param(signal.SIGSTOP, False, marks=pytest.mark.campaign),
    ],
)
def test_a_rank_of_a_trainer_that_fails_in_mid_transfer_ends_the_round(
    tmp_path, number, should_verify
):
    with fleet(2) as (first, (second, third)), ExitStack() as stack:
        hosts, model = [first, second], {"w": np.zeros((2, PART_BYTES), np.uint8)}
        ranks = ranks_at(stack, hosts, tmp_path / "ranks", should_verify=should_verify)
        engine = stack.enter_context(Remote(third, Engine, ranks[0].address, model=model))
        taken_from(ranks, engine, 1)
        engine.ask("remember")
        seconds = LIMIT if number == signal.SIGKILL else LATE_SECONDS

        def begin_round():
            engine.start("update")
            for each in ranks:
                each.start("publish", 2, num_replicas=1, timeout_seconds=seconds)

        in_mid_transfer(second, begin_round)
        ranks[1].kill(number)
        second.rate(FULL_SPEED)
        found = ranks[0].end()
        assert engine.end().kind in ("PeerLost", "TransferTimeout", "PeerFailed")
        assert engine.ask("state") in [("failed", None), ("ready", 1)]
        text = found.text if isinstance(found, Raised) else found["engine"]
        # Who is first: rank 0 hears of a death as soon as the engine does.
        known = ["source rank 1", second.ip]
        if number == signal.SIGSTOP:
            known.append("'engine' is late")
        assert any(each in text for each in known), text
        for each in ranks:
            each.kill()
            each.join()
        port = int(ranks[0].address.rpartition(":")[2])
        taken_from(ranks_at(stack, hosts, tmp_path / "ranks 2", port=port), engine, 3)
        assert_as_before(engine, num_streams=4)  # each thread reads from any rank


# Strangers.


def test_who_does_not_know_the_token_gets_nothing(hosts):
    with pair(hosts, nbytes=MIB) as (trainer, engine):
        sent = hosts.a.sent_bytes()
        with Remote(hosts.b, Engine, trainer.address, token="other", is_awaited=False) as stranger:
            raised = stranger.end()
        assert raised.kind == "PeerRefused"
        assert "token" in raised.text
        assert hosts.a.sent_bytes() - sent < 10_000
        published(trainer, 2, engine)
        assert_as_before(trainer, engine)


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_another_protocol_is_refused_by_its_number(hosts, monkeypatch, side):
    number = frames.PROTOCOL
    with monkeypatch.context() as patch:
        patch.setattr(frames, "PROTOCOL", number + (side == "trainer"))
        trainer = Remote(hosts.a, Trainer, hosts.a.ip)
    with trainer:
        with monkeypatch.context() as patch:
            patch.setattr(frames, "PROTOCOL", number + (side == "engine"))
            engine = Remote(hosts.b, Engine, trainer.address, is_awaited=False)
        with engine:
            raised = engine.end()
        assert raised.kind == "PeerRefused"
        theirs = number + (side == "trainer")
        assert f"protocol {theirs}" in raised.text
        assert trainer.ask("replicas") == []


def listening_ports(trainer):
    """Return the ports that are open on a trainer's host."""
    with open(f"/proc/{trainer.pid}/net/tcp") as file:
        rows = [line.split() for line in list(file)[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"]


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100_000,
    bytes(100_000),
    b"\x00\x10" + b"x" * 16,
    b"\x00\x02{}",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48) + b"\x06" + b"\x7f" * 8,
]  # fmt: skip


class Stranger(Actor):
    """Sends garbage to ports, and keeps what it opens."""

    def say_hello(self, ip, port):
        """Send a hello without a data connection; return the answer."""
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(f"tcp://{ip}:{port}")
        for token, role in itertools.product(("", TOKEN[:-1]), ("replica", "watcher", "source")):
            hello = messages.Hello(token, "stranger", os.getpid(), role=role)
            self._socket.send(frames.encode(hello))
            assert self._socket.poll(1000 * LIMIT)
            answer = frames.decode_from_publisher(self._socket.recv())
            assert isinstance(answer, messages.Refusal), answer

    def make(self, ip, ports):
        self._links = []
        for port in ports:
            for garbage in GARBAGE:
                link = socket.create_connection((ip, port), timeout=LIMIT)
                self._links.append(link)
                with suppress(OSError):  # the other side may have closed it already
                    link.sendall(garbage)


def test_strangers_disturb_nobody(hosts):
    with pair(hosts, nbytes=MIB) as (trainer, engine):
        ports = listening_ports(trainer)
        assert len(ports) == 2  # for messages, and for bytes
        with Remote(hosts.b, Stranger, hosts.a.ip, ports) as stranger:
            (port,) = {*ports} - {int(trainer.address.rpartition(":")[2])}
            assert stranger.ask("say_hello", hosts.a.ip, port) is None
            for version in (2, 3):
                published(trainer, version, engine)
        published(trainer, 4, engine)
        assert_as_before(trainer, engine)


@pytest.mark.parametrize(
    "num_rounds",
    [pytest.param(1, marks=pytest.mark.check), pytest.param(25, marks=pytest.mark.campaign)],
)
def test_a_trainer_outlives_readers_that_leave_while_its_memory_changes(hosts, num_rounds):
    """They are killed or close in mid-read, two of each a round; its memory is freed after each."""
    with pair(hosts) as (trainer, engine):
        for version in range(2, 2 + num_rounds):
            with ExitStack() as stack:
                readers = [
                    stack.enter_context(
                        Remote(hosts.b, Engine, trainer.address, name=f"{n}", nbytes=NBYTES)
                    )
                    for n in range(4)
                ]

                def begin_round(version=version, readers=readers):
                    for each in readers[:2]:
                        each.start("update")
                    for each in readers[2:]:
                        each.start("update_until_told")
                    trainer.start("publish_other_memory", version, num_replicas=4)

                in_mid_transfer(hosts.a, begin_round)
                for each in readers[:2]:
                    each.kill()
                for each in readers[2:]:
                    each.pass_on()
                assert [each.end().kind for each in readers[2:]] == ["PeerLost"] * 2
                report = trainer.end()
            assert set(report) == set("0123")
            assert "network" not in report.values()
            hosts.a.rate(FULL_SPEED)
        published(trainer, 2 + num_rounds, engine)
        assert_as_before(trainer, engine)
