"""Late: replicas that ask between publishes get what is held, or what rests in a store.

Each is served in a thread of its own, from slots of its own, so that the next publish need
not wait for it. It begins only while what it is to read stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic, perf_counter

from flyweight.errors import FlyweightError, PeerFailed, TransferTimeout
from flyweight.live.conductor import Conductor
from flyweight.live.copies import Copiers
from flyweight.live.lanes import Offers, Ring, Transports
from flyweight.live.members import Peer, Roll
from flyweight.live.published_version import Edition, Options, no_release
from flyweight.live.round import Round
from flyweight.live.source import Stock
from flyweight.verbs.find import open_source, versions


class Late:
    """What is there for replicas between publishes, and the rounds that bring it to them."""

    def __init__(
        self,
        roll: Roll,
        conductor: Conductor,
        options: Options,
        transports: Transports,
        *,
        stock: Callable[[], Stock],
        copiers: Copiers,
    ) -> None:
        self._roll, self._conductor, self._options = roll, conductor, options
        self._transports, self._stock, self._copiers = transports, stock, copiers
        self._rounds: dict[threading.Thread, tuple[Edition | None, Round | None]] = {}
        self._is_open = True
        self.standing: Edition | None = None
        """What whoever asks may take at once."""

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def serve(self, peer: Peer) -> None:
        """Give a replica that asks what is there for it by now, if anything is."""
        ask, standing = peer.ask, self.standing
        if ask is None or not self._is_open:
            return
        last = self._roll.version
        has_store = self._options.store is not None and peer.searched != ask.ask
        newest = last if ask.version is None else ask.version
        may_be_newer = has_store and standing is None and ask.version is None
        if ask.may_keep and ask.have is not None and ask.have == newest and not may_be_newer:
            self._roll.confirm(peer, ask)
        elif standing is not None and ask.version in (None, standing.version):
            if standing.version != ask.have:
                self._serve_in_thread(peer, standing)
        elif has_store:
            peer.searched = ask.ask  # once: what is not there now comes by a publish
            self._serve_in_thread(peer, None)
        elif ask.version is not None and last is not None and ask.version <= last:
            self._roll.deny(peer, last)

    def give_back(self, peers: Sequence[Peer]) -> None:
        """Let replicas ask again, and see to those that have asked meanwhile."""
        with self._roll.changed:
            for peer in peers:
                self._roll.take_back(peer)
            for peer in self._roll.waiting():
                self.serve(peer)

    def clear(self, version: int, timeout: float) -> None:
        """Take away what stands, once nobody reads it any more.

        A replica that is still at it after half of the time is given up: what it copies then is
        no version, and its digests will say so.
        """
        with self._roll.changed:
            old = self.standing
            # Meanwhile others may begin: a reader may be a rank that waits for another rank to.
            self._roll.changed.wait_for(lambda: not self._readers_of(old), timeout / 2)
            self.standing = None
            if old is not None:
                old.is_gone = True  # from now on nobody begins to read it
            readers = self._readers_of(old)
        for round_ in readers:
            round_.cut(TransferTimeout(f"version {version} takes the place of what it reads"))

    def _readers_of(self, edition: Edition | None) -> list[Round]:
        """Return the rounds that have begun to read an edition."""
        found = self._rounds.values()
        return [round_ for each, round_ in found if each is edition and round_ is not None]

    def _serve_in_thread(self, peer: Peer, edition: Edition | None) -> None:
        self._roll.keep(peer)
        thread = threading.Thread(
            target=self._late_round, args=(peer, edition), name="flyweight-late", daemon=True
        )
        self._rounds[thread] = edition, None
        try:
            thread.start()
        except RuntimeError as cause:  # the system gives no more of them
            del self._rounds[thread]
            text = f"no thread is left to the publisher: {cause}; raise the limit, ulimit -u"
            self._roll.fail(peer, PeerFailed(text))
            self._roll.take_back(peer)

    def _late_round(self, peer: Peer, edition: Edition | None) -> None:
        """Run a round for one replica, from what is held or from the newest snapshot."""
        started = perf_counter()
        options = self._options
        ring = Ring(self._transports, bucket_bytes=options.bucket_bytes, depth=options.depth)
        try:
            with ExitStack() as stack:
                stack.callback(ring.close)
                if edition is None:
                    edition = self._newest(peer, stack)
                if edition is None:
                    return
                self._serve_edition(peer, edition, ring, started)
        except FlyweightError as error:
            self._roll.fail(peer, error)
        except BaseException as error:
            self._roll.fail(peer, PeerFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            with self._roll.changed:
                peer.lanes = peer.sent = None  # the ring is gone
                del self._rounds[threading.current_thread()]
                self.give_back([peer])

    def _serve_edition(self, peer: Peer, edition: Edition, ring: Ring, started: float) -> None:
        def admit(round_: Round) -> bool:
            """Begin unless what is to be read is about to be overwritten."""
            with self._roll.changed:
                if not edition.is_gone:
                    self._rounds[threading.current_thread()] = edition, round_
                    round_.begin()
                return not edition.is_gone

        round_ = self._conductor.round_of(
            edition,
            [peer],
            ring,
            self._options.timeout_seconds,
            admit=admit,
            on_release=no_release,
        )
        self._roll.tell(round_.number, edition.version, "serving", round_.parts, 0.0)
        self._conductor.run(round_)
        seconds = perf_counter() - started
        self._roll.tell(round_.number, self._roll.version, "idle", round_.parts, seconds)
        (part,) = round_.parts
        if part.is_begun:
            self._roll.announce(
                "serve.done",
                name=peer.name,
                pid=peer.hello.pid,
                version=edition.version,
                origin=edition.origin,
                nbytes=part.nbytes,
                seconds=seconds,
                error=None if part.error is None else str(part.error),
            )

    def _newest(self, peer: Peer, stack: ExitStack) -> Edition | None:
        """Open the newest snapshot of the store, if it is newer than what a replica has."""
        store, ask = self._options.store, peer.ask
        assert store is not None
        if ask is None:
            return None
        found = versions(store)
        if ask.version is not None:
            if ask.version not in found:
                return None
        elif not found or (ask.held is not None and ask.held >= found[-1]):
            last = self._roll.version
            if ask.may_keep and ask.have == max([*found[-1:], -1 if last is None else last]):
                self._roll.confirm(peer, ask)
            return None
        stored = stack.enter_context(open_source(store, version=ask.version))
        stock = Stock.at_rest(stored, self._stock(), self._copiers)
        offers = Offers(stock, self._transports)
        stack.callback(offers.close)
        number = stored.manifest.version
        assert number is not None
        values = stored.manifest.values
        return Edition(number, stored.manifest.parent, stock, offers, "snapshot", values)

    def end(self) -> None:
        """Serve nobody any more."""
        self._is_open = False

    def join(self, deadline: float) -> bool:
        """Wait for the rounds that run; return whether all are over."""
        with self._roll.changed:  # one that is not started yet cannot be waited for
            threads = list(self._rounds)
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0))
        return not self._rounds
