"""Faults on purpose: real processes, real SIGKILL, at every step of a round, on either side.

After each, the survivor has a named error within its deadline, and holds the old version whole
or says that it holds none.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

import flyweight as fw
from conftest import in_own_mounts
from flyweight.errors import (
    DigestMismatch,
    HandleGone,
    PeerLost,
    PeerRefused,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.live.copies import PreparedCopies
from live_models import Child, assign, holding, holds, in_time, resources, settled, until, weights
from peers import FakeReplica

BUCKETS = {"bucket_bytes": 32768, "depth": 2}


def kill_at(step):
    """Kill this process at a step: before or after its nth message, or within its nth copies."""
    kind, number = step
    sent = copied = 0
    send, run = Connection.send, PreparedCopies.run

    def counted_send(self, message, to=b""):
        nonlocal sent
        if isinstance(message, messages.Tick):
            return send(self, message, to)
        if kind == "before" and sent == number:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, message, to)
        if kind == "after" and sent == number:
            time.sleep(0.05)  # let it go out
            os.kill(os.getpid(), signal.SIGKILL)
        sent += 1
        return None

    def counted_run(self, digests, *args):
        nonlocal copied
        if kind == "copy" and copied == number:
            half, self._chunks = self._chunks, self._chunks[: len(self._chunks) // 2]
            run(self, [None] * len(digests), *args)
            self._chunks = half
            os.kill(os.getpid(), signal.SIGKILL)
        copied += 1
        return run(self, digests, *args)

    Connection.send, PreparedCopies.run = counted_send, counted_run


def replica_that_dies(address, step, pipe):
    kill_at(step)
    replica = fw.Replica(weights(50), address, name="victim")
    replica.update(timeout_seconds=10)
    replica.update(timeout_seconds=10)
    return replica.version


REPLICA_STEPS = [
    *(("before", n) for n in range(1, 14)),
    *(("after", n) for n in (0, 2, 3, 5, 12)),
    *(("copy", n) for n in (0, 3, 10)),
]


@pytest.mark.parametrize("hold", [False, True])
def test_a_replica_killed_at_any_step_harms_nobody_else(tmp_path, hold):
    """The publisher names it, the other replica gets every version, and nothing is left behind."""
    model, engine = weights(1), weights(51)
    before = resources()
    num_died = 0
    for number, step in enumerate(REPLICA_STEPS):
        address = f"unix:{tmp_path}/p{number}"
        with (
            Child(replica_that_dies, address, step) as victim,
            ThreadPoolExecutor(1) as pool,
            fw.Publisher(model, address, hold=hold, timeout_seconds=8, **BUCKETS) as publisher,
            fw.Replica(engine, address, name="other") as replica,
        ):
            until(lambda: len(publisher.replicas) == 2 or victim.process.exitcode is not None)
            for version in (1, 2, 3):
                assign(model, version)
                future = pool.submit(replica.update, version, timeout_seconds=10)
                until(lambda: "other" in publisher.waiting)
                if victim.process.exitcode is None:
                    time.sleep(0.02)
                started = time.monotonic()
                report = publisher.publish(version)
                assert time.monotonic() - started < 4
                assert future.result(10).version == version
                assert holds(engine, version)
                for each in report.failed:
                    assert each.name == "victim"
                    assert isinstance(each.error, PeerLost), each.error
                    num_died += 1
    assert num_died > (2 if hold else 5)  # what is held takes fewer messages
    assert settled(before) == before


def publisher_that_dies(address, step, options, pipe):
    model = weights(1)
    publisher = fw.Publisher(model, address, **options)
    publisher.publish(1, num_replicas=1, timeout_seconds=10)
    pipe.recv()
    kill_at(step)
    assign(model, 2)
    publisher.publish(2, num_replicas=1, timeout_seconds=10)
    time.sleep(0.3)
    publisher.close()


PUBLISHER_STEPS = [
    *(("before", n) for n in (0, 1, 2, 5)),
    *(("after", n) for n in (0, 1, 2, 4)),
    *(("copy", n) for n in (0, 1, 4)),
]


@pytest.mark.parametrize("options", [BUCKETS, {"hold": True}], ids=["bucketed", "held"])
def test_a_publisher_killed_at_any_step_leaves_no_half_new_model(tmp_path, options):
    before = resources()
    outcomes = set()
    for number, step in enumerate(PUBLISHER_STEPS):
        address = f"unix:{tmp_path}/p{number}"
        engine = weights(50)
        with (
            Child(publisher_that_dies, address, step, options) as victim,
            fw.Replica(engine, address) as replica,
        ):
            replica.update(timeout_seconds=10)
            assert holds(engine, 1)
            victim.send("go on")
            started = time.monotonic()
            error = None
            try:
                replica.update(2, timeout_seconds=2)
            except (PeerLost, TransferTimeout, HandleGone) as caught:
                error = caught
            assert time.monotonic() - started < 5, step
            outcomes.add(replica.state if error else "committed")
            if replica.state == "ready":
                assert holding(engine, (1, 2)) == replica.version, step
            else:
                assert (replica.state, replica.version) == ("failed", None), step
                with pytest.raises(VersionError):
                    replica.check_servable()
            victim.kill()
            victim.join()
            # A publisher that comes back makes every replica whole again.
            with fw.Publisher(weights(3), address, hold=True) as publisher:
                publisher.publish(3)
                assert replica.update(3, timeout_seconds=10).version == 3
                assert holds(engine, 3)
    assert "ready" in outcomes
    if options == BUCKETS:
        assert "failed" in outcomes
    else:
        assert "failed" not in outcomes  # what is held outlives its publisher
        assert "committed" in outcomes
    assert settled(before) == before


def replica_that_stops(address, number, pipe):
    """Stop in the middle of a round, before the nth bucket is given back."""
    send, count = Connection.send, 0

    def stopping(self, message, to=b""):
        nonlocal count
        if isinstance(message, messages.Emptied):
            if count == number:
                os.kill(os.getpid(), signal.SIGSTOP)
            count += 1
        send(self, message, to)

    Connection.send = stopping
    engine = weights(50)
    replica = fw.Replica(engine, address, name="stopped")
    try:
        replica.update(timeout_seconds=5)
    except fw.FlyweightError as error:
        return type(error).__name__, replica.state, replica.version
    return "committed", replica.state, replica.version


@pytest.mark.parametrize("number", [0, 2])
def test_a_replica_that_never_acknowledges_stalls_nobody_beyond_its_deadline(address, number):
    model, engine = weights(1), weights(51)
    with (
        Child(replica_that_stops, address, number) as stopped,
        ThreadPoolExecutor(1) as pool,
        fw.Publisher(model, address, **BUCKETS) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        future = pool.submit(replica.update, timeout_seconds=10)
        until(lambda: len(publisher.waiting) == 2)
        with in_time(3):
            report = publisher.publish(1, num_replicas=2, timeout_seconds=3)
        assert future.result(10).version == 1
        assert holds(engine, 1)
        (failed,) = report.failed
        assert failed.name == "stopped"
        assert isinstance(failed.error, TransferTimeout)
        assert "'stopped' has not emptied bucket" in str(failed.error)
        assign(model, 2)  # the next publish has all its slots
        future = pool.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(2, num_replicas=1).failed == ()
        future.result(10)
        assert holds(engine, 2)
        stopped.kill(signal.SIGCONT)
        error, state, version = stopped.result()
        assert (state, version) == ("failed", None)
        assert error in ("TransferTimeout", "PeerLost")


# Addresses and tokens.


def test_two_publishers_do_not_share_an_address(address):
    with (
        fw.Publisher(weights(1), address),
        pytest.raises(TransportError, match="another publisher is at"),
    ):
        fw.Publisher(weights(1), address)
    fw.Publisher(weights(1), address).close()


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(SpecError, match=r"with mode 755.*chmod\s+700"):
        fw.Publisher(weights(1), f"unix:{tmp_path}/open")
    with pytest.raises(SpecError, match="with mode 755"):
        fw.Replica(weights(1), f"unix:{tmp_path}/open")
    (tmp_path / "file").touch()
    with pytest.raises((SpecError, TransportError), match="file"):
        fw.Publisher(weights(1), f"unix:{tmp_path}/file")


def test_what_a_publisher_makes_is_for_its_user_only(address, tmp_path):
    with fw.Publisher(weights(1), address):
        assert os.stat(tmp_path / "policy").st_mode & 0o777 == 0o700
        assert os.stat(tmp_path / "policy" / "token").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "run/policy", "tcp://1.2.3.4:5", "unix:", "http:x"])
def test_an_address_of_another_form_is_refused(text):
    with pytest.raises(SpecError, match="is not of the form 'unix:DIRECTORY'"):
        fw.Replica(weights(1), text)


def test_a_directory_too_deep_for_a_socket_is_refused_with_its_length(tmp_path):
    with pytest.raises(TransportError, match=r"has 1\d\d bytes, at most 107"):
        fw.Publisher(weights(1), f"unix:{tmp_path}/{'x' * 100}")


def test_a_wrong_token_is_refused_by_name(address, tmp_path):
    with fw.Publisher(weights(1), address) as publisher:
        with pytest.raises(PeerRefused, match="token"):
            fw.Replica(weights(1), address, token="guess")
        with FakeReplica(address) as peer:  # and by the control channel itself
            peer.say(messages.Hello("guess", "me", 1))
            answer = peer.hear()
            assert isinstance(answer, messages.Refusal)
            assert answer.kind == "PeerRefused"
        assert publisher.replicas == []
    with fw.Publisher(weights(1), address, token="ours"):
        assert not (tmp_path / "policy" / "token").exists()
        fw.Replica(weights(1), address, token="ours").close()


# Messages.


def garbage():
    hello = messages.encode(messages.Hello("x", "y", 1))
    body = msgspec.msgpack.encode
    return {
        "empty": b"",
        "mark only": b"fw",
        "no message": b"fw\x01",
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "zeros": bytes(1000),
        "cut short": hello[:-3],
        "more after it": hello + b"\0",
        "another type": b"fw\x01" + body({"type": "Hello", "token": 1, "name": "", "pid": ""}),
        "unknown message": b"fw\x01" + body({"type": "Exec", "code": "1"}),
        "unknown field": b"fw\x01" + body({"type": "Tick", "more": 1}),
        "a publisher's": messages.encode(messages.Commit(1, ())),
        "deep": b"fw\x01" + b"\x91" * 100000,
        "numbers": b"fw\x01" + body({"type": "Emptied", "round": 2**70 % 2**63, "bucket": -5}),
    }


@pytest.mark.parametrize("name", garbage())
def test_garbage_is_answered_or_ignored_and_harms_nobody(address, name):
    model, engine = weights(1), weights(2)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address) as replica,
        FakeReplica(address) as peer,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(3):
            peer.send(garbage()[name])
        peer.send(b"a", b"b", garbage()[name])
        peer.say(messages.Want((), (), True))
        assert isinstance(peer.hear(), messages.Refusal)
        future = pool.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(1, num_replicas=1).failed == ()
        future.result(10)
        assert holds(engine, 1)


def test_another_protocol_is_refused_with_both_numbers(address):
    frame = bytearray(messages.encode(messages.Hello("x", "y", 1)))
    frame[2] = 77
    with fw.Publisher(weights(1), address), FakeReplica(address) as peer:
        peer.send(bytes(frame))
        answer = peer.hear()
        assert answer.kind == "PeerRefused"
        ours = f"this one {messages.PROTOCOL}; install the"
        assert answer.text.startswith(f"the other side speaks protocol 77, {ours}")


def welcomed(peer):
    peer.say(messages.Hello(peer.token, "raw", os.getpid()))
    answer = peer.hear()
    assert isinstance(answer, messages.Welcome)
    return answer


ABSURD_WANTS = {
    "no such tensor": lambda t: ((), (messages.Block(3, (0,), (1,)),)),
    "negative": lambda t: ((t,), (messages.Block(0, (-1, 0), (1, 1)),)),
    "outside": lambda t: ((t,), (messages.Block(0, (0, 0), (10**6, 1)),)),
    "other dims": lambda t: ((t,), (messages.Block(0, (0,), (1,)),)),
    "huge": lambda t: ((messages.Tensor(t.name, t.dtype, (2**62, 2**62)),), ()),
    "dtype": lambda t: ((messages.Tensor(t.name, "f99", t.shape),), ()),
    "name": lambda t: ((messages.Tensor("\0" * 9999, t.dtype, t.shape),), ()),
}


@pytest.mark.parametrize("kind", ABSURD_WANTS)
def test_an_absurd_want_is_refused(address, kind):
    with fw.Publisher({"w": np.zeros((4, 4))}, address) as publisher, FakeReplica(address) as peer:
        welcome = welcomed(peer)
        tensors, blocks = ABSURD_WANTS[kind](welcome.tensors[0])
        peer.say(messages.Want(tensors, blocks, True))
        assert isinstance(peer.hear(), messages.Refusal)
        until(lambda: publisher.replicas == [])


def test_a_replica_that_lies_about_its_digests_is_not_committed(address):
    with fw.Publisher({"w": np.zeros((4, 4))}, address) as publisher, FakeReplica(address) as peer:
        welcome = welcomed(peer)
        peer.say(messages.Want(welcome.tensors, (messages.Block(0, (0, 0), (4, 4)),), False))
        assert isinstance(peer.hear(), messages.Agreed)
        peer.say(messages.Ask(1, None, None))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(publisher.publish, 1, num_replicas=1)
            begin = peer.hear()
            assert isinstance(begin, messages.Begin)
            peer.say(messages.Done(begin.round, (123,), 0.0, 0.0))
            while not isinstance(answer := peer.hear(), (messages.Abort, messages.Commit)):
                pass
            assert (type(answer), answer.kind) == (messages.Abort, "DigestMismatch")
            assert future.result(10).failed


def alone_on_one_core():
    """Share the same core with whoever calls this too."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def spin(pipe):
    alone_on_one_core()
    while True:
        pass


