"""The demo ends well, says so only if it did, and leaves nothing behind."""

import json
import signal
import sys
import tempfile
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))  # as Python does for `python examples/demo`

from settings import SIZES  # noqa: E402
from story import Options, differing  # noqa: E402
from supervisor import write_opener  # noqa: E402

from child_processes import LIMIT, Command, run_python, until  # noqa: E402
from commands import run  # noqa: E402
from flyweight.errors import PeerRefused  # noqa: E402

pytestmark = pytest.mark.check


def demo(*words, scratch, **options):
    """Start the demo with its temporary files in a directory."""
    return Command(sys.executable, DEMO, *words, TMPDIR=str(scratch), **options)


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
    with demo("--fast", "--json", scratch=scratch) as running:
        out, errors = running.output(4 * LIMIT)
    assert running.process.returncode == 0, out + errors
    told = [json.loads(line) for line in out.splitlines()]

    def all_of(event):
        return [each for each in told if each["event"] == event]

    engine, trainer = all_of("killed")
    assert (engine["process"], trainer["process"]) == ("engine-1", "trainer")
    # In the middle of a publish: engines had begun, and none had come to its end.
    assert set(trainer["engines"].values()) <= {"PAUSING", "PAUSED", "UPDATING", "VERIFYING"}
    assert trainer["version"] not in trainer["held"].values()
    assert [each["process"] for each in all_of("caught_up")] == ["engine-1"]
    assert {each["process"] for each in all_of("stayed")} == {"engine-1", "engine-2"}
    assert all(each["was_taken"] for each in all_of("stayed"))  # fetched before the pause
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


def test_ctrl_c_leaves_no_process_and_no_directory_and_the_browser_gets_no_token(scratch):
    """The token in the browser's command line would be visible to everybody who lists processes."""
    with tempfile.TemporaryDirectory(prefix="fw") as elsewhere:
        opened = Path(elsewhere, "opened")
        browser = Path(elsewhere, "browser")
        browser.write_text(f'#!/bin/sh\necho "$@" > {opened}.part && mv {opened}.part {opened}\n')
        browser.chmod(0o700)
        with demo(
            "--fast", "--json", "--open", scratch=scratch, BROWSER=f"{browser} %s"
        ) as running:
            assert json.loads(running.line())["event"] == "began"
            until(lambda: len(processes_at(scratch)) == 4)  # the control server, too
            told = json.loads(running.line())
            while told["event"] != "page":
                told = json.loads(running.line())
            until(opened.exists)

            def is_interrupted():
                running.kill(signal.SIGINT)  # again and again: the user is impatient
                return running.process.poll() is not None

            until(is_interrupted)
            _, errors = running.output()
        assert opened.read_text().strip() == f"file://{told['opener']}"
    assert running.process.returncode == 130
    assert json.loads(errors)["error"] == "Interrupted"
    assert list(scratch.iterdir()) == []
    assert processes_at(scratch) == []


def test_processes_end_with_a_demo_that_is_killed(scratch):
    with demo("--fast", "--json", scratch=scratch) as running:
        assert json.loads(running.line())["event"] == "began"
        until(lambda: len(processes_at(scratch)) == 3)
    until(lambda: processes_at(scratch) == [])


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ((7, {"a": 1, "b": 2}), []),
        ((7, {"a": 1, "b": 3}), ["b"]),
        ((7, {"a": 1}), ["b"]),
        ((7, {"a": 1, "b": 2, "c": 0}), ["c"]),
        ((6, {"a": 1, "b": 2}), ["version 6, expected 7"]),
        ((None, {}), ["version None, expected 7"]),
    ],
)
def test_every_difference_is_named(held, found):
    assert differing((7, {"a": 1, "b": 2}), held) == found


def test_a_longer_story_is_given_up_later():
    limit = SIZES["full"].limit_seconds
    assert Options().limit_seconds == limit
    assert Options(wanted_steps=12).limit_seconds == limit
    assert Options(wanted_steps=6000).limit_seconds == 100 * limit
    assert Options(seconds=3600.0).limit_seconds == 36_000


def test_the_file_that_leads_a_browser_to_the_page_is_private(scratch):
    path = scratch / "page.html"
    write_opener(path, "http://127.0.0.1:1/#token=abc")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "url=http://127.0.0.1:1/#token=abc" in path.read_text()
    scratch.chmod(0o755)
    with pytest.raises(PeerRefused, match="others"):
        write_opener(scratch / "other.html", "http://127.0.0.1:1/#token=abc")


def test_a_directory_with_something_in_it_is_not_written_into(scratch):
    (scratch / "mine").touch()
    with demo("--run", str(scratch), scratch="/tmp") as running:
        _, errors = running.output()
    assert running.process.returncode == 5
    assert "empty" in errors
    assert [path.name for path in scratch.iterdir()] == ["mine"]


def test_without_torch_the_demo_says_what_to_install():
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['demo']; "
        f"runpy.run_path({str(DEMO)!r}, run_name='__main__')"
    )
    done = run_python(code)
    assert done.returncode == 5
    assert "pip install 'flyweight[torch]'" in done.stderr


def test_the_command_flyweight_demo_names_its_successor():
    done = run("demo", "--fast")
    assert done.returncode == 2
    assert "python examples/demo" in done.stderr
