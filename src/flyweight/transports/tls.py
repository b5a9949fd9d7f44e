"""TLS between hosts: certificates, and the wire that they encrypt.

One object, the wire, owns the socket; OpenSSL works on memory only. So the same code waits for
plain and for encrypted connections, and ending one from another thread lets no plain text out.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import monotonic
from typing import TypeVar

from flyweight.errors import PeerLost, PeerRefused, SpecError, TransferTimeout
from flyweight.memory import Bytes
from flyweight.transports.wire import FOREVER, DeadlinePassed, Wire

T = TypeVar("T")
_RECORD_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificates for encrypted connections between hosts, as files in PEM format."""

    certificate: str | os.PathLike[str] | None = None
    """What this side shows, with the certificates between it and the authority. Publishers, and
    replicas and relays that serve others, need one."""
    key: str | os.PathLike[str] | None = None
    """The private key of the certificate."""
    authority: str | os.PathLike[str] | None = None
    """Who signs the certificates that are accepted. A holder with an authority demands one of each
    reader; a reader without one trusts the authorities of its system."""
    check_hostname: bool = True
    """Whether a holder's certificate must name the host that a reader connects to."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise SpecError("a certificate needs its key, and a key its certificate")
        _ = self.holder if self.certificate is not None else self.reader

    @cached_property
    def holder(self) -> ssl.SSLContext:
        """The context of a side that accepts connections."""
        if self.certificate is None:
            raise SpecError(
                "a publisher, a relay and a replica that serves others accept encrypted "
                "connections, and there is no certificate: give one with its key, or serve=False"
            )
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        found.num_tickets = 0  # nothing but messages follows the handshake
        if self.authority is not None:
            found.verify_mode = ssl.CERT_REQUIRED
        return self._with_files(found)

    @cached_property
    def reader(self) -> ssl.SSLContext:
        """The context of a side that connects."""
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        found.check_hostname = self.check_hostname
        if self.authority is None:
            found.load_default_certs()
        return self._with_files(found)

    def _with_files(self, context: ssl.SSLContext) -> ssl.SSLContext:
        # Older protocols may ask for another handshake in the middle of the stream.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            if self.certificate is not None:
                assert self.key is not None
                context.load_cert_chain(self.certificate, self.key)
            if self.authority is not None:
                context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as cause:
            raise SpecError(
                f"certificate {self.certificate!r}, key {self.key!r}, authority "
                f"{self.authority!r}: {cause}"
            ) from cause
        return context


class TlsWire(Wire):
    """An encrypted socket. Only this object ever writes to the socket, and only ciphertext."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, hostname: str | None = None
    ) -> None:
        """hostname: whom this side connects to; None if it has accepted the connection."""
        super().__init__(connection)
        self.is_local = False
        self._came, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._came, self._going, server_side=hostname is None, server_hostname=hostname
        )
        self._calling = threading.Lock()
        """An SSLObject serves one thread at a time; nobody waits for a peer while holding this."""

    def greet(self) -> bool:
        """Go on with the handshake, without waiting; return True once it is done."""
        while True:
            is_done = True
            try:
                self._call(self._tls.do_handshake)
            except ssl.SSLWantReadError:
                is_done = False
            finally:  # what is refused is told, too
                if data := self._going.read():
                    super().send([data], monotonic())
            if is_done:
                return True
            self._take_ciphertext()

    def shake_hands(self, deadline: float) -> None:
        """Return once the connection is encrypted; raise PeerRefused if one side refuses."""
        try:
            while True:
                try:
                    if self.greet():
                        return
                except BlockingIOError:
                    self._wait(select.POLLIN, deadline, FOREVER)
        except DeadlinePassed as cause:
            raise TransferTimeout("the other side did not shake hands in time") from cause
        except OSError as cause:
            raise PeerLost(f"no encrypted connection: {cause}; is tls= given there?") from cause

    def send(
        self,
        parts: Sequence[bytes | memoryview | Bytes],
        deadline: float,
        *,
        files: Sequence[int] = (),
        stall_seconds: float = FOREVER,
    ) -> None:
        assert not files, "open files do not leave a host"
        for part in parts:
            view = memoryview(part).cast("B")
            for at in range(0, len(view), _RECORD_BYTES):
                data = self._call(partial(self._encrypted, view[at : at + _RECORD_BYTES]))
                super().send([data], deadline, stall_seconds=stall_seconds)

    def _encrypted(self, view: memoryview) -> bytes:
        self._tls.write(view)
        return self._going.read()

    def receive_some(self, view: memoryview, files: list[int] | None = None) -> int:
        while True:
            try:
                # The types know only arrays of bytes; any memory that can be written will do.
                return self._call(lambda: self._tls.read(len(view), view))  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._take_ciphertext()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def _take_ciphertext(self) -> None:
        """Pass on what has come; raise BlockingIOError if nothing has."""
        data = self._socket.recv(_RECORD_BYTES)
        with self._calling:
            if data:
                self._came.write(data)
            else:
                self._came.write_eof()

    def _call(self, call: Callable[[], T]) -> T:
        with self._calling:
            try:
                return call()
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
                raise
            except ssl.SSLError as cause:
                raise PeerRefused(
                    f"no encrypted connection: {cause.reason or cause}; both sides need tls=, with "
                    f"certificates of an authority that the other side accepts"
                ) from cause

    def _has_bytes(self) -> bool:
        with self._calling:
            return self._tls.pending() > 0 or self._came.pending > 0
