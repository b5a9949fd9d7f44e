"""Versions that are asked for, by a number, by text or in version.yaml (C18)."""

import sys

import pytest
from fastdeploy_nets import (
    Net,
    config,
    holds,
    little_time,
)

import flyweight as fw
from child_processes import LIMIT
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.errors import (
    MissingDependency,
    TransferTimeout,
    VersionError,
)

pytest_plugins = ["fastdeploy_fixtures"]


def test_a_version_is_taken_from_the_store_or_from_its_publisher(
    address, tmp_path, open_manager
):  # C18
    store, target = tmp_path / "run", Net()
    for version in (6, 7, 8):
        fw.save(Net(version), store, version=version)
    (tmp_path / "version.yaml").write_text("# written by the trainer\nmodel: a\nstep: 7  # of 8\n")
    told = config(tmp_path, "rsync", store=store)
    told.load_config.rsync_config = {"address": address}
    manager = open_manager(told, target)
    assert (manager.version, holds(target, 7)) == (7, True)
    answer = manager.update_weights_by_rdma("6", True)
    assert answer.keys() == {"sync_cost", "update_cost", "total_cost", "version", "rank"}
    assert (answer["version"], answer["rank"]) == ("6", 0)
    assert 0 < answer["sync_cost"] <= answer["total_cost"]
    assert answer["sync_cost"] + answer["update_cost"] == pytest.approx(answer["total_cost"])
    assert (manager.health, holds(target, 6)) == ("serving", True)
    with fw.Publisher(Net(9), address, keep="memory") as publisher:
        publisher.publish(9)
        manager.update_weights_by_rdma(9, verify_checksum=True)
        assert (manager.version, holds(target, 9)) == (9, True)
    manager.clear_model_weight()
    manager.update_weights_by_rdma(8)
    manager.reload_model_weights()  # the version asked for last, not the one it began with
    assert (manager.version, holds(target, 8)) == (8, True)
    told.flyweight["address"], told.load_config.rsync_config = None, {"timeout_seconds": LIMIT}
    manager = open_manager(told, target)
    with pytest.raises(VersionError, match="version 5"):
        manager.update_weights_by_rdma(5)
    assert (manager.version, manager.health) == (7, "serving")


def test_old_files_are_not_asked_for_by_a_number(tmp_path, open_manager):  # C18
    fw.save_legacy(Net(1), tmp_path, rank=0, legacy_id=0)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    fw.save_legacy(Net(2), tmp_path, rank=0, legacy_id=0)
    with pytest.raises(VersionError, match="version 0"):
        manager.update_weights_by_rdma("0")  # else it would be told that it has the new ones
    assert (manager.version, manager.health, holds(target, 1)) == (0, "serving", True)
    manager.update_parameters()
    assert holds(target, 2)


