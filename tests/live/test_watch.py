"""Watchers see what a publisher and its replicas do."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from child_processes import LIMIT, until
from flyweight.errors import PeerLost, PeerRefused
from flyweight.live import Publisher, Replica
from flyweight.live.watch import record, watch
from live.live_processes import SHAPES, TOKEN, Part, free_address, shared

TIMES = {"timeout_seconds": LIMIT}


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as found:
        yield found


@pytest.fixture
def publisher():
    with Publisher(Part(SHAPES, shared).model, "tcp://127.0.0.1:0", token=TOKEN, **TIMES) as found:
        yield found


def seen(news):
    """Return the state of the publisher, and that of each replica by name and rank."""
    replicas = {(each.name, each.rank): (each.state, each.version) for each in news.replicas}
    return news.state, news.version, replicas


def until_seen(watching, wanted):
    """Return the news that are as wanted; those before may be any."""
    return next(news for news in watching if seen(news) == wanted)


def test_a_watcher_sees_replicas_come_update_and_leave_and_the_publisher_publish(
    publisher, threads
):
    watching = watch(publisher.address, token=TOKEN, **TIMES)
    assert seen(next(watching)) == ("IDLE", None, {})
    with Replica(Part(SHAPES).model, publisher.address, name="engine", token=TOKEN) as replica:
        until_seen(watching, ("IDLE", None, {("engine", 0): ("EMPTY", None)}))
        states = []

        def before(version):
            news = until_seen(watching, ("PUBLISHING", 4, {("engine", 0): ("UPDATING", None)}))
            states.append(news.state)

        future = threads.submit(replica.update, before=before, **TIMES)
        until(lambda: publisher.waiting)
        publisher.publish(4)
        future.result(LIMIT)
        news = until_seen(watching, ("IDLE", 4, {("engine", 0): ("READY", 4)}))
        assert states == ["PUBLISHING"]
        assert news.replicas[0].seconds > 0
    until_seen(watching, ("IDLE", 4, {}))
    publisher.close()
    assert list(watching) == []


def test_a_watcher_sees_what_an_update_that_failed_left(publisher, threads):
    watching = watch(publisher.address, token=TOKEN, **TIMES)

    def failing(named):
        raise ValueError("no such parameter")

    def refusing(version):
        raise ValueError("not now")

    engine = Part(SHAPES).model
    with Replica(engine, publisher.address, name="engine", token=TOKEN) as replica:
        for version, before in enumerate([None, refusing]):
            future = threads.submit(replica.update, before=before, **TIMES)
            until(lambda: publisher.waiting)
            publisher.publish(version)
            if before is not None:
                with pytest.raises(Exception, match="not now"):
                    future.result(LIMIT)
            else:
                future.result(LIMIT)
        news = until_seen(watching, ("IDLE", 1, {("engine", 0): ("READY", 0)}))
        assert "not now" in news.replicas[0].error
    with Replica(
        failing, publisher.address, name="loader", token=TOKEN, framework="numpy"
    ) as replica:
        future = threads.submit(replica.update, **TIMES)
        until(lambda: publisher.waiting)
        publisher.publish(2)
        with pytest.raises(Exception, match="no such parameter"):
            future.result(LIMIT)
        until_seen(watching, ("IDLE", 2, {("loader", 0): ("FAILED", None)}))


def test_a_watcher_waits_for_a_publisher_and_is_no_replica(threads):
    address = free_address()
    first = threads.submit(next, watch(address, token=TOKEN, **TIMES))
    with Publisher(Part(SHAPES).model, address, token=TOKEN, **TIMES) as publisher:
        news = first.result(LIMIT)
        assert publisher.replicas == []
        assert json.loads(json.dumps(record(news))) == {
            "version": None, "state": "IDLE", "replicas": [],
        }  # fmt: skip


def test_a_replica_that_holds_a_version_of_an_earlier_publisher_is_seen_with_it(threads, tmp_path):
    address, trainer = f"unix:{tmp_path}", Part(SHAPES, shared)
    with Replica(Part(SHAPES).model, address, name="engine") as replica:
        with Publisher(trainer.model, address, keep="in_place", **TIMES) as publisher:
            publisher.publish(3)
            replica.update(**TIMES)
        with Publisher(trainer.model, address, **TIMES):
            future = threads.submit(replica.update, **TIMES)
            wanted = ("IDLE", None, {("engine", 0): ("READY", 3)})
            until_seen(watch(address, **TIMES), wanted)
            replica.close()
            assert future.exception(LIMIT) is not None


def test_a_watcher_learns_that_a_publisher_was_killed(processes):
    trainer = processes.trainer()
    watching = watch(trainer.told(), token=TOKEN, **TIMES)
    next(watching)
    trainer.kill(signal.SIGKILL)
    with pytest.raises(PeerLost):
        list(watching)


def test_a_watcher_without_a_publisher_or_its_token_is_refused(publisher):
    with pytest.raises(PeerLost, match="no publisher answers"):
        next(watch(free_address(), token=TOKEN, timeout_seconds=0.1))
    with pytest.raises(PeerRefused, match="another token"):
        next(watch(publisher.address, token="a token of somebody else", **TIMES))
