import flyweight


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