def replica_that_hears_late(address, pipe):
    """The thread that reads its messages hardly ever gets to run."""
    alone_on_one_core()
    pipe.recv()
    engine = weights(50)
    with fw.Replica(engine, address) as replica:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/comm") as file:
                if file.read().startswith("ZMQbg/IO"):
                    os.setpriority(os.PRIO_PROCESS, int(task), 19)
        pipe.send(("told", "here"))
        replica.update(timeout_seconds=20)
        return replica.version, replica.state, holding(engine, (1,))


def publisher_that_goes_with_its_last_word(address, pipe):
    """Its replica stands still from before the commit until this process is gone."""
    publisher = fw.Publisher(weights(1), address)
    pipe.send(("told", "here"))
    replica, send = pipe.recv(), Connection.send

    def sending(self, message, to=b""):
        if isinstance(message, messages.Commit):
            os.kill(replica, signal.SIGSTOP)
        send(self, message, to)

    Connection.send = sending
    publisher.publish(1, num_replicas=1, timeout_seconds=20)
    time.sleep(0.2)  # let it go out
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_publisher_said_before_it_went_still_counts(tmp_path):
    """The door tells of its end at once, its last messages may still be on their way."""
    for number in range(5):
        address = f"unix:{tmp_path}/p{number}"
        with (
            Child(replica_that_hears_late, address) as replica,
            Child(publisher_that_goes_with_its_last_word, address) as publisher,
            Child(spin),
        ):
            publisher.told()
            replica.send("there is a publisher")
            replica.told()
            publisher.send(replica.pid)
            assert publisher.join() == -signal.SIGKILL
            replica.kill(signal.SIGCONT)
            assert replica.result() == (1, "ready", 1)


