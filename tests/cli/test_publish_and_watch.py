"""`flyweight publish` and `flyweight watch` as a user types them."""

import json
import re
import signal

import pytest

import flyweight as fw
from child_processes import LIMIT, Child, Terminal, in_time, until
from commands import COMMAND, flyweight, start
from commands import run as run_command
from netns import two_hosts
from peers import FakePublisher
from versioned_models import assign, holds, weights


@pytest.fixture
def run(tmp_path):
    for version in (3, 4):
        fw.save(weights(version), tmp_path / "run", version=version)
    return tmp_path / "run"


@pytest.mark.parametrize("options", [(), ("--hold",), ("--version", 3)], ids=str)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_publish_serves_a_snapshot_until_it_is_told_to_end(run, address, tmp_path, options, number):
    with start("publish", run, "--on", address, *options) as served:
        version = 3 if 3 in options else 4
        assert served.line().startswith(
            f"serving version {version} of {run} at {address}: 7 tensors"
        )
        engine = weights(50)
        with fw.Replica(engine, address, name="engine") as replica:
            report = replica.update(timeout_seconds=LIMIT)
            assert (report.version, report.verified) == (version, "live")
            assert holds(engine, version)
        out, errors = served.end(number)
        assert served.process.returncode == 0, errors
        assert "replica.joined: name engine" in out
        assert "serve.done: name engine" in out
        assert errors == ""
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["lock"]


def test_publish_tells_machines_in_lines_of_json(run, address):
    with start("publish", run, "--on", address, "--as-version", 77, "--json") as served:
        told = json.loads(served.line())
        assert (told["event"], told["version"]) == ("serving", 77)
        with fw.Replica(weights(50), address) as replica:
            assert replica.update(77, timeout_seconds=LIMIT).version == 77
        out, _ = served.end()
        events = [json.loads(line)["event"] for line in out.splitlines()]
        assert events[0] == "replica.joined"
        assert {"serve.done", "replica.joined"} <= set(events)  # its leave may come before or after


def test_publish_says_what_is_wrong_by_exit_code(run, address, tmp_path):
    with fw.Publisher(weights(1), address):
        told = flyweight("publish", run, "--on", address, "--json", code=7)
        assert "another publisher" in told["message"]
    for words, code in [
        (("publish", tmp_path / "none", "--on", address), 4),
        (("publish", run, "--on", "here"), 5),
        (("publish", run), 2),
        (("watch", address, "--timeout", "0.2"), 7),
        (("watch", "tcp:1"), 5),
    ]:
        flyweight(*words, code=code)


def test_publish_and_watch_take_a_token_from_a_private_file(run, address, tmp_path):
    secret = tmp_path / "secret" / "token"
    with start("publish", run, "--on", address, "--token-file", secret) as served:
        served.line()
        assert secret.stat().st_mode & 0o777 == 0o600
        seen = run_command("watch", address, "--once", "--json", "--token-file", secret)
        assert json.loads(seen.stdout)["version"] == 4, seen.stderr
        other = tmp_path / "other"
        other.write_text("wrong")
        other.chmod(0o600)
        loose = tmp_path / "loose"
        loose.write_text(secret.read_text())
        loose.chmod(0o644)
        for path in (other, loose, tmp_path / "none"):
            words = ("watch", address, "--once", "--timeout", LIMIT, "--token-file", path)
            assert "token" in flyweight(*words, code=7)
        with fw.Replica(weights(50), address, token=secret.read_text()) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 4


