"""Addresses: `unix:DIRECTORY` for processes of this user and host, `tcp://HOST:PORT` for any host.

A `unix:` address is a private directory, in which a publisher claims its place: the sockets, the
token, and the lock that keeps a second publisher out. At a `tcp:` address a holder listens at a
Unix socket too, so that readers on its host map memory. That one has no name in any file system
(Linux calls it abstract), so nothing is left behind; both sides check the user at the other end.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import msgspec

from flyweight.errors import PeerLost, PeerRefused, SpecError, TransportError
from flyweight.forks import call_in_child
from flyweight.host import exposure, identity, location

_BACKLOG = 512
_MAX_PATH_BYTES = 107
_MAX_TOKEN_BYTES = 256
_TOKEN_DIGITS = 32
_TOKEN_TRIES, _TOKEN_SECONDS = 5, 0.01
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}
"""A host that is cut off is noticed after about five seconds."""


def this_host() -> str:
    """Return an id that processes have in common if one can reach the Unix sockets of the other."""
    return f"{identity()} {location()}"


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a holder can be reached."""

    host: str
    local: str = ""
    """Its Unix socket, for processes on that host; a name that begins with @ is abstract."""
    remote: str = ""
    """HOST:PORT for all others; "" if there is none."""

    def __str__(self) -> str:
        return f"tcp://{self.remote}" if self.remote else self.local

    @property
    def is_here(self) -> bool:
        """True if its Unix socket can be expected to be reachable."""
        return bool(self.local) and self.host == this_host()


@dataclass(frozen=True)
class UnixAddress:
    """The directory of a publisher, which only its user can enter."""

    directory: Path

    def __str__(self) -> str:
        return f"unix:{self.directory}"

    def socket_of(self, rank: int) -> str:
        """Return the path of the socket of a rank of the publisher."""
        path = str(self.directory / ("holder" if rank == 0 else f"holder.{rank}"))
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise TransportError(
                f"socket path {path!r} has {len(os.fsencode(path))} bytes, at most "
                f"{_MAX_PATH_BYTES} fit in the address of a Unix socket; choose a shorter directory"
            )
        return path

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(this_host(), self.socket_of(0))

    def token(self) -> str:
        """Return the token of the publisher at this address."""
        for _ in range(_TOKEN_TRIES):  # one publisher may leave and another start meanwhile
            self.check_private()
            try:
                with open(self.directory / "token", "rb") as file:
                    text = file.read(_MAX_TOKEN_BYTES + 1)
                break
            except FileNotFoundError as cause:
                if not os.path.exists(self.socket_of(0)):
                    raise PeerLost(f"no publisher is at {self}") from cause
            except OSError as cause:
                raise PeerRefused(f"cannot read the token of {self}: {cause.strerror}") from cause
            sleep(_TOKEN_SECONDS)
        else:
            raise PeerRefused(
                f"the publisher at {self} has a token that is not in a file; pass it as token=, to "
                f"a command as --token-file"
            )
        if not text or len(text) > _MAX_TOKEN_BYTES or not text.isascii():
            raise PeerRefused(f"{str(self.directory / 'token')!r} does not contain a token")
        return text.decode("ascii")

    def make_directory(self) -> None:
        """Make the directory if it does not exist; raise if another user can enter it."""
        try:
            with suppress(FileExistsError):
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as cause:
            raise TransportError(
                f"cannot make directory {str(self.directory)!r}: {cause.strerror}"
            ) from cause
        self.check_private()

    def check_private(self) -> None:
        """Raise unless the directory exists and no other user can enter it."""
        try:
            found = os.stat(self.directory)
        except OSError as cause:
            raise PeerLost(f"no publisher is at {self}: {cause.strerror}") from cause
        if not stat.S_ISDIR(found.st_mode):
            raise SpecError(f"{str(self.directory)!r} is a file, not a directory for sockets")
        if whose := exposure(found):
            raise SpecError(
                f"directory {str(self.directory)!r} {whose}; a publisher needs one that belongs to "
                f"user {os.geteuid()} with mode 700: choose another, or chmod 700 it"
            )


