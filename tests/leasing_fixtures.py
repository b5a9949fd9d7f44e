"""Fixtures of the tests of leases, which run trainers and engines in processes."""

import pytest


@pytest.fixture
def processes():
    from leasing.leasing_processes import Processes

    with Processes() as found:
        yield found
