"""Data flows one way: a file imports its own room and rooms on lower levels."""

import ast
import sys
from pathlib import Path

import pytest

LEVELS = (
    "errors|checks events forks host proofs|spec|memory plans|digest memory_table ports worker_threads|casts|cuda|copies"
    "|stores formats adapters transports|ranks|verbs|live|lifecycle|engines|server|cli"
)
LEVEL = {room: n for n, rooms in enumerate(LEVELS.split("|")) for room in rooms.split()}
PURE = {"errors", "checks", "events", "forks", "host", "proofs", "spec", "plans"}
ARRAYS = {"plans": {"numpy"}}
"""What a pure room may import besides: plans of very many tensors are arrays."""
FRAMEWORKS = {"torch", "paddle", "triton", "vllm", "sglang"}
KNOW_FRAMEWORKS = {"adapters", "cuda", "engines"}
SRC = Path(__file__).parents[1] / "src" / "flyweight"


def imports_of(text):
    for node in ast.walk(ast.parse(text)):  # also inside functions and TYPE_CHECKING
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from flyweight.formats import snapshot` names a module too
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(room, text):
    for name in imports_of(text):
        top, *rest = name.split(".")
        found = rest[0] if top == "flyweight" and rest else room
        # What is none of the rooms is a name that the package itself exports.
        if found != room and LEVEL.get(found, 0) >= LEVEL[room]:
            yield f"{room} imports {name}"
        allowed = {"flyweight", "msgspec", *sys.stdlib_module_names, *ARRAYS.get(room, ())}
        if room in PURE and top not in allowed:
            yield f"{room} is pure but imports {name}"
        if top in FRAMEWORKS and room not in KNOW_FRAMEWORKS:
            yield f"{room} imports {name}; only adapters may"


@pytest.mark.parametrize("path", sorted(SRC.glob("*/*.py")) + sorted(SRC.glob("[!_]*.py")), ids=str)
def test_a_file_imports_only_from_below(path):
    room = path.relative_to(SRC).with_suffix("").parts[0]
    assert list(faults(room, path.read_text())) == []


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("spec", "import numpy"),
        ("spec", "from flyweight.plans.reshard import reshard"),
        ("formats", "from flyweight.stores.local import LocalStore"),
        ("stores", "def f():\n    import torch"),
        ("adapters", "from flyweight.lifecycle.operations import Operations"),
        ("adapters", "from flyweight.engines import fastdeploy"),
        ("lifecycle", "from flyweight.engines.fastdeploy import DynamicWeightManager"),
        ("engines", "from flyweight.server.app import App"),
        ("digest", "from flyweight.cuda import driver"),
    ],
)
def test_the_check_itself_sees_a_fault(room, text):
    assert list(faults(room, text))
