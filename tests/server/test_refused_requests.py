"""What the routes refuse: malformed requests, strangers, other hosts and other sites."""

import json
import os

import pytest

from child_processes import run_python
from control_site import CONTROL_ROUTES, TOKEN, serving
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import State

READ_ROUTES = [
    ("GET", each) for each in ("/status", "/versions", "/metrics", "/events", "/v1/is_paused")
]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server, and a rank that says it is serving. No request may reach it."""
    path = tmp_path_factory.mktemp("refused") / "engine.cell"
    with Cell(path) as cell, serving([Control(path, 1, name="engine")]) as site:
        cell.claim(0)
        cell.write_record(0, RankRecord(pid=os.getpid(), state=State.SERVING, absent=()))
        site.cell = cell
        yield site


@pytest.fixture
def site(running):
    yield running
    assert running.cell.request() is None
    assert running.state == "SERVING"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/pause", b"{", "no JSON object"),
        ("/v1/pause", b"[1]", "no JSON object"),
        ("/v1/pause", b"\xff\xfe", "no JSON object"),
        ("/v1/pause", b"[" * 60_000, "no JSON object"),
        ("/v1/pause", b'{"a": NaN}', "no JSON object"),
        ("/v1/pause", {"tags": ["weights"]}, "unknown field 'tags'"),
        ("/v1/pause", {"timeout": "soon"}, "expected `float`, got `str`"),
        ("/v1/pause", {"timeout": "5"}, "expected `float`, got `str`"),
        ("/v1/pause", {"timeout": None}, "expected `float`, got `null`"),
        ("/v1/pause", {"timeout": 0}, "`float` > 0"),
        ("/v1/pause", {"timeout": -1}, "`float` > 0"),
        ("/v1/pause", b'{"timeout": 1e999}', ""),
        ("/v1/pause", {"replica": 7}, "expected `str | null`, got `int`"),
        ("/v1/pause", {"replica": "other"}, "there is no replica 'other'; there is 'engine'"),
        ("/v1/pause?now=yes", None, "unknown field 'now'"),
        ("/v1/pause?timeout=nan", None, ""),
        ("/v1/pause?timeout=inf", None, "`float` <= 86400"),
        ("/v1/pause?timeout=1&timeout=2", None, "'timeout' is given twice"),
        ("/v1/pause?timeout=1", {"timeout": 2}, "'timeout' is given twice"),
        ("/v1/sleep?tags=", None, "tag is '', expected 'weights' or 'kv_cache'"),
        ("/v1/sleep?tags=weights,all", None, "tag is 'all', expected 'weights' or 'kv_cache'"),
        ("/v1/sleep", {"tags": ["wieghts"]}, "tag is 'wieghts', expected 'weights' or 'kv_cache'"),
        ("/v1/wakeup?tags=Weights", None, "tag is 'Weights', expected 'weights' or 'kv_cache'"),
        ("/v1/sleep", {"tags": [7]}, "expected `str`, got `int`"),
        ("/v1/sleep", {"tags": "weights"}, "expected `array`, got `str`"),
        ("/v1/sleep", {"tags": []}, "length >= 1"),
        ("/v1/sleep", {"tags": None}, "expected `array`, got `null`"),
        ("/v1/update_weights", {"version": "latest"}, "'latest', expected a number"),
        ("/v1/update_weights", {"version": ""}, "of length >= 1"),
        ("/v1/update_weights", {"version": True}, "expected `int | str | null`, got `bool`"),
        ("/v1/update_weights", {"version": -1}, "`int` >= 0"),
        ("/v1/update_weights", {"version": 1.5}, "expected `int | str | null`, got `float`"),
        ("/v1/update_weights", b'{"version": 99999999999999999999999}', ""),
        (f"/v1/update_weights?version={'9' * 5000}", None, "of length <= 200"),
        ("/v1/update_weights", {"when_serving": "wait"}, "is 'wait', expected 'drain' or 'refuse'"),
        ("/v1/sleep?when_serving=", None, "when_serving is '', expected 'drain' or 'refuse'"),
        ("/v1/update_weights", {"verify_checksum": "no"}, "expected `bool`, got `str`"),
        ("/v1/update_weights", {"verify_checksum": 1}, "expected `bool`, got `int`"),
        ("/v1/update_weights", {"tags": ["weights"]}, "unknown field 'tags'; this route takes replica"),
        ("/v1/wakeup", {"when_serving": "drain"}, "unknown field 'when_serving'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_malformed_request_is_refused_with_the_reason(site, path, body, says):
    code, told = site.ask("POST", path, body)
    assert (code, told["status"], told["error"]) == (400, "error", "SpecError")
    assert says in told["result"]


@pytest.mark.parametrize("path", ["/status", "/versions", "/health", "/events", "/v1/is_paused"])
def test_routes_that_read_refuse_an_unknown_query(site, path):
    assert site.ask("GET", f"{path}?verbose=1")[0] == 400


def test_a_body_that_is_too_large_is_refused(site):
    code, told = site.ask("POST", "/v1/pause", b" " * (64 << 10) + b"{}")
    assert (code, told["status"]) == (413, "error")
    code, told = site.ask("POST", "/v1/pause", b"x" * (4 << 20))
    assert code == 413


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
def test_unknown_routes_and_methods_are_refused(site, method, path, code):
    found, told = site.ask(method, path)
    assert (found, told["status"]) == (code, "error")
    assert path in told["result"]


@pytest.mark.parametrize(("method", "path"), CONTROL_ROUTES + READ_ROUTES)
@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer tökén"]
)
def test_a_request_without_the_token_is_refused(site, method, path, authorization):
    """C33"""
    headers = {"Authorization": authorization.encode("latin-1")}
    code, told = site.ask(method, path, headers=headers)
    assert (code, told["error"]) == (401, "Unauthorized")
    assert TOKEN not in json.dumps(told)


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
def test_other_hosts_and_other_origins_are_refused(site, headers, code):
    """C33: against DNS rebinding and pages of other sites."""
    found, _, sent = site.raw("GET", "/status", headers=headers)
    assert found == code
    assert "Access-Control-Allow-Origin" not in sent


@pytest.mark.parametrize("path", ["/status", "/health", "/", "/challenge?nonce=1"])
@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_host_and_origin_are_checked_before_the_token(site, path, headers):
    """C33: even where no token is needed, and before a wrong one is noticed."""
    assert site.raw("GET", path, headers=headers, token="wrong")[0] == 403


def test_the_page_may_run_only_its_own_script(site):
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


def test_an_internal_error_is_code_500(site, monkeypatch):
    def fault():
        raise RuntimeError("oops")

    monkeypatch.setattr(site.fleet, "status", fault)
    code, told = site.ask("GET", "/status")
    assert (code, told["error"]) == (500, "RuntimeError")


def test_a_missing_extra_says_what_to_install():
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from importlib import util; real = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'starlette' else real(name)\n"
        "import flyweight.errors\n"
        "try:\n    import flyweight.server\n"
        "except flyweight.errors.MissingDependency as error:\n    print(error)"
    )
    done = run_python(code)
    assert done.stdout == (
        "the control server needs starlette; pip install 'flyweight[server]'\n"
    ), done.stderr
