"""Token files: only their user can read them; each control server writes one for its port.

A server creates a new token at each start and removes it at its end. A server that is killed
leaves its file, so a client has the server prove that it knows the token (`client.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flyweight.errors import PeerRefused
from flyweight.stores.local import store_errors
from flyweight.stores.private_file import check_private, create_private, read_token

_MIN_CHARACTERS = 16


def run_directory() -> Path:
    """Return where this user's servers write their tokens."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "flyweight" if runtime else Path.home() / ".cache" / "flyweight" / "run"


def path_for(directory: Path, port: int) -> Path:
    """Return the token file of the server at a port."""
    return directory / f"server-{port}.token"


def read(path: Path, remedy: str = "say which with --token-file") -> str:
    """Return the token in a file; raise PeerRefused if there is none, or if others can read it."""
    token = read_token(path)
    if token is None:
        raise PeerRefused(f"there is no token file {str(path)!r}; {remedy}")
    return token


def read_strong(path: Path) -> str:
    """Return the token of a file that a user wrote; raise if there is none, or it is too short."""
    command = f"(umask 077; openssl rand -hex 16 > {shlex.quote(str(path))})"
    remedy = f"a server needs {_MIN_CHARACTERS} characters or more, chosen at random: {command}"
    token = read(path, remedy)
    if len(token) < _MIN_CHARACTERS:
        raise PeerRefused(f"token file {str(path)!r} holds {len(token)} characters; {remedy}")
    return token


def read_or_create(path: Path) -> str:
    """Return the token in a file; create the file if there is none.

    If several processes create it at once, all return the token of the first.
    """
    found = read_token(path)
    if found is not None:
        return found
    token = secrets.token_hex(16)
    with store_errors(f"cannot write token file {str(path)!r}"):
        try:
            create_private(path, token.encode("ascii"))
        except FileExistsError:  # another process was first
            return read(path, "it is a link; make the file that it leads to, or remove it")
    return token


@contextmanager
def server_token(path: Path) -> Iterator[str]:
    """Write a new token to a file, and remove the file at the end of the block.

    The file is locked meanwhile. The file of a server that was killed is overwritten; the file of
    a running server is not.
    """
    token = secrets.token_hex(16)
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with ExitStack() as files:
        with store_errors(f"cannot write token file {str(path)!r}"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            while True:
                file = os.open(path, flags, 0o600)
                files.callback(os.close, file)
                check_private(file, path)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as cause:
                    text = "a server at the same port of another address uses it; choose another "
                    text += "--port, or another --run directory"
                    raise OSError(errno.EBUSY, text) from cause
                if _is_at(file, path):  # not a file that its server has just removed
                    break
            os.ftruncate(file, os.pwrite(file, token.encode("ascii"), 0))
        try:
            yield token
        finally:
            if _is_at(file, path):
                path.unlink()


def _is_at(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.lstat())
    return False
