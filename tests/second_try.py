"""A second try for tests that failed: at the end of the run, alone, in a process without xdist.

A plugin for pytest (`-p second_try`). A test that passes then is FLAKY: the run goes on, and its
last lines name it. It is a defect all the same, so more than `MOST_FLAKY` fail the run. A failure
that may be a wrong weight, a crash, a hang or a leak gets no second try.
"""

import re
import subprocess
import sys

import pytest

MOST_FLAKY = 2
MOST_TRIED = 6
"""With more failures than this, it is no bad luck, and none of them is tried again."""
_WEIGHTS = (
    r"\b(same|is_same|equal|tobytes|array_equal|assert_array_equal|digests?|weights|checksums|tokens"
    r"|holds|holding|are_at|serves|check_newest|is_whole)\b"
)
_LEAKS = r"\b(resources|settled|shared_files|leaks?|leaked|threads|files|mapped)\b"
_HANGS = r"\b(Hang|TimeoutExpired|BrokenBarrierError)\b|Timeout \(?>"
_WAITS = r"assert .*\.(wait|poll)\("
_CRASHES = (
    r"Fatal Python error|Segmentation fault|Bus error|core dumped|EOFError|ended with -(6|7|11)\b"
)


def final_reason(error, statement, text):
    """Return why a failure gets no second try, or an empty text.

    error: what was raised; statement: the failing line; text: the failure as it is printed, with
    what child processes said of theirs.
    """
    kinds = {type(each).__name__ for each in _all_of(error)}
    said = "\n".join(line for line in text.splitlines() if line.startswith("E "))
    if "DigestMismatch" in text:
        return "a digest differs"
    if re.search(_CRASHES, text) or "EOFError" in kinds:
        return "a process crashed"
    # A TimeoutError that an error of ours was raised from is a deadline that was kept.
    is_late = type(error).__name__ == "TimeoutError"
    if is_late or re.search(_HANGS, said) or re.search(_WAITS, statement):
        return "something hangs"
    if kinds & {"ResourceWarning", "PytestUnraisableExceptionWarning"}:
        return "something leaks"
    if "AssertionError" in kinds and re.search(_WEIGHTS, f"{statement}\n{said}"):
        return "weights may be wrong"
    if "AssertionError" in kinds and re.search(_LEAKS, statement):
        return "something may leak"
    return ""


def _all_of(error):
    """Return an error, what it was raised from, and the errors of a group."""
    found = [error]
    for each in found:
        found += getattr(each, "exceptions", ())
        if (cause := each.__cause__ or each.__context__) is not None:
            found.append(cause)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and call.excinfo is not None:
        statement = str(call.excinfo.traceback[-1].statement)
        report.final_reason = final_reason(call.excinfo.value, statement, report.longreprtext)
    return report


class _SecondTry:
    """Gathers the failures of a run, in the process that controls it."""

    def __init__(self, config):
        self._config, self._failed = config, {}

    def pytest_runtest_logreport(self, report):
        if report.failed:  # a worker that crashed has made no report of its own
            reason = getattr(report, "final_reason", "a process crashed")
            self._failed[report.nodeid] = self._failed.get(report.nodeid) or reason

    def pytest_collectreport(self, report):
        if report.failed:
            self._failed[report.nodeid] = "it cannot be collected"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        yield  # and all failures are printed
        if exitstatus != pytest.ExitCode.TESTS_FAILED or session.shouldfail or session.shouldstop:
            return
        flaky, red = [], []
        are_many = len(self._failed) > MOST_TRIED
        for name, reason in self._failed.items():
            if not reason and (are_many or len(flaky) > MOST_FLAKY):
                reason = "not tried again"
            if reason or not self._passes(name):
                red.append(f"{name}: {reason or 'failed twice'}")
            else:
                flaky.append(name)
        if len(flaky) > MOST_FLAKY:
            red.append(f"{len(flaky)} tests are flaky; at most {MOST_FLAKY} may be")
        for line in [f"FLAKY {name}" for name in flaky] + [f"RED {line}" for line in red]:
            print(line, flush=True)
        if not red:
            session.exitstatus = pytest.ExitCode.OK

    def _passes(self, name):
        print(f"\nsecond try, alone: {name}", flush=True)
        command = [sys.executable, "-m", "pytest", name]
        if confcutdir := self._config.getoption("confcutdir"):
            command.append(f"--confcutdir={confcutdir}")
        return subprocess.run(command, cwd=self._config.rootpath).returncode == pytest.ExitCode.OK


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not in xdist's workers
        config.pluginmanager.register(_SecondTry(config), "second-try-of-failed-tests")
