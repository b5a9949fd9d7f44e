"""The demo ends well, says so only if it did, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from flyweight.cli import main
from flyweight.demo.channel import Held
from flyweight.demo.setting import SETTINGS, Places
from flyweight.demo.stage import Stage
from flyweight.demo.story import Plot, differing
from flyweight.errors import PeerRefused
from live_models import until

DEMO = [sys.executable, "-m", "flyweight.cli", "demo"]


@pytest.fixture
def scratch():
    # Not pytest's own directory: paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="fw") as directory:
        yield Path(directory)


def processes_at(directory):
    """Return the processes that were started with something in a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(directory).encode() in words:
            found.append(words.decode(errors="replace"))
    return found


def test_the_demo_survives_its_kills_and_every_engine_ends_with_the_trainers_bits(scratch):
    done = subprocess.run(
        [*DEMO, "--fast", "--json"],
        capture_output=True, text=True, timeout=110, env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]

    def all_of(event):
        return [each for each in told if each["event"] == event]

    engine, trainer = all_of("killed")
    assert (engine["process"], trainer["process"]) == ("engine-1", "trainer")
    # In the middle of a publish: engines had begun, and none had come to its end.
    assert set(trainer["engines"].values()) <= {"PAUSING", "PAUSED", "UPDATING", "VERIFYING"}
    assert trainer["version"] not in trainer["held"].values()
    assert [each["process"] for each in all_of("caught_up")] == ["engine-1"]
    assert {each["process"] for each in all_of("stayed")} == {"engine-1", "engine-2"}
    assert min(all_of("answered")[0]["num_answered"].values()) >= 10
    first, second = all_of("trainer")
    assert first["recovered"] is None
    assert second["recovered"] is not None
    assert second["version"] > trainer["version"]

    rewards = [each["reward"] for each in all_of("step")]
    assert sum(rewards[:4]) + 0.8 < sum(rewards[-4:])
    versions = [each["version"] for each in all_of("step")]
    assert versions == sorted(set(versions))
    assert any(len(each["pauses_ms"]) == 2 for each in all_of("step"))

    ended = told[-1]
    assert ended["event"] == "ended"
    assert ended["is_well"]
    assert all(ended["claims"].values())
    assert [row["is_same"] for row in ended["replicas"]] == [True, True]
    assert [row["num_restarts"] for row in ended["replicas"]] == [1, 0]
    assert len({row["version"] for row in ended["replicas"]}) == 1
    assert list(scratch.iterdir()) == []
    assert processes_at(scratch) == []


def test_ctrl_c_leaves_no_process_and_no_directory(scratch):
    with subprocess.Popen(
        [*DEMO, "--fast", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as demo:  # fmt: skip
        assert json.loads(demo.stdout.readline())["event"] == "began"
        until(lambda: len(processes_at(scratch)) == 3, 60)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert json.loads(errors)["error"] == "Interrupted"
    assert list(scratch.iterdir()) == []
    assert processes_at(scratch) == []


def test_processes_end_with_a_demo_that_is_killed(scratch):
    with subprocess.Popen(
        [*DEMO, "--fast", "--json"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)},
    ) as demo:  # fmt: skip
        assert json.loads(demo.stdout.readline())["event"] == "began"
        until(lambda: len(processes_at(scratch)) == 3, 60)
        demo.kill()
    until(lambda: processes_at(scratch) == [], 60)


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (Held(7, {"a": 1, "b": 2}), []),
        (Held(7, {"a": 1, "b": 3}), ["b"]),
        (Held(7, {"a": 1}), ["b"]),
        (Held(7, {"a": 1, "b": 2, "c": 0}), ["c"]),
        (Held(6, {"a": 1, "b": 2}), ["version 6, expected 7"]),
        (Held(None, {}), ["version None, expected 7"]),
    ],
)
def test_whatever_is_not_the_same_is_named(held, found):
    assert differing(Held(7, {"a": 1, "b": 2}), held) == found


def test_a_longer_story_is_given_up_later():
    assert Plot().limit_seconds == SETTINGS["full"].limit_seconds
    assert Plot(num_steps=12).limit_seconds == SETTINGS["full"].limit_seconds
    assert Plot(num_steps=6000).limit_seconds == 100 * SETTINGS["full"].limit_seconds
    assert Plot(seconds=3600.0).limit_seconds == 36_000


def test_a_browser_is_led_to_the_page_by_a_file_that_only_its_user_reads(scratch):
    """The token in the address would be there for everybody who lists processes."""
    stage = Stage(
        Places(scratch, scratch), "fast", SETTINGS["fast"], print, seed=0, limit_seconds=1
    )
    stage._page = "http://127.0.0.1:1/#token=abc"
    path = stage._write_opener()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "url=http://127.0.0.1:1/#token=abc" in path.read_text()
    path.unlink()
    scratch.chmod(0o755)
    with pytest.raises(PeerRefused, match="can be read by others"):
        stage._write_opener()


def test_open_gives_the_browser_no_token(monkeypatch, scratch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    fields = {
        "seconds": 0.0,
        "page": "http://127.0.0.1:1/#token=abc",
        "opener": f"{scratch}/p.html",
    }
    monkeypatch.setattr(
        "flyweight.demo.story.play", lambda plot, audience: audience("page", fields) is None
    )
    done = CliRunner().invoke(main, ["demo", "--open"])
    assert done.exit_code == 0, done.output
    assert opened == [f"file://{scratch}/p.html"]


def test_a_directory_with_something_in_it_is_not_written_into(scratch):
    (scratch / "mine").touch()
    done = CliRunner().invoke(main, ["demo", "--run", str(scratch)])
    assert done.exit_code == 5
    assert "is not empty" in done.stderr
    assert [path.name for path in scratch.iterdir()] == ["mine"]


def test_without_torch_the_demo_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; from flyweight.cli import main; main(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    assert "pip install 'flyweight[torch]'" in done.stderr
