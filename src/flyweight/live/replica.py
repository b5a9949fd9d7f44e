"""Replica: the engine's side. It updates weights in place, completely or not at all.

A replica whose weights were overwritten in a round that did not commit has the state 'failed':
it holds no version and says why, until an update succeeds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Literal

from flyweight.adapters.loader import Framework
from flyweight.checks import check_ranks, check_seconds, check_text, check_version
from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.events import announce
from flyweight.live.curve_keys import CurveClient
from flyweight.live.held_version import REPLACED, HeldVersion, State
from flyweight.live.messages import Want
from flyweight.live.reconnect import Reconnect, replica_name
from flyweight.live.replica_round import ReplicaRound
from flyweight.live.report import TIMEOUT_SECONDS, announce_update, check_verified
from flyweight.live.serving import WITHDRAW_SECONDS, Serving
from flyweight.live.sinks import sink_for
from flyweight.live.tcp_address import parse_address
from flyweight.ports import UpdateOptions, UpdateReport, Weights
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.model_layout import ModelLayout

_CONNECT_SECONDS = 10.0
MIN_PROGRESS_SECONDS = 10.0
"""The shortest time that a round may make no progress: to give up costs the old version."""
_RECHECK_SECONDS = 0.05
"""After this long the model's tensors are looked at once more before a version is claimed."""


