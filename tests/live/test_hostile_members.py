"""Peers that have the token and say anything: the holder refuses them, and serves all others."""

import dataclasses
import logging
import os
import types
import typing
from time import monotonic

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

from campaign import budget
from child_processes import LIMIT, until
from flyweight.errors import FlyweightError
from flyweight.live import Publisher
from flyweight.live import messages as live_messages
from flyweight.live.messages import Join, Welcome
from flyweight.live.reader import Identity, open_channel
from flyweight.transports.address import parse_address, this_host
from flyweight.transports.channel import Message
from live.live_processes import TOKEN
from live.one_process import holds, model, reader

ME = Identity("me", token=TOKEN, is_remote=True)
KINDS = [
    each
    for each in vars(live_messages).values()
    if isinstance(each, type) and issubclass(each, Message) and each is not Message
]
NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 63, 64, 4096, 2**31, 2**40, 2**63 - 1])
SECONDS = st.sampled_from([-1.0, 0.0, 0.01, float("nan")])  # longer ones last a minute at most
TEXTS = st.sampled_from(["", "x", "engine", "\0", "é" * 50, "tcp://127.0.0.1:9", "a" * 5000])


def values_of(kind, depth=0):
    """Return a strategy for values of an annotation, among them those at all of its edges."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return values_of(arguments[0], depth)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values_of(each, depth) for each in arguments))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values_of(arguments[0], depth + 1), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(each, depth) for each in arguments))
    if origin is dict:
        return st.dictionaries(TEXTS, values_of(arguments[1], depth + 1), max_size=2)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs_of(kind, depth + 1)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.fixed_dictionaries({name: values_of(each) for name, each in hints.items()})
    known = {
        int: NUMBERS,
        float: SECONDS,
        str: TEXTS,
        bool: st.booleans(),
        bytes: st.binary(max_size=64),
        type(None): st.none(),
    }
    return known.get(kind, st.none())


def structs_of(kind, depth=0):
    """Return a strategy for structs that their own checks let pass on this side."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: values_of(hints[name], depth) for name in kind.__struct_fields__}

    def made(values):
        try:
            return kind(**values)
        except (FlyweightError, ValueError):
            reject()

    return st.fixed_dictionaries(fields).map(made)


@pytest.fixture(scope="module")
def source():
    with Publisher(model(1), "tcp://127.0.0.1:0", token=TOKEN, keep="memory") as publisher:
        publisher.publish(1)
        yield publisher


def conversation(source, is_joined):
    deadline = monotonic() + LIMIT
    endpoint = parse_address(source.address).endpoint
    channel = open_channel(endpoint, ME, deadline)
    if is_joined:
        channel.call(Join("me", os.getpid(), 0, 1, this_host(), None, ""), Welcome, deadline)
    return channel, deadline


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
@settings(
    max_examples=budget(15, 500),
    phases=[Phase.generate],  # a hang would be tried again and again
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(data=st.data())
def test_whatever_a_member_says_it_is_answered_or_sent_away_and_breaks_nothing(
    source, caplog, kind, data
):
    channel, deadline = conversation(source, data.draw(st.booleans()))
    with caplog.at_level(logging.WARNING, "flyweight"):
        try:
            for message in data.draw(st.lists(structs_of(kind), min_size=1, max_size=3)):
                channel.send(
                    message, deadline, number=data.draw(st.sampled_from([0, 1, 2**32 - 1]))
                )
        except (FlyweightError, msgspec.ValidationError, OverflowError):
            pass  # it was sent away before it had said all, or cannot say it
        finally:
            channel.close()
        until(lambda: not source.shelf._readers)
    failed = [each.getMessage() for each in caplog.records if "failed" in each.getMessage()]
    assert not failed  # an error that nobody has thought of
    caplog.clear()


def test_a_good_engine_is_served_after_all_that(source):
    arrays = model()
    with reader(arrays, source.address, name="engine") as sink:
        assert sink.update(1, timeout_seconds=LIMIT).version == 1
    assert holds(arrays, 1)
