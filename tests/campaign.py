"""The campaign: the tests that take too long for every change, room by room, to their end.

Run as `make campaign`, or `CAMPAIGN="live flows" make campaign` for some rooms. It sets a seed for
everything that is random, prints it, goes on after failures and ends with a summary.
"""

import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

_VARIABLE = "FLYWEIGHT_CAMPAIGN_SEED"
_TESTS = Path(__file__).parent
_REAL_VLLM = "real_vllm"
IS_CAMPAIGN = _VARIABLE in os.environ
SEED = int(os.environ.get(_VARIABLE, 7))
"""The seed of tests that choose at random: outside of a campaign always the same."""


def budget(usual, campaign):
    """Return how many examples a test tries: many more in a campaign."""
    return campaign if IS_CAMPAIGN else usual


HANG_SECONDS = budget(280, 3500)
"""The time in which a test that has many rounds must end: less than pytest's own limit."""


def _rooms():
    """Return the directories that hold tests, and `.` for the tests outside of them."""
    found = {path.parent.relative_to(_TESTS).parts[:1] for path in _TESTS.rglob("test_*.py")}
    return sorted("/".join(parts) or "." for parts in found)


def _command(room, seed):
    words = ["-m", "pytest", "--durations=3", "-m", "(campaign or hypothesis) and not gpu"]
    words.append("--timeout=3600")
    if room == _REAL_VLLM:
        folder = _TESTS / room
        return [".venv-vllm/bin/python", *words, f"--confcutdir={folder}", str(folder)]
    words += ["-n", "auto", "--dist", "worksteal", f"--hypothesis-seed={seed}"]
    places = sorted(_TESTS.glob("test_*.py")) if room == "." else [_TESTS / room]
    return [sys.executable, *words, *map(str, places)]


def main(chosen):
    """Run the rooms, or all of them; return 1 if a test failed."""
    if unknown := set(chosen) - set(rooms := _rooms()):
        raise SystemExit(f"no tests in {sorted(unknown)}; the rooms are {' '.join(rooms)}")
    seed = SEED if IS_CAMPAIGN else secrets.randbelow(1 << 31)
    print(
        f"seed {seed}; to repeat it: {_VARIABLE}={seed} CAMPAIGN='ROOM' make campaign", flush=True
    )
    rows = []
    for room in chosen or rooms:
        print(f"\n===== {room} =====", flush=True)
        started, failed = time.monotonic(), []
        with subprocess.Popen(
            _command(room, seed),
            env={**os.environ, _VARIABLE: str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            last = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip(" =\n") or last
                failed += re.findall(r"^(?:FAILED|ERROR) (\S+)", line)
        code = process.returncode
        is_good = code in (0, 5)  # 5: this room has no such tests
        rows.append((room, is_good, time.monotonic() - started, last, failed))
    print(f"\n===== campaign, seed {seed} =====")
    for room, is_good, seconds, last, failed in rows:
        print(f"{'good' if is_good else 'BAD ':4} {room:12} {seconds:6.0f} s  {last}")
        for name in failed:
            print(f"       {name}")
    return not all(is_good for _, is_good, *_ in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
