"""Tokens and proofs: what commands send to a stranger at the port, and which tokens a server takes."""

import json
import os
import re
import signal
import socket
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest

from child_processes import LIMIT, in_time
from commands import flyweight, run, start
from control_site import Site, Stranger, told_json
from flyweight.cli import tokens
from flyweight.cli.client import Client
from flyweight.errors import PeerRefused, StoreError, TransferTimeout
from flyweight.proofs import proof


def serve(place, *words, port=0, cell="e.cell"):
    """Return the words of a command."""
    return (
        "serve", "--replica", f"e={place}/{cell}", "--port", port, "--run", place / "run",
        "--json", *words,
    )  # fmt: skip


@contextmanager
def serving(place, *words, **options):
    """`flyweight serve`: the process, its token, its port, and a client for it."""
    with start(*serve(place, *words, **options)) as process:
        told = json.loads(process.line())
        process.token_file = Path(told["token_file"])
        process.token = process.token_file.read_text()
        process.site = Site(told["address"], process.token)
        process.port = int(told["address"].rpartition(":")[2])
        yield process


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that only answers."""
    with serving(tmp_path_factory.mktemp("answers")) as server:
        yield server


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """A killed server, whose token is still in its file."""
    with serving(tmp_path_factory.mktemp("killed")) as server:
        server.kill()
        server.join()
    assert server.token_file.read_text() == server.token
    return server


CLAIMS = {
    "says nothing": lambda data: b"",
    "says that all is well": lambda data: told_json({"status": "success", "result": {"replicas": []}}),
    "asks for the token": lambda data: b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\n"
    b"Content-Length: 0\r\n\r\n",
    "leads elsewhere": lambda data: b"HTTP/1.1 302 Found\r\nLocation: /status\r\n"
    b"Content-Length: 0\r\n\r\n",
    "makes a proof up": lambda data: told_json(
        {"status": "success", "result": {"nonce": "0" * 32, "proof": "0" * 64}}
    ),
    "says a proof that is no text": lambda data: told_json(
        {"status": "success", "result": {"nonce": 7, "proof": ["é"]}}
    ),
    "gives the question back": lambda data: told_json(
        {"status": "success", "result": {"nonce": "0" * 32, "proof": data.decode("latin-1")}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("words", [["status"], ["pause", "--timeout", "5"], ["top"]], ids=str)
def test_a_stranger_at_the_port_of_a_killed_server_is_not_sent_its_token(left_behind, words, claim):
    """C33: its token file is still there; the command says why it refuses, and what to do."""
    with Stranger(CLAIMS[claim], ("127.0.0.1", left_behind.port)) as stranger:
        address = f"http://127.0.0.1:{left_behind.port}"
        told = flyweight(*words, address, "--run", left_behind.token_file.parent, code=7)
        assert stranger.received  # it got a request, and answered
        assert left_behind.token.encode() not in stranger.received
        assert b"authorization" not in stranger.received.lower()
    assert f"{address} did not prove that it knows the token of " in told
    assert str(left_behind.token_file) in told
    assert "the token was not sent" in told
    assert "start flyweight serve again" in told


def test_a_token_of_the_environment_or_a_file_is_not_sent_to_a_stranger(left_behind, monkeypatch):
    """C33"""
    with Stranger(CLAIMS["asks for the token"]) as stranger:
        address = f"http://127.0.0.1:{stranger.port}"
        flyweight("status", address, "--token-file", left_behind.token_file, code=7)
        monkeypatch.setenv("FLYWEIGHT_TOKEN", left_behind.token)
        assert "the token of FLYWEIGHT_TOKEN" in flyweight("status", address, code=7)
        assert stranger.received.count(b"GET ") == 2
        assert left_behind.token.encode() not in stranger.received


def test_a_stranger_who_relays_everything_to_the_server_learns_no_token(server):
    """C33: at another port of the same machine; a proof that it saw cannot be used again."""

    def ask(data):
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as line:
            line.sendall(data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            return b"".join(iter(lambda: line.recv(65536), b""))

    def pass_on(data):
        return re.sub(rb"\r\nconnection: close", b"", ask(data), flags=re.IGNORECASE)

    with Stranger(pass_on) as stranger:
        address = f"http://127.0.0.1:{stranger.port}"
        told = flyweight("status", address, "--json", "--token-file", server.token_file)
        assert told["replicas"][0]["name"] == "e"
        assert server.token.encode() not in stranger.received
        start = stranger.received.rindex(b"GET /status")
        again = bytes(stranger.received[start:])
        assert b"Authorization" in again
        assert b" 401 " in ask(again).partition(b"\r\n")[0]
        for other in (
            again.replace(b"GET /status", b"POST /v1/pause"),
            again.replace(b"/status", b"/versions"),
        ):
            assert b" 401 " in ask(other).partition(b"\r\n")[0]  # fmt: skip


def test_the_proof_of_one_request_is_valid_for_no_other(server):
    """C33: not for another route, other options, or a body."""

    def tried(method, path, asked=None, body=None, token=server.token):
        _, told = server.site.ask("GET", f"/challenge?nonce={'a' * 32}", token="")
        nonce, shown = told["result"]["nonce"], told["result"]["proof"]
        assert shown == proof(server.token, "server", "a" * 32, nonce)
        mac = proof(token, "request", nonce, method, path)
        headers = {"Authorization": f"Flyweight {nonce} {mac}"}
        return server.site.ask(method, asked or path, body, headers=headers)[0]

    assert tried("GET", "/status") == 200
    assert tried("GET", "/v1/is_paused?replica=e") == 200
    assert tried("GET", "/v1/is_paused?replica=e", "/v1/is_paused") == 401
    assert tried("GET", "/status", "/versions") == 401
    assert tried("GET", "/status", token="0" * 32) == 401
    assert tried("POST", "/v1/pause", body={"timeout": 9}) == 401
    assert tried("POST", "/v1/pause") == 503  # passed on to the app: no engine has started


def test_a_malformed_challenge_is_refused(server):
    for query in ("", "?nonce=", "?nonce=short", f"?nonce={'%C3%A9' * 32}", "?other=1"):
        assert server.site.ask("GET", f"/challenge{query}", token="")[0] == 400
    assert server.site.ask("POST", f"/challenge?nonce={'a' * 32}", token="")[0] == 405
    headers = {"Origin": "http://elsewhere.example"}
    assert server.site.ask("GET", "/challenge", token="", headers=headers)[0] == 403


# Token files.


def test_each_start_makes_a_new_token_and_refuses_the_old_one(tmp_path):
    """C33: even after a kill, which leaves the token file."""
    with serving(tmp_path) as first:
        assert first.site.ask("GET", "/status")[0] == 200
        first.kill()
        first.join()
    with serving(tmp_path, port=first.port) as second:
        assert second.token_file == first.token_file
        assert second.token != first.token
        assert second.site.ask("GET", "/status", token=first.token)[0] == 401
        assert second.site.ask("GET", "/status")[0] == 200
        status = second.token_file.stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.geteuid())
        assert flyweight("status", second.site.address, "--run", tmp_path / "run", "--json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_removes_its_token_file_when_it_ends(tmp_path, number):
    with serving(tmp_path) as server:
        assert server.end(number) == ("", "")
        assert os.listdir(tmp_path / "run") == []
        told = flyweight("status", server.site.address, "--run", tmp_path / "run", code=7)
        assert "there is no token file" in told


def test_a_server_that_cannot_start_leaves_no_token(tmp_path):
    (tmp_path / "e.cell").mkdir()
    flyweight(*serve(tmp_path), code=6)
    assert os.listdir(tmp_path / "run") == []


def test_servers_at_two_ports_leave_each_others_tokens_alone(tmp_path):
    with serving(tmp_path) as first:
        with serving(tmp_path, cell="other.cell") as second:
            assert first.token_file != second.token_file
            assert first.token != second.token
            assert second.site.ask("GET", "/status", token=first.token)[0] == 401
            second.end(signal.SIGTERM)
            assert not second.token_file.exists()
        assert first.token_file.read_text() == first.token
        assert flyweight("status", first.site.address, "--run", tmp_path / "run", "--json")


def test_a_server_at_the_same_port_of_another_address_does_not_replace_the_token(tmp_path):
    with serving(tmp_path) as first:
        words = ["--replica", f"o={tmp_path}/o.cell", "--host", "127.0.0.2", "--port", first.port]
        done = run("serve", *words, "--run", tmp_path / "run")
        assert (done.returncode, done.stdout) == (6, "")
        assert str(first.token_file) in done.stderr
        assert "--run" in done.stderr
        assert first.token_file.read_text() == first.token


@pytest.mark.parametrize("kind", ["open", "link", "another user's", "directory"])
def test_a_token_is_not_written_to_a_file_that_is_not_private(tmp_path, kind):
    """C33: the file is refused and stays as it is."""
    path = tmp_path / "server-1.token"
    path.touch(0o600)
    if kind == "open":
        path.chmod(0o644)
    elif kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can make a file of another user's")
        os.chown(path, 12345, -1)
    else:
        path.unlink()
        path.mkdir() if kind == "directory" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((PeerRefused, StoreError), match=str(path)), tokens.server_token(path):
        pass
    assert os.listdir(tmp_path) == [path.name]


def test_a_token_file_of_the_user_is_neither_changed_nor_removed(tmp_path):
    """Such as a mounted secret that several programs share."""
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef-of-my-own\n")
    path.chmod(0o400)
    for _ in range(2):
        with serving(tmp_path, "--token-file", path) as server:
            assert server.token_file == path
            assert flyweight("status", server.site.address, "--token-file", path, "--json")
            assert server.end(signal.SIGTERM) == ("", "")
        assert path.read_text() == "0123456789abcdef-of-my-own\n"


@pytest.mark.parametrize(
    ("text", "says"), [(None, "there is no token file"), ("short", "5 characters")]
)
def test_a_missing_or_short_token_is_refused(tmp_path, text, says):
    """Anyone may request a proof and try tokens against it, so a short token could be found."""
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    told = flyweight(*serve(tmp_path, "--token-file", path), code=7)
    assert says in told["message"]
    assert "openssl rand -hex 16" in told["message"]
    assert path.exists() == (text is not None)


def test_a_call_to_a_stopped_server_ends_at_its_timeout(tmp_path):
    """C24: the user waits for `--timeout`, even if the server itself does not answer."""
    with serving(tmp_path) as server:
        server.kill(signal.SIGSTOP)
        try:
            words = ["pause", server.site.address, "--run", tmp_path / "run", "--timeout", 0.5]
            with in_time(0.5):
                assert "no answer" in flyweight(*words, code=7)
        finally:
            server.kill(signal.SIGCONT)


def test_a_call_to_a_server_that_answers_byte_by_byte_ends_at_its_timeout(left_behind):
    """C24: no single byte is late, but the whole answer would never end."""

    def drop(connection):
        connection.recv(65536)
        for letter in b"HTTP/1.1 200 OK\r\nX: " + 600 * b"a":
            connection.sendall(bytes([letter]))
            sleep(0.1)  # the slow server under test, not a wait of the test

    with Stranger(drop=drop, address=("127.0.0.1", left_behind.port)):
        client = Client(f"http://127.0.0.1:{left_behind.port}", left_behind.token, "a test")
        with in_time(0.5), pytest.raises(TransferTimeout, match=r"0\.5 s"):
            client.call("GET", "/status", timeout_seconds=0.5)