@dataclass(frozen=True)
class TcpAddress:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.place}"

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_any(self) -> bool:
        """True if it stands for all interfaces of a host."""
        return self.host in ("0.0.0.0", "::")  # noqa: S104

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("", "", self.place)


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Return the address that a text means; raise SpecError if it means none."""
    scheme, _, rest = str(text).partition(":")
    if scheme == "unix" and rest and "\0" not in rest:
        return UnixAddress(Path(rest).absolute())
    if scheme == "tcp" and str(text).isprintable() and " " not in str(text):
        try:
            parts = urlsplit(str(text))
            host, port = parts.hostname or "", parts.port
        except ValueError as cause:
            raise SpecError(f"address {text!r}: {cause}") from cause
        rest = parts.path + parts.query + parts.fragment + (parts.username or "")
        if host and port is not None and not rest:
            return TcpAddress(host, port)
    raise SpecError(f"address {text!r} is not of the form 'unix:DIRECTORY' or 'tcp://HOST:PORT'")


# Sockets.


def listening(path: str) -> socket.socket:
    """Return a Unix socket that listens at a path, or at a name that begins with @."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_native(path))
        if not path.startswith("@"):
            os.chmod(path, 0o600)
        server.listen(_BACKLOG)
    except OSError as cause:
        server.close()
        raise TransportError(f"cannot listen at {path!r}: {cause.strerror}") from cause
    return server


def listening_tcp(address: TcpAddress) -> tuple[socket.socket, TcpAddress]:
    """Return a socket that listens, and the address with its real port.

    All interfaces are IPv4 and IPv6 together, where the system has both.
    """
    host, port = address.host, address.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as cause:
        raise TransportError(f"cannot listen at {address}: {cause.strerror or cause}") from cause
    return server, TcpAddress(host, server.getsockname()[1])


def connected(path: str, deadline: float) -> socket.socket:
    """Return a connection to a Unix socket of this user, or of root."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(max(deadline - monotonic(), 0.01))
        found.connect(_native(path))
        check_peer(found, repr(path))
    except OSError as cause:
        found.close()
        raise PeerLost(f"nobody answers at {path!r}: {cause}; is that process up?") from cause
    except PeerRefused:
        found.close()
        raise
    return found


def connected_tcp(place: str, deadline: float) -> tuple[socket.socket, str]:
    """Return a connection to HOST:PORT, and the host."""
    address = parse_address(f"tcp://{place}")
    assert isinstance(address, TcpAddress)
    seconds = max(deadline - monotonic(), 0.01)
    try:
        found = socket.create_connection((address.host, address.port), seconds)
        keep_alive(found)
    except OSError as cause:
        raise PeerLost(f"nobody answers at {address}: {cause}; is that process up?") from cause
    return found, address.host


def local_host_for(host: str) -> str:
    """Return the address of this host from which packets to another one leave."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as cause:
        raise PeerLost(f"cannot reach host {host!r}: {cause}") from cause


def host_facing(address: Address) -> str:
    """Return the address of this host at which others that reach `address` find it; "" if unknown.

    Not a loopback: `address` may then be one end of a tunnel to another host.
    """
    if not isinstance(address, TcpAddress) or address.is_any:
        return ""
    try:
        found = local_host_for(address.host)
    except PeerLost:
        return ""
    return "" if found == "::1" or found.startswith("127.") else found


