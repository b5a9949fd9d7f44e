"""Fit: whether tensors of one name have the same dtype and shape at both ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flyweight.errors import DTypeMismatch, ShapeMismatch, listed
from flyweight.spec.dtype import DType
from flyweight.spec.manifest import TensorSpec

IsSame = Callable[[str, DType, DType], bool]


def check_fit(
    have: Mapping[str, TensorSpec],
    want: Mapping[str, TensorSpec],
    *,
    source: str,
    sink: str,
    is_same: IsSame = lambda name, have, want: have is want or have == want,
) -> None:
    """Raise DTypeMismatch or ShapeMismatch, naming all tensors that differ, if there are any.

    `source` and `sink` say where each end is, as in "in 'runs/7'"; they only go into the message.
    `is_same` compares two dtypes of a name where equality is not the question.
    """
    wrong = [n for n, spec in want.items() if not is_same(n, have[n].dtype, spec.dtype)]
    if wrong:
        name = wrong[0]
        raise DTypeMismatch(
            f"{name!r} is {have[name].dtype} {source} and {want[name].dtype} {sink}; "
            f"{len(wrong)} tensors differ in dtype: {listed(wrong)}"
        )
    wrong = [name for name, spec in want.items() if have[name].shape != spec.shape]
    if wrong:
        name = wrong[0]
        raise ShapeMismatch(
            f"{name!r} is {have[name].shape} {source} and {want[name].shape} {sink}; "
            f"{len(wrong)} tensors differ in shape: {listed(wrong)}"
        )
