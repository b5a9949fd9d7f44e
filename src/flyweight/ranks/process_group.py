"""The process groups of torch and Paddle, as a place where their ranks find each other.

Only a group's key-value store is used, with a deadline on every wait. No collective runs,
so a save can go on in the background of training, whatever the backend; nothing is pickled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from time import monotonic
from typing import Any

from flyweight.errors import PeerLost, SpecError, TransferTimeout
from flyweight.ranks.rendezvous import Rendezvous

_ANSWER_SECONDS = 1.0
_store_lock = threading.Lock()  # Paddle's client breaks if two threads use it at once


class _TorchStore:
    """A torch store, called in another thread: its clients hang if the host of it is stopped."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, text: str, deadline: float) -> None:
        self._call(lambda: self._store.set(key, text), deadline)

    def get(self, key: str, deadline: float) -> str | None:
        data = self._call(lambda: self._store.check([key]) and self._store.get(key), deadline)
        return bytes(data).decode() if data else None

    def _call(self, call: Callable[[], Any], deadline: float) -> Any:
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                with _store_lock:
                    answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="flyweight-store", daemon=True).start()
        # A live store has time to answer, however late it is.
        if not futures.wait([answer], max(deadline - monotonic(), _ANSWER_SECONDS)).done:
            raise TransferTimeout(
                "the process group's store, usually on rank 0, did not answer before the deadline"
            )
        try:
            return answer.result()
        except (RuntimeError, ValueError, OSError) as cause:  # what both frameworks raise
            raise PeerLost(f"the process group's store is gone: {cause}") from cause


class _PaddleStore(_TorchStore):
    """Paddle's store waits for ever for a missing key, so a counter tells whether it is there."""

    def set(self, key: str, text: str, deadline: float) -> None:
        self._call(lambda: (self._store.set(key, text), self._store.add(f"{key}#", 1)), deadline)

    def get(self, key: str, deadline: float) -> str | None:
        data = self._call(lambda: self._store.add(f"{key}#", 0) and self._store.get(key), deadline)
        return bytes(data).decode() if data else None


# A module that another thread is importing lacks names, and counts as not imported.


def _torch_distributed() -> Any:
    module: Any = sys.modules.get("torch.distributed")
    return module if hasattr(module, "is_initialized") and module.is_available() else None


def _paddle_distributed() -> Any:
    module = sys.modules.get("paddle.distributed")
    needed = ("communication", "get_group", "get_rank", "get_world_size", "is_initialized")
    return module if all(hasattr(module, name) for name in needed) else None


def default_group() -> object | None:
    """Return the process group that torch or Paddle initialised, or None."""
    group: object | None = None
    torch, paddle = _torch_distributed(), _paddle_distributed()
    if torch is not None and torch.is_initialized():
        group = torch.group.WORLD
    elif paddle is not None and paddle.is_initialized() and paddle.get_world_size() > 1:
        group = paddle.get_group(0)
    return group


def rendezvous_of(process_group: object = None) -> Rendezvous:
    """Return this process's rank in a torch or Paddle process group, and the group's store.

    Without a group, the default one if it was initialised; else this process is alone.
    """
    if process_group is None:
        process_group = default_group()
        if process_group is None:
            return Rendezvous()
    torch, paddle = _torch_distributed(), _paddle_distributed()
    group: Any = process_group
    if torch is not None and isinstance(group, torch.ProcessGroup):
        try:
            rank, num_ranks = torch.get_rank(group), torch.get_world_size(group)
            store = torch.distributed_c10d._get_default_store()
        except ValueError as cause:
            raise SpecError(
                f"process_group was destroyed, or never initialised: {cause}"
            ) from cause
        if rank < 0:
            raise SpecError("this process is not one of the ranks of process_group")
        return Rendezvous(
            rank, num_ranks, _TorchStore(store), f"flyweight/torch/{group.group_name}"
        )
    if paddle is not None and isinstance(group, paddle.communication.group.Group):
        if paddle.get_rank() not in group.ranks:
            raise SpecError("this process is not one of the ranks of process_group")
        if group.nranks == 1:
            return Rendezvous()
        core = sys.modules["paddle"].base.core
        paddle_store = _PaddleStore(core.create_or_get_global_tcp_store())
        return Rendezvous(group.rank, group.nranks, paddle_store, f"flyweight/paddle/{group.id}")
    raise SpecError(
        f"process_group is a {type(group).__name__}, expected a group of torch.distributed or "
        f"paddle.distributed"
    )
