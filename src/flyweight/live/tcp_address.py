"""Addresses of other hosts: `tcp://HOST:PORT`, where a publisher accepts data connections.

A publisher there is also in a private directory of its own host, so that replicas of the same host
use shared memory.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from time import time
from urllib.parse import urlsplit

from flyweight.errors import SpecError
from flyweight.live.address import Address, Claim
from flyweight.ranks.run_directory import run_directory

_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104
_STALE_SECONDS = 60.0


@dataclass(frozen=True)
class TcpAddress:
    """A host and the port of a publisher's data server."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
            rest = parts.path + parts.query + parts.fragment + (parts.username or "")
        except ValueError as cause:
            raise SpecError(f"address {text!r}: {cause}") from cause
        if not host or port is None or rest or not text.isprintable() or " " in text:
            raise SpecError(f"address {text!r} is not of the form 'tcp://HOST:PORT'")
        return cls(host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_any(self) -> bool:
        """True if it stands for all interfaces of a host."""
        return self.host in _ANY_HOST

    @property
    def reachable(self) -> TcpAddress:
        """The same with a name of this host, if it stands for all of its interfaces."""
        return TcpAddress(os.uname().nodename, self.port) if self.is_any else self

    def with_port(self, port: int) -> TcpAddress:
        return TcpAddress(self.host, port)


def parse_address(text: str) -> Address | TcpAddress:
    """Return the address that a text means; raise SpecError if it means none."""
    return TcpAddress.parse(text) if str(text).startswith("tcp:") else Address.parse(text)


def new_local_address() -> Address:
    """Return an address on this host for a `TemporaryClaim`; remove those of dead publishers."""
    parent = run_directory()
    for path in parent.glob("publisher-*"):
        _remove_if_stale(path)
    return Address(parent / f"publisher-{secrets.token_hex(6)}")


def _remove_if_stale(directory: Path) -> None:
    """Remove the directory of a publisher whose process has ended."""
    with suppress(OSError):
        if time() - directory.lstat().st_mtime < _STALE_SECONDS or directory.is_symlink():
            return
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


class TemporaryClaim(Claim):
    """A claim to an address whose directory goes when it is closed."""

    def close(self) -> None:
        super().close()
        rmtree(self.address.directory, ignore_errors=True)


def claimed(address: Address | TcpAddress, token: str | None) -> tuple[Claim, TcpAddress | None]:
    """Claim an address for a publisher; return also where it listens for other hosts."""
    if isinstance(address, TcpAddress):
        return TemporaryClaim(new_local_address(), token), address
    return Claim(address, token), None
