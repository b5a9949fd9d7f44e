"""`flyweight update --from` with a real vLLM server: every format, and a result for each server."""

import json
import signal

import pytest
import torch
from click.testing import CliRunner
from vllm_processes import Stream

import flyweight as fw
from child_processes import until
from commands import start
from flyweight.cli import main

NOBODY = "http://127.0.0.1:9"


def flyweight(*words, code=0):
    """Run a command in this process; return what it printed: JSON if that was asked for."""
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if "--json" in words else done.output


def checkpoint(models, name, kind, path):
    """Write a model in some format, and return where it is."""
    if kind == "hf":
        return models / name
    if kind == "dcp by torch":
        from torch.distributed.checkpoint import FileSystemWriter, save

        with fw.open(models / name) as source:
            state = {
                each: torch.frombuffer(bytearray(source.read(each)), dtype=torch.float32).view(
                    source.manifest.spec(each).shape
                )
                for each in source.manifest.names
            }
        save(state, storage_writer=FileSystemWriter(path), no_dist=True)
        return path
    fw.convert(models / name, path, to=kind)
    return path


@pytest.mark.parametrize("kind", ["hf", "snapshot", "dcp by torch", "paddle", "pdparams"])
def test_a_checkpoint_of_any_format_goes_into_a_running_server(
    server, models, loaded, tmp_path, kind
):
    for number, name in ((41, "A"), (42, "B")):
        path = checkpoint(models, name, kind, tmp_path / name)
        found = flyweight(
            "update", server.address, "--from", path, "--as-version", number, "--json"
        )
        (engine,) = found["engines"]
        assert (found["version"], engine["version"], engine["state"]) == (number, number, "SERVING")
        assert engine["error"] is None
        assert engine["pause_seconds"] > 0
        assert server.version() == str(number)
        assert server.tokens() == loaded[name]["tokens"]
        assert server.checksums() == loaded[name]["checksums"]


def test_a_version_of_a_run_is_chosen_and_each_server_has_its_result(
    server, models, answers, tmp_path
):
    for version, name in ((7, "A"), (8, "B")):
        fw.convert(models / name, tmp_path / "run", to="snapshot", version=version)
    words = ("update", server.address, NOBODY, "--from", tmp_path / "run", "--version", 7)
    told = flyweight(*words, code=7)
    assert f"{server.address}: SERVING, version 7;" in told
    assert f"{NOBODY}: PeerLost" in told
    assert server.tokens() == answers["A"]
    found = flyweight(*words[:-2], "--json", code=7)
    assert [each["error"] for each in found["engines"]] == [None, "PeerLost"]
    assert server.tokens() == answers["B"], "the newest, without --version"


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_server_serves_on(
    server, models, answers, tmp_path
):
    flyweight("update", server.address, "--from", models / "A", "--as-version", 1)
    with fw.open(models / "B") as source:
        state = {"model.norm.weight": torch.zeros(source.manifest.spec("model.norm.weight").shape)}
    fw.save(state, tmp_path / "run", version=3)
    told = flyweight("update", server.address, "--from", tmp_path / "run", code=5)
    assert "PlanError" in told
    assert "filled" in told
    assert (server.tokens(), server.version()) == (answers["A"], "1")


def test_ctrl_c_ends_the_wait_and_the_server_serves_on(server, models, answers):
    flyweight("update", server.address, "--from", models / "A", "--as-version", 1)
    words = ("update", server.address, "--from", models / "B", "--as-version", 2)
    with Stream(server) as stream, start(*words) as command:
        until(server.is_paused)  # from then on it waits for the request
        output = command.end(signal.SIGINT)
        assert command.join() == 130, output
        assert not server.is_paused()
        assert stream.abort()[1] == [("1", 0, len(stream.tokens))]
    assert (server.tokens(), server.version()) == (answers["A"], "1")
