"""What the manager is told: the config and its options (C11, C12, C18)."""

from types import SimpleNamespace

import pytest
from fastdeploy_nets import Net, config, holds

import flyweight as fw
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.engines.fastdeploy_config import FastDeployOptions
from flyweight.errors import (
    SpecError,
)
from flyweight.events import listening

pytest_plugins = ["fastdeploy_fixtures"]


def test_an_unknown_strategy_is_refused_before_anything_else():  # C12
    only = SimpleNamespace(load_config=SimpleNamespace(load_strategy="carrier_pigeon"))
    wanted = "'carrier_pigeon', not one of ipc_snapshot, ipc, ipc_async, rsync"
    with pytest.raises(ValueError, match=wanted):
        DynamicWeightManager(only, None, 0)


def test_every_entry_point_looks_the_strategy_up_in_one_table(tmp_path, open_manager):  # C11
    fw.save(Net(1), tmp_path, version=1)
    told = config(tmp_path)
    manager = open_manager(told, Net())
    told.load_config.load_strategy = "carrier_pigeon"
    for call in (
        manager.update_parameters,
        manager.reload_model_weights,
        lambda: manager.update_weights_by_rdma(1),
    ):
        with pytest.raises(ValueError, match="not one of ipc_snapshot, ipc, ipc_async, rsync"):
            call()
    told.load_config.load_strategy = "rsync"
    with pytest.raises(SpecError, match="was 'ipc_snapshot' and is 'rsync'; make another manager"):
        manager.update_parameters()


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("load_config", "'load_config.load_strategy'"),
        ("parallel_config", "'parallel_config'"),
        ("model_config", "'model_config.model'"),
    ],
)
def test_what_the_config_lacks_is_named(tmp_path, missing, named):
    told = config(tmp_path)
    delattr(told, missing)
    with pytest.raises(SpecError, match=f"the config has no {named}"):
        DynamicWeightManager(told, Net(), 0)


def test_options_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(
        SpecError, match="config.flyweight has 'adress'; it may have address, token"
    ):
        DynamicWeightManager(config(tmp_path, adress="unix:x"), Net(), 0)
    told = config(tmp_path)
    told.flyweight = SimpleNamespace(adress="unix:x", timeout_seconds=3)
    with pytest.raises(SpecError, match="config.flyweight has 'adress'"):
        DynamicWeightManager(told, Net(), 0)
    told.flyweight = SimpleNamespace(timeout_seconds=3)
    assert FastDeployOptions.of(told).timeout_seconds == 3
    told = config(tmp_path, "rsync")
    told.load_config.rsync_config = "etcd_server=10.0.0.1"
    with pytest.raises(SpecError, match="rsync_config is a str, not a dict"):  # C18
        DynamicWeightManager(told, Net(), 0)
    with pytest.raises(SpecError, match="no address of a publisher"):
        DynamicWeightManager(config(tmp_path, "ipc"), Net(), 0)
    with pytest.raises(SpecError, match="models has a dict, expected Paddle layers"):
        DynamicWeightManager(config(tmp_path), [{}], 0)


def test_an_existing_rsync_config_is_taken_and_what_it_means_to_others_is_listed(
    tmp_path, open_manager, caplog
):
    """C18: a deployment brings the config of FastDeploy's own transport along."""
    fw.save(Net(7), tmp_path / "run", version=7)
    (tmp_path / "version.yaml").write_text("step: 7")
    told, events, target = config(tmp_path, "rsync"), [], Net()
    told.load_config.rsync_config = {
        "etcd_server": "10.0.0.1", "store": tmp_path / "run", "user": "me",
    }  # fmt: skip
    with listening(events.append):
        open_manager(told, target)
    assert holds(target, 7)
    (event,) = (each for each in events if each.kind == "config.ignored")
    assert event.fields == {
        "where": "load_config.rsync_config", "names": "'etcd_server', 'user'",
    }  # fmt: skip
    (record,) = (each for each in caplog.records if each.name == "flyweight.fastdeploy")
    assert (record.levelname, "'etcd_server', 'user'" in record.message) == ("WARNING", True)
