"""The control server over real HTTP, with a real engine in a process of its own."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlled import TOKEN, VERSIONS, Engine, Site, Trainer, frozen, serving
from flyweight.errors import StoreError
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.replica_status import RankStatus, ReplicaStatus
from flyweight.lifecycle.states import State
from flyweight.server import app as server_app
from flyweight.server import http as server_http
from flyweight.server import stream as server_stream
from flyweight.server.fleet import Fleet
from flyweight.server.standing import is_still, is_well, words
from live_models import Child, until

CONTROL_ROUTES = [
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("POST", "/v1/sleep"),
    ("POST", "/v1/wakeup"),
    ("POST", "/v1/update_weights"),
    ("POST", "/v1/abort_requests"),
    ("GET", "/clear_load_weight"),
    ("GET", "/update_model_weight"),
]
READ_ROUTES = [
    ("GET", each) for each in ("/status", "/versions", "/metrics", "/events", "/v1/is_paused")
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer with its versions, and where it is found."""
    place = tmp_path_factory.mktemp("control")
    address = f"unix:{place}/policy"
    with Trainer(address, place / "run") as trainer:
        trainer.place, trainer.address = place, address
        yield trainer


@pytest.fixture(scope="module")
def running(trained):
    """An engine that follows nobody by itself, and a control server for it."""
    cell = trained.place / "engine.cell"
    with (
        Engine(trained.address, cell, should_follow=False) as engine,
        serving([Control(cell, 1, name="engine")], str(trained.place / "run")) as site,
    ):
        site.engine = engine
        site.good("POST", "/v1/update_weights", {})
        yield site


@pytest.fixture
def site(running):
    """The server, with the engine serving and no request running."""
    running.engine.tell("finish")
    until(lambda: running.replica()["operation"] is None)
    told = running.replica()
    if told["ranks"][0]["absent"]:
        running.good("POST", "/v1/wakeup")
    running.good("POST", "/v1/resume")
    assert running.state == "SERVING"
    return running


@pytest.fixture
def draining(site, threads):
    """A call that waits for a request to finish; what it asks, and how it ends."""
    site.engine.tell("request")

    def start(method, path, body=None):
        future = threads.submit(site.ask, method, path, body)
        until(lambda: site.replica()["operation"] is not None)
        return future

    return start


# What stands there.


def test_status_tells_states_versions_and_rounds(site):
    told = site.good("GET", "/status")
    (replica,) = told["replicas"]
    (rank,) = replica["ranks"]
    assert (replica["name"], replica["state"], replica["version"]) == ("engine", "SERVING", 3)
    assert (rank["pid"], rank["is_alive"], rank["absent"]) == (site.engine.pid, True, [])
    last = told["rounds"][-1]
    assert last["nbytes"] == rank["nbytes"] > 0
    assert last["gb_per_second"] > 0
    assert last["pause_seconds"] > 0


def test_versions_lists_those_at_rest_and_those_that_are_held(site, trained):
    assert site.good("GET", "/versions") == {
        "store": str(trained.place / "run"),
        "versions": list(VERSIONS),
        "replicas": {"engine": 3},
    }


def told(*states):
    """A replica whose ranks are in these states, the worst first."""
    ranks = tuple(
        RankStatus(
            rank=n, pid=1, life=1, is_alive=True, state=state, absent=("weights",), version=7, pinned=None,
            step="", percent=43.2, num_running=2, reason="", nbytes=0, round_seconds=0,
            pause_seconds=0, num_rounds=0,
        )
        for n, state in enumerate(states)
    )  # fmt: skip
    return ReplicaStatus(
        name="e", state=states[0], version=7, percent=43.2, reason="", ranks=ranks, operation=None
    )


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([State.UPDATING], "updating, 43 %"),
        ([State.VERIFYING], "verifying, 43 %"),
        ([State.PAUSING], "pausing, 2 requests run"),
        ([State.CLEARED], "cleared, without weights"),
        ([State.PAUSED], "paused at version 7"),
        ([State.PAUSED, State.PAUSED], "paused at version 7"),
        ([State.PAUSED, State.SERVING], "paused on 1 of 2 ranks"),
        ([State.PAUSING, State.PAUSED], "pausing on 1 of 2 ranks, 4 requests run"),
        ([State.UPDATING, State.UPDATING, State.PAUSED], "updating on 2 of 3 ranks, 43 %"),
    ],
)
def test_health_is_well_in_every_step_of_a_round(states, text):
    """C26: an engine at work must not be killed by its own health check."""
    status = told(*states)
    assert is_well(status)
    assert words(status) == text


