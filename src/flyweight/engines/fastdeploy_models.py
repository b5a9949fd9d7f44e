"""FastDeploy's models as one: their tensors by name, and their own `load_weights`.

A model with a `load_weights` is called once with all its tensors; a model without one is filled
by name. Several models load in lockstep: the first in the caller's thread, each other one in a
thread that runs only while the caller waits for it, so that only one tensor is in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from flyweight.adapters import paddle_layer
from flyweight.adapters.identity import Identity
from flyweight.adapters.tree import state_of
from flyweight.errors import (
    DTypeMismatch,
    LifecycleError,
    PlanError,
    ShapeMismatch,
    SpecError,
    listed,
)
from flyweight.lifecycle.engine_steps import named

NamedTensors = Iterator[tuple[str, Any]]
Hand = Callable[[tuple[str, Any] | None], None]
_CANCEL_SECONDS = 10.0


class Models:
    """Paddle layers as one model: `state` is filled by name, or `load` hands over named tensors."""

    def __init__(
        self, models: object, process: Callable[[Any], None], *, may_load: bool = True
    ) -> None:
        """Take one layer, a list of layers, or a dict whose keys prefix the names of its layers.

        `process` runs on each model that has loaded by itself, which happens if `may_load`.
        """
        if isinstance(models, Mapping):
            self._layers = [(f"{name}.", layer) for name, layer in models.items()]
        else:
            layers = models if isinstance(models, Sequence) else [models]
            self._layers = [("", layer) for layer in layers]
        self._process = process
        self.state: dict[str, Any] = self._found()
        """The tensors to fill, by name."""
        self.has_loaders = may_load and any(_has_loader(layer) for layer in self.layers)
        self.has_loaded = False
        """True once a loader was called, until the next update begins."""
        self.unmatched: list[str] = []
        """Tensors of the last `load` that belong to none of the models."""
        self._identity: Identity | None = None
        self._memory: list[object] = []

    @property
    def layers(self) -> list[Any]:
        return [layer for _, layer in self._layers]

    def _found(self) -> dict[str, Any]:
        """Return the tensors that the layers have at this moment."""
        state: dict[str, Any] = {}
        clashing = []
        for prefix, layer in self._layers:
            found = state_of(layer) if paddle_layer.is_module(layer) else None
            if found is None:
                raise SpecError(f"models has a {type(layer).__name__}, expected Paddle layers")
            for name, tensor in found.items():
                if state.setdefault(f"{prefix}{name}", tensor) is not tensor:
                    clashing.append(name)
        if clashing:
            raise SpecError(
                f"{len(clashing)} names are in several models: {listed(clashing)}; pass a dict "
                f"of models, its keys become prefixes of their names"
            )
        if not state:
            raise SpecError("models have no parameters")
        return state

    def are_unchanged(self) -> bool:
        """True if the layers still have the tensors of `state`, in the memory that was held."""
        found = self._found()
        is_same = found.keys() == self.state.keys() and all(
            found[name] is tensor for name, tensor in self.state.items()
        )
        return is_same and (self._identity is None or self._identity.is_same())

    def refresh(self) -> None:
        """Make `state` what the layers have now; in place, because a source fills this dict."""
        found = self._found()
        self.state.clear()
        self.state.update(found)

    def give_memory(self) -> int:
        """Allocate memory for tensors that have none, and return how many. It is not initialised.

        FastDeploy makes models under `paddle.LazyGuard`, and other code may have cleared tensors.
        """
        return sum(paddle_layer.give_memory([tensor]) for tensor in self.state.values())

    def hold(self) -> None:
        """Remember the tensors and keep their memory, so that no other tensor gets its address."""
        self._identity = Identity(self.state)
        self._memory = [paddle_layer.memory_of(each) for each in self.state.values()]

    def let_go(self) -> None:
        """Keep no memory: a loader that replaces parameters must be able to free the old ones."""
        self._identity, self._memory = None, []

    def load(self, tensors: NamedTensors) -> None:
        """Hand each model the tensors that are named for it, and process them.

        A model must take them all. What it cannot process fails the update on all ranks.
        """
        self.has_loaded, self.unmatched = True, []
        self.let_go()
        (prefix, first), *others = self._layers
        with ExitStack() as stack:
            hands = [(other, stack.enter_context(_loading(layer))) for other, layer in others]
            _load_into(first, self._of_first(tensors, prefix, hands))
            for _, hand in hands:
                hand(None)
        self._process_loaded()

    def _of_first(
        self, tensors: NamedTensors, prefix: str, others: Sequence[tuple[str, Hand]]
    ) -> NamedTensors:
        """Yield the first model's tensors, after the other models have taken theirs."""
        for name, tensor in tensors:
            is_first = name.startswith(prefix)
            wanting = [each for each in others if name.startswith(each[0])]
            if not is_first and not wanting:
                self.unmatched.append(name)
            for other, hand in wanting:
                # A model may keep its tensor or change it, so no two models get the same one.
                own = tensor.clone() if is_first or len(wanting) > 1 else tensor
                hand((name.removeprefix(other), own))
            if is_first:
                yield name.removeprefix(prefix), tensor

    def _process_loaded(self) -> None:
        """Process what the models have loaded, and hold the parameters that they have then."""
        with sys.modules["paddle"].no_grad():
            for layer in filter(_has_loader, self.layers):
                named("process_weights_after_loading", partial(self._process, layer))
        self.refresh()
        self.hold()


