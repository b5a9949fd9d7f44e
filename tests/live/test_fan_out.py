"""Replicas on hosts of their own that read from each other, and what happens when some fail.

After each fault: the others have the version, nobody serves a mixture, the report names who failed,
and the next publish reaches all that are left.
"""

import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.live import fanned_out, fetch
from flyweight.memory import Buffer
from flyweight.transports import tcp
from flyweight.transports.network import NetworkTransport
from netns import fleet
from remote_processes import MIB, SECONDS, Engine, Raised, Remote, Trainer, published
from versioned_models import holds, weights

KIB = 1 << 10
NBYTES = 8 * MIB
SENT = 6 * MIB
"""The bytes of such a model."""
MBITS = 8
"""Links that need six seconds for it: a test has some of them for a fault."""
FULL_SPEED = 10_000
BUCKETS = {"nbytes": NBYTES, "bucket_bytes": 512 * KIB}
SMALL = {"nbytes": MIB, "bucket_bytes": 64 * KIB}
PACKED = {"transport": "host"}
CAMPAIGN = pytest.mark.campaign
BOTH = pytest.mark.parametrize("options", [{}, PACKED], ids=["gathered", "packed"])
CHECKED = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="gathered", marks=pytest.mark.check),
        pytest.param(PACKED, id="packed", marks=CAMPAIGN),
    ],
)


@pytest.fixture
def quick(monkeypatch):
    """Let links count as cut sooner in processes that are started now."""
    monkeypatch.setattr(tcp, "LOST_SECONDS", 1)


@pytest.fixture
def steady(monkeypatch):
    """Let nobody count as slow, or as gone, in processes that are started now."""
    monkeypatch.setattr(fetch, "HOLDER_SECONDS", LIMIT)
    monkeypatch.setattr(fanned_out, "_SLOW_SECONDS", LIMIT)


