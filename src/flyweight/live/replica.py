"""Replica: the engine's side. It finds a version, leases it, copies, verifies and commits.

Everything that can fail without harm comes before the first write: the network, the lease, and the
digests of what was fetched. So an engine on another host pauses for one local copy.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from logging import getLogger
from time import monotonic

import msgspec

from flyweight.adapters.loader import Framework
from flyweight.checks import check_seconds, check_text, check_version
from flyweight.errors import (
    FlyweightError,
    HandleGone,
    LifecycleError,
    PeerLost,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.events import announce
from flyweight.live.check_live import announced, compared
from flyweight.live.fallback import (
    StoredVersion,
    check_fits,
    load_stored,
    sorted_out,
    stored_version,
)
from flyweight.live.front_store import FrontStore, ranks_given
from flyweight.live.held_version import HeldVersion, ReplicaState
from flyweight.live.holder import Holder
from flyweight.live.incoming import Incoming
from flyweight.live.messages import Available, Current, Done, NotYet, Superseded, Wait
from flyweight.live.offer import About
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, seconds_for_holder
from flyweight.live.report import TIMEOUT_SECONDS, LiveReport
from flyweight.live.session import Receiver, Session, TransportChoice, Ways, serving_place
from flyweight.live.shelf import Shelf
from flyweight.live.target import REPLACED, LoaderTarget, ModelTarget, target_of
from flyweight.live.tracker import Result
from flyweight.ports import UpdateOptions, UpdateReport
from flyweight.ranks.agreement import Ranks
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.spec.model_layout import ModelLayout
from flyweight.transports.address import host_facing, parse_address
from flyweight.transports.tls import Tls
from flyweight.verbs.find import PathLike
from flyweight.verbs.load import LoadReport

COPY_SECONDS = 60.0
"""The copy has a budget of its own: nothing that came before it can use it up."""
_log = getLogger("flyweight.live")
_FIRST_SECONDS = 10.0
_RETRY_SECONDS, _LOOK_SECONDS = 0.05, 1.0
_SLOW_BYTES = 64 << 20
"""Other ranks wait for files as long as reading so many bytes in a second takes."""


class Replica:
    """A model, or an engine's loader, that takes versions from a publisher."""

    def __init__(
        self,
        target: object,
        address: str,
        *,
        name: str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        transport: TransportChoice = "auto",
        staging_bytes: int | None = None,
        serve: str | bool = True,
        fallback: Sequence[PathLike] = (),
        layout: ModelLayout | None = None,
        layout_rank: int | None = None,
        strict: bool = True,
        cast: bool = False,
        framework: Framework = "torch",
        device: str = "cpu",
        process_group: object = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Connect to the publisher at an address, now or once there is one.

        target: a model or a dict of tensors, which are written in place; or a function that takes
            an iterator of (name, whole tensor), in the publisher's order.
        address: the publisher's address, `unix:DIRECTORY` or `tcp://HOST:PORT`.
        name: the name in reports and events; by default the host and the process id.
        token: the publisher's token; at a `unix:` address it may be in a file next to its sockets.
        tls: certificates, if the publisher encrypts what goes to other hosts.
        transport: how bytes come. 'mapped' maps the trainer's memory; 'filled' has the trainer
            write into shared memory of this host; 'read' uses sockets; 'auto' takes the first of
            them that is possible, and 'rdma' instead of 'read' where both hosts have NIXL and an
            RDMA device. NIXL does not encrypt, so that needs a connection without `tls`.
        staging_bytes: the most memory for what comes before `before` is called; by default half of
            what is free. A version that is not mapped must fit. Tensors of a function on the host
            are made then as far as they fit, and the rest of them while it loads.
        serve: whether other replicas of this kind may fetch from this one's staging, or where:
            'tcp://HOST:PORT'. It has no effect where memory is mapped.
        fallback: addresses of relays and of other replicas, and paths of snapshots and checkpoints,
            which are tried in this order while no publisher answers. Files are also looked at if
            the publisher does not have the version that is asked for, or none for an empty model.
        layout: how the model's tensors are cut over ranks.
        layout_rank: which rank of the layout this is; by default `rank`.
        strict: refuse a trainer that has tensors which the model lacks; else they are in `unused`.
        cast: whether float32, bfloat16 and float16 tensors may be cast on their way.
        framework, device: what tensors are made for a function.
        process_group: the ranks of the engine, as a process group of torch or Paddle.
        rank, world_size: which of how many ranks of the engine this is, without a process group.
            All of them make a replica with the same `name`: none overwrites its weights before all
            are ready, and none holds a new version before all do.
        """
        check_text("token", token, is_secret=True)
        if transport == "rdma" and tls is not None:
            raise SpecError(
                "transport='rdma' with tls=: NIXL does not encrypt; take one or the other"
            )
        self._address, self._process = parse_address(address), os.getpid()
        if rank is not None and world_size is None and layout is None:
            raise SpecError(f"rank is {rank!r} of how many? give world_size=, or a layout=")
        own = rank if world_size is not None else None  # else it is only of the layout
        self._rendezvous = ranks_given(process_group, own, world_size) or Rendezvous()
        self.rank, self.world_size = self._rendezvous.rank, self._rendezvous.num_ranks
        if name is None and self.world_size > 1:
            raise SpecError("the ranks of an engine need one name: name=")
        self.name = f"{os.uname().nodename}:{os.getpid()}" if name is None else name
        check_text("name", self.name)
        cut = next(each for each in (layout_rank, rank, self.rank) if each is not None)
        self._target = target_of(
            target, layout, cut, strict=strict, cast=cast, framework=framework, device=device
        )
        self._ways = Ways(transport=transport, staging_bytes=staging_bytes)
        self._me = Identity(
            self.name,
            self.rank,
            self.world_size,
            token or "",
            tls,
            is_remote=transport in ("read", "rdma"),
        )
        self._held = HeldVersion(self._is_current)
        self._shelf = Shelf()
        self._serve = serve
        self._others, self._paths = sorted_out(fallback)
        if self._paths and isinstance(self._target, ModelTarget) and not self._target.is_loadable:
            raise SpecError("a fallback of files is for models and loaders; rows take none")
        self._holder: Holder | None = None
        self._session: Session | None = None
        self._ranks: Ranks | None = None
        self._store: FrontStore | None = None
        self._updating, self._thread = threading.Lock(), 0
        self._hearing = threading.Lock()
        """Held by the thread that takes what the publisher sends: an update, or who only looks."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not by close, nor when the interpreter exits: another thread, or a hook, may ring it.
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._incoming: Incoming | None = None
        self._progress = 0.0
        """How much of the last update from files is done."""
        self._unused: tuple[str, ...] = ()
        self.report: UpdateReport | None = None
        """The report of the last update that succeeded."""
        self.last_version: int | None = None
        """The version of the last update that succeeded, even if it was lost since."""
        self._is_open, self._is_first = True, True
        if isinstance(self._target, ModelTarget):
            self._target.check()
        try:
            with suppress(PeerLost, HandleGone, TransferTimeout):  # the publisher may start later
                if self.world_size == 1:
                    self._connect(monotonic() + _FIRST_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        """The complete version that the model holds.

        None before the first update, after one that failed, and once the tensors that held the
        version were replaced or have moved.
        """
        return None if self._held.id is None else self._held.id.version

    @property
    def newest(self) -> int | None:
        """The newest version that the publisher has announced; None if it has none."""
        session = self._session
        if session is None or not self.is_connected or session.front.newest is None:
            return None
        return session.front.newest.version

    @property
    def state(self) -> ReplicaState:
        return self._held.state

    @property
    def failure(self) -> FlyweightError | None:
        """Why the model holds no complete version; None if it holds one or never did."""
        return self._held.failure

    @property
    def num_ranks(self) -> int:
        """How many ranks take each version together."""
        return self.world_size

    @property
    def session(self) -> str:
        """An id of the publisher that the version came from; a restarted one has another."""
        return "" if self._held.id is None else self._held.id.session

    @property
    def unused(self) -> tuple[str, ...]:
        """The tensors that the source of the last update has and the model lacks."""
        return self._unused

    @property
    def is_connected(self) -> bool:
        """True while a publisher is connected and has accepted this replica."""
        session = self._session
        if session is None:
            return False
        if not self._hearing.acquire(blocking=False):
            return not session.has_failed
        try:
            return session.is_alive
        finally:
            self._hearing.release()

    @property
    def serves_at(self) -> str | None:
        """Where other replicas fetch from this one's staging."""
        return None if self._holder is None else str(self._holder.endpoint)

    @property
    def progress(self) -> float:
        """How much of the current or last update has been fetched, or loaded by a function."""
        incoming = self._incoming
        if incoming is None:
            return self._progress
        return incoming.progress

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
        verify: bool = False,
    ) -> UpdateReport:
        """Update the model to a version, and return a report; wait for the version if necessary.

        All ranks of an engine call this together.

        version: the version to take; by default the next one that the model does not hold.
        timeout_seconds: the time to wait for the version, and as long again until everything is
            here and `before` has returned. The copy has a time of its own: to give up then costs
            the old version.
        before: called with the version when everything is here, before the first write. From then
            on the engine must not use the weights. If it raises, the old version stays.
        is_over: ends the wait for a version if it returns True when `wake` is called.
        may_keep: the version that the model holds is enough if it is the newest.
        verify: refuse a version that has no digests, before the first write.

        If the model already holds the version, or with `may_keep` the newest, the last report is
        returned, after the publisher has confirmed it.

        Raises TransferTimeout if no version comes, VersionError if the version cannot come any
        more, and PeerLost if nobody has it. An error after the first write leaves the replica in
        the state FAILED.
        """
        return self.take(
            UpdateOptions(
                version=None if version is None else check_version(version),
                timeout_seconds=check_seconds("timeout_seconds", timeout_seconds),
                before=before,
                is_over=is_over,
                may_keep=may_keep,
                verify=verify,
            )
        )

    def take(self, options: UpdateOptions) -> UpdateReport:
        """Do as `update`, which explains the options."""
        if options.version is not None:  # then no other one is enough
            options = replace(options, may_keep=False)
        with self._alone():
            return self._update(options)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread update or check this replica meanwhile."""
        self._check_open()
        if not self._updating.acquire(blocking=False):
            raise TransportError(f"an update or a check of replica {self.name!r} is under way")
        try:
            self._thread = threading.get_ident()
            with self._hearing:
                yield
        finally:
            self._thread = 0
            self._updating.release()
            if not self._is_open:
                self._free()

    def check_live(
        self, version: int | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> LiveReport:
        """Compare the memory, as it is now, with a version of the publisher, by digests.

        No weight is copied and nothing changes. It works for a model, and for a `Loader` that has
        `rows`. Each rank of an engine checks its own part, alone.

        version: by default the newest. The one that was taken last is compared with the digests
            that came with it, so the publisher may have withdrawn it since.
        timeout_seconds: the time to wait for the version, and for all else.

        Raises VersionError if the version cannot come any more, is withdrawn, or has no digests,
        TransferTimeout if it does not come in time, and PeerLost if nobody has it.
        """
        timeout = check_seconds("timeout_seconds", timeout_seconds)
        wanted = None if version is None else check_version(version)
        deadline = monotonic() + timeout
        with self._alone():
            session = self._session
            last = None if session is None or session.known is None else session.known[0]
            if last is None or last.version != wanted or not self._is_current():
                self._wait_connected(UpdateOptions(timeout_seconds=timeout), deadline)
                self._check_open()  # `close` ends waits of the session that it found
                session = self._session
                assert session is not None
                last = announced(session.front, wanted, deadline)
            assert session is not None
            return compared(session, last, deadline)

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
                # Nobody published; or an update failed, which the caller must know.
                is_failed = self.state == ReplicaState.FAILED
                if timeout_seconds is not None or is_failed or not self._is_open:
                    raise

    def wake(self) -> None:
        """Make an update that waits for a version call its `is_over`."""
        os.eventfd_write(self._bell, 1)

    def forget(self, reason: str) -> None:
        """Hold no version: the weights' memory was freed, or others wrote to it."""
        self._held.forget(reason)

    def _is_current(self) -> bool:
        """True while the tensors are those that the last session was made for."""
        return self._target.is_current()

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise TransportError(
                f"replica {self.name!r} belongs to process {self._process}; a child makes its own"
            )
        if not self._is_open:
            raise TransportError(f"replica {self.name!r} is closed")

    def _update(self, options: UpdateOptions) -> UpdateReport:
        deadline, asked = monotonic() + options.timeout_seconds, monotonic()
        looked, missing, may_wait = -_LOOK_SECONDS, list[str](), not self._paths
        while True:
            try:
                session, have = self._join(options, deadline)
                found = self._find(session, have, options, deadline, may_wait=may_wait)
            except (PeerLost, HandleGone, VersionError, _NotYet) as error:
                if self._may_look() and (
                    self.world_size > 1 or monotonic() > looked + _LOOK_SECONDS
                ):
                    looked, missing = monotonic(), []
                    if (report := self._from_files(options, asked, missing)) is not None:
                        return report
                if isinstance(error, _NotYet):
                    may_wait = True
                    continue
                is_final = isinstance(error, VersionError) or self.world_size > 1
                if is_final or not self._may_wait(options, deadline):
                    for each in missing:
                        error.note(f"and in files: {each}")
                    raise  # else another publisher may come
                continue
            if found is None:
                assert self.report is not None
                options.check_verified(self.report.version, self.report.verified)
                if self.version is not None:
                    return self.report
                if self.world_size > 1:
                    raise VersionError(f"{REPLACED} while an update waited; update again")
                continue
            incoming, started = Incoming(session, found[0]), monotonic()
            self._incoming, deadline = incoming, started + options.arrival_seconds
            try:
                here = self._fetch(incoming, found[1], options, deadline)
                if here is not None:
                    return self._write(incoming, here, options, (asked, started), deadline)
            except BaseException as error:
                seconds = monotonic() - started
                is_touched = self._held.state == ReplicaState.UPDATING
                if is_touched and isinstance(self._target, ModelTarget):
                    self._target.touched()
                failure = self._fail(incoming.id.version, error)
                incoming.close()
                text = f"{type(failure).__name__}: {failure}"
                result = Result(
                    self.name, os.getpid(), 0, seconds, error=text, is_touched=is_touched
                )
                session.tell(Done(incoming.id, result))
                raise
            incoming.close()  # there is a newer one already

    def _may_look(self) -> bool:
        """True if there are files to look for a version in, and no rank was lost."""
        is_whole = self._ranks is not None and self._ranks.is_met
        return bool(self._paths) and (self.world_size == 1 or is_whole)

    def _may_wait(self, options: UpdateOptions, deadline: float) -> bool:
        """Wait a moment, and return True if a publisher may still come in time."""
        if monotonic() + _RETRY_SECONDS > deadline or not self._is_open or options.is_over():
            return False
        threading.Event().wait(_RETRY_SECONDS)
        return True

    def _fail(self, version: int, error: BaseException) -> FlyweightError:
        """End an update by an error: the old version stays, unless it was touched."""
        is_touched = self._held.state == ReplicaState.UPDATING
        failure = (
            error
            if isinstance(error, FlyweightError)
            else LifecycleError(f"the update was interrupted: {error!r}")
        )
        self._held.fail(failure)
        outcome = f"it still holds version {self.version}"
        if is_touched:
            outcome = "the weights are not whole, update again before serving"
        failure.note(f"replica {self.name!r}, version {version}: {outcome}")
        announce("update.failed", version=version, name=self.name, error=str(failure))
        return failure

    def _join(self, options: UpdateOptions, deadline: float) -> tuple[Session, PublishId | None]:
        """Return a session in which all ranks are, and the version if all of them hold the same."""
        self._all_ranks(deadline, options.is_over).renew()
        while True:
            said = self._all_ranks(deadline).step(
                "join the trainer",
                lambda: self._wait_connected(options, deadline),
                deadline,
                session=lambda: "" if self._session is None else self._session.id,
                held=lambda: msgspec.to_builtins(self._held.taken),
            )
            assert self._session is not None
            if all(each["session"] == self._session.id for each in said):
                is_same = all(each["held"] == said[0]["held"] for each in said)
                return self._session, self._held.taken if is_same else None
            self._session.close()  # the trainer was started again while the ranks connected
            self._session = None
            if monotonic() > deadline:
                raise TransferTimeout("the ranks did not meet in one session of the trainer")

    def _all_ranks(self, deadline: float, is_over: Callable[[], bool] = lambda: False) -> Ranks:
        """Return the other ranks of the engine, which find each other at the publisher."""
        if self._ranks is None:
            found = self._rendezvous
            group = f"{found.group}/engine {self.name}"  # others use the process group too
            if self.world_size > 1 and found.store is None:
                self._store = self._store or FrontStore(self._address, self._me)
                self._store.token(deadline, is_over)
                found = replace(found, store=self._store)
            host = host_facing(self._address)
            self._ranks = Ranks(replace(found, group=group, token=self._me.token, host=host))
        return self._ranks

    def _wait_connected(self, options: UpdateOptions, deadline: float) -> None:
        """Connect, once there is a publisher; with files to fall back to, try only once."""
        while True:
            try:
                self._connect(deadline)
                return
            except PeerLost:
                if self._paths or not self._may_wait(options, deadline):
                    raise

    def _connect(self, deadline: float) -> None:
        """Build a session unless the last one is alive, and swap it in once it is complete."""
        last, addresses = self._session, [self._address, *self._others]
        self._held.forget_if_moved()
        is_current = self._held.taken is not None or self._target.is_current()
        if last is not None and last.is_alive and is_current:
            if self._is_first or not self._others:
                return
            # Look whether the publisher is there again, and else go on with the fallback.
            deadline = monotonic() + (deadline - monotonic()) / 2
            with suppress(PeerLost, TransferTimeout):
                receiver = self._receiver()
                new = Session.open(addresses[:1], receiver, deadline, connect_seconds=_LOOK_SECONDS)
                self._swap(new, is_first=True)
            return
        new = Session.open(addresses, self._receiver(), deadline)
        self._swap(new, is_first=new.front.endpoint == self._address.endpoint)

    def _receiver(self) -> Receiver:
        """Return what a session needs of this replica, which serves others from now on."""
        me = self._me
        place = serving_place(self._address, serve=self._serve)
        if self._holder is None and place is not None:
            self._holder = Holder(self._shelf, me.token, remote=place, tls=me.tls)
        if self._holder is not None:
            me = replace(me, serves_at=self._holder.endpoint)
        return Receiver(me, self._target, self._ways, self._shelf)

    def _swap(self, new: Session, *, is_first: bool) -> None:
        if self._session is not None:
            self._session.close()
        assert isinstance(new.target, (ModelTarget, LoaderTarget))
        self._session, self._target, self._is_first = new, new.target, is_first
        if self._holder is not None:
            self._holder.start(new.holding)

    def _find(
        self,
        session: Session,
        have: PublishId | None,
        options: UpdateOptions,
        deadline: float,
        *,
        may_wait: bool,
    ) -> tuple[PublishId, Available | None] | None:
        """Return the version that all ranks take; None if the one that they hold is enough.

        Rank 0 waits for a version, and gets where it is; the others then ask for the same.
        may_wait: False raises _NotYet if the engine needs a version now and there is none.
        """
        found: list[Available | Current] = []
        is_needed = have is None or options.version is not None or options.may_keep
        is_brief = is_needed and not may_wait

        def find() -> None:
            if self.rank == 0:
                seconds = 0.0 if is_brief else seconds_for_holder(deadline)
                wait = Wait(None, options.version, have, options.may_keep, seconds)
                try:
                    found.append(self._wait(session, wait, options, deadline))
                except TransferTimeout:
                    if not is_brief:
                        raise

        try:
            said = self._all_ranks(deadline).step(
                "find a version",
                find,
                deadline,
                id=lambda: msgspec.to_builtins(getattr(found[0], "id", None)) if found else None,
                is_there=lambda: bool(found),
            )
        except FlyweightError as error:
            if found and isinstance(found[0], Available):  # the trainer waits for this engine
                text = f"{type(error).__name__}: {error}"
                session.tell(Done(found[0].id, Result(self.name, os.getpid(), error=text)))
            raise
        if not said[0]["is_there"]:
            raise _NotYet(f"{session.front.channel.peer} has no version yet")
        if said[0]["id"] is None:
            return None
        available = found[0] if found else None
        assert not isinstance(available, Current)
        return msgspec.convert(said[0]["id"], PublishId), available

    def _wait(
        self,
        session: Session,
        wait: Wait,
        options: UpdateOptions,
        deadline: float,
    ) -> Available | Current:
        ranks, peer = self._all_ranks(deadline), session.front.channel.peer

        def is_over() -> bool:
            ranks.look()
            return options.is_over()

        found = session.front.wait(wait, deadline, self._bell, is_over, *ranks.files)
        is_enough = wait.may_keep or (wait.have is not None and wait.have.version == wait.version)
        match found:
            case Available():
                return found
            case Current() if is_enough and self.report is not None:
                return found
            case Superseded():
                wanted = wait.id or f"version {wait.version}"
                raise VersionError(
                    f"{wanted} cannot come any more: {peer} has {found.newest}; update without a "
                    f"version, or to that one"
                )
            case Current():
                why = f"{wait.have} is the newest at {peer}"
            case NotYet():
                why = f"{peer} had no version"
        raise TransferTimeout(
            f"{why}, and no other came in time for replica {self.name!r}; publish one, or give "
            f"update a longer timeout_seconds"
        )

    def _fetch(
        self,
        incoming: Incoming,
        available: Available | None,
        options: UpdateOptions,
        deadline: float,
    ) -> Available | None:
        """Bring the version here; return None if a newer one is there for one of the ranks.

        available: where it is; None if this rank has to ask first.
        """
        is_here = False

        def fetch() -> None:
            nonlocal is_here, available
            if available is None:
                wait = Wait(incoming.id, None, None, False, seconds_for_holder(deadline))
                try:
                    found = self._wait(incoming.session, wait, options, deadline)
                except VersionError:  # it cannot come any more
                    return
                assert isinstance(found, Available)
                available = found
            is_here = incoming.open(available.holders, deadline)
            if is_here:
                about = About(available.parent, available.values)
                incoming.session.announce(incoming.id, about)
            if is_here and not incoming.is_verified:
                options.check_verified(incoming.id.version, "nothing")

        said = self._all_ranks(deadline).step("fetch", fetch, deadline, is_here=lambda: is_here)
        return available if all(each["is_here"] for each in said) else None

    def _write(
        self,
        incoming: Incoming,
        available: Available,
        options: UpdateOptions,
        begun: tuple[float, float],
        deadline: float,
    ) -> UpdateReport:
        target, ranks = self._target, self._all_ranks(deadline)
        fetched = monotonic()
        paused: list[float] = []

        def pause() -> None:
            if options.before is not None:
                options.before(incoming.id.version)
            paused.append(monotonic())
            if isinstance(target, ModelTarget):
                if not target.devices:
                    target.check_current()
                target.synchronize(max(deadline - monotonic(), 0.001))
            check()

        def check() -> None:
            if not self._is_open:
                raise TransportError(f"replica {self.name!r} is closed")
            incoming.check_time(deadline)

        ranks.step("pause", pause, deadline)
        if self.world_size > 1:  # ranks that paused at once have waited for the last one
            ranks.step("begin", check, deadline)
        self._held.begin_write()
        end = monotonic() + max(COPY_SECONDS, options.arrival_seconds)  # a loader may take long

        def write() -> None:
            incoming.copy(end, self._while_copying)
            if isinstance(target, ModelTarget):
                target.finish(available.values)

        ranks.step("write", write, end)
        self._held.commit(incoming.id)
        if self._held.taken is None:
            raise VersionError(f"{incoming.id} was written, and then forgotten: {self.failure}")
        asked, started = begun
        ended = monotonic()
        if isinstance(target, ModelTarget):
            target.touched()
        report = UpdateReport(
            incoming.id.version,
            available.parent,
            incoming.session.plan.nbytes,
            ended - started,
            started - asked,
            fetched - started,
            paused[0] - fetched,
            ended - paused[0],
            incoming.verify_seconds,
            incoming.transport,
            target.verified if incoming.is_verified else "nothing",
            incoming.overflows,
        )
        incoming.close()
        result = Result(
            self.name,
            os.getpid(),
            report.nbytes,
            report.seconds,
            report.wait_seconds,
            report.fetch_seconds,
            report.drain_seconds,
            report.copy_seconds,
            report.verify_seconds,
            report.transport,
            report.overflows,
        )
        incoming.session.tell(Done(incoming.id, result))
        return self._done(report, target.unused)

    def _done(self, report: UpdateReport, unused: tuple[str, ...]) -> UpdateReport:
        """Remember and announce what was committed."""
        self._unused = unused
        last, self.last_version, self.report = self.last_version, report.version, report
        if last is not None and report.version < last:  # a trainer that was restarted may do so
            announce("update.went_back", version=report.version, before=last, name=self.name)
            _log.warning("%s went back from version %d to %d", self.name, last, report.version)
        announce(
            "update.done",
            name=self.name,
            version=report.version,
            nbytes=report.nbytes,
            seconds=report.seconds,
        )
        return report

    def _from_files(
        self, options: UpdateOptions, asked: float, missing: list[str]
    ) -> UpdateReport | None:
        """Load a version from the paths to fall back to; None if none of them has one.

        missing: gets the reasons.
        """
        started = monotonic()
        deadline = started + options.arrival_seconds
        ranks, found = self._all_ranks(deadline), list[StoredVersion]()

        def look() -> None:
            self._held.forget_if_moved()
            held = self._held.taken
            each = stored_version(self._paths, options, held, files, missing)
            if each is not None:
                if each.id != held:
                    check_fits(each, self._target)
                    options.check_verified(each.id.version, each.verified)
                found.append(each)

        with ExitStack() as files:
            said = ranks.step(
                "look for files",
                look,
                deadline,
                id=lambda: msgspec.to_builtins(found[0].id) if found else None,
                is_held=lambda: bool(found) and found[0].id == self._held.taken,
            )
            if not found or any(each["id"] != said[0]["id"] for each in said):
                return None
            if all(each["is_held"] for each in said):
                if self.report is None or not (options.may_keep or options.version is not None):
                    return None
                options.check_verified(self.report.version, self.report.verified)
                return self.report
            try:
                return self._load(found[0], options, (asked, started), deadline)
            except BaseException as error:
                self._fail(found[0].id.version, error)
                raise

    def _load(
        self,
        found: StoredVersion,
        options: UpdateOptions,
        begun: tuple[float, float],
        deadline: float,
    ) -> UpdateReport:
        ranks, target, number = self._all_ranks(deadline), self._target, found.id.version
        looked, paused = monotonic(), list[float]()
        if isinstance(target, ModelTarget) and not target.is_current():
            if self._session is not None:  # it knows tensors that were replaced
                self._session.close()
                self._session = None
            target.look()

        def pause() -> None:
            if options.before is not None:
                options.before(number)
            paused.append(monotonic())
            if isinstance(target, ModelTarget):
                target.check_current()
            check()

        def check() -> None:
            if not self._is_open:
                raise TransportError(f"replica {self.name!r} is closed")

        ranks.step("pause", pause, deadline)
        if self.world_size > 1:
            ranks.step("begin", check, deadline)
        self._held.begin_write()
        self._incoming, self._progress = None, 0.0
        reports: list[LoadReport] = []

        def show(done: float) -> None:
            self._progress = done

        end = monotonic() + COPY_SECONDS + found.stored.manifest.nbytes / _SLOW_BYTES
        ranks.step("write", lambda: reports.append(load_stored(found, target, show)), end)
        self._held.commit(found.id)
        if self._held.taken is None:
            raise VersionError(f"{found.id} was loaded, and then forgotten: {self.failure}")
        (asked, started), ended = begun, monotonic()
        report = UpdateReport(
            number,
            found.stored.manifest.parent,
            reports[0].nbytes,
            ended - started,
            started - asked,
            looked - started,
            paused[0] - looked,
            ended - paused[0],
            0.0,
            "files",
            found.verified,
        )
        return self._done(report, tuple(reports[0].unused))

    def _while_copying(self) -> None:
        target = self._target
        if isinstance(target, ModelTarget) and target.devices:
            target.check_current()

    def close(self) -> None:
        """Leave; readers that still fetch from here go to the next holder of their list.

        An update under way ends with an error. Safe to repeat.
        """
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        if self._updating.locked():
            if self._session is not None:
                self._session.front.channel.shut()
            if self._ranks is not None:
                self._ranks.close()
            if self._store is not None:
                self._store.leave()
        if self._thread != threading.get_ident():
            self._free()

    def _free(self) -> None:
        if not self._updating.acquire(timeout=_FIRST_SECONDS):  # an update still uses the memory
            return
        try:
            if self._session is not None:
                self._session.close()
            if self._ranks is not None:
                self._ranks.close()
            if self._store is not None:
                self._store.close()
            if self._holder is not None:
                self._holder.close(f"replica {self.name!r} was closed")
        finally:
            self._updating.release()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _NotYet(TransferTimeout):
    """The publisher has no version yet, and files may have one."""
