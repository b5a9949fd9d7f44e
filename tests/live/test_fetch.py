"""Buckets that are read into staging, and reads that cannot be ended."""

from contextlib import closing
from queue import Queue

import numpy as np
import pytest

from child_processes import LIMIT, until
from flyweight.errors import TransportError
from flyweight.live.fetch import Fetch, Fetched, Fetches, FetchesFailed
from flyweight.live.messages import Filled, Free, Has, Unread
from flyweight.memory import Buffer
from flyweight.transports import engine_reads, fd_passing
from flyweight.transports.data_sockets import DataServer, Welcome
from flyweight.transports.engine_reads import EngineHandle, EngineReads
from flyweight.transports.network import NetworkTransport
from flyweight.transports.nixl_agent import UnfencedRead
from versioned_models import assign, holds, weights

NBYTES = 1000


@pytest.fixture
def holder():
    """The bucket in the staging of another replica, whose bytes are all 7."""
    server = DataServer("127.0.0.1", token="secret", welcome=Welcome(0, "session", "host"))
    with (
        closing(server),
        closing(NetworkTransport(server=server, place_host="127.0.0.1")) as transport,
    ):
        yield transport.offer(Buffer.of(np.full(NBYTES, 7, np.uint8)))


class StuckReader:
    """A reader that is told to end, and cannot."""

    def __init__(self, description, *, address):
        pass

    def read(self, place, offset, into, *, is_over, **options):
        until(is_over)
        raise UnfencedRead("the agent does not end")

    def close(self):
        pass


class Fetching:
    """Fetches of two buckets into one slot of staging, and what they report."""

    def __init__(self, transport):
        self.said, self.events, self.staging = Queue(), Queue(), np.zeros(NBYTES, np.uint8)
        handle = EngineHandle(engine="nixl", description=b"d", place=b"p", nbytes=NBYTES)
        fetch = Fetch(handle, 0, Buffer.of(self.staging))
        self.fetches = Fetches(
            1,
            {0: fetch, 1: fetch},
            transport,
            EngineReads("127.0.0.1"),
            timeout_seconds=LIMIT,
            on_progress=lambda nbytes: None,
            send=self.said.put,
            on_fetched=self.events.put,
        )
        self.take, self.close = self.fetches.take, self.fetches.close


@pytest.fixture
def made():
    with (
        closing(NetworkTransport(token="secret")) as transport,
        closing(Fetching(transport)) as made,
    ):
        yield made


@pytest.mark.campaign
def test_a_bucket_is_read_from_the_holder_that_is_named(made, holder):
    made.take(Filled(1, 0, holder))
    assert made.events.get(timeout=LIMIT) == Fetched(1, 0)
    assert made.said.get(timeout=LIMIT) == Has(1, 0, None)
    assert (made.staging == 7).all()
    assert made.close()  # the staging can be used in the next round


@pytest.mark.check
def test_a_slot_that_may_still_be_written_is_not_used_again(made, holder, monkeypatch):
    """The bucket can be had elsewhere, but late bytes could mix with those."""
    monkeypatch.setattr(engine_reads, "NixlReader", StuckReader)
    made.take(Filled(1, 0))
    until(lambda: made.fetches._running)
    made.take(Filled(1, 0, holder))
    assert made.events.get(timeout=LIMIT) == FetchesFailed(1, "the agent does not end")
    made.take(Free(1, 0))
    made.take(Filled(1, 1, holder))
    assert not made.close()  # so the next round has other staging
    assert made.events.empty()
    assert made.said.empty()
    assert not made.staging.any()


@pytest.mark.campaign
def test_a_lack_of_files_is_no_read_that_cannot_be_ended(made, holder, monkeypatch):
    with monkeypatch.context() as scarce:
        scarce.setattr(fd_passing, "has_room", lambda count: False)
        made.take(Filled(1, 0, holder))
        unread = made.said.get(timeout=LIMIT)
    assert isinstance(unread, Unread)
    assert "files are left" in unread.text
    made.take(Filled(1, 0, holder))
    assert made.events.get(timeout=LIMIT) == Fetched(1, 0)
    assert made.close()


def test_a_replica_whose_read_cannot_be_ended_fails_alone(trainer, threads, monkeypatch):
    """Nothing is verified here: only the error keeps it from serving what it reads next."""
    model, targets = weights(1), [weights(5), weights(6)]
    publisher = trainer(model, should_verify=False, timeout_seconds=LIMIT)
    replicas = [publisher.replica(each, f"{n}") for n, each in enumerate(targets)]
    fetch, stuck = NetworkTransport.fetch, []

    def stuck_once(transport, handle, into, **options):
        is_of_replica = not publisher.address.endswith(handle.place.rpartition(":")[2])
        if is_of_replica and not stuck:
            stuck.append(handle)
            raise UnfencedRead("the read does not end")
        fetch(transport, handle, into, **options)

    monkeypatch.setattr(NetworkTransport, "fetch", stuck_once)
    updates = [threads.submit(each.update, timeout_seconds=LIMIT) for each in replicas]
    until(lambda: len(publisher.waiting) == 2)
    report = publisher.publish(1, num_replicas=2)
    (failed,) = report.failed
    assert "the read does not end" in str(failed.error)
    kept, lost = (0, 1) if failed.name == "1" else (1, 0)
    with pytest.raises(TransportError, match="the read does not end"):
        updates[lost].result(LIMIT)
    assert replicas[lost].version is None
    assert updates[kept].result(LIMIT).version == 1
    assert holds(targets[kept], 1)
    assign(model, 2)
    updates = [threads.submit(each.update, timeout_seconds=LIMIT) for each in replicas]
    assert publisher.publish(2, num_replicas=2).failed == ()
    assert [each.result(LIMIT).version for each in updates] == [2, 2]
    assert all(holds(each, 2) for each in targets)
