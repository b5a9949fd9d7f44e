"""Commands as processes of their own, for tests that watch them while they run."""

import signal
import subprocess
import sys

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
