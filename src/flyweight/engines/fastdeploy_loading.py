"""FastDeploy's models load weights by themselves: named tensors go to each model's `load_weights`.

A model that has none is filled by name. Of several models each gets one call with all tensors, in
a thread of its own; only one of these threads runs at a time, so that one tensor is in memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flyweight.adapters import paddle_layer
from flyweight.errors import DTypeMismatch, LifecycleError, PlanError, ShapeMismatch, listed
from flyweight.lifecycle.engine_steps import named

Weights = Iterator[tuple[str, Any]]
Load = Callable[[Weights], object]
_END_SECONDS = 10.0


class ModelLoading:
    """The loaders of an engine's models, as one function that takes named tensors."""

    def __init__(self, layers: Sequence[tuple[str, Any]], process: Callable[[Any], None]) -> None:
        """Load into `layers`, each with what goes before its names; `process` one afterwards."""
        self._layers, self._process = layers, process
        self.is_begun = False
        """Whether tensors were handed to a model since the last update began."""
        self.unmatched: list[str] = []
        """Tensors that are named for none of the models."""
        self.on_begin: Callable[[], None] = lambda: None

    @staticmethod
    def is_wanted(layers: Sequence[tuple[str, Any]]) -> bool:
        """True if a model has a loader of its own."""
        return any(_has_loader(layer) for _, layer in layers)

    def load(self, weights: Weights) -> None:
        """Hand all tensors to all models; each must take those that are named for it."""
        self.is_begun, self.unmatched = True, []
        self.on_begin()
        (first, layer), *others = self._layers
        branches = [_Branch(prefix, partial(_into, layer)) for prefix, layer in others]
        try:
            _into(layer, self._passing(weights, first, branches))
            for branch in branches:
                branch.end()
        finally:
            for branch in branches:
                branch.cancel()

    def _passing(self, weights: Weights, first: str, branches: Sequence[_Branch]) -> Weights:
        """Yield the first model's tensors, after the other models were handed theirs."""
        for name, tensor in weights:
            is_first, wanting = name.startswith(first), [b for b in branches if b.wants(name)]
            if not is_first and not wanting:
                self.unmatched.append(name)
            for branch in wanting:
                # One that keeps or changes its tensor must not change another's.
                branch.hand(name, tensor.clone() if is_first or len(wanting) > 1 else tensor)
            if is_first:
                yield name.removeprefix(first), tensor

    def process(self) -> None:
        """Run the models' processing of what they have loaded; it may replace parameters."""
        with sys.modules["paddle"].no_grad():
            for _, layer in self._layers:
                if _has_loader(layer):
                    named("process_weights_after_loading", partial(self._process, layer))


def _has_loader(layer: Any) -> bool:
    return callable(getattr(layer, "load_weights", None))


def _into(layer: Any, weights: Weights) -> None:
    with sys.modules["paddle"].no_grad():
        if _has_loader(layer):
            named("load_weights", lambda: layer.load_weights(weights))
        else:
            _fill(layer, weights)
    if left := next(weights, None):
        kind = type(layer).__name__
        raise LifecycleError(f"load_weights of {kind} returned before it had taken {left[0]!r}")


def _fill(layer: Any, weights: Weights) -> None:
    """Fill a model that has no loader: every tensor of it, by its name."""
    state: Any = paddle_layer.state_of(layer)
    missing = set(state)
    for name, tensor in weights:
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
    """One more model's load, in a thread that runs only while this one waits for it."""

    def __init__(self, prefix: str, load: Load) -> None:
        self._prefix, self._load = prefix, load
        self._turn = threading.Condition()
        self._item: tuple[str, Any] | None = None
        self._is_asking = self._is_over = self._is_cancelled = False
        self._error: BaseException | None = None
        self._device = sys.modules["paddle"].get_device()
        self._thread = threading.Thread(target=self._run, name="flyweight-load", daemon=True)
        self._thread.start()

    def wants(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def hand(self, name: str, tensor: Any) -> None:
        """Return once the model has done with the tensor; raise what it raises."""
        self._step((name.removeprefix(self._prefix), tensor))

    def end(self) -> None:
        """Tell the model that there is no more, and return once its load has returned."""
        self._step(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Have the model's load fail if it still waits for tensors."""
        with self._turn:
            self._is_cancelled, self._is_asking = True, False
            self._turn.notify_all()
        self._thread.join(_END_SECONDS)

    def _step(self, item: tuple[str, Any] | None) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._is_asking or self._is_over)
            if not self._is_over:
                self._item, self._is_asking = item, False
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._is_asking or self._is_over)
            elif item is not None and self._error is None:
                raise LifecycleError(f"load_weights returned before it had taken {item[0]!r}")
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            if self._device != "cpu":  # threads have devices of their own
                sys.modules["paddle"].set_device(self._device)
            self._load(self._items())
        except BaseException as error:
            self._error = error
        finally:
            with self._turn:
                self._is_over = True
                self._turn.notify_all()

    def _items(self) -> Weights:
        while True:
            with self._turn:
                if not self._is_cancelled:
                    self._is_asking = True
                    self._turn.notify_all()
                    self._turn.wait_for(lambda: not self._is_asking)
                if self._is_cancelled:
                    raise LifecycleError("another model failed to load; the update is given up")
                item = self._item
            if item is None:
                return
            yield item
