"""Launches: work of kernels on one device, prepared once and queued in every round.

A round adds up one number for each row, which comes to the host behind the kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flyweight.cuda.driver import wait_until
from flyweight.errors import MissingDependency, SpecError
from flyweight.memory_table import HOST, BufferTable, Integers


def imported(module: str, what: str) -> Any:
    """Return a module that `what` needs, and whose package has its name."""
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        package, _, _ = module.partition(".")
        raise MissingDependency(f"{what} on a GPU need {package}; pip install {package}") from cause


class Launches:
    """Rounds over the same rows; memory for them is allocated once.

    Keeps the rows' memory alive. Needs torch and triton. For one thread at a time.
    """

    def __init__(self, tables: Sequence[BufferTable], what: str) -> None:
        """Allocate a number for each row.

        tables: where the rows lie, all on one device; there may be none.
        what: names the work in errors.
        """
        self._tables, self._what = tables, what
        devices = np.unique(np.concatenate([each.device for each in tables])).tolist()
        if devices and (len(devices) > 1 or devices[0] < 0):
            names = ["host" if each == HOST else each for each in devices]
            raise SpecError(f"blocks of devices {names}, all must be of one device")
        self._device: int | None = devices[0] if devices else None
        self._steps: list[Callable[[], object]] = []
        """What is queued in a round: copies of torch, and launches."""
        self._is_started = False
        if self._device is None:
            return
        self._torch = imported("torch", what)
        self._place, size, dtype = f"cuda:{self._device}", len(tables[0]), self._torch.int64
        with self._torch.cuda.device(self._device):
            self._sums = self._torch.zeros(size, dtype=dtype, device=self._place)
            self._host = self._torch.zeros(size, dtype=dtype, pin_memory=True)
            self._event = self._torch.cuda.Event()

    def _to_device(self, table: Integers) -> Any:
        return self._torch.from_numpy(table).to(self._place)

    def start(self) -> None:
        """Queue a round after earlier work on the device's default stream.

        The copies of a Copier count as such work. Does nothing if a round is queued already.
        """
        if self._device is None or self._is_started:
            return
        self._is_started = True
        with self._torch.cuda.stream(self._torch.cuda.default_stream(self._device)):
            self._sums.zero_()
            for step in self._steps:
                step()
            self._host.copy_(self._sums, non_blocking=True)
            self._event.record()

    def wait(self, timeout_seconds: float) -> Integers:
        """Return each row's number once the round is done; raise TransferTimeout.

        Starts a round if none was started.
        """
        if self._device is None:
            return np.zeros(0, np.int64)
        self.start()
        self._is_started = False
        what = f"{self._what} of {len(self._tables[0])} blocks on device {self._device}"
        wait_until(self._event.query, timeout_seconds, f"{what} were not done")
        found: Integers = self._host.numpy().copy()
        return found
