"""What a plan says of memory is what it takes."""

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import TransportError
from flyweight.spec.model_layout import ModelLayout

LAYOUT = '{"mesh": {"tp": 2}, "rules": [{"names": "w", "cut": {"0": "tp"}}, {"names": "**"}]}'
TOKEN = "a token of this test"


def test_a_replica_of_another_host_stages_what_the_plan_says(tmp_path):
    saved = {"w": np.arange(36.0).reshape(9, 4), "norm": np.arange(5, dtype=np.int16)}
    fw.save(saved, tmp_path / "run", version=3)
    layout = ModelLayout.from_json(LAYOUT.encode(), "layout")
    report = fw.plan(tmp_path / "run", into=layout)
    assert report.staging_bytes == 5 * 4 * 8 + 5 * 2
    half = {"w": np.zeros((5, 4)), "norm": np.zeros(5, np.int16)}
    options = {"token": TOKEN, "transport": "read", "layout": layout, "layout_rank": 0}
    with (
        fw.open(tmp_path / "run") as stored,
        fw.Publisher(stored, "tcp://127.0.0.1:0", token=TOKEN) as publisher,
    ):
        with (
            fw.Replica(
                half, publisher.address, staging_bytes=report.staging_bytes - 1, **options
            ) as replica,
            pytest.raises(TransportError, match="staging"),
        ):
            replica.update(timeout_seconds=LIMIT)
        with fw.Replica(
            half, publisher.address, staging_bytes=report.staging_bytes, **options
        ) as replica:
            assert replica.update(timeout_seconds=LIMIT).nbytes == report.staging_bytes
    assert (half["w"] == saved["w"][:5]).all()
