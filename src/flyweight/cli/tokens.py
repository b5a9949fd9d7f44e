"""Tokens: files that only their user can read, one for each port that a server is at."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from flyweight.errors import PeerRefused, StoreError
from flyweight.host import exposure

_MAX_BYTES = 256


def run_directory() -> Path:
    """Return where servers of this user leave their tokens."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "flyweight" if runtime else Path.home() / ".cache" / "flyweight" / "run"


def token_file(directory: Path, port: int) -> Path:
    return directory / f"server-{port}.token"


def read(path: Path) -> str | None:
    """Return the token in a file, or None if there is no file; raise if others can read it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise StoreError(cause.errno, f"token file {str(path)!r}: {cause.strerror}") from cause
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise PeerRefused(f"token file {str(path)!r} is no file")
        if whose := exposure(found):
            raise PeerRefused(
                f"token file {str(path)!r} {whose}; it must be of user {os.geteuid()} with mode "
                f"600: chmod 600 it, or choose another"
            )
        text = os.read(file, _MAX_BYTES + 1).strip()
    finally:
        os.close(file)
    return checked(text.decode("ascii", "replace"), repr(str(path)))


def checked(text: str, place: str) -> str:
    """Return a token that can be sent; raise for anything else."""
    text = text.strip()
    is_plain = text.isascii() and text.isprintable() and len(text.split()) == 1
    if not is_plain or len(text) > _MAX_BYTES:
        raise PeerRefused(f"{place} holds no token: one is 1 to {_MAX_BYTES} plain characters")
    return text


def read_or_make(path: Path) -> str:
    """Return the token in a file, of a server before this one if there was any; or a new one."""
    found = read(path)
    if found is not None:
        return found
    token = secrets.token_hex(16)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        draft.unlink(missing_ok=True)
        file = os.open(draft, flags, 0o600)
        try:
            os.write(file, token.encode("ascii"))
        finally:
            os.close(file)
        draft.rename(path)
    except OSError as cause:
        raise StoreError(
            cause.errno, f"cannot write token file {str(path)!r}: {cause.strerror}"
        ) from cause
    return token
