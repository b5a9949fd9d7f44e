"""The engines that can move bytes between hosts, and which one two hosts use.

`choose_engine` is pure. Sockets are the default without RDMA: on TCP a reader that leaves NIXL in
mid-read can abort the process that it reads from. NIXL is the default where both hosts have RDMA.
Mooncake is used only by choice, since no call of it is known to stop a transfer.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Annotated

import msgspec

from flyweight.checks import one_of
from flyweight.errors import MissingDependency, TransportError
from flyweight.forks import fork_lock

NIXL_INSTALL = "pip install --no-deps nixl-cu12==1.5.1"
"""Without --no-deps pip installs torch with CUDA, which NIXL does not need."""
MOONCAKE_INSTALL = (
    "apt-get install libibverbs1 libnuma1; "
    "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1"
)
MIN_NIXL = (1, 5, 1, 0)
"""The version that was tried: `NixlReader` depends on how an agent ends."""
MIN_MOONCAKE = (0, 3, 12, 1)
"""Mooncake's TCP reported transfers as complete too early before 0.3.12.post1."""
_NIXL_PACKAGES = ("nixl-cu12", "nixl-cu13")
_MOONCAKE_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_RDMA = "/sys/class/infiniband"
_MAX_DEVICES = 64
_Text = Annotated[str, msgspec.Meta(max_length=200)]


class Engine(Enum):
    """What moves bytes between two hosts."""

    SOCKETS = "sockets"
    NIXL = "nixl"
    MOONCAKE = "mooncake"


class Engines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host has; a peer sends it, so its texts are short."""

    nixl: _Text = ""
    """NIXL's version; "" if it cannot be used."""
    mooncake: _Text = ""
    rdma: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=_MAX_DEVICES)] = ()
    """The names of the RDMA devices."""


class Choice(msgspec.Struct, frozen=True):
    """The engine that two hosts use, why, and why they use no other."""

    engine: Engine
    why: str
    why_not: dict[str, str]


def choose_engine(ours: Engines, theirs: Engines, wanted: str = "auto") -> Choice:
    """Return the engine for reads between two hosts.

    wanted: 'auto', or the name of an engine. Raises MissingDependency if that one is not installed
    here, and TransportError if the other host cannot use it.
    """
    obstacles = {each: _obstacle(each, ours, theirs) for each in (Engine.NIXL, Engine.MOONCAKE)}
    if wanted != "auto":
        engine = one_of(Engine, wanted, "network engine")
        if obstacles.get(engine):
            kind = TransportError if getattr(ours, engine.value) else MissingDependency
            raise kind(f"network engine {engine.value!r} cannot be used: {obstacles[engine]}")
        rest = dict.fromkeys(Engine, "another engine was asked for")
        return _choice(engine, "it was asked for", {**rest, **_only(obstacles)})
    no_rdma = _without_rdma(ours, theirs)
    reasons = {
        Engine.SOCKETS: "both hosts have RDMA, which sockets do not use",
        Engine.NIXL: obstacles[Engine.NIXL] or (no_rdma and f"{no_rdma}; ask for it by name"),
        Engine.MOONCAKE: obstacles[Engine.MOONCAKE]
        or "no call of it is known to stop a transfer; ask for it by name",
    }
    if reasons[Engine.NIXL]:
        why = no_rdma or f"NIXL cannot be used: {obstacles[Engine.NIXL]}"
        return _choice(Engine.SOCKETS, why, reasons)
    return _choice(Engine.NIXL, "both hosts have RDMA and NIXL", reasons)


def common_engine(ours: Iterable[Engines], theirs: Engines, wanted: str = "auto") -> Engine:
    """Return the engine by which one host reads from several, as `choose_engine` does from one."""
    found = {choose_engine(each, theirs, wanted).engine for each in ours}
    return found.pop() if len(found) == 1 else Engine.SOCKETS


def _choice(engine: Engine, why: str, reasons: dict[Engine, str]) -> Choice:
    why_not = {each.value: text for each, text in reasons.items() if each is not engine}
    return Choice(engine, why, why_not)


def _only(obstacles: dict[Engine, str]) -> dict[Engine, str]:
    return {engine: text for engine, text in obstacles.items() if text}


def _without_rdma(ours: Engines, theirs: Engines) -> str:
    """Return why there is no RDMA between two hosts; "" if there is."""
    where = [name for name, host in (("here", ours), ("at the peer", theirs)) if not host.rdma]
    return f"there is no RDMA device {' and '.join(where)}" if where else ""


def _obstacle(engine: Engine, ours: Engines, theirs: Engines) -> str:
    """Return why two hosts cannot use an engine, with the remedy; "" if they can."""
    here, there = getattr(ours, engine.value), getattr(theirs, engine.value)
    remedy = NIXL_INSTALL if engine is Engine.NIXL else MOONCAKE_INSTALL
    where = [name for name, version in (("here", here), ("at the peer", there)) if not version]
    if where:
        return f"no usable version is installed {' and '.join(where)}; {remedy}"
    if here != there:
        return (
            f"version {here} is installed here and {there} at the peer, and they promise no "
            f"common protocol; {remedy}"
        )
    return ""


def engines_here() -> Engines:
    """Return what this host has installed. Imports none of it."""
    nixl, mooncake = _installed(_NIXL_PACKAGES), _installed(_MOONCAKE_PACKAGES)
    return Engines(
        nixl=nixl if _numbers(nixl) >= MIN_NIXL else "",
        mooncake=mooncake if _numbers(mooncake) >= MIN_MOONCAKE else "",
        rdma=rdma_devices()[:_MAX_DEVICES],
    )


def rdma_devices() -> tuple[str, ...]:
    """Return the names of this host's RDMA devices."""
    try:
        return tuple(sorted(os.listdir(_RDMA)))
    except OSError:
        return ()


@contextmanager
def variables(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a moment, but those that the user has set already.

    Engines read theirs when they start. No other thread may fork meanwhile.
    """
    with fork_lock:
        added = {name: value for name, value in settings.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


def _installed(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)[:200]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 3, 12, 1) for '0.3.12.post1'; none for others."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    return tuple(int(each or 0) for each in found.groups()) if found else ()