def publisher_that_lies(address, change, pipe):
    """A publisher whose first message of a round is changed on its way."""
    send = Connection.send

    def lying(self, message, to=b""):
        if isinstance(message, messages.Begin):
            message = msgspec.structs.replace(message, **change(message))
        send(self, message, to)

    Connection.send = lying
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=10)


def first_place(begin, **changes):
    place = msgspec.structs.replace(begin.places[0], **changes)
    return {"places": (place, *begin.places[1:])}


def other_handle(begin, **changes):
    return first_place(begin, handle=msgspec.structs.replace(begin.places[0].handle, **changes))


LIES = {
    "segment that is gone": lambda b: other_handle(b, key="0123456789abcdef"),
    "beyond the segment": lambda b: other_handle(b, nbytes=1 << 40),
    "strides": lambda b: first_place(b, strides=(1 << 40, 1)),
    "negative start": lambda b: first_place(b, start=-(1 << 20)),
    "too few dims": lambda b: first_place(b, strides=(1,)),
    "a block less": lambda b: {"places": b.places[1:]},
    "bucket outside": lambda b: {
        "places": b.places[1:],
        "slots": {0: b.places[0].handle},
        "buckets": (messages.Bucket(0, 0, (messages.Piece(0, (0, 0), (1 << 20, 128), 0),)),),
    },
    "version": lambda b: {"version": -1},
    "digests": lambda b: {"digests": (1,) * len(b.digests)},
}


