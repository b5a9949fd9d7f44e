"""The page of the protocol names every message, and the limits that the code has."""

import importlib
import re
from pathlib import Path

import pytest

from flyweight.live import messages
from flyweight.transports import channel

TEXT = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()
UNITS = {"": 1, "bytes": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}
LIMITS = re.findall(r"\| ([\d.]+) ?(\w*) \| `(\w+)/(\w+)\.py: (\w+)` \|", TEXT)


def messages_of(module):
    """Return the names of the messages that a module defines."""
    return {
        name
        for name, each in vars(module).items()
        if isinstance(each, type)
        and issubclass(each, channel.Message)
        and each is not channel.Message
        and each.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", sorted(messages_of(messages) | messages_of(channel)))
def test_a_message_is_described(name):
    assert f"`{name}`" in TEXT


@pytest.mark.parametrize(("number", "unit", "room", "file", "name"), LIMITS)
def test_a_limit_is_that_of_the_code(number, unit, room, file, name):
    module = importlib.import_module(f"flyweight.{room}.{file}")
    assert getattr(module, name) == float(number) * UNITS[unit]


def test_the_page_has_limits_and_all_invariants():
    assert len(LIMITS) > 15
    numbers = [int(each) for each in re.findall(r"^(\d+)\. ", TEXT, re.MULTILINE)]
    assert numbers == list(range(1, 18))
