"""Ring: slots on a device, through which weights go whose own memory cannot be mapped.

The holder packs the rows of one bucket into a slot. The reader copies them into its model while the
holder packs the next bucket. A reader has the ring of its device to itself while its lease lasts,
so the ring takes the same memory for any number of readers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from flyweight.cuda import driver
from flyweight.digest import DigestKind, Words
from flyweight.errors import HandleGone, TransportError
from flyweight.live.buckets import NUM_SLOTS, SLOT_BYTES
from flyweight.live.messages import Confirmed, Pack
from flyweight.live.plan import Stream
from flyweight.live.reader import Reader, seconds_for_holder
from flyweight.live.rows import RowCopies, RowDigests
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable
from flyweight.transports.device_segments import DeviceSegment, export


class Ring:
    """The holder's side: memory of a device, allocated when it is first needed."""

    def __init__(self, device: int) -> None:
        self.device, self._memory = device, Buffer.flat_at(0, 0, None)
        self._segment: DeviceSegment | None = None
        self._packing = threading.Lock()
        self.reader: int | None = None
        """Who uses it, or was the last to use it."""

    def open(self) -> DeviceSegment:
        """Return its memory, once nothing is packed for the last reader any more."""
        with self._packing:
            if self._segment is None:
                memory = driver.allocate(self.device, NUM_SLOTS * SLOT_BYTES)
                try:
                    self._segment = export(self.device, memory.address, memory.nbytes, self)
                except BaseException:
                    driver.free(memory)
                    raise
                self._memory = memory
            return self._segment

    def pack(self, reader: int, copy: Callable[[], object]) -> None:
        """Fill a slot; raise HandleGone unless it is this reader's turn."""
        with self._packing:
            if self.reader != reader or self._segment is None:
                raise HandleGone("the ring of this device is another reader's by now")
            copy()

    def slot(self, number: int) -> Buffer:
        """Return the memory of a slot."""
        return slot_of(self._memory, number)

    def close(self) -> None:
        with self._packing, suppress(TransportError):  # a broken context frees it anyway
            if self._segment is not None:
                self._segment = None
                driver.free(self._memory)


def slot_of(memory: Buffer, number: int) -> Buffer:
    return Buffer.flat_at(
        memory.address + number * SLOT_BYTES, SLOT_BYTES, memory.owner, device=memory.device
    )


class RingCopies:
    """The reader's side: copies from the slots into the model, prepared once."""

    def __init__(
        self, stream: Stream, sink: BufferTable, memory: Buffer, digest: DigestKind
    ) -> None:
        if memory.nbytes != NUM_SLOTS * SLOT_BYTES:
            raise TransportError(
                f"the ring has {memory.nbytes} bytes, this reader expects "
                f"{NUM_SLOTS * SLOT_BYTES}; install the same version of flyweight"
            )
        self.memory = memory
        self._copies = [
            RowCopies(each.regions(sink), each.packed_at(slot_of(memory, n % NUM_SLOTS)))
            for n, each in enumerate(stream.buckets)
        ]
        self._digests = RowDigests(sink, digest)

    def run(
        self, source: Reader, kind: str, deadline: float, *, should_digest: bool
    ) -> Words | None:
        """Copy everything; return the digests of the rows, read from the model."""
        channel, asked = source.channel, deque[int]()
        buckets = iter(range(len(self._copies)))

        def ask(most: int) -> None:
            for bucket in islice(buckets, most):
                pack = Pack(kind, bucket, seconds_for_holder(deadline))
                asked.append(channel.ask(pack, deadline))

        ask(NUM_SLOTS - 1)
        running: Callable[[float], object] = lambda _: None  # noqa: E731
        for each in self._copies:
            channel.answer(asked.popleft(), Confirmed, deadline).close()
            started = each.start(should_digest=False)
            running(deadline)  # while this bucket is copied, the slot of the last one is free
            ask(1)
            running = started
        running(deadline)
        return self._digests.run(deadline)[0] if should_digest else None

    def close(self) -> None:
        for each in self._copies:
            each.close()
