"""Which engine two hosts use: every pair of what they may have, and what is said about the rest."""

import itertools
import os

import msgspec
import pytest

from flyweight.errors import MissingDependency, SpecError, TransportError
from flyweight.transports import network_engines
from flyweight.transports.network_engines import (
    Engine,
    Engines,
    choose_engine,
    common_engine,
    engines_here,
    variables,
)

HOSTS = [
    Engines(nixl=nixl, mooncake=mooncake, rdma=rdma)
    for nixl in ("", "1.5.1", "1.6.0")
    for mooncake in ("", "0.3.13.post1")
    for rdma in ((), ("mlx5_0",))
]
PAIRS = list(itertools.product(HOSTS, HOSTS))


def can(engine, ours, theirs):
    here, there = getattr(ours, engine.value, "x"), getattr(theirs, engine.value, "x")
    return bool(here) and here == there


@pytest.mark.parametrize("number", range(len(HOSTS)))
def test_by_default_nixl_is_used_with_rdma_and_nixl_on_both_sides_else_sockets(number):
    for theirs in HOSTS:
        ours = HOSTS[number]
        has_all = ours.rdma and theirs.rdma and can(Engine.NIXL, ours, theirs)
        choice = choose_engine(ours, theirs)
        assert choice.engine is (Engine.NIXL if has_all else Engine.SOCKETS)
        assert choice.why
        assert choice.why_not.keys() == {each.value for each in Engine} - {choice.engine.value}
        assert all(choice.why_not.values())


def test_several_hosts_are_read_by_the_engine_that_all_of_them_have():
    fast, slow = HOSTS[5], HOSTS[4]
    assert fast == Engines(nixl="1.5.1", rdma=("mlx5_0",))
    assert common_engine([fast, fast], fast) is Engine.NIXL
    assert common_engine([fast, slow], fast) is Engine.SOCKETS
    assert common_engine([slow, slow], fast, "nixl") is Engine.NIXL
    with pytest.raises(MissingDependency):
        common_engine([fast, HOSTS[0]], fast, "nixl")


@pytest.mark.parametrize("engine", Engine)
def test_an_engine_that_is_asked_for_is_used_or_refused_with_the_remedy(engine):
    for ours, theirs in PAIRS:
        if can(engine, ours, theirs):
            choice = choose_engine(ours, theirs, engine.value)
            assert choice.engine is engine
            assert choice.why_not.keys() == {each.value for each in Engine} - {engine.value}
            continue
        with pytest.raises((MissingDependency, TransportError), match="pip install") as e:
            choose_engine(ours, theirs, engine.value)
        assert isinstance(e.value, MissingDependency) == (not getattr(ours, engine.value))
        assert ("at the peer" in str(e.value)) == (
            not getattr(theirs, engine.value) or bool(getattr(ours, engine.value))
        )


def test_the_reason_names_the_host_without_rdma():
    has, has_not = Engines(nixl="1.5.1", rdma=("mlx5_0",)), Engines(nixl="1.5.1")
    assert "at the peer" in choose_engine(has, has_not).why
    assert "here" in choose_engine(has_not, has).why
    assert "here and at the peer" in choose_engine(has_not, has_not).why_not["nixl"]


def test_two_versions_are_both_in_the_reason():
    ours, theirs = (Engines(nixl=each, rdma=("a",)) for each in ("1.5.1", "1.6.0"))
    choice = choose_engine(ours, theirs)
    assert "1.5.1" in choice.why_not["nixl"]
    assert "1.6.0" in choice.why_not["nixl"]


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match="'sockets'"):
        choose_engine(Engines(), Engines(), "ucx")


@pytest.mark.parametrize(
    "text",
    [
        b'{"nixl":7}',
        b'{"more":""}',
        b'{"nixl":"' + b"1" * 201 + b'"}',
        b'{"rdma":[' + b",".join([b'"a"'] * 65) + b"]}",
    ],
)
def test_what_a_peer_says_it_has_is_limited(text):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Engines)


@pytest.mark.parametrize(
    ("version", "is_used"),
    [
        ("0.3.13.post1", True), ("0.3.12.post1", True), ("0.4.0", True), ("0.3.12", False),
        ("0.3.9.post9", False), ("0.3.13rc1", False), ("", False), ("x", False),
    ],
)  # fmt: skip
def test_mooncake_is_usable_from_0_3_12_post1_on(monkeypatch, version, is_used):
    monkeypatch.setattr(network_engines, "_installed", lambda packages: version)
    assert engines_here().mooncake == (version if is_used else "")


@pytest.mark.parametrize(
    ("version", "is_used"), [("1.5.1", True), ("1.10.0", True), ("1.5.0", False), ("0.9.0", False)]
)
def test_nixl_is_usable_from_1_5_1_on(monkeypatch, version, is_used):
    monkeypatch.setattr(network_engines, "_installed", lambda packages: version)
    assert engines_here().nixl == (version if is_used else "")


def test_variables_are_set_for_a_moment_and_those_of_the_user_win(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "mine")
    monkeypatch.delenv("UCX_OTHER", raising=False)
    with pytest.raises(KeyError), variables({"UCX_TLS": "tcp", "UCX_OTHER": "1"}):
        assert (os.environ["UCX_TLS"], os.environ["UCX_OTHER"]) == ("mine", "1")
        raise KeyError
    assert os.environ["UCX_TLS"] == "mine"
    assert "UCX_OTHER" not in os.environ