def test_checksums_that_are_asked_for_are_never_skipped(address, tmp_path, open_manager):  # C18
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, keep="memory", verify=False) as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
        assert manager.update_weights_by_rdma(1)["version"] == "1"
        with pytest.raises(VersionError, match="checksums"):
            manager.update_weights_by_rdma(1, verify_checksum=True)
        assert (manager.version, manager.health) == (1, "serving")  # it was held, and stays so
        publisher.publish(2)
        with pytest.raises(VersionError, match="checksums"):
            manager.update_weights_by_rdma(2, verify_checksum=True)
        assert (manager.version, manager.health) == (1, "serving")  # nothing was written
        publisher.publish(3)
        manager.update_weights_by_rdma(3)
        assert (manager.version, manager.health) == (3, "serving")
        with pytest.raises(VersionError, match="checksums"):
            manager.update_weights_by_rdma(3, verify_checksum=True)
        assert (manager.version, manager.health) == (3, "serving")
        with little_time(manager), pytest.raises(TransferTimeout):  # it is still held
            manager.update_weights_by_rdma(4)
        assert (manager.version, manager.health, holds(target, 1)) == (3, "serving", True)
    with pytest.raises(TypeError, match="transfer_mode"):  # an option that is unknown
        manager.update_weights_by_rdma(2, transfer_mode="gdr")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "version.yaml.* cannot be read: No such file"),
        ("- 7\n", "holds a list with 0 values .*, expected a mapping with one"),
        ("step: 7\n- 8\n", "is no YAML"),
        ("step:\n- 8\n", r"step is \[8\] in"),
        ("7\n", "holds a int with 0 values"),
        ("step\n", "holds a str with 0 values"),
        ("", "holds a NoneType with 0 values"),
        ("model: a\n", "holds a dict with 0 values for 'step'"),
        ("model:\n  step: 7\n", "holds a dict with 0 values for 'step'"),
        ("step: 7\nstep: 8\n", "holds a dict with 2 values for 'step'"),
        ("step:\n", "step is '' in .*, a YAML NoneType; expected a decimal number"),
        (
            "step: latest\n",
            "step is 'latest' in .*, a YAML str; expected .* text that ends with one",
        ),
        ("step: 1.0\n", "step is '1.0' in .*, a YAML float"),
        ("step: 'v1.0'\n", "step is 'v1.0' in"),
        ("step: -7\n", "step is '-7' in .*, a YAML int"),
        ("step: true\n", "step is 'true' in .*, a YAML bool"),
        ("step: 2024-01-05\n", "step is '2024-01-05' in .*, a YAML date"),
        (f"step: 0x{'f' * 9000}\n", "step is '0xf{77} in"),
        (f"step: {'9' * 9000}\n", "is no YAML"),
        ("step: '7\n", "is no YAML"),
        ("step: !!bool 7\n", "is no YAML: KeyError"),
        ("step: !!int ''\n", "is no YAML: IndexError"),
        ("step: 7\nday: !!timestamp today\n", "is no YAML: AttributeError"),
        ("step: 0017\n", "step is '0017' in .*, a YAML int; expected a decimal"),
        ("step: 1:30\n", "step is '1:30' in .*, a YAML int; expected a decimal"),
        ("step: !!python/object/apply:os.getcwd []\n", "is no YAML"),
        ("step: " + "[" * 30000, "is no YAML"),
        ("step: 7\n#" + "x" * (1 << 16), "has more than 65536 bytes"),
        (b"step: \xff\n", "is no YAML"),
    ],
)
def test_a_version_file_that_says_nothing_says_how_to_set_it(tmp_path, text, words):  # C18
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "version.yaml").write_bytes(data)
    with pytest.raises(VersionError, match=words) as caught:
        DynamicWeightManager(config(tmp_path, "rsync"), Net(), 0)
    assert "step: NUMBER" in str(caught.value)
    assert "version=" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step: 7", "7"),
        ("---\nstep: '7'\n", "7"),
        ('"step": "7" # x\nother: [1, 2]\n', "7"),
        ("models: # all\n- a: b\n- c\nstep: 7\n", "7"),
        ("step: 007", "7"),
        ("step: global_step_7\n", "global_step_7"),
        ("{step: step-7, run: {step: 8}}", "step-7"),
        ("step: >-\n  global_step_0007\n", "global_step_0007"),
    ],
)
def test_a_version_file_is_read(tmp_path, open_manager, text, told):  # C18
    fw.save(Net(7), tmp_path, version=7)
    (tmp_path / "version.yaml").write_text(text)
    manager = open_manager(config(tmp_path, "rsync"), Net())
    assert (manager.version, manager.read_model_version_from_file()) == (7, told)
    with pytest.raises(VersionError, match="v1.0"):
        manager.update_weights_by_rdma("v1.0")


def test_a_version_may_be_text_and_results_repeat_it(tmp_path, open_manager):
    """C18: the number that ends a text is the version's; a text without one is refused."""
    for version in (5, 6):
        fw.save(Net(version), tmp_path, version=version)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    for given, number in (("5", 5), ("step-6", 6), ("global_step_0005", 5), ("2024/step.6", 6)):
        answer = manager.update_weights_by_rdma(given, verify_checksum=False)
        assert (answer["version"], manager.version) == (given, number)
        assert holds(target, number)
    for given in ("latest", "6.0", "-6", -6, "step-6b", "9" * 19, "step-٦"):
        with pytest.raises(VersionError, match="whole number"):
            manager.update_weights_by_rdma(given)
    assert (manager.version, manager.health) == (6, "serving")


def test_a_version_file_without_pyyaml_names_the_extra(tmp_path, monkeypatch):
    """C18: PyYAML is optional."""
    (tmp_path / "version.yaml").write_text("step: 7")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependency, match=r"pip install 'flyweight\[fastdeploy\]'"):
        DynamicWeightManager(config(tmp_path, "rsync"), Net(), 0)
