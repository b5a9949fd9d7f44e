"""The design document names files and functions that exist, and every room."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "flyweight"
TEXT = (ROOT / "docs" / "design.md").read_text()
STEPS = re.findall(r"`(\w+/\w+\.py): ([\w.]+)`", TEXT)


def names_in(path):
    """Return the functions, classes and methods of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
            found |= {
                f"{node.name}.{each.name}"
                for each in getattr(node, "body", ())
                if hasattr(each, "name")
            }
    return found


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_a_step_of_a_walk_is_where_it_says(file, name):
    assert name in names_in(SRC / file)


def test_the_walks_name_files_that_exist():
    files = re.findall(r"`((?!tests)\w+/\w+\.py)[:`]", TEXT)
    assert len(STEPS) > 20
    assert [file for file in files if not (SRC / file).exists()] == []


def test_methods_without_a_file_exist_in_some_class():
    known = set().union(*(names_in(path) for path in SRC.rglob("*.py")))
    named = re.findall(r"`([A-Z]\w+\.\w+)`", TEXT)
    assert len(named) > 5
    assert [each for each in named if each not in known] == []


def test_every_room_has_its_line():
    rooms = {
        each.stem
        for each in SRC.iterdir()
        if not each.name.startswith("_") and each.suffix != ".typed"
    }
    table = "".join(line for line in TEXT.splitlines() if line.startswith("|"))
    assert (
        sorted(room for room in rooms if f"`{room}/`" not in table and f"`{room}`" not in table)
        == []
    )
