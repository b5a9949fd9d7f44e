"""The model that a publisher reads: its tensors, what is offered of them, and the held copy.

A trainer's model may replace its tensors between two publishes. `refresh` detects that and
offers the new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import numpy as np

from flyweight.adapters.identity import Identity
from flyweight.adapters.model import Model, adapt
from flyweight.adapters.tree import reshard
from flyweight.copies import Copiers
from flyweight.cuda import driver
from flyweight.digest import DigestKind, Words
from flyweight.errors import DigestMismatch, PlanError, TransferTimeout, listed
from flyweight.formats.stored import Stored
from flyweight.live.lanes import Offers, Transports
from flyweight.live.source import HeldCopy, PublishedSource, Regions, Share
from flyweight.memory import Buffer, collector_paused
from flyweight.spec.manifest import Leaf

DigestKey = tuple[Share, DigestKind]
"""What is digested: the regions that a share reads, and how."""


@dataclass(eq=False)
class PublishedVersion:
    """A version, and the source that it is read from."""

    version: int
    parent: int | None
    source: PublishedSource
    offers: Offers
    origin: str
    values: Mapping[str, Leaf]
    digests: dict[DigestKey, bytes] | None = None
    """The digests known so far, if the source never changes: replicas get them with `Begin`."""
    whole_digests: Words | None = None
    """The digests of whole blocks, of the kind that is fastest, if they are known."""
    digest_seconds: float = 0.0
    """The time spent on checking that nothing changed while the version was copied."""
    is_replaced: bool = False
    """True once another version is about to overwrite its memory."""
    is_shared: bool = False
    """True if the other ranks of the publisher have their parts of it."""
    _digesting: threading.Lock = field(default_factory=threading.Lock)
    """Held while digests are computed that are kept: several rounds may want the same ones."""

    def digests_of(self, wanted: Sequence[DigestKey], deadline: float) -> Mapping[DigestKey, bytes]:
        """Return the digests of what replicas read, with those known before if they are kept."""
        found: dict[DigestKey, bytes] = {} if self.digests is None else self.digests
        if not self._digesting.acquire(timeout=max(deadline - monotonic(), 0)):
            raise TransferTimeout(f"the digests of version {self.version} were not there in time")
        try:
            for share, kind in wanted:
                if (share, kind) not in found:
                    found[share, kind] = self._digests(share.regions, kind, deadline).tobytes()
        finally:
            self._digesting.release()
        return found

    def _digests(self, regions: Regions, kind: DigestKind, deadline: float) -> Words:
        source, whole = self.source, self.whole_digests
        if whole is not None and kind == source.fast_digest_kind:
            is_whole = (regions.shape == source.boxes.shape[regions.block]).all(axis=1)
            if is_whole.all():
                return whole[regions.block]
        return source.digests(regions, kind, deadline)


class PublishedModel:
    """A model in memory, or an opened snapshot, with the copy that is held of it."""

    def __init__(self, thing: object) -> None:
        """Read the names and shapes of a model's tensors; `open` offers them."""
        self.stored = thing if isinstance(thing, Stored) else None
        self.thing, self.copiers = thing, Copiers()
        with collector_paused():
            self.source = PublishedSource.of(self.stored or self._adapted(), self.copiers)
            self._identity = None if self.stored else Identity(thing)
        self._held: tuple[HeldCopy, Offers] | None = None

    def _adapted(self) -> Model:
        return adapt(self.thing, may_be_empty=True)  # one of several ranks may hold nothing

    def open(self, transports: Transports, num_dims: int = 1) -> None:
        """Offer memory from now on; `num_dims` is the least number of dims of the tables."""
        self._transports, self._num_dims = transports, num_dims
        if self.source.boxes.num_dims < num_dims:
            source = self.source.source
            self.source = PublishedSource.of(source, self.copiers, num_dims)
        self.offers = Offers(self.source, transports)

    def refresh(self) -> bool:
        """Look at the model's tensors; return True if they are others, which are offered then."""
        reshard(self.thing)  # a forward may have put whole tensors in the place of shards
        if self._identity is not None and self._identity.is_same():
            return False
        with collector_paused():
            identity = Identity(self.thing)
            source = PublishedSource.of(self._adapted(), self.copiers, self._num_dims)
        if not source.has_same_blocks(self.source):
            before, now = self.source.tensors.items(), source.tensors.items()
            names = {name for name, _ in before ^ now}
            which = f": {listed(names)}" if names else ""
            raise PlanError(
                f"the model has other tensors than when its publisher was made{which}; make a new "
                f"publisher, on every rank if there are several"
            )
        self._identity = identity
        if source.has_same_memory(self.source):
            self.source.manifest = source.manifest
            return False
        offers = Offers(source, self._transports)
        self.offers.close()
        self.source, self.offers = source, offers
        if self._held is not None:
            self._held[0].copy_from(source)
        return True

    def synchronize(self, deadline: float) -> None:
        """Wait for work on any stream of a device that still writes the weights."""
        for device in self.source.devices:
            driver.synchronize(device, max(deadline - monotonic(), 0.001))

    def live(self, version: int, parent: int | None, *, stays: bool = False) -> PublishedVersion:
        """Return the model's own memory as a version; its digests are kept if it stays."""
        found = PublishedVersion(
            version, parent, self.source, self.offers, "published", self.source.manifest.values
        )
        found.is_shared, found.digests = True, {} if stays else None
        return found

    def snapshot(self, version: int | None, *, hold: bool, deadline: float) -> PublishedVersion:
        """Return an opened snapshot as a version: read from its files, or copied to memory."""
        assert self.stored is not None
        manifest = self.stored.manifest
        number = manifest.version if version is None else version
        number = 0 if number is None else number
        if not hold:
            return PublishedVersion(
                number, manifest.parent, self.source, self.offers, "snapshot", manifest.values
            )
        held, offers = self._held_copy()
        held.refill(deadline)
        return PublishedVersion(
            number, manifest.parent, held.source, offers, "held", manifest.values, {}
        )

    def hold(
        self,
        version: int,
        parent: int | None,
        *,
        should_verify: bool,
        deadline: float,
        before_copy: Callable[[], None],
    ) -> PublishedVersion:
        """Copy the model to shared memory, and return the copy as a version.

        `before_copy` must return only when nobody reads the last copy any more. With
        `should_verify`, DigestMismatch is raised if the model changes meanwhile.
        """
        started, source = perf_counter(), self.source
        kind = source.fast_digest_kind
        before = source.digests(source.whole_blocks, kind, deadline) if should_verify else None
        digest_seconds = perf_counter() - started
        before_copy()
        held, offers = self._held_copy()
        held.refill(deadline)
        started = perf_counter()
        after = before
        if before is not None:
            # On a device the model is digested once more: to digest the copy would take longer.
            again = held.source if source.is_on_host else source
            after = again.digests(again.whole_blocks, kind, deadline)
            self._check_unchanged(before, after, version)
        return PublishedVersion(
            version,
            parent,
            held.source,
            offers,
            "held",
            source.manifest.values,
            {},
            after if source.is_on_host else None,
            digest_seconds + perf_counter() - started,
        )

    def _check_unchanged(self, before: Words, after: Words, version: int) -> None:
        changed = np.flatnonzero(before != after).tolist()
        if changed:
            names = sorted({self.source.name_of(block) for block in changed})
            raise DigestMismatch(
                f"{len(names)} tensors changed while version {version} was copied: "
                f"{listed(names)}; a trainer steps after publish, or after wait_copied"
            )

    def _held_copy(self) -> tuple[HeldCopy, Offers]:
        if self._held is None:
            held = HeldCopy(self.source, self._transports.host)
            self._held = held, Offers(held.source, self._transports)
        return self._held

    @property
    def held_memory(self) -> Buffer:
        """All memory of the held copy."""
        return self._held_copy()[0].memory

    def close(self) -> None:
        """Release all offers, and the memory of the held copy."""
        self.offers.close()
        if self._held is not None:
            self._held[1].close()
        self._held = None
