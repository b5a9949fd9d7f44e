"""Replicas that serve the version that they hold to others, from their own live weights."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, resources, settled, until
from flyweight.errors import PeerRefused, SpecError, TransferTimeout, TransportError, VersionError
from flyweight.events import listening
from flyweight.live import messages
from flyweight.live.curve_keys import CurveClient, CurveKeys
from flyweight.live.memory_sink import MemorySink
from live_rounds import call_before, is_failed, updated
from peers import FakeReplica
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


@pytest.fixture
def served(tmp_path):
    """Where a replica of this test serves."""
    return f"unix:{tmp_path}/served"


def test_others_take_each_version_from_a_replica_that_holds_it(address, served, threads):
    model, engine, second, third = weights(1), weights(50), weights(51), weights(52)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served) as replica,
        fw.Replica(second, served) as waiting,
    ):
        assert replica.serves_at == served
        assert waiting.serves_at is None
        first = threads.submit(waiting.update, timeout_seconds=LIMIT)
        updated(threads, publisher, replica, 1)
        assert (first.result(LIMIT).version, first.result().origin) == (1, "published")
        assert holds(second, 1)
        assign(model, 9)  # the trainer goes on, and publishes nothing
        with fw.Replica(third, replica.serves_at) as late:
            assert late.update(1, timeout_seconds=LIMIT).verified == "live"
            assert holds(third, 1)
        assign(model, 2)
        following = threads.submit(waiting.update, timeout_seconds=LIMIT)
        updated(threads, publisher, replica, 2)
        assert following.result(LIMIT).version == 2
        assert holds(second, 2)
    with pytest.raises(TransferTimeout), fw.Replica(weights(53), served) as late:
        late.update(timeout_seconds=0.1)


def test_a_chain_serves_values_and_tied_tensors_as_they_were_published(address, served, threads):
    one = np.arange(5.0)
    model = {"a": one, "b": one, "step": 7, "name": "policy"}
    other = np.zeros(5)
    engine = {"a": other, "b": other}
    target = {"a": np.zeros(5), "b": np.zeros(5), "step": 0, "name": ""}
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served) as replica,
        fw.Replica(target, served) as last,
    ):
        updated(threads, publisher, replica, 1)
        assert last.update(timeout_seconds=LIMIT).version == 1
        assert (target["step"], target["name"]) == (7, "policy")
        assert target["a"].tobytes() == target["b"].tobytes() == one.tobytes()


def test_what_a_replica_took_unverified_is_not_verified_down_the_chain(
    address, served, tmp_path, threads
):
    end, last = f"unix:{tmp_path}/end", weights(52)
    with (
        fw.Replica(weights(50), address, serve_on=served) as replica,
        fw.Replica(weights(51), served, serve_on=end) as second,
        fw.Replica(last, end) as third,
    ):
        with fw.Publisher(weights(1), address, should_verify=False) as publisher:
            updated(threads, publisher, replica, 1)
            assert second.update(timeout_seconds=LIMIT).verified == "nothing"
            with pytest.raises(VersionError, match="must_verify"):
                third.update(timeout_seconds=LIMIT, must_verify=True)
            assert third.version is None
            assert third.update(timeout_seconds=LIMIT).verified == "nothing"
            assert holds(last, 1)
        with fw.Publisher(weights(2), address) as publisher:
            updated(threads, publisher, replica, 1)
        assert second.update(timeout_seconds=LIMIT).verified == "live"
        assert third.update(timeout_seconds=LIMIT, must_verify=True).verified == "live"
        assert holds(last, 2)


def test_torch_modules_serve_too_and_those_on_other_hosts(address, threads, monkeypatch):
    torch = pytest.importorskip("torch")
    model, engine, other = (torch.nn.Linear(40, 30) for _ in range(3))
    with (
        fw.Publisher(model, address, token="secret") as publisher,
        fw.Replica(engine, address, token="secret", serve_on="tcp://127.0.0.1:0") as replica,
    ):
        updated(threads, publisher, replica, 1)
        assert replica.serves_at.startswith("tcp://127.0.0.1:")
        assert not replica.serves_at.endswith(":0")
        with pytest.raises(PeerRefused):
            fw.Replica(other, replica.serves_at, token="wrong")
        monkeypatch.setenv("FLYWEIGHT_HOST", "far-away")
        with fw.Replica(other, replica.serves_at, token="secret") as far:
            assert far.update(timeout_seconds=LIMIT).strategy == "network"
        assert torch.equal(other.weight, model.weight)


def test_nothing_is_read_while_the_next_update_writes(address, served, threads, monkeypatch):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served) as replica,
        fw.Replica(weights(51), served) as other,
    ):
        updated(threads, publisher, replica, 1)
        has_begun, may_go_on = threading.Event(), threading.Event()

        def wait():
            has_begun.set()
            assert may_go_on.wait(LIMIT)

        with monkeypatch.context() as patch:
            call_before(patch, MemorySink, "receive", wait)
            assign(model, 2)
            future = threads.submit(updated, threads, publisher, replica, 2)
            assert has_begun.wait(LIMIT)
            with pytest.raises(TransferTimeout):
                other.update(timeout_seconds=0.2)
            following = threads.submit(other.update, timeout_seconds=LIMIT)
            may_go_on.set()
            future.result(LIMIT)
        assert following.result(LIMIT).version == 2


def test_a_reader_that_stays_too_long_is_given_up_and_delays_no_update(address, served, threads):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served, withdraw_seconds=0.6) as replica,
    ):
        updated(threads, publisher, replica, 1)
        with FakeReplica(served) as reader:
            reader.join()
            reader.say(messages.Ask(1, None, None))
            begin = reader.hear_of(messages.Begin)
            assign(model, 2)
            report, _ = updated(threads, publisher, replica, 2)
            assert report.seconds >= 0.3
            abort = reader.hear_of(messages.Abort, messages.Commit)
            assert (abort.round, abort.kind) == (begin.round, "TransferTimeout")
        assert holds(engine, 2)


def test_an_update_that_wrote_nothing_leaves_its_version_served(address, served, threads):
    model, engine = weights(1), weights(50)

    def refuse(version):
        raise RuntimeError("not now")

    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served) as replica,
    ):
        updated(threads, publisher, replica, 1)
        assign(model, 2)
        future = threads.submit(replica.update, timeout_seconds=LIMIT, before=refuse)
        publisher.publish(2, num_replicas=1)
        with pytest.raises(RuntimeError):
            future.result(LIMIT)
        other = weights(51)
        with fw.Replica(other, served) as late:
            assert late.update(timeout_seconds=LIMIT).version == 1
        assert holds(other, 1)


def test_nothing_is_served_after_a_failed_update_or_once_it_is_forgotten(
    address, served, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served) as replica,
        fw.Replica(weights(51), served) as other,
    ):
        updated(threads, publisher, replica, 1)
        replica.forget("its memory was released")
        with pytest.raises(TransferTimeout):
            other.update(timeout_seconds=0.2)
        updated(threads, publisher, replica, 2)
        with monkeypatch.context() as patch:

            def fail():
                raise OSError("no device")

            call_before(patch, MemorySink, "finish", fail)
            future = threads.submit(replica.update, timeout_seconds=LIMIT)
            publisher.publish(3, num_replicas=1)
            with pytest.raises(OSError, match="no device"):
                future.result(LIMIT)
        assert is_failed(replica)
        with pytest.raises(TransferTimeout):
            other.update(timeout_seconds=0.2)
        updated(threads, publisher, replica, 4)
        assert other.update(timeout_seconds=LIMIT).version == 4


@pytest.mark.parametrize("version", [5, 3], ids=["same number", "lower number"])
def test_versions_of_a_trainer_that_was_restarted_are_others_down_the_chain(
    address, served, threads, version
):
    engine, last = weights(50), weights(51)
    with fw.Replica(engine, address, serve_on=served) as replica, fw.Replica(last, served) as other:
        with fw.Publisher(weights(1), address) as publisher:
            updated(threads, publisher, replica, 5)
        assert other.update(timeout_seconds=LIMIT).version == 5
        assert holds(last, 1)
        with fw.Publisher(weights(2), address) as publisher:
            updated(threads, publisher, replica, version)
        assert other.update(may_keep=True, timeout_seconds=LIMIT).version == version
        assert holds(last, 2)


def test_replaced_tensors_are_served_where_they_lie_now(address, served, threads):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served) as replica,
    ):
        updated(threads, publisher, replica, 1)
        engine.update(weights(60))
        assign(model, 2)
        updated(threads, publisher, replica, 2)
        other = weights(51)
        with fw.Replica(other, served) as late:
            assert late.update(timeout_seconds=LIMIT).version == 2
        assert holds(other, 2)


def test_what_cannot_be_served_is_refused_with_the_reason(address, served, tmp_path):
    def load(named):
        pass

    keys = CurveKeys.make()
    cases = [
        (load, {"framework": "numpy"}, "loader"),
        ({"w": np.ones(3)}, {"rank": 0, "num_ranks": 2, "name": "two"}, "one rank"),
        ({"w": fw.Sharded(np.ones(3), (6,), (0,))}, {}, "parts"),
        ({"w": np.ones(3)}, {"serve_on": "tcp://127.0.0.1:0"}, "token"),
        (
            {"w": np.ones(3)},
            {"serve_on": "tcp://127.0.0.1:0", "curve": CurveClient(keys.public), "token": "t"},
            "encrypt",
        ),
        ({"w": np.ones(3)}, {"withdraw_seconds": -1}, "withdraw_seconds"),
    ]
    for target, options, reason in cases:
        with pytest.raises(SpecError, match=reason):
            fw.Replica(target, address, **{"serve_on": served, **options})
    with (
        fw.Publisher(weights(1), served),
        pytest.raises(TransportError, match="another publisher"),
    ):
        fw.Replica(weights(1), address, serve_on=served)


def test_a_replica_leaves_nothing_behind_that_it_served_with(address, served, threads):
    before = resources()
    with fw.Publisher(weights(1), address) as publisher:
        with fw.Replica(weights(50), address, serve_on=served) as replica:
            updated(threads, publisher, replica, 1)
            with fw.Replica(weights(51), served) as other:
                other.update(timeout_seconds=LIMIT)
        fw.Publisher(weights(1), served).close()
    assert settled(before) == before


@pytest.mark.parametrize("is_there", [False, True], ids=["no trainer", "a trainer"])
def test_a_replica_that_cannot_be_made_leaves_nothing_behind(address, served, is_there):
    before, engine = resources(), weights(50)
    frozen = {name: each.view() for name, each in engine.items()}
    for each in frozen.values():
        each.flags.writeable = False
    with ExitStack() as stack:
        if is_there:
            stack.enter_context(fw.Publisher(weights(1), address))
        for _ in range(2):  # the address is free again
            with pytest.raises(SpecError, match="read-only"):
                fw.Replica(frozen, address, serve_on=served)
    assert settled(before) == before


def test_an_address_that_is_lost_costs_no_update(address, served, threads, tmp_path):
    """It must be claimed anew for each trainer, and meanwhile others may enter its directory."""
    engine, told = weights(50), []
    with (
        listening(lambda event: told.append(event.kind)),
        fw.Replica(engine, address, serve_on=served) as replica,
    ):
        with fw.Publisher(weights(1), address) as publisher:
            updated(threads, publisher, replica, 1)
        assert "serving.failed" not in told
        (tmp_path / "served").chmod(0o755)
        with fw.Publisher(weights(2), address) as publisher:
            updated(threads, publisher, replica, 1)
        assert holds(engine, 2)
        assert "serving.failed" in told
        (tmp_path / "served").chmod(0o700)
        with fw.Publisher(weights(3), address) as publisher:
            updated(threads, publisher, replica, 1)
        other = weights(51)
        with fw.Replica(other, served) as late:
            late.update(timeout_seconds=LIMIT)
        assert holds(other, 3)


def trainer(address, version, pipe):
    with fw.Publisher(weights(version), address) as publisher:
        publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
        pipe.send(("published", None))
        pipe.recv()


def engine_of(address, served, pipe):
    """Take a version, serve it, and follow the trainer until it is killed."""
    engine = weights(50)
    with fw.Replica(engine, address, serve_on=served) as replica:
        replica.update(timeout_seconds=LIMIT)
        pipe.send(("serving", None))
        pipe.recv()


def test_a_version_outlives_its_trainer_in_the_engines_that_hold_it(address, served):
    with Child(engine_of, address, served) as holder:
        with Child(trainer, address, 4) as first:
            assert first.told() == ("published", None)
            assert holder.told() == ("serving", None)
            first.kill()
        engine = weights(51)
        with fw.Replica(engine, served) as late:
            assert late.update(timeout_seconds=LIMIT).version == 4
            assert holds(engine, 4)
            holder.kill()
            until(lambda: not late.is_connected)
            assert (late.version, late.state) == (4, "ready")
