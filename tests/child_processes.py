"""Processes for tests: a function in a child, a program read line by line, and what they leave.

Every wait ends by an event. Its limit, `LIMIT`, only finds hangs: no test may depend on how fast the
machine is. A process that a `with` statement started does not outlive it.
"""

import gc
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and what tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LIMIT = 60.0
"""Seconds after which a wait for something that must happen counts as a hang."""


class Hang(AssertionError):
    """What must happen did not happen within the limit."""


class Child:
    """A function in its own process; `result` returns its value, or fails with its traceback.

    The function gets one end of a pipe as its last argument.
    """

    def __init__(self, function, *args, context=FORK):
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_call, args=(theirs, function, args))
        self.process.start()
        theirs.close()
        self.pid = self.process.pid

    def send(self, message):
        self._pipe.send(message)

    @property
    def has_told(self):
        """True if `told` returns at once."""
        return self._pipe.poll()

    def told(self, timeout=LIMIT):
        """Return the next message of the child."""
        if not self._pipe.poll(timeout):
            raise Hang(f"child {self.pid} sent nothing in {timeout} s")
        return self._pipe.recv()

    def result(self, timeout=LIMIT):
        """Wait for the end of the function and return its value; skip its other messages."""
        kind, value = self.told(timeout)
        while kind != "result":
            assert kind != "error", value
            kind, value = self.told(timeout)
        self.join()
        return value

    def join(self, timeout=LIMIT):
        """Wait for the end of the process and return its exit code."""
        # Not by the sentinel: the child's own children may have inherited it.
        until(lambda: self.process.exitcode is not None, timeout)
        return self.process.exitcode

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def stop(self):
        """Send SIGSTOP and wait until the process is stopped."""
        self.kill(signal.SIGSTOP)
        until(lambda: self.is_stopped)

    @property
    def is_stopped(self):
        return _state_of(self.pid) == "T"

    def go_on(self):
        self.kill(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        if self.process.exitcode is None:
            self.go_on()
            self.process.kill()
            self.join()
        self.process.close()
        self._pipe.close()


def _state_of(pid):
    """Return the kernel's letter for a process's state."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _call(pipe, function, args):
    try:
        value = function(*args, pipe)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
    pipe.send(("result", value))
    os._exit(0)


def exit_code(function, *args):
    """Run a function in a fork; return its exit code: what the function returns, or 1.

    Cheaper than a Child, for tests that need hundreds. pytest's own timeout is the deadline.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = function(*args) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Command:
    """A program in its own process: lines to its input, lines from its output.

    What it writes to its error output is kept in a file, so that it never waits for a reader.
    """

    def __init__(self, *words, stdout=subprocess.PIPE, stderr=None, **environment):
        self._unread, self._errors = b"", tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            list(map(str, words)), bufsize=0, env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=stdout, stderr=self._errors if stderr is None else stderr,
        )  # fmt: skip
        self.pid = self.process.pid

    def line(self, timeout=LIMIT):
        """Return the next line of output, without its end."""
        deadline, output = time.monotonic() + timeout, self.process.stdout
        while b"\n" not in self._unread:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([output], [], [], left)[0]:
                raise Hang(f"no line in {timeout} s")
            more = os.read(output.fileno(), 1 << 20)
            assert more, f"it ended with {self.join()}: {self.errors}"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def ask(self, text, timeout=LIMIT):
        """Send a line and return the next one."""
        self.process.stdin.write(f"{text}\n".encode())
        return self.line(timeout)

    def join(self, timeout=LIMIT):
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout)

    def output(self, timeout=LIMIT):
        """Wait for the end and return the rest of the output, and all error output."""
        rest, _ = self.process.communicate(timeout=timeout)
        out, self._unread = self._unread + (rest or b""), b""
        return out.decode(), self.errors

    @property
    def errors(self):
        """What the program has written to its error output so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)

    def end(self, number=signal.SIGINT):
        """Send a signal, wait for the end and return what `output` returns."""
        self.kill(number)
        return self.output()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.kill()
        self.process.communicate(timeout=LIMIT)
        self._errors.close()


def run_python(code, *words, prefix=(), flags=(), timeout=4 * LIMIT, **options):
    """Run a Python program to its end; return the completed process with its output as text.

    prefix: words before the command, such as those of a `netns.Host`.
    """
    command = [*prefix, sys.executable, *flags, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


class Terminal:
    """A terminal for a program to write to: its other end is `file`."""

    def __init__(self):
        self._ours, self.file = pty.openpty()
        self.text = b""

    def close_file(self):
        """Close this process's copy of the other end, so that the text ends with the program."""
        os.close(self.file)
        self.file = None

    def read_until(self, text, seconds=LIMIT):
        """Collect what the program writes until it contains a text."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._ours], [], [], left)[0]:
                raise Hang(f"no {text} in {self.text}")
            try:
                self.text += os.read(self._ours, 1 << 16)
            except OSError:  # the program has ended
                raise AssertionError(f"no {text} in {self.text}") from None

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        if self.file is not None:
            self.close_file()
        os.close(self._ours)


def resources():
    """Return what a process must not leak: threads, open files, mapped shared memory."""
    gc.collect()  # else what earlier tests have left may go in the middle of this one
    threads = [t.name for t in threading.enumerate() if t.name.startswith("flyweight")]
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    kinds = sorted(f.split(":")[0] if ":" in f else f for f in files if "/dev/pts" not in f)
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:flyweight" in line for line in maps)
    return {"threads": threads, "files": kinds, "mapped": mapped}


def shared_files():
    """Return what is in /dev/shm, but for what other tests' processes make and remove.

    Those are the cells NAME.NUMBER of FastDeploy, and the semaphores of multiprocessing.
    """
    return {
        name
        for name in os.listdir("/dev/shm")
        if not name.rpartition(".")[2].isdecimal() and not name.startswith("sem.")
    }


def settled(before, seconds=LIMIT):
    """Wait for the resources to be as before; return them as they are then."""
    deadline = time.monotonic() + seconds
    while (now := resources()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return now


@contextmanager
def in_time(seconds, *, early=0.1):
    """Fail unless the block ends at its deadline: not before it, and not half a hang after it.

    What must not end it, such as another deadline, has to be further away than that.
    """
    started = time.monotonic()
    yield
    spent = time.monotonic() - started
    assert seconds - early <= spent < seconds + LIMIT / 2, f"{spent:.2f} s for {seconds:g} s"


def until(claim, seconds=LIMIT):
    """Wait until a claim holds; fail if that takes as long as a hang."""
    deadline = time.monotonic() + seconds
    while not claim():
        if time.monotonic() >= deadline:
            raise Hang(f"{claim} did not come true in {seconds} s")
        time.sleep(0.005)


def path_without(prefixes, place):
    """Return sys.path as if packages with these prefixes were not installed.

    Directories that have one are replaced by new ones in `place`, of links to everything else.
    """
    found = []
    for number, each in enumerate(map(Path, sys.path)):
        names = [path.name for path in each.iterdir()] if each.is_dir() else []
        kept = [name for name in names if not name.lstrip(".").startswith(prefixes)]
        if len(kept) == len(names):
            found.append(str(each))
            continue
        bare = place / str(number)
        bare.mkdir()
        for name in kept:
            (bare / name).symlink_to(each / name)
        found.append(str(bare))
    return found
