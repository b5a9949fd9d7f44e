"""Tokens: files that only their user can read, one for each port that a server is at.

A server's token lives as long as the server: each start makes another. After a kill the file
stays behind, so who finds one asks the server for a proof before it is believed (`client.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyweight.errors import PeerRefused, StoreError
from flyweight.host import exposure

_MAX_BYTES = 256
_MIN_CHARACTERS = 16


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
        try:
            _check_private(file, path)
            text = os.read(file, _MAX_BYTES + 1).strip()
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise StoreError(cause.errno, f"token file {str(path)!r}: {cause.strerror}") from cause
    return checked(text.decode("ascii", "replace"), repr(str(path)))


def _check_private(file: int, path: Path) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise PeerRefused(f"token file {str(path)!r} is no file")
    if whose := exposure(found):
        raise PeerRefused(
            f"token file {str(path)!r} {whose}; it must be of user {os.geteuid()} with mode "
            f"600: chmod 600 it, or choose another"
        )


def checked(text: str, place: str) -> str:
    """Return a token that can be sent; raise for anything else."""
    text = text.strip()
    is_plain = text.isascii() and text.isprintable() and len(text.split()) == 1
    if not is_plain or len(text) > _MAX_BYTES:
        raise PeerRefused(f"{place} holds no token: one is 1 to {_MAX_BYTES} plain characters")
    return text


def read_strong(path: Path) -> str:
    """Return the token of the user's own in a file; raise if it is missing, or could be guessed."""
    token = read(path)
    if token is None or len(token) < _MIN_CHARACTERS:
        what = "is not there" if token is None else f"holds {len(token)} characters"
        raise PeerRefused(
            f"token file {str(path)!r} {what}; a server needs a token of {_MIN_CHARACTERS} or "
            f"more, chosen at random: (umask 077; openssl rand -hex 16 > {shlex.quote(str(path))})"
        )
    return token


@contextmanager
def written(path: Path) -> Iterator[str]:
    """Have a new token in a file inside the block; the file is locked, and goes in the end.

    What a server that was killed left there is overwritten; that of one that lives is not.
    """
    token = secrets.token_hex(16)
    try:
        file = _locked(path, token)
    except OSError as cause:
        raise StoreError(
            cause.errno, f"cannot write token file {str(path)!r}: {cause.strerror}"
        ) from cause
    try:
        yield token
    finally:
        if _is_at(file, path):
            path.unlink()
        os.close(file)


def _locked(path: Path, token: str) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        file = os.open(path, flags, 0o600)
        try:
            _check_private(file, path)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):  # and not one that its server has just removed
                os.ftruncate(file, os.pwrite(file, token.encode("ascii"), 0))
                return file
        except BlockingIOError as cause:
            os.close(file)
            raise StoreError(
                errno.EBUSY,
                f"token file {str(path)!r} is that of another server, at the same port of another "
                f"address; choose another --port, or another --run directory",
            ) from cause
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.lstat())
    return False


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
