"""Processes of the demo, and how they talk.

A child tells its parent what happens, one line of JSON each, and exits when the parent does.
Engines answer requests at Unix sockets in a directory that only this user can enter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

_STOP_SECONDS = 5.0
_ANSWER_SECONDS = 20.0


def say(event, **fields):
    """Tell the parent process that something happened."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def exit_with_parent(on_word=lambda word: None):
    """Exit when the parent does, which closes standard input; call `on_word` with what it sends."""

    def listen():
        for line in sys.stdin:
            on_word(line.strip())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()


class Child:
    """A process as its parent sees it.

    Its events, and None when it has ended, are put into `inbox` as pairs (child, event).
    """

    def __init__(self, name, command, log, inbox):
        self.name, self._log, self._inbox = name, log, inbox
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches the parent only, which ends its children
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(Path(log).parent)},
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self._process.stdout as lines:
            for line in lines:
                with suppress(json.JSONDecodeError):  # the last line of a killed process
                    self._inbox.put((self, json.loads(line)))
        self._process.wait()
        self._inbox.put((self, None))

    def send(self, word):
        with suppress(OSError):  # it has ended
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def freeze(self):
        """Stop the process, and return once it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def unfreeze(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        """Send SIGKILL. Safe to repeat."""
        self._process.kill()

    def close(self):
        """Kill the process and wait for its end. Safe to repeat."""
        self.kill()
        self._process.wait(_STOP_SECONDS)
        self._reader.join(_STOP_SECONDS)
        with suppress(OSError):
            self._process.stdin.close()

    def ending(self):
        """Return how the process ended: its exit code, and the end of its standard error."""
        errors = self._log.read_text(errors="replace")[-2000:].strip()
        return f"{self.name} ended with {self._process.poll()}: {errors}"


def answer_requests(path, answer):
    """Answer requests at a Unix socket, for ever; each connection has its own thread."""
    path.unlink(missing_ok=True)  # of the process before this one, which was killed

    def serve(connection):
        with connection, suppress(OSError, EOFError):  # the client has gone
            while True:
                connection.send(answer(connection.recv()))

    with Listener(str(path), "AF_UNIX", backlog=64) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()


class Requests:
    """Sends requests to the engine at a path, and connects again if it was replaced."""

    def __init__(self, path):
        self._path, self._connection = path, None

    def ask(self, question):
        """Return the answer, or None if the engine is dead, or has no weights yet."""
        try:
            if self._connection is None:
                self._connection = Client(str(self._path), "AF_UNIX")
            self._connection.send(question)
            if self._connection.poll(_ANSWER_SECONDS):
                return self._connection.recv()
        except (OSError, EOFError):
            pass
        self.close()  # an answer that comes late must not be taken for the next one
        return None

    def close(self):
        if self._connection is not None:
            self._connection.close()
            self._connection = None
