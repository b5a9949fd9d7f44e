"""Metrics: how a fleet stands, for Prometheus. Read from the status cells at each scrape.

Rounds are counted by the ranks themselves, so a server that is started again goes on
counting where it was; operations are counted by the server that carried them out.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from flyweight.lifecycle.replica_status import ABSENT, RankStatus
from flyweight.lifecycle.states import State
from flyweight.server.fleet import Fleet

CONTENT_TYPE = CONTENT_TYPE_LATEST
_STATES = (*map(str, State), ABSENT)


class FleetCollector(Collector):
    """Tells a fleet's metrics at the moment they are asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        replicas = self._fleet.replicas()
        state = _gauge("state", "1 for the state that the replica is in", "state")
        version = _gauge("version", "The version that all ranks of the replica hold")
        operations = CounterMetricFamily(
            "flyweight_operations",
            "Operations that this server carried out, by how they ended",
            labels=("replica", "signal", "ending"),
        )
        for replica in replicas:
            for each in _STATES:
                state.add_metric((replica.name, each), float(replica.state == each))
            if replica.version is not None:
                version.add_metric((replica.name,), replica.version)
        for labels, count in sorted(self._fleet.endings.items()):
            operations.add_metric(labels, count)
        yield from (state, version, operations)
        ranks = [(replica.name, rank) for replica in replicas for rank in replica.ranks]
        yield from self._rank_metrics(ranks)

    def _rank_metrics(self, ranks: list[tuple[str, RankStatus]]) -> Iterator[Metric]:
        up = _gauge("rank_up", "1 while the rank's process lives", "rank")
        rounds = CounterMetricFamily(
            "flyweight_rounds", "Rounds that the rank has finished", labels=("replica", "rank")
        )
        back = CounterMetricFamily(
            "flyweight_went_back",
            "Versions the rank took that were older than the one before",
            labels=("replica", "rank"),
        )
        running = _gauge("requests_running", "Requests that run on the rank", "rank")
        percent = _gauge("round_progress_ratio", "How much of a round has come, 0 to 1", "rank")
        nbytes = _gauge("round_bytes", "Bytes that the rank's last round moved", "rank")
        seconds = _gauge("round_seconds", "How long the rank's last round took", "rank")
        pause = _gauge("pause_seconds", "How long requests stood still for the last round", "rank")
        for name, rank in ranks:
            labels = (name, str(rank.rank))
            up.add_metric(labels, float(rank.is_alive))
            if rank.is_alive:
                rounds.add_metric(labels, rank.num_rounds)
                back.add_metric(labels, rank.num_went_back)
                running.add_metric(labels, rank.num_running)
                percent.add_metric(labels, rank.percent / 100)
            if rank.is_alive and rank.num_rounds:
                nbytes.add_metric(labels, rank.nbytes)
                seconds.add_metric(labels, rank.round_seconds)
                pause.add_metric(labels, rank.pause_seconds)
        yield from (up, rounds, back, running, percent, nbytes, seconds, pause)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"flyweight_{name}", text, labels=("replica", *labels))


class FleetMetrics:
    """A fleet's metrics as text, apart from whatever else this process may count."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(FleetCollector(fleet))

    def text(self) -> bytes:
        return generate_latest(self._registry)