class Chain:
    """A trainer, and an engine on each other host: each reads from the one before it."""

    def __init__(self, stack, num_engines, kinds, options):
        self.host, self.hosts = stack.enter_context(fleet(num_engines))
        self.trainer = stack.enter_context(Remote(self.host, Trainer, self.host.ip, **options))
        self.engines = []
        for i, host in enumerate(self.hosts):  # in turn: a fan-out has the order of joining
            kind, made = kinds.get(i, Engine), {"name": f"e{i}", "nbytes": options["nbytes"]}
            self.engines.append(
                stack.enter_context(Remote(host, kind, self.trainer.address, **made))
            )
        self.version = 0

    def publish(self, engines=None, **options):
        """Publish a version to engines; return the bytes that left the trainer for it."""
        self.version += 1
        before = self.host.sent_bytes()
        published(self.trainer, self.version, *(engines or self.engines), **options)
        return self.host.sent_bytes() - before

    def rate(self, mbits):
        for each in (self.host, *self.hosts):
            each.rate(mbits)

    def begin(self, **options):
        """Start a round with all engines over slow links; wait until a fifth has left the trainer."""
        self.rate(MBITS)
        self.version += 1
        before = self.host.sent_bytes()
        for each in self.engines:
            each.start("update", self.version)
        options = {"num_replicas": len(self.engines), **options}
        self.trainer.start("publish", self.version, **options)
        until(lambda: self.host.sent_bytes() - before > SENT // 5)

    def end(self, *gone):
        """Wait for the round; return what the trainer says of those that failed.

        The gone do not answer. All others hold the version, or have failed and say so.
        """
        failed = {f"e{i}" for i in gone}
        for i, each in enumerate(self.engines):
            if i in gone:
                continue
            if isinstance(found := each.end(), Raised):
                failed.add(f"e{i}")
                before = self.version - 1  # kept if no bucket came before the fault
                kept = ("ready", before) if before else ("empty", None)
                assert each.ask("state") in (("failed", None), kept), found
            else:
                assert each.ask("held", [self.version]) == ("ready", self.version, self.version)
        wrong = {name: text for name, text in self.trainer.end().items() if text != "network"}
        assert wrong.keys() == failed
        return wrong

    def without(self, *gone):
        return [each for i, each in enumerate(self.engines) if i not in gone]


@contextmanager
def chain(num_engines, kinds=None, **options):
    with ExitStack() as stack:
        yield Chain(stack, num_engines, kinds or {}, options)


@BOTH
@pytest.mark.parametrize("num", [3, pytest.param(5, marks=CAMPAIGN)])
def test_the_trainer_sends_each_version_once(steady, num, options):
    with chain(num, **SMALL, **options) as made:
        nbytes = sum(each.nbytes for each in weights(0, SMALL["nbytes"]).values())
        for _ in range(4):
            assert nbytes < made.publish() < 1.1 * nbytes


class Half(Engine):
    """A replica that wants the first rows of each tensor only."""

    def make(self, address, nbytes, **options):
        whole = weights(999, nbytes)
        self.rows = {
            name: np.ascontiguousarray(each[: len(each) // 2])
            for name, each in whole.items()
            if each.ndim
        }
        cut = {
            name: fw.Sharded(each, whole[name].shape, (0,) * each.ndim)
            for name, each in self.rows.items()
        }
        return super().make(address, model=cut, extra="report", **options)

    def held(self, versions=range(6)):
        def is_of(version):
            whole = weights(version, 256 * 2 * len(self.rows["embed"]))
            return all((each == whole[name][: len(each)]).all() for name, each in self.rows.items())

        found = next(filter(is_of, versions), None)
        return self.replica.state, self.replica.version, found


class Loader(Engine):
    """A replica that is given whole tensors, and copies them."""

    def make(self, address, nbytes, **options):
        self.held_model = weights(999, nbytes)
        return super().make(address, model=self.load, **options)

    def load(self, tensors):
        for name, tensor in tensors:
            self.held_model[name][...] = tensor.numpy()

    def held(self, versions=range(6)):
        state = self.replica.state, self.replica.version
        return *state, next((v for v in versions if holds(self.held_model, v)), None)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="gathered"), pytest.param(PACKED, id="packed", marks=CAMPAIGN)],
)
def test_replicas_of_every_kind_share_a_round(steady, options):
    """Two layouts, a loader, two on one host, and one that shares memory with the trainer."""
    kinds = {0: Half, 2: Loader, 3: Half}
    with chain(4, kinds, **SMALL, **options) as made, ExitStack() as stack:
        address = made.trainer.address
        beside = Remote(made.hosts[1], Engine, address, name="beside", nbytes=SMALL["nbytes"])
        local = Remote(made.host, Engine, address, name="local", nbytes=SMALL["nbytes"])
        made.engines.append(stack.enter_context(beside))
        stack.enter_context(local)
        nbytes = sum(each.nbytes for each in weights(0, SMALL["nbytes"]).values())
        for version in (1, 2, 3):
            before = made.host.sent_bytes()
            for each in (*made.engines, local):
                each.start("update", version)
            made.trainer.start("publish", version, num_replicas=6)
            assert [each.end()[0] for each in (*made.engines, local)] == [version] * 6
            made.trainer.end()
            for each in (*made.engines, local):
                assert each.ask("held", [version]) == ("ready", version, version)
            # Both layouts once. A packed bucket goes whole to both.
            assert made.host.sent_bytes() - before < 1.1 * nbytes * (2 if options else 1.5)


# Faults.


def is_dead(number, text):
    """True if a report says so."""
    return text.startswith(f"replica 'e{number}', process ") and text.endswith(" is gone")


@pytest.mark.check
def test_a_replica_that_is_killed_loses_no_bytes_of_those_below():
    with chain(4, **BUCKETS) as made:
        made.publish()
        for each in (made.trainer, *made.engines):
            each.ask("remember")
        made.begin()
        made.engines[1].kill()
        made.rate(FULL_SPEED)
        assert is_dead(1, made.end(1)["e1"])
        made.publish(made.without(1))
        for each in (made.trainer, *made.without(1)):
            changed, nbytes = each.ask("left", 4)
            assert changed == {}, changed
            assert nbytes < 2 * MIB


