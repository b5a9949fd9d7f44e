"""Where a replica finds a version while its publisher is gone: others, and files."""

import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import safetensors.numpy

import flyweight as fw
from child_processes import LIMIT
from conftest import flip
from flyweight.errors import (
    ChecksumMismatch,
    PeerLost,
    PlanError,
    SpecError,
    TransportError,
    VersionError,
)
from flyweight.live import Publisher, Replica
from live.one_process import TOKEN, fill, holds, in_background, model, taken

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


def test_files_that_do_not_fit_leave_the_old_version_and_no_pause(tmp_path):
    run, sink, paused = tmp_path / "run", model(1), []
    fw.save(model(3), run, version=3)
    with Replica(sink, f"unix:{tmp_path}/policy", fallback=[run]) as replica:
        replica.update(timeout_seconds=LIMIT)
        fw.save({"other": np.zeros(3, np.float32)}, run, version=4)
        with pytest.raises(PlanError, match="lacks"):
            replica.update(timeout_seconds=LIMIT, before=paused.append)
        assert (replica.state, replica.version, paused) == ("READY", 3, [])
        assert holds(sink, 3)


def test_files_without_checksums_are_refused_if_they_are_asked_for(tmp_path):
    safetensors.numpy.save_file(model(3), tmp_path / "model.safetensors")
    with Replica(model(), f"unix:{tmp_path}/policy", fallback=[tmp_path]) as replica:
        with pytest.raises(VersionError, match="verify"):
            replica.update(timeout_seconds=LIMIT, verify=True)
        assert replica.update(timeout_seconds=LIMIT).verified == "nothing"
        with pytest.raises(VersionError, match="verify"):
            replica.update(timeout_seconds=LIMIT, may_keep=True, verify=True)


def test_damaged_files_leave_no_version_until_the_next_update(tmp_path):
    run, sink = tmp_path / "run", model(1)
    fw.save(model(3), run, version=3)
    (data,) = (run / "v0000000003").glob("*.safetensors")
    flip(data, data.stat().st_size - 9)
    with Replica(sink, f"unix:{tmp_path}/policy", fallback=[run]) as replica:
        with pytest.raises(ChecksumMismatch, match="update again before serving"):
            replica.update(timeout_seconds=LIMIT)
        assert (replica.state, replica.version) == ("FAILED", None)
        fw.save(model(4), run, version=4)
        assert replica.update(timeout_seconds=LIMIT).version == 4
        assert holds(sink, 4)


def test_a_version_from_files_is_confirmed_and_not_read_again(tmp_path):
    run, sink, paused = tmp_path / "run", model(), []
    fw.save(model(3), run, version=3)
    with Replica(sink, f"unix:{tmp_path}/policy", fallback=[run]) as replica:
        report = replica.update(timeout_seconds=LIMIT)
        assert replica.update(3, timeout_seconds=LIMIT, before=paused.append) is report
        assert replica.update(may_keep=True, timeout_seconds=LIMIT, before=paused.append) is report
        shutil.rmtree(run)
        fw.save(model(5), run, version=3)  # another run, of the same numbers
        assert paused == []
        replica.update(3, timeout_seconds=LIMIT, before=paused.append)
        assert paused == [3]
        assert holds(sink, 5)


def test_an_empty_replica_takes_files_while_its_publisher_has_nothing(tmp_path):
    run, address, sink = tmp_path / "run", f"unix:{tmp_path}/policy", model()
    fw.save(model(3), run, version=3)
    with (
        Publisher(model(7), address) as publisher,
        Replica(sink, address, fallback=[run]) as replica,
    ):
        assert replica.update(timeout_seconds=600).transport == "files"
        assert (replica.is_connected, replica.version, holds(sink, 3)) == (True, 3, True)
        fw.save(model(4), run, version=4)
        _, (report,) = taken(publisher, 7, replica)  # it waits for the publisher from now on
        assert (report.version, report.transport, holds(sink, 7)) == (7, "filled", True)


def test_a_version_that_the_publisher_has_no_more_comes_from_files(tmp_path):
    run, address, sink = tmp_path / "run", f"unix:{tmp_path}/policy", model()
    fw.save(model(3), run, version=3)
    with (
        Publisher(model(7), address, keep="in_place") as publisher,
        Replica(sink, address, fallback=[run]) as replica,
    ):
        publisher.publish(7)
        assert replica.update(timeout_seconds=LIMIT).version == 7
        assert replica.update(3, timeout_seconds=LIMIT).transport == "files"
        assert (replica.version, holds(sink, 3)) == (3, True)
        with pytest.raises(VersionError, match="version 2"):
            replica.update(2, timeout_seconds=LIMIT)
        assert (replica.state, replica.version) == ("READY", 3)
        assert replica.update(timeout_seconds=LIMIT).version == 7
        assert holds(sink, 7)


