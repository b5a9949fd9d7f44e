"""Where a replica finds a version while its publisher is gone: others, and files."""

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import FlyweightError, PeerLost, SpecError
from flyweight.live import Publisher, Replica
from live.one_process import TOKEN, fill, holds, model, taken

SOON = 2.0


def gone_after(version, *, name="first"):
    """Publish a version to a replica over the network; return it, and where the trainer was."""
    source, sink = model(version), model()
    with Publisher(source, "tcp://127.0.0.1:0", token=TOKEN) as publisher:
        replica = Replica(sink, publisher.address, token=TOKEN, transport="read", name=name)
        taken(publisher, version, replica)
        return replica, publisher.address


def test_another_replica_gives_what_it_staged():
    first, address = gone_after(3)
    sink = model()
    with (
        first,
        Replica(
            sink, address, token=TOKEN, transport="read", name="late", fallback=[first.serves_at]
        ) as late,
    ):
        report = late.update(timeout_seconds=LIMIT)
        assert (report.version, report.transport, report.verified) == (3, "read", "live")
    assert holds(sink, 3)


def test_files_are_loaded_and_only_the_version_that_was_asked_for(tmp_path):
    first, address = gone_after(1)
    first.close()
    fw.save(model(7), tmp_path / "run", version=7)
    fw.save(model(9), tmp_path / "run", version=9)
    sink, paused = model(), []
    with Replica(sink, address, token=TOKEN, name="late", fallback=[str(tmp_path / "run")]) as late:
        with pytest.raises(PeerLost):
            late.update(8, timeout_seconds=SOON)
        assert holds(sink, 0)
        report = late.update(7, timeout_seconds=LIMIT, before=paused.append)
        assert (report.version, report.transport, report.verified) == (7, "files", "checksums")
        assert holds(sink, 7)
        assert late.update(timeout_seconds=LIMIT).version == 9
        assert paused == [7]
        assert holds(sink, 9)
        assert late.version == 9
        with pytest.raises(PeerLost):  # there is nothing newer
            late.update(timeout_seconds=SOON)
        assert late.version == 9


def test_addresses_and_paths_are_tried_in_their_order(tmp_path):
    first, address = gone_after(2)
    fw.save(model(2.5), tmp_path / "run", version=2)
    sink = model()
    with (
        first,
        Replica(
            sink,
            address,
            token=TOKEN,
            transport="read",
            name="late",
            fallback=[first.serves_at, tmp_path / "run"],
        ) as late,
    ):
        assert late.update(2, timeout_seconds=LIMIT).transport == "read"
    assert holds(sink, 2)


def test_a_replica_goes_back_to_its_publisher_once_there_is_one(tmp_path):
    address = f"unix:{tmp_path}/policy"
    source, sink = model(1), model()
    fw.save(model(4), tmp_path / "run", version=4)
    with Replica(sink, address, name="engine", fallback=[tmp_path / "run"]) as replica:
        assert replica.update(timeout_seconds=LIMIT).transport == "files"
        with Publisher(source, address, keep="in_place") as publisher:
            publisher.publish(1)
            report = replica.update(1, timeout_seconds=LIMIT)
            assert (report.version, report.transport) == (1, "filled")
            assert holds(sink, 1)
            fill(source, 4)
            publisher.publish(4)  # the same number as in the files, and other content
            assert replica.update(4, timeout_seconds=LIMIT).transport == "filled"


def test_files_that_do_not_fit_leave_the_old_version(tmp_path):
    fw.save({"other": np.zeros(3, np.float32)}, tmp_path / "run", version=4)
    sink = model(1)
    with Replica(
        sink, f"unix:{tmp_path}/policy", name="engine", fallback=[tmp_path / "run"]
    ) as replica:
        with pytest.raises(FlyweightError):
            replica.update(timeout_seconds=SOON)
        assert holds(sink, 1)


def test_a_fallback_is_a_list_and_files_need_a_model(tmp_path):
    with pytest.raises(SpecError, match="list"):
        Replica(model(), f"unix:{tmp_path}/policy", fallback="runs/7")
    with pytest.raises(SpecError, match="model"):
        Replica(print, f"unix:{tmp_path}/policy", fallback=["runs/7"], framework="numpy")
