"""The routes over real HTTP: what they report, and what they make a real engine do."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from child_processes import LIMIT, in_time, until
from control_site import CONTROL_ROUTES, VERSIONS, Engine, Trainer, frozen, serving
from flyweight.lifecycle.control import Control


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer that has published its versions, with its directory and address."""
    place = tmp_path_factory.mktemp("control")
    with Trainer(f"unix:{place}/policy", place / "run") as trainer:
        yield trainer


@pytest.fixture(scope="module")
def running(trained):
    """An engine that updates only on request, and a control server for it."""
    cell = trained.place / "engine.cell"
    with (
        Engine(trained.address, cell, store=trained.store, should_follow=False) as engine,
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
    until(lambda: running.ask("POST", "/v1/resume")[0] == 200)
    assert running.state == "SERVING"
    return running


@pytest.fixture
def patient(monkeypatch):
    """Let the server hear the engine after a deadline, however slow the machine is."""
    monkeypatch.setattr("flyweight.lifecycle.control.ANSWER_SECONDS", LIMIT)


@pytest.fixture
def draining(site, threads):
    """A function that starts a call which waits for a running request, and returns its future."""
    site.engine.tell("request")

    def start(method, path, body=None):
        future = threads.submit(site.ask, method, path, body)
        until(lambda: site.replica()["operation"] is not None)
        return future

    return start


def test_status_has_states_versions_and_rounds(site):
    told = site.good("GET", "/status")
    (replica,) = told["replicas"]
    (rank,) = replica["ranks"]
    assert (replica["name"], replica["state"], replica["version"]) == ("engine", "SERVING", 3)
    assert (rank["pid"], rank["is_alive"], rank["absent"]) == (site.engine.pid, True, [])
    last = told["rounds"][-1]
    assert last["nbytes"] == rank["nbytes"] > 0
    assert last["gb_per_second"] > 0
    assert last["pause_seconds"] > 0


def test_versions_lists_stored_versions_and_held_ones(site, trained):
    assert site.good("GET", "/versions") == {
        "store": str(trained.place / "run"),
        "versions": list(VERSIONS),
        "replicas": {"engine": 3},
    }


def test_a_paused_engine_is_healthy(site):
    """C26"""
    assert site.ask("GET", "/health", token="")[1]["result"] == "engine: serving version 3"
    site.good("POST", "/v1/pause")
    code, told = site.ask("GET", "/health", token="")
    assert (code, told["replicas"]) == (200, {"engine": "paused at version 3"})


def test_metrics_agree_with_the_status(site):
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


def test_pause_and_resume(site):
    """C31"""
    paused = site.good("POST", "/v1/pause")["replicas"][0]
    assert (paused["replica"], paused["state"], paused["ending"]) == ("engine", "PAUSED", "done")
    assert site.good("GET", "/v1/is_paused")["is_paused"] is True
    assert site.good("POST", "/v1/pause")["replicas"][0]["state"] == "PAUSED"
    assert site.good("POST", "/v1/resume")["replicas"][0]["state"] == "SERVING"
    assert site.good("GET", "/v1/is_paused")["is_paused"] is False


def test_a_draining_engine_is_not_paused_and_names_the_operation_that_drains_it(site, draining):
    """C32, and C31's immediate 409 with the id of the running operation."""
    pausing = draining("POST", "/v1/pause")
    until(lambda: site.state == "PAUSING")
    told = site.replica()
    assert site.good("GET", "/v1/is_paused")["is_paused"] is False
    assert site.ask("GET", "/health")[0] == 200
    for method, path in CONTROL_ROUTES:
        code, answer = site.ask(method, path)
        assert (code, answer["status"]) == (409, "busy"), path
        assert answer["result"] == {"operation": told["operation"]["id"]}
    assert not pausing.done()
    site.engine.tell("finish")
    assert pausing.result(LIMIT)[0] == 200
    assert site.good("GET", "/v1/is_paused")["is_paused"] is True
    assert site.good("GET", "/status")["operations"][-1]["id"] == told["operation"]["id"]


def test_the_legacy_routes_clear_and_update(site):
    """C31"""
    assert site.good("GET", "/clear_load_weight")["replicas"][0]["state"] == "CLEARED"
    assert site.replica()["ranks"][0]["absent"] == ["kv_cache", "weights"]
    assert site.good("GET", "/update_model_weight")["replicas"][0]["state"] == "SERVING"
    assert site.replica()["version"] == 3


def test_the_legacy_routes_answer_with_fastdeploys_codes(site, patient, draining):
    """C31: 400 for the same operation, 403 for the opposite, 404 after a timeout."""
    assert site.ask("GET", "/clear_load_weight?timeout=0.1")[0] == 404
    until(lambda: site.state == "SERVING")
    clearing = draining("GET", "/clear_load_weight")
    assert site.ask("GET", "/clear_load_weight")[0] == 400
    assert site.ask("GET", "/update_model_weight")[0] == 403
    site.engine.tell("finish")
    assert clearing.result(LIMIT)[0] == 200
    site.good("GET", "/update_model_weight")
    site.good("POST", "/v1/update_weights", {"version": 2})
    site.engine.tell("request")
    updating = draining("GET", "/update_model_weight")
    assert site.ask("GET", "/update_model_weight")[0] == 400
    assert site.ask("GET", "/clear_load_weight")[0] == 403
    site.engine.tell("finish")
    assert updating.result(LIMIT)[0] == 200
    code, told = site.ask("GET", "/update_model_weight?timeout=0.3")  # nothing is newer
    assert (code, told["status"]) == (404, "error")
    assert (site.state, site.replica()["version"]) == ("SERVING", 3)


def test_a_head_request_for_a_legacy_route_does_nothing(site):
    assert site.raw("HEAD", "/clear_load_weight")[0] == 405
    assert site.state == "SERVING"


def test_a_pause_that_times_out_leaves_the_engine_serving(site, patient, draining):
    code, told = site.ask("POST", "/v1/pause", {"timeout": 0.1})
    assert (code, told["error"]) == (504, "TransferTimeout")
    assert site.state == "SERVING"
    faults = site.good("GET", "/status")["faults"]
    assert "running" in faults[-1]["reason"]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("POST", "/v1/sleep?timeout=0.5", 504), ("GET", "/clear_load_weight?timeout=0.5", 404)],
)
def test_a_call_to_a_frozen_engine_ends_at_its_timeout(site, method, path, code):
    """C24, C31"""
    with frozen(site):
        with in_time(0.5):
            found, told = site.ask(method, path)
        assert (found, told["error"]) == (code, "TransferTimeout")
        assert f"process {site.engine.pid}" in told["result"]


