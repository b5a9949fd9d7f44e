"""Relays: one staging on a host, which engines of any kind map."""

import threading
from functools import partial

import numpy as np
import pytest

from child_processes import LIMIT, until
from flyweight.adapters.sharded import Sharded
from flyweight.errors import PeerRefused
from flyweight.live import Publisher, Replica
from flyweight.live.relay import Relay
from live.live_processes import check_next_update as check_processes
from live.one_process import (
    SHAPES,
    TOKEN,
    fill,
    holds,
    in_background,
    model,
    relaying,
    taken,
)


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_engines_of_several_kinds_map_what_a_relay_has_staged(tmp_path, scheme):
    source = model()
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"unix:{tmp_path}/trainer"
    whole, part = model(), np.zeros((32, 32), np.float32)
    with (
        Publisher(source, address, token=TOKEN) as publisher,
        relaying(publisher.address, f"unix:{tmp_path}/relay") as relay,
    ):
        until(lambda: relay.holder is not None)
        cut = {"a": Sharded(part, (64, 32), (32, 0))}
        with (
            Replica(whole, f"unix:{tmp_path}/relay", token=TOKEN, name="whole") as one,
            Replica(cut, f"unix:{tmp_path}/relay", token=TOKEN, name="part", strict=False) as two,
        ):
            for version in (1, 2, 3):
                fill(source, version)
                report, found = taken(publisher, version, one, two, num_replicas=1)
                assert [each.name for each in report.replicas] == [relay._link.me.name]
                assert [each.transport for each in found] == ["mapped", "mapped"]
                assert [each.verified for each in found] == ["live", "live"]
                assert holds(whole, version)
                assert (part == version).all()


def test_an_engine_has_its_version_when_the_trainer_is_gone_but_the_relay_is_not(tmp_path):
    source, sink = model(5), model()
    publisher = Publisher(source, "tcp://127.0.0.1:0", token=TOKEN)
    with relaying(publisher.address, f"unix:{tmp_path}/relay") as relay:
        until(lambda: publisher.replicas)
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        publisher.close()
        with Replica(sink, relay.address, token=TOKEN, name="late") as replica:
            assert replica.update(1, timeout_seconds=LIMIT).transport == "mapped"
    assert holds(sink, 5)


def test_a_relay_serves_a_restarted_trainer_with_other_tensors(tmp_path):
    address = f"unix:{tmp_path}/trainer"
    with relaying(address, f"unix:{tmp_path}/relay", token=None) as relay:
        for shapes in (SHAPES, {"other": (7, 7)}):
            source, sink = model(shapes=shapes), model(shapes=shapes)
            with Publisher(source, address) as publisher:
                until(lambda publisher=publisher: publisher.waiting)
                fill(source, 4)
                publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
                with Replica(sink, relay.address, name="engine") as replica:
                    replica.update(timeout_seconds=LIMIT)
                assert holds(sink, 4)


def test_a_wrong_token_ends_a_relay(tmp_path):
    with Publisher(model(), "tcp://127.0.0.1:0", token=TOKEN) as publisher:
        relay = Relay(publisher.address, f"unix:{tmp_path}/relay", token="another token")
        with in_background(relay.run) as result:
            assert isinstance(result(), PeerRefused)


def test_a_relay_that_has_too_little_memory_takes_nothing_and_says_so(tmp_path):
    with (
        Publisher(model(), f"unix:{tmp_path}/trainer", token=TOKEN) as publisher,
        relaying(publisher.address, f"unix:{tmp_path}/relay", staging_bytes=1000),
    ):
        until(lambda: publisher.waiting)
        (failed,) = publisher.publish(1, timeout_seconds=LIMIT).failed
    assert "staging needs" in failed.error
    assert "1000" in failed.error


def test_a_version_that_an_engine_still_reads_stays_as_it_is(tmp_path):
    source, sink = model(), model()
    pausing, is_published = threading.Event(), threading.Event()

    def before(version):
        pausing.set()
        assert is_published.wait(LIMIT)

    with (
        Publisher(source, "tcp://127.0.0.1:0", token=TOKEN, keep="memory") as publisher,
        relaying(publisher.address, f"unix:{tmp_path}/relay") as relay,
    ):
        until(lambda: publisher.waiting)
        fill(source, 1)
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        with Replica(sink, relay.address, token=TOKEN, name="engine") as replica:
            with in_background(replica.update, 1, before=before, timeout_seconds=LIMIT) as result:
                assert pausing.wait(LIMIT)
                until(lambda: publisher.waiting)
                fill(source, 2)
                publisher.publish(2)  # the relay begins to take it
                until(lambda: not publisher.waiting)
                is_published.set()
                assert result().version == 1
            assert holds(sink, 1)
            assert replica.update(2, timeout_seconds=LIMIT).version == 2
            assert holds(sink, 2)


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("point", ["asking", "found", "leased", "before", "copy"])
def test_a_relay_that_ends_leaves_its_engines_with_a_whole_version_or_none(
    processes, tmp_path, point, is_killed
):
    trainer = processes.trainer(keep="memory")
    address, on = trainer.told(), f"unix:{tmp_path}/relay"
    relay = processes.relay(address, on)
    engine = processes.engine(on, name="engine")
    engine.told()
    check_all = partial(check_processes, [trainer], [engine])
    check_all(1)
    engine.send(("update", {"version": 2, "timeout_seconds": 3, "stop_at": point}))
    if point == "asking":
        assert engine.told() == point
    trainer.send(("publish", 2, {"num_replicas": 1, "timeout_seconds": LIMIT}))
    assert trainer.told().version == 2
    if point != "asking":
        assert engine.told() == point
    relay.kill() if is_killed else relay.stop()
    engine.send("go on")
    found = engine.told()
    if found["version"] is None:
        assert (found["state"], point) == ("FAILED", "copy")
    else:
        assert found["is_complete"], found
        assert found["version"] == (1 if found["error"] else 2)
    if is_killed:
        relay.join()
        processes.relay(address, on)
    else:
        relay.go_on()
    check_all(3)
