"""An engine of two ranks, in threads of one process."""

import numpy as np

import flyweight as fw
from child_processes import LIMIT

SECONDS = LIMIT
LAYOUT = fw.ModelLayout.from_json(
    '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"0": "tp"}}]}'
)
WHOLE = np.arange(24.0).reshape(6, 4)


class Engine:
    """Two ranks of one engine, in one process."""

    def __init__(self, address, name="engine"):
        self._address, self._name = address, name
        self.halves = [{"w": np.zeros((3, 4))} for _ in range(2)]
        self.ranks = [self._replica(rank) for rank in range(2)]

    def _replica(self, rank):
        return fw.Replica(
            self.halves[rank], self._address, name=self._name, layout=LAYOUT, rank=rank, num_ranks=2
        )

    def restart(self, rank):
        """Replace a rank by one that holds no version."""
        self.ranks[rank].close()
        self.halves[rank]["w"] = np.zeros((3, 4))
        self.ranks[rank] = self._replica(rank)

    def update(self, pool, **options):
        options = {"timeout_seconds": SECONDS, **options}
        return [pool.submit(rank.update, **options) for rank in self.ranks]

    @property
    def weights(self):
        return np.concatenate([half["w"] for half in self.halves])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.ranks:
            each.close()


def states(engine):
    return [(each.state, each.version) for each in engine.ranks]


def published(publisher, engine, pool, version, **options):
    """Publish a version to an engine; return the report, and what its ranks return or raise."""
    updates = engine.update(pool, **options)
    report = publisher.publish(version, num_replicas=1, timeout_seconds=SECONDS)
    return report, [each.exception(SECONDS) or each.result() for each in updates]