@pytest.mark.parametrize(
    ("states", "stands_still"),
    [
        ([State.PAUSED], True),
        ([State.UPDATING, State.PAUSED], True),
        ([State.PAUSED, State.SERVING], False),
        ([State.CLEARED, State.PAUSING], False),
        ([State.FAILED, State.PAUSED], False),
    ],
)
def test_a_replica_stands_still_only_if_every_rank_does(states, stands_still):
    """C32"""
    assert is_still(told(*states)) is stands_still


def test_health_answers_while_an_engine_stands_still(site):
    """C26"""
    assert site.ask("GET", "/health", token="")[1]["result"] == "engine: serving version 3"
    site.good("POST", "/v1/pause")
    code, told = site.ask("GET", "/health", token="")
    assert (code, told["replicas"]) == (200, {"engine": "paused at version 3"})


def test_metrics_are_what_the_status_says(site):
    def sample(name, **labels):
        families = text_string_to_metric_families(site.raw("GET", "/metrics")[1].decode())
        found = [
            s.value
            for f in families
            for s in f.samples
            if s.name == name and labels.items() <= s.labels.items()
        ]
        return found[0] if found else None

    before = sample("flyweight_rounds_total", replica="engine", rank="0")
    paused = sample("flyweight_operations_total", signal="PAUSE", ending="done") or 0
    site.good("POST", "/v1/pause")
    site.good("POST", "/v1/update_weights", {"version": 2})
    assert sample("flyweight_rounds_total", replica="engine", rank="0") == before + 1
    assert sample("flyweight_operations_total", signal="PAUSE", ending="done") == paused + 1
    assert sample("flyweight_state", replica="engine", state="PAUSED") == 1
    assert sample("flyweight_state", replica="engine", state="SERVING") == 0
    assert sample("flyweight_version", replica="engine") == 2
    assert sample("flyweight_rank_up", rank="0") == 1
    assert sample("flyweight_requests_running", rank="0") == 0
    rank = site.replica()["ranks"][0]
    assert sample("flyweight_round_bytes", rank="0") == rank["nbytes"]
    assert sample("flyweight_round_seconds", rank="0") == pytest.approx(rank["round_seconds"])
    assert sample("flyweight_pause_seconds", rank="0") == pytest.approx(rank["pause_seconds"])
    site.good("POST", "/v1/update_weights", {"version": 3})


# What is asked.


def test_pause_and_resume(site):
    """C31"""
    paused = site.good("POST", "/v1/pause")["replicas"][0]
    assert (paused["replica"], paused["state"], paused["ending"]) == ("engine", "PAUSED", "done")
    assert site.good("GET", "/v1/is_paused")["is_paused"] is True
    assert site.good("POST", "/v1/pause")["replicas"][0]["state"] == "PAUSED"
    assert site.good("POST", "/v1/resume")["replicas"][0]["state"] == "SERVING"
    assert site.good("GET", "/v1/is_paused")["is_paused"] is False


def test_an_engine_that_still_drains_is_not_paused_and_says_who_drains_it(site, draining):
    """C32, and C31's 409 with the id of what runs, at once."""
    pausing = draining("POST", "/v1/pause")
    told = site.replica()
    assert told["state"] == "PAUSING"
    assert site.good("GET", "/v1/is_paused")["is_paused"] is False
    assert site.ask("GET", "/health")[0] == 200
    for method, path in CONTROL_ROUTES:
        began = time.monotonic()
        code, answer = site.ask(method, path)
        assert time.monotonic() - began < 2
        assert (code, answer["status"]) == (409, "busy"), path
        assert answer["result"] == {"operation": told["operation"]["id"]}
    assert not pausing.done()
    site.engine.tell("finish")
    assert pausing.result(20)[0] == 200
    assert site.good("GET", "/v1/is_paused")["is_paused"] is True
    assert site.good("GET", "/status")["operations"][-1]["id"] == told["operation"]["id"]


