"""Children: processes that tell what they do, a line of JSON each, and end with their parent.

A parent that is killed closes its end of a child's standard input, and the child ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

from flyweight.errors import TransferTimeout
from flyweight.host import is_running, state_of

Told = Mapping[str, Any]
Inbox = SimpleQueue[tuple["Child", Told | None]]

_STOP_SECONDS = 5.0
_TAIL_BYTES = 2000


# In a child.


def say(event: str, **fields: object) -> None:
    """Tell the parent something."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def obey(told: Callable[[str], None] = lambda word: None) -> None:
    """Call `told` with each word that the parent sends, and end when the parent does."""

    def listen() -> None:
        for line in sys.stdin:
            told(line.strip())
        os._exit(0)

    threading.Thread(target=listen, name="demo-parent", daemon=True).start()


# In the parent.


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals back until after the block. For the main thread.

    A process that is started and not known yet would be ended by nobody.
    """
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        each: signal.signal(each, lambda number, frame: came.append(number)) for each in kinds
    }
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        for number in came:
            signal.raise_signal(number)


class Child:
    """One process. What it tells, and None when it has ended, is put into an inbox."""

    def __init__(self, name: str, words: Sequence[str], errors: Path, inbox: Inbox) -> None:
        self.name, self._errors, self._inbox = name, errors, inbox
        with open(errors, "wb") as file:
            # A session of its own, so that Ctrl-C reaches only the parent, which ends all others.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                # What torch leaves in passing is removed with the rest.
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(errors.parent)},
            )
        self.pid = self._process.pid
        self._listener = threading.Thread(target=self._listen, name="demo-child", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(json.JSONDecodeError):  # the last line of one that was killed
                    self._inbox.put((self, json.loads(line)))
        self._process.wait()
        self._inbox.put((self, None))

    @property
    def code(self) -> int | None:
        """How the process ended; None while it has not."""
        return self._process.poll()

    def send(self, word: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """Have the process stand still, and return once it does."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = monotonic() + _STOP_SECONDS
        while state_of(self.pid) != "T":
            if monotonic() > deadline:
                raise TransferTimeout(f"{self.name} did not stop in {_STOP_SECONDS:g} s")
            sleep(0.0005)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL. Safe to repeat."""
        if self.code is None and is_running(self.pid):
            self._process.kill()

    def close(self) -> None:
        """End the process, whatever it does, and let go of its pipes. Safe to repeat."""
        self.kill()
        self._process.wait(_STOP_SECONDS)
        self._listener.join(_STOP_SECONDS)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def last_words(self) -> str:
        """Return the end of what it wrote to standard error."""
        data = self._errors.read_bytes()[-_TAIL_BYTES:]
        return data.decode(errors="replace").strip()