def test_files_are_read_into_tensors_that_were_replaced_and_values_beside_them(tmp_path):
    run = tmp_path / "run"
    fw.save({**model(3), "step": 3000}, run, version=3)
    sink = {**model(), "step": 0}
    with Replica(sink, f"unix:{tmp_path}/policy", fallback=[run]) as replica:
        replica.update(timeout_seconds=LIMIT)
        assert (replica.version, sink["step"]) == (3, 3000)
        sink.update(model())
        assert replica.version is None
        replica.update(3, timeout_seconds=LIMIT)
        assert replica.version == 3
        assert holds({name: sink[name] for name in model()}, 3)
        with pytest.raises(VersionError, match="replaced"):
            fw.save({**model(4), "step": 4000}, run, version=4)
            replica.update(timeout_seconds=LIMIT, before=lambda version: sink.update(model()))
        assert replica.state != "READY"


def test_tensors_that_files_have_and_the_model_lacks_are_named(tmp_path):
    fw.save({**model(3), "ema": np.zeros(3)}, tmp_path, version=3)
    address = f"unix:{tmp_path}/policy"
    with (
        Replica(model(), address, fallback=[tmp_path]) as replica,
        pytest.raises(PlanError, match="ema"),
    ):
        replica.update(timeout_seconds=LIMIT)
    with Replica(model(), address, fallback=[tmp_path], strict=False) as replica:
        replica.update(timeout_seconds=LIMIT)
        assert replica.unused == ("ema",)


def test_a_loader_gets_the_tensors_of_files(tmp_path):
    run, got = tmp_path / "run", {}
    fw.save(model(3), run, version=3)

    def load(named):
        got.update(named)

    with Replica(load, f"unix:{tmp_path}/policy", fallback=[run], framework="numpy") as replica:
        report = replica.update(timeout_seconds=LIMIT)
        assert (report.transport, report.nbytes) == ("files", sum(a.nbytes for a in got.values()))
        assert (replica.version, replica.progress, holds(got, 3)) == (3, 1.0, True)
        assert replica.update(3, timeout_seconds=LIMIT) is report


def test_a_loader_that_leaves_tensors_of_files_fails_by_name(tmp_path):
    fw.save({"a": np.zeros(3), "b": np.zeros(3)}, tmp_path, version=3)
    with Replica(
        next, f"unix:{tmp_path}/policy", fallback=[tmp_path], framework="numpy"
    ) as replica:
        with pytest.raises(TransportError, match="took 1 of 2 tensors; it left 'b'"):
            replica.update(timeout_seconds=LIMIT)
        assert replica.state == "FAILED"


def test_ranks_load_one_version_of_files_together_or_none(tmp_path):
    """Each has files of its own, as on two hosts; both lose their trainer."""
    address = f"unix:{tmp_path}/policy"
    sinks = [model(), model()]
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                Replica(
                    sink,
                    address,
                    name="engine",
                    rank=rank,
                    world_size=2,
                    fallback=[tmp_path / str(rank)],
                )
            )
            for rank, sink in enumerate(sinks)
        ]
        with Publisher(model(1), address) as publisher:
            taken(publisher, 1, *replicas, num_replicas=1)

        def both(**options):
            works = [
                in_background(each.update, timeout_seconds=LIMIT, **options) for each in replicas
            ]
            with works[0] as first, works[1] as second:
                return first(), second()

        fw.save(model(2), tmp_path / "0", version=2)
        assert all(isinstance(each, PeerLost) for each in both())  # rank 1 does not have it
        fw.save(model(2.5), tmp_path / "1", version=2)
        assert all(isinstance(each, PeerLost) for each in both())  # nor the same
        assert [each.version for each in replicas] == [1, 1]
        assert all(holds(sink, 1) for sink in sinks)
        for rank in range(2):
            fw.save(model(3), tmp_path / str(rank), version=3)
        assert [each.version for each in both()] == [3, 3]
        assert all(holds(sink, 3) for sink in sinks)
        assert len({each.session for each in replicas}) == 1


def test_a_fallback_is_a_list(tmp_path):
    with pytest.raises(SpecError, match="list"):
        Replica(model(), f"unix:{tmp_path}/policy", fallback="runs/7")
