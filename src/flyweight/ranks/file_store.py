"""A directory as the store in which the ranks of a group find each other, without a process group.

All ranks must be on one host, or share a file system. A file is written whole or not at all.
"""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from flyweight.errors import PeerLost, SpecError
from flyweight.host import exposure

_MAX_TEXT_BYTES = 4096


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
        path = self._path(key)
        draft = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as opened:
                opened.write(text.encode())
            draft.rename(path)
        except OSError as cause:
            draft.unlink(missing_ok=True)
            raise PeerLost(f"cannot write {str(path)!r}: {cause.strerror}") from cause

    def get(self, key: str, deadline: float) -> str | None:
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                return file.read(_MAX_TEXT_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as cause:
            raise PeerLost(f"cannot read {str(path)!r}: {cause.strerror}") from cause

    def _path(self, key: str) -> Path:
        return self._directory / blake2b(key.encode(), digest_size=16).hexdigest()