@pytest.mark.parametrize(
    ("killed", "options"),
    [
        pytest.param([0], {}, marks=pytest.mark.check),
        pytest.param([1, 2], {}, marks=pytest.mark.check),
        pytest.param([3], {}, marks=CAMPAIGN),
        pytest.param([0, 1], {}, marks=CAMPAIGN),
        *(pytest.param(killed, PACKED, marks=CAMPAIGN) for killed in ([0], [3], [0, 1], [1, 2])),
    ],
    ids=str,
)
def test_replicas_may_be_killed_anywhere(killed, options):
    with chain(4, **BUCKETS, **options) as made:
        made.begin()
        for each in killed:
            made.engines[each].kill()
        made.rate(FULL_SPEED)
        failed = made.end(*killed)
        for each in killed:
            assert is_dead(each, failed.pop(f"e{each}"))
        # Packed buckets stay for the next two of a chain: two losses may take those below along.
        assert not failed or (options and len(killed) == 2)
        assert all("no member above can give it" in text for text in failed.values()), failed
        made.publish(made.without(*killed))


@pytest.mark.check
def test_a_trainer_that_is_killed_takes_nobody_along():
    with chain(3, **BUCKETS, **PACKED) as made:
        made.publish()
        made.begin()
        made.trainer.kill()
        for each in made.hosts:
            each.rate(FULL_SPEED)
        for each in made.engines:
            assert each.end().kind == "PeerLost"
            held = each.ask("held", [1])  # kept if no bucket came before the fault
            assert held[:2] == ("failed", None) or held == ("ready", 1, 1)


@CHECKED
def test_a_replica_that_stops_delays_the_others_for_seconds_and_may_go_on(options):
    """Packed buckets wait for it: there the others are late until it is given up."""
    seconds = 10 if options else 2 * SECONDS
    with chain(4, silence_seconds=2 * LIMIT, **BUCKETS, **options) as made:
        made.publish()
        made.begin(timeout_seconds=seconds)
        made.engines[1].stop()
        made.rate(FULL_SPEED)
        until(lambda: all(each.has_ended for each in made.without(1)))
        assert options or not made.trainer.has_ended
        made.engines[1].go_on()
        assert made.end().keys() == ({"e1"} if options else set())
        made.publish()


class Draining(Engine):
    """A replica that drains for a while before it writes."""

    def update(self, version=None):
        return super().update(version, before=lambda _: time.sleep(2.5))


class DrainingUntilTold(Engine):
    """A replica that drains until the test lets it write."""

    def update(self, version=None):
        return super().update(version, before=lambda _: self._pipe.recv())


@CAMPAIGN
@BOTH
def test_replicas_that_drain_for_long_read_from_each_other(monkeypatch, options):
    """Their staging is full meanwhile: it can be read, and nobody waits for more."""
    monkeypatch.setattr(fanned_out, "_SLOW_SECONDS", 1.0)
    kinds = dict.fromkeys(range(4), Draining)
    with chain(4, kinds, **SMALL, **options) as made:
        nbytes = sum(each.nbytes for each in weights(0, SMALL["nbytes"]).values())
        assert nbytes < made.publish() < 1.1 * nbytes


def test_nobody_waits_for_a_replica_that_drains_for_longer_than_the_others(monkeypatch):
    monkeypatch.setattr(fanned_out, "_SLOW_SECONDS", 1.0)
    with chain(4, {1: DrainingUntilTold}, **SMALL) as made:
        made.version = 1
        for each in made.engines:
            each.start("update", 1)
        made.trainer.start("publish", 1, num_replicas=4)
        until(lambda: all(each.has_ended for each in made.without(1)))
        assert not made.engines[1].has_ended
        made.engines[1].pass_on()
        assert made.end() == {}