def test_the_old_routes_clear_and_update(site):
    """C31"""
    assert site.good("GET", "/clear_load_weight")["replicas"][0]["state"] == "CLEARED"
    assert site.replica()["ranks"][0]["absent"] == ["kv_cache", "weights"]
    assert site.good("GET", "/update_model_weight")["replicas"][0]["state"] == "SERVING"
    assert site.replica()["version"] == 3


def test_the_old_routes_answer_with_the_codes_of_old(site, draining):
    """C31: 400 for the same operation, 403 for the opposite, 404 when time is over."""
    assert site.ask("GET", "/clear_load_weight?timeout=0.1")[0] == 404
    until(lambda: site.state == "SERVING")
    clearing = draining("GET", "/clear_load_weight")
    assert site.ask("GET", "/clear_load_weight")[0] == 400
    assert site.ask("GET", "/update_model_weight")[0] == 403
    site.engine.tell("finish")
    assert clearing.result(20)[0] == 200
    site.good("GET", "/update_model_weight")
    updating = draining("GET", "/update_model_weight?timeout=5")  # it waits for a newer version
    assert site.ask("GET", "/update_model_weight")[0] == 400
    assert site.ask("GET", "/clear_load_weight")[0] == 403
    code, told = updating.result(20)
    assert (code, told["status"]) == (404, "error")
    assert "a version after 3" in str(told["result"])
    assert (site.state, site.replica()["version"]) == ("SERVING", 3)


def test_a_head_of_an_old_route_does_nothing(site):
    assert site.raw("HEAD", "/clear_load_weight")[0] == 405
    assert site.state == "SERVING"


def test_time_that_is_over_leaves_the_engine_serving(site, draining):
    code, told = site.ask("POST", "/v1/pause", {"timeout": 0.1})
    assert (code, told["error"]) == (504, "TransferTimeout")
    assert site.state == "SERVING"
    faults = site.good("GET", "/status")["faults"]
    assert "requests were still running" in faults[-1]["reason"]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("POST", "/v1/sleep?timeout=3", 504), ("GET", "/clear_load_weight?timeout=3", 404)],
)
def test_a_frozen_engine_is_given_up_when_its_time_is_over(site, method, path, code):
    """C24, C31"""
    with frozen(site):
        began = time.monotonic()
        found, told = site.ask(method, path)
        assert 3 <= time.monotonic() - began < 5.5
        assert (found, told["error"]) == (code, "TransferTimeout")
        assert f"rank 0 (process {site.engine.pid}) of replica 'engine'" in told["result"]


def test_an_update_while_requests_run_is_refused_or_drained_as_asked(site, draining):
    options = {"version": 2, "when_serving": "refuse"}
    code, told = site.ask("POST", "/v1/update_weights", options)
    assert (code, told["status"], told["error"]) == (409, "refused", "LifecycleError")
    assert "1 requests are running" in told["result"]
    assert (site.state, site.replica()["version"]) == ("SERVING", 3)
    updating = draining("POST", "/v1/update_weights", {"version": 2})
    site.engine.tell("finish")
    assert updating.result(20)[0] == 200
    assert (site.state, site.replica()["version"]) == ("SERVING", 2)
    site.good("POST", "/v1/update_weights", {"version": 3})


def test_a_signal_that_the_state_does_not_accept_is_told_which_it_does(site):
    site.good("POST", "/v1/sleep")
    code, told = site.ask("POST", "/v1/resume")
    assert (code, told["status"], told["error"]) == (409, "refused", "LifecycleError")
    assert "it accepts PAUSE, CLEAR, RESTORE or UPDATE" in told["result"]
    assert site.state == "CLEARED"
    assert site.good("GET", "/status")["operations"][-1]["ending"] == "failed"