def test_sides_that_digest_in_two_ways_do_not_agree(address):
    engine = weights(50)
    with Child(publisher_that_lies, address, lambda b: {"digest_kind": "words"}) as child:
        with fw.Replica(engine, address) as replica:
            with pytest.raises(DigestMismatch):
                replica.update(timeout_seconds=10)
            assert replica.state == "failed"
        child.result()


@pytest.mark.parametrize("lie", LIES)
def test_a_publisher_that_lies_cannot_make_a_replica_read_or_serve_what_it_should_not(address, lie):
    engine = weights(50)
    with Child(publisher_that_lies, address, LIES[lie]) as child:
        with fw.Replica(engine, address) as replica:
            if lie == "digests":
                replica.update(timeout_seconds=10)  # the commit has the right ones
                assert holds(engine, 1)
            else:
                with pytest.raises(fw.FlyweightError):
                    replica.update(timeout_seconds=10)
                assert replica.state == "empty", "nothing was touched"
                assert holds(engine, 50)
        child.result()


def test_memory_that_runs_out_is_an_error_of_the_publish_by_name(address, monkeypatch):
    monkeypatch.setattr("flyweight.transports.shared_memory.available_bytes", lambda: 1000)
    engine = weights(2)
    with (
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(engine, address) as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(replica.update, timeout_seconds=3)
        with pytest.raises(TransportError, match="bytes of shared memory: 1000 bytes of memory"):
            publisher.publish(1, num_replicas=1)
        monkeypatch.undo()
        assert publisher.publish(1, num_replicas=1).failed == ()
        future.result(10)
        assert holds(engine, 1)


FULL_SHM = """
import os, sys, threading
import numpy as np
import flyweight as fw

with open("/dev/shm/filler", "wb") as file:
    try:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as error:
        print("full:", error.strerror)
model, engine = {"w": np.arange(1 << 20)}, {"w": np.zeros(1 << 20, np.int64)}
with fw.Publisher(model, sys.argv[1]) as publisher, fw.Replica(engine, sys.argv[1]) as replica:
    waiting = threading.Thread(target=replica.update)
    waiting.start()
    assert publisher.publish(1, num_replicas=1, timeout_seconds=20).failed == ()
    waiting.join(20)
    assert replica.version == 1
assert (model["w"] == engine["w"]).all()
print("arrived")
"""


def test_a_full_dev_shm_does_not_matter(address):
    """Segments are not files of /dev/shm; the child's is a real one of 1 MiB, and full."""
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    done = in_own_mounts(mount, FULL_SHM, address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "full: No space left on device\narrived\n"


def fork_and_die(address, pipe):
    publisher = fw.Publisher(weights(1), address)
    with Child(sleeping) as child:
        pipe.send(("child", child.pid))
        pipe.recv()
        assert publisher.replicas
        os.kill(os.getpid(), signal.SIGKILL)


def sleeping(pipe):
    signal.pause()


def test_a_child_that_a_trainer_forked_does_not_hide_the_trainers_death(address):
    with Child(fork_and_die, address) as trainer:
        _, grandchild = trainer.told()
        try:
            with fw.Replica(weights(2), address) as replica, ThreadPoolExecutor(1) as pool:
                future = pool.submit(replica.update, timeout_seconds=4)
                trainer.send("die")
                trainer.join()
                until(lambda: not replica.is_connected, 2)
                # and its address is free
                with fw.Publisher(weights(3), address) as publisher:
                    publisher.publish(1, num_replicas=1)
                    assert future.result(10).version == 1
        finally:
            os.kill(grandchild, signal.SIGKILL)
