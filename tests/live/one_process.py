"""A publisher and its replicas in one process, for tests that break something between two steps."""

import threading
from contextlib import ExitStack, contextmanager

import numpy as np

from child_processes import LIMIT
from flyweight.live import Replica, UpdateReport
from flyweight.live.publish_id import PublishId
from flyweight.live.relay import Relay
from live.live_processes import TOKEN, shared

SHAPES = {"a": (64, 32), "b": (128,)}


def model(version=0, shapes=SHAPES):
    """Return arrays that no other process can map, filled with a version."""
    return {name: np.full(shape, version, np.float32) for name, shape in shapes.items()}


def mappable(version=0, shapes=SHAPES):
    """Return arrays that readers on this host map."""
    found = {name: shared(shape).view(np.float32) for name, shape in shapes.items()}
    fill(found, version)
    return found


def fill(arrays, version):
    for each in arrays.values():
        each[...] = version


def holds(arrays, version):
    return all((each == version).all() for each in arrays.values())


def is_free(publisher, version):
    """True if nobody can lease a version of a publisher, and nobody has a lease of it."""
    return publisher.shelf.leases.is_free(_id(publisher, version))


def is_leased(publisher, version):
    """True while somebody has a lease of a version."""
    return bool(publisher.shelf.leases.readers(_id(publisher, version)))


def is_offered(publisher, version):
    return _id(publisher, version) in publisher.shelf.leases.offered


def _id(publisher, version):
    return PublishId(publisher.shelf._last.session, version)


def staged(replica):
    """Return the staging that others may fetch from a replica: its memory and its version."""
    (found,) = replica._link.shelf._offers.values()
    return found


def raising(error):
    """Return a function that raises an error, whatever it is called with."""

    def act(*_, **__):
        raise error

    return act


@contextmanager
def in_background(work, *arguments, **options):
    """Call a function in a thread; yield a function that returns its result, or its error."""
    found = []

    def run():
        try:
            found.append(work(*arguments, **options))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)

    def result():
        thread.join(LIMIT)
        assert not thread.is_alive()
        return found[0]

    thread.start()
    try:
        yield result
    finally:
        result()


def reader(arrays, address, transport="auto", **options):
    """Return a replica of a publisher that has the tests' token."""
    return Replica(arrays, address, token=TOKEN, transport=transport, **options)


def check_next_update(publisher, weights, *engines):
    """Check that all work together after a fault: invariant 12.

    engines: replicas with their arrays.
    """
    version = (publisher.version or 0) + 100
    with ExitStack() as stack:
        results = [
            stack.enter_context(
                in_background(replica.update, version=version, timeout_seconds=LIMIT)
            )
            for replica, _ in engines
        ]
        publisher.withdraw()
        fill(weights, version)
        report = publisher.publish(version, num_replicas=len(engines), timeout_seconds=LIMIT / 3)
        for (_, arrays), result in zip(engines, results, strict=True):
            assert isinstance(result(), UpdateReport), result()
            assert result().version == version
            assert holds(arrays, version)
    assert not report.failed, report


def taken(publisher, version, *replicas, num_replicas=None):
    """Publish a version, and return the reports of the publisher and of replicas that take it."""
    with_updates = [in_background(each.update, timeout_seconds=LIMIT) for each in replicas]
    results = [each.__enter__() for each in with_updates]
    number = len(replicas) if num_replicas is None else num_replicas
    report = publisher.publish(version, num_replicas=number, timeout_seconds=LIMIT)
    found = [each() for each in results]
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return report, found


@contextmanager
def relaying(address, on, **options):
    """Run a relay; yield it."""
    relay = Relay(address, on, **{"token": TOKEN, **options})
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(LIMIT)
        assert not thread.is_alive()