def test_tags_are_cleared_one_by_one_and_serving_needs_all_of_them(site):
    """C32"""

    def absent():
        return site.replica()["ranks"][0]["absent"]

    site.good("POST", "/v1/sleep?tags=kv_cache")
    assert absent() == ["kv_cache"]
    site.good("POST", "/v1/sleep?tags=weights,kv_cache")
    assert absent() == ["kv_cache", "weights"]
    site.good("POST", "/v1/wakeup", {"tags": ["kv_cache"]})
    assert (site.state, absent()) == ("CLEARED", ["weights"])
    site.good("POST", "/v1/wakeup?tags=weights")
    assert (site.state, absent()) == ("SERVING", [])


def test_the_tags_that_fastdeploy_documents_are_understood(site):
    """C31: `/v1/sleep?tags=weight,kv_cache`."""
    site.good("POST", "/v1/sleep?tags=weight,kv_cache")
    assert site.replica()["ranks"][0]["absent"] == ["kv_cache", "weights"]
    site.good("POST", "/v1/wakeup", {"tags": ["weight"]})
    assert site.replica()["ranks"][0]["absent"] == ["kv_cache"]
    site.good("POST", "/v1/wakeup?tags=kv_cache,weights,weight")  # twice is once
    assert site.state == "SERVING"


def test_requests_can_be_aborted_and_serving_goes_on(site):
    site.engine.tell("request")
    answer = site.good("POST", "/v1/abort_requests")["replicas"][0]
    assert (answer["signal"], answer["state"]) == ("PAUSE", "SERVING")
    signals = [each["signal"] for each in site.good("GET", "/status")["operations"]]
    assert signals[-1] == "PAUSE"  # one operation: no server has to live on for the resume


def test_a_version_that_does_not_come_is_told_and_changes_nothing(site):
    code, told = site.ask("POST", "/v1/update_weights", {"version": 99, "timeout": 0.2})
    assert (code, told["error"]) == (504, "TransferTimeout")
    assert "version 99" in told["result"]
    assert (site.state, site.replica()["version"]) == ("SERVING", 3)


def test_many_calls_at_once_end_one_by_one_or_are_told_who_runs(site, threads):
    paths = ["/v1/pause", "/v1/resume", "/v1/update_weights?version=2", "/v1/sleep?tags=kv_cache"]
    futures = [threads.submit(site.ask, "POST", paths[n % 4]) for n in range(40)]
    answers = [future.result(60) for future in futures]
    assert {code for code, _ in answers} <= {200, 409}
    assert any(code == 200 for code, _ in answers)
    for code, told in answers:
        if code == 409 and told["status"] == "busy":
            assert told["result"]["operation"].rpartition("-")[2].isdecimal()
    assert site.replica()["operation"] is None
    site.good("POST", "/v1/wakeup")
    site.good("POST", "/v1/update_weights", {"version": 3})


