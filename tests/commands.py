"""Commands as a user types them: run to the end, or read while they run."""

import json
import subprocess
import sys

from click.testing import CliRunner

from child_processes import LIMIT, Command
from flyweight.cli import main

COMMAND = [sys.executable, "-m", "flyweight.cli"]


def start(*words, **options):
    """Start a command in its own process, for a `with` statement; see Command."""
    return Command(*COMMAND, *words, **options)


def run(*words):
    """Run a command in its own process; return the completed process."""
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=LIMIT, check=False
    )


def flyweight(*words, code=0):
    """Run a command in this process; return what it prints, decoded if --json is given."""
    words = list(map(str, words))
    argv, sys.argv = sys.argv, ["flyweight", *words]
    try:
        done = CliRunner().invoke(main, words)
    finally:
        sys.argv = argv
    assert done.exit_code == code, done.output
    text = done.stdout if code == 0 else done.stderr
    return json.loads(text) if "--json" in words else text
