"""A fixture for modules whose transports must not give up because the machine is busy."""

import pytest

from child_processes import LIMIT
from flyweight.live import line
from flyweight.transports import data_sockets, fd_passing, network


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait until `LIMIT` for what another process answers; a module that imports this has it."""
    for call in (
        data_sockets.DataConnection.__init__,
        fd_passing.FdConnection.__init__,
        fd_passing.FdConnection.fetch,
    ):
        monkeypatch.setitem(call.__kwdefaults__, "timeout_seconds", LIMIT)
    for module in (data_sockets, fd_passing, network, line):
        monkeypatch.setattr(module, "ANSWER_SECONDS", LIMIT)
    monkeypatch.setattr(data_sockets, "GREETING_SECONDS", 2 * LIMIT)
