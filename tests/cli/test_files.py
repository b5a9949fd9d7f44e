"""Commands for weights in files, and what holds for all commands: output, errors, exit codes."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import flyweight as fw
from child_processes import LIMIT, Terminal, run_python
from commands import COMMAND, start
from commands import run as process
from conftest import flip, odd_arrays, random_bytes
from flyweight.cli import exit_code, human, main, size
from flyweight.errors import (
    ChecksumMismatch,
    DigestMismatch,
    FlyweightError,
    PlanError,
    SnapshotIncomplete,
    SnapshotNotFound,
    SpecError,
    StoreError,
    VersionError,
)


def flyweight(*words):
    """Run a command in this process: a new one for each would take most of the time."""
    done = CliRunner().invoke(main, list(map(str, words)), prog_name="flyweight")
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


def answer(*words, code=0):
    done = flyweight(*words, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_what_looks_like_an_emoji_is_printed_as_it_is(tmp_path):
    fw.save({"w:x:": np.ones(3)}, tmp_path / "run:x:1", version=1)
    done = flyweight("inspect", tmp_path / "run:x:1")
    assert str(tmp_path / "run:x:1") in done.stdout
    assert "w:x:" in done.stdout
    assert "gone:x:1" in flyweight("inspect", tmp_path / "gone:x:1").stderr


def test_inspect_shows_tensors_files_and_versions(run):
    done = flyweight("inspect", run)
    assert done.returncode == 0
    for words in (
        "version 5",
        "versions: 1, 2, 5",
        "9 tensors",
        "half",
        "f16  5 × 3 × 2",
        "scalar",
    ):
        assert words in done.stdout
    found = answer("inspect", run, "--version", 2)
    assert found["version"] == 2
    assert found["tensors"]["odd.half"] == {
        "dtype": "f16", "shape": [5, 3, 2], "nbytes": 60, "shards": 1, "file": "model.safetensors",
    }  # fmt: skip


def test_verify_says_whole_or_lists_damage_and_exits_1(run):
    assert "whole, 9 tensors" in flyweight("verify", run).stdout
    assert answer("verify", run)["is_whole"] is True
    part = run / "v0000000005" / "model.safetensors"
    flip(part, part.stat().st_size - 1)
    done = flyweight("verify", run)
    assert done.returncode == 1
    assert "damaged" in done.stderr
    assert len(answer("verify", run, code=1)["damage"]) == 1


def test_diff_tells_and_exits_1_if_there_is_a_difference(tmp_path):
    a, b = {"w": np.zeros(4), "x": np.ones(1)}, {"w": np.array([0, 0, 2.5, 0]), "y": np.ones(1)}
    fw.save(a, tmp_path / "a")
    fw.save(b, tmp_path / "b")
    assert flyweight("diff", tmp_path / "a", tmp_path / "a").returncode == 0
    done = flyweight("diff", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    for words in ("only in A: x", "only in B: y", "2.5", "0 tensors are the same"):
        assert words in done.stdout
    found = answer("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert found["changed"][0]["num_different"] == 1


def test_convert_versions_and_prune(run, tmp_path):
    assert answer("convert", run, tmp_path / "hf", "--to", "hf")["num_tensors"] == 9
    done = flyweight("convert", run, tmp_path / "again", "--to", "snapshot", "--memory", "64M")
    assert done.returncode == 0
    assert "9 tensors" in done.stdout
    assert [line["version"] for line in answer("versions", run)] == [1, 2, 5]
    assert "2" in flyweight("versions", run).stdout
    assert answer("prune", run, "--keep", 1) == {"removed": [1, 2], "damaged": []}
    assert "removed: nothing" in flyweight("prune", run, "--keep", 1).stdout


def test_prune_names_damaged_versions_and_removes_them_only_when_asked(run):
    (run / "v0000000005" / "model.safetensors").unlink()
    done = flyweight("prune", run, "--keep", 1)
    assert (done.returncode, done.stdout) == (0, "removed: 1\n")
    assert done.stderr.startswith("damaged, kept: version 5: ")
    found = answer("prune", run, "--keep", 1)
    assert (found["removed"], found["damaged"][0]["version"]) == ([], 5)
    assert "missing: 'model.safetensors'" in found["damaged"][0]["error"]
    done = flyweight("prune", run, "--keep", 1, "--damaged")
    assert done.stdout == "removed: 5\n"
    assert done.stderr.startswith("damaged, removed: version 5: ")
    assert fw.versions(run) == [2]


def test_versions_shows_a_damaged_one_as_such(run):
    (run / "v0000000002" / "model.safetensors").unlink()
    lines = answer("versions", run)
    assert "missing: 'model.safetensors'" in lines[1]["error"]
    assert flyweight("versions", run).returncode == 0


def test_a_pickles_dtypes_can_be_told(tmp_path):
    import torch

    fw.save_legacy(
        {"w": torch.zeros(3, dtype=torch.bfloat16)},
        tmp_path,
        rank=0,
        legacy_id=0,
        as_safetensors=False,
    )
    old = tmp_path / "model_state.tp0.0.pdparams"
    answer("convert", old, tmp_path / "run", "--to", "snapshot", "--assume", "u16=bf16")
    assert answer("inspect", tmp_path / "run")["tensors"]["w"]["dtype"] == "bf16"
    assert flyweight("convert", old, "x", "--to", "hf", "--assume", "u16").returncode == 2


def test_doctor_says_what_works_here(tmp_path):
    found = answer("doctor", tmp_path)
    assert found["flyweight"] == fw.__version__
    assert found["packages"]["numpy"] == np.__version__
    assert set(found["disk"]) == {"unbuffered_writes", "unbuffered_reads", "mapped_reads"}
    assert os.listdir(tmp_path) == []
    assert "numpy" in flyweight("doctor").stdout


EXITS = [
    (["inspect", "gone"], 4, "SnapshotNotFound"),
    (["inspect", "RUN", "--version", "3"], 4, "VersionError"),
    (["verify", "BAD"], 3, "FormatError"),
    (["convert", "RUN", "RUN", "--to", "hf"], 6, "StoreError"),
    (["convert", "RUN", "out", "--to", "hf", "--memory", "1"], 5, "SpecError"),
]


@pytest.mark.parametrize(("words", "code", "kind"), EXITS)
def test_errors_are_a_line_and_a_code_and_json_if_asked(
    run, tmp_path, monkeypatch, words, code, kind
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_bytes(b"not weights at all")
    words = [{"RUN": str(run), "BAD": str(tmp_path / "bad")}.get(word, word) for word in words]
    done = flyweight(*words)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"{kind}: ")
    assert "Traceback" not in done.stderr
    done = flyweight(*words, "--json")
    told = json.loads(done.stderr)
    assert (told["error"], told["exit_code"], done.returncode) == (kind, code, code)


def test_an_error_is_told_the_same_way_by_a_process(tmp_path):
    done = process("inspect", tmp_path / "gone", "--json")
    assert (done.returncode, done.stdout) == (4, "")
    assert json.loads(done.stderr)["error"] == "SnapshotNotFound"


def test_an_error_in_an_option_before_json_is_json_too(run, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    done = flyweight("plan", run, "--into", tmp_path / "bad.json", "--json")
    assert (json.loads(done.stderr)["exit_code"], done.returncode) == (5, 5)


def test_every_kind_of_error_has_its_code():
    codes = {
        SnapshotNotFound: 4, VersionError: 4, DigestMismatch: 4, ChecksumMismatch: 3,
        SnapshotIncomplete: 3, StoreError: 6, PlanError: 5, SpecError: 5,
    }  # fmt: skip
    assert {kind: exit_code(kind("x")) for kind in codes} == codes
    assert exit_code(FlyweightError("x")) == 5


def test_a_path_that_is_not_there_exits_4_everywhere(tmp_path):
    for words in (["versions"], ["prune", "--keep", "1"], ["verify"], ["inspect"]):
        assert flyweight(*words, tmp_path / "gone").returncode == 4


def test_doctor_of_a_place_that_cannot_be_written_exits_6(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    done = flyweight("doctor", tmp_path / "file")
    assert done.returncode == 6
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["inspect", "--help"], ["--version"]])
def test_help_and_version_work(words):
    done = flyweight(*words)
    assert "flyweight" in (done.stdout + done.stderr).lower() or "Usage" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["inspect"], ["prune", "x"], ["nope"], ["prune", "x", "--keep", "0"]]
)
def test_a_wrong_command_line_exits_2(words):
    assert flyweight(*words).returncode == 2


def test_no_bar_and_no_colour_where_there_is_no_terminal(run, tmp_path):
    done = process("convert", run, tmp_path / "out", "--to", "hf")
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""


def test_a_bar_on_a_terminal(tmp_path):
    fw.save({f"w{i}": random_bytes(30 << 20, i) for i in range(4)}, tmp_path)
    with (
        Terminal() as terminal,
        start("verify", tmp_path, stderr=terminal.file, TERM="xterm", COLUMNS="100") as verify,
    ):
        terminal.read_until(b"verify")
        assert verify.join() == 0


INTERRUPTED = """
import os, signal, sys, threading
from flyweight.cli import main
from flyweight.events import listening
is_sent, has_come = threading.Event(), threading.Event()
def on_signal(*given):
    has_come.set()
    signal.default_int_handler(*given)
