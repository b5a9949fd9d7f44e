"""A directory as the store in which the ranks of a group find each other, without a process group.

All ranks must be on one host, or share a file system. A file begins with the digest of its text, so
a text that is not whole does not count, and a process that is killed leaves no other file.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from flyweight.errors import PeerLost, SpecError
from flyweight.host import exposure

_DIGEST_BYTES = 16


class FileStore:
    """Keeps each text in a file of a private directory; see `RendezvousStore`."""

    def __init__(self, directory: Path) -> None:
        """Use a directory, which is made if it does not exist; no other user may enter it."""
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if whose := exposure(os.stat(directory)):
                raise SpecError(
                    f"directory {str(directory)!r} {whose}; ranks need one that belongs to user "
                    f"{os.geteuid()} with mode 700: choose another, or chmod 700 it"
                )
        except OSError as cause:
            raise PeerLost(f"cannot use directory {str(directory)!r}: {cause.strerror}") from cause

    def set(self, key: str, text: str, deadline: float) -> None:
        path, data = self._path(key), text.encode()
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.write(_digest(data) + data)
        except OSError as cause:
            raise PeerLost(f"cannot write {str(path)!r}: {cause.strerror}") from cause

    def get(self, key: str, deadline: float) -> str | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as cause:
            raise PeerLost(f"cannot read {str(path)!r}: {cause.strerror}") from cause
        digest, text = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        # A writer that is at it, or was killed, has set nothing.
        return text.decode() if digest == _digest(text) else None

    def _path(self, key: str) -> Path:
        return self._directory / _digest(key.encode()).hex()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
