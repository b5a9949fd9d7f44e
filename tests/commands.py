"""Commands as a user types them: to their end, or watched while they run."""

import json
import signal
import subprocess
import sys

from click.testing import CliRunner

from flyweight.cli import main

COMMAND = [sys.executable, "-m", "flyweight.cli"]


class Running:
    """A command that goes on; its lines as they come."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.rstrip("\n")

    def stop(self, number=signal.SIGINT):
        self.process.send_signal(number)
        return self.process.communicate(timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.process.kill()
        self.process.communicate(timeout=20)


def flyweight(*words, code=0):
    """Run a command in this process; what it prints, and with --json what that says."""
    words = list(map(str, words))
    argv, sys.argv = sys.argv, ["flyweight", *words]
    try:
        done = CliRunner().invoke(main, words)
    finally:
        sys.argv = argv
    assert done.exit_code == code, done.output
    text = done.stdout if code == 0 else done.stderr
    return json.loads(text) if "--json" in words else text


def run(*words):
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
