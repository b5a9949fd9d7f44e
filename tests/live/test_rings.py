"""Who may use the rings of a device: pure, so that it needs none."""

import socket
from time import monotonic
from types import SimpleNamespace

import pytest

from child_processes import LIMIT
from flyweight.errors import TransferTimeout
from flyweight.live.publish_id import PublishId
from flyweight.live.shelf import MAX_RINGS, Shelf
from flyweight.transports.channel import Channel, Messages
from flyweight.transports.wire import Wire


@pytest.fixture
def shelf():
    """A shelf with readers, that offers version 1."""
    found, pairs = Shelf(), [socket.socketpair() for _ in range(MAX_RINGS + 1)]
    channels = [Channel(Wire(ours), "reader", Messages()) for ours, _ in pairs]
    found.readers = [found.enter(each).number for each in channels]
    offer(found, 1)
    yield found
    for reader in found.readers:
        found.lose(reader)
    for channel, (_, theirs) in zip(channels, pairs, strict=True):
        channel.close()
        theirs.close()


def offer(shelf, version):
    shelf.offer(SimpleNamespace(id=PublishId("s", version)))


def lease(shelf, reader, version):
    shelf.lease(PublishId("s", version), reader, monotonic() + LIMIT)


def release(shelf, reader, version):
    with shelf.changing():
        shelf.leases.release(PublishId("s", version), reader)


def take(shelf, reader, seconds=LIMIT):
    return shelf.take_ring(0, reader, monotonic() + seconds)


def test_ranks_of_an_engine_do_not_keep_each_other_out_in_whatever_order_they_come(shelf):
    ranks = shelf.readers[:MAX_RINGS]
    for version, order in enumerate((ranks, ranks[::-1], ranks), 1):
        if version > 1:
            offer(shelf, version)
        rings = []
        for reader in order:  # each has its ring before the next one has a lease
            lease(shelf, reader, version)
            rings.append(take(shelf, reader))
        assert len(set(rings)) == MAX_RINGS
        for reader in order:
            release(shelf, reader, version)


def test_a_ring_is_free_once_the_lease_of_its_reader_has_ended(shelf):
    *first, last = shelf.readers
    for reader in shelf.readers:
        lease(shelf, reader, 1)
    rings = [take(shelf, reader) for reader in first]
    with pytest.raises(TransferTimeout, match="other readers use the rings"):
        take(shelf, last, 0.01)
    release(shelf, first[0], 1)
    assert take(shelf, last) is rings[0]
