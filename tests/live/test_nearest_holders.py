"""Replicas that take a version from another one that holds it, because that is nearer, or there."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import SpecError, TransferTimeout
from flyweight.host import identity
from flyweight.live import messages
from flyweight.live.curve_keys import CurveClient, CurveKeys, CurveServer
from flyweight.live.holders import MAX_ADDRESS_CHARS, MAX_ADDRESSES, addresses_elsewhere
from flyweight.live.member import Member
from live_rounds import asking, updated
from peers import FakeReplica
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


@pytest.fixture
def served(tmp_path):
    """Where a replica of this test serves."""
    return f"unix:{tmp_path}/served"


@pytest.fixture(autouse=True)
def patient_with_peers(monkeypatch):
    """Give another replica as long as it needs to begin a round."""
    monkeypatch.setattr("flyweight.live.reconnect._PEER_SECONDS", 2 * LIMIT)


@contextmanager
def held(address, served, threads, version=4, **options):
    """A trainer that has stepped on since it published a version, and a replica that serves it."""
    model, engine = weights(version), weights(50)
    with (
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address, serve_on=served) as holder,
    ):
        updated(threads, publisher, holder, version)
        assign(model, 99)
        yield publisher, holder


def claim_to_hold(fake, publisher, served):
    """Let a replica of ours say that it serves version 4."""
    fake.join(host=identity(), serves_at=served)
    fake.say(messages.Ask(1, None, 4))
    asking(publisher)
    fake.say(messages.Withdraw(1))
    until(lambda: not publisher.waiting)


def test_a_late_replica_is_sent_to_one_that_holds_the_version(address, served, threads):
    engine = weights(51)
    with (
        held(address, served, threads) as (publisher, holder),
        fw.Replica(engine, address, name="late") as late,
    ):
        report = late.update(timeout_seconds=LIMIT)
        assert (report.version, late.session) == (4, holder.session)
        assert holds(engine, 4)
        # It goes back to the trainer, which knows what it holds, and follows it.
        assert late.update(may_keep=True, timeout_seconds=LIMIT) is report
        assert publisher.replicas[-1] == "late"
        updated(threads, publisher, late, 99)
        assert holds(engine, 99)


def test_one_that_took_the_version_elsewhere_holds_it_too(address, served, tmp_path, threads):
    last = weights(52)
    with (
        held(address, served, threads) as (_, holder),
        fw.Replica(weights(51), address, serve_on=f"unix:{tmp_path}/second") as second,
    ):
        second.update(timeout_seconds=LIMIT)
        second.update(may_keep=True, timeout_seconds=LIMIT)  # tells the trainer what it holds
        holder.close()
        with fw.Replica(last, address) as late:
            assert late.update(timeout_seconds=LIMIT).version == 4
        assert holds(last, 4)


def test_the_exact_version_comes_from_there_and_another_one_is_waited_for(address, served, threads):
    engine = weights(51)
    with held(address, served, threads) as (publisher, _), fw.Replica(engine, address) as late:
        assert late.update(4, timeout_seconds=LIMIT).version == 4
        assert holds(engine, 4)
        future = threads.submit(late.update, 99, timeout_seconds=LIMIT)
        asking(publisher)
        publisher.publish(99)
        assert future.result(LIMIT).version == 99


def test_a_trainer_that_has_the_version_gives_it_to_its_own_host(address, served, threads):
    with held(address, served, threads, hold=True) as (_, holder):
        with fw.Replica(weights(51), address) as late:
            assert late.update(timeout_seconds=LIMIT).origin == "held"
        assert holder.is_connected


def test_a_holder_that_is_gone_costs_a_moment_and_the_next_publish_is_waited_for(
    address, served, threads, monkeypatch
):
    engine = weights(51)
    monkeypatch.setattr("flyweight.live.reconnect._PEER_SECONDS", 0.5)
    with (
        fw.Publisher(weights(4), address, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as fake,
        fw.Replica(engine, address) as late,
    ):
        publisher.publish(4)
        claim_to_hold(fake, publisher, served)
        future = threads.submit(late.update, timeout_seconds=LIMIT)
        asking(publisher)
        assert not future.done()
        publisher.publish(5)
        assert future.result(LIMIT).version == 5


def test_a_replica_without_its_trainer_takes_what_others_hold(
    address, served, threads, monkeypatch
):
    monkeypatch.setattr("flyweight.live.reconnect._ABSENT_SECONDS", 0.1)
    engine, other = weights(51), weights(52)
    with held(address, served, threads) as (publisher, _):
        late = fw.Replica(engine, address)
        late.update(timeout_seconds=LIMIT)
        publisher.close()
        late.forget("its memory was released")
        assert late.update(timeout_seconds=LIMIT).version == 4  # from the one that was named last
        assert holds(engine, 4)
        late.close()
        with fw.Replica(other, address, peers=["unix:/nowhere", served]) as named:
            assert named.update(timeout_seconds=LIMIT).version == 4
            assert holds(other, 4)
            with pytest.raises(TransferTimeout):  # nobody has more
                named.update(timeout_seconds=0.2)
            assert (named.version, named.state) == (4, "ready")


def test_what_a_stranger_serves_is_not_taken_for_the_trainers_version(address, served, threads):
    """Another job serves where a holder did, with the same number and the same tensors."""
    engine = weights(51)
    with (
        fw.Publisher(weights(4), address, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as fake,
        fw.Publisher(weights(7), served) as stranger,
        fw.Replica(engine, address) as late,
    ):
        stranger.publish(4, stays=True)
        publisher.publish(4)
        claim_to_hold(fake, publisher, served)
        with pytest.raises(TransferTimeout):
            late.update(timeout_seconds=0.4)
        assert late.version is None
        until(lambda: not publisher.waiting)
        updated(threads, publisher, late, 5)
        assert holds(engine, 4)


def test_an_engine_with_a_loader_is_sent_there_too(address, served, threads):
    taken = {}

    def load(named):
        taken.update((name, array.copy()) for name, array in named)

    with (
        held(address, served, threads) as (publisher, _),
        fw.Replica(load, address, framework="numpy") as late,
    ):
        assert late.update(timeout_seconds=LIMIT).version == 4
        assert holds(taken, 4)
        updated(threads, publisher, late, 99)
        assert holds(taken, 99)


def lacking(model):
    """A model without one of the tensors."""
    del model["w3"]
    return model


def tied(model):
    """A model that has two equal tensors of the trainer as one."""
    return {**model, "w3": model["w0"]}


@pytest.mark.parametrize("change", [lacking, tied])
@pytest.mark.parametrize("is_gone", [False, True], ids=["sent there", "trainer gone"])
def test_a_loader_takes_nothing_from_a_replica_that_lacks_tensors_of_the_trainer(
    address, served, threads, change, is_gone
):
    model, taken = {f"w{n}": np.full(9, n % 3) for n in range(4)}, {}

    def load(named):
        taken.update((name, array.copy()) for name, array in named)

    engine = change({f"w{n}": np.zeros(9, int) for n in range(4)})
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, serve_on=served, extra="report") as holder,
        fw.Replica(load, address, framework="numpy", peers=[served]) as late,
    ):
        updated(threads, publisher, holder, 4)
        if is_gone:
            publisher.close()
            until(lambda: not late.is_connected)
        with pytest.raises(TransferTimeout):
            late.update(timeout_seconds=0.6)  # half of it for the trainer, half for the holder
        assert (late.version, taken) == (None, {})
        if not is_gone:
            until(lambda: not publisher.waiting)
            updated(threads, publisher, late, 5)
            assert list(taken) == list(model)


def test_a_loader_takes_nothing_of_a_trainer_that_it_has_never_joined(
    address, served, threads, monkeypatch
):
    """Nobody has said which tensors that trainer had."""
    monkeypatch.setattr("flyweight.live.reconnect._ABSENT_SECONDS", 0.1)
    taken = {}
    with (
        held(address, served, threads) as (publisher, _),
        fw.Replica(taken.update, f"{address}2", framework="numpy", peers=[served]) as late,
        fw.Replica(weights(51), f"{address}2", peers=[served]) as model,
    ):
        publisher.close()
        with pytest.raises(TransferTimeout):
            late.update(timeout_seconds=0.5)
        assert taken == {}
        assert model.update(timeout_seconds=LIMIT).version == 4


def test_a_loader_gets_the_trainers_order_from_a_replica_of_another_order(address, served, threads):
    names, taken = ["c", "a", "b"], []
    with (
        fw.Publisher({name: np.ones(3) for name in names}, address) as publisher,
        fw.Replica(
            {name: np.zeros(3) for name in sorted(names)}, address, serve_on=served
        ) as holder,
        fw.Replica(lambda named: taken.extend(dict(named)), address, framework="numpy") as late,
    ):
        updated(threads, publisher, holder, 4)
        assert late.update(timeout_seconds=LIMIT).version == 4
        assert taken == names


def test_peers_are_addresses_and_for_replicas_of_one_rank(address):
    for peers, options in [("unix:here", {}), ([7], {}), (["unix:a"], {"num_ranks": 2})]:
        with pytest.raises(SpecError):
            fw.Replica(weights(1), address, peers=peers, name="n", rank=0, **options)


def test_a_late_engine_with_keys_takes_the_version_from_its_own_host(served, threads, monkeypatch):
    keys, engine, model = CurveKeys.make(), weights(51), weights(4)
    how = {"token": "secret", "curve": CurveClient(keys.public)}
    with fw.Publisher(
        model, "tcp://127.0.0.1:0", token="secret", curve=CurveServer(keys)
    ) as publisher:
        monkeypatch.setenv("FLYWEIGHT_HOST", "far-away")
        with fw.Replica(weights(50), publisher.address, serve_on=served, **how) as holder:
            updated(threads, publisher, holder, 4)
            assign(model, 99)
            with fw.Replica(engine, publisher.address, **how) as late:
                assert late.update(timeout_seconds=LIMIT).strategy != "network"
    assert holds(engine, 4)


def test_a_round_that_fails_there_is_not_tried_there_again(address, served, threads):
    engine, calls = weights(51), []

    def refuse(version):
        calls.append(version)
        raise RuntimeError("not now")

    with held(address, served, threads) as (publisher, _), fw.Replica(engine, address) as late:
        with pytest.raises(RuntimeError):
            late.update(timeout_seconds=LIMIT, before=refuse)
        assert calls == [4]
        future = threads.submit(late.update, timeout_seconds=LIMIT)
        asking(publisher)
        publisher.publish(99)
        assert future.result(LIMIT).version == 99


# Who is named, without processes.


def member(number, version, **hello):
    made = Member(bytes([number]), messages.Hello("", f"m{number}", number, **hello), 0.0)
    made.version = version
    return made


def elsewhere(members, *, request=None, only_near=False, is_remote=True, **hello):
    asker = member(200, None, host="a", **hello)
    asker.request = request or messages.Ask(1, None, None, may_be_elsewhere=True)
    options = {"only_near": only_near, "is_remote": is_remote}
    return addresses_elsewhere(asker, 5, [asker, *members], **options)


def test_the_nearest_come_first_and_only_those_that_can_be_reached():
    far = member(1, 5, host="b", serves_at="tcp://b:1")
    near = member(2, 5, host="a", serves_at="unix:/near")
    others = [
        member(3, 5, host="b", serves_at="unix:/far"),  # shared memory of another host
        member(4, 4, host="a", serves_at="unix:/old"),
        member(5, 5, host="a"),
        member(6, 5, host="a", serves_at="tcp://" + MAX_ADDRESS_CHARS * "x"),
    ]
    assert elsewhere([far, near, *others]) == ["unix:/near", "tcp://b:1"]
    assert elsewhere([far, near], only_near=True) == ["unix:/near"]
    assert elsewhere([far, near], only_near=True, is_remote=False) == []
    many = [member(n, 5, host="b", serves_at=f"tcp://b:{n}") for n in range(1, 99)]
    assert len(elsewhere(many)) == MAX_ADDRESSES


@pytest.mark.parametrize(
    "request_",
    [
        messages.Ask(1, None, None),  # it came back
        messages.Ask(1, 6, None, may_be_elsewhere=True),
        messages.Ask(1, None, 5, may_be_elsewhere=True),
    ],
    ids=["came back", "another version", "has it"],
)
def test_nobody_is_named_to_those_that_need_nobody(request_):
    near = member(2, 5, host="a", serves_at="unix:/near")
    assert elsewhere([near], request=request_) == []
    assert elsewhere([near], num_ranks=2) == []


def test_one_that_is_in_a_round_is_not_named():
    near = member(2, 5, host="a", serves_at="unix:/near")
    near.round = threading.Event()  # anything
    assert elsewhere([near]) == []
