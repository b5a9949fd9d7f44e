"""What goes wrong on one rank of an engine goes wrong for all, and for no other replica."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
from child_processes import Child, until
from flyweight.errors import (
    DigestMismatch,
    PeerLost,
    StoreError,
    TransferTimeout,
    VersionError,
)
from flyweight.live import messages, replica
from flyweight.live.connection import Connection
from flyweight.live.member import MemberRound
from flyweight.live.replica_connection import ReplicaConnection
from flyweight.live.replica_round import ReplicaRound
from flyweight.live.watch import watch
from flyweight.ranks.decision import RoundDecisions
from live_engines import LAYOUT, SECONDS, WHOLE, Engine, published, states
from live_rounds import moved_clock
from versioned_models import weights


def test_loaders_of_an_engine_load_after_all_have_drained(address, pool):
    loaded, has_first_drained, may_drain = [[], []], threading.Event(), threading.Event()
    model = {"w": WHOLE.copy()}
    with fw.Publisher(model, address) as publisher:
        ranks = [
            fw.Replica(
                lambda named, rank=rank: loaded[rank].extend((name, w.copy()) for name, w in named),
                address, name="loaders", rank=rank, num_ranks=2, framework="numpy",
            )
            for rank in range(2)
        ]  # fmt: skip
        first = pool.submit(
            ranks[0].update,
            timeout_seconds=SECONDS,
            before=lambda version: has_first_drained.set(),
        )
        second = pool.submit(
            ranks[1].update,
            timeout_seconds=SECONDS,
            before=lambda version: may_drain.wait(SECONDS),
        )
        publish = pool.submit(publisher.publish, 1, num_replicas=1)
        assert has_first_drained.wait(SECONDS)
        time.sleep(0.1)  # a rank that loads too soon does so now, unless the machine is slow
        assert loaded == [[], []]
        may_drain.set()
        assert publish.result(SECONDS).failed == ()
        assert first.result(SECONDS).version == second.result(SECONDS).version == 1
        for ((name, array),) in loaded:
            assert (name, array.tobytes()) == ("w", model["w"].tobytes())
        for each in ranks:
            each.close()


@pytest.mark.parametrize("moment", ["drained", "copied"])
def test_tensors_replaced_on_one_rank_leave_no_version_on_any(address, pool, moment, monkeypatch):
    """Memory that was replaced while other ranks drained is not written."""
    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher, Engine(address) as engine:
        published(publisher, engine, pool, 1)
        old = engine.halves[0]["w"]
        kept = old.copy()

        def replace():
            if engine.halves[0]["w"] is old:
                engine.halves[0]["w"] = np.zeros((3, 4))

        if moment == "drained":
            wait_write = ReplicaRound.wait_write

            def wait(self):
                if self.connection.rank == 0:  # which has looked at its tensors just now
                    replace()
                wait_write(self)

            monkeypatch.setattr(ReplicaRound, "wait_write", wait)
        else:
            original = fw.Replica._check_current

            def check(self, version):
                replace()
                original(self, version)

            monkeypatch.setattr(fw.Replica, "_check_current", check)
            monkeypatch.setattr(replica, "_RECHECK_SECONDS", 0.0)  # as in a long round
        report, errors = published(publisher, engine, pool, 2)
        assert [each.name for each in report.failed] == ["engine"]
        assert all("were replaced" in str(each) for each in errors)
        assert [each.state for each in engine.ranks] == ["failed", "failed"]
        if moment == "drained":
            assert old.tobytes() == kept.tobytes()
        monkeypatch.undo()
        published(publisher, engine, pool, 3)
        assert states(engine) == [("ready", 3)] * 2


class FixedStep(dict):
    """A model whose step cannot be set."""

    def __setitem__(self, key, value):
        raise OSError(f"{key} is fixed")


def rank_with_a_step(address, rank, kind, pipe):
    model = kind(w=np.zeros((3, 4)), step=0)
    with fw.Replica(
        model, address, name="engine", layout=LAYOUT, rank=rank, num_ranks=2
    ) as replica:
        try:
            replica.update(timeout_seconds=SECONDS)
            error = ""
        except Exception as failure:
            error = str(failure)
        return replica.state, replica.version, error


@pytest.mark.parametrize(
    "publisher_is", ["quick", pytest.param("slow", marks=pytest.mark.campaign)]
)
def test_a_value_that_one_rank_cannot_set_leaves_no_version_on_any(
    address, publisher_is, monkeypatch
):
    """Values are set before the commit, so a rank that fails to set one does not fail alone.

    A slow publisher learns that the rank's process is gone before it reads why the rank failed.
    """
    if publisher_is == "slow":
        receive = Connection._receive

        def late(self, **options):
            time.sleep(0.05)
            receive(self, **options)

        monkeypatch.setattr(Connection, "_receive", late)
    model = {"w": WHOLE.copy(), "step": 7}
    with (
        Child(rank_with_a_step, address, 0, dict) as first,
        Child(rank_with_a_step, address, 1, FixedStep) as second,
        fw.Publisher(model, address) as publisher,
    ):
        (failed,) = publisher.publish(1, num_replicas=1, timeout_seconds=SECONDS).failed
        assert failed.name == "engine"
        for each in (first, second):
            state, version, error = each.result()
            assert (state, version) == ("failed", None)
            assert "step is fixed" in error


@pytest.mark.parametrize(("verdict", "state"), [("write", "ready"), ("commit", "failed")])
def test_an_engine_whose_decisions_cannot_be_stored_fails_alone(address, pool, verdict, state):
    with (
        fw.Publisher({"w": WHOLE.copy()}, address) as publisher,
        Engine(address) as engine,
        fw.Replica({"w": np.zeros((6, 4))}, address) as other,
    ):
        published(publisher, engine, pool, 1)
        (made,) = Path(address.removeprefix("unix:")).glob("decisions-*")
        (made / verdict).unlink()
        update = pool.submit(other.update, timeout_seconds=SECONDS)
        updates = engine.update(pool)
        (failed,) = publisher.publish(2, num_replicas=2).failed
        assert failed.name == "engine"
        assert isinstance(failed.error, StoreError)
        assert "cannot decide round 2 of 'engine'" in str(failed.error)
        assert update.result(SECONDS).version == 2
        for each in updates:
            with pytest.raises(StoreError, match="cannot decide"):
                each.result(SECONDS)
        assert [each.state for each in engine.ranks] == [state] * 2


def test_ranks_that_cannot_be_decided_for_are_refused(address, monkeypatch):
    def full(self):
        raise StoreError(28, "No space left on device")

    monkeypatch.setattr(RoundDecisions, "_open", full)
    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher:
        with pytest.raises(StoreError, match="No space left"):
            Engine(address)
        with fw.Replica({"w": WHOLE.copy()}, address):
            until(lambda: publisher.replicas)


def test_a_rank_that_cannot_ask_for_the_decision_has_failed(address, pool, monkeypatch):
    is_waiting, send = threading.Event(), Connection.send

    def without_ends(self, message, to=b""):
        if isinstance(message, messages.Drained):
            is_waiting.set()
        if not isinstance(message, (messages.Abort, messages.Bye)):
            send(self, message, to)

    def broken(self, *asked):
        raise StoreError(5, "Input/output error")

    def slow(version):
        assert is_closed.wait(SECONDS)

    is_closed = threading.Event()
    publisher = fw.Publisher({"w": WHOLE.copy()}, address, timeout_seconds=0.3)
    with Engine(address) as engine:
        published(publisher, engine, pool, 1)
        first = pool.submit(engine.ranks[0].update, timeout_seconds=SECONDS)
        pool.submit(engine.ranks[1].update, timeout_seconds=SECONDS, before=slow)
        monkeypatch.setattr(Connection, "send", without_ends)
        publisher.publish(2, num_replicas=1, timeout_seconds=SECONDS, background=True)
        assert is_waiting.wait(SECONDS)
        monkeypatch.setattr(RoundDecisions, "decide", broken)
        publisher.close()
        is_closed.set()
        with pytest.raises(PeerLost):
            first.result(SECONDS)
        assert states(engine)[0] == ("failed", None)


def noted_decision(monkeypatch, proposal):
    """Return an event that is set once a rank has proposed this."""
    has_proposed, decide = threading.Event(), RoundDecisions.decide

    def noted(self, number, proposed):
        try:
            return decide(self, number, proposed)
        finally:
            if proposed == proposal:
                has_proposed.set()

    monkeypatch.setattr(RoundDecisions, "decide", noted)
    return has_proposed


def heard_in_rounds(monkeypatch):
    """Return a list to which the publisher adds what it hears: (rank, kind of message) each."""
    heard, receive = [], MemberRound.receive

    def noting(self, message):
        receive(self, message)
        heard.append((self.rank, type(message)))

    monkeypatch.setattr(MemberRound, "receive", noting)
    return heard


@pytest.mark.parametrize("loss", [TransferTimeout, PeerLost])
@pytest.mark.parametrize(
    ("awaited", "verdict", "state"),
    [("the permission to write", "keep", ("ready", 1)), ("a commit", "fail", ("failed", None))],
)
def test_what_a_rank_decides_that_gave_up_binds_one_that_hears_its_publisher_later(
    address, pool, monkeypatch, awaited, verdict, state, loss
):
    following = ReplicaConnection.next

    def late(self, deadline, what, **options):
        message = following(self, deadline, what, **options)
        if what == awaited and isinstance(message, (messages.Write, messages.Commit)):
            if self.rank == 1:
                raise loss("nothing came in time")
            assert has_given_up.wait(SECONDS)
        return message

    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher, Engine(address) as engine:
        published(publisher, engine, pool, 1)
        has_given_up = noted_decision(monkeypatch, verdict)
        monkeypatch.setattr(ReplicaConnection, "next", late)
        report, errors = published(publisher, engine, pool, 2)
        assert states(engine) == [state] * 2
        (failed,) = report.failed
        assert failed.is_touched == (verdict == "fail")
        for error in (failed.error, *errors):
            assert isinstance(error, loss)
            assert "nothing came in time" in str(error)
        monkeypatch.undo()
        assert published(publisher, engine, pool, 3)[0].failed == ()
        assert states(engine) == [("ready", 3)] * 2


def test_a_commit_that_one_rank_obeyed_binds_one_that_never_hears_it(address, pool, monkeypatch):
    following = ReplicaConnection.next

    def lost(self, deadline, what, **options):
        message = following(self, deadline, what, **options)
        if self.rank == 1 and isinstance(message, messages.Commit):
            assert is_stored.wait(SECONDS)
            raise PeerLost("the publisher is gone")
        return message

    is_stored = noted_decision(monkeypatch, "commit")
    monkeypatch.setattr(ReplicaConnection, "next", lost)
    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher, Engine(address) as engine:
        report, ends = published(publisher, engine, pool, 1)
        assert report.failed == ()
        assert [each.version for each in ends] == [1, 1]
        assert states(engine) == [("ready", 1)] * 2
        assert engine.weights.tobytes() == WHOLE.tobytes()


@pytest.mark.parametrize("num_altered", [1, 2])
def test_a_rank_never_obeys_a_commit_of_other_digests(address, pool, monkeypatch, num_altered):
    """If it is the only one, its publisher has lied to it. Others may have obeyed before."""
    following = ReplicaConnection.next

    def altered(self, deadline, what, **options):
        message = following(self, deadline, what, **options)
        is_altered = self.name == "engine" and self.rank < num_altered
        if isinstance(message, messages.Commit) and is_altered:
            if num_altered == 1:
                until(lambda: (1, messages.Committed) in heard)
            return messages.Commit(message.round, bytes(len(message.digests)))
        return message

    def slow(version):  # so that the round is not over when the rank says that it failed
        until(lambda: (0, messages.Fault) in heard)

    heard = heard_in_rounds(monkeypatch)
    monkeypatch.setattr(ReplicaConnection, "next", altered)
    with (
        fw.Publisher({"w": WHOLE.copy()}, address) as publisher,
        Engine(address) as engine,
        fw.Replica({"w": np.zeros((6, 4))}, address) as other,
    ):
        updates = engine.update(pool)
        pool.submit(other.update, timeout_seconds=SECONDS, before=slow)
        (failed,) = publisher.publish(1, num_replicas=2, timeout_seconds=SECONDS).failed
        assert failed.name == "engine"
        assert failed.is_touched
        assert isinstance(failed.error, DigestMismatch)
        errors = [each.exception(SECONDS) for each in updates]
        assert isinstance(errors[0], DigestMismatch)
        expected = ("failed", None) if num_altered == 2 else ("ready", 1)
        assert states(engine) == [("failed", None), expected]


def test_watchers_see_that_a_rank_cannot_serve_what_its_replica_committed(
    address, pool, monkeypatch
):
    checks = []

    def check(self, version):
        checks.append(self)
        if self is engine.ranks[1] and checks.count(self) == 2:  # once more after the commit
            until(publish.done)
            raise VersionError("tensors were replaced")

    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher, Engine(address) as engine:
        monkeypatch.setattr(fw.Replica, "_check_current", check)
        updates = engine.update(pool)
        publish = pool.submit(publisher.publish, 1, num_replicas=1)
        assert publish.result(SECONDS).failed == ()
        assert updates[0].result(SECONDS).version == 1
        assert isinstance(updates[1].exception(SECONDS), VersionError)
        for news in watch(address):
            found = {each.name: (each.state, each.version, each.error) for each in news.replicas}
            if found["engine/1"][0] != "ready":
                break
        assert found["engine/0"] == ("ready", 1, "")
        assert found["engine/1"] == ("failed", None, "tensors were replaced")


def test_an_interrupt_does_not_take_back_what_is_decided(address, pool, monkeypatch):
    following, interrupted = ReplicaConnection.next, []

    def interrupting(self, deadline, what, **options):
        message = following(self, deadline, what, **options)
        if what == "a commit" and self.rank == 0 and isinstance(message, messages.Commit):
            assert is_stored.wait(SECONDS)
            interrupted.append(True)
            raise KeyboardInterrupt
        return message

    is_stored = noted_decision(monkeypatch, "commit")
    monkeypatch.setattr(ReplicaConnection, "next", interrupting)
    with fw.Publisher({"w": WHOLE.copy()}, address) as publisher, Engine(address) as engine:
        _, ends = published(publisher, engine, pool, 1)
        assert isinstance(ends[0], KeyboardInterrupt)
        assert ends[1].version == 1
        assert interrupted == [True]
        assert states(engine) == [("ready", 1)] * 2
        assert engine.weights.tobytes() == WHOLE.tobytes()


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 4096, "depth": 1}], ids=["one", "many"])
def test_the_rank_that_does_not_drain_is_late_and_not_the_one_that_waits_for_it(
    address, pool, monkeypatch, options
):
    is_over, heard = threading.Event(), heard_in_rounds(monkeypatch)
    passed = moved_clock(monkeypatch)
    with (
        fw.Publisher(weights(1), address, **options) as publisher,
        fw.Replica(weights(50), address, name="engine", rank=0, num_ranks=2) as waiting,
        fw.Replica(weights(51), address, name="engine", rank=1, num_ranks=2) as late,
    ):
        first = pool.submit(waiting.update, timeout_seconds=SECONDS)
        second = pool.submit(
            late.update, timeout_seconds=SECONDS, before=lambda version: is_over.wait(SECONDS)
        )
        until(lambda: publisher.waiting)
        publish = pool.submit(publisher.publish, 1, timeout_seconds=SECONDS)
        until(lambda: (0, messages.Drained) in heard)
        passed[0] = 2 * SECONDS
        (failed,) = publish.result(SECONDS).failed
        is_over.set()
        text = "'engine', rank 1 is late"
        for error in (failed.error, first.exception(SECONDS), second.exception(SECONDS)):
            assert isinstance(error, TransferTimeout)
            assert text in str(error)
        assert waiting.state == late.state == "empty"
