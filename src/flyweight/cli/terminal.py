"""What every command needs: consoles, sizes, exit codes, progress, and the group itself.

Exit codes: 0 done; 1 done, and the answer is no (verify found damage, diff found differences);
2 the command line is wrong; 3 bytes at rest are wrong; 4 not there: path or version;
5 source and target do not fit; 6 the operating system said no; 7 another process did not do its
part; 8 the engine's state does not accept it, or it is busy; 70 a fault of ours; 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import flyweight
from flyweight.errors import (
    FlyweightError,
    FormatError,
    LifecycleError,
    SnapshotNotFound,
    StoreError,
    TransportError,
    VersionError,
)
from flyweight.events import Event, listening
from flyweight.spec.manifest import Json

EXIT_NO, EXIT_FORMAT, EXIT_NOT_THERE, EXIT_PLAN, EXIT_STORE, EXIT_PEER = 1, 3, 4, 5, 6, 7
EXIT_STATE, EXIT_FAULT, EXIT_INTERRUPTED = 8, 70, 130
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _console(*, stderr: bool) -> Console:
    # Where nobody looks, nothing is cut off at a width nobody has.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 10_000
    # Paths and names may hold what looks like the name of an emoji (run:x:1).
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=width, emoji=False)


out, err = _console(stderr=False), _console(stderr=True)


class Size(click.ParamType[int]):
    """A number of bytes: 268435456, 256M, 256MiB, 4G."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("B").removesuffix("I")
        unit = text[-1:] if text[-1:] in _UNITS and not text[-1:].isdigit() else ""
        number = text.removesuffix(unit).strip()
        if not number.isdecimal() or not number.isascii() or len(number) > 18:
            self.fail(f"{value!r} is not a size; write 268435456, 256M or 4G", param, ctx)
        return int(number) * _UNITS[unit]


class Seconds(click.FloatRange):
    """A number of seconds: a real one, which NaN is not."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


def exit_code(error: FlyweightError) -> int:
    """Return the exit code that goes with an error."""
    kinds: tuple[tuple[type[FlyweightError], int], ...] = (
        (SnapshotNotFound, EXIT_NOT_THERE),
        (VersionError, EXIT_NOT_THERE),
        (FormatError, EXIT_FORMAT),
        (StoreError, EXIT_STORE),
        (TransportError, EXIT_PEER),
        (LifecycleError, EXIT_STATE),
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), EXIT_PLAN)


class Commands(click.Group):
    """Turns our errors into a line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlyweightError as error:
            _fail(type(error).__name__, str(error), exit_code(error))
        except KeyboardInterrupt:
            _fail("Interrupted", "stopped; nothing half-written was left", EXIT_INTERRUPTED)
        except BrokenPipeError:
            sys.stderr.close()  # who read our output has gone; Python would complain of it at exit
            raise SystemExit(0) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # a fault of ours: it must not look like an answer
            traceback.print_exc()
            _fail(type(error).__name__, f"{error}: a fault in flyweight itself", EXIT_FAULT)


def _fail(kind: str, text: str, code: int) -> NoReturn:
    if _wants_json():
        click.echo(json.dumps({"error": kind, "message": text, "exit_code": code}), err=True)
    else:
        err.print(f"[bold red]{kind}[/]: {escape(text)}")
    raise SystemExit(code)


def _wants_json() -> bool:
    return "--json" in sys.argv[1:]


@contextmanager
def progress() -> Iterator[None]:
    """Show bars for whatever reports progress, on a terminal; elsewhere nothing."""
    if not err.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def listener(event: Event) -> None:
            if event.kind != "progress":
                return
            verb = str(event.fields["verb"])
            if verb not in tasks:
                tasks[verb] = bars.add_task(verb, total=event.fields["total_bytes"])  # type: ignore[arg-type]
            bars.update(tasks[verb], completed=event.fields["done_bytes"])  # type: ignore[arg-type]

        with listening(listener):
            yield


def show(data: Json | Mapping[str, Any], as_json: bool, view: Callable[[], None]) -> None:
    if as_json:
        click.echo(json.dumps(_finite(data), allow_nan=False))
    else:
        view()


def _finite(data: Any) -> Any:
    """Return the same data with infinities and NaN as text, which JSON has no numbers for."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not isfinite(data) else data


def human(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


@contextmanager
def until_told() -> Iterator[threading.Event]:
    """Set an event on Ctrl-C and on SIGTERM, so that a server ends in order."""
    is_over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        is_over.set()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


json_option = click.option("--json", "as_json", is_flag=True, help="Print data, for machines.")
version_option = click.option("--version", type=click.IntRange(0), help="Which version of a run.")
memory_option = click.option(
    "--memory", "memory_bytes", type=Size(), default="256M", show_default=True,
    help="Extra memory to use at most.",
)  # fmt: skip


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flyweight.__version__, prog_name="flyweight")
def main() -> None:
    """Move a model's weights from where they are to where they are wanted."""
