"""`flyweight relay` as a user types it, between a trainer's process and engines."""

import json
import os
import signal
from concurrent.futures import TimeoutError as FutureTimeout

import ml_dtypes
import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child
from commands import flyweight, start
from flyweight.errors import FlyweightError, PlanError
from flyweight.live import Relay
from live.certificates import made_by_one_authority
from versioned_models import assign, holding, holds, weights


@pytest.fixture
def served(tmp_path):
    """Where the relay of this test serves."""
    return f"unix:{tmp_path}/host"


@pytest.fixture
def secret(tmp_path):
    """A file with the token of this test."""
    made = tmp_path / "token"
    made.write_text("secret")
    made.chmod(0o600)
    return made


def trainer(address, options, pipe):
    """Publish the version that each message names, to all who wait."""
    model = weights(0, 1 << 22)
    with fw.Publisher(model, address, **options) as publisher:
        pipe.send(("up", publisher.address))
        while (version := pipe.recv()) is not None:
            assign(model, version)
            report = publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
            pipe.send(("published", [each.error for each in report.failed]))


def engine(address, seconds, pipe):
    """Follow the versions at an address, and send each one: whole, or the error."""
    model = weights(50, 1 << 22)
    with fw.Replica(model, address) as replica:
        while True:
            try:
                report = replica.update(timeout_seconds=seconds)
            except FlyweightError as error:
                pipe.send(("error", type(error).__name__))
                continue
            taken = (report.version, report.transport, holds(model, report.version))
            pipe.send(("took", taken))


def event(relay, kind):
    """Return the next event of a kind that a relay prints."""
    while (said := json.loads(relay.line()))["event"] != kind:
        pass
    return said


def test_a_relay_serves_engines_by_shared_memory_and_outlives_its_trainer(address, served):
    relay_words = ("relay", address, "--on", served, "--name", "host-b", "--json")
    with start(*relay_words) as relay, Child(engine, served, 60) as first:
        with Child(trainer, address, {}) as source:
            assert source.told()[0] == "up"
            said = event(relay, "relay.serving")
            assert (said["address"], said["name"], said["num_tensors"]) == (served, "host-b", 7)
            for version in (3, 4):
                source.send(version)
                assert source.told() == ("published", [])
                assert event(relay, "update.done")["version"] == version
                assert first.told() == ("took", (version, "mapped", True))
            source.kill()
        with Child(engine, served, 60) as late:  # nobody publishes
            assert late.told() == ("took", (4, "mapped", True))
            with Child(trainer, address, {}) as source:  # restarted, with lower numbers
                source.send(1)
                assert source.told()[0] == "up"
                assert source.told() == ("published", [])
                assert first.told() == late.told() == ("took", (1, "mapped", True))
                source.send(None)
        _, errors = relay.end()
        assert (relay.process.returncode, errors) == (0, "")
    assert os.listdir(served.removeprefix("unix:")) == ["lock"]


@pytest.mark.check
def test_engines_whose_relay_is_killed_hold_one_whole_version_and_follow_the_next_relay(
    address, served
):
    with Child(trainer, address, {}) as source, Child(engine, served, 60) as follower:
        assert source.told()[0] == "up"
        with start("relay", address, "--on", served, "--json") as relay:
            event(relay, "relay.serving")
            source.send(1)
            assert source.told() == ("published", [])
            assert follower.told() == ("took", (1, "mapped", True))
            source.send(2)
            event(relay, "update.done")  # of version 1
            event(relay, "update.done")  # engines begin now
            relay.kill()
        source.told()
        with start("relay", address, "--on", served, "--json") as relay:
            event(relay, "relay.serving")
            source.send(3)
            assert source.told() == ("published", [])
            told = [follower.told()]
            while told[-1] != ("took", (3, "mapped", True)):
                assert told[-1] in [("took", (2, "mapped", True)), ("error", "PeerLost")]
                told.append(follower.told())
            relay.end(signal.SIGTERM)
            assert relay.process.returncode == 0


def test_a_relay_starts_anew_for_a_model_of_other_tensors(address, served):
    """Its dtypes need no framework, and values and tied names are passed on."""
    wide = np.arange(12, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 4)
    model = {"a": wide, "b": wide, "scale": np.array(2.0), "none": np.empty((0, 2)), "step": 7}
    with start("relay", address, "--on", served, "--json") as relay:
        with fw.Publisher(weights(1), address) as publisher:
            event(relay, "relay.serving")
            publisher.publish(5, num_replicas=1)
            assert event(relay, "update.done")["version"] == 5
        with fw.Publisher(model, address) as publisher:
            assert event(relay, "relay.serving")["num_tensors"] == 3
            publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT)
            assert event(relay, "update.done")["version"] == 2
        target = {name: np.zeros_like(model[name]) for name in ("a", "b", "scale", "none")}
        target["step"] = 0
        with fw.Replica(target, served) as replica:
            report = replica.update(timeout_seconds=LIMIT)
            assert (report.version, report.transport) == (2, "mapped")
        for name in ("a", "b", "scale"):
            assert target[name].tobytes() == model[name].tobytes()
        assert target["step"] == 7
        with pytest.raises(PlanError):  # an engine of the old model
            fw.Replica(weights(50), served)


