"""Two ranks of a trainer, cut by rows, and two ranks of an engine, cut by columns."""

import pytest

from child_processes import LIMIT
from flyweight.errors import FlyweightError, PeerLost
from live.live_processes import (
    check_holds,
    check_next_update,
    free_address,
    plain,
    shared,
)

TRANSPORTS = ["mapped", "filled", "read"]


@pytest.fixture
def started(processes, tmp_path):
    """Return what starts the ranks of a trainer and of an engine, for a transport."""

    def start(transport, **source):
        address = free_address() if transport == "read" else f"unix:{tmp_path}/trainer"
        make = shared if transport == "mapped" else plain
        return *processes.ranks(address, transport, make=make, **source), address

    return start


def publish(trainers, version, **options):
    for each in trainers:
        each.send(("publish", version, {"timeout_seconds": LIMIT, **options}))


def update(engines, stopped=None, stop_at=None, **options):
    for rank, each in enumerate(engines):
        stop = stop_at if rank == stopped else None
        each.send(("update", {"timeout_seconds": LIMIT, "stop_at": stop, **options}))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_ranks_commit_together_and_all_hear_the_same_report(started, transport):
    trainers, engines, _ = started(transport)
    for version in (1, 2):
        update(engines)
        publish(trainers, version, num_replicas=1)
        for each in engines:
            found = each.told()
            check_holds(found, version)
            assert found["report"].transport == transport
        reports = [each.told() for each in trainers]
        assert reports[0] == reports[1]
        assert [each.name for each in reports[0].replicas] == ["engine"]
        assert not reports[0].failed


@pytest.mark.parametrize("transport", ["mapped", "read"])
@pytest.mark.parametrize("stop_at", ["found", "before", "copied"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_leaves_the_other_with_its_old_version_or_none(
    started, processes, transport, stop_at, killed
):
    trainers, engines, address = started(transport)
    check_next_update(trainers, engines, 1)
    update(engines, killed, stop_at)
    publish(trainers, 2, waiting=1)
    assert engines[killed].told() == stop_at
    engines[killed].kill()
    found = engines[1 - killed].told()
    assert "PeerLost" in found["error"]
    if stop_at == "copied":
        assert (found["version"], found["state"]) == (None, "FAILED")
    else:
        check_holds(found, 1)
    for each in trainers:
        report = each.told()
        assert not isinstance(report, FlyweightError), report
    make = {"name": "engine", "rank": killed, "world_size": 2, "transport": transport}
    engines[killed] = processes.engine(address, **make)
    engines[killed].told()
    check_next_update(trainers, engines, 3)


def test_ranks_that_publish_different_versions_offer_nothing(started):
    """FAULTS 21: a trainer rank that refused told nobody."""
    trainers, engines, _ = started("mapped")
    for version, each in enumerate(trainers, start=1):
        each.send(("publish", version, {"timeout_seconds": LIMIT}))
    for each in trainers:
        assert "the ranks publish versions [1, 2]" in str(each.told())
    check_next_update(trainers, engines, 3)
    trainers[0].send(("publish", 4, {"timeout_seconds": LIMIT}))
    trainers[1].send(("publish", 2, {"timeout_seconds": LIMIT}))
    for each in trainers:
        assert "does not follow 3" in str(each.told())
    check_next_update(trainers, engines, 5)


@pytest.mark.parametrize("transport", ["mapped", "read"])
def test_a_rank_that_is_started_again_gets_the_version_that_the_other_holds(
    started, processes, transport
):
    """FAULTS 20: a restarted rank never got the version that rank 0 held."""
    trainers, engines, address = started(transport)
    options = {"num_replicas": 1, "timeout_seconds": LIMIT}
    for each in trainers:
        each.send(("publish in the background", 1, options))
    update(engines)
    for each in engines:
        check_holds(each.told(), 1)
    engines[1].kill()
    engines[1].join()
    for each in trainers:
        each.send(("end of publish",))
        assert each.told() == "ended"
    engines[1] = processes.engine(address, name="engine", rank=1, world_size=2, transport=transport)
    engines[1].told()
    check_next_update(trainers, engines, 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transport", ["mapped", "read"])
def test_an_engine_whose_rank_died_costs_later_publishes_nothing(started, transport, rank):
    """FAULTS 20: an engine with a dead rank cost every publish its deadline."""
    trainers, engines, _ = started(transport)
    check_next_update(trainers, engines, 1)
    update(engines, version=2)
    trainers[0].send(("is an engine waiting",))
    assert trainers[0].told() == "waiting"
    engines[rank].kill()
    engines[rank].join()
    publish(trainers, 2, timeout_seconds=600)  # the test would hang
    assert "PeerLost" in engines[1 - rank].told()["error"]
    for each in trainers:
        assert not each.told().pending


@pytest.mark.parametrize("dead", [0, 1])
def test_a_trainer_rank_that_dies_ends_the_publish_of_the_others(started, dead):
    trainers, engines, _ = started("mapped")
    check_next_update(trainers, engines, 1)
    update(engines, 0, "before")
    publish(trainers, 2, waiting=1)
    assert engines[0].told() == "before"
    trainers[dead].kill()
    trainers[dead].join()
    engines[0].send("go on")
    for each in engines:  # nothing was written: a lease has ended
        found = each.told()
        assert "PeerLost" in found["error"]
        check_holds(found, 1)
    assert isinstance(trainers[1 - dead].told(), PeerLost)


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_ranks_of_a_trainer_that_were_started_again_go_on_with_the_engine(
    started, processes, transport, killed
):
    trainers, engines, address = started(transport)
    check_next_update(trainers, engines, 1)
    for each in trainers:
        each.kill()
        each.join()
    make = shared if transport == "mapped" else plain
    again = [
        processes.trainer(address, rank=rank, world_size=2, make=make)
        for rank in ((0, 1) if killed else (1, 0))
    ]
    for each in again:
        each.told()
    check_next_update(again, engines, 1)


def test_a_rank_that_asks_too_late_starts_over_with_the_others(started):
    """FAULTS 19: rank 1 asked for version 1 when 2 was there, and waited for its whole deadline."""
    trainers, engines, _ = started("mapped", keep="memory")
    for each, stop in zip(engines, ("found", "asking"), strict=True):
        each.send(("update", {"timeout_seconds": LIMIT, "stop_at": stop}))
    publish(trainers, 1)
    for each, stop in zip(engines, ("found", "asking"), strict=True):
        assert each.told() == stop
    for each in trainers:
        assert each.told().version == 1
    publish(trainers, 2)
    for each in trainers:
        assert each.told().version == 2
    for each in engines:
        each.send("go on")
    for each in engines:
        check_holds(each.told(), 2)


def test_a_version_that_one_trainer_rank_has_withdrawn_is_left_by_all(started):
    trainers, engines, _ = started("mapped", keep="memory")
    update(engines, 0, "found")
    publish(trainers, 1)
    assert engines[0].told() == "found"
    for each in trainers:
        assert each.told().version == 1
    publish(trainers[:1], 2, stop_at="withdrawn")
    publish(trainers[1:], 2)
    assert trainers[0].told() == "withdrawn"
    trainers[0].send("go on")
    engines[0].send("go on")
    for each in engines:
        check_holds(each.told(), 2)
    for each in trainers:
        assert each.told().version == 2
    check_next_update(trainers, engines, 3)