def check_peer(connection: socket.socket, name: str) -> None:
    """Raise unless the process at the other end of a Unix socket is of this user, or of root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if (user := struct.unpack("3i", found)[1]) not in (os.geteuid(), 0):
        raise PeerRefused(f"{name} belongs to user {user}, not to user {os.geteuid()}")


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice a peer whose host is gone; send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _native(path: str) -> str:
    return "\0" + path[1:] if path.startswith("@") else path


def check_token(token: object) -> str:
    """Return a token that can be used; raise SpecError for others."""
    if not isinstance(token, str):
        raise SpecError(f"token is {type(token).__name__}, not text")
    if not token or len(token) > _MAX_TOKEN_BYTES or not (token.isascii() and token.isprintable()):
        raise SpecError(
            f"token has {len(token)} characters; it needs 1 to {_MAX_TOKEN_BYTES}, all of them "
            f"printable ASCII; strip() what was read from a file"
        )
    return token


class Claim:
    """A publisher's claim to a directory: while it is open, no other can start there."""

    def __init__(self, address: UnixAddress, token: str | None) -> None:
        """Without a token, make one, in a file that only this user can read."""
        self.address = address
        self.token = secrets.token_hex(_TOKEN_DIGITS // 2) if token is None else check_token(token)
        address.socket_of(0)
        address.make_directory()
        self._path = address.directory / "lock"
        is_new = not os.path.lexists(self._path)
        self._lock = self._acquire_lock()
        call_in_child(self._unlock)
        try:
            was_used = not is_new and _is_private_file(os.fstat(self._lock), most=0)
            if others := self._clear(should_remove=was_used):
                if is_new:  # nothing is left in somebody's directory
                    self._path.unlink(missing_ok=True)
                raise SpecError(
                    f"{str(others[0])!r} exists and was not made by a publisher, which needs the "
                    f"name; move it, or choose another directory"
                )
            if token is None:
                self._write_token()
        except BaseException:
            self._unlock()
            raise

    def _acquire_lock(self) -> int:
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(self._path, flags, 0o600)
        except OSError as cause:
            raise TransportError(f"cannot open {str(self._path)!r}: {cause.strerror}") from cause
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            os.close(lock)
            raise TransportError(
                f"another publisher is at {self.address}; close it, or choose another address"
            ) from cause
        return lock

    def _write_token(self) -> None:
        """Write the token where replicas look for it, atomically."""
        draft = self.address.directory / "token.new"
        try:
            flags = os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(draft, flags, 0o600), "wb") as file:
                file.write(self.token.encode("ascii"))
            draft.rename(self.address.directory / "token")
        except OSError as cause:
            raise TransportError(f"cannot write {str(draft)!r}: {cause.strerror}") from cause

    def _clear(self, *, should_remove: bool) -> list[Path]:
        """Remove the files of a publisher; return others that have a name which it needs."""
        directory = self.address.directory
        ranks = [path for path in directory.glob("holder.*") if path.suffix[1:].isdigit()]
        others = []
        for path in [*(directory / name for name in ("holder", "token", "token.new")), *ranks]:
            with suppress(FileNotFoundError):
                found = os.lstat(path)
                is_token = path.name.startswith("token")
                is_ours = _is_token(path, found) if is_token else stat.S_ISSOCK(found.st_mode)
                if is_ours and should_remove:
                    path.unlink()
                else:
                    others.append(path)
        return others

    def close(self) -> None:
        """Free the address for another publisher. Safe to repeat."""
        if self._lock >= 0:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self._path), os.fstat(self._lock)):
                    self._clear(should_remove=True)  # another publisher's files stay
            self._unlock()

    def _unlock(self) -> None:
        """Close the lock's file; a forked child that does so does not free the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _is_private_file(found: os.stat_result, *, most: int) -> bool:
    return stat.S_ISREG(found.st_mode) and not exposure(found) and found.st_size <= most


def _is_token(path: Path, found: os.stat_result) -> bool:
    """True if a publisher wrote this file; one that was killed may have written less."""
    if not _is_private_file(found, most=_TOKEN_DIGITS):
        return False
    is_whole = path.suffix == ".new" or found.st_size == _TOKEN_DIGITS
    return is_whole and re.fullmatch(rb"[0-9a-f]*", path.read_bytes()) is not None
