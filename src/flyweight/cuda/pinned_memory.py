"""Host memory that the driver holds in place, so that devices copy it much faster."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from flyweight.cuda.driver import call, current_context
from flyweight.errors import TransportError
from flyweight.memory import Buffer

_PORTABLE = 1  # for the contexts of all devices


class _Pin:
    """Keeps the driver's hold on pages of the host until it is dropped."""

    def __init__(self, device: int, buffer: Buffer) -> None:
        self._device, self._buffer, self._is_held = device, buffer, False
        with current_context(device):
            call("cuMemHostRegister_v2", buffer.address, buffer.nbytes, _PORTABLE)
        self._is_held = True

    def __del__(self) -> None:
        if self._is_held:
            with suppress(Exception), current_context(self._device):  # the interpreter may end
                call("cuMemHostUnregister", self._buffer.address)


def pinned(device: int, buffer: Buffer) -> Buffer:
    """Return the same host memory, pinned while the result lives: devices copy it much faster.

    Memory that the driver refuses to pin, such as beyond the limit on locked memory, stays as is.
    """
    try:
        return msgspec.structs.replace(buffer, owner=_Pin(device, buffer))
    except TransportError:
        return buffer
