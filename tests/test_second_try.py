"""Which failed tests get a second try, and what a run says of them."""

import re
import shutil
from pathlib import Path

import pytest

from child_processes import LIMIT, run_python

PLUGIN = Path(__file__).with_name("second_try.py")
FLAKY = """
from pathlib import Path

def fails_once(name):
    mark = Path(__file__).with_name(name)
    was_there = mark.exists()
    mark.touch()
    assert was_there, "a first try fails"
"""


@pytest.fixture
def run_tests(tmp_path):
    """Runs tests in a project of their own; returns the exit code and the last lines."""
    shutil.copy(PLUGIN, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = -q\n")
    (tmp_path / "flaky.py").write_text(FLAKY)

    def run(*tests, workers=0, more=()):
        (tmp_path / "test_these.py").write_text("\n".join(["from flaky import *", *tests]))
        code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
        words = [
            "-p",
            "second_try",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hypothesispytest",
            *(["-n", workers] if workers else []),
            *more,
        ]
        done = run_python(
            code, *words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, timeout=4 * LIMIT
        )
        lines = re.findall(r"^(?:FLAKY|RED) .*", done.stdout, re.MULTILINE)
        assert lines == done.stdout.splitlines()[len(done.stdout.splitlines()) - len(lines) :]
        return done.returncode, [line.replace("test_these.py::", "") for line in lines], done.stdout

    return run


def fails(name, statement):
    return f"def test_{name}():\n    {statement}\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_test_that_passes_alone_is_flaky_and_the_run_goes_on(run_tests, workers):
    code, lines, output = run_tests(
        fails("unlucky", "fails_once('one')"), fails("good", "pass"), workers=workers
    )
    assert (code, lines) == (0, ["FLAKY test_unlucky"])
    assert "a first try fails" in output


def test_a_test_that_fails_alone_is_red(run_tests):
    code, lines, _ = run_tests(fails("wrong", "assert 1 == 2"), fails("other", "fails_once('two')"))
    assert (code, lines) == (1, ["FLAKY test_other", "RED test_wrong: failed twice"])


def test_more_than_two_flaky_tests_fail_the_run(run_tests):
    tests = [fails(f"unlucky_{n}", f"fails_once('{n}')") for n in range(4)]
    code, lines, _ = run_tests(*tests)
    assert code == 1
    assert [line.split()[0] for line in lines] == ["FLAKY"] * 3 + ["RED"] * 2


FINAL = {
    "digest": "class DigestMismatch(Exception): pass\n    raise DigestMismatch",
    "unequal": "import numpy\n    assert numpy.ones(2).tobytes() == numpy.zeros(2).tobytes()",
    "crash": "import os\n    os._exit(3)",
    "limit": "import subprocess\n    subprocess.run(['sleep', '9'], timeout=0.01)",
    "future": "from concurrent.futures import Future\n    Future().result(0.01)",
    "hang": "class Hang(AssertionError): pass\n    raise Hang",
    "leak": "import os\n    files = 1\n    assert files == 0",
    "wait": "import threading\n    assert threading.Event().wait(0.01)",
    "child": "kind, value = 'error', 'assert holds(model, 2)'\n    assert kind != 'error', value",
    "group": "raise ExceptionGroup('two', [ResourceWarning('left open'), ValueError()])",
}


@pytest.mark.parametrize("part", [0, 1])
def test_wrong_weights_crashes_hangs_and_leaks_get_no_second_try(run_tests, part):
    names = list(FINAL)[part::2]
    once = "if __import__('os').path.exists('{0}'): return\n    open('{0}', 'w').close()\n    {1}"
    tests = [fails(name, once.format(name, FINAL[name])) for name in names]
    code, lines, output = run_tests(*tests, workers=2)
    assert code == 1
    assert "second try" not in output
    assert "not tried again" not in output
    assert sorted(line.split()[1].rstrip(":") for line in lines) == sorted(
        f"test_{name}" for name in names
    )


def test_many_failures_are_no_bad_luck_and_none_is_tried_again(run_tests):
    code, lines, output = run_tests(*[fails(f"wrong_{n}", f"fails_once('{n}')") for n in range(9)])
    assert code == 1
    assert [line.partition(": ")[2] for line in lines] == ["not tried again"] * 9
    assert "second try" not in output


def test_a_run_that_was_cut_short_stays_red(run_tests):
    tests = [fails("unlucky", "fails_once('one')"), fails("other", "pass")]
    code, lines, _ = run_tests(*tests, more=["-x"])
    assert (code, lines) == (1, [])


def test_tests_that_cannot_be_collected_are_red(run_tests):
    code, lines, _ = run_tests("import nothing_of_that_name", fails("good", "pass"))
    assert code != 0
    assert not any(line.startswith("FLAKY") for line in lines)
