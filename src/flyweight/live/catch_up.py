"""Catch-up rounds: serve replicas that ask between two publishes, from memory or a snapshot.

Each such round has one member, a thread and bucket slots of its own, so that the next publish
need not wait for it. It begins only if the version that it reads is not about to be replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic, perf_counter

from flyweight.errors import FlyweightError, PeerFailed, TransferTimeout
from flyweight.live.lanes import BucketSlots, Offers, Transports
from flyweight.live.member import Member
from flyweight.live.members import Members
from flyweight.live.published_model import PublishedModel, PublishedVersion
from flyweight.live.round import Round
from flyweight.live.rounds import PublisherOptions, Rounds
from flyweight.verbs.find import open_source, versions


class CatchUpRounds:
    """The version that replicas can take between two publishes, and the rounds that bring it."""

    def __init__(
        self,
        members: Members,
        rounds: Rounds,
        options: PublisherOptions,
        transports: Transports,
        model: PublishedModel,
    ) -> None:
        self._members, self._rounds, self._options = members, rounds, options
        self._transports, self._model = transports, model
        self._running: dict[threading.Thread, tuple[PublishedVersion | None, Round | None]] = {}
        """The version that each thread serves, None for the store, and its round once begun."""
        self._is_open = True
        self.available: PublishedVersion | None = None
        """The version that replicas can take at once."""

    def serve(self, member: Member) -> None:
        """Serve a member's request now if possible; otherwise it waits for a publish."""
        request, available = member.request, self.available
        if request is None or not self._is_open:
            return
        last = self._members.version
        has_store = self._options.store is not None and member.searched_request != request.ask
        newest = last if request.version is None else request.version
        may_be_newer = has_store and available is None and request.version is None
        is_newest = request.have is not None and request.have == newest and not may_be_newer
        if request.may_keep and is_newest:
            self._members.confirm(member, request)
        elif available is not None and request.version in (None, available.version):
            if available.version != request.have:
                self._start_thread(member, available)
        elif has_store:
            member.searched_request = request.ask  # once: later versions come by a publish
            self._start_thread(member, None)
        elif request.version is not None and last is not None and request.version <= last:
            self._members.deny(member, last)

    def release_members(self, members: Sequence[Member]) -> None:
        """Take members out of their rounds, and serve those that have sent requests meanwhile."""
        with self._members.changed:
            for member in members:
                self._members.leave_round(member)
            for member in self._members.waiting():
                self.serve(member)

    def retire_available(self, version: int, timeout_seconds: float) -> None:
        """Withdraw the available version, so that `version` can overwrite its memory.

        A replica that still reads it after half of the time is given up: the bytes that it copies
        from then on are of no version, and its digests will show that.
        """
        with self._members.changed:
            old = self.available
            # Other members may still begin: a reader may be a rank that waits for another rank.
            self._members.changed.wait_for(lambda: not self._readers(old), timeout_seconds / 2)
            self.available = None
            if old is not None:
                old.is_replaced = True  # nobody begins to read it from now on
            readers = self._readers(old)
        for round_ in readers:
            round_.abort(TransferTimeout(f"version {version} overwrites the version that it reads"))

    def _readers(self, version: PublishedVersion | None) -> list[Round]:
        """Return the rounds that have begun to read a version."""
        running = self._running.values()
        return [round_ for each, round_ in running if each is version and round_ is not None]

    def _start_thread(self, member: Member, version: PublishedVersion | None) -> None:
        self._members.reserve(member)
        thread = threading.Thread(
            target=self._run, args=(member, version), name="flyweight-catch-up", daemon=True
        )
        self._running[thread] = version, None
        try:
            thread.start()
        except RuntimeError as cause:  # the system's limit of threads is reached
            del self._running[thread]
            text = f"the publisher cannot start a thread: {cause}; raise the limit, ulimit -u"
            self._members.fail(member, PeerFailed(text))
            self._members.leave_round(member)

    def _run(self, member: Member, version: PublishedVersion | None) -> None:
        """Run a round for one member, from the available version or from the store."""
        started = perf_counter()
        slots = BucketSlots(self._transports, self._options.bucket_bytes, self._options.depth)
        try:
            with ExitStack() as stack:
                stack.callback(slots.close)
                if version is None:
                    version = self._from_store(member, stack)
                if version is not None:
                    self._run_round(member, version, slots, started)
        except FlyweightError as error:
            self._members.fail(member, error)
        except BaseException as error:
            self._members.fail(member, PeerFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            with self._members.changed:
                member.forget_lists()  # the slots are closed
                del self._running[threading.current_thread()]
                self.release_members([member])

    def _run_round(
        self, member: Member, version: PublishedVersion, slots: BucketSlots, started: float
    ) -> None:
        def start(round_: Round) -> bool:
            """Begin, unless the version is about to be overwritten."""
            with self._members.changed:
                if not version.is_replaced:
                    self._running[threading.current_thread()] = version, round_
                    round_.begin()
                return not version.is_replaced

        members, timeout_seconds = self._members, self._options.timeout_seconds
        round_ = self._rounds.prepare(version, [member], slots, timeout_seconds, start=start)
        members.set_state(round_.number, version.version, "serving", round_.members, 0.0)
        self._rounds.run(round_)
        seconds = perf_counter() - started
        members.set_state(round_.number, members.version, "idle", round_.members, seconds)
        (progress,) = round_.members
        if progress.has_begun:
            members.announce(
                "serve.done",
                name=member.name,
                pid=member.hello.pid,
                version=version.version,
                origin=version.origin,
                nbytes=progress.nbytes,
                seconds=seconds,
                error=None if progress.error is None else str(progress.error),
            )

    def _from_store(self, member: Member, stack: ExitStack) -> PublishedVersion | None:
        """Open the requested snapshot, or the newest if it is newer than what the replica has."""
        store, request = self._options.store, member.request
        assert store is not None
        if request is None:
            return None
        found = versions(store)
        if request.version is not None:
            if request.version not in found:
                return None
        elif not found or (request.held is not None and request.held >= found[-1]):
            last = self._members.version
            newest = max([*found[-1:], -1 if last is None else last])
            if request.may_keep and request.have == newest:
                self._members.confirm(member, request)
            return None
        stored = stack.enter_context(open_source(store, version=request.version))
        source = self._model.source.read_from(stored)
        offers = Offers(source, self._transports)
        stack.callback(offers.close)
        manifest = stored.manifest
        assert manifest.version is not None
        return PublishedVersion(
            manifest.version, manifest.parent, source, offers, "snapshot", manifest.values
        )

    def close(self) -> None:
        """Serve no more requests; rounds that run go on."""
        self._is_open = False

    def join(self, deadline: float) -> bool:
        """Wait for the rounds that run; return whether all are over."""
        with self._members.changed:  # a thread that is not started yet cannot be joined
            threads = list(self._running)
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0))
        return not self._running
