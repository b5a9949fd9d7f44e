"""Planner: answers what replicas want with agreements, in a thread of its own.

Not in the connection's thread: a plan takes a while, and heartbeats must go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from logging import getLogger
from queue import SimpleQueue

import msgspec

from flyweight.errors import FlyweightError, PeerFailed
from flyweight.live.frames import digest_of
from flyweight.live.member import Member
from flyweight.live.messages import Want
from flyweight.live.source_blocks import Agreement
from flyweight.transports.network_engines import Engines

_MAX_AGREEMENTS = 16
_CLOSE_SECONDS = 2.0
_log = getLogger("flyweight.live")


class Planner:
    """Makes one plan after the other; replicas that want the same share one."""

    def __init__(
        self,
        plan: Callable[[Want, str], Agreement],
        engine_for: Callable[[Engines], str],
        on_agreed: Callable[[Member, Agreement], None],
        on_refused: Callable[[Member, FlyweightError], None],
    ) -> None:
        self._plan, self._engine_for = plan, engine_for
        self._on_agreed, self._on_refused = on_agreed, on_refused
        self._agreements: dict[tuple[bytes, str], Agreement] = {}
        self._wants: SimpleQueue[tuple[Member, Want] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flyweight-plans", daemon=True)
        self._thread.start()

    def add(self, member: Member, want: Want) -> None:
        """Plan for a member soon."""
        self._wants.put((member, want))

    def close(self) -> None:
        """End the thread, after the plans that were added before."""
        self._wants.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (asked := self._wants.get()) is not None:
            member, want = asked
            try:
                agreement = self._agreed(member, want)
            except FlyweightError as error:
                self._on_refused(member, error)
            except Exception as error:  # an error in our own code, which must not end the thread
                _log.exception("the plan for replica %s failed", member.name)
                self._on_refused(member, PeerFailed(f"{type(error).__name__}: {error}"))
            else:
                self._on_agreed(member, agreement)
            del asked, want  # the names of very many tensors take much memory

    def _agreed(self, member: Member, want: Want) -> Agreement:
        engine = self._engine_for(member.hello.engines) if want.is_remote else ""
        # Who checks digests reads the same bytes as who does not.
        key = digest_of(msgspec.structs.replace(want, checks_digests=False)), engine
        if key not in self._agreements:
            while len(self._agreements) >= _MAX_AGREEMENTS:
                del self._agreements[next(iter(self._agreements))]
            self._agreements[key] = self._plan(want, engine)
        return self._agreements[key]
