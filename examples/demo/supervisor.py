"""The supervisor: it starts the demo's processes, restarts engines, and follows what they report.

Everything that happens is passed to `tell`. Only `wait` waits, each time with a deadline, and
handles the messages of the processes meanwhile.
"""

from __future__ import annotations

import html
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from time import monotonic

import numpy as np
from processes import Child, Requests
from rich.markup import escape

from flyweight.cli import human
from flyweight.errors import PeerFailed, PeerRefused, TransferTimeout

HERE = Path(__file__).parent
_DIGITS = np.array([[3, 1, 4, 1, 5, 9]], np.uint8)
_POLL_SECONDS = 0.05
_STEP_SECONDS = 0.5
"""How long the event of a step waits for the engines' pauses."""
_WAIT_SECONDS = 90.0
_MAX_RESTARTS = 5
_SHOWN_STEPS = 20
_BAR = 20


class Users:
    """Send requests to one engine, one after the other, and count the answers."""

    def __init__(self, path, size):
        self._requests, self._prompt = Requests(path), _DIGITS[:, : size.num_digits]
        self._num_long_prompts = size.num_long_prompts
        self.num_answered = 0
        self.versions = set()
        """The versions that answered, since somebody last emptied this set."""
        self.example = ""
        """The last prompt and its answer."""
        self.send_long = False
        """Whether to send long requests, so that one is always running."""
        self._is_over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        seed = 0
        while not self._is_over.wait(0.0 if self.send_long else _POLL_SECONDS):
            prompts = self._prompt.repeat(self._num_long_prompts if self.send_long else 1, 0)
            reply = self._requests.ask((prompts, seed))
            if reply is None:
                self._is_over.wait(_POLL_SECONDS)
                continue
            version, answers = reply
            seed += 1
            self.num_answered += 1
            self.versions.add(version)
            self.example = " → ".join("".join(map(str, row)) for row in (prompts[0], answers[0]))

    def close(self):
        self._is_over.set()


class Engine:
    """One engine: its present process, what that process reports, and its users."""

    def __init__(self, name, start, users):
        self.name, self.users, self._start = name, users, start
        self.num_restarts = self.num_failures = 0
        self.pauses_ms, self.speeds = [], []
        self._reset()

    def _reset(self):
        self.state, self.version = "", None
        self.updates = []
        """The updates that the present process has made."""
        self.child = self._start()

    def restart(self):
        """Replace a process that ended."""
        self.child.close()
        self.num_restarts += 1
        self._reset()

    def add_update(self, message):
        """Record an update that the process made."""
        self.updates.append(message)
        if message["pause_ms"] is not None:
            self.pauses_ms.append(message["pause_ms"])
        if message["is_live"]:
            self.speeds.append(message["gb_per_second"])

    def result(self, version, differing):
        """Return this engine's row of the last table."""
        return {
            "name": self.name,
            "version": version,
            "num_rounds": len(self.pauses_ms) + self.num_restarts + 1,
            "median_pause_ms": median(self.pauses_ms) if self.pauses_ms else None,
            "max_pause_ms": max(self.pauses_ms, default=None),
            "gb_per_second": median(self.speeds) if self.speeds else None,
            "num_answered": self.users.num_answered,
            "num_restarts": self.num_restarts,
            "differing": differing,
            "is_same": not differing,
        }


