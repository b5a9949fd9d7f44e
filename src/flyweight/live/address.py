"""Addresses: `unix:run/policy` is a private directory where a publisher is found.

It contains the socket for messages (`control`), the socket for files (`door`), those of other
ranks (`door.1` and so on), the token, and the lock that keeps a second publisher out.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from flyweight.errors import PeerLost, PeerRefused, SpecError, TransportError
from flyweight.forks import call_in_child
from flyweight.host import exposure
from flyweight.transports.fd_passing import check_socket_path

_TOKEN_TRIES, _TOKEN_SECONDS = 5, 0.01
_MAX_TOKEN_BYTES = 256
_TOKEN_DIGITS = 32


@dataclass(frozen=True)
class Address:
    """The directory of a publisher, which only its user can enter."""

    directory: Path

    @classmethod
    def parse(cls, text: str) -> Address:
        scheme, colon, path = str(text).partition(":")
        if scheme != "unix" or not colon or not path or "\0" in path:
            raise SpecError(
                f"address {text!r} is not of the form 'unix:DIRECTORY' or 'tcp://HOST:PORT'"
            )
        return cls(Path(path).absolute())

    def __str__(self) -> str:
        return f"unix:{self.directory}"

    @property
    def control(self) -> Path:
        return check_socket_path(self.directory / "control")

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.control}"

    @property
    def fd_socket(self) -> Path:
        return check_socket_path(self.directory / "door")

    def fd_socket_of(self, rank: int) -> Path:
        """Return the socket for files of another rank of the publisher."""
        return check_socket_path(self.directory / f"door.{rank}")

    @property
    def token_file(self) -> Path:
        return self.directory / "token"

    def token(self) -> str:
        """Return the token of the publisher at this address."""
        for _ in range(_TOKEN_TRIES):  # one publisher may leave and another start meanwhile
            self.check_private()
            try:
                with open(self.token_file, "rb") as file:
                    text = file.read(_MAX_TOKEN_BYTES + 1)
                break
            except FileNotFoundError as cause:
                if not self.fd_socket.exists():
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
            raise PeerRefused(f"{str(self.token_file)!r} does not contain a token")
        return text.decode("ascii")

    def make_directory(self) -> None:
        """Make the directory if it does not exist; raise if another user can enter it."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            self.check_private()
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


class Claim:
    """A publisher's claim to an address: while it is open, no other publisher can start there."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address, self._has_file = address, token is None
        self.token = secrets.token_hex(_TOKEN_DIGITS // 2) if token is None else token
        if not isinstance(self.token, str):
            raise SpecError(f"token is {type(token).__name__}, not text")
        is_plain = self.token.isascii() and self.token.isprintable()
        if not self.token or len(self.token) > _MAX_TOKEN_BYTES or not is_plain:
            raise SpecError(
                f"token has {len(self.token)} characters; it needs 1 to {_MAX_TOKEN_BYTES}, all of "
                f"them printable ASCII; strip() what was read from a file"
            )
        _ = address.control, address.fd_socket
        address.make_directory()
        try:
            self._check_free()
        except SpecError:
            # Look for the lock last: a publisher that starts now makes its lock first.
            if not self._was_used():
                raise
        self._lock = self._acquire_lock()
        call_in_child(self._unlock)
        self._remove_files()
        try:
            self._check_free()
        except SpecError:
            self._unlock()
            raise
        if self._has_file:
            self._write_token()

    def _acquire_lock(self) -> int:
        path = self.address.directory / "lock"
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as cause:
            raise TransportError(f"cannot open {str(path)!r}: {cause.strerror}") from cause
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
        draft = self._draft
        try:
            flags = os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC
            file = os.open(draft, flags, 0o600)
            try:
                os.write(file, self.token.encode("ascii"))
            finally:
                os.close(file)
            draft.rename(self.address.token_file)
        except OSError as cause:
            self._unlock()
            raise TransportError(f"cannot write {str(draft)!r}: {cause.strerror}") from cause

    @property
    def _draft(self) -> Path:
        return self.address.directory / "token.new"

    @property
    def _made(self) -> tuple[Path, ...]:
        """The files that a publisher makes here, apart from the lock, which stays."""
        return (self.address.control, self.address.fd_socket, self.address.token_file, self._draft)

    def _was_used(self) -> bool:
        """True if a publisher was here before: its lock exists, an empty file of mode 600."""
        try:
            found = os.lstat(self.address.directory / "lock")
        except OSError:
            return False
        return _is_private_file(found) and found.st_size == 0

    def _check_free(self) -> None:
        """Raise if a file exists that has a name which a publisher needs."""
        for path in self._made:
            if os.path.lexists(path):
                raise SpecError(
                    f"{str(path)!r} exists and was not made by a publisher, which needs the name; "
                    f"move it, or choose another directory"
                )

    def _remove_files(self) -> None:
        """Remove the files of a publisher, and nothing that a publisher did not make."""
        for path in self._made:
            with suppress(FileNotFoundError):
                found = os.lstat(path)
                is_socket = path in (self.address.control, self.address.fd_socket)
                if stat.S_ISSOCK(found.st_mode) if is_socket else _is_token(path, found):
                    path.unlink()
        for path in self.address.directory.glob("door.*"):  # of other ranks, which are gone
            with suppress(FileNotFoundError):
                if path.suffix[1:].isdigit() and stat.S_ISSOCK(os.lstat(path).st_mode):
                    path.unlink()

    def close(self) -> None:
        """Free the address for another publisher. Safe to repeat."""
        if self._lock >= 0:
            with suppress(FileNotFoundError):
                held = os.fstat(self._lock).st_ino
                if os.stat(self.address.directory / "lock").st_ino == held:
                    self._remove_files()  # another publisher's files stay
            self._unlock()

    def _unlock(self) -> None:
        """Close the lock's file; a forked child that does so does not free the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _is_private_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and not exposure(found)


def _is_token(path: Path, found: os.stat_result) -> bool:
    """True if a publisher wrote this file; one that was killed may have written less."""
    if not _is_private_file(found) or found.st_size > _TOKEN_DIGITS:
        return False
    is_whole = path.suffix == ".new" or found.st_size == _TOKEN_DIGITS
    return is_whole and re.fullmatch(rb"[0-9a-f]*", path.read_bytes()) is not None