def test_watch_says_how_a_command_is_given_the_token(address, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    wrong.chmod(0o600)
    with fw.Publisher(weights(1), address, token="right"):
        for options in ((), ("--token-file", wrong)):
            words = ("watch", address, "--once", "--timeout", LIMIT, *options)
            assert "--token-file" in flyweight(*words, code=7)


def publishing(address, pipe):
    with fw.Publisher(weights(1), address):
        pipe.send("there")
        pipe.recv()


def test_watch_gives_a_publisher_that_does_not_answer_up_in_time(address, monkeypatch):
    """C24: it lives, and was stopped. A watcher does not wait for it as long as a replica does."""
    monkeypatch.setattr("flyweight.live.line.ANSWER_SECONDS", 3 * LIMIT)
    with Child(publishing, address) as publisher:
        assert publisher.told() == "there"
        publisher.stop()
        with in_time(0.5):
            flyweight("watch", address, "--once", "--timeout", 0.5, code=7)


def test_watch_gives_a_publisher_up_in_time_whose_door_answers_and_who_tells_nothing(address):
    """C24: --timeout is the time to the first news."""
    with FakePublisher(address, b"w"), in_time(1.0):
        flyweight("watch", address, "--once", "--timeout", 1, code=7)


def test_watch_tells_of_versions_and_replicas_as_they_happen(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher:
        with start("watch", address, "--json") as watching:
            first = json.loads(watching.line())
            assert (first["version"], first["replicas"]) == (None, [])
            with fw.Replica(engine, address, name="engine") as replica:
                for version in (1, 2):
                    assign(model, version)
                    lease = publisher.publish(version, num_replicas=0, background=True)
                    lease.wait(LIMIT)
                seen = [first]

                def see(claim):
                    while not claim(seen[-1]):
                        seen.append(json.loads(watching.line()))

                def during_the_round(version):
                    # A watcher that falls behind is told the newest state only, so look here.
                    see(lambda news: news["state"] == "publishing")

                future = threads.submit(
                    replica.update, timeout_seconds=LIMIT, before=during_the_round
                )
                publisher.publish(3, num_replicas=1, timeout_seconds=LIMIT)
                future.result(LIMIT)
                see(lambda news: any(each["version"] == 3 for each in news["replicas"]))
                (engine_news,) = seen[-1]["replicas"]
                assert (engine_news["name"], engine_news["state"]) == ("engine", "ready")
                assert [each["version"] for each in seen] == sorted(
                    (each["version"] for each in seen), key=lambda found: found or 0
                )
        assert flyweight("watch", address, "--once").startswith("version 3")


def test_watch_ends_with_its_publisher(address):
    publisher = fw.Publisher(weights(1), address)
    with start("watch", address, "--json") as watching:
        watching.line()
        publisher.close()
        assert watching.join() == 0


def test_watch_shows_a_table_on_a_terminal(address):
    with (
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(2), address, name="one"),
        Terminal() as terminal,
        start("watch", address, stdout=terminal.file, stderr=terminal.file, TERM="xterm") as watch,
    ):
        terminal.read_until(b"one")
        assert b"no version yet" in terminal.text
        until(lambda: publisher.replicas == ["one"])
        watch.kill(signal.SIGINT)
        assert watch.join() == 130


def test_watch_shows_each_rank_of_a_replica(address):
    with (
        fw.Publisher(weights(1), address),
        fw.Replica(weights(2), address, name="engine", rank=0, num_ranks=2),
        fw.Replica(weights(3), address, name="engine", rank=1, num_ranks=2),
        fw.Replica(weights(4), address, name="alone"),
    ):
        seen = flyweight("watch", address, "--once", "--json")
        names = [each["name"] for each in seen["replicas"]]
        assert names == ["engine/0", "engine/1", "alone"]
        table = flyweight("watch", address, "--once")
        assert all(name in table for name in names)


@pytest.mark.check
def test_publish_and_watch_reach_another_host_with_a_token_and_keys(run, tmp_path):
    token, keys = tmp_path / "token", tmp_path / "keys"
    flyweight("keys", keys, "--name", "trainer")
    flyweight("keys", keys, "--name", "other")
    secret = ("--token-file", token)
    with (
        two_hosts() as hosts,
        hosts.a.command(
            *COMMAND, "publish", run, "--on", f"tcp://{hosts.a.ip}:0", *secret,
            "--key-file", keys / "trainer.key", "--json",
        ) as served,
    ):  # fmt: skip
        address = json.loads(served.line())["address"]
        assert re.fullmatch(rf"tcp://{hosts.a.ip}:[1-9]\d*", address)

        def watch(*options):
            words = ("watch", address, "--once", "--json", "--timeout", LIMIT, *options)
            with hosts.b.command(*COMMAND, *words) as watching:
                out, errors = watching.output()
                return watching.process.returncode, out, errors

        code, out, errors = watch(*secret, "--server-key", keys / "trainer.pub")
        assert code == 0, errors
        assert json.loads(out)["version"] == 4
        for options, words in [
            ((), "pass its public key as curve=, to a command as --server-key"),
            (("--server-key", keys / "other.pub"), "is that of --server-key"),
        ]:
            code, _, errors = watch(*secret, *options)
            assert (code, words in errors) == (7, True), errors


def test_an_address_on_the_network_needs_a_token_and_only_there_are_keys(run, address, tmp_path):
    flyweight("keys", tmp_path, "--name", "trainer")
    tcp, key = "tcp://127.0.0.1:0", tmp_path / "trainer"
    for words, why in [
        (("publish", run, "--on", tcp), f"{tcp} needs a token that both sides know: --token-file"),
        (("watch", tcp), f"{tcp} needs a token that both sides know: --token-file"),
        (("publish", run, "--on", address, "--key-file", f"{key}.key"), "--key-file is for tcp"),
        (("watch", address, "--server-key", f"{key}.pub"), "--server-key is for tcp"),
    ]:
        assert why in " ".join(flyweight(*words, code=2).split()), words
    assert not list(tmp_path.glob("token*"))
