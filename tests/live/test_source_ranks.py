"""Several trainer ranks publish one model together; a replica reads from all of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import PeerLost
from flyweight.live.source_rank import REMEMBERED_SHARES

WHOLE = np.random.default_rng(3).random((8, 6))


def publishers(models, address, **options):
    """Make one publisher for each rank; each is made in a thread, since all wait for all."""
    options = {"timeout_seconds": LIMIT, **options}

    def make(rank):
        return fw.Publisher(models[rank], address, rank=rank, num_ranks=len(models), **options)

    with ThreadPoolExecutor(len(models)) as pool:
        made = [pool.submit(make, rank) for rank in range(len(models))]
        return [each.result(2 * LIMIT) for each in made]


def published(pool, ranks, version, **options):
    futures = [pool.submit(each.publish, version, **options) for each in ranks]
    return [each.result(2 * LIMIT) for each in futures]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


@contextmanager
def closing_all(ranks):
    try:
        yield
    finally:
        for each in ranks:
            each.close()


def halves(whole=WHOLE):
    return [
        {"w": fw.Sharded(whole[:4].copy(), whole.shape, (0, 0)), "only_0": np.arange(5.0)},
        {"w": fw.Sharded(whole[4:].copy(), whole.shape, (4, 0)), "only_1": np.arange(7.0)},
    ]


def engine():
    return {"w": np.zeros_like(WHOLE), "only_0": np.zeros(5), "only_1": np.zeros(7)}


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 1}, {"hold": True}], ids=str
)
def test_a_replica_reads_from_all_ranks(address, pool, options):
    models, target = halves(), engine()
    ranks = publishers(models, address, **options)
    with closing_all(ranks), fw.Replica(target, address) as replica:
        for version in (1, 2, 3):
            for model in models:
                model["w"].tensor[:] += version
            update = pool.submit(replica.update, timeout_seconds=LIMIT)
            reports = published(pool, ranks, version, num_replicas=1)
            assert update.result(LIMIT).version == version
            assert [each.version for each in reports] == [version, version]
            assert reports[0].nbytes == reports[1].nbytes > 0
            assert reports[1].failed == ()
            whole = np.concatenate([model["w"].tensor for model in models])
            assert target["w"].tobytes() == whole.tobytes()
        assert target["only_0"].tolist() == list(range(5))
        assert target["only_1"].tolist() == list(range(7))
        assert [each.version for each in ranks] == [3, 3]


def test_a_lease_of_a_rank_that_holds_a_copy_ends_with_the_copy(address, pool):
    models, is_free = halves(), threading.Event()
    ranks = publishers(models, address, hold=True)
    try:
        with fw.Replica(engine(), address) as replica:
            update = pool.submit(
                replica.update, timeout_seconds=LIMIT, before=lambda _: is_free.wait(LIMIT)
            )
            until(lambda: ranks[0].waiting)
            futures = [pool.submit(each.publish, 1, background=True) for each in ranks]
            leases = [each.result(LIMIT) for each in futures]
            for lease in leases:
                lease.wait_copied(LIMIT)
            assert not leases[1].is_done
            is_free.set()
            assert update.result(LIMIT).version == 1
            assert [lease.wait(LIMIT).failed for lease in leases] == [(), ()]
    finally:
        is_free.set()
        for each in ranks:
            each.close()


def test_all_ranks_hear_that_one_is_lost(address, pool):
    whole = np.arange(12.0).reshape(3, 4)
    models = [{"w": fw.Sharded(whole[n : n + 1].copy(), (3, 4), (n, 0))} for n in range(3)]
    ranks = publishers(models, address, timeout_seconds=LIMIT)
    try:
        assert [each.version for each in published(pool, ranks, 1)] == [1, 1, 1]
        ranks[2].close()
        for each in ranks[:2]:
            with pytest.raises(PeerLost, match="source rank 2"):
                pool.submit(each.publish, 2).result(2 * LIMIT)
    finally:
        for each in ranks:
            each.close()


def test_ranks_with_the_same_tensors_share_the_load(address, pool):
    """Both ranks are read, about half of the bytes from each; equal bytes alone would not tell."""
    names = [f"w{n}" for n in range(8)]
    models = [{name: np.arange(1000.0) for name in names} for _ in range(2)]
    ranks = publishers(models, address, transport="host", should_verify=False)
    target = {name: np.zeros(1000) for name in names}
    for each in models[1].values():
        each[:] = -1  # nobody checks that both are the same, so this shows which rank is read
    with closing_all(ranks), fw.Replica(target, address) as replica:
        update = pool.submit(replica.update, timeout_seconds=LIMIT)
        published(pool, ranks, 1, num_replicas=1)
        assert update.result(LIMIT).version == 1
    from_rank_1 = sum((each == -1).all() for each in target.values())
    assert 3 <= from_rank_1 <= 5
    assert all((each == -1).all() or (each == models[0]["w0"]).all() for each in target.values())


def test_more_layouts_of_replicas_than_ranks_remember(address, pool):
    """Layouts that come first in a round must not push out those that come later in it."""
    num_layouts = REMEMBERED_SHARES + 6
    whole = np.arange(2.0 * num_layouts).reshape(num_layouts, 2)
    half = num_layouts // 2
    models = [
        {"w": fw.Sharded(whole[:half].copy(), whole.shape, (0, 0))},
        {"w": fw.Sharded(whole[half:].copy(), whole.shape, (half, 0)), "x": np.ones(num_layouts)},
    ]
    ranks = publishers(models, address)
    with closing_all(ranks), ExitStack() as stack:
        engines = []
        for rows in range(1, num_layouts + 1):
            part = np.zeros(rows)
            target = {"x": fw.Sharded(part, (num_layouts,), (0,))}
            replica = fw.Replica(target, address, name=f"{rows}", extra="report")
            engines.append((part, stack.enter_context(replica)))
        threads = stack.enter_context(ThreadPoolExecutor(num_layouts))
        for version in (1, 2, 3):
            models[1]["x"][:] = np.arange(num_layouts) + version
            if version == 2:  # the next round begins with a layout that is not remembered
                engines.append(engines.pop(0))
            updates = [threads.submit(r.update, timeout_seconds=LIMIT) for _, r in engines]
            reports = published(pool, ranks, version, num_replicas=num_layouts)
            assert [each.failed for each in reports] == [(), ()]
            assert {each.result(LIMIT).version for each in updates} == {version}
            for part, _ in engines:
                assert part.tolist() == models[1]["x"][: len(part)].tolist()
