"""Connections: clients that send slowly, read nothing, or are too many; and how a server ends."""

import os
import socket
import threading
from contextlib import ExitStack

import pytest
import uvicorn

from child_processes import LIMIT, in_time, until
from control_site import TOKEN, serving
from flyweight.errors import SpecError, StoreError
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import State
from flyweight.server import app as server_app
from flyweight.server import http as server_http
from flyweight.server.fleet import Fleet


@pytest.fixture
def site(tmp_path):
    """A server whose engine has not started."""
    with serving([Control(tmp_path / "engine.cell", 1, name="engine")]) as site:
        yield site


def connected(site):
    host, _, port = site.netloc.rpartition(":")
    connection = socket.create_connection((host, int(port)), LIMIT)
    connection.settimeout(LIMIT)
    return connection


def head(site, request="POST /v1/pause"):
    return f"{request} HTTP/1.1\r\nHost: {site.netloc}\r\nAuthorization: Bearer {site.token}\r\n"


def test_a_body_that_arrives_too_slowly_is_refused(site, monkeypatch):
    monkeypatch.setattr(server_app, "BODY_SECONDS", 0.1)
    with connected(site) as connection:
        connection.sendall(f"{head(site)}Content-Length: 9\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1000)


def test_half_a_request_does_not_keep_a_connection_for_ever(site, monkeypatch):
    """Otherwise a few hundred of them, which need no token, would shut everyone else out."""
    monkeypatch.setattr(server_http, "REQUEST_SECONDS", 0.1)
    with connected(site) as half:
        half.sendall(b"GET / HT")
        assert half.recv(1) == b""
    monkeypatch.undo()
    assert site.raw("GET", "/status")[0] == 200


@pytest.mark.parametrize("sent", ["", "GET / HT"])
def test_a_wait_for_a_request_ends_at_its_deadline(site, monkeypatch, sent):
    """C24"""
    monkeypatch.setattr(server_http, "REQUEST_SECONDS", 0.5)
    with in_time(0.5), connected(site) as connection:
        connection.sendall(sent.encode())
        assert connection.recv(65536) == b""


@pytest.mark.parametrize(
    ("name", "request_", "rest", "says"),
    [
        ("BODY_SECONDS", "POST /v1/pause", "Content-Length: 9\r\n\r\n{", b" 408 "),
        ("KEEPALIVE_SECONDS", "GET /events", "\r\n", b":\n\n"),
    ],
)
def test_a_slow_body_and_a_quiet_stream_are_answered_at_their_deadline(
    site, monkeypatch, name, request_, rest, says
):
    """C24"""
    monkeypatch.setattr(server_app, name, 0.5)
    with in_time(0.5), connected(site) as connection:
        connection.sendall(f"{head(site, request_)}{rest}".encode())
        text = b""
        while says not in text:
            more = connection.recv(65536)
            assert more, text
            text += more


def test_a_body_that_ends_early_is_the_clients_fault(site):
    with connected(site) as short:
        short.sendall(f"{head(site)}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        assert b" 400 " in short.recv(200)


def test_idle_connections_make_room_for_new_ones(tmp_path, monkeypatch):
    """Otherwise a few hundred of them, which need no token, would shut everyone else out."""
    monkeypatch.setattr(server_http, "MAX_CONNECTIONS", 8)
    with (
        Cell(tmp_path / "crowd.cell") as cell,
        serving([Control(cell.path, 1, name="crowd")]) as site,
        site.events() as next_event,
        ExitStack() as stack,
    ):
        assert next_event()["replicas"][0]["state"] == "ABSENT"
        crowd = [stack.enter_context(connected(site)) for _ in range(20)]
        assert site.raw("GET", "/versions")[0] == 200
        assert crowd[0].recv(1) == b""
        crowd[-1].sendall(f"GET /versions HTTP/1.1\r\nHost: {site.netloc}\r\n\r\n".encode())
        assert b" 401 " in crowd[-1].recv(200)  # the newest connection is still open
        cell.claim(0)
        cell.write_record(0, RankRecord(pid=os.getpid()))
        assert next_event()["replicas"][0]["state"] == "CLEARED"  # so is one that is in use


def test_a_client_that_reads_no_answer_does_not_keep_a_connection_for_ever(site, monkeypatch):
    monkeypatch.setattr(server_http, "REQUEST_SECONDS", 0.1)
    request = f"GET / HTTP/1.1\r\nHost: {site.netloc}\r\n\r\n".encode()
    with connected(site) as connection, pytest.raises(ConnectionError):
        while True:  # pages pile up until the server stops sending, and then closes
            connection.sendall(request * 100)


# The server's own end.


def test_a_server_that_ends_answers_calls_that_wait_and_ends_streams(tmp_path, threads):
    with Cell(tmp_path / "engine.cell") as cell, ExitStack() as stack:
        cell.claim(0)
        cell.write_record(0, RankRecord(pid=os.getpid(), state=State.SERVING, absent=()))
        with serving([Control(cell.path, 1, name="engine")]) as site:
            next_event = stack.enter_context(site.events())
            assert next_event()
            pausing = threads.submit(site.ask, "POST", "/v1/pause")
            until(lambda: cell.request() is not None)
        code, told = pausing.result(LIMIT)
        assert (code, told["error"]) == (503, "PeerLost")
        assert "pause-1" in told["result"]
        while next_event() is not None:
            pass


@pytest.fixture
def server(tmp_path):
    fleet = Fleet([Control(tmp_path / "engine.cell", 1)])
    with server_http.listen() as listener:
        server = server_http.HttpServer(
            fleet, listener, threading.Event(), host="127.0.0.1", token=TOKEN
        )
        server.listener = listener
        yield server
    fleet.close()


def test_an_empty_token_is_refused(tmp_path):
    with server_http.listen() as listener, pytest.raises(SpecError, match="the token is empty"):
        server_http.HttpServer(None, listener, threading.Event(), host="127.0.0.1", token="")


def test_a_server_that_does_not_start_raises(server):
    server.listener.close()
    with pytest.raises(StoreError, match="ended by itself: "):
        server.serve_until_over()


def test_a_server_whose_routes_do_not_start_raises(server):
    async def app(scope, receive, send):
        raise RuntimeError("no threads")

    server.config.app = app
    with pytest.raises(StoreError, match="ended by itself"):
        server.serve_until_over()


def test_a_server_that_ends_by_itself_is_noticed(server, monkeypatch):
    async def main_loop(self):
        pass

    monkeypatch.setattr(uvicorn.Server, "main_loop", main_loop)
    with pytest.raises(StoreError, match="ended by itself"):
        server.serve_until_over()