def test_an_update_while_requests_run_drains_or_refuses_as_requested(site, draining):
    options = {"version": 2, "when_serving": "refuse"}
    code, told = site.ask("POST", "/v1/update_weights", options)
    assert (code, told["status"], told["error"]) == (409, "refused", "LifecycleError")
    assert "running" in told["result"]
    assert (site.state, site.replica()["version"]) == ("SERVING", 3)
    updating = draining("POST", "/v1/update_weights", {"version": 2})
    site.engine.tell("finish")
    assert updating.result(LIMIT)[0] == 200
    assert (site.state, site.replica()["version"]) == ("SERVING", 2)
    site.good("POST", "/v1/update_weights", {"version": 3})


def test_a_refused_signal_is_answered_with_the_accepted_ones(site):
    site.good("POST", "/v1/sleep")
    code, told = site.ask("POST", "/v1/resume")
    assert (code, told["status"], told["error"]) == (409, "refused", "LifecycleError")
    assert "RESTORE" in told["result"]
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
    site.good("POST", "/v1/wakeup?tags=kv_cache,weights,weight")  # a repeated tag counts once
    assert site.state == "SERVING"


def test_requests_are_aborted_and_the_engine_serves_on(site):
    site.engine.tell("request")
    answer = site.good("POST", "/v1/abort_requests")["replicas"][0]
    assert (answer["signal"], answer["state"]) == ("PAUSE", "SERVING")
    signals = [each["signal"] for each in site.good("GET", "/status")["operations"]]
    assert signals[-1] == "PAUSE"  # one operation: the resume needs no living server


def test_an_update_to_a_version_that_does_not_exist_changes_nothing(site, patient):
    code, told = site.ask("POST", "/v1/update_weights", {"version": 99, "timeout": 0.2})
    assert (code, told["error"]) == (504, "TransferTimeout")
    assert (site.state, site.replica()["version"]) == ("SERVING", 3)


def test_concurrent_calls_run_one_by_one_or_are_busy(site, threads):
    paths = ["/v1/pause", "/v1/resume", "/v1/update_weights?version=2", "/v1/sleep?tags=kv_cache"]
    futures = [threads.submit(site.ask, "POST", paths[n % 4]) for n in range(40)]
    answers = [future.result(LIMIT) for future in futures]
    assert {code for code, _ in answers} <= {200, 409}
    assert any(code == 200 for code, _ in answers)
    for code, told in answers:
        if code == 409 and told["status"] == "busy":
            assert told["result"]["operation"].rpartition("-")[2].isdecimal()
    assert site.replica()["operation"] is None
    site.good("POST", "/v1/wakeup")
    site.good("POST", "/v1/update_weights", {"version": 3})


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