# What comes in wrong.


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/pause", b"{", "no JSON object"),
        ("/v1/pause", b"[1]", "no JSON object"),
        ("/v1/pause", b"\xff\xfe", "no JSON object"),
        ("/v1/pause", b"[" * 60_000, "no JSON object"),
        ("/v1/pause", b'{"a": NaN}', "no JSON object"),
        ("/v1/pause", {"tags": ["weights"]}, "unknown field `tags`"),
        ("/v1/pause", {"timeout": "soon"}, "expected `float`, got `str`"),
        ("/v1/pause", {"timeout": 0}, "`float` > 0"),
        ("/v1/pause", {"timeout": -1}, "`float` > 0"),
        ("/v1/pause", b'{"timeout": 1e999}', ""),
        ("/v1/pause", {"replica": 7}, "expected `str | null`, got `int`"),
        ("/v1/pause", {"replica": "other"}, "there is no replica 'other'; there is 'engine'"),
        ("/v1/pause?now=yes", None, "unknown field `now`"),
        ("/v1/pause?timeout=nan", None, ""),
        ("/v1/pause?timeout=inf", None, "`float` <= 86400"),
        ("/v1/pause?timeout=1&timeout=2", None, "'timeout' is in the query twice"),
        ("/v1/pause?timeout=1", {"timeout": 2}, "in the query and in the body"),
        ("/v1/sleep?tags=", None, "tag is '', expected 'weights' or 'kv_cache'"),
        ("/v1/sleep?tags=weights,all", None, "tag is 'all', expected 'weights' or 'kv_cache'"),
        ("/v1/sleep", {"tags": ["wieghts"]}, "tag is 'wieghts', expected 'weights' or 'kv_cache'"),
        ("/v1/wakeup?tags=Weights", None, "tag is 'Weights', expected 'weights' or 'kv_cache'"),
        ("/v1/sleep", {"tags": [7]}, "expected `str`, got `int`"),
        ("/v1/sleep", {"tags": "weights"}, "expected `array`, got `str`"),
        ("/v1/sleep", {"tags": []}, "length >= 1"),
        ("/v1/update_weights", {"version": "latest"}, "'latest', expected a number"),
        ("/v1/update_weights", {"version": ""}, "of length >= 1"),
        ("/v1/update_weights", {"version": True}, "expected `int | str | null`, got `bool`"),
        ("/v1/update_weights", {"version": -1}, "`int` >= 0"),
        ("/v1/update_weights", {"version": 1.5}, "expected `int | str | null`, got `float`"),
        ("/v1/update_weights", b'{"version": 99999999999999999999999}', ""),
        ("/v1/update_weights", {"when_serving": "wait"}, "is 'wait', expected 'drain' or 'refuse'"),
        ("/v1/sleep?when_serving=", None, "when_serving is '', expected 'drain' or 'refuse'"),
        ("/v1/update_weights", {"verify_checksum": "no"}, "expected `bool`, got `str`"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_understood_is_refused_in_words(site, path, body, says):
    operations = site.good("GET", "/status")["operations"]
    code, told = site.ask("POST", path, body)
    assert (code, told["status"], told["error"]) == (400, "error", "SpecError")
    assert says in told["result"]
    assert site.state == "SERVING"
    assert site.good("GET", "/status")["operations"] == operations


def test_a_version_may_be_text_and_the_answer_repeats_it(site):
    """C18, C31: as FastDeploy documents it, and without checksums being demanded."""
    for body, number in (
        ({"version": "2", "verify_checksum": False}, 2),
        ({"version": "step-3"}, 3),
        ({"version": "global_step_0002", "verify_checksum": True}, 2),
        ({"version": 3, "verify_checksum": False}, 3),
    ):
        (answer,) = site.good("POST", "/v1/update_weights", body)["replicas"]
        assert (answer["state"], answer["version"]) == ("SERVING", body["version"])
        assert site.replica()["version"] == number


@pytest.mark.parametrize("path", ["/status", "/versions", "/health", "/events", "/v1/is_paused"])
def test_an_unknown_query_is_an_error_where_things_are_read(site, path):
    assert site.ask("GET", f"{path}?verbose=1")[0] == 400


def test_a_body_that_is_too_large_is_refused(site):
    code, told = site.ask("POST", "/v1/pause", b" " * (64 << 10) + b"{}")
    assert (code, told["status"]) == (413, "error")
    code, told = site.ask("POST", "/v1/pause", b"x" * (4 << 20))
    assert code == 413
    assert site.state == "SERVING"


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/pause", 405),
        ("POST", "/status", 405),
        ("POST", "/clear_load_weight", 405),
        ("OPTIONS", "/v1/pause", 405),
        ("DELETE", "/", 405),
        ("GET", "/nothing", 404),
        ("GET", "/../page.html", 404),
        ("POST", "/v1/__init__", 404),
    ],
)
def test_what_is_not_there_is_told_so(site, method, path, code):
    found, told = site.ask(method, path)
    assert (found, told["status"]) == (code, "error")
    assert path in told["result"]
    assert site.state == "SERVING"


