"""All ranks of an engine change their version together, or none does."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import Child, until
from flyweight.errors import (
    FlyweightError,
    PeerRefused,
    SpecError,
    TransferTimeout,
    VersionError,
)
from flyweight.live import line, replica_connection
from flyweight.live.rounds import Rounds
from live_engines import LAYOUT, SECONDS, WHOLE, Engine, published, states


def test_ranks_of_a_replica_commit_together(address, pool):
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        assert publisher.replicas == ["engine"]
        for version in (1, 2, 3):
            model["w"] += version
            updates = engine.update(pool)
            report = publisher.publish(version, num_replicas=1)
            assert [each.result(SECONDS).version for each in updates] == [version] * 2
            assert [each.name for each in report.replicas] == ["engine"]
            assert report.nbytes == WHOLE.nbytes
            assert engine.weights.tobytes() == model["w"].tobytes()


def test_no_rank_writes_before_all_have_drained(address, pool):
    model, has_first_drained, may_drain = {"w": WHOLE.copy()}, threading.Event(), threading.Event()
    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        first = pool.submit(
            engine.ranks[0].update,
            timeout_seconds=SECONDS,
            before=lambda version: has_first_drained.set(),
        )
        second = pool.submit(
            engine.ranks[1].update,
            timeout_seconds=SECONDS,
            before=lambda version: may_drain.wait(SECONDS),
        )
        publish = pool.submit(publisher.publish, 1, num_replicas=1)
        assert has_first_drained.wait(SECONDS)
        time.sleep(0.1)  # a rank that writes too soon does so now, unless the machine is slow
        assert not engine.weights.any()
        may_drain.set()
        assert publish.result(SECONDS).failed == ()
        assert first.result(SECONDS).version == second.result(SECONDS).version == 1


def test_a_rank_that_cannot_drain_leaves_all_ranks_as_they_were(address, pool):
    model = {"w": WHOLE.copy()}

    def refuse(version):
        raise RuntimeError("a request never ends")

    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        updates = engine.update(pool)
        publisher.publish(1, num_replicas=1)
        assert [each.result(SECONDS).version for each in updates] == [1, 1]
        model["w"] += 1
        first = pool.submit(engine.ranks[0].update, timeout_seconds=SECONDS)
        second = pool.submit(engine.ranks[1].update, timeout_seconds=SECONDS, before=refuse)
        (failed,) = publisher.publish(2, num_replicas=1).failed
        assert "rank 1 of 'engine'" in str(failed.error)
        assert not failed.is_touched
        with pytest.raises(FlyweightError, match="a request never ends"):
            first.result(SECONDS)
        with pytest.raises(RuntimeError):
            second.result(SECONDS)
        assert [(each.version, each.state) for each in engine.ranks] == [(1, "ready")] * 2
        assert engine.weights.tobytes() == WHOLE.tobytes()


@pytest.mark.campaign
def test_all_ranks_read_the_held_copy_if_one_of_them_cannot_map_the_model(
    address, pool, monkeypatch
):
    """Only a model on a GPU is read beside its held copy; here memory that is shared stands in."""
    torch, choose_sources = pytest.importorskip("torch"), Rounds.choose_sources

    def as_on_a_gpu(rounds, live, held, members):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live.source, "devices", [0])
            return choose_sources(rounds, live, held, members)

    monkeypatch.setattr(Rounds, "choose_sources", as_on_a_gpu)
    model = {"mapped": torch.ones(6).share_memory_(), "copied": torch.ones(6)}
    stages = [{name: torch.zeros(6)} for name in model]
    with ExitStack() as stack:
        publisher = stack.enter_context(fw.Publisher(model, address, hold=True))
        ranks = [
            stack.enter_context(
                fw.Replica(stage, address, name="engine", rank=n, num_ranks=2, extra="report")
            )
            for n, stage in enumerate(stages)
        ]
        updates = [pool.submit(rank.update, timeout_seconds=SECONDS) for rank in ranks]
        assert publisher.publish(1, num_replicas=1).failed == ()
        assert [each.result(SECONDS).version for each in updates] == [1, 1]
    assert all(each.all() for stage in stages for each in stage.values())


def test_a_replica_of_several_ranks_needs_a_name(address):
    with pytest.raises(SpecError, match="name"):
        fw.Replica({"w": np.zeros(3)}, address, rank=0, num_ranks=2)


# What ranks request together.


def test_ranks_that_request_different_versions_are_denied(address, pool):
    with fw.Publisher({"w": WHOLE.copy()}, address), Engine(address) as engine:
        updates = [
            pool.submit(rank.update, version, timeout_seconds=SECONDS)
            for rank, version in zip(engine.ranks, (5, 6), strict=True)
        ]
        for each in updates:
            with pytest.raises(VersionError, match="5 on rank 0, 6 on rank 1"):
                each.result(SECONDS)


def test_a_rank_that_requests_nothing_is_named_to_the_trainer_and_to_the_others(address, pool):
    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher, Engine(address) as engine:
        is_over = threading.Event()
        update = pool.submit(
            engine.ranks[0].update, timeout_seconds=SECONDS, is_over=is_over.is_set
        )

        def is_named():
            with pytest.raises(TransferTimeout) as raised:
                publisher.publish(1, num_replicas=1, timeout_seconds=0.1)
            return "rank 1 of 'engine'" in str(raised.value)

        until(is_named)
        is_over.set()
        engine.ranks[0].wake()
        with pytest.raises(TransferTimeout, match="all 2 ranks"):
            update.result(SECONDS)


@pytest.mark.parametrize("hold", [False, True])
def test_a_rank_that_was_restarted_gets_the_next_version_with_the_others(address, pool, hold):
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address, hold=hold) as publisher, Engine(address) as engine:
        published(publisher, engine, pool, 1)
        engine.restart(1)
        assert states(engine) == [("ready", 1), ("empty", None)]
        if hold:  # the version that one of them holds is there for both
            updates = engine.update(pool, may_keep=True)
            assert [each.result(SECONDS).version for each in updates] == [1, 1]
            assert engine.weights.tobytes() == model["w"].tobytes()
        model["w"] += 1
        published(publisher, engine, pool, 2)
        assert states(engine) == [("ready", 2)] * 2
        assert engine.weights.tobytes() == model["w"].tobytes()


def test_ranks_keep_the_newest_version_together(address, pool):
    with (
        fw.Publisher({"w": WHOLE.copy()}, address, hold=True) as publisher,
        Engine(address) as engine,
    ):
        published(publisher, engine, pool, 1)
        first = [each.report for each in engine.ranks]
        again = [each.result(SECONDS) for each in engine.update(pool, may_keep=True)]
        assert all(a is b for a, b in zip(first, again, strict=True))
        publisher.publish(2)
        updates = engine.update(pool, may_keep=True)
        assert [each.result(SECONDS).version for each in updates] == [2, 2]


def test_ranks_catch_up_from_a_store_together(address, pool, tmp_path):
    model = {"w": WHOLE.copy()}
    fw.save(model, tmp_path / "run", version=7)
    with fw.Publisher(model, address, store=tmp_path / "run"), Engine(address) as engine:
        reports = [each.result(SECONDS) for each in engine.update(pool)]
        assert [(each.version, each.origin) for each in reports] == [(7, "snapshot")] * 2
        assert engine.weights.tobytes() == model["w"].tobytes()


def test_a_rank_that_withdraws_leaves_the_others_waiting(address, pool):
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        first = pool.submit(engine.ranks[0].update, timeout_seconds=SECONDS)
        with pytest.raises(TransferTimeout):
            engine.ranks[1].update(timeout_seconds=0.2)
        until(lambda: not publisher.waiting)
        assert publisher.publish(1).replicas == ()
        second = pool.submit(engine.ranks[1].update, timeout_seconds=SECONDS)
        publisher.publish(2, num_replicas=1)
        assert first.result(SECONDS).version == second.result(SECONDS).version == 2


# Who is a rank of what.


def rank_elsewhere(address, pipe):
    with pytest.raises(PeerRefused) as raised:
        fw.Replica(
            {"w": np.zeros((3, 4))}, address, name="engine", layout=LAYOUT, rank=0, num_ranks=2
        )
    return str(raised.value)


def test_a_second_engine_of_the_same_name_is_refused(address, pool):
    model = {"w": WHOLE.copy()}
    with (
        Child(lambda pipe: pipe.recv() and rank_elsewhere(address, pipe)) as child,
        fw.Publisher(model, address) as publisher,
        Engine(address) as engine,
    ):
        child.send("go")
        text = child.result()
        assert "'engine', rank 0" in text
        assert str(os.getpid()) in text
        with pytest.raises(PeerRefused, match="num_ranks=3"):
            fw.Replica({"w": WHOLE.copy()}, address, name="engine", rank=2, num_ranks=3)
        report, _ = published(publisher, engine, pool, 1)
        assert report.failed == ()


@pytest.mark.campaign
def test_ranks_that_do_not_share_a_directory_for_decisions_are_refused(address, pool, monkeypatch):
    directories = iter(["1:2@x", "1:3@x"])
    with monkeypatch.context() as patch, fw.Publisher({"w": WHOLE.copy()}, address) as publisher:
        patch.setattr(replica_connection, "directory_id", lambda directory: next(directories))
        text = "rank 1 of .*'1:3@x', its rank 0 in '1:2@x' .*set FLYWEIGHT_RUN_DIR"
        with pytest.raises(PeerRefused, match=text):
            Engine(address)
        patch.setattr(replica_connection, "directory_id", lambda directory: "")
        with pytest.raises(PeerRefused, match="names no directory"):
            Engine(address, "other")
        assert publisher.replicas == []


def test_a_rank_that_another_replica_of_its_process_replaces_is_told(address, pool):
    with fw.Publisher({"w": WHOLE.copy()}, address), Engine(address) as engine:
        update = pool.submit(engine.ranks[0].update, timeout_seconds=SECONDS)
        with engine._replica(0), pytest.raises(PeerRefused, match="connected again"):
            update.result(SECONDS)


def test_an_engine_may_come_back_with_another_number_of_ranks(address, pool):
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address) as publisher:
        with Engine(address) as engine:
            published(publisher, engine, pool, 1)
        until(lambda: not publisher.replicas)
        whole = {"w": np.zeros((6, 4))}
        ranks = [
            fw.Replica(
                whole if rank == 0 else {"w": np.zeros((6, 4))},
                address,
                name="engine",
                rank=rank,
                num_ranks=3,
            )
            for rank in range(3)
        ]
        updates = [pool.submit(each.update, timeout_seconds=SECONDS) for each in ranks]
        assert publisher.publish(2, num_replicas=1).failed == ()
        assert [each.result(SECONDS).version for each in updates] == [2] * 3
        assert whole["w"].tobytes() == model["w"].tobytes()
        for each in ranks:
            each.close()


@pytest.mark.parametrize("name", ["../x", "a/b", " ", "\N{SNOWMAN}" * 200, "write"])
def test_the_name_of_an_engine_may_be_any_text(address, pool, name):
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address) as publisher, Engine(address, name) as engine:
        report, _ = published(publisher, engine, pool, 1)
        assert [each.name for each in report.replicas] == [name]
        assert states(engine) == [("ready", 1)] * 2


def test_64_ranks_commit_together(address):
    model, num_ranks = {"w": WHOLE.copy()}, 64
    copies = [{"w": np.zeros((6, 4))} for _ in range(num_ranks)]
    with fw.Publisher(model, address) as publisher, ThreadPoolExecutor(num_ranks) as pool:
        ranks = list(
            pool.map(
                lambda rank: fw.Replica(
                    copies[rank], address, name="wide", rank=rank, num_ranks=num_ranks
                ),
                range(num_ranks),
            )
        )
        for version in (1, 2):
            model["w"] += 1
            updates = [pool.submit(each.update, timeout_seconds=SECONDS) for each in ranks]
            report = publisher.publish(version, num_replicas=1, timeout_seconds=SECONDS)
            assert report.failed == ()
            assert {each.result(SECONDS).version for each in updates} == {version}
            assert {each["w"].tobytes() for each in copies} == {model["w"].tobytes()}
        list(pool.map(fw.Replica.close, ranks))


def test_replicas_of_other_layouts_join_while_a_round_runs(address, pool):
    model, is_drained = {"w": WHOLE.copy()}, threading.Event()
    with fw.Publisher(model, address) as publisher, Engine(address) as engine:
        updates = engine.update(pool, before=lambda version: is_drained.wait(SECONDS))
        publish = pool.submit(publisher.publish, 1, num_replicas=1)
        until(lambda: not publisher.waiting)
        with Engine(address, "second") as second, fw.Replica({"w": WHOLE.copy()}, address) as third:
            later = [*second.update(pool), pool.submit(third.update, timeout_seconds=SECONDS)]
            until(lambda: len(publisher.waiting) == 2)
            is_drained.set()
            assert [each.name for each in publish.result(SECONDS).replicas] == ["engine"]
            assert [each.result(SECONDS).version for each in updates] == [1, 1]
            assert publisher.publish(2, num_replicas=2).failed == ()
            assert [each.result(SECONDS).version for each in later] == [2] * 3


@pytest.mark.campaign
def test_ranks_decide_on_their_host(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(line, "identity", lambda: "another host")
    monkeypatch.setenv("FLYWEIGHT_RUN_DIR", str(tmp_path))
    model, token = {"w": WHOLE.copy()}, "t" * 32
    with ExitStack() as stack:
        publisher = stack.enter_context(fw.Publisher(model, "tcp://127.0.0.1:0", token=token))
        halves = [{"w": np.zeros((3, 4))} for _ in range(2)]
        ranks = [
            stack.enter_context(
                fw.Replica(
                    half, str(publisher.address), token=token, name="engine", layout=LAYOUT,
                    rank=rank, num_ranks=2,
                )
            )
            for rank, half in enumerate(halves)
        ]  # fmt: skip
        for version in (1, 2):
            model["w"] += 1
            updates = [pool.submit(each.update, timeout_seconds=SECONDS) for each in ranks]
            assert publisher.publish(version, num_replicas=1).failed == ()
            assert [each.result(SECONDS).version for each in updates] == [version] * 2
        assert np.concatenate([each["w"] for each in halves]).tobytes() == model["w"].tobytes()
        (made,) = tmp_path.glob("decisions-*")
        assert len(list(made.glob("*.2.*"))) == 2
    assert list(tmp_path.glob("decisions-*")) == []
