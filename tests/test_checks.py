"""Checks of arguments: the value comes back, or SpecError says both what was given and needed."""

from enum import Enum

import numpy as np
import pytest

from flyweight.checks import (
    check_memory_bytes,
    check_seconds,
    check_threads,
    check_version,
    one_of,
)
from flyweight.errors import SpecError


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize("seconds", [0, 1, 0.5, 1e6])
def test_a_time_to_wait_is_a_float(seconds):
    found = check_seconds("timeout_seconds", seconds)
    assert (type(found), found) == (float, seconds)


@pytest.mark.parametrize("seconds", [-1, 1e6 + 1, float("inf"), float("nan"), True, "1", None])
def test_no_other_time_is_waited_for(seconds):
    with pytest.raises(SpecError, match="timeout_seconds is"):
        check_seconds("timeout_seconds", seconds)


@pytest.mark.parametrize("version", [0, 2**63 - 1, np.int32(7)])
def test_a_version_is_an_int(version):
    assert type(check_version(version)) is int
    assert check_version(version) == version


@pytest.mark.parametrize("version", [-1, 2**63, True, 1.0, "7", None])
def test_nothing_else_is_a_version(version):
    with pytest.raises(SpecError, match="whole number"):
        check_version(version)


@pytest.mark.parametrize("given", [0, (1 << 20) - 1, True, 2e6, "1"])
def test_a_verb_needs_a_mebibyte(given):
    assert check_memory_bytes(1 << 20) == 1 << 20
    with pytest.raises(SpecError, match="at least 1048576 are needed"):
        check_memory_bytes(given)


@pytest.mark.parametrize("given", [0, -1, True, 1.5])
def test_at_least_one_thread_is_needed(given):
    assert check_threads(1) == 1
    with pytest.raises(SpecError, match="at least 1 is needed"):
        check_threads(given)


def test_a_value_that_is_none_of_an_enum_is_answered_with_all_of_them():
    assert one_of(Colour, "red", "colour") is Colour.RED
    with pytest.raises(SpecError, match="colour is 'green', expected 'red' or 'blue'"):
        one_of(Colour, "green", "colour")
