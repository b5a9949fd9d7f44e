"""`flyweight update --from`, with a stand-in for vLLM; the real one is in tests/real_vllm."""

import json

import pytest
from click.testing import CliRunner

import flyweight as fw
from fake_vllm import FakeVllm, arrays, holds
from flyweight.cli import main

pytestmark = pytest.mark.check
NOBODY = "http://127.0.0.1:9"


def run(*words):
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def path(tmp_path):
    """A run with versions 1 and 2."""
    for version in (1, 2):
        fw.save(arrays(version), tmp_path / "run", version=version)
    return str(tmp_path / "run")


def test_each_server_gets_the_version_and_has_a_line(path):
    with FakeVllm() as one, FakeVllm(2) as two:
        done = run("update", one.address, two.address, "--from", path, "--version", "1")
        assert done.exit_code == 0, done.output
        assert f"{one.address}: SERVING, version 1; 3.0 KiB checked and loaded" in done.output
        assert f"{two.address}: SERVING, version 1; 6.0 KiB checked and loaded" in done.output
        for each in (one, two):
            assert all(holds(worker, 1) for worker in each.workers)
            assert (each.version, each.is_paused) == ("1", False)


def test_a_server_that_fails_does_not_keep_the_others_from_the_version(path):
    with FakeVllm() as good, FakeVllm() as bad:
        bad.faults["/update_weights"] = (500, "no")
        words = ("update", good.address, NOBODY, bad.address, "--from", path, "--json")
        done = run(*words)
        assert done.exit_code == 7
        found = json.loads(done.stdout)
        assert found["version"] == 2
        assert [each["error"] for each in found["engines"]] == [None, "PeerLost", "PeerFailed"]
        assert [each["state"] for each in found["engines"]] == ["SERVING", None, "FAILED"]
        assert holds(good.workers[0], 2)
        assert bad.is_paused


def test_a_checkpoint_without_a_number_gets_one(tmp_path):
    fw.convert(saved(tmp_path), tmp_path / "hf", to="hf")
    with FakeVllm() as server:
        done = run("update", server.address, "--from", str(tmp_path / "hf"), "--as-version", "42")
        assert done.exit_code == 0, done.output
        assert server.version == "42"


def saved(tmp_path):
    fw.save(arrays(5), tmp_path / "run", version=5)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("update", "--from", "x"), "--from needs the addresses of vLLM servers"),
        (("update", "http://a:1", "http://b:2"), "one ADDRESS, or --from"),
        (("update", "--in-flight", "keep"), "--in-flight is for vLLM servers"),
        (("update", "--on", "tcp://a:1", "--staging", "1M"), "--staging, --on is for vLLM"),
        (("update", "http://a:1", "--from", "x", "--on", "tcp://a:1"), "--token-file FILE"),
        (("update", "http://a:1", "http://a:1", "--from", "x"), "an address is given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_belong_together_are_a_wrong_command_line(words, text):
    done = run(*words)
    assert done.exit_code == 2
    assert text in done.output


def test_a_path_that_does_not_exist_is_told_before_any_server_is_asked(tmp_path):
    with FakeVllm() as server:
        done = run("update", server.address, "--from", str(tmp_path / "nothing"))
        assert done.exit_code == 4
        assert server.calls == []
