"""Several trainer ranks publish one model together; a replica reads from all of them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flyweight as fw

SECONDS = 10
WHOLE = np.random.default_rng(3).random((8, 6))


def publishers(models, address, **options):
    """Make one publisher for each rank; each is made in a thread, since all wait for all."""
    options = {"timeout_seconds": SECONDS, **options}

    def make(rank):
        return fw.Publisher(models[rank], address, rank=rank, num_ranks=len(models), **options)

    with ThreadPoolExecutor(len(models)) as pool:
        made = [pool.submit(make, rank) for rank in range(len(models))]
        return [each.result(2 * SECONDS) for each in made]


def published(pool, ranks, version, **options):
    futures = [pool.submit(each.publish, version, **options) for each in ranks]
    return [each.result(2 * SECONDS) for each in futures]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


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
    try:
        with fw.Replica(target, address) as replica:
            for version in (1, 2, 3):
                for model in models:
                    model["w"].tensor[:] += version
                update = pool.submit(replica.update, timeout_seconds=SECONDS)
                reports = published(pool, ranks, version, num_replicas=1)
                assert update.result(SECONDS).version == version
                assert [each.version for each in reports] == [version, version]
                assert reports[0].nbytes == reports[1].nbytes > 0
                assert reports[1].failed == ()
                whole = np.concatenate([model["w"].tensor for model in models])
                assert target["w"].tobytes() == whole.tobytes()
            assert target["only_0"].tolist() == list(range(5))
            assert target["only_1"].tolist() == list(range(7))
            assert [each.version for each in ranks] == [3, 3]
    finally:
        for each in ranks:
            each.close()
