"""`flyweight serve` and the commands that call it, as a user types them."""

import json
import os
import re
import signal
import threading

import pytest

from child_processes import LIMIT, Terminal, in_time, run_python, until
from commands import flyweight, run, start
from control_site import Engine, Site, Stranger, Trainer, frozen, told_json
from flyweight.proofs import proof


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def running(place):
    """A trainer, an engine that updates only on request, and `flyweight serve`."""
    address, cell = f"unix:{place}/policy", place / "engine.cell"
    words = ["serve", "--replica", f"engine={cell}", "--port", 0, "--run", place / "run"]
    with (
        Trainer(address, place / "versions"),
        Engine(address, cell, store=place / "versions", should_follow=False) as engine,
        start(*words, "--store", place / "versions", "--json") as served,
    ):
        told = json.loads(served.line())
        with open(told["token_file"]) as file:
            site = Site(told["address"], file.read())
        site.told, site.engine, site.run, site.cell = told, engine, place / "run", cell
        site.good("POST", "/v1/update_weights")
        yield site
        assert served.end() == ("", "")
        assert served.process.returncode == 0


@pytest.fixture
def site(running, monkeypatch):
    """The server, with its address in the environment and its engine serving."""
    running.engine.tell("finish")
    until(lambda: running.replica()["operation"] is None)
    if running.replica()["ranks"][0]["absent"]:
        running.good("POST", "/v1/wakeup")
    until(lambda: running.ask("POST", "/v1/resume")[0] == 200)
    monkeypatch.setenv("FLYWEIGHT_SERVER", running.address)
    monkeypatch.setenv("FLYWEIGHT_RUN", str(running.run))
    return running


def test_serve_prints_its_address_and_writes_a_private_token_file(site):
    """C33"""
    assert site.told["replicas"] == ["engine"]
    assert site.told["page"] == f"{site.address}/#token={site.token}"
    assert len(site.token) == 32
    file = os.stat(site.told["token_file"])
    assert file.st_mode & 0o777 == 0o600
    assert os.stat(site.run).st_mode & 0o777 == 0o700


def test_status_shows_the_replica(site):
    assert flyweight("status", "--json")["replicas"][0]["state"] == "SERVING"
    done = run("status", site.address, "--run", site.run)
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine" in done.stdout
    assert "SERVING" in done.stdout


def test_the_commands_do_what_their_names_say(site):
    """C31"""
    assert flyweight("pause", "--json")["replicas"][0]["state"] == "PAUSED"
    assert "engine: SERVING, version 3; resume-" in flyweight("resume")
    assert flyweight("update", "--version", 2, "--json")["replicas"][0]["version"] == 2
    assert flyweight("update", "--replica", "engine", "--json")["replicas"][0]["version"] == 3
    assert flyweight("clear", "--tags", "kv_cache", "--json")["replicas"][0]["state"] == "CLEARED"
    assert site.replica()["ranks"][0]["absent"] == ["kv_cache"]
    assert flyweight("restore", "--json")["replicas"][0]["state"] == "SERVING"
    assert flyweight("clear", "--tags", "weight", "--json")["replicas"][0]["state"] == "CLEARED"
    assert flyweight("restore", "--tags", "weight", "--json")["replicas"][0]["state"] == "SERVING"


def test_a_signal_that_the_state_refuses_is_exit_code_8(site):
    flyweight("clear")
    text = flyweight("resume", code=8)
    assert text.startswith("LifecycleError: engine: rank 0:")
    assert "UPDATE" in text
    told = flyweight("resume", "--json", code=8)
    assert (told["error"], told["exit_code"]) == ("LifecycleError", 8)


def test_a_busy_engine_is_exit_code_8_with_the_id_of_the_running_operation(site, threads):
    site.engine.tell("request")
    pausing = threads.submit(site.ask, "POST", "/v1/pause")
    until(lambda: site.state == "PAUSING")
    name = site.replica()["operation"]["id"]
    assert name in flyweight("update", code=8)
    site.engine.tell("finish")
    assert pausing.result(LIMIT)[0] == 200


