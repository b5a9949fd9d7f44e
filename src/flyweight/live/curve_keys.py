"""Keys that encrypt the messages between a publisher and its replicas (CURVE of ZeroMQ).

A replica knows the publisher's public key beforehand, so no impostor can answer it. A publisher
may list the public keys of the replicas that it admits. Keys are 40 characters of Z85. The file
`NAME.key` holds a pair and is private; `NAME.pub` holds the public key, to be copied elsewhere.
Weights do not go over this connection.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from flyweight.errors import MissingDependency, PeerRefused, SpecError, StoreError
from flyweight.stores.local import as_path, refused
from flyweight.stores.private_file import OTHERS_WRITE, create_private, read_private

_KEY = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_PAIR = re.compile(rf"public ({_KEY})\nsecret ({_KEY})\n?")
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_MAX_FILE_BYTES = 256
_SHOWN_CHARACTERS = 8
_GIVE_KEY = "pass its public key as curve=, to a command as --server-key"
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED)


@dataclass(frozen=True)
class CurveKeys:
    """A public key and the secret key that belongs to it."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_key(self.public, "the public key")
        if _public_of(self.secret) != self.public:
            raise SpecError(f"the secret key does not belong to public key {self.public!r}")

    @classmethod
    def make(cls) -> CurveKeys:
        """Return new keys, chosen at random."""
        _check_curve()
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CurveKeys:
        """Return the keys in a file `NAME.key`.

        Raises PeerRefused if there is no such file, it holds something else, or others can read it.
        """
        found = _PAIR.fullmatch(_text(as_path(path), "key file"))
        if found is None:
            raise PeerRefused(
                f"key file {str(path)!r} does not hold keys: a line 'public KEY' and a line "
                f"'secret KEY' with 40 characters each; flyweight keys writes such files"
            )
        try:
            return cls(*found.groups())
        except SpecError as cause:
            raise PeerRefused(f"key file {str(path)!r}: {cause}") from cause

    @staticmethod
    def read_public(path: str | os.PathLike[str]) -> str:
        """Return the public key in a file `NAME.pub`, which only this user or root may change."""
        text = _text(as_path(path), "public key file", bits=OTHERS_WRITE).strip()
        try:
            return check_key(text, f"public key file {str(path)!r}")
        except SpecError as cause:
            raise PeerRefused(str(cause)) from cause

    def write(self, directory: str | os.PathLike[str], name: str = "flyweight") -> Path:
        """Write `NAME.key`, for this user only, and `NAME.pub`; return the path of the first.

        Raises StoreError if a file has such a name already: it is never overwritten.
        """
        if _NAME.fullmatch(name) is None:
            raise SpecError(f"name {name!r} is not made of letters, digits, '_', '-' and '.'")
        secret, public = (as_path(directory) / f"{name}{end}" for end in (".key", ".pub"))
        pair = f"public {self.public}\nsecret {self.secret}\n"
        _create(secret, pair, 0o600)
        try:
            _create(public, f"{self.public}\n", 0o644)
        except StoreError:  # a pair is written whole, or not at all
            secret.unlink()
            raise
        return secret


@dataclass(frozen=True)
class CurveServer:
    """A publisher's keys, and the public keys of the replicas that it admits: None for all."""

    keys: CurveKeys
    clients: Collection[str] | None = None

    def __post_init__(self) -> None:
        _check_pair(self.keys)
        if self.clients is not None:
            if isinstance(self.clients, str):
                raise SpecError("clients is one text, expected a list of public keys")
            admitted = frozenset(check_key(each, "a client's public key") for each in self.clients)
            object.__setattr__(self, "clients", admitted)

    def admits(self, key: bytes) -> bool:
        """True if a replica with this public key, in 32 bytes, may connect."""
        shown = z85.encode(key).decode("ascii")
        # Other ranks of the publisher have its own keys.
        return self.clients is None or shown in self.clients or shown == self.keys.public


@dataclass(frozen=True)
class CurveClient:
    """The public key of a replica's publisher, and the replica's own keys: new ones by default."""

    server_key: str
    keys: CurveKeys = field(default_factory=CurveKeys.make)

    def __post_init__(self) -> None:
        check_key(self.server_key, "the publisher's public key")
        _check_pair(self.keys)


def check_key(key: object, what: str) -> str:
    """Return a key; raise SpecError unless it is one. The text is not shown: it may be a secret."""
    if not isinstance(key, str):
        raise SpecError(f"{what} is {type(key).__name__}, expected text")
    _public_of(key, what)  # it derives another key from any key, and refuses everything else
    return key


def _public_of(secret: str, what: str = "the secret key") -> str:
    _check_curve()
    if not isinstance(secret, str) or re.fullmatch(_KEY, secret) is None:
        raise SpecError(f"{what} is not a key, which has 40 characters of Z85")
    try:
        return zmq.curve_public(secret.encode("ascii")).decode("ascii")
    except zmq.ZMQError as cause:  # five of the characters are a number over 32 bits
        raise SpecError(f"{what} is not a key, which has 40 characters of Z85") from cause


def _check_pair(keys: object) -> None:
    if not isinstance(keys, CurveKeys):
        raise SpecError(f"keys is {type(keys).__name__}, expected CurveKeys")


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise MissingDependency(
            "libzmq was built without CURVE; the wheels of pyzmq have it: pip install pyzmq"
        )


def _create(path: Path, text: str, mode: int) -> None:
    try:
        create_private(path, text.encode("ascii"), mode=mode)
    except FileExistsError as cause:
        raise refused(cause, f"{str(path)!r} is not overwritten; choose another name") from cause
    except OSError as cause:
        raise refused(cause, f"cannot write {str(path)!r}") from cause


def _text(path: Path, what: str, **options: int) -> str:
    found = read_private(path, _MAX_FILE_BYTES, what, **options)
    if found is None:
        raise PeerRefused(f"there is no {what} {str(path)!r}; flyweight keys writes such files")
    return found.decode("ascii", "replace")


class Handshakes:
    """Tells from a replica's failed handshakes whether, and why, its publisher refuses it."""

    def __init__(self, curve: CurveClient | None) -> None:
        self._curve, self._num_closed = curve, 0

    def refusal(self, event: int, value: int) -> str | None:
        """Return why the publisher refuses us, as the end of a sentence; None if that is not sure.

        A publisher that finds a wrong key closes the connection without a word, and so does one
        that is being closed. ZeroMQ connects again: the second such end is a refusal. A
        handshake that takes too long is none.
        """
        match event:
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH if self._curve is not None:
                return (
                    f"does not admit our public key {self._curve.keys.public!r}; add it to the "
                    f"publisher's clients"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                if value != zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                    return f"fails the handshake: {self._remedy} (protocol error {value:#x})"
                return self._mismatch
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if value in _CLOSED:
                self._num_closed += 1
                return f"ends the handshake: {self._remedy}" if self._num_closed > 1 else None
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_closed = 0
        return None

    @property
    def _mismatch(self) -> str:
        if self._curve is None:
            return f"encrypts with CURVE and we do not; {_GIVE_KEY}"
        return "does not encrypt and we do; give it keys with curve=, or pass none here"

    @property
    def _remedy(self) -> str:
        if self._curve is None:
            return f"it may encrypt with CURVE and we do not; {_GIVE_KEY}"
        shown = self._curve.server_key[:_SHOWN_CHARACTERS]
        return (
            f"it does not have the secret key to our server key '{shown}…', or has no keys; "
            f"compare it with the publisher's .pub file"
        )