@pytest.mark.check
def test_a_relay_of_another_host_reads_over_the_network_once(served, secret):
    with Child(trainer, "tcp://127.0.0.1:0", {"token": "secret"}) as source:
        address = source.told()[1]
        words = ("relay", address, "--on", served, "--token-file", secret, "--json")
        with start(*words, FLYWEIGHT_HOST="host-b") as relay:
            event(relay, "relay.serving")
            source.send(6)
            assert source.told() == ("published", [])
            event(relay, "update.done")
            engines = [weights(50 + n, 1 << 22) for n in range(2)]
            for each in engines:
                with fw.Replica(each, served, token="secret") as replica:
                    assert replica.update(timeout_seconds=LIMIT).transport == "mapped"
            assert [holding(each, [6]) for each in engines] == [6, 6]


def test_a_relay_encrypts_on_both_sides(tmp_path, secret):
    engine = weights(50)
    ours, authority = made_by_one_authority(tmp_path, "127.0.0.1")
    _, stranger = made_by_one_authority(tmp_path / "other", "127.0.0.1")
    tls = fw.Tls(certificate=ours, key=ours, authority=authority)
    with fw.Publisher(weights(3), "tcp://127.0.0.1:0", token="secret", tls=tls) as publisher:

        def words(signer):
            files = ("--tls-certificate", ours, "--tls-key", ours, "--tls-authority", signer)
            on = ("--on", "tcp://127.0.0.1:0", "--token-file", secret)
            return ("relay", publisher.address, *on, *files, "--json")

        with start(*words(authority), FLYWEIGHT_HOST="host-b") as relay:
            at = event(relay, "relay.serving")["address"]
            publisher.publish(3, num_replicas=1, timeout_seconds=LIMIT)
            assert event(relay, "update.done")["version"] == 3
            with fw.Replica(engine, at, token="secret", tls=tls) as replica:
                assert replica.update(timeout_seconds=LIMIT).version == 3
            assert holds(engine, 3)
        with start(*words(stranger), FLYWEIGHT_HOST="host-b") as relay:
            assert relay.join(LIMIT) == 7
            assert "tls" in relay.errors


def test_a_relay_needs_a_token_at_tcp_addresses_and_certificates_only_there(
    address, served, secret, tmp_path
):
    far = "tcp://127.0.0.1:9"
    _, authority = made_by_one_authority(tmp_path, "127.0.0.1")
    for words, remedy in [
        ((far, "--on", served), "--token-file"),
        ((address, "--on", far), "--token-file"),
        ((address, "--on", served, "--tls-authority", authority), "for tcp addresses"),
    ]:
        assert remedy in " ".join(flyweight("relay", *words, code=2).split())


def test_a_relay_takes_no_more_memory_than_it_may(address, served):
    with (
        fw.Publisher(weights(1), address) as publisher,
        start("relay", address, "--on", served, "--staging", "1K", "--json") as relay,
    ):
        event(relay, "relay.serving")
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT / 30)
        assert "1024" in event(relay, "update.failed")["error"]


def test_a_relay_whose_port_is_taken_ends(address, secret):
    token = secret.read_text()
    with (
        fw.Publisher(weights(1), address, token=token),
        fw.Publisher(weights(1), "tcp://127.0.0.1:0", token=token) as other,
    ):
        words = ("relay", address, "--on", other.address, "--token-file", secret)
        assert "cannot listen" in flyweight(*words, code=7)


def test_a_relay_says_what_is_wrong_by_exit_code(address, served, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    wrong.chmod(0o600)
    with fw.Publisher(weights(1), address, token="right"):
        words = ("relay", address, "--on", served, "--token-file", wrong, "--json")
        assert flyweight(*words, code=7)["error"] == "PeerRefused"
    with fw.Publisher(weights(1), address), fw.Publisher(weights(1), served):
        assert "another publisher is at" in flyweight("relay", address, "--on", served, code=7)
    flyweight("relay", address, code=2)
    flyweight("relay", "nowhere", "--on", served, code=5)
    flyweight("relay", address, "--on", "nowhere", code=5)


def test_a_relay_without_a_publisher_ends_when_it_is_told_to(address, served, threads):
    relay = Relay(address, served)
    running = threads.submit(relay.run)
    with pytest.raises(FutureTimeout):
        running.result(0.2)  # on a slow machine it may not look yet: not seen, never red
    relay.stop()
    running.result(LIMIT)