@pytest.mark.check
@pytest.mark.parametrize("verb", ["pause", "resume", "clear", "restore", "update"])
def test_a_call_to_a_frozen_engine_ends_at_its_timeout(site, verb):
    """C24: the user waits for `--timeout`, plus half a second and what a busy machine adds."""
    with frozen(site), in_time(0.5):
        told = flyweight(verb, "--timeout", 0.5, code=7)
    assert "TransferTimeout" in told


def test_a_timeout_is_exit_code_7(site):
    site.engine.tell("request")
    assert "TransferTimeout" in flyweight("pause", "--timeout", 0.1, code=7)
    until(lambda: site.state == "SERVING")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["status", "http://127.0.0.1:1", "--token-file", "TOKEN"], 7, "no control server answers"),
        (["status", "http://127.0.0.1:1"], 7, "there is no token file"),
        (["status", "unix:run"], 5, "is not of the form 'http://HOST:PORT'"),
        (["status", "http://127.0.0.1:x"], 5, "is not of the form 'http://HOST:PORT'"),
        (["pause", "--replica", "other"], 5, "there is no replica 'other'"),
        (["clear", "--tags", "wieghts"], 5, "tag is 'wieghts', expected 'weights' or 'kv_cache'"),
        (["restore", "--tags", "weights,all"], 5, "tag is 'all', expected 'weights' or 'kv_cache'"),
        (["status", "--token-file", "OPEN"], 7, "chmod 600"),
        (["status", "--token-file", "WRONG"], 7, "did not prove that it knows the token of"),
        (["pause", "--timeout", "0"], 2, "--timeout"),
    ],
    ids=str,
)
def test_errors_say_what_is_wrong_and_what_to_do(site, tmp_path, words, code, says):
    for name, text, mode in (
        ("TOKEN", site.token, 0o600),
        ("OPEN", site.token, 0o644),
        ("WRONG", "another", 0o600),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    files = {name: str(tmp_path / name) for name in ("TOKEN", "OPEN", "WRONG")}
    assert says in flyweight(*(files.get(word, word) for word in words), code=code)


def test_the_token_may_be_in_the_environment(site, monkeypatch, tmp_path):
    monkeypatch.setenv("FLYWEIGHT_RUN", str(tmp_path))
    monkeypatch.setenv("FLYWEIGHT_TOKEN", site.token)
    assert flyweight("status", "--json")["replicas"]


def proof_of_token(data):
    """Return the answer to a challenge of one who knows the token `any`; None to all else."""
    found = re.search(rb"/challenge.nonce=(\w+)", data)
    if found is None:
        return None
    shown = proof("any", "server", found[1].decode(), "7")
    return told_json({"result": {"nonce": "7", "proof": shown}})


@pytest.mark.parametrize(
    "body", [b"hello", b'{"result": 5}', b'{"replicas": []}', b"[1]", b"[" * 99_999], ids=str
)
def test_a_server_of_another_kind_is_recognized(monkeypatch, body):
    """Even if it knows the token."""
    monkeypatch.setenv("FLYWEIGHT_TOKEN", "any")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with Stranger(lambda data: proof_of_token(data) or answer) as stranger:
        address = f"http://127.0.0.1:{stranger.port}"
        assert "is it a control server?" in flyweight("status", address, code=7)


def test_a_missing_progress_report_does_not_end_the_command():
    """Progress is shown in passing; the command ends with the answer to what it asked for."""
    has_missed = threading.Event()

    def answer(data):
        if data.startswith(b"GET /status"):
            has_missed.set()
            return b""  # closes the connection
        if shown := proof_of_token(data):
            return shown
        assert has_missed.wait(LIMIT)
        ended = {"replica": "e", "state": "PAUSED", "version": 3, "operation": "pause-1"}
        return told_json({"result": {"replicas": [{**ended, "seconds": 0.1}]}})

    with Stranger(answer) as stranger, Terminal() as terminal:
        words = ["pause", f"http://127.0.0.1:{stranger.port}", "--json"]
        with start(*words, stderr=terminal.file, FLYWEIGHT_TOKEN="any", TERM="xterm") as pause:
            out, _ = pause.output()
    assert has_missed.is_set()
    assert pause.process.returncode == 0
    assert json.loads(out)["replicas"][0]["state"] == "PAUSED"


def test_a_server_whose_thread_ends_is_exit_code_6(tmp_path, monkeypatch):
    async def main_loop(self):
        raise OSError("no more files")

    monkeypatch.setattr("uvicorn.Server.main_loop", main_loop)
    words = ["serve", "--replica", f"e={tmp_path}/e.cell", "--port", 0, "--run", tmp_path / "run"]
    assert "ended by itself: OSError: no more files" in flyweight(*words, code=6)


def test_top_once_shows_the_status(site):
    assert "SERVING" in flyweight("top", "--once")
    assert flyweight("top", "--once", "--json")["replicas"][0]["name"] == "engine"


def test_top_prints_a_line_for_each_change_until_the_server_ends(site):
    with start("top", site.address, "--run", site.run, "--json") as top:
        assert json.loads(top.line())["replicas"][0]["state"] == "SERVING"
        site.good("POST", "/v1/pause")
        while json.loads(top.line())["replicas"][0]["state"] != "PAUSED":
            pass


def test_a_terminal_shows_the_progress_of_an_operation(site):
    """Only a terminal shows the progress bar."""
    site.engine.tell("request")
    with (
        Terminal() as terminal,
        start("pause", site.address, "--run", site.run, stderr=terminal.file) as pause,
    ):
        terminal.read_until(b"PAUSING")
        site.engine.tell("finish")
        out, _ = pause.output()
    assert "engine: PAUSED" in out


def test_a_second_server_for_one_replica_is_refused(site, tmp_path):
    done = run("serve", "--replica", f"engine={site.cell}", "--port", 0, "--run", tmp_path)
    assert (done.returncode, done.stdout) == (8, "")
    assert "has the controller already" in done.stderr


def test_a_port_in_use_is_exit_code_6(site, tmp_path):
    port = site.address.rpartition(":")[2]
    done = run("serve", "--replica", f"e={tmp_path}/e.cell", "--port", port, "--run", tmp_path)
    assert (done.returncode, done.stdout) == (6, "")
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--replica", "CELL"], 2, "NAME=CELL"),
        (["--replica", "=CELL"], 2, "NAME=CELL"),
        (["--replica", "a=CELL:0"], 5, "num_ranks is 0"),
        (["--replica", "a=CELL", "--host", "0.0.0.0"], 5, "--allow-remote"),
        (["--replica", "a=CELL", "--replica", "a=OTHER"], 5, "names of their own"),
        ([], 2, "--replica"),
    ],
    ids=str,
)
def test_serve_refuses_bad_options(tmp_path, words, code, says):
    words = [
        word.replace("CELL", f"{tmp_path}/cell").replace("OTHER", f"{tmp_path}/other")
        for word in words
    ]
    assert says in flyweight("serve", *words, "--port", 0, "--run", tmp_path / "run", code=code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_cleanly_on_a_signal(tmp_path, number):
    cell = tmp_path / "e.cell"
    words = ["serve", "--replica", f"e={cell}:2", "--port", 0, "--run", tmp_path / "run"]
    with start(*words) as served:
        assert served.line().startswith("controlling e at http://127.0.0.1:")
        assert "/#token=" in served.line()
        path = served.line().removeprefix("token: in ")
        with open(path) as file:
            token = file.read()
        assert served.end(number) == ("", "")
        assert served.process.returncode == 0
    assert token.isalnum()


def test_a_signal_before_the_server_runs_ends_it_too(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from flyweight.cli import main\n"
        "from flyweight.server import http\n"
        "real = http.make_app\n"
        "def make_app(*given, **options):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(*given, **options)\n"
        "http.make_app = make_app\n"
        "main(sys.argv[1:])"
    )
    words = ["serve", "--replica", f"e={tmp_path}/e.cell", "--port", "0", "--run", tmp_path / "run"]
    done = run_python(code, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path / "run") == []


def test_other_commands_do_not_import_the_server_extra():
    code = (
        "import sys, flyweight.cli\n"
        "print([m for m in ('starlette', 'uvicorn', 'prometheus_client') if m in sys.modules])"
    )
    done = run_python(code)
    assert done.stdout == "[]\n", done.stderr