class Replica:
    """A model, or an engine's loader, that takes versions from a publisher."""

    def __init__(
        self,
        target: object,
        address: str,
        *,
        name: str | None = None,
        layout: ModelLayout | None = None,
        rank: int | None = None,
        num_ranks: int | None = None,
        layout_rank: int | None = None,
        extra: Literal["refuse", "report"] = "refuse",
        framework: Framework = "torch",
        device: str = "cpu",
        token: str | None = None,
        curve: CurveClient | None = None,
        serve_on: str | None = None,
        withdraw_seconds: float = WITHDRAW_SECONDS,
        peers: Sequence[str] = (),
    ) -> None:
        """Connect to the publisher at an address, now or once there is one.

        target: a model or a dict of tensors, which are written in place; or a function that takes
            an iterator of (name, whole tensor), in the publisher's order.
        address: the publisher's address, `unix:DIRECTORY` or `tcp://HOST:PORT`.
        name: the name in reports and events; by default the host and the process id.
        layout: how the model's tensors are cut over ranks.
        layout_rank: which rank of the layout this is; by default `rank`.
        rank, num_ranks: which of how many ranks of the engine this is. All of them make a replica
            with the same `name`, on one host: none overwrites its weights before all have drained,
            and none holds a new version before all do.
        extra: 'refuse' raises PlanError if the publisher has tensors that the model lacks; 'report'
            leaves them out and lists them in `unused`.
        framework, device: what tensors are made for a function.
        token: the publisher's token; at a `unix:` address it may be in a file next to its sockets.
        curve: the publisher's public key, if it encrypts messages to other hosts.
        serve_on: an address of its own, where others take each version that this replica holds,
            from its live weights, with the same `token`. Only updates may change them. What it took
            unverified is served as such.
        withdraw_seconds: how long an update waits for readers; after half of it they are given up.
        peers: addresses of replicas that serve others. While no publisher answers, an update takes
            the version that one of them holds; a publisher names more of them by itself. A function
            takes it only with all tensors of a publisher that was joined before.
        """
        check_text("token", token, is_secret=True)
        ranks = (0, 1) if num_ranks is None else check_ranks(rank, num_ranks)
        self.num_ranks = ranks[1]
        """The number of ranks of the engine, which take each version together."""
        self.name = replica_name(name, self.num_ranks)
        cut = layout, rank if layout_rank is None else layout_rank
        self._sink = sink_for(target, cut, extra=extra, framework=framework, device=device)
        self._held = HeldVersion(self._sink.is_current)
        self._updating, self._thread = threading.Lock(), 0
        self._publisher = Reconnect(
            parse_address(address),
            token,
            curve,
            self.name,
            ranks,
            choose=self._choose,
            is_current=self._sink.is_current,
            takes_all=self._sink.takes_all,
            peers=peers,
        )
        is_whole = self.num_ranks == 1 and layout is None
        self._serving = Serving(
            target, serve_on, token, curve, withdraw_seconds=withdraw_seconds, is_whole=is_whole
        )
        self._publisher.serves_at = self._serving.address or ""
        self.report: UpdateReport | None = None
        """The report of the last update that succeeded."""
        self.last_version: int | None = None
        """The version of the last update that succeeded, even if it was lost since."""
        self.unused: tuple[str, ...] = ()
        """The tensors that the publisher of the last update has and the model lacks."""
        self._round: ReplicaRound | None = None
        self._checked_at, self._is_open, self._pid = 0.0, True, os.getpid()
        try:
            with suppress(PeerLost, TransferTimeout):  # the publisher may start later
                self._publisher.connect(monotonic() + _CONNECT_SECONDS, lambda: False)
            if not self.is_connected:
                self._sink.check()  # as joining does
        except BaseException:
            self._serving.close()
            raise

    @property
    def version(self) -> int | None:
        """The complete version that the model holds.

        None before the first update, after one that failed, and once the tensors that held the
        version were replaced or have moved.
        """
        return self._held.version

    @property
    def state(self) -> State:
        """'empty', 'ready', 'updating', or 'failed'."""
        return self._held.state

    @property
    def failure(self) -> FlyweightError | None:
        """Why the model holds no complete version; None if it holds one or never did."""
        return self._held.failure

    @property
    def serves_at(self) -> str | None:
        """The address at which others take versions from this replica, with its real port."""
        return self._serving.address

    @property
    def is_connected(self) -> bool:
        """True while a publisher is connected and has accepted this replica."""
        return self._publisher.is_joined

    @property
    def session(self) -> str:
        """An id of the publisher that the version came from; a restarted one has another."""
        return self._held.session

    @property
    def progress(self) -> float:
        """How much of the current or last round is copied, from 0 to 1."""
        return 0.0 if self._round is None else self._round.progress

    def check_servable(self) -> None:
        """Raise VersionError unless the model holds a complete version; call it before serving."""
        self._held.check_servable(self.name)

    def update(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        before: Callable[[int], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
        may_keep: bool = False,
        must_verify: bool = False,
    ) -> UpdateReport:
        """Update the model to a version, and return a report; wait for the version if necessary.

        version: the version to take; by default the next one that the model does not hold.
        timeout_seconds: the time to wait for the version. Once it arrives, each step of the round
            may take as long, and at least 10 s: to give up then costs the old version.
        before: called with the version when it arrives, before the first write. From then on the
            engine must not use the weights. If it raises, the old version stays.
        is_over: ends the wait early if it returns True when `wake` is called.
        may_keep: the version that the model holds is enough if it is the newest.
        must_verify: refuse a version whose digests are not compared, before the first write.

        If the model already holds the version, or with `may_keep` the newest, the last report is
        returned, after a publisher has confirmed it.

        Raises TransferTimeout if no version comes, VersionError if the version will never come,
        PeerLost if the publisher dies, and TransportError if another update is under way. An error
        after the first write leaves the replica in the state 'failed'. If the model's tensors were
        replaced while the update waited, the version is requested again for the new ones. With
        `before`, or several ranks, VersionError is raised instead, since others may have paused
        for this round; the next update takes the version.
        """
        return self.take(
            UpdateOptions(
                version=None if version is None else check_version(version),
                timeout_seconds=check_seconds("timeout_seconds", timeout_seconds),
                before=before,
                is_over=is_over,
                may_keep=may_keep,
                must_verify=must_verify,
            )
        )

    def take(self, options: UpdateOptions, *, peer_seconds: float = 0.0) -> UpdateReport:
        """Do as `update`, which explains the options. The round joins the ranks of a replica.

        peer_seconds: how much longer than `timeout_seconds` other replicas may take to begin.
        """
        self._check_open()
        if not self._updating.acquire(blocking=False):
            raise TransportError(f"an update of replica {self.name!r} is under way")
        try:
            self._thread = threading.get_ident()
            return self._update(options, peer_seconds)
        finally:
            self._updating.release()
            if not self._is_open:
                self._free()

    def follow(self, *, timeout_seconds: float | None = None) -> Iterator[UpdateReport]:
        """Take each version as it is published, and yield its report.

        The weights do not change while the caller has a report. With `timeout_seconds`, raises
        TransferTimeout if no version comes for that long; without, waits forever.
        """
        seconds = TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        while True:
            try:
                yield self.update(timeout_seconds=seconds)
            except TransferTimeout:
                # Nobody published; or a round failed, which the caller must know.
                if timeout_seconds is not None or self.state == "failed" or not self._is_open:
                    raise

    def wake(self) -> None:
        """Make an update that waits for a version call its `is_over`."""
        self._publisher.wake()

    def forget(self, reason: str, *, loaded: int | None = None) -> None:
        """Hold no version: the weights' memory was freed, or others wrote version `loaded`."""
        self._held.forget(reason, loaded)
        self._serving.withdraw()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise TransportError(
                f"replica {self.name!r} belongs to process {self._pid}; a child makes its own"
            )
        if not self._is_open:
            raise TransportError(f"replica {self.name!r} is closed")

    def _update(self, options: UpdateOptions, peer_seconds: float) -> UpdateReport:
        started, deadline = perf_counter(), monotonic() + options.timeout_seconds
        synchronize = partial(self._sink.synchronize, deadline + peer_seconds)
        while True:
            self._check_open()
            connection, begin = self._publisher.begun(
                options, self._held, deadline, synchronize, peer_seconds=peer_seconds
            )
            if begin is None:
                self._held.forget_if_moved()  # tensors may have been replaced meanwhile
                if self.version is None or self.report is None:
                    continue
                check_verified(self.report, options.must_verify)
                return self.report
            round_ = self._round = ReplicaRound(
                connection,
                begin,
                timeout_seconds=max(options.timeout_seconds, MIN_PROGRESS_SECONDS),
                has_devices=self._sink.has_devices,
                waited_seconds=perf_counter() - started,
                touch=self._held.touch,
            )
            if (report := self._take_part(round_, options)) is not None:
                return report

    def _choose(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        self._held.forget_if_moved()  # the sink may want other tensors from now on
        return self._sink.want(tensors, tied)

    def _take_part(self, round_: ReplicaRound, options: UpdateOptions) -> UpdateReport | None:
        """Take part in a round; return None if it was declined and must be requested again."""
        version = round_.begin.version
        try:
            if not self._prepare(round_, options):
                return None
            result = self._sink.receive(round_)
            self._sink.touched()
            # Before the commit, so that what fails here fails on all ranks: none serves alone.
            self._sink.finish(round_.begin.values)
            if self.num_ranks > 1:
                self._check_current(version)
            round_.commit(result)
            self._check_current(version)
        except BaseException as error:
            # Memory goes with a publisher that aborts, and it may have said why.
            reason = round_.abort_reason() if isinstance(error, HandleGone) else None
            self._fail(round_, reason or error)
            if reason is not None:
                raise reason from error
            raise
        finally:
            self._sink.unstage()
            round_.close()
        self._held.take(version, round_.connection.session)
        self.unused = round_.connection.unused
        report = self.report = round_.report(result, self._sink.verified)
        last, self.last_version = self.last_version, version
        announce_update(self.name, report, last)
        self._serving.serve(round_.begin, round_.connection.session)
        if round_.interrupt is not None:
            raise round_.interrupt
        return report

    def _prepare(self, round_: ReplicaRound, options: UpdateOptions) -> bool:
        """Do everything before the first write; return False if the round was declined."""
        version = round_.begin.version
        round_.open(must_verify=options.must_verify)
        self._sink.stage(round_)
        self._serving.withdraw()  # before the engine pauses: readers may take a while
        if options.before is not None:
            options.before(version)
        round_.check_running()  # the call may have taken long
        self._checked_at = perf_counter()
        if self._sink.is_in_place():
            round_.wait_write()
            if self.num_ranks == 1 or self._sink.is_in_place():  # other ranks may drain for long
                return True
        replaced = VersionError(f"{REPLACED} before version {version} was copied")
        if options.before is not None or self.num_ranks > 1:
            raise replaced
        round_.fail(replaced, is_touched=False)
        return False

    def _check_current(self, version: int) -> None:
        # In a short round once is enough: `version` looks again whenever it is asked for.
        if perf_counter() - self._checked_at > _RECHECK_SECONDS:
            self._checked_at = perf_counter()
            if not self._sink.is_current():
                raise VersionError(f"{REPLACED} while version {version} was copied")

    def _fail(self, round_: ReplicaRound, error: BaseException) -> None:
        """Tell the publisher, and remember whether the weights were overwritten."""
        version, is_touched = round_.begin.version, self._held.is_updating
        round_.fail(error, is_touched=is_touched)
        if not isinstance(error, FlyweightError):
            error = TransportError(f"{type(error).__name__}: {error}")
        outcome = f"it still holds version {self.version}"
        if is_touched:
            self._held.fail(error)
            self._sink.touched()
            outcome = "the weights are not whole, update again before serving"
        elif self.version is not None:
            self._serving.serve_again()
        error.note(f"replica {self.name!r}, version {version}: {outcome}")
        announce("update.failed", version=version, name=self.name, error=str(error))

    def close(self) -> None:
        """Disconnect and unmap memory; an update under way raises TransportError. Repeatable.

        If other replicas still read the version from this one, wait for them for some seconds.
        """
        if not self._is_open or self._pid != os.getpid():
            return
        self._is_open = False
        self._publisher.end()
        if self._thread != threading.get_ident() or not self._updating.locked():
            self._free()

    def _free(self) -> None:
        if self._updating.acquire(timeout=_CONNECT_SECONDS):  # an update still reads the memory
            self._publisher.disconnect()
            self._serving.close()
            self._sink.close()
            self._updating.release()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


_WEIGHTS: type[Weights] = Replica  # mypy checks the port
