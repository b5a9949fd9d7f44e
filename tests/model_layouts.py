"""A small model in many layouts: tests of layouts, and of saves and loads by them, share these."""

import numpy as np

from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.model_layout import ModelLayout
from flyweight.spec.rules import Rule

HEADS, GROUPS, WIDTH, HIDDEN, EXPERTS, LAYERS = 8, 4, 2, 6, 6, 3


def model():
    """A small mixture of experts with grouped heads, every element different."""
    shapes = {"embed": (10, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        shapes |= {
            f"{at}.q": (HEADS * WIDTH, HIDDEN),
            f"{at}.k": (GROUPS * WIDTH, HIDDEN),
            f"{at}.v": (GROUPS * WIDTH, HIDDEN),
        }
        shapes |= {
            f"{at}.o": (HIDDEN, HEADS * WIDTH),
            f"{at}.gate": (8, HIDDEN),
            f"{at}.up": (8, HIDDEN),
        }
        for expert in range(EXPERTS):
            shapes |= {f"{at}.experts.{expert}.{n}": (4, HIDDEN) for n in ("w1", "w3")} | {
                f"{at}.experts.{expert}.w2": (HIDDEN, 4)
            }
    start, tensors = 0, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(start, start + count, dtype=np.float32).reshape(shape)
        start += count
    return tensors


MODEL = model()
SPECS = {name: TensorSpec(DTYPES["f32"], array.shape) for name, array in MODEL.items()}


def rank_tensors(layout, rank, tensors=MODEL):
    """Build the tensors of a rank from the whole ones, by what the layout says they hold."""
    built = {}
    for name, local in layout.locals({n: SPECS[n] for n in tensors}, rank).items():
        array = np.full(local.spec.shape, -1, np.float32)
        for held in local.held:
            array[held.place.slices] = tensors[held.name][held.box.slices].reshape(held.place.shape)
        assert (array >= 0).all(), "an element that nothing fills"
        built[name] = array
    return built


def rule(*names, cut=None, **fields):
    return Rule(names=names, cuts=((cut or {}),) * len(names), **fields)


REST = rule("**")

LAYOUTS = {
    "alone": ModelLayout({"a": 1}, [REST]),
    "tp": ModelLayout({"tp": 4}, [rule("layers.*.q", "layers.*.k", "layers.*.v", cut={0: ("tp",)}, local="layers.{0}.qkv"), rule("layers.*.o", cut={1: ("tp",)}), REST]),
    "megatron": ModelLayout({"pp": 2, "tp": 2}, [rule("layers.*.q", "layers.*.k", "layers.*.v", cut={0: ("tp",)}, local="layers.{0}.qkv", groups=GROUPS, spread={0: ("pp",)}), rule("layers.*.**", spread={0: ("pp",)}), REST]),
    "experts": ModelLayout({"ep": 3}, [rule("layers.*.experts.*.w1", "layers.*.experts.*.w3", local="layers.{0}.w13", stack=1, spread={1: ("ep",)}), rule("layers.*.experts.*.w2", local="layers.{0}.w2", stack=1, spread={1: ("ep",)}), REST]),
    "fsdp": ModelLayout({"dp": 5}, [rule("**", cut={0: ("dp",)})]),
}  # fmt: skip
