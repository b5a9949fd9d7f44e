"""Apply deliberate faults to copies of the tree, one at a time, and say which ones the tests notice.

The tests that a mutant names run first. Only if they all pass does the rest of the suite decide.
"""

import argparse
import importlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NAMED_SECONDS, SUITE_SECONDS = 900, 1200
"""Only for hangs of the runner itself: a test that hangs fails by its own limit."""
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
MARKS = ("campaign", "gpu")  # tests with these do not count
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__")
HUNG = "no end"
NO_XDIST = ("-p", "no:xdist")
one_suite = threading.Lock()  # two at once would be too slow for the limit

sys.path[0] = str(HERE.parent)


class Copy:
    """A copy of the tree, in which one run of tests takes place at a time."""

    def __init__(self, tree, root, number):
        self.place, self.is_stopped = root / str(number), False
        self._base = root / f"t{number}"
        shutil.copytree(tree, self.place, symlinks=True, ignore=NOT_COPIED)

    def judge(self, mutant, is_quick):
        """Return whether a mutant is noticed, and by what or why not; None if it is not there."""
        texts, why = changed(self.place, mutant)
        if texts is None:
            return None, why
        self._write(mutant.file, texts[1])
        try:
            tests = named(self.place, mutant)
            found = self._sure_fault([*NO_XDIST, *tests], NAMED_SECONDS) if tests else None
            if found or is_quick:
                return bool(found), found or "by the tests that it names"
            return self._judged_by_all(mutant.file, texts)
        finally:
            self._write(mutant.file, texts[0])

    def _judged_by_all(self, file, texts):
        unlucky = []
        while len(unlucky) < 4:
            words = ["-n", "auto", "--dist", "worksteal"]
            for test in unlucky:
                words += ["--deselect", test]
            with one_suite:
                found = self._fault(words, SUITE_SECONDS)
            if found is None or found.startswith(HUNG):
                return False, found or "by any test"
            alone = [*NO_XDIST, found] if "::" in found else words
            if self._fault(alone, SUITE_SECONDS):
                self._write(file, texts[0])
                if not self._fault(alone, SUITE_SECONDS):
                    return True, found
                self._write(file, texts[1])
            unlucky.append(found)
        return False, f"for sure: {', '.join(unlucky)} fail by chance"

    def red(self, tests):
        """Return what fails although nothing is changed, if something does so twice."""
        return self._sure_fault([*NO_XDIST, *tests], NAMED_SECONDS) if tests else None

    def _sure_fault(self, arguments, seconds):
        """Return what fails, if it fails again: a test alone, or else all of them."""
        found = self._fault(arguments, seconds)
        if found is None or found.startswith(HUNG):
            return None
        again = [*NO_XDIST, found] if "::" in found else arguments
        return found if self._fault(again, seconds) else None

    def _write(self, file, text):
        path = self.place / "src/flyweight" / file
        path.write_text(text)
        # What was compiled from another text in the same second would be taken for it.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _fault(self, arguments, seconds):
        """Run tests; return the id of one that failed, or what else went wrong, or None."""
        if self.is_stopped:
            raise KeyboardInterrupt
        known = (self.place / "pyproject.toml").read_text()
        marks = " and ".join(f"not {mark}" for mark in MARKS if f'"{mark}:' in known)
        command = [*PYTEST, "-m", marks, f"--basetemp={self._base}", *arguments]
        environment = os.environ | {"PYTHONPATH": f"{self.place}/src", "MUTANTS": str(self.place)}
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                command, cwd=self.place, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = HUNG
                os.killpg(process.pid, signal.SIGKILL)
            self.kill()
            process.wait()
            out.seek(0)
            text = out.read()
        if code in (0, 5):  # 5: no test with these marks
            return None
        if code == HUNG:
            return f"{HUNG} in {seconds} s"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - .*)?$", text, re.MULTILINE)
        if failed:
            return failed[1]
        last = (text.splitlines() or [""])[-1]
        return f"a process that died of signal {-code}" if code < 0 else f"exit {code}: {last:.200}"

    def kill(self):
        """Kill all processes of a run, also those in groups of their own, by their environment."""
        mark, is_clear = f"MUTANTS={self.place}\0".encode(), False
        while not is_clear:
            is_clear = True
            for path in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    if mark in path.read_bytes():
                        os.kill(int(path.parent.name), signal.SIGKILL)
                        is_clear = False


