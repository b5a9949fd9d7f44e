"""Replica: an engine's end. Takes versions over in place, whole or not at all.

A replica whose weights were touched by a round that did not commit is FAILED: it holds
no version and says why, until a whole update succeeds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging import getLogger
from time import monotonic, perf_counter, sleep
from typing import Literal

from flyweight.adapters.loader import Framework, Loader
from flyweight.adapters.tree import is_model
from flyweight.checks import check_seconds, check_version
from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    HandleGone,
    PeerLost,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
    error_named,
)
from flyweight.events import emit
from flyweight.live.address import Address
from flyweight.live.connection import spin_of
from flyweight.live.intake import Intake
from flyweight.live.lanes import Transports
from flyweight.live.loader_sink import LoaderSink
from flyweight.live.memory_sink import MemorySink
from flyweight.live.messages import Ask, Begin, Commit, Denied, Done, Fault, Kept
from flyweight.live.report import TIMEOUT_SECONDS, check_verified, unverified
from flyweight.live.round_feed import Link, RoundFeed
from flyweight.live.sinks import Taken, Taker
from flyweight.live.subscriber import Subscriber
from flyweight.ports import UpdateReport, Weights
from flyweight.spec.model_layout import ModelLayout
from flyweight.transports.cuda_ipc import CudaIpcTransport
from flyweight.transports.shared_memory import SharedMemoryTransport

State = Literal["empty", "ready", "updating", "failed"]
_log = getLogger("flyweight.live")
_RETRY_SECONDS = 0.02
_CONNECT_SECONDS = 10.0
_PROGRESS_SECONDS = 10.0
_REPLACED = "tensors of the model were replaced, or have moved,"


def _moved(version: int) -> VersionError:
    return VersionError(f"{_REPLACED} since version {version} was taken; update again")


class Replica:
    """A model, or an engine's loader, that follows a publisher."""

    def __init__(
        self,
        target: object,
        address: str,
        *,
        name: str | None = None,
        layout: ModelLayout | None = None,
        rank: int | None = None,
        extra: Literal["refuse", "report"] = "refuse",
        framework: Framework = "torch",
        device: str = "cpu",
        token: str | None = None,
    ) -> None:
        """Join the publisher at `address`, or be ready to once there is one.

        `target` is a model whose tensors are written in place, as `layout` cuts them for `rank`;
        or a function that takes an iterator of (name, whole tensor) in layer order, for which
        tensors of `framework` are made on `device`. `extra` says what becomes of tensors that the
        publisher has and the model lacks.
        """
        if extra not in ("refuse", "report"):
            raise SpecError(f"extra is {extra!r}, not 'refuse' or 'report'")
        for what, text in (("name", name), ("token", token)):
            if text is not None and (not isinstance(text, str) or not text.isprintable()):
                raise SpecError(f"{what} is {text!r}, not printable text")
        self._address, self._token = Address.parse(address), token
        self.name = f"{os.uname().nodename}:{os.getpid()}" if name is None else name
        self._taker: Taker
        if callable(target) and not is_model(target):
            if layout is not None:
                raise SpecError("a loader takes whole tensors; a layout is for models")
            self._taker = LoaderSink(Loader(target, framework, device))
        else:
            may_leave = extra == "report"
            self._taker = MemorySink(target, layout=layout, rank=rank, may_leave=may_leave)
        self._updating = threading.Lock()
        self._link: Link | None = None
        self._joining: Subscriber | None = None
        self._version: int | None = None
        self._session = ""
        self._ask = 0
        self._state: State = "empty"
        self._failure: FlyweightError | None = None
        self._report: UpdateReport | None = None
        self.last_version: int | None = None
        """The version that was taken last, whatever became of it."""
        self._unused: tuple[str, ...] = ()
        self._come = self._to_come = 0
        self._is_open, self._pid = True, os.getpid()
        with suppress(PeerLost, TransferTimeout):  # it may come later
            self._connect(monotonic() + _CONNECT_SECONDS, lambda: False)

    @property
    def version(self) -> int | None:
        """The version that is held, whole; None before the first, and after a failure.

        None as well once the tensors that held it are others, or have moved.
        """
        return None if self._has_moved else self._version

    @property
    def state(self) -> State:
        return "empty" if self._has_moved else self._state

    @property
    def failure(self) -> FlyweightError | None:
        """Why the weights are not whole."""
        version = self._version
        return _moved(version) if version is not None and self._has_moved else self._failure

    @property
    def _has_moved(self) -> bool:
        """True if tensors that hold a version are no longer those of the model."""
        return self._version is not None and not self._taker.is_current()

    @property
    def report(self) -> UpdateReport | None:
        """What the last update that succeeded did."""
        return self._report

    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors that the publisher of the last update has and the model lacks: left out."""
        return self._unused

    @property
    def is_connected(self) -> bool:
        """True while a publisher is there with which all is agreed."""
        link = self._link
        return link is not None and not link.subscriber.is_lost

    @property
    def session(self) -> str:
        """Which publisher the version that is held came from: a restarted one is another."""
        return self._session if self._version is not None else ""

    @property
    def progress(self) -> float:
        """How much of a round's bytes have come, from 0 to 1."""
        return min(self._come / self._to_come, 1.0) if self._to_come else 0.0

    def check_servable(self) -> None:
        """Raise unless a whole version is held: what an engine asks before it serves."""
        state, failure = self.state, self.failure
        if self.version is None or state != "ready":
            why = "it never took one" if failure is None else str(failure)
            raise VersionError(
                f"replica {self.name!r} is {state} and holds no whole version: {why}"
            )

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise TransportError(
                f"replica {self.name!r} is of process {self._pid}; a child makes one of its own"
            )
        if not self._is_open:
            raise TransportError(f"replica {self.name!r} is closed")

    def _look(self) -> None:
        """Hold nothing if the tensors that hold the version are no longer those of the model."""
        version = self._version
        if version is not None and self._has_moved:
            self.forget(str(_moved(version)))

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
        """Take a version over, or the next one that is not held yet; wait for it if need be.

        Returns the last report if the version that is named is held already, or with `may_keep`
        the newest; in both cases only after a living publisher has confirmed it. With
        `must_verify` a version whose digests are not compared is refused before it is written.

        The engine must not use the weights from `before` on, which is called with the version
        when it is there and nothing was written yet; what it raises ends the update, and the old
        version stays. Waits up to `timeout_seconds` for the version, or until `is_over` and
        `wake`; and as long, but 10 s at least, for each sign of progress while it comes: to give
        up then leaves weights that are not whole.

        Tensors that were replaced meanwhile are not written: without `before` the version is
        asked for anew, for those that are there by then; with it, since others may stand still for
        this round, VersionError is raised, and the next update takes it.
        """
        wanted = None if version is None else check_version(version)
        timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)
        self._check_open()
        if not self._updating.acquire(blocking=False):
            raise TransportError(f"an update of replica {self.name!r} is under way")
        try:
            return self._update(
                wanted,
                timeout_seconds,
                before,
                is_over,
                may_keep=may_keep,
                must_verify=must_verify,
            )
        finally:
            self._updating.release()

    def follow(self, *, timeout_seconds: float | None = None) -> Iterator[UpdateReport]:
        """Take each version as it comes, and yield its report.

        Between versions, while the caller has the report, the weights are at rest. Ends by
        TransferTimeout if none comes for `timeout_seconds`, if that is given.
        """
        while True:
            try:
                yield self.update(
                    timeout_seconds=TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
                )
            except TransferTimeout:
                # Nobody published; or a round failed, of which the caller must know.
                if timeout_seconds is not None or self._state == "failed" or not self._is_open:
                    raise

    def wake(self) -> None:
        """Have an update that waits for a version look whether it is over."""
        link, joining = self._link, self._joining
        for subscriber in (joining, None if link is None else link.subscriber):
            if subscriber is not None:
                subscriber.wake()

    def forget(self, reason: str) -> None:
        """Hold no version any more: the weights' memory was given back, or written by others."""
        self._version, self._state = None, "empty"
        self._failure = VersionError(reason)

    def _update(
        self,
        version: int | None,
        timeout_seconds: float,
        before: Callable[[int], None] | None,
        is_over: Callable[[], bool],
        *,
        may_keep: bool,
        must_verify: bool,
    ) -> UpdateReport:
        started, deadline = perf_counter(), monotonic() + timeout_seconds
        self._look()
        while True:
            link = self._linked(deadline, is_over)
            have = self._version if self._session == link.session else None
            self._ask += 1
            is_enough = have is not None and (may_keep or have == version)
            ask = Ask(self._ask, version, have, self._version, is_enough)
            self._taker.settle(deadline)
            try:
                begin = self._begun(link, ask, deadline, is_over)
            except (PeerLost, TransferTimeout) as error:
                # It was silent, or has gone; if it is still there, nobody has published in time.
                is_lost = isinstance(error, PeerLost) or link.subscriber.is_lost
                if not is_lost or monotonic() > deadline or not self._is_open:
                    raise
                self._drop()  # a publisher that comes back is as good
                continue
            if begin is None:
                self._look()  # tensors may have been replaced while the answer was on its way
                if self._version is not None and self._report is not None:
                    check_verified(self._report, must_verify)
                    return self._report
                continue
            waited = perf_counter() - started
            progress = max(timeout_seconds, _PROGRESS_SECONDS)
            report = self._take(link, begin, progress, waited, before, must_verify=must_verify)
            if report is not None:
                return report

    # The connection.

    def _linked(self, deadline: float, is_over: Callable[[], bool]) -> Link:
        """Return a connection on which all is agreed, waiting for a publisher if need be."""
        while True:
            self._check_open()
            link = self._link
            if link is not None and not link.subscriber.is_lost and self._taker.is_current():
                return link
            self._drop()
            try:
                return self._connect(deadline, is_over)
            except (PeerLost, TransferTimeout) as error:
                is_late = monotonic() + _RETRY_SECONDS > deadline
                if is_late or is_over() or not self._is_open:
                    raise TransferTimeout(f"no publisher came in time: {error}") from error
                sleep(_RETRY_SECONDS)

    def _connect(self, deadline: float, is_over: Callable[[], bool]) -> Link:
        def is_ended() -> bool:
            return is_over() or not self._is_open

        subscriber = self._joining = Subscriber(
            self._address, self._token, self.name, deadline=deadline, is_over=is_ended
        )
        try:
            welcome = subscriber.welcomed(deadline, is_ended)
            tensors = {each.name: each.spec() for each in welcome.tensors}
            self._look()  # what is wanted from now on may be other tensors
            want = self._taker.want(tensors, welcome.tied)
            agreed = subscriber.agree(want, deadline, is_ended)
            transports = Transports(
                SharedMemoryTransport(fd_connection=subscriber.line),
                CudaIpcTransport(fd_connection=subscriber.line),
            )
            intake = Intake.of(agreed, list(tensors.values()), transports)
        except BaseException:
            subscriber.close("could not agree")
            raise
        finally:
            self._joining = None
        used = {welcome.tied.get(each.name, each.name) for each in want.tensors}
        unused = tuple(name for name in tensors if name not in used)
        self._link = Link(subscriber, intake, welcome.session, unused)
        return self._link

    def _drop(self) -> None:
        if self._link is not None:
            link, self._link = self._link, None
            link.close()

    def _begun(
        self, link: Link, ask: Ask, deadline: float, is_over: Callable[[], bool]
    ) -> Begin | None:
        """Ask, and return the beginning of the round that answers; None if what is held will do."""
        subscriber = link.subscriber
        subscriber.open_ask = ask.ask
        subscriber.send(ask)
        newer = "a version" if ask.have is None else f"a version after {ask.have}"
        what = newer if ask.version is None else f"version {ask.version}"
        try:
            while True:
                message = subscriber.next(deadline, what, is_over=is_over)
                match message:
                    case Begin(ask=number) if number == ask.ask:
                        return message
                    case Kept(ask=number) if number == ask.ask and ask.may_keep:
                        return None
                    case Denied(ask=number, kind=kind, text=text) if number == ask.ask:
                        raise error_named(kind, text)
                    case _:
                        continue  # the end of an earlier round
        except BaseException:
            subscriber.withdraw(ask.ask)
            raise

    # The round.

    def _take(
        self,
        link: Link,
        begin: Begin,
        timeout_seconds: float,
        waited: float,
        before: Callable[[int], None] | None,
        *,
        must_verify: bool,
    ) -> UpdateReport | None:
        """Take part in a round to its end; None if it was declined and is to be asked for anew."""
        started = perf_counter()
        spin_seconds = spin_of(self._taker.has_devices)
        feed = RoundFeed(
            link.subscriber,
            begin.round,
            timeout_seconds,
            spin_seconds,
            touch=self._touch,
            advance=self._advance,
        )
        try:
            if begin.version < 0:
                raise TransportError(f"version {begin.version} is less than 0")
            if must_verify and not begin.should_verify:
                raise unverified(begin.version, begin.origin)
            link.intake.open(begin)
            self._to_come = sum(link.intake.nbytes(copy) for copy in link.intake.copies)
            self._come = 0
            if before is not None:
                before(begin.version)
            feed.check_alive()  # whoever stood still for it may have taken long
            if not self._taker.is_current():
                replaced = VersionError(f"{_REPLACED} before version {begin.version} came")
                if before is not None:
                    raise replaced
                link.subscriber.send(Fault(begin.round, "VersionError", str(replaced), False))
                return None
            taken = self._taker.take(link.intake, begin, feed)
            link.subscriber.send(
                Done(begin.round, taken.digests, taken.copy_seconds, taken.verify_seconds)
            )
            self._taker.touched()
            self._await_commit(link, begin, taken, feed)
            if not self._taker.is_current():
                raise VersionError(f"{_REPLACED} while version {begin.version} came")
            self._taker.finish(begin.values)
        except HandleGone as error:
            reason = feed.abort() or error  # a publisher that gives up takes its memory with it
            self._fail(link, begin, reason)
            raise reason from error
        except BaseException as error:
            self._fail(link, begin, error)
            raise
        nbytes = self._to_come
        self._report = UpdateReport(
            begin.version,
            begin.parent,
            nbytes,
            perf_counter() - started,
            waited,
            taken.copy_seconds,
            taken.verify_seconds,
            begin.strategy,
            begin.origin,
            self._taker.verified if begin.should_verify else "nothing",
        )
        self._version, self._session = begin.version, link.session
        self._unused = link.unused
        self._state, self._failure = "ready", None
        last, self.last_version = self.last_version, begin.version
        if last is not None and begin.version < last:  # allowed: a trainer that started again
            emit("update.went_back", version=begin.version, before=last, name=self.name)
            _log.warning(
                "replica %s went back from version %d to %d", self.name, last, begin.version
            )
        emit(
            "update.done",
            version=begin.version,
            nbytes=nbytes,
            seconds=self._report.seconds,
            name=self.name,
        )
        return self._report

    def _touch(self) -> None:
        """From now on the old version is no longer whole."""
        self._state, self._version = "updating", None

    def _advance(self, nbytes: int) -> None:
        """So many more bytes have come."""
        self._come += nbytes  # by several threads: what is lost of it is only seen

    def _await_commit(self, link: Link, begin: Begin, taken: Taken, feed: RoundFeed) -> None:
        try:
            message = feed.message("a commit")
        except TransportError:
            # All bytes and their digests were here before the publisher went.
            is_gone = link.subscriber.is_lost and not feed.is_aborted
            if not is_gone or begin.digests is None or link.intake.bucket_numbers:
                raise
            message = Commit(begin.round, begin.digests)
        if not isinstance(message, Commit):
            raise TransportError(f"the publisher sent {type(message).__name__}, not a commit")
        if message.digests != taken.digests:
            raise DigestMismatch(
                f"{len(taken.digests)} digests of version {begin.version} are not those that were "
                f"committed"
            )

    def _fail(self, link: Link, begin: Begin, error: BaseException) -> None:
        """Tell the publisher, and remember what is left of the weights."""
        is_touched = self._state == "updating"
        if is_touched:
            self._taker.touched()
        link.subscriber.send(Fault(begin.round, type(error).__name__, str(error), is_touched))
        if is_touched:
            self._state = "failed"
            self._failure = (
                error
                if isinstance(error, FlyweightError)
                else TransportError(f"{type(error).__name__}: {error}")
            )
        if isinstance(error, FlyweightError):
            error.note(
                f"replica {self.name!r}, version {begin.version}: "
                + (
                    "the weights are not whole, take a whole update before serving"
                    if is_touched
                    else f"it still holds version {self.version}"
                )
            )
        emit("update.failed", version=begin.version, name=self.name, error=str(error))

    def close(self) -> None:
        """Leave the publisher and let go of all that was mapped. Safe to repeat."""
        if not self._is_open or self._pid != os.getpid():
            return
        self._is_open = False
        self.wake()
        link = self._link
        if link is not None:
            link.subscriber.close()  # whoever is in an update hears of it
        if self._updating.acquire(timeout=_CONNECT_SECONDS):  # what it copies must stay mapped
            self._drop()
            self._taker.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


_WEIGHTS: type[Weights] = Replica  # mypy checks the port
