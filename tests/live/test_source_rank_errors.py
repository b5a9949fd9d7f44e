"""Trainer ranks that do not fit together, are late or leave: every rank is told which and why."""

import time
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child
from flyweight.errors import FlyweightError, PeerRefused, PlanError, TransferTimeout, VersionError
from flyweight.live.replica_connection import ReplicaConnection
from source_rank_processes import NBYTES, holds_whole, source_rank
from versioned_models import weights

SECONDS = 2.0
PATIENCE = (SECONDS, 4 * SECONDS, 15 * SECONDS)
"""How long ranks wait for one that does not come: longer, until all others have come within it."""


class Ranks:
    """Three trainer ranks, each in a process; `calls` maps a rank to what it does."""

    def __init__(self, children, address):
        self.children, self.address = children, address

    def call(self, *calls):
        """Let ranks act at the same time; return what each returned or raised, in order."""
        for rank, (name, arguments, options) in calls:
            self.children[rank].send((name, arguments, options))
        found = []
        for rank, (name, _, _) in calls:
            told, result, _ = self.children[rank].told(2 * LIMIT)
            assert told == name
            found.append(result)
        return found

    def all(self, name, *arguments, **options):
        return self.call(*((rank, (name, arguments, options)) for rank in range(3)))

    def make(self, **by_rank):
        """Make publishers; `rank1` has the options of rank 1."""
        calls = []
        for rank in range(3):
            options = {"address": self.address, **by_rank.get(f"rank{rank}", {})}
            calls.append((rank, ("make", (), options)))
        return self.call(*calls)

    def made(self, **by_rank):
        assert self.make(**by_rank) == [None] * 3


def act(rank, name, *arguments, **options):
    return rank, (name, arguments, options)


@pytest.fixture(scope="module")
def children():
    made = [Child(source_rank, "", rank, {"timeout_seconds": LIMIT}) for rank in range(3)]
    yield made
    for each in made:
        each.__exit__()


@pytest.fixture
def ranks(children, address):
    found = Ranks(children, address)
    yield found
    found.all("close")


@pytest.fixture
def replica(ranks, address):
    ranks.made()
    model = weights(99, NBYTES)
    with fw.Replica(model, address, name="engine") as made:
        made.model = model
        yield made


def test_ranks_that_are_in_step_publish(ranks, replica, threads):
    for version in (1, np.int64(2)):  # a trainer may count its steps with numpy
        update = threads.submit(replica.update, version, timeout_seconds=LIMIT)
        assert ranks.all("publish", version, num_replicas=1) == [(version, [])] * 3
        assert update.result(LIMIT).version == version
        assert holds_whole(replica.model, version)


def test_a_rank_that_could_not_say_that_it_is_ready_is_in_step_again(address, threads, monkeypatch):
    def full(*args):
        raise MemoryError

    def make(rank):
        model, options = {f"{rank}": np.zeros(3)}, {"timeout_seconds": LIMIT}
        return fw.Publisher(model, address, rank=rank, num_ranks=2, **options)

    leader, follower = threads.map(make, range(2))
    with leader, follower:
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(ReplicaConnection, "send", full)
            follower.publish(1)
        reports = threads.map(lambda each: each.publish(2), (leader, follower))
        assert [each.version for each in reports] == [2, 2]


def sharded(rows, dtype="f4", shape=(6, 2)):
    first, last = rows
    return {"w": fw.Sharded(np.zeros((last - first, 2), dtype), shape, (first, 0))}


class Marked(np.ndarray):
    """A tensor that is marked as a part of one rank, as those of tensor parallel layers are."""

    tensor_model_parallel = True


