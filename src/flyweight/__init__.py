"""Flyweight moves a model's weights, on the fly, from where they are to where they are wanted."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flyweight.adapters.sharded import Sharded as Sharded
    from flyweight.errors import FlyweightError as FlyweightError
    from flyweight.lifecycle.engine import ModelEngine as ModelEngine
    from flyweight.lifecycle.worker import Worker as Worker
    from flyweight.live import Publisher as Publisher
    from flyweight.live import Replica as Replica
    from flyweight.spec.box import Box as Box
    from flyweight.spec.model_layout import ModelLayout as ModelLayout
    from flyweight.transports.tls import Tls as Tls
    from flyweight.verbs.compare import diff as diff
    from flyweight.verbs.compare import verify as verify
    from flyweight.verbs.convert import convert as convert
    from flyweight.verbs.find import open_source as open  # noqa: A004, F401
    from flyweight.verbs.find import prune as prune
    from flyweight.verbs.find import versions as versions
    from flyweight.verbs.load import load as load
    from flyweight.verbs.load import load_state_dict as load_state_dict
    from flyweight.verbs.plan import plan as plan
    from flyweight.verbs.save import save as save
    from flyweight.verbs.save import save_legacy as save_legacy
    from flyweight.verbs.save import save_state_dict as save_state_dict

_PUBLIC = {
    "Box": ("flyweight.spec.box", "Box"),
    "FlyweightError": ("flyweight.errors", "FlyweightError"),
    "ModelEngine": ("flyweight.lifecycle.engine", "ModelEngine"),
    "ModelLayout": ("flyweight.spec.model_layout", "ModelLayout"),
    "Publisher": ("flyweight.live", "Publisher"),
    "Replica": ("flyweight.live", "Replica"),
    "Sharded": ("flyweight.adapters.sharded", "Sharded"),
    "Tls": ("flyweight.transports.tls", "Tls"),
    "Worker": ("flyweight.lifecycle.worker", "Worker"),
    "convert": ("flyweight.verbs.convert", "convert"),
    "diff": ("flyweight.verbs.compare", "diff"),
    "load": ("flyweight.verbs.load", "load"),
    "load_state_dict": ("flyweight.verbs.load", "load_state_dict"),
    "open": ("flyweight.verbs.find", "open_source"),
    "plan": ("flyweight.verbs.plan", "plan"),
    "prune": ("flyweight.verbs.find", "prune"),
    "save": ("flyweight.verbs.save", "save"),
    "save_legacy": ("flyweight.verbs.save", "save_legacy"),
    "save_state_dict": ("flyweight.verbs.save", "save_state_dict"),
    "verify": ("flyweight.verbs.compare", "verify"),
    "versions": ("flyweight.verbs.find", "versions"),
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import flyweight` is quick and quiet."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flyweight' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value: object = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
