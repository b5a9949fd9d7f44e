"""The page about the protocol describes the messages as they are."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from flyweight.live import message_tables, messages
from flyweight.plans.copy_table import MAX_COPIES, MAX_PAIRS

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
KINDS = {
    kind.__name__: kind
    for module in (messages, message_tables)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ in (messages.__name__, message_tables.__name__)
    and not kind.__name__.startswith("_")
}
OTHERS = {
    *("lock", "token", "control", "door", "flock", "fw", "type", "welcome", "full"),
    *("file", "gone", "shared_memory", "cuda_ipc", "published", "held", "snapshot"),
    *("words", "xxh3", "publish", "timeout_seconds"),
}
"""Words in code type that are no field of a message: files, values and options."""


def rows():
    """Yield each row that describes a message or a table: who sends it, its name, its fields."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for sender, cell, fields in zip(cells, cells[1:], cells[2:], strict=False):
            if line.startswith("|") and re.fullmatch(r"`[A-Z]\w+`", cell):
                yield sender, cell.strip("`"), fields


def fields_of(kind):
    return [field.name for field in msgspec.structs.fields(kind)]


def test_every_message_and_table_has_one_row():
    assert len(KINDS) > 20
    assert sorted(name for _, name, _ in rows()) == sorted(KINDS)


@pytest.mark.parametrize(("name", "fields"), [(name, fields) for _, name, fields in rows()])
def test_a_row_has_the_fields_of_its_class_in_order(name, fields):
    assert [each for each in fields.split(", ") if each] == fields_of(KINDS[name])


@pytest.mark.parametrize(("sender", "name"), [(sender, name) for sender, name, _ in rows()])
def test_a_row_says_who_sends_its_message(sender, name):
    from_replica = KINDS[name] in typing.get_args(messages.FromReplica)
    from_publisher = KINDS[name] in typing.get_args(messages.FromPublisher)
    senders = {
        (True, False): "replica",
        (False, True): "publisher",
        (True, True): "both",
    }
    if (from_replica, from_publisher) in senders:
        assert sender == senders[from_replica, from_publisher]
    else:
        columns = set(fields_of(KINDS[name])) - {"num_dims"}
        hints = typing.get_type_hints(KINDS[name])
        is_table = all(hints[column] is bytes for column in columns)
        assert sender == ("table" if is_table else "record")


def test_the_text_names_only_fields_that_exist():
    known = {name for kind in KINDS.values() for name in fields_of(kind)} | OTHERS
    words = set(re.findall(r"`([a-z]\w*)`", PAGE))
    assert sorted(words - known) == []
    for name, field in re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE):
        if name in KINDS:
            assert field in fields_of(KINDS[name])
    assert {"Begin.memory", "Begin.digests"} <= set(re.findall(r"`(\w+\.\w+)`", PAGE))


def test_the_numbers_are_those_of_the_code():
    assert re.findall(r"protocol number \((\d+)\)", PAGE) == [str(messages.PROTOCOL)]
    assert re.findall(r"frame over (\d+) MiB", PAGE) == [str(messages.MAX_MESSAGE_BYTES >> 20)]
    assert re.findall(r"more than\s(\d+)", PAGE) == [str(MAX_COPIES), str(MAX_PAIRS)]
    assert re.findall(r"`num_dims` numbers per row, from 1 to (\d+)", PAGE) == [
        str(message_tables.MAX_DIMS)
    ]
