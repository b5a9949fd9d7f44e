"""The demo: a small reinforcement-learning loop on the CPU, of real processes that are killed.

    make demo
    python examples/demo --help

A trainer publishes each step's weights to live engines. `story.py` kills an engine, and the trainer
in the middle of a publish, and ends by comparing the weights of all processes, bit for bit.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import webbrowser
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from settings import Paths
from story import Options, Story
from supervisor import Supervisor

from flyweight.cli import exit_code
from flyweight.errors import FlyweightError, MissingDependency, SpecError, StoreError

# A file or a pipe has no width: do not wrap lines there.
_WIDTH = None if sys.stdout.isatty() else 1000
console = Console(highlight=False, soft_wrap=True, emoji=False, width=_WIDTH)


@click.command()
@click.option("--steps", "wanted_steps", type=click.IntRange(12, 10_000), help="Steps to train.")
@click.option(
    "--seconds", type=click.FloatRange(5.0, 3600.0),
    help="Come to the end after about this time, even with fewer steps.",
)  # fmt: skip
@click.option(
    "--engines", "num_engines", type=click.IntRange(1, 8), default=2, show_default=True,
    help="How many engines serve.",
)  # fmt: skip
@click.option("--fast", "is_fast", is_flag=True, help="A smaller policy and task: about 15 s.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--run", type=click.Path(path_type=Path), metavar="DIRECTORY",
    help="Leave snapshots and status cells here; otherwise nothing is left.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535),
    help="Show the control server's page at this port; 0 takes any free port.",
)  # fmt: skip
@click.option("--open", "should_open", is_flag=True, help="Open that page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each event.")
def main(should_open: bool, as_json: bool, **options) -> None:
    """Train a small policy with live engines, and kill some of the processes. Needs torch.

    The exit code is 0 only if every engine holds exactly the trainer's weights at the end, the
    reward rose, and all that was killed came back.
    """
    if should_open and options["port"] is None:
        options["port"] = 0

    def show(text, fields):
        if as_json:
            click.echo(json.dumps(fields))
        elif text:
            console.print(f"[dim]{fields['seconds']:6.1f} s[/]  {text}")
        elif fields["event"] == "ended":
            show_end(fields)
        if fields["event"] == "page" and should_open:
            webbrowser.open(Path(fields["opener"]).as_uri())

    try:
        code = 0 if play(Options(**options), show) else 1
    except FlyweightError as error:
        code = fail(type(error).__name__, str(error), exit_code(error), as_json)
    except KeyboardInterrupt:
        code = fail("Interrupted", "stopped; nothing was left behind", 130, as_json)
    sys.exit(code)


def play(options, show):
    """Play the story; however it ends, leave no process and no temporary directory."""
    for package, extra in (("torch", "torch"), ("uvicorn", "server")):
        if find_spec(package) is None and (extra == "torch" or options.port is not None):
            raise MissingDependency(f"the demo needs {package}; pip install 'flyweight[{extra}]'")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt_once)
    with ExitStack() as stack:
        try:
            scratch = Path(tempfile.mkdtemp(prefix="flyweight-demo-"))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            run = scratch / "run" if options.run is None else options.run.absolute()
            if run.exists() and any(run.iterdir()):
                raise SpecError(f"{str(run)!r} is not empty; the demo needs a directory of its own")
            run.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise StoreError(cause.errno, f"no directory for the demo: {cause}") from cause
        supervisor = Supervisor(Paths(run, scratch), options, show)
        stack.callback(supervisor.close)
        return Story(options, supervisor).play()


def interrupt_once(number, frame):
    """Stop at the first signal, and ignore the next ones: they would interrupt the cleanup."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def fail(kind, text, code, as_json):
    """Print an error as `flyweight` does, and return its exit code."""
    as_data = json.dumps({"error": kind, "message": text, "exit_code": code})
    click.echo(as_data if as_json else f"{kind}: {text}", err=True)
    return code


def show_end(fields):
    """Print the table of replicas, and every claim with whether it is true."""

    def number(value, digits):
        return "-" if value is None else f"{value:.{digits}f}"

    heads = ("replica", "version", "rounds", "pause ms, median", "max", "GB/s", "answers")
    table = Table(*heads, "restarts", "bit for bit", box=None)
    for row in fields["replicas"]:
        table.add_row(
            row["name"],
            number(row["version"], 0),
            str(row["num_rounds"]),
            number(row["median_pause_ms"], 1),
            number(row["max_pause_ms"], 1),
            number(row["gb_per_second"], 2),
            str(row["num_answered"]),
            str(row["num_restarts"]),
            "[green]yes[/]" if row["is_same"] else "[bold red]NO[/]",
        )
    console.print(table)
    for claim, is_true in fields["claims"].items():
        console.print(f"  {'[green]yes[/]' if is_true else '[bold red]NO[/] '}  {escape(claim)}")
    for row in fields["replicas"]:
        if row["differing"]:
            console.print(f"  {row['name']} differs in {escape(', '.join(row['differing'][:5]))}")


if __name__ == "__main__":
    main()