class Supervisor:
    """A trainer, engines with their users, and the control server if a port is given."""

    def __init__(self, paths, options, show):
        self.paths, self._options, self._show = paths, options, show
        self.began = monotonic()
        self.engines, self.trainer = [], None
        self.latest = {}
        """The present trainer's last message of each kind."""
        self.rewards = {}
        """The mean reward of each step."""
        self.is_kill_expected = False
        """Whether the trainer's next end is part of the story."""
        self.pending_step = None
        """A published step that was not shown yet."""
        self._page = ""
        self._inbox, self._closing = SimpleQueue(), ExitStack()

    def tell(self, event, text, /, **fields):
        """Show that something happened: in words for people, in fields for machines."""
        seconds = round(monotonic() - self.began, 3)
        self._show(text, {"event": event, "seconds": seconds, **fields})

    # Processes.

    def start(self):
        """Start every process, and return once the first version is published."""
        for number in range(1, self._options.num_engines + 1):
            self._start_engine(f"engine-{number}")
        self.start_trainer()
        if self._options.port is not None:
            self._start_server()
        self.until("the first version", lambda: "published" in self.latest)

    def _child(self, name, *command):
        child = Child(name, command, self.paths.scratch / f"{name}.log", self._inbox)
        self._closing.callback(child.close)
        return child

    def _start_engine(self, name):
        words = HERE / "engine.py", name, *self.paths, self._options.size_name
        users = Users(self.paths.socket(name), self._options.size)
        self._closing.callback(users.close)
        self.engines.append(Engine(name, lambda: self._child(name, *words), users))

    def start_trainer(self):
        """Start a trainer. It continues after the last version that engines were offered."""
        last_version = self.latest.get("publishing", {}).get("version", -1)
        options, self.latest = self._options, {}
        numbers = options.num_engines, options.seed, last_version
        words = HERE / "trainer.py", *self.paths, options.size_name, *numbers
        self.trainer = self._child("trainer", *words)

    def _start_server(self):
        words = ["--port", self._options.port, "--run", self.paths.scratch]
        for engine in self.engines:
            words += ["--replica", f"{engine.name}={self.paths.cell(engine.name)}"]
        words += ["--store", self.paths.store, "--json"]
        self._child("server", HERE / "server.py", "serve", *words)
        self.until("the control server's page", lambda: self._page)
        opener = self.paths.scratch / "page.html"
        write_opener(opener, self._page)
        self.tell("page", f"page: {self._page}", page=self._page, opener=str(opener))

    def close(self):
        """End every process."""
        self._closing.close()

    # Messages.

    def until(self, what, condition):
        """Handle messages until a condition is true; raise TransferTimeout if it never is."""
        if not self.wait(condition, _WAIT_SECONDS):
            raise TransferTimeout(f"the demo waited {_WAIT_SECONDS:g} s for {what}")

    def wait(self, condition, seconds):
        """Handle messages until a condition is true; return False if it is not in time."""
        deadline, limit = monotonic() + seconds, self._options.limit_seconds
        while not condition():
            if monotonic() > deadline:
                return False
            if monotonic() > self.began + limit:
                raise TransferTimeout(f"the demo was not done in {limit:g} s")
            with suppress(Empty):
                self._handle(*self._inbox.get(timeout=min(seconds, _POLL_SECONDS)))
            self._tell_pending_step()
        return True

    def handle_messages(self):
        """Handle the messages that have arrived."""
        self.wait(self._inbox.empty, _WAIT_SECONDS)

    def _handle(self, child, message):
        for engine in self.engines:
            if child is engine.child:
                self._handle_engine(engine, message)
        if child is self.trainer:
            self._handle_trainer(child, message)
        elif child.name == "server":
            if message is None:
                raise PeerFailed(child.ending())
            self._page = message["page"]

    def _handle_engine(self, engine, message):
        if message is None:
            if engine.num_restarts == _MAX_RESTARTS:
                raise PeerFailed(f"{engine.child.ending()}, after {_MAX_RESTARTS} restarts")
            engine.restart()
            text = f"{engine.name} is started again, empty, as process {engine.child.pid}"
            self.tell("restarted", text, process=engine.name, pid=engine.child.pid)
        elif message["event"] == "updated":
            engine.add_update(message)
        else:
            engine.state, engine.version = message["state"], message["version"]
            if engine.state == "FAILED":
                engine.num_failures += 1
                reason = message["reason"]
                text = f"[red]{engine.name} FAILED and serves nothing[/], half-way: "
                text += escape(reason.partition("\n")[0])
                self.tell("failed", text, process=engine.name, reason=reason)

    def _handle_trainer(self, child, message):
        if message is None:
            if not self.is_kill_expected:
                raise PeerFailed(child.ending())
            self.trainer, self.is_kill_expected = None, False
            return
        event = message.pop("event")
        self.latest[event] = message
        if event == "started":
            self._tell_trainer(child, message)
        elif event == "step":
            self.rewards[message["step"]] = message["reward"]
        elif event == "saved":
            text = f"[dim]snapshot of version {message['version']} in {message['ms']:.0f} ms[/]"
            self.tell("saved", text, **message)
        elif event == "published":
            step = self.latest.get("step", {})
            if step.get("version") == message["version"]:
                self.pending_step = step, message, monotonic() + _STEP_SECONDS

    def _tell_trainer(self, child, message):
        text, version = f"trainer, process {child.pid}", message["version"]
        if message["recovered"] is None:
            size = f"{message['num_parameters'] / 1e6:.1f} M parameters"
            text += f", begins with {size} and publishes version {version}"
        else:
            text = f"[green]{text}, goes on from snapshot {message['recovered']}[/]"
            text += f" at step {message['step']}, and publishes it as version {version}"
        self.tell("trainer", text, pid=child.pid, **message)

    def _tell_pending_step(self):
        """Tell of a step once the engines have reported how long they paused for its version."""
        if self.pending_step is None:
            return
        step, published, deadline = self.pending_step
        last = ((each.name, each.updates[-1]) for each in self.engines if each.updates)
        updates = {name: each for name, each in last if each["version"] == step["version"]}
        if len(updates) < published["num_replicas"] and monotonic() < deadline:
            return
        self.pending_step = None
        pauses = {name: each["pause_ms"] for name, each in updates.items() if each["pause_ms"]}
        filled = round(_BAR * step["reward"])
        bar = f"[green]{'█' * filled}[/][dim]{'░' * (_BAR - filled)}[/]"
        paused = ", ".join(f"{name} {ms:.1f} ms" for name, ms in sorted(pauses.items()))
        text = f"step {step['step']:3d}  reward {step['reward']:.2f} {bar}  "
        text += f"version {step['version']:3d}: {human(published['nbytes'])} in "
        text += f"{published['ms']:.0f} ms, paused {paused or 'none'}"
        is_shown = step["step"] % max(self._options.num_steps // _SHOWN_STEPS, 1) == 0
        self.tell(
            "step",
            text if is_shown else "",
            **step,
            publish_ms=published["ms"],
            nbytes=published["nbytes"],
            pauses_ms=pauses,
        )


def write_opener(path, page):
    """Write a file that leads a browser to the page.

    A browser that is started with the address itself shows its token to everybody who lists
    processes.
    """
    directory = path.parent
    if directory.stat().st_mode & 0o077:
        raise PeerRefused(f"{str(directory)!r} can be read by others; it would hold a token")
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(file, "w", encoding="ascii") as text:
        text.write(f'<meta http-equiv="refresh" content="0; url={html.escape(page)}">\n')
