"""The options of a publisher that its rounds need, checked."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

from flyweight.checks import check_seconds
from flyweight.errors import SpecError
from flyweight.live.curve_keys import CurveClient, CurveServer
from flyweight.live.lanes import TRANSPORTS, TransportChoice
from flyweight.live.report import TIMEOUT_SECONDS
from flyweight.verbs.find import PathLike

SILENCE_SECONDS = 15.0
NetworkEngine = Literal["auto", "sockets", "nixl", "mooncake"]


@dataclass(frozen=True, kw_only=True)
class PublisherOptions:
    """The options of a publisher; `Publisher` explains them."""

    hold: bool = False
    store: PathLike | None = None
    transport: TransportChoice = "auto"
    bucket_bytes: int | None = None
    depth: int | None = None
    should_verify: bool = True
    timeout_seconds: float = TIMEOUT_SECONDS
    silence_seconds: float = SILENCE_SECONDS
    curve: CurveServer | None = None
    network_engine: NetworkEngine = "auto"

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise SpecError(f"transport is {self.transport!r}, not one of {', '.join(TRANSPORTS)}")
        if self.network_engine not in get_args(NetworkEngine):
            known = ", ".join(get_args(NetworkEngine))
            raise SpecError(f"network_engine is {self.network_engine!r}, not one of {known}")
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise SpecError(f"depth is {self.depth!r}, at least 1 bucket is needed")
        size = self.bucket_bytes
        if size is not None and (type(size) is not int or size < 4096):
            raise SpecError(f"bucket_bytes is {size!r}, at least 4096 are needed")
        check_seconds("timeout_seconds", self.timeout_seconds)
        if check_seconds("silence_seconds", self.silence_seconds) <= 0:
            raise SpecError("silence_seconds is 0, it must be greater: every replica would be lost")

    @property
    def client_curve(self) -> CurveClient | None:
        """What another rank of the same publisher connects with, which has the same keys."""
        return None if self.curve is None else CurveClient(self.curve.keys.public, self.curve.keys)

    def common(self, address: str, token: str | None) -> str:
        """Return what must be the same on all ranks, as text that anybody may read."""
        digest = None if token is None else blake2b(token.encode(), digest_size=4).hexdigest()
        return (
            f"hold={self.hold}, should_verify={self.should_verify}, transport={self.transport!r}, "
            f"network_engine={self.network_engine!r}, address={address!r}, "
            f"token={digest and f'(of digest {digest})'}"
        )
