"""The plan between a publisher and a replica. Both sides work it out from the same tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flyweight.plans.copy_table import BoxTable, CopyTable, plan_copies
from flyweight.spec.box import Box
from flyweight.spec.manifest import TensorSpec


def plan(
    names: Sequence[str],
    tied: Mapping[str, str],
    sources: BoxTable,
    wanted: Sequence[str],
    sinks: BoxTable,
) -> CopyTable:
    """Return the copies that fill a replica's blocks; raise PlanError if some item cannot come.

    names: the publisher's tensors, whose blocks `sources` has.
    tied: other names for some of them.
    wanted: the replica's tensors, whose blocks `sinks` has. Each must be in `names` or `tied`.
    """
    number = {name: n for n, name in enumerate(names)}
    tensor = np.array([number[tied.get(name, name)] for name in wanted], np.int64)
    return plan_copies(sources, replace(sinks, tensor=tensor[sinks.tensor]), names)


def whole_boxes(specs: Sequence[TensorSpec]) -> BoxTable:
    """Return one box for each tensor, which is all of it, in items."""
    return BoxTable.of([(n, spec.stored(Box.whole(spec.shape))) for n, spec in enumerate(specs)])
