"""`flyweight publish` and `flyweight watch` as a user types them."""

import json
import re
import signal

import pytest

import flyweight as fw
from child_processes import LIMIT, Child, Terminal, in_time, until
from commands import COMMAND, flyweight, start
from commands import run as run_command
from live.certificates import made_by_one_authority
from netns import two_hosts
from versioned_models import assign, holds, weights


@pytest.fixture
def run(tmp_path):
    for version in (3, 4):
        fw.save(weights(version), tmp_path / "run", version=version)
    return tmp_path / "run"


@pytest.mark.parametrize("options", [(), ("--version", 3)], ids=str)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_publish_serves_a_snapshot_until_it_is_interrupted(run, address, tmp_path, options, number):
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
        assert f"version {version}" in out
        assert errors == ""
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["lock"]


def test_publish_shows_programs_who_comes_takes_a_version_and_leaves(run, address):
    with start("publish", run, "--on", address, "--as-version", 77, "--json") as served:
        said = json.loads(served.line())
        assert (said["event"], said["version"]) == ("serving", 77)
        with fw.Replica(weights(50), address, name="engine") as replica:
            assert replica.update(77, timeout_seconds=LIMIT).version == 77
        seen = [json.loads(served.line()) for _ in range(3)]
        assert [each["event"] for each in seen] == ["replica.joined", "serve.done", "replica.lost"]
        assert {(each["name"], each["rank"]) for each in seen} == {("engine", 0)}
        assert (seen[1]["version"], seen[1]["error"]) == (77, "")
        assert seen[1]["nbytes"] == said["nbytes"]


def test_publish_says_what_is_wrong_by_exit_code(run, address, tmp_path):
    with fw.Publisher(weights(1), address):
        said = flyweight("publish", run, "--on", address, "--json", code=7)
        assert "another publisher" in said["message"]
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


def test_watch_gives_up_in_time_on_a_publisher_that_does_not_answer(address):
    with Child(publishing, address) as publisher:
        assert publisher.told() == "there"
        publisher.stop()
        with in_time(0.5):
            flyweight("watch", address, "--once", "--timeout", 0.5, code=7)


def test_watch_shows_versions_and_replicas_as_they_change(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, start("watch", address, "--json") as watching:
        first = json.loads(watching.line())
        assert (first["version"], first["replicas"]) == (None, [])
        seen = [first]

        def see(claim):
            while not claim(seen[-1]):
                seen.append(json.loads(watching.line()))

        def during_the_update(version):
            # A watcher that falls behind gets the newest state only, so look here.
            see(lambda news: any(each["state"] == "UPDATING" for each in news["replicas"]))

        with fw.Replica(engine, address, name="engine") as replica:
            for version in (1, 2):
                publisher.publish(version)
            future = threads.submit(replica.update, timeout_seconds=LIMIT, before=during_the_update)
            assign(model, 3)
            publisher.publish(3, num_replicas=1, timeout_seconds=LIMIT)
            future.result(LIMIT)
            see(lambda news: any(each["version"] == 3 for each in news["replicas"]))
            (engine_news,) = seen[-1]["replicas"]
            assert (engine_news["name"], engine_news["state"]) == ("engine", "READY")
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


def test_watch_shows_each_rank_of_a_replica(address, threads):
    def engine_rank(rank):
        with fw.Replica(weights(2), address, name="engine", rank=rank, world_size=2) as replica:
            return replica.update(1, timeout_seconds=LIMIT)

    with fw.Publisher(weights(1), address, keep="in_place") as publisher:
        ranks = [threads.submit(engine_rank, rank) for rank in (0, 1)]
        until(lambda: publisher.waiting == ["engine"])
        with fw.Replica(weights(4), address, name="alone"):
            seen = flyweight("watch", address, "--once", "--json")
            found = sorted((each["name"], each["rank"]) for each in seen["replicas"])
            assert found == [("alone", 0), ("engine", 0), ("engine", 1)]
            table = flyweight("watch", address, "--once")
            assert table.count("engine") == 2
        publisher.publish(1)
        assert [each.result(LIMIT).version for each in ranks] == [1, 1]


@pytest.mark.check
def test_publish_and_watch_reach_another_host_with_a_token_and_certificates(run, tmp_path):
    token = ("--token-file", tmp_path / "token")
    with two_hosts() as hosts:
        ours, authority = made_by_one_authority(tmp_path, hosts.a.ip)
        _, stranger = made_by_one_authority(tmp_path / "other", hosts.a.ip)
        with hosts.a.command(
            *COMMAND, "publish", run, "--on", f"tcp://{hosts.a.ip}:0", *token, "--json",
            "--tls-certificate", ours, "--tls-key", ours,
        ) as served:  # fmt: skip
            address = json.loads(served.line())["address"]
            assert re.fullmatch(rf"tcp://{hosts.a.ip}:[1-9]\d*", address)

            def watch(*options):
                words = ("watch", address, "--once", "--json", "--timeout", 10, *token, *options)
                with hosts.b.command(*COMMAND, *words) as watching:
                    out, errors = watching.output()
                    return watching.process.returncode, out, errors

            code, out, errors = watch("--tls-authority", authority)
            assert code == 0, errors
            assert json.loads(out)["version"] == 4
            for options in ((), ("--tls-authority", stranger)):
                code, _, errors = watch(*options)
                assert (code, "tls" in errors) == (7, True), errors


def test_an_address_on_the_network_needs_a_token_and_only_there_are_certificates(
    run, address, tmp_path
):
    ours, authority = made_by_one_authority(tmp_path, "127.0.0.1")
    tcp, tls = "tcp://127.0.0.1:0", ("--tls-authority", authority)
    for words, why in [
        (("publish", run, "--on", tcp), f"{tcp} needs a token that both sides know: --token-file"),
        (("watch", tcp), f"{tcp} needs a token that both sides know: --token-file"),
        (("publish", run, "--on", address, *tls), "--tls options are for tcp addresses"),
        (("watch", address, *tls), "--tls options are for tcp addresses"),
    ]:
        assert why in " ".join(flyweight(*words, code=2).split()), words
    secret = ("--token-file", tmp_path / "token")
    for options, why in [
        (("--tls-certificate", ours), "certificate needs its key"),
        (tls, "there is no certificate"),
    ]:
        words = ("publish", run, "--on", tcp, *secret, *options)
        assert why in flyweight(*words, code=5)