@pytest.mark.parametrize(("method", "path"), CONTROL_ROUTES + READ_ROUTES)
@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer tökén"]
)
def test_without_the_token_nothing_is_told_or_done(site, method, path, authorization):
    """C33"""
    headers = {"Authorization": authorization.encode("latin-1")}
    code, told = site.ask(method, path, headers=headers)
    assert (code, told["error"]) == (401, "Unauthorized")
    assert TOKEN not in json.dumps(told)
    assert site.state == "SERVING"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8470"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "10.0.0.7"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://localhost"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:1", "Origin": "http://[::1]:1"}, 200),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
    ],
    ids=str,
)
def test_other_names_and_other_sites_are_refused(site, headers, code):
    """C33: neither a name made to lead here nor another site's page gets in."""
    found, _, sent = site.raw("GET", "/status", headers=headers)
    assert found == code
    assert "Access-Control-Allow-Origin" not in sent


def test_the_page_may_run_nothing_but_itself(site):
    code, text, headers = site.raw("GET", "/", token=" ")
    assert code == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert policy.count("sha256-") == 2
    assert b"http://" not in text
    assert b"https://" not in text
    assert b"innerHTML" not in text
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_fault_of_ours_is_told_as_one(site, monkeypatch):
    def fault():
        raise RuntimeError("oops")

    monkeypatch.setattr(site.fleet, "status", fault)
    code, told = site.ask("GET", "/status")
    assert (code, told["error"]) == (500, "RuntimeError")


# The stream of events.


def test_the_stream_tells_each_change(site):
    with site.events() as told:
        assert told()["replicas"][0]["state"] == "SERVING"
        site.good("POST", "/v1/pause")
        states = []
        while "PAUSED" not in states:
            states.append(told()["replicas"][0]["state"])
        site.good("POST", "/v1/resume")
        while told()["replicas"][0]["state"] != "SERVING":
            pass


def test_the_stream_sends_at_most_twenty_a_second(site):
    with site.events() as told:
        told()
        began = time.monotonic()
        for _ in range(10):
            site.fleet._tell()
            told()
        assert time.monotonic() - began > 0.4


def test_so_many_listen_and_no_more(site, monkeypatch):
    monkeypatch.setattr(server_app, "MAX_STREAMS", 0)
    code, told = site.ask("GET", "/events")
    assert (code, told["status"]) == (503, "error")


def test_who_does_not_read_is_let_go(site, monkeypatch):
    monkeypatch.setattr(server_stream, "_SEND_SECONDS", 0.05)
    counts = []

    async def stuck():
        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        async def receive():
            await asyncio.sleep(60)

        stream = server_stream.EventStream(site.fleet, counts.append)
        await asyncio.wait_for(stream({}, receive, send), 10)

    asyncio.run(stuck())
    assert counts == [1, -1]


# Deaths.


def test_an_engine_that_is_killed_is_told_in_words_and_comes_back(trained):
    """C24, C25: nobody waits for the dead, and nothing has to be cleaned up."""
    cell = trained.place / "mortal.cell"
    with serving([Control(cell, 1, name="mortal")]) as site:
        code, told = site.ask("GET", "/health")
        assert (code, told["result"]) == (
            503,
            "mortal: absent: none of its 1 ranks has started yet",
        )
        assert site.ask("POST", "/v1/pause")[0] == 503
        assert site.ask("GET", "/update_model_weight")[0] == 404
        with Engine(trained.address, cell, should_follow=False) as engine:
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


def test_an_engine_that_is_killed_in_an_operation_ends_it(trained, threads):
    cell = trained.place / "victim.cell"
    with (
        Engine(trained.address, cell, should_follow=False) as engine,
        serving([Control(cell, 1, name="victim")]) as site,
    ):
        site.good("POST", "/v1/update_weights")
        engine.tell("request")
        pausing = threads.submit(site.ask, "POST", "/v1/pause")
        until(lambda: site.state == "PAUSING")
        engine.kill(signal.SIGKILL)
        code, told = pausing.result(10)
        assert (code, told["error"]) == (503, "PeerLost")
        assert site.replica()["operation"] is None


