"""Engines and servers that are killed and started again, and several replicas at one server."""

import http.client
import json
import signal
import time

import pytest

from child_processes import LIMIT, Child, Command, until
from commands import COMMAND
from control_site import TOKEN, Engine, Site, Trainer, serving
from flyweight.lifecycle.control import Control


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer that has published its versions, with its directory and address."""
    place = tmp_path_factory.mktemp("control")
    with Trainer(f"unix:{place}/policy", place / "run") as trainer:
        yield trainer


def test_a_killed_engine_is_reported_and_can_come_back(trained):
    """C24, C25: no call waits for a dead process, and nothing has to be cleaned up."""
    cell = trained.place / "mortal.cell"
    with serving([Control(cell, 1, name="mortal")]) as site:
        code, told = site.ask("GET", "/health")
        assert (code, told["result"]) == (
            503,
            "mortal: absent: none of its 1 ranks has started yet",
        )
        assert site.ask("POST", "/v1/pause")[0] == 503
        assert site.ask("GET", "/update_model_weight")[0] == 404
        with Engine(trained.address, cell, store=trained.store, should_follow=False) as engine:
            site.good("POST", "/v1/update_weights")
            engine.kill(signal.SIGKILL)
            until(lambda: site.ask("GET", "/health")[0] == 503)
            code, told = site.ask("POST", "/v1/pause")
            assert (code, told["error"]) == (503, "PeerLost")
            assert f"process {engine.pid} died" in told["result"]
            until(lambda: site.good("GET", "/status")["faults"])
            assert "died" in site.good("GET", "/status")["faults"][0]["reason"]
            assert site.replica()["version"] is None
        with Engine(trained.address, cell, should_follow=True):
            until(lambda: site.state == "SERVING")
            assert site.ask("GET", "/health")[1]["result"] == "mortal: serving version 3"


def test_killing_an_engine_ends_its_operation(trained, threads):
    cell = trained.place / "victim.cell"
    with (
        Engine(trained.address, cell, store=trained.store, should_follow=False) as engine,
        serving([Control(cell, 1, name="victim")]) as site,
    ):
        site.good("POST", "/v1/update_weights")
        engine.tell("request")
        pausing = threads.submit(site.ask, "POST", "/v1/pause")
        until(lambda: site.state == "PAUSING")
        engine.kill(signal.SIGKILL)
        code, told = pausing.result(LIMIT)
        assert (code, told["error"]) == (503, "PeerLost")
        assert site.replica()["operation"] is None


class Served(Command):
    """`flyweight serve` as a user runs it."""

    def __init__(self, place, cell, port=0):
        words = ["--replica", f"engine={cell}", "--port", port, "--run", place / "tokens"]
        super().__init__(*COMMAND, "serve", "--json", *words)
        told = json.loads(self.line())
        with open(told["token_file"]) as file:
            self.site = Site(told["address"], file.read())


def test_a_server_that_replaces_a_killed_one_reports_the_same_state(trained, threads):
    """C25: the engine goes on, and the next server waits for the operation it works on."""
    cell = trained.place / "kept.cell"
    with Engine(trained.address, cell, store=trained.store, should_follow=False) as engine:
        with Served(trained.place, cell) as served:
            served.site.good("POST", "/v1/update_weights")
            engine.tell("request")
            asked = threads.submit(served.site.ask, "POST", "/v1/pause")
            until(lambda: served.site.state == "PAUSING")
            port = served.site.address.rpartition(":")[2]
            served.kill()
            with pytest.raises((OSError, http.client.HTTPException)):
                asked.result(LIMIT)
        with Served(trained.place, cell, port) as served:
            told = served.site.replica()
            assert (told["state"], told["operation"]["id"]) == ("PAUSING", "pause-2")
            code, busy = served.site.ask("POST", "/v1/resume")
            assert (code, busy["result"]) == (409, {"operation": "pause-2"})
            engine.tell("finish")
            until(lambda: served.site.state == "PAUSED")
            until(lambda: served.site.replica()["operation"] is None)
            until(lambda: served.site.good("GET", "/status")["operations"])
            assert served.site.good("GET", "/status")["operations"][0]["id"] == "pause-2"
            (last,) = served.site.good("GET", "/status")["rounds"]
            assert (last["version"], last["time"]) == (3, None)
            assert served.site.good("POST", "/v1/resume")["replicas"][0]["state"] == "SERVING"


def served(cell, pipe):
    with serving([Control(cell, 1, name="engine")]) as site:
        pipe.send(("at", site.address))
        pipe.recv()


@pytest.mark.parametrize(
    ("path", "state"),
    [
        (None, "SERVING"),
        ("/v1/pause", "PAUSED"),
        ("/v1/sleep", "CLEARED"),
        ("/v1/update_weights?version=2", "SERVING"),
    ],
)
def test_an_engine_finishes_what_a_killed_server_requested(trained, threads, tmp_path, path, state):
    """C25"""
    cell = tmp_path / "engine.cell"
    with Engine(trained.address, cell, store=trained.store, should_follow=False) as engine:
        with Child(served, cell) as first:
            site = Site(first.told()[1], TOKEN)
            site.good("POST", "/v1/update_weights")
            engine.tell("request")
            if path is not None:
                threads.submit(site.ask, "POST", path)
                until(lambda: site.state == "PAUSING")
            first.kill()
        with serving([Control(cell, 1, name="engine")]) as site:
            told = site.replica()
            assert told["version"] == 3
            assert told["state"] == ("SERVING" if path is None else "PAUSING")
            assert (told["operation"] is None) == (path is None)
            engine.tell("finish")
            until(lambda: site.replica()["operation"] is None)
            assert site.state == state


def test_a_closing_server_answers_its_callers_and_the_engine_goes_on(trained, threads):
    cell = trained.place / "parted.cell"
    with Engine(trained.address, cell, store=trained.store, should_follow=False) as engine:
        with serving([Control(cell, 1, name="engine")]) as site:
            site.good("POST", "/v1/update_weights")
            engine.tell("request")
            asked = threads.submit(site.ask, "POST", "/v1/pause")
            until(lambda: site.state == "PAUSING")
            with site.events() as told:
                assert told() is not None
                site.fleet.end_waits()
                while told() is not None:
                    pass
            code, answer = asked.result(LIMIT)
            assert (code, answer["error"]) == (503, "PeerLost")
            assert "goes on" in answer["result"]
        engine.tell("finish")
        with Control(cell, 1) as control:
            until(lambda: control.status().state == "PAUSED")


def test_several_replicas_are_controlled_in_parallel(trained, threads):
    cells = [trained.place / f"pair-{n}.cell" for n in range(2)]
    controls = [Control(cell, 1, name=cell.stem) for cell in cells]
    with (
        Engine(trained.address, cells[0], should_follow=False) as one,
        Engine(trained.address, cells[1], should_follow=False),
        serving(controls) as pair,
    ):
        both = pair.good("POST", "/v1/update_weights")["replicas"]
        assert [(each["replica"], each["state"]) for each in both] == [
            ("pair-0", "SERVING"),
            ("pair-1", "SERVING"),
        ]
        pair.good("POST", "/v1/pause?replica=pair-1")
        assert [pair.replica(f"pair-{n}")["state"] for n in range(2)] == ["SERVING", "PAUSED"]
        one.tell("request")
        pausing = threads.submit(pair.ask, "POST", "/v1/pause?replica=pair-0")
        until(lambda: pair.replica("pair-0")["operation"] is not None)
        code, told = pair.ask("POST", "/v1/resume")
        assert (code, told["result"]) == (
            409,
            {"operation": pair.replica("pair-0")["operation"]["id"]},
        )
        assert pair.replica("pair-1")["state"] == "PAUSED"  # no request was sent to it
        assert pair.ask("POST", "/v1/resume?replica=pair-1")[0] == 200
        one.tell("finish")
        assert pausing.result(LIMIT)[0] == 200


def test_an_absent_replica_does_not_hold_up_the_others(trained):
    cells = [trained.place / "there.cell", trained.place / "nowhere.cell"]
    controls = [Control(cell, 1, name=cell.stem) for cell in cells]
    with Engine(trained.address, cells[0], should_follow=False), serving(controls) as site:
        code, told = site.ask("POST", "/v1/update_weights")
        assert (code, told["error"]) == (503, "PeerLost")
        assert "nowhere" in told["result"]
        assert [each["ending"] for each in told["replicas"]] == ["done", "failed"]
        assert site.replica("there")["state"] == "SERVING"
        code, told = site.ask("GET", "/health")
        assert code == 503
        assert told["replicas"]["there"] == "serving version 3"


def test_rounds_without_a_request_are_in_the_journal(trained, tmp_path):
    address, began = f"unix:{tmp_path}/policy", time.time()
    with (
        Trainer(address, tmp_path / "run") as trainer,
        Engine(address, tmp_path / "following.cell"),
        serving([Control(tmp_path / "following.cell", 1)]) as site,
    ):
        until(lambda: site.state == "SERVING")
        for version in (4, 5):
            trainer.publish(version)
            until(lambda version=version: site.replica()["version"] == version)

        def last():
            return site.good("GET", "/status")["rounds"][-1]

        until(lambda: last()["version"] == 5 and last()["pause_seconds"] > 0)
        assert began <= last()["time"] <= time.time()
