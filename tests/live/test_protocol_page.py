"""The page about the protocol describes the messages as they are."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from flyweight.live import frames, messages, rank_messages, report, running_round
from flyweight.live.connection import HEARTBEATS
from flyweight.live.source_rank import REMEMBERED_SHARES
from flyweight.plans import tables as message_tables
from flyweight.plans.copy_table import MAX_COPIES, MAX_PAIRS

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
KINDS = {
    kind.__name__: kind
    for module in (messages, rank_messages, message_tables, report)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ == module.__name__
    and kind not in (messages.Message, message_tables.Table)
}
OTHERS = {
    *("lock", "token", "control", "door", "flock", "fw", "type", "welcome", "full"),
    *("file", "gone", "shared_memory", "network", "cuda_ipc", "published", "held", "snapshot"),
    *("words", "xxh3", "publish", "ranks", "hold", "replica", "watcher", "source"),
    *("write", "keep", "commit", "fail", "withdraw_seconds"),
}
"""Words in code type that are no field of a message: files, values and options."""
MET = {"Holding": "every rank", "Invitation": "rank 0"}
"""Who sends what source ranks exchange when they meet, before they use frames."""


SENDERS = {"replica", "publisher", "follower", "rank 0"}


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
    assert len(KINDS) > 40
    frame_kinds = {*typing.get_args(frames.FromReplica), *typing.get_args(frames.FromPublisher)}
    assert frame_kinds <= set(KINDS.values())
    assert sorted(name for _, name, _ in rows()) == sorted(KINDS)


@pytest.mark.parametrize(("name", "fields"), [(name, fields) for _, name, fields in rows()])
def test_a_row_has_the_fields_of_its_class_in_order(name, fields):
    assert [each for each in fields.split(", ") if each] == fields_of(KINDS[name])


@pytest.mark.parametrize(("sender", "name"), [(sender, name) for sender, name, _ in rows()])
def test_a_row_says_who_sends_its_message(sender, name):
    kind, is_of_ranks = KINDS[name], KINDS[name].__module__ == rank_messages.__name__
    to_publisher = kind in typing.get_args(frames.FromReplica)
    from_publisher = kind in typing.get_args(frames.FromPublisher)
    if name in MET:
        assert sender == MET[name]
        assert not issubclass(kind, (messages.Message, message_tables.Table))
    elif to_publisher or from_publisher:
        senders = {"replica", "publisher"} if sender == "both" else set(sender.split(", "))
        assert bool(senders & {"replica", "follower"}) == to_publisher
        assert bool(senders & {"publisher", "rank 0"}) == from_publisher
        assert senders <= ({"follower", "rank 0"} if is_of_ranks else SENDERS)
    else:
        columns = set(fields_of(kind)) - {"num_dims"}
        hints = typing.get_type_hints(kind)
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
    assert re.findall(r"protocol number \((\d+)\)", PAGE) == [str(frames.PROTOCOL)]
    assert re.findall(r"frame over (\d+) MiB", PAGE) == [str(frames.MAX_MESSAGE_BYTES >> 20)]
    assert re.findall(r"more than\s(\d+)", PAGE) == [str(MAX_COPIES), str(MAX_PAIRS)]
    assert re.findall(r"remember the (\d+) shares", PAGE) == [str(REMEMBERED_SHARES)]
    assert re.findall(r"no progress for (\d+) s", PAGE) == [f"{running_round.GRACE_SECONDS:g}"]
    assert HEARTBEATS == 5
    assert "send `Tick` five times in `silence_seconds`" in PAGE
    assert re.findall(r"`num_dims` numbers per row, from 1 to (\d+)", PAGE) == [
        str(message_tables.MAX_DIMS)
    ]