class Served:
    """`flyweight serve` as a user runs it."""

    def __init__(self, place, cell, port=0):
        words = [sys.executable, "-m", "flyweight.cli", "serve", "--json"]
        words += ["--replica", f"engine={cell}", "--port", port, "--run", place / "tokens"]
        self.process = subprocess.Popen(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.told = json.loads(line)
        with open(self.told["token_file"]) as file:
            self.site = Site(self.told["address"], file.read())

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.process.kill()
        self.process.communicate(timeout=20)


def test_a_server_that_is_killed_is_replaced_by_one_that_tells_the_truth(trained, threads):
    """C25: the engine goes on, and what was asked of it is seen to its end by the next server."""
    cell = trained.place / "kept.cell"
    with Engine(trained.address, cell, should_follow=False) as engine:
        with Served(trained.place, cell) as served:
            served.site.good("POST", "/v1/update_weights")
            engine.tell("request")
            asked = threads.submit(served.site.ask, "POST", "/v1/pause")
            until(lambda: served.site.state == "PAUSING")
            port = served.told["address"].rpartition(":")[2]
            served.process.kill()
            with pytest.raises((OSError, http.client.HTTPException)):
                asked.result(20)
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
def test_a_server_killed_at_any_step_leaves_the_engine_to_finish_it(
    trained, threads, tmp_path, path, state
):
    """C25"""
    cell = tmp_path / "engine.cell"
    with Engine(trained.address, cell, should_follow=False) as engine:
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


def test_a_server_that_ends_lets_its_callers_know_and_the_engine_go_on(trained, threads):
    cell = trained.place / "parted.cell"
    with Engine(trained.address, cell, should_follow=False) as engine:
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
            code, answer = asked.result(10)
            assert (code, answer["error"]) == (503, "PeerLost")
            assert "goes on" in answer["result"]
        engine.tell("finish")
        with Control(cell, 1) as control:
            until(lambda: control.status().state == "PAUSED")


# Several replicas.


def test_several_replicas_are_asked_side_by_side(trained, running, site, threads):
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
        assert pair.replica("pair-1")["state"] == "PAUSED"  # nothing was asked of it
        assert pair.ask("POST", "/v1/resume?replica=pair-1")[0] == 200
        one.tell("finish")
        assert pausing.result(20)[0] == 200


def test_one_that_is_not_there_does_not_keep_the_others_waiting(trained):
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


def test_rounds_that_nobody_asked_for_are_in_the_timeline(trained, tmp_path):
    address = f"unix:{tmp_path}/policy"
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
        assert last()["time"] == pytest.approx(time.time(), abs=20)


# Without what it needs.


def test_without_starlette_it_says_what_to_install():
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from importlib import util; real = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'starlette' else real(name)\n"
        "import flyweight.errors\n"
        "try:\n    import flyweight.server\n"
        "except flyweight.errors.MissingDependency as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        "the control server needs starlette; pip install 'flyweight[server]'\n"
    ), done.stderr


