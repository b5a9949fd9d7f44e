"""Process groups of torch and Paddle, as far as their ranks must find each other.

Only the groups' key-value stores are used, with a deadline on every wait: no
collective runs, so a save may go on in the background of training, whatever the
backend, and no pickle is made.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from flyweight.errors import PeerLost, SpecError
from flyweight.ports import Seat

_meetings: Counter[str] = Counter()


class _TorchBulletin:
    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as cause:
            raise PeerLost(f"the process group's store is gone: {cause}") from cause

    def look(self, key: str, timeout_seconds: float) -> str | None:
        try:
            self._store.wait([key], timedelta(seconds=timeout_seconds))
            return bytes(self._store.get(key)).decode()
        except RuntimeError as cause:
            # torch tells a timeout from a lost store by the class of the error only since 2.3.
            if type(cause).__name__ == "DistNetworkError":
                raise PeerLost(f"the process group's store is gone: {cause}") from cause
            return None


class _PaddleBulletin:
    """Paddle's store waits for ever for a key that is not there; a counter can be asked."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, key: str, text: str) -> None:
        self._ask(lambda: (self._store.set(key, text), self._store.add(f"{key}#", 1)))

    def look(self, key: str, timeout_seconds: float) -> str | None:
        deadline = monotonic() + timeout_seconds
        while not self._ask(lambda: self._store.add(f"{key}#", 0)):
            if monotonic() > deadline:
                return None
            sleep(0.01)
        return bytes(self._ask(lambda: self._store.get(key))).decode()

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RuntimeError, ValueError) as cause:
            raise PeerLost(f"the process group's store is gone: {cause}") from cause


def _torch_distributed() -> Any:
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def _paddle_distributed() -> Any:
    return sys.modules.get("paddle.distributed")


def default_seat() -> Seat:
    """Return this process's place in the group that was initialised, or alone if none was."""
    dist = _torch_distributed()
    if dist is not None and dist.is_initialized():
        return seat_of(dist.group.WORLD)
    paddle = _paddle_distributed()
    if paddle is not None and paddle.is_initialized() and paddle.get_world_size() > 1:
        return seat_of(paddle.get_group(0))
    return Seat(0, 1)


def seat_of(process_group: object) -> Seat:
    """Return this process's place in a torch or Paddle process group."""
    dist = _torch_distributed()
    if dist is not None and isinstance(process_group, dist.ProcessGroup):
        rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        name = "-".join(map(str, dist.get_process_group_ranks(process_group)))
        store = dist.distributed_c10d._get_default_store()
        return Seat(rank, num_ranks, _TorchBulletin(store), _meeting(f"torch/{name}"))
    paddle = _paddle_distributed()
    if paddle is not None and isinstance(process_group, paddle.communication.group.Group):
        group: Any = process_group
        if group.nranks == 1:
            return Seat(0, 1)
        core = sys.modules["paddle"].base.core
        board = _PaddleBulletin(core.create_or_get_global_tcp_store())
        name = "-".join(map(str, group.ranks))
        return Seat(group.rank, group.nranks, board, _meeting(f"paddle/{name}"))
    raise SpecError(
        f"process_group is a {type(process_group).__name__}, expected a group of torch.distributed "
        f"or paddle.distributed"
    )


def _meeting(group: str) -> str:
    """Return a name for the next meeting of a group: all its ranks count alike."""
    _meetings[group] += 1
    return f"flyweight/{group}/{_meetings[group]}"
