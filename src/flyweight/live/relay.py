"""Relay: follows a publisher, and serves what it takes to the engines of its host.

It holds one copy of the whole model in shared memory, so each version crosses the network once per
host, and engines map it. It needs no framework: the publisher says which tensors there are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from time import monotonic

import numpy as np

from flyweight.adapters.tensor import Tensor
from flyweight.errors import FlyweightError, PeerLost, PeerRefused, PlanError, TransferTimeout
from flyweight.events import announce
from flyweight.live.curve_keys import CurveClient
from flyweight.live.line import opened_line
from flyweight.live.replica import Replica
from flyweight.live.replica_connection import ReplicaConnection
from flyweight.live.report import TIMEOUT_SECONDS
from flyweight.live.source import aligned_starts
from flyweight.live.tcp_address import parse_address
from flyweight.memory import Buffer, items_of
from flyweight.spec.box import Box
from flyweight.spec.manifest import TensorSpec
from flyweight.transports.shared_memory import SharedMemoryTransport

WITHDRAW_SECONDS = 10.0
"""How long a new version waits, at most, for engines that still read the last one."""
_RETRY_SECONDS = 0.1


class Relay:
    """Runs in one thread; `stop` ends it from another."""

    def __init__(
        self,
        address: str,
        on: str,
        *,
        token: str | None = None,
        curve: CurveClient | None = None,
        name: str | None = None,
    ) -> None:
        """Remember whom to follow and where to serve; `run` does so.

        address: the publisher's address.
        on: the address for engines, which connect to it as to a publisher.
        token: the publisher's token, which engines then need too.
        name: its name at the publisher; by default "relay" with the host and the process id.
        """
        self._place, self._address, self._on = parse_address(address), address, on
        parse_address(on)
        self._token, self._curve = token, curve
        self._name = f"relay {os.uname().nodename}:{os.getpid()}" if name is None else name
        self._stopped = threading.Event()
        self._replica: Replica | None = None

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopped.set()
        if (replica := self._replica) is not None:
            replica.wake()

    def run(self) -> None:
        """Follow and serve until `stop`, also if the publisher is restarted, with any tensors.

        Updates that fail are announced. Raises what cannot get better by waiting: PeerRefused for
        a wrong token, PlanError for tensors that this process cannot hold, and what keeps it from
        serving at its address.
        """
        last: object = None
        while (found := self._published()) is not None:
            try:
                self._relay(*found)
            except PlanError:  # the publisher was restarted with other tensors
                if found == last:
                    raise
            last = found

    def _published(self) -> tuple[dict[str, TensorSpec], dict[str, str]] | None:
        """Wait for a publisher; return its tensors and tied names, or None after `stop`."""
        is_over = self._stopped.is_set
        while not is_over():
            deadline = monotonic() + TIMEOUT_SECONDS
            try:
                line = opened_line(self._place, self._token, self._curve, deadline, is_over)
                connection = ReplicaConnection(line, self._name)
                try:
                    welcome = connection.welcomed(deadline, is_over)
                    return welcome.tensors.specs(), welcome.tied
                finally:
                    connection.disconnect("it has the names of the tensors, and connects again")
            except (PeerLost, TransferTimeout):  # there is none yet
                self._stopped.wait(_RETRY_SECONDS)
        return None

    def _relay(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> None:
        """Relay the versions of a model; raise PlanError if the publisher has another model."""
        memory = SharedMemoryTransport()
        try:
            target = _in_shared_memory(tensors, tied, memory)
            with Replica(
                target,
                self._address,
                name=self._name,
                token=self._token,
                curve=self._curve,
                serve_on=self._on,
                withdraw_seconds=WITHDRAW_SECONDS,
            ) as replica:
                self._replica = replica
                nbytes = sum(spec.nbytes for spec in tensors.values())
                found = {"address": replica.serves_at, "name": self._name}
                announce("relay.serving", **found, num_tensors=len(tensors), nbytes=nbytes)
                while not self._stopped.is_set():
                    self._update(replica)
        finally:
            self._replica = None
            memory.close()

    def _update(self, replica: Replica) -> None:
        try:
            replica.update(is_over=self._stopped.is_set)
        except (PlanError, PeerRefused):
            raise
        except FlyweightError as error:
            # A publisher that is gone may come back, and the next round may succeed.
            if not isinstance(error, TransferTimeout):
                self._stopped.wait(_RETRY_SECONDS)


def _in_shared_memory(
    tensors: Mapping[str, TensorSpec], tied: Mapping[str, str], memory: SharedMemoryTransport
) -> dict[str, Tensor]:
    """Return new tensors, one after the other in one segment; tied names are the same tensor."""
    nbytes = np.array([spec.nbytes for spec in tensors.values()], np.int64)
    starts = aligned_starts(nbytes)
    segment = memory.allocate(int((starts + nbytes).max(initial=0)))
    data = segment.items()
    found = {}
    for (name, spec), start in zip(tensors.items(), starts.tolist(), strict=True):
        shape = spec.stored(Box.whole(spec.shape)).shape
        items = items_of(data[start : start + spec.nbytes], spec.item_bytes, shape)
        address = items.__array_interface__["data"][0]
        where = Buffer(address, items.shape, items.strides, spec.item_bytes, segment)
        found[name] = Tensor(spec, where)
    return {**found, **{name: found[tied[name]] for name in tied}}
