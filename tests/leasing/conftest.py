"""Fixtures of tests that run trainers and engines."""

import pytest

from leasing.leasing_processes import Processes


@pytest.fixture
def processes():
    with Processes() as found:
        yield found
