import flyweight
from child_processes import run_python


def test_the_public_names_are_these_and_all_work():
    assert sorted(flyweight.__all__) == sorted(
        [
            "Box",
            "FlyweightError",
            "ModelEngine",
            "ModelLayout",
            "Publisher",
            "Replica",
            "Sharded",
            "Tls",
            "Worker",
            "__version__",
            "convert",
            "diff",
            "load",
            "load_state_dict",
            "open",
            "plan",
            "prune",
            "save",
            "save_legacy",
            "save_state_dict",
            "verify",
            "versions",
        ]
    )
    assert all(getattr(flyweight, name) is not None for name in flyweight.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(flyweight, "laod")


def test_dir_lists_the_public_names():
    assert set(flyweight.__all__) <= set(dir(flyweight))


def test_public_names_are_what_they_are_called_whatever_was_imported_before():
    code = """
import importlib, pkgutil, flyweight
rooms = {each.name for each in pkgutil.iter_modules(flyweight.__path__)}
assert not rooms & set(flyweight.__all__), rooms & set(flyweight.__all__)
for room in sorted(rooms - {"__main__"}):
    importlib.import_module(f"flyweight.{room}")
for name in set(flyweight.__all__) - {"__version__"}:
    assert getattr(flyweight, name).__name__ == {"open": "open_source"}.get(name, name), name
"""
    run_python(code, check=True)