def collected(rooms):
    """Return the mutants of each room."""
    names = {path.stem for path in HERE.glob("*.py")} - {"__init__", "mutant", "run"}
    if unknown := set(rooms or ()) - names:
        sys.exit(f"no rooms {sorted(unknown)}, only {sorted(names)}")
    found = {
        name: importlib.import_module(f"mutants.{name}").MUTANTS for name in rooms or sorted(names)
    }
    claims = [mutant.claim for mutants in found.values() for mutant in mutants]
    if twice := {claim for claim in claims if claims.count(claim) > 1}:
        sys.exit(f"claims that are there twice: {sorted(twice)}")
    return found


def changed(tree, mutant):
    """Return a file's text without and with the fault, and ""; or None and why it has none."""
    path = tree / "src/flyweight" / mutant.file
    text = path.read_text() if path.exists() else ""
    if (count := text.count(mutant.old)) != 1:
        return None, f"its text is there {count} times"
    new = text.replace(mutant.old, mutant.new)
    compile(new, mutant.file, "exec")
    return (text, new), ""


def named(tree, mutant):
    """Return those of the tests that a mutant names which are in a tree."""

    def is_there(path, function="", *_):
        place = tree / path
        return (
            place.is_file() and f"def {function}(" in place.read_text()
            if function
            else place.exists()
        )

    return tuple(test for test in mutant.tests.split() if is_there(*test.split("::")))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", nargs="+", help="only the mutants of these files")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="where src and tests are")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=int, default=90, help="how many a full run must notice")
    parser.add_argument("--quick", action="store_true", help="without the rest of the suite")
    options = parser.parse_args()
    tree, rooms = options.tree.resolve(), collected(options.room)
    everything = [(room, mutant) for room, mutants in rooms.items() for mutant in mutants]
    bad = [f"{m.claim!r} in {m.file}: {why}" for _, m in everything if (why := changed(tree, m)[1])]
    bad += [f"{m.claim!r}: {test} is not there" for _, m in everything for test in m.tests.split()
            if test not in named(tree, m)]  # fmt: skip
    if bad and tree == REPOSITORY:
        sys.exit("\n".join(bad))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    root, results = Path(tempfile.mkdtemp(prefix="m")), []
    copies, idle, pool = [], queue.SimpleQueue(), ThreadPoolExecutor(options.jobs)

    def in_a_copy(method, *arguments):
        copy, started = idle.get(), time.monotonic()
        try:
            return method(copy, *arguments), time.monotonic() - started
        finally:
            idle.put(copy)

    try:
        for number in range(options.jobs):
            copies.append(Copy(tree, root, number))
            idle.put(copies[-1])
        sets = {named(tree, mutant) for _, mutant in everything} - {()}
        print(f"{len(everything)} mutants; first their {len(sets)} sets of tests without a fault")
        futures = {pool.submit(in_a_copy, Copy.red, tests): tests for tests in sets}
        for future in as_completed(futures):
            if red := future.result()[0]:
                sys.exit(f"red twice without a fault: {red}, of {' '.join(futures[future])}")
        futures = {
            pool.submit(in_a_copy, Copy.judge, mutant, options.quick): (room, mutant)
            for room, mutant in everything
        }
        for future in as_completed(futures):
            room, mutant = futures[future]
            (is_noticed, text), seconds = future.result()
            word = {True: "NOTICED by", False: "NOT NOTICED", None: "NOT THERE:"}[is_noticed]
            print(f"{room}: {mutant.claim}: {word} {text} in {seconds:.0f} s", flush=True)
            record = {"room": room, "claim": mutant.claim, "file": mutant.file}
            results.append({**record, "noticed": is_noticed, "by": text, "seconds": seconds})
    finally:
        for copy in copies:
            copy.is_stopped = True
            copy.kill()
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(root, ignore_errors=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{'room':12}noticed  not  not there")
    for room in [*rooms, "total"]:
        found = [each["noticed"] for each in results if room in ("total", each["room"])]
        print(f"{room:12}{found.count(True):7}{found.count(False):5}{found.count(None):11}")
    sys.exit(not options.room and found.count(True) < options.least)


if __name__ == "__main__":
    main()
