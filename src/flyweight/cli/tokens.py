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
    """Return the token in a file, or None if there is no file; raise if others can read it.

    It may be a link, as mounted secrets are, of whoever could have put the file itself there.
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
        file = os.open(path, flags)
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
    """Return the token in a file, of a server before this one if there was any; or a new one.

    Of several that make one at once, the first one's holds for all.
    """
    found = read(path)
    if found is not None:
        return found
    token = secrets.token_hex(16)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, token.encode("ascii"))
            os.link(draft, path)  # which a name that is taken refuses
        finally:
            os.close(file)
            draft.unlink(missing_ok=True)
    except FileExistsError as cause:
        found = read(path)
        if found is None:
            raise PeerRefused(
                f"token file {str(path)!r} is a link to a file that is not there; make that file, "
                f"or remove the link"
            ) from cause
        return found
    except OSError as cause:
        raise StoreError(
            cause.errno, f"cannot write token file {str(path)!r}: {cause.strerror}"
        ) from cause
    return token
