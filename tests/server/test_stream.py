"""The stream of events. Here the test is the rank whose status changes."""

import os
import socket
import time
from itertools import count

import pytest

from child_processes import until
from control_site import TOKEN, serving
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import State
from flyweight.server import app as server_app
from flyweight.server import http as server_http


@pytest.fixture
def change(tmp_path):
    """A function that changes what the rank reports."""
    with Cell(tmp_path / "engine.cell") as cell:
        cell.claim(0)

        def change(state=State.SERVING, **fields):
            cell.write_record(0, RankRecord(pid=os.getpid(), absent=(), state=state, **fields))

        change()
        yield change


@pytest.fixture
def control(tmp_path, change):
    return Control(tmp_path / "engine.cell", 1, name="engine")


@pytest.fixture
def site(control):
    with serving([control]) as site:
        yield site


def test_the_stream_reports_each_change(site, change):
    with site.events() as next_event:
        assert next_event()["replicas"][0]["state"] == "SERVING"
        for state in (State.PAUSED, State.SERVING):
            change(state)
            while next_event()["replicas"][0]["state"] != state:
                pass


def test_the_stream_sends_at_most_twenty_events_a_second(site, change):
    began = time.monotonic()
    with site.events() as next_event:
        next_event()
        for number in range(10):
            change(num_running=number + 1)
            while next_event()["replicas"][0]["ranks"][0]["num_running"] != number + 1:
                pass
    assert time.monotonic() - began > 0.4


def test_the_number_of_listeners_is_limited(site, monkeypatch):
    monkeypatch.setattr(server_app, "MAX_STREAMS", 1)
    with site.events() as next_event:
        assert next_event()
        code, told = site.ask("GET", "/events")
        assert (code, told["status"]) == (503, "error")
    until(lambda: site.fleet.num_listeners == 0)  # a client that left makes room
    with site.events() as next_event:
        assert next_event()


def test_a_client_that_does_not_read_is_dropped(control, change, monkeypatch):
    monkeypatch.setattr(server_http, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(server_app, "INTERVAL_SECONDS", 0.0)
    with serving([control]) as site, socket.socket() as client:
        site.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(site.listener.getsockname())
        head = f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        client.sendall(f"{head}\r\n".encode())
        until(lambda: site.fleet.num_listeners == 1)
        numbers = count()

        def is_dropped():
            change(num_running=next(numbers), reason=700 * "x")
            return site.fleet.num_listeners == 0

        until(is_dropped)


def test_a_head_request_for_events_ends(site):
    assert site.raw("HEAD", "/events")[0] == 405