def test_a_slow_body_is_given_up(site, monkeypatch):
    monkeypatch.setattr(server_app, "_BODY_SECONDS", 0.1)
    host, _, port = site.netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n{{"
        connection.sendall(head.encode())
        assert b" 408 " in connection.recv(1000)


def place(site):
    host, _, port = site.netloc.rpartition(":")
    return host, int(port)


def test_half_a_request_does_not_keep_a_connection_for_ever(site, monkeypatch):
    """Otherwise a few hundred of them, which need no token, shut everybody else out."""
    monkeypatch.setattr(server_http, "_REQUEST_SECONDS", 0.1)
    with socket.create_connection(place(site), 10) as half:
        half.sendall(b"GET / HT")
        half.settimeout(10)
        assert half.recv(1) == b""
    assert site.ask("GET", "/health")[0] == 200


def test_waits_for_clients_end_at_their_deadline(site, threads, monkeypatch):
    """C24: a doubled one would fail; a silent client, half a request, a slow body, a quiet stream."""
    for module, name in (
        (server_http, "_REQUEST_SECONDS"),
        (server_app, "_BODY_SECONDS"),
        (server_stream, "_KEEPALIVE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 3.0)
    head = (
        f"POST /v1/pause HTTP/1.1\r\nHost: {site.netloc}\r\nAuthorization: Bearer {site.token}\r\n"
    )

    def heard(sent, num_before=0):
        """Return what comes when the deadline is over, and how long that took."""
        with socket.create_connection(place(site), 20) as connection:
            connection.settimeout(20)
            connection.sendall(sent.encode())
            for _ in range(num_before):
                connection.recv(65536)
            began = time.monotonic()
            return connection.recv(65536), time.monotonic() - began

    stream = head.replace("POST /v1/pause", "GET /events")
    waits = {
        b"": [("",), ("GET / HT",)],
        b" 408 ": [(f"{head}Content-Length: 9\r\n\r\n{{",)],
        b":\n\n": [(f"{stream}\r\n", 2)],
    }
    futures = [(says, threads.submit(heard, *each)) for says in waits for each in waits[says]]
    for says, future in futures:
        text, seconds = future.result(30)
        assert says in text if says else text == b""
        assert 2.9 <= seconds < 5.5, (says, seconds)
    assert site.state == "SERVING"


def test_a_body_that_ends_early_is_the_clients_fault(site):
    with socket.create_connection(place(site), 10) as short:
        head = f"POST /v1/pause HTTP/1.1\r\nHost: {site.netloc}\r\nAuthorization: Bearer {site.token}\r\n"
        short.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        short.settimeout(10)
        assert b" 400 " in short.recv(200)


def test_a_head_of_events_ends(site):
    assert site.raw("HEAD", "/events")[0] == 405


def silent(site):
    connection = socket.create_connection(place(site), 10)
    connection.settimeout(10)
    return connection


def test_those_who_ask_for_nothing_make_room_for_who_does(trained, monkeypatch):
    """Otherwise so many of them, which need no token, shut everybody else out."""
    monkeypatch.setattr(server_http, "_MAX_CONNECTIONS", 8)
    with (
        serving([Control(trained.place / "crowd.cell", 1, name="crowd")]) as site,
        site.events() as told_next,
        ExitStack() as stack,
    ):
        assert told_next()["replicas"][0]["name"] == "crowd"
        crowd = [stack.enter_context(silent(site)) for _ in range(20)]
        assert site.raw("GET", "/versions")[0] == 200
        assert crowd[0].recv(1) == b""
        crowd[-1].sendall(f"GET /versions HTTP/1.1\r\nHost: {site.netloc}\r\n\r\n".encode())
        assert b" 401 " in crowd[-1].recv(200)  # the last that came is still listened to
        site.fleet._tell()
        assert told_next() is not None  # and who has something at work is not closed for others


def test_who_reads_no_answer_does_not_keep_a_connection_for_ever(trained, monkeypatch):
    monkeypatch.setattr(server_http, "_REQUEST_SECONDS", 0.1)
    with (
        serving([Control(trained.place / "unread.cell", 1, name="unread")]) as site,
        silent(site) as connection,
    ):
        head = f"GET / HTTP/1.1\r\nHost: {site.netloc}\r\n\r\n".encode()
        with pytest.raises(ConnectionError):
            while True:  # pages pile up until the server waits, and then until it does no longer
                connection.sendall(head * 100)


# A server that is none.


def test_a_server_that_does_not_start_says_so(tmp_path):
    fleet = Fleet([Control(tmp_path / "e.cell", 1)])
    try:
        listener = server_http.Listener()
        listener.close()
        with pytest.raises(StoreError, match="ended by itself: "):
            server_http.HttpServer(fleet, listener, token=TOKEN)
    finally:
        fleet.close()


def test_a_server_that_ends_by_itself_is_noticed(tmp_path):
    fleet = Fleet([Control(tmp_path / "e.cell", 1)])
    try:
        with (
            server_http.Listener() as listener,
            server_http.HttpServer(fleet, listener, token=TOKEN) as server,
        ):
            server.check()
            server._server.should_exit = True
            server._thread.join(20)
            with pytest.raises(StoreError, match="ended by itself"):
                server.check()
    finally:
        fleet.close()