signal.signal(signal.SIGINT, on_signal)
def interrupt(event):
    if event.kind == "progress":
        if not is_sent.is_set():
            is_sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        assert has_come.wait(60)
with listening(interrupt):
    main(sys.argv[1:])
"""


def test_ctrl_c_stops_cleanly(tmp_path):
    fw.save({f"w{i}": random_bytes(8 << 20, i) for i in range(4)}, tmp_path / "run")
    done = run_python(INTERRUPTED, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert done.returncode == 130
    assert "Interrupted" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell):
    done = flyweight("completion", shell)
    assert done.returncode == 0
    assert "_FLYWEIGHT_COMPLETE" in done.stdout


def test_completion_in_bash_completes_commands():
    env = {**os.environ, "_FLYWEIGHT_COMPLETE": "bash_complete", "COMP_WORDS": "flyweight ver",
           "COMP_CWORD": "1"}  # fmt: skip
    command = os.path.join(os.path.dirname(sys.executable), "flyweight")
    done = subprocess.run([command], capture_output=True, text=True, timeout=LIMIT, env=env)
    assert [line.partition(",")[2] for line in done.stdout.split()] == ["verify", "versions"]


def test_output_to_a_closed_pipe_is_no_crash(run):
    done = subprocess.run(
        f"{' '.join(COMMAND)} inspect {run} | head -1", shell=True, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5", 5), ("256M", 256 << 20), ("4GiB", 4 << 30), ("1k", 1024), ("2 TB", 2 << 40)],
)
def test_sizes_are_read(text, nbytes):
    assert size(text) == nbytes


def test_a_text_that_is_no_size_exits_2(run, tmp_path):
    done = flyweight("convert", run, tmp_path / "out", "--to", "hf", "--memory", "much")
    assert done.returncode == 2
    assert "Invalid value for '--memory': 'much' is not a size; write 268435456" in done.stderr


def test_sizes_are_told():
    assert [human(n) for n in (5, 2048, 3 << 20, 5 << 40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]


def test_odd_names_do_not_confuse_the_terminal(tmp_path):
    fw.save({"[bold]x[/]": np.zeros(1), "a.[red]": np.zeros(1)}, tmp_path)
    shown = flyweight("inspect", tmp_path).stdout
    assert "[bold]x[/]" in shown
    assert "[red]" in shown
    assert len(odd_arrays()) == 9


LAYOUT = '{"mesh": {"tp": 2}, "rules": [{"names": "w", "cut": {"0": "tp"}}, {"names": "**"}]}'


@pytest.fixture
def planned(tmp_path):
    fw.save({"w": np.zeros((8, 4)), "norm": np.zeros(4)}, tmp_path / "run", version=3)
    (tmp_path / "tp2.json").write_text(LAYOUT)
    (tmp_path / "fsdp4.json").write_text(
        '{"mesh": {"dp": 4}, "rules": [{"names": "**", "cut": {"0": "dp"}}]}'
    )
    return tmp_path


def test_plan_tells_bytes_by_pairs_copies_and_memory(planned):
    done = flyweight("plan", planned / "run", "--into", planned / "tp2.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["model.safetensors", "160", "B", "160", "B"]
    assert "4 copies of 2 tensors, 320 B in all" in done.stdout
    assert "peak memory of a sink rank: 448 B, of which 288 B are extra" in done.stdout
    assert "over the network: 160 B" in done.stdout
    found = answer("plan", planned / "run", "--into", planned / "tp2.json", "--copies")
    assert found["pairs"] == [[0, 0, 160], [0, 1, 160]]
    assert found["staging_bytes"] == 160
    assert found["copies"][1] == {
        "name": "w",
        "source": 0,
        "sink": 1,
        "offset": [4, 0],
        "shape": [4, 4],
    }


def test_plan_between_two_layouts_and_of_one_rank(planned):
    words = (
        "plan",
        planned / "run",
        "--from",
        planned / "fsdp4.json",
        "--into",
        planned / "tp2.json",
    )
    found = answer(*words)
    assert found["sources"] == [f"rank {n}" for n in range(4)]
    assert sum(nbytes for _, _, nbytes in found["pairs"]) == found["nbytes"] == 320
    mine = answer(*words, "--rank", 1)
    assert [pair for pair in found["pairs"] if pair[1] == 1] == mine["pairs"]
    wide = planned / "wide.json"
    wide.write_text(LAYOUT.replace('"tp": 2', '"tp": 64'))
    done = flyweight("plan", planned / "run", "--from", planned / "fsdp4.json", "--into", wide)
    assert "a source gives" in done.stdout
    assert "pairs of ranks; all of them with --json" in done.stdout


@pytest.mark.parametrize(
    ("layout", "code", "words"),
    [
        ("{", 5, "is not JSON"),
        ('{"mesh": {"tp": 2}, "rules": []}', 5, "no rule fits 2 tensors: 'norm', 'w'"),
        ('{"mesh": {"tp": 2}, "rules": [{"names": "**", "cut": {"1": "tp"}}]}', 5, "cuts dims [1] of a tensor of (4,)"),
        ('{"mesh": {"tp": 2}, "rules": [{"names": "**", "cut": {"0": "dp"}}]}', 5, "the mesh has ['tp']"),
    ],
)  # fmt: skip
def test_plan_says_what_does_not_fit(planned, layout, code, words):
    (planned / "bad.json").write_text(layout)
    done = flyweight("plan", planned / "run", "--into", planned / "bad.json")
    assert done.returncode == code
    assert words in done.stderr
    assert flyweight("plan", planned / "run", "--into", planned / "none.json").returncode == 2
    assert flyweight("plan", planned / "run").returncode == 2


@pytest.mark.parametrize("to", ["hf", "dcp", "paddle"])
def test_convert_inspect_diff_and_verify_understand_the_formats_of_others(planned, to):
    report = answer("convert", planned / "run", planned / "out", "--to", to, "--memory", "64M")
    assert report["num_tensors"] == 2
    assert answer("inspect", planned / "out")["format"] == {"hf": "huggingface"}.get(to, to)
    assert "w" in flyweight("inspect", planned / "out").stdout
    assert answer("diff", planned / "run", planned / "out")["is_same"]
    assert answer("verify", planned / "out")["is_whole"]
    assert "keeps no checksums" in flyweight("verify", planned / "out").stdout
    back = answer(
        "convert", planned / "out", planned / "back", "--to", "snapshot", "--version", "9"
    )
    assert back["version"] == 9
    assert answer("diff", planned / "run", planned / "back")["is_same"]


def test_numbers_that_json_has_not_are_told_as_text_and_a_nan_is_the_same_as_itself(tmp_path):
    fw.save(
        {"w": np.zeros(2), "best": float("inf"), "loss": float("nan"), "[x]": 1}, tmp_path / "a"
    )
    fw.save(
        {"w": np.zeros(2), "best": float("inf"), "loss": float("nan"), "[x]": True}, tmp_path / "b"
    )
    assert answer("inspect", tmp_path / "a")["values"] == {"best": "inf", "loss": "nan", "[x]": 1}
    assert answer("diff", tmp_path / "a", tmp_path / "a")["is_same"]
    done = flyweight("diff", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    assert "other value: [x]  1 and True" in done.stdout
    assert "loss" not in done.stdout


def test_tensors_that_may_not_be_integers_are_told(tmp_path):
    import torch

    fw.save_legacy(
        {"w": torch.zeros(4).bfloat16()}, tmp_path, rank=0, legacy_id=0, as_safetensors=False
    )
    old = tmp_path / "model_state.tp0.0.pdparams"
    done = flyweight("convert", old, tmp_path / "hf", "--to", "hf")
    assert (
        "1 tensors of a pickle were written as integers; if they are bf16 or fp8, say so"
        in done.stdout
    )
    assert (
        answer("convert", old, tmp_path / "hf2", "--to", "hf", "--assume", "u16=bf16")[
            "told_as_integers"
        ]
        == []
    )


def test_a_straightened_tensor_is_no_file_of_its_own(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"t": torch.zeros(3, 4).t()}, checkpoint_id=tmp_path / "ck")
    assert list(answer("inspect", tmp_path / "ck")["files"]) == ["__0_0.distcp"]
    (tmp_path / "l.json").write_text('{"mesh": {"a": 1}, "rules": [{"names": "**"}]}')
    assert answer("plan", tmp_path / "ck", "--into", tmp_path / "l.json")["sources"] == [
        "__0_0.distcp"
    ]