REFUSED = {
    "dtype": ({"rank1": {"model": sharded((2, 4), "f8")}}, "'w' is .*rank 0.*rank 1"),
    "shape": ({"rank2": {"model": sharded((4, 6), shape=(7, 2))}}, "'w' .*rank 0.*rank 2"),
    "missing": ({"rank1": {"model": {}}}, "8 of the 12.*'w'"),
    "twice": ({"rank1": {"model": sharded((1, 4))}}, "'w' .*twice.*rank 1.*rank 0"),
    "tokens": ({"rank2": {"token": "a"}}, "rank 0 .*token=None.*rank 2 .*token="),
    "options": ({"rank2": {"hold": True}}, "rank 0 .*hold=False.* rank 2 .*hold=True"),
    "undeclared": ({"rank2": {"model": {"w": np.zeros(3).view(Marked)}}}, "part of one rank.*'w'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_are_told_why_their_parts_do_not_fit(ranks, case):
    special, text = REFUSED[case]
    thirds = {f"rank{rank}": {"model": sharded((2 * rank, 2 * rank + 2))} for rank in range(3)}
    by_rank = {name: {**each, **special.get(name, {})} for name, each in thirds.items()}
    for result in ranks.make(**by_rank):
        with pytest.raises(FlyweightError, match=text):
            raise result
    ranks.made()  # the address is free


def test_a_rank_that_makes_no_publisher_is_named(ranks):
    for seconds in PATIENCE:
        options = {"address": ranks.address, "timeout_seconds": seconds}
        found = ranks.call(*(act(rank, "make", **options) for rank in (0, 2)))
        if all("[1]" in str(each) for each in found):
            break
    for each in found:
        assert isinstance(each, TransferTimeout)
        assert "[1]" in str(each)
    ranks.made()


def test_two_processes_that_are_the_same_rank_are_told_so(ranks):
    options = {"address": ranks.address, "rank": 1, "timeout_seconds": SECONDS}
    found = ranks.call(*((child, ("make", (), options)) for child in (1, 2)))
    assert all(isinstance(each, TransferTimeout) for each in found), found
    assert sum("another process made it as rank 1" in str(each) for each in found) == 1


def test_another_publisher_at_the_address_is_told_to_all(ranks, address):
    with fw.Publisher(weights(1), address):
        for result in ranks.make():
            with pytest.raises(FlyweightError, match="another publisher"):
                raise result
    ranks.made()


def test_a_publisher_alone_with_a_part_gets_the_recipe(address):
    with pytest.raises(PlanError, match="'w'.* on every rank"):
        fw.Publisher(sharded((0, 2)), address)


def test_parameters_that_zero_3_has_emptied_are_refused_with_the_recipe(address):
    emptied = np.zeros(0, "f4").view(Marked)
    emptied.ds_shape = (4, 4)
    with pytest.raises(PlanError, match="'w'.*GatheredParameters"):
        fw.Publisher({"w": emptied, "b": np.zeros(3, "f4")}, address)


def test_ranks_that_publish_different_versions_are_all_told(ranks, replica, threads):
    for late, others in ((1, 2), (2, 1)):
        found = ranks.call(*(act(rank, "publish", others if rank else late) for rank in (0, 1, 2)))
        for each in found:
            assert isinstance(each, VersionError)
            assert f"{late} on rank 0" in str(each)
    update = threads.submit(replica.update, timeout_seconds=LIMIT)
    assert ranks.all("publish", 4, num_replicas=1) == [(4, [])] * 3
    assert update.result(LIMIT).version == 4
    assert holds_whole(replica.model, 4)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_gets_the_error_that_the_others_got_and_is_in_step_again(
    ranks, replica, threads, late
):
    others = [rank for rank in range(3) if rank != late]
    texts = [*[f"rank {late}"] * 2, f"rank {late}" if late else "source rank"]
    for version, seconds in enumerate(PATIENCE, start=1):
        options = {"timeout_seconds": seconds}
        found = ranks.call(*(act(rank, "publish", version, **options) for rank in others))
        found += ranks.call(act(late, "publish", version, **options))
        if all(text in str(each) for text, each in zip(texts, found, strict=True)):
            break
    for text, each in zip(texts, found, strict=True):
        assert isinstance(each, TransferTimeout)
        assert text in str(each)
    update = threads.submit(replica.update, timeout_seconds=LIMIT)
    assert ranks.all("publish", 4, num_replicas=1) == [(4, [])] * 3
    assert update.result(LIMIT).version == 4
    assert holds_whole(replica.model, 4)


def test_a_rank_that_stops_once_it_is_ready_fails_a_publish_that_no_replica_waits_for(ranks):
    ranks.made()
    for version, seconds in enumerate((0.1, 1, 10, 30), start=1):  # for rank 2 to say it is ready
        ranks.children[2].send(("publish", (version,), {}))
        time.sleep(seconds)
        ranks.children[2].stop()
        try:
            options = {"timeout_seconds": max(0.5, seconds)}
            found = ranks.call(*(act(rank, "publish", version, **options) for rank in (0, 1)))
        finally:
            ranks.children[2].go_on()
        _, error, _ = ranks.children[2].told()
        for each in (*found, error):
            assert isinstance(each, TransferTimeout)
        if all("confirmed" in str(each) and "rank 2" in str(each) for each in found):
            break
    for each in (*found, error):
        assert "confirmed" in str(each)
        assert "rank 2" in str(each)
    assert ranks.all("publish", 5) == [(5, [])] * 3


def test_all_ranks_are_told_that_no_replica_came(ranks, replica):
    options = {rank: {"timeout_seconds": 3 if rank else 6} for rank in range(3)}
    acts = (act(rank, "publish", 1, num_replicas=1, **each) for rank, each in options.items())
    for each in ranks.call(*acts):
        assert isinstance(each, TransferTimeout)
        assert "0 of 1 replicas" in str(each)
        assert "1 are connected" in str(each)


def test_a_rank_two_versions_late_is_in_step_again(ranks, replica):
    for last, seconds in zip((2, 4, 6), PATIENCE, strict=True):
        versions, options = (last - 1, last), {"timeout_seconds": seconds / 2}
        for version in versions:
            ranks.call(*(act(rank, "publish", version, **options) for rank in (0, 2)))
        errors = [ranks.call(act(1, "publish", version))[0] for version in versions]
        if all("rank 1" in str(each) for each in errors):
            break
    for error in errors:
        assert isinstance(error, TransferTimeout)
        assert f"publish({last})" in str(error)
        assert "rank 1" in str(error)
    assert ranks.all("publish", 7) == [(7, [])] * 3


def test_a_publish_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(ranks, replica):
    ranks.call(act(1, "change_shape"))
    found = ranks.all("publish", 1)
    for each in found:
        assert isinstance(each, PlanError), found
        assert "other tensors" in str(each)
    assert ["source rank 1" in str(each) for each in found] == [True, False, True]
    ranks.call(act(1, "replace", 0))
    assert ranks.all("publish", 1) == [(1, [])] * 3


@pytest.mark.parametrize("hold", [False, True])
def test_tensors_that_one_rank_replaces_are_read_and_the_old_ones_freed(
    ranks, address, threads, hold
):
    ranks.made(**{f"rank{rank}": {"hold": hold} for rank in range(3)})
    model, sizes = weights(99, NBYTES), []
    with fw.Replica(model, address) as replica:
        for version in range(1, 7):
            ranks.call(act(2, "replace", 50))
            update = threads.submit(replica.update, version, timeout_seconds=LIMIT)
            assert ranks.all("publish", version, num_replicas=1) == [(version, [])] * 3
            assert update.result(LIMIT).version == version
            assert holds_whole(model, version)
            sizes.append(ranks.all("memory"))
    assert sizes[-1] == sizes[1]


@pytest.mark.parametrize("options", [{}, {"hold": True}, {"transport": "host"}], ids=str)
def test_every_rank_may_change_its_weights_once_they_are_copied(ranks, address, threads, options):
    ranks.made(**{f"rank{rank}": options for rank in range(3)})
    model = weights(99, NBYTES)
    with fw.Replica(model, address) as replica:
        for version in (1, 2, 3):
            update = threads.submit(replica.update, version, timeout_seconds=LIMIT)
            assert ranks.all("lease", version, num_replicas=1) == [version] * 3
            assert update.result(LIMIT).version == version
            assert holds_whole(model, version)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_close_in_any_order(ranks, replica, order):
    assert ranks.all("publish", 1) == [(1, [])] * 3
    first, *others = order
    assert ranks.call(act(first, "close")) == [None]
    for rank in others:
        (error,) = ranks.call(act(rank, "publish", 2))
        assert isinstance(error, FlyweightError)
        assert f"source rank {first}" in str(error)
    for rank in others:
        assert ranks.call(act(rank, "close")) == [None]
    ranks.made()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_closed_while_it_publishes_ends(ranks, replica, rank):
    (error,) = ranks.call(act(rank, "close_amid", 1, 0.2))
    assert isinstance(error, FlyweightError)
    assert "closed" in str(error)
    for other in {0, 1, 2} - {rank}:
        (error,) = ranks.call(act(other, "publish", 1))
        assert f"source rank {rank}" in str(error), error


def test_a_fork_of_a_rank_disturbs_nobody(ranks, replica, threads):
    assert ranks.all("publish", 1) == [(1, [])] * 3
    for error in ranks.all("fork", 2):
        assert "child" in error
    update = threads.submit(replica.update, timeout_seconds=LIMIT)
    assert ranks.all("publish", 2, num_replicas=1) == [(2, [])] * 3
    assert update.result(LIMIT).version == 2
    assert holds_whole(replica.model, 2)


def test_a_replica_that_asks_between_two_publishes_gets_the_snapshot(ranks, address, tmp_path):
    fw.save(weights(1, NBYTES), tmp_path / "run", version=1)
    ranks.made(**{f"rank{rank}": {"store": str(tmp_path / "run")} for rank in range(3)})
    model = weights(99, NBYTES)
    with fw.Replica(model, address) as replica:
        assert replica.update(timeout_seconds=LIMIT).version == 1
        assert holds_whole(model, 1)


def test_replicas_need_the_token_of_the_ranks(ranks, address, threads):
    ranks.made(**{f"rank{rank}": {"token": "secret"} for rank in range(3)})
    model = weights(99, NBYTES)
    with pytest.raises(PeerRefused, match="token"):
        fw.Replica(model, address, token="other").update(timeout_seconds=LIMIT)
    with fw.Replica(model, address, token="secret") as replica:
        update = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert ranks.all("publish", 1, num_replicas=1) == [(1, [])] * 3
        assert update.result(LIMIT).version == 1


def test_a_second_job_at_the_address_is_refused_and_the_first_goes_on(ranks, replica, threads):
    with ExitStack() as stack:
        options = {"timeout_seconds": LIMIT}
        children = [stack.enter_context(Child(source_rank, "", rank, options)) for rank in range(3)]
        for result in Ranks(children, ranks.address).make():
            with pytest.raises(FlyweightError, match="another publisher"):
                raise result
    update = threads.submit(replica.update, timeout_seconds=LIMIT)
    assert ranks.all("publish", 1, num_replicas=1) == [(1, [])] * 3
    assert update.result(LIMIT).version == 1
    assert holds_whole(replica.model, 1)


MAKING = {
    0: ["publisher.holding_of", "publisher.blocks_together", "publisher.Leader", "leader.FdServer"],
    1: ["publisher.holding_of", "publisher.Follower", "follower.FdServer", "follower.BucketSlots"],
}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_as_publishers_are_made_is_named(address, victim):
    for step in MAKING[victim]:
        with ExitStack() as stack:
            options = {"timeout_seconds": LIMIT}
            children = [
                stack.enter_context(Child(source_rank, "", rank, options)) for rank in range(3)
            ]
            ranks = Ranks(children, address)
            children[victim].send(("die_at", (step,), {}))
            children[victim].told()
            for rank in range(3):
                children[rank].send(("make", (), {"address": address}))
            for rank in {0, 1, 2} - {victim}:
                _, error, _ = children[rank].told(2 * LIMIT)
                assert isinstance(error, FlyweightError), (step, error)
                assert f"rank {victim}" in str(error), (step, error)
            children[victim] = stack.enter_context(Child(source_rank, "", victim, options))
            ranks.made()
            assert ranks.all("publish", 1) == [(1, [])] * 3
            ranks.all("close")
