"""Metrics have the units that their names say: seconds, bytes, ratios from 0 to 1, counts."""

import os
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import flyweight as fw
from child_processes import until
from control_site import serving
from flyweight.lifecycle.cell import Cell, RankRecord
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import State
from versioned_models import weights

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "control.md"


def samples(site):
    """Return all metrics by name and rank; of `flyweight_state` only the state that is 1."""
    code, text, headers = site.raw("GET", "/metrics")
    assert (code, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for each in family.samples:
            assert f"`{each.name}`" in GUIDE.read_text()  # all of them are documented
            if each.name != "flyweight_state" or each.value:
                found[each.name, each.labels.get("rank", each.labels.get("state", ""))] = each.value
    return found


@pytest.mark.parametrize(
    ("state", "percent", "ratio"),
    [
        (State.UPDATING, 0.0, 0.0),
        (State.UPDATING, 43.0, 0.43),
        (State.UPDATING, 99.9, 0.999),
        (State.VERIFYING, 100.0, 1.0),
    ],
)
def test_each_metric_has_the_value_of_the_rank_in_its_own_unit(tmp_path, state, percent, ratio):
    """C26, C31: a rank reports percent, and the ratio is a hundredth of it."""
    told = RankRecord(
        pid=os.getpid(), state=state, absent=(), version=7, percent=percent, num_running=5,
        nbytes=123_456_789, round_seconds=2.5, pause_seconds=0.125, num_rounds=9,
    )  # fmt: skip
    with Cell(tmp_path / "e.cell", 2) as cell:
        for rank in range(2):
            cell.claim(rank)
            cell.write_record(rank, told)
        with serving([Control(tmp_path / "e.cell", 2, name="e")]) as site:
            found = samples(site)
            assert found["flyweight_state", state] == 1
            assert found["flyweight_version", ""] == 7
            for rank in ("0", "1"):
                for name, value in {
                    "rank_up": 1,
                    "rounds_total": 9,
                    "requests_running": 5,
                    "round_progress_ratio": ratio,
                    "round_bytes": 123_456_789,
                    "round_seconds": 2.5,
                    "pause_seconds": 0.125,
                }.items():
                    assert found[f"flyweight_{name}", rank] == pytest.approx(value)


def test_a_real_round_is_measured_in_seconds_and_bytes(tmp_path, address):
    """C26: between the loader's own time and what the test's clock measures."""
    model, trained = weights(0), weights(1)

    def load(tensors):
        for name, tensor in tensors:
            model[name][...] = tensor
        time.sleep(0.1)  # the least that the round takes

    cell = tmp_path / "e.cell"
    with (
        fw.Publisher(trained, address, keep="memory") as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
        fw.Worker(fw.ModelEngine(model), replica, cell, should_follow=False),
        serving([Control(cell, name="e")]) as site,
    ):
        publisher.publish(1)
        began = time.monotonic()
        site.good("POST", "/v1/update_weights")
        took = time.monotonic() - began
        until(lambda: samples(site)["flyweight_rounds_total", "0"] == 1)
        found = samples(site)
        assert found["flyweight_round_bytes", "0"] == sum(each.nbytes for each in trained.values())
        for name in ("flyweight_round_seconds", "flyweight_pause_seconds"):
            assert 0.1 <= found[name, "0"] <= took
        (last,) = site.good("GET", "/status")["rounds"]
        assert 0.1 <= last["pause_seconds"] <= took
        assert last["gb_per_second"] == pytest.approx(last["nbytes"] / 1e9 / last["seconds"])
