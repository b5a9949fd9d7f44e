"""Ctrl-C at any moment of a command: it stops, and what it was writing is there whole or not at all."""

import itertools
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
import syscalls
from campaign import HANG_SECONDS
from child_processes import LIMIT, exit_code
from flyweight.cli import main  # once: each of hundreds of forks would import it anew
from rank_processes import run_ranks

COMMANDS = {
    "hf": ["convert", "run", "out", "--to", "hf"],
    "snapshot": ["convert", "run", "out", "--to", "snapshot"],
    "pdparams": ["convert", "run", "out.pdparams", "--to", "pdparams"],
    "prune": ["prune", "run", "--keep", "1"],
}
FILES = ("stores/draft.py", "verbs/commit.py", "verbs/convert.py")
"""What hands a draft on, from where it is made to where it is removed."""
WRITING = {"reserve", "write", "flush", "commit", "emit"}
"""What they do between the two; the interrupts at calls are for that."""


def interrupt():
    signal.raise_signal(signal.SIGINT)


def at_calls(number):
    """Interrupt before call `number // 2` that changes the disk, or right after it."""
    count = 0

    def act(name, original, args, kwargs):
        nonlocal count
        here, count = count, count + 1
        if number == 2 * here:
            interrupt()
        result = original(*args, **kwargs)
        if number == 2 * here + 1:
            interrupt()
        return result

    syscalls.wrap(act)
    return lambda: count > number // 2


def at_instructions(number):
    """Interrupt before instruction `number` since the draft was made; each counts once."""
    seen = set()

    def is_made():
        return any(name.startswith(".draft-") for name in os.listdir())

    def is_writing(frame):
        while frame is not None and frame.f_code.co_name not in WRITING:
            frame = frame.f_back
        return frame is not None

    def trace(frame, event, argument):
        code = frame.f_code
        if not code.co_filename.endswith(FILES) or (event == "call" and is_writing(frame)):
            return None
        frame.f_trace_opcodes = True
        if (
            event == "opcode"
            and (seen or is_made())
            and (where := (code, frame.f_lasti)) not in seen
        ):
            seen.add(where)
            if len(seen) == number + 1:
                sys.settrace(None)
                interrupt()
        return trace

    sys.settrace(trace)
    return lambda: len(seen) > number


def command(words, arm, number):
    """Run a command here and return its exit code, and whether it was interrupted."""
    was_interrupted = arm(number)
    try:
        code = main(words, standalone_mode=False)
    except SystemExit as end:
        code = end.code
    finally:
        sys.settrace(None)
    return code or 0, was_interrupted()


def attempt(words, arm, number):
    """Do what `command` does in a fork; return its exit code, None if it ended before that."""

    def work():
        code, was_interrupted = command(words, arm, number)
        return code if was_interrupted else 98

    code = exit_code(work)
    return None if code == 98 else code


def check(place, kind):
    """Raise unless everything that is there is whole."""
    there = sorted(os.listdir(place))
    assert there in (["run"], sorted({"run", COMMANDS[kind][2]})), there
    assert not [name for name in os.listdir(place / "run") if name.startswith(".")]
    for each in there:
        names = os.listdir(place / each) if os.path.isdir(place / each) else []
        assert not [name for name in names if name.startswith(".")], names
        if each == "run" or names or os.path.isfile(place / each):
            with fw.open(place / each) as stored:
                assert stored.read("w").tobytes() == weights(2)["w"].tobytes()
        else:
            assert kind == "snapshot"  # the run's directory, before its first version


def weights(version):
    return {"w": np.arange(5000) + version, "b": np.ones((2, 3), np.float16)}


def rounds(root, kind, way, stride):
    """Interrupt a command at every moment, or every few, until it is over before."""
    arm = {"calls": at_calls, "instructions": at_instructions}[way]
    os.fsync = lambda fd: None  # no power cut comes here, and there are hundreds of rounds
    for version in (1, 2):
        fw.save(weights(version), Path(root) / "run", version=version)
    outcomes = []
    for number in itertools.count(0, int(stride)):
        place = Path(root) / str(number)
        shutil.copytree(Path(root) / "run", place / "run")
        os.chdir(place)
        code = attempt(COMMANDS[kind], arm, number)
        assert code in (0, 130, None), f"moment {number}: {code}"
        try:
            check(place, kind)
        except AssertionError as error:
            raise AssertionError(f"moment {number}") from error
        if code is None:
            break
        outcomes.append(code)
    print(json.dumps(outcomes))


def outcomes_of(place, kind, way, stride):
    words = (place, kind, way, stride)
    done = run_ranks(0, __file__, "rounds", *words, framework="numpy", timeout=HANG_SECONDS)
    return json.loads(done.stdout.splitlines()[-1])


FEW_AND_ALL = pytest.mark.parametrize(
    "is_every",
    [
        pytest.param(False, marks=pytest.mark.check, id="few"),
        pytest.param(True, marks=pytest.mark.campaign, id="every"),
    ],
)


@FEW_AND_ALL
@pytest.mark.parametrize("kind", COMMANDS)
def test_interrupted_at_calls_that_change_the_disk_nothing_is_left_behind(tmp_path, kind, is_every):
    """Before a call and after one, in turn."""
    outcomes = outcomes_of(tmp_path, kind, "calls", 1 if is_every else 3)
    assert len(outcomes) > (8 if is_every else 2)
    assert 130 in outcomes


@FEW_AND_ALL
def test_interrupted_at_instructions_nothing_is_left_behind(tmp_path, is_every):
    """Also between the draft's making and the `with` that clears it away."""
    outcomes = outcomes_of(tmp_path, "hf", "instructions", 1 if is_every else 19)
    assert len(outcomes) > (100 if is_every else 5)
    assert 130 in outcomes


def pressed_again(root, verb):
    """Press Ctrl-C again and again while a thread's system call takes long; print how many are left.

    The call is held until the interrupts are through, or the verb has returned without waiting.
    """
    run = Path(root) / "run"
    state = {f"w{n}": np.full(4 << 20, n, np.uint8) for n in range(4)}
    if verb == "load":
        fw.save(state, run)
    name = {"save": "pwrite", "load": "preadv", "fsync": "fsync"}[verb]
    original, inside = getattr(os, name), []
    entered, over, returned = (threading.Event() for _ in range(3))

    def held(*args):
        if threading.current_thread() is threading.main_thread():
            return original(*args)
        inside.append(args[0])
        entered.set()
        over.wait(LIMIT)
        try:
            return original(*args)
        finally:
            inside.remove(args[0])

    def press():
        entered.wait(LIMIT)
        for _ in range(5):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            # What returns too early does so meanwhile. On a slow machine it may come too late to
            # be seen; what waits as it must is never in time.
            if returned.wait(0.05):
                break
        over.set()

    setattr(os, name, held)
    finger = threading.Thread(target=press)
    finger.start()
    try:
        fw.load(run, into=state) if verb == "load" else fw.save(state, run, version=1)
    except KeyboardInterrupt:
        returned.set()
        left = len(inside)
    finger.join()
    print(json.dumps(left))


@pytest.mark.check
@pytest.mark.parametrize("verb", ["save", "fsync", "load"])
def test_however_often_interrupted_no_thread_works_on_after_the_call(tmp_path, verb):
    """It would write by a descriptor that is closed by then, and may be another file's."""
    done = run_ranks(0, __file__, "pressed_again", tmp_path, verb, framework="numpy")
    assert json.loads(done.stdout.splitlines()[-1]) == 0