def _has_loader(layer: Any) -> bool:
    return callable(getattr(layer, "load_weights", None))


def _load_into(layer: Any, tensors: NamedTensors) -> None:
    with sys.modules["paddle"].no_grad():
        if _has_loader(layer):
            named("load_weights", lambda: layer.load_weights(tensors))
        else:
            _fill(layer, tensors)
    if left := next(tensors, None):
        kind = type(layer).__name__
        raise LifecycleError(f"load_weights of {kind} returned before it took {left[0]!r}")


def _fill(layer: Any, tensors: NamedTensors) -> None:
    """Fill a model without `load_weights`: every tensor of it, by name."""
    state: Any = state_of(layer)
    missing = set(state)
    for name, tensor in tensors:
        target = state.get(name)
        if target is None:
            continue
        if tensor.dtype != target.dtype:
            raise DTypeMismatch(f"{name!r} is {tensor.dtype}, in the model {target.dtype}")
        if tensor.shape != target.shape:
            shapes = tuple(tensor.shape), tuple(target.shape)
            raise ShapeMismatch(f"{name!r} is {shapes[0]}, in the model {shapes[1]}")
        target.copy_(tensor, True)
        missing.discard(name)
    if missing:
        raise PlanError(f"no tensors came for {len(missing)} parameters: {listed(missing)}")


@contextmanager
def _loading(layer: Any) -> Iterator[Hand]:
    """Load one more model in a thread, which never runs at the same time as the caller's.

    Yields a function that hands over a tensor, or None at the end. It returns once the model asks
    for the next tensor or has returned from its load, and raises what the model raised.
    """
    given, asked = SimpleQueue[tuple[str, Any] | LifecycleError | None](), Semaphore(0)
    device, errors = sys.modules["paddle"].get_device(), list[BaseException]()
    is_over = False

    def items() -> NamedTensors:
        while True:
            asked.release()
            item = given.get()
            if isinstance(item, LifecycleError):
                raise item
            if item is None:
                return
            yield item

    def run() -> None:
        nonlocal is_over
        try:
            if device != "cpu":  # Paddle's current device is per thread
                sys.modules["paddle"].set_device(device)
            _load_into(layer, items())
        except BaseException as error:
            errors.append(error)
        finally:
            is_over = True
            asked.release()

    def hand(item: tuple[str, Any] | None) -> None:
        if not is_over:
            given.put(item)
            asked.acquire()
        if errors:
            raise errors[0]

    thread = Thread(target=run, name="flyweight-load", daemon=True)
    thread.start()
    asked.acquire()
    try:
        yield hand
    finally:
        if not is_over:
            given.put(LifecycleError("another model failed to load, so this load is cancelled"))
            thread.join(_CANCEL_SECONDS)
