"""Metrics: the state of a fleet for Prometheus, read from the status cells at each scrape.

The ranks count rounds themselves, so the counts survive a restart of the server. Operations are
counted by the server that carried them out.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flyweight.lifecycle.replica_status import ABSENT, RankStatus
from flyweight.lifecycle.states import State
from flyweight.server.fleet import Fleet

_STATES = (*map(str, State), ABSENT)


class FleetMetrics(Collector):
    """The metrics of one fleet, apart from everything else that this process may count."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        replicas = self._fleet.replicas()
        state = _gauge("state", "1 for the state that the replica is in", "state")
        version = _gauge("version", "The version that all ranks of the replica hold")
        operations = _counter(
            "operations", "Operations that this server carried out, by ending", "signal", "ending"
        )
        for replica in replicas:
            for each in _STATES:
                state.add_metric((replica.name, each), float(replica.state == each))
            if replica.version is not None:
                version.add_metric((replica.name,), replica.version)
        for labels, count in sorted(self._fleet.endings.items()):
            operations.add_metric(labels, count)
        yield from (state, version, operations)
        yield from _rank_metrics(
            [(replica.name, rank) for replica in replicas for rank in replica.ranks]
        )


def _rank_metrics(ranks: list[tuple[str, RankStatus]]) -> Iterator[Metric]:
    up = _gauge("rank_up", "1 while the rank's process is alive", "rank")
    rounds = _counter("rounds", "Rounds that the rank has finished", "rank")
    back = _counter("went_back", "Versions older than the one before that the rank took", "rank")
    running = _gauge("requests_running", "Inference requests that run on the rank", "rank")
    ratio = _gauge("round_progress_ratio", "Part of the round that has arrived, 0 to 1", "rank")
    nbytes = _gauge("round_bytes", "Bytes that the rank's last round moved", "rank")
    seconds = _gauge("round_seconds", "Duration of the rank's last round", "rank")
    pause = _gauge("pause_seconds", "How long the last round paused requests", "rank")
    for name, rank in ranks:
        labels = (name, str(rank.rank))
        up.add_metric(labels, float(rank.is_alive))
        if rank.is_alive:
            rounds.add_metric(labels, rank.num_rounds)
            back.add_metric(labels, rank.num_went_back)
            running.add_metric(labels, rank.num_running)
            ratio.add_metric(labels, rank.percent / 100)
        if rank.is_alive and rank.num_rounds:
            nbytes.add_metric(labels, rank.nbytes)
            seconds.add_metric(labels, rank.round_seconds)
            pause.add_metric(labels, rank.pause_seconds)
    yield from (up, rounds, back, running, ratio, nbytes, seconds, pause)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"flyweight_{name}", text, labels=("replica", *labels))


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"flyweight_{name}", text, labels=("replica", *labels))
