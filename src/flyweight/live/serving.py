"""Serving: a replica lets others take the version that it holds, from its own live weights.

To them it is a publisher whose version stays. It is withdrawn before the next update writes, which
waits for readers only for a short time: an engine's own update comes first.
"""

from __future__ import annotations

import threading
from logging import getLogger
from time import monotonic

from flyweight.adapters.model import Model
from flyweight.adapters.tree import is_model
from flyweight.checks import check_seconds
from flyweight.errors import FlyweightError, SpecError
from flyweight.events import announce
from flyweight.live.curve_keys import CurveClient
from flyweight.live.leader import Leader
from flyweight.live.meeting import blocks_alone
from flyweight.live.messages import Begin
from flyweight.live.options import PublisherOptions
from flyweight.live.published_model import PublishedModel
from flyweight.live.tcp_address import TcpAddress, claimed, parse_address

WITHDRAW_SECONDS = 2.0
"""How long the update of a replica waits, at most, for those that read its weights."""
_log = getLogger("flyweight.live")


class Serving:
    """The publisher inside of a replica, if it has an address to serve on. A lock guards all state.

    Errors while it serves are announced, and never end an update.
    """

    def __init__(
        self,
        target: object,
        address: str | None,
        token: str | None,
        curve: CurveClient | None,
        *,
        withdraw_seconds: float,
        is_whole: bool,
    ) -> None:
        """Listen at an address; nothing is served before `serve`.

        curve: what encrypts the replica's own messages to other hosts, if they are.
        is_whole: whether the replica has one rank, and no layout.
        """
        self._target, self._token = target, token
        self._withdraw_seconds = check_seconds("withdraw_seconds", withdraw_seconds)
        self._lock = threading.RLock()
        self._session = ""
        """The publisher that the served versions come from."""
        self._should_verify = True
        """Whether that publisher compares digests: what nobody has verified is served as such."""
        self._last: tuple[Begin, str] | None = None
        self._leader: Leader | None = None
        self.address: str | None = None
        """Where others find it, with the real port."""
        if address is None:
            return
        self._place = parse_address(address)
        self._check(is_whole=is_whole, has_curve=curve is not None)
        self._leader = self._opened()
        found = self._leader.listens_at
        if found is not None:
            self._place = found  # the same port for all that follow
        self.address = str(self._place if found is None else found.reachable)

    def _check(self, *, is_whole: bool, has_curve: bool) -> None:
        if callable(self._target) and not is_model(self._target):
            raise SpecError(
                "serve_on= is for models and dicts of tensors; a loader's engine may have fused or "
                "requantised what it was given, so others cannot take it from there"
            )
        if not is_whole:
            raise SpecError(
                "serve_on= is for replicas of one rank, without a layout; several ranks would have "
                "to withdraw a version together"
            )
        if has_curve and isinstance(self._place, TcpAddress):
            raise SpecError(
                "serve_on= at a tcp address does not encrypt messages, and curve= is given; serve "
                "at 'unix:DIRECTORY', or without encryption"
            )
        if isinstance(self._place, TcpAddress) and self._token is None:
            raise SpecError(f"to serve at {self._place}, a replica needs a token: token=")

    def _opened(self) -> Leader:
        model = PublishedModel(self._target)
        if isinstance(model.source.source, Model) and model.source.source.has_layout:
            raise SpecError(
                "serve_on= is for replicas that hold whole tensors; this model's are parts of them"
            )
        blocks = blocks_alone(model.source)
        claim, listen = claimed(self._place, self._token)
        options = PublisherOptions(should_verify=self._should_verify)
        return Leader(model, options, claim, blocks, listen=listen)

    def serve(self, begin: Begin, session: str) -> None:
        """Let others take the version of a round that was committed.

        session: the publisher that it came from.
        """
        if self.address is None:
            return
        with self._lock:
            self._last = begin, session
            is_other = self._session not in ("", session)
            if is_other or begin.should_verify != self._should_verify:
                # Versions of another publisher are others, even if their numbers are the same.
                self._close_leader()
            self._session, self._should_verify = session, begin.should_verify
            try:
                try:
                    self._serve(begin)
                except FlyweightError:  # the model may have other tensors than before
                    self._close_leader()
                    self._serve(begin)
            except FlyweightError as error:
                _log.warning("version %d is not served to others: %s", begin.version, error)
                announce("serving.failed", version=begin.version, error=str(error))
                self._close_leader()

    def _serve(self, begin: Begin) -> None:
        if self._leader is None:
            self._leader = self._opened()
        self._leader.members.admission.follows = self._session
        seconds = self._withdraw_seconds
        self._leader.serve(begin.version, begin.parent, begin.values, seconds)

    def serve_again(self) -> None:
        """Serve what was served last: the update before which it was withdrawn wrote nothing."""
        with self._lock:
            if self._last is not None and not (self._leader and self._leader.has_staying):
                self.serve(*self._last)

    def withdraw(self) -> None:
        """Let nobody read the weights from now on.

        Those that do may end, for half of the seconds to withdraw; then they are given up.
        """
        with self._lock:
            if self._leader is not None:
                self._leader.withdraw(self._withdraw_seconds)

    def _close_leader(self) -> None:
        leader, self._leader = self._leader, None
        if leader is not None:
            leader.stop()
            leader.withdraw(self._withdraw_seconds)
            leader.abort()
            leader.wait_rounds(monotonic() + self._withdraw_seconds)
            leader.close()

    def close(self) -> None:
        """Disconnect all readers, and free the address. Safe to repeat."""
        with self._lock:
            self._last = None
            self._close_leader()
