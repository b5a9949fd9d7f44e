"""Process groups of torch and Paddle, as far as their ranks must find each other.

Only the groups' key-value stores are used, with a deadline on every wait: no
collective runs, so a save may go on in the background of training, whatever the
backend, and no pickle is made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from flyweight.errors import PeerLost, SpecError, TransferTimeout
from flyweight.ports import Seat

_ANSWER_SECONDS = 1.0
_asking = threading.Lock()  # Paddle's client breaks if two threads use it at once


class _Bulletin:
    """A store, asked from another thread: if its host is stopped, its clients wait for ever."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def _ask(self, call: Callable[[], Any], deadline: float) -> Any:
        found: list[Any] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                with _asking:
                    found.append(call())
            except (RuntimeError, ValueError, OSError) as error:  # what both frameworks raise
                errors.append(error)

        thread = threading.Thread(target=work, name="flyweight-store", daemon=True)
        thread.start()
        deadline = max(deadline, monotonic() + _ANSWER_SECONDS)  # one that lives has time to answer
        while thread.is_alive() and monotonic() < deadline:
            thread.join(0.2)  # in slices: Ctrl-C is heard between them
        if errors:
            raise PeerLost(f"the process group's store is gone: {errors[0]}") from errors[0]
        if not found:
            raise TransferTimeout(
                "the process group's store, usually on rank 0, does not answer before the deadline"
            )
        return found[0]


class _TorchBulletin(_Bulletin):
    def post(self, key: str, text: str, deadline: float) -> None:
        self._ask(lambda: self._store.set(key, text), deadline)

    def look(self, key: str, deadline: float) -> str | None:
        data = self._ask(lambda: self._store.check([key]) and self._store.get(key), deadline)
        return bytes(data).decode() if data else None


class _PaddleBulletin(_Bulletin):
    """Paddle's store waits for ever for a key that is not there; a counter can be asked."""

    def post(self, key: str, text: str, deadline: float) -> None:
        self._ask(lambda: (self._store.set(key, text), self._store.add(f"{key}#", 1)), deadline)

    def look(self, key: str, deadline: float) -> str | None:
        data = self._ask(lambda: self._store.add(f"{key}#", 0) and self._store.get(key), deadline)
        return bytes(data).decode() if data else None


# While another thread imports one of them, it is not there.


def _torch_distributed() -> Any:
    module: Any = sys.modules.get("torch.distributed")
    return module if hasattr(module, "is_initialized") and module.is_available() else None


def _paddle_distributed() -> Any:
    module = sys.modules.get("paddle.distributed")
    needed = ("communication", "get_group", "get_rank", "get_world_size", "is_initialized")
    return module if all(hasattr(module, name) for name in needed) else None


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
        group: Any = process_group
        try:
            rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
            store = dist.distributed_c10d._get_default_store()
        except ValueError as cause:
            raise SpecError(
                f"process_group was destroyed, or never initialised: {cause}"
            ) from cause
        if rank < 0:
            raise SpecError("this process is not one of the ranks of process_group")
        return Seat(rank, num_ranks, _TorchBulletin(store), f"flyweight/torch/{group.group_name}")
    paddle = _paddle_distributed()
    if paddle is not None and isinstance(process_group, paddle.communication.group.Group):
        theirs: Any = process_group
        if paddle.get_rank() not in theirs.ranks:
            raise SpecError("this process is not one of the ranks of process_group")
        if theirs.nranks == 1:
            return Seat(0, 1)
        core = sys.modules["paddle"].base.core
        board = _PaddleBulletin(core.create_or_get_global_tcp_store())
        return Seat(theirs.rank, theirs.nranks, board, f"flyweight/paddle/{theirs.id}")
    raise SpecError(
        f"process_group is a {type(process_group).__name__}, expected a group of torch.distributed "
        f"or paddle.distributed"
    )
