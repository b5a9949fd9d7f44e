"""An engine that is taken to an older version than it had: allowed, and never silent."""

import logging

import pytest

import flyweight as fw
from child_processes import LIMIT, until
from control_site import serving
from flyweight.events import listening
from flyweight.lifecycle.control import Control
from versioned_models import assign, holds, weights


@pytest.fixture
def train(address):
    """A trainer's life: publishes versions one after another, and is gone."""

    def train(*versions, num_replicas=1):
        model = weights(0)
        with fw.Publisher(model, address) as publisher:
            for version in versions:
                assign(model, version)
                publisher.publish(version, num_replicas=num_replicas, timeout_seconds=LIMIT)

    return train


def test_a_replica_says_that_it_went_back(address, train, threads, caplog):
    events = []
    model = weights(0)
    with fw.Replica(model, address, name="engine") as replica, listening(events.append):
        reports = replica.follow(timeout_seconds=LIMIT)
        for life in ((72, 73), (1, 2)):
            training = threads.submit(train, *life)
            assert [next(reports).version for _ in life] == list(life)
            training.result(LIMIT)
    assert holds(model, 2)
    (back,) = (each.fields for each in events if each.kind == "update.went_back")
    assert (back["name"], back["before"], back["version"]) == ("engine", 73, 1)
    (line,) = (each for each in caplog.records if each.name == "flyweight.live")
    assert line.levelno == logging.WARNING
    assert line.getMessage() == "engine went back from version 73 to 1"


def test_a_restarted_trainer_shows_in_status_and_metrics(address, train, tmp_path):
    """The engine follows by itself, so nobody asked for the older version."""
    model, cell = weights(0), tmp_path / "engine.cell"
    with (
        fw.Replica(model, address) as replica,
        fw.Worker(fw.ModelEngine(model), replica, cell),
        serving([Control(cell, 1, name="engine")]) as site,
    ):

        def shown():
            (rank,) = site.replica()["ranks"]
            metrics = site.raw("GET", "/metrics")[1].decode().splitlines()
            total = next(each for each in metrics if each.startswith("flyweight_went_back_total{"))
            return rank["version"], rank["went_back_from"], float(total.split()[-1])

        train(73)
        until(lambda: shown() == (73, None, 0.0))
        train(2)
        until(lambda: shown() == (2, 73, 1.0))
        health = site.ask("GET", "/health")[1]["result"]
        assert health == "engine: serving version 2, back from 73"
        train(3)
        until(lambda: shown() == (3, None, 1.0))


def test_an_engine_that_was_started_again_knows_what_it_served(address, train, tmp_path):
    cell = tmp_path / "engine.cell"
    with Control(cell) as control:
        for version, before in ((73, None), (2, 73)):
            model = weights(0)
            with (
                fw.Replica(model, address) as replica,
                fw.Worker(fw.ModelEngine(model), replica, cell),
            ):
                train(version)
                until(lambda: control.status().version == version)  # noqa: B023
                assert control.status().ranks[0].went_back_from == before