@CHECKED
def test_a_link_that_is_cut_fails_one_replica(quick, options):
    with chain(4, **BUCKETS, **options) as made:
        made.begin()
        made.hosts[1].cut()
        made.rate(FULL_SPEED)
        assert is_dead(1, made.end()["e1"])
        made.hosts[1].heal()
        made.publish()


NEW_CONNECTIONS = "tcp flags & (syn|ack) == syn"


@pytest.mark.check
def test_two_that_cannot_reach_each_other_read_from_the_one_above(quick):
    with chain(4, **BUCKETS, **PACKED) as made:
        before = made.host.sent_bytes()
        made.begin()
        for one, other in [(1, 2), (2, 1)]:
            made.hosts[one].drop(f"ip saddr {made.hosts[other].ip}")
        made.rate(FULL_SPEED)
        assert made.end() == {}
        assert made.host.sent_bytes() - before < 1.3 * SENT
        made.publish()


@pytest.mark.parametrize(
    ("options", "closed", "times"),
    [
        pytest.param(PACKED, [0], (2, 1), id="packed", marks=CAMPAIGN),
        pytest.param({}, [0], (2, 1), id="gathered", marks=pytest.mark.check),
        pytest.param({}, [1], (1, 1), id="middle", marks=CAMPAIGN),
        pytest.param({}, [0, 1, 2, 3], (4, 4), id="all", marks=CAMPAIGN),
        pytest.param(PACKED, [0, 1, 2, 3], (4, 4), id="all-packed", marks=CAMPAIGN),
    ],
)
def test_nobody_waits_for_a_replica_that_cannot_be_reached(options, closed, times):
    """In the first round its readers notice; in the next ones they read from others at once."""
    with chain(4, **SMALL, **options) as made:
        for each in closed:
            made.hosts[each].drop(NEW_CONNECTIONS)
        nbytes = sum(each.nbytes for each in weights(0, SMALL["nbytes"]).values())
        for most in times:
            assert made.publish() < 1.1 * most * nbytes


class Corrupting(Engine):
    """A replica whose own weights are right, and which gives others a wrong byte."""

    def make(self, *args, **options):
        offer = NetworkTransport.offer

        def offer_wrong(transport, buffer):
            wrong = buffer.flat().copy()
            wrong[-1] ^= 1
            return offer(transport, Buffer.of(wrong))

        NetworkTransport.offer = offer_wrong
        return super().make(*args, **options)


def test_wrong_bytes_of_a_replica_are_found_and_it_is_not_read_from_again(steady):
    with chain(4, {1: Corrupting}, **SMALL) as made:
        made.version = 1
        for each in made.engines:
            each.start("update", 1)
        made.trainer.start("publish", 1, num_replicas=4)
        failed = made.end()
        assert failed.keys() == {"e2", "e3"}
        assert "'e1'" in failed["e2"]
        made.publish()


@CAMPAIGN
def test_replicas_may_leave_as_soon_as_they_have_committed():
    """The packed buckets that others still lack are nowhere else, so `close` waits for those."""
    with chain(4, **BUCKETS, **PACKED) as made:
        made.begin()
        for each in made.engines[:2]:
            each.start("close")
        for each in (made.host, *made.hosts[:2]):
            each.rate(FULL_SPEED)
        assert [each.end() for each in made.engines] == [(1, "network")] * 4
        assert [each.end() for each in made.engines[:2]] == [None, None]
        assert set(made.trainer.end().values()) == {"network"}
        for each in made.engines[2:]:
            assert each.ask("held", [1]) == ("ready", 1, 1)


@pytest.mark.check
def test_a_replica_may_ask_again_as_soon_as_it_has_committed():
    with chain(2, **BUCKETS, **PACKED) as made:
        made.publish()
        made.begin()
        made.rate(FULL_SPEED)
        made.engines[0].start("update", 3)
        assert made.engines[0].end() == (2, "network")
        assert made.engines[1].end() == (2, "network")
        assert set(made.trainer.end().values()) == {"network"}
        made.trainer.start("publish", 3, num_replicas=1)
        assert made.engines[0].end() == (3, "network")
