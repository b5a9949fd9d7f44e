"""Readers see in a register which offers stand, without asking the process that offers."""

import mmap
import os
from contextlib import closing

import pytest

from flyweight.errors import HandleGone, TransportError
from flyweight.transports import offer_register
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.offer_register import OfferRegister, read_register
from patience import patient  # noqa: F401

SESSION = "00000000000000ab"


@pytest.fixture
def server(tmp_path):
    with closing(FdServer(tmp_path / "fds", token="secret")) as server:
        yield server


@pytest.fixture
def connection(server, tmp_path):
    with closing(FdConnection(tmp_path / "fds", token="secret")) as connection:
        yield connection


def test_a_reader_sees_offers_come_and_go(server, connection):
    register = OfferRegister(SESSION, server)
    first, second = register.enter(7), register.enter(8)
    seen = read_register(connection, register.key)
    assert (seen[0], seen[first], seen[second]) == (0xAB, 7, 8)
    register.remove(first)
    assert (seen[first], seen[second]) == (0, 8)
    assert register.enter(9) == first
    assert seen[first] == 9
    register.close()
    assert not seen[1:].any()


def test_a_closed_register_is_no_longer_passed_on_and_a_new_one_begins(server, connection):
    register = OfferRegister(SESSION, server)
    register.enter(7)
    key = register.key
    register.close()
    register.close()
    with pytest.raises(HandleGone):
        connection.fetch(key)
    slot = register.enter(8)
    assert read_register(connection, register.key)[slot] == 8


def test_a_reader_cannot_write(server, connection):
    register = OfferRegister(SESSION, server)
    slot = register.enter(7)
    with pytest.raises(ValueError, match="read-only"):
        read_register(connection, register.key)[slot] = 8
    fd = connection.fetch(register.key)
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(fd, 8)
    os.close(fd)


def test_more_offers_than_slots_are_refused(monkeypatch):
    monkeypatch.setattr(offer_register, "MAX_OFFERS", 2)
    register = OfferRegister(SESSION, None)
    assert [register.enter(number) for number in (1, 2)] == [1, 2]
    with pytest.raises(TransportError, match="2 offers"):
        register.enter(3)
    register.remove(1)
    assert register.enter(4) == 1
