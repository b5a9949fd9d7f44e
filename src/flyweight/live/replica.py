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
from flyweight.live.fallback import StoredIncoming, check_fits, sorted_out, stored_version
from flyweight.live.front_store import FrontStore, ranks_given
from flyweight.live.held_version import HeldVersion, ReplicaState
from flyweight.live.incoming import Incoming
from flyweight.live.link import Link
from flyweight.live.messages import Available, Current, Done, Result, Wait
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, seconds_for_holder
from flyweight.live.report import TIMEOUT_SECONDS, LiveReport
from flyweight.live.session import Session, TransportChoice, Ways
from flyweight.live.target import REPLACED, LoaderTarget, ModelTarget, target_of
from flyweight.ports import UpdateOptions, UpdateReport
from flyweight.ranks.agreement import Ranks
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.spec.model_layout import ModelLayout
from flyweight.transports.address import host_facing, parse_address
from flyweight.transports.tls import Tls
from flyweight.verbs.find import PathLike

COPY_SECONDS = 60.0
"""The copy has a budget of its own: nothing that came before it can use it up."""
_log = getLogger("flyweight.live")
_FIRST_SECONDS = 10.0
_RETRY_SECONDS, _LOOK_SECONDS = 0.05, 1.0

_Found = Current | tuple[Incoming | StoredIncoming, Available | None]
"""What is held is enough; or the version to take, and where it is if this rank has asked."""


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
        self._process = os.getpid()
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
        others, self._paths = sorted_out(fallback)
        if self._paths and isinstance(self._target, ModelTarget) and not self._target.is_loadable:
            raise SpecError("a fallback of files is for models and loaders; rows take none")
        me = Identity(
            self.name,
            self.rank,
            self.world_size,
            token or "",
            tls,
            is_remote=transport in ("read", "rdma"),
        )
        ways = Ways(transport=transport, staging_bytes=staging_bytes)
        self._link = Link(parse_address(address), me, ways, serve=serve, others=others)
        self._held = HeldVersion(self._is_current)
        self._ranks: Ranks | None = None
        self._store: FrontStore | None = None
        self._updating, self._thread = threading.Lock(), 0
        """Held by an update or a check, and its thread."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not by close, nor when the interpreter exits: another thread, or a hook, may ring it.
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._incoming: Incoming | StoredIncoming | None = None
        self.unused: tuple[str, ...] = ()
        """The tensors that the source of the last update has and the model lacks."""
        self.report: UpdateReport | None = None
        """The report of the last update that succeeded."""
        self.last_version: int | None = None
        """The version of the last update that succeeded, even if it was lost since."""
        self._is_open = True
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
        found = self._link.newest
        return None if found is None else found.version

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
    def is_connected(self) -> bool:
        """True while a publisher is connected and has accepted this replica."""
        return self._link.is_connected

    @property
    def serves_at(self) -> str | None:
        """Where other replicas fetch from this one's staging."""
        holder = self._link.holder
        return None if holder is None else str(holder.endpoint)

    @property
    def progress(self) -> float:
        """How much of the current or last update has been fetched, or loaded by a function."""
        return 0.0 if self._incoming is None else self._incoming.progress

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
            with self._link.hearing:
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
            session = self._link.session
            last = None if session is None or session.known is None else session.known[0]
            if last is None or last.version != wanted or not self._is_current():
                self._wait_connected(UpdateOptions(timeout_seconds=timeout), deadline)
                self._check_open()  # `close` ends waits of the session that it found
                session = self._link.session
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

    # One update, step by step.

    def _update(self, options: UpdateOptions) -> UpdateReport:
        asked = monotonic()
        deadline, looked, may_wait = asked + options.timeout_seconds, 0.0, not self._paths
        while True:
            found: _Found | None
            missing: list[str] = []
            with ExitStack() as files:
                try:
                    found = self._find(options, deadline, may_wait=may_wait)
                except (PeerLost, HandleGone, VersionError, _NotYet) as error:
                    found = None
                    if self._may_look(looked):
                        looked = monotonic()
                        found = self._find_files(options, files, missing)
                    if found is None and isinstance(error, _NotYet):
                        may_wait = True
                        continue
                    if found is None:
                        is_final = isinstance(error, VersionError) or self.world_size > 1
                        if is_final or not self._may_wait(options, deadline):
                            for each in missing:
                                error.note(f"and in files: {each}")
                            raise
                        continue  # another publisher may come
                if isinstance(found, Current):
                    assert self.report is not None
                    options.check_verified(self.report.version, self.report.verified)
                    if self.version is not None:
                        return self.report
                    if self.world_size > 1:
                        raise VersionError(f"{REPLACED} while an update waited; update again")
                    continue
                if (report := self._take(*found, options, asked)) is not None:
                    return report
                deadline = monotonic() + options.arrival_seconds  # there is a newer one already

    def _may_look(self, looked: float) -> bool:
        """True if there are files to look for a version in, and no rank was lost."""
        if self.world_size > 1:
            return bool(self._paths) and self._ranks is not None and self._ranks.is_met
        return bool(self._paths) and monotonic() > looked + _LOOK_SECONDS

    def _may_wait(self, options: UpdateOptions, deadline: float) -> bool:
        """Wait a moment, and return True if a publisher may still come in time."""
        if monotonic() + _RETRY_SECONDS > deadline or not self._is_open or options.is_over():
            return False
        threading.Event().wait(_RETRY_SECONDS)
        return True

    def _find(self, options: UpdateOptions, deadline: float, *, may_wait: bool) -> _Found:
        """Return the version that all ranks take; `Current` if the one that they hold is enough.

        Rank 0 waits for a version, and gets where it is; the others then ask for the same.
        may_wait: False raises _NotYet if the engine needs a version now and there is none.
        """
        session, have = self._join(options, deadline)
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
                self._tell_failure(Incoming(session, found[0].id), error)
            raise
        if not said[0]["is_there"]:
            raise _NotYet(f"{session.front.channel.peer} has no version yet")
        if said[0]["id"] is None:
            return Current()
        available = found[0] if found else None
        assert not isinstance(available, Current)
        return Incoming(session, msgspec.convert(said[0]["id"], PublishId)), available

    def _join(self, options: UpdateOptions, deadline: float) -> tuple[Session, PublishId | None]:
        """Return a session in which all ranks are, and the version if all of them hold the same."""
        self._all_ranks(deadline, options.is_over).renew()
        while True:
            said = self._all_ranks(deadline).step(
                "join the trainer",
                lambda: self._wait_connected(options, deadline),
                deadline,
                session=lambda: "" if self._link.session is None else self._link.session.id,
                held=lambda: msgspec.to_builtins(self._held.taken),
            )
            session = self._link.session
            assert session is not None
            if all(each["session"] == session.id for each in said):
                is_same = all(each["held"] == said[0]["held"] for each in said)
                return session, self._held.taken if is_same else None
            self._link.drop()  # the trainer was started again while the ranks connected
            if monotonic() > deadline:
                raise TransferTimeout("the ranks did not meet in one session of the trainer")

    def _all_ranks(self, deadline: float, is_over: Callable[[], bool] = lambda: False) -> Ranks:
        """Return the other ranks of the engine, which find each other at the publisher."""
        if self._ranks is None:
            found, link = self._rendezvous, self._link
            group = f"{found.group}/engine {self.name}"  # others use the process group too
            if self.world_size > 1 and found.store is None:
                self._store = self._store or FrontStore(link.address, link.me)
                self._store.token(deadline, is_over)
                found = replace(found, store=self._store)
            host = host_facing(link.address)
            self._ranks = Ranks(replace(found, group=group, token=link.me.token, host=host))
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
        self._held.forget_if_moved()
        is_current = self._held.taken is not None or self._target.is_current()
        if self._link.connect(self._target, deadline, is_current=is_current):
            assert self._link.session is not None
            target = self._link.session.target
            assert isinstance(target, (ModelTarget, LoaderTarget))
            self._target = target

    def _wait(
        self, session: Session, wait: Wait, options: UpdateOptions, deadline: float
    ) -> Available | Current:
        ranks = self._all_ranks(deadline)

        def is_over() -> bool:
            ranks.look()
            return options.is_over()

        return session.front.wait(wait, deadline, self._bell, is_over, *ranks.files)

    def _find_files(
        self, options: UpdateOptions, files: ExitStack, missing: list[str]
    ) -> _Found | None:
        """Return the version in the paths to fall back to; None if none of them has one.

        files: closes what was opened. missing: gets the reasons.
        """
        deadline, found = monotonic() + options.arrival_seconds, list[StoredIncoming]()

        def look() -> None:
            self._held.forget_if_moved()
            held = self._held.taken
            each = stored_version(self._paths, options, held, files, missing)
            if each is not None:
                if each.id != held:
                    check_fits(each, self._target)
                    options.check_verified(each.id.version, each.verified)
                found.append(StoredIncoming(each, self._target))

        said = self._all_ranks(deadline).step(
            "look for files",
            look,
            deadline,
            id=lambda: msgspec.to_builtins(found[0].id) if found else None,
            is_held=lambda: bool(found) and found[0].id == self._held.taken,
        )
        if not found or any(each["id"] != said[0]["id"] for each in said):
            return None
        if not all(each["is_held"] for each in said):
            return found[0], None
        is_enough = options.may_keep or options.version is not None
        return Current() if is_enough and self.report is not None else None

    def _take(
        self,
        incoming: Incoming | StoredIncoming,
        available: Available | None,
        options: UpdateOptions,
        asked: float,
    ) -> UpdateReport | None:
        """Bring a version here and commit it; return None if a newer one is there already."""
        started, self._incoming = monotonic(), incoming
        deadline = started + options.arrival_seconds
        try:
            if isinstance(incoming, StoredIncoming):
                self._adopt_tensors()
            elif not self._fetch(incoming, available, options, deadline):
                incoming.close()
                return None
            return self._write(incoming, options, (asked, started), deadline)
        except BaseException as error:
            if self.state == ReplicaState.UPDATING and isinstance(self._target, ModelTarget):
                self._target.touched()
            self._fail(incoming, error, monotonic() - started)
            raise

    def _adopt_tensors(self) -> None:
        """Have files fill the tensors that the model has now."""
        if isinstance(self._target, ModelTarget) and not self._target.is_current():
            self._link.drop()  # it knows tensors that were replaced
            self._target.look()

    def _fail(
        self, incoming: Incoming | StoredIncoming, error: BaseException, seconds: float
    ) -> None:
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
        version = incoming.id.version
        failure.note(f"replica {self.name!r}, version {version}: {outcome}")
        announce("update.failed", version=version, name=self.name, error=str(failure))
        incoming.close()
        self._tell_failure(incoming, failure, seconds, is_touched=is_touched)

    def _tell_failure(
        self,
        incoming: Incoming | StoredIncoming,
        error: FlyweightError,
        seconds: float = 0.0,
        *,
        is_touched: bool = False,
    ) -> None:
        text = f"{type(error).__name__}: {error}"
        result = Result(self.name, os.getpid(), seconds=seconds, error=text, is_touched=is_touched)
        incoming.tell(Done(incoming.id, result))

    def _fetch(
        self,
        incoming: Incoming,
        available: Available | None,
        options: UpdateOptions,
        deadline: float,
    ) -> bool:
        """Bring the version here; return False if a newer one is there for one of the ranks.

        available: where it is; None if this rank has to ask first.
        """
        is_here = False

        def fetch() -> None:
            nonlocal is_here
            found: Available | Current | None = available
            if found is None:
                wait = Wait(incoming.id, None, None, False, seconds_for_holder(deadline))
                with suppress(VersionError):  # it cannot come any more
                    found = self._wait(incoming.session, wait, options, deadline)
            if found is not None:
                assert isinstance(found, Available)
                is_here = incoming.open(found, deadline)
            if is_here:
                options.check_verified(incoming.id.version, incoming.verified)

        said = self._all_ranks(deadline).step("fetch", fetch, deadline, is_here=lambda: is_here)
        return all(each["is_here"] for each in said)

    def _write(
        self,
        incoming: Incoming | StoredIncoming,
        options: UpdateOptions,
        begun: tuple[float, float],
        deadline: float,
    ) -> UpdateReport:
        """Pause, overwrite the model, and commit: the only way to do so."""
        target, ranks, paused = self._target, self._all_ranks(deadline), list[float]()
        fetched = monotonic()

        def pause() -> None:
            if options.before is not None:
                options.before(incoming.id.version)
            paused.append(monotonic())
            if isinstance(target, ModelTarget):
                if not target.devices:  # else while they copy
                    target.check_current()
                target.synchronize(max(deadline - monotonic(), 0.001))
            check()

        def check() -> None:
            if not self._is_open:
                raise TransportError(f"replica {self.name!r} is closed")
            incoming.check_time(deadline)

        def while_copying() -> None:
            if isinstance(target, ModelTarget) and target.devices:
                target.check_current()

        ranks.step("pause", pause, deadline)
        if self.world_size > 1:  # ranks that paused at once have waited for the last one
            ranks.step("begin", check, deadline)
        self._held.begin_write()
        # A loader may take long.
        end = monotonic() + max(COPY_SECONDS, options.arrival_seconds) + incoming.read_seconds
        ranks.step("write", lambda: incoming.copy(end, while_copying), end)
        self._held.commit(incoming.id)
        if self._held.taken is None:
            raise VersionError(f"{incoming.id} was written, and then forgotten: {self.failure}")
        (asked, started), ended = begun, monotonic()
        report = UpdateReport(
            version=incoming.id.version,
            parent=incoming.about.parent,
            nbytes=incoming.nbytes,
            seconds=ended - started,
            wait_seconds=started - asked,
            fetch_seconds=fetched - started,
            drain_seconds=paused[0] - fetched,
            copy_seconds=ended - paused[0],
            verify_seconds=incoming.verify_seconds,
            transport=incoming.transport,
            verified=incoming.verified,
            overflows=incoming.overflows,
        )
        incoming.close()
        incoming.tell(Done(incoming.id, Result.of(self.name, os.getpid(), report)))
        return self._done(report, incoming.unused)

    def _done(self, report: UpdateReport, unused: tuple[str, ...]) -> UpdateReport:
        """Remember and announce what was committed."""
        self.unused = unused
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

    def close(self) -> None:
        """Leave; readers that still fetch from here go to the next holder of their list.

        An update under way ends with an error. Safe to repeat.
        """
        if not self._is_open or os.getpid() != self._process:
            return
        self._is_open = False
        if self._updating.locked():
            if self._link.session is not None:
                self._link.session.front.channel.shut()
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
            for each in (self._ranks, self._store):
                if each is not None:
                    each.close()
            self._link.close(f"replica {self.name!r} was closed")
        finally:
            self._updating.release()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _NotYet(TransferTimeout):
    """The publisher has no version yet, and files may have one."""
