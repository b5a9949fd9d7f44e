"""Small files that hold a secret: written whole, and read only if no other user can access them.

A path may be a symbolic link, as mounted secrets are, if this user or root made it.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from flyweight.errors import PeerRefused
from flyweight.host import exposure
from flyweight.stores.local import refused

_MAX_TOKEN_BYTES = 256


def read_token(path: Path) -> str | None:
    """Return the token in a file, or None if there is no file.

    Raises PeerRefused if other users can read the file, or if it is no regular file, and StoreError
    if it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        if not path.is_symlink():
            flags |= os.O_NOFOLLOW
        elif whose := exposure(path.lstat(), bits=0):
            raise PeerRefused(
                f"token file {str(path)!r} is a link that {whose}; it must be of user "
                f"{os.geteuid()} or root, or be the file itself"
            )
        with open(os.open(path, flags), "rb", buffering=0) as file:
            check_private(file.fileno(), path)
            text = file.read(_MAX_TOKEN_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise refused(cause, f"token file {str(path)!r}") from cause
    return check_token(text.decode("ascii", "replace"), repr(str(path)))


def check_token(text: str, place: str) -> str:
    """Return the token in a text, without spaces around it; raise PeerRefused if it is none."""
    text = text.strip()
    is_plain = text.isascii() and text.isprintable() and len(text.split()) == 1
    if not is_plain or len(text) > _MAX_TOKEN_BYTES:
        raise PeerRefused(
            f"{place} holds no token: one is 1 to {_MAX_TOKEN_BYTES} plain characters"
        )
    return text


def check_private(file: int, path: Path) -> None:
    """Raise PeerRefused unless an open file is a regular one that no other user can access."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise PeerRefused(f"token file {str(path)!r} is not a regular file")
    if whose := exposure(found):
        raise PeerRefused(
            f"token file {str(path)!r} {whose}; it must be of user {os.geteuid()} with mode 600: "
            f"chmod 600 it, or choose another"
        )


def create_private(path: Path, content: bytes) -> None:
    """Write a file, whole at once; raise FileExistsError if the path exists, or OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, content)
        os.link(draft, path)
    finally:
        os.close(file)
        draft.unlink(missing_ok=True)
