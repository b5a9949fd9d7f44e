"""FastDeploy's models as one: their tensors by name, and their own `load_weights`.

A model with a `load_weights` is called once with all its tensors; a model without one is filled
by name. Several models load in lockstep: the first in the caller's thread, each other one in a
thread that runs only while the caller waits for it, so that only one tensor is in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from flyweight.adapters import paddle_layer
from flyweight.adapters.identity import Identity
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
            found = paddle_layer.state_of(layer)
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
        """Hand each model the tensors that are named for it; it must take them all."""
        self.has_loaded, self.unmatched = True, []
        self.let_go()
        (prefix, first), *others = self._layers
        branches = [_Branch(*other) for other in others]
        try:
            _load_into(first, self._of_first(tensors, prefix, branches))
            for branch in branches:
                branch.hand(None)
        finally:
            for branch in branches:
                branch.cancel()

    def _of_first(
        self, tensors: NamedTensors, prefix: str, branches: Sequence[_Branch]
    ) -> NamedTensors:
        """Yield the first model's tensors, after the other models have taken theirs."""
        for name, tensor in tensors:
            is_first = name.startswith(prefix)
            wanting = [each for each in branches if name.startswith(each.prefix)]
            if not is_first and not wanting:
                self.unmatched.append(name)
            for branch in wanting:
                # A model may keep its tensor or change it, so no two models get the same one.
                own = tensor.clone() if is_first or len(wanting) > 1 else tensor
                branch.hand((name.removeprefix(branch.prefix), own))
            if is_first:
                yield name.removeprefix(prefix), tensor

    def process(self) -> None:
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
    state: Any = paddle_layer.state_of(layer)
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


class _Branch:
    """The load of one more model. Its thread and the caller's never run at the same time."""

    def __init__(self, prefix: str, layer: Any) -> None:
        """Start the load, and return once the model asks for its first tensor."""
        self.prefix = prefix
        self._given: SimpleQueue[tuple[str, Any] | LifecycleError | None] = SimpleQueue()
        self._asked = Semaphore(0)
        self._error: BaseException | None = None
        self._is_over = False
        args = (layer, sys.modules["paddle"].get_device())
        self._thread = Thread(target=self._run, args=args, name="flyweight-load", daemon=True)
        self._thread.start()
        self._asked.acquire()

    def hand(self, item: tuple[str, Any] | None) -> None:
        """Hand over a tensor, or None at the end; raise what the model raises.

        Returns once the model asks for the next tensor, or has returned from its load.
        """
        if not self._is_over:
            self._given.put(item)
            self._asked.acquire()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Make the load fail if it still waits for tensors."""
        if not self._is_over:
            self._given.put(LifecycleError("another model failed, so this load is cancelled"))
            self._thread.join(_CANCEL_SECONDS)

    def _run(self, layer: Any, device: str) -> None:
        try:
            if device != "cpu":  # Paddle's current device is per thread
                sys.modules["paddle"].set_device(device)
            _load_into(layer, self._items())
        except BaseException as error:
            self._error = error
        finally:
            self._is_over = True
            self._asked.release()

    def _items(self) -> NamedTensors:
        while True:
            self._asked.release()
            item = self._given.get()
            if isinstance(item, LifecycleError):
                raise item
            if item is None:
                return
            yield item
