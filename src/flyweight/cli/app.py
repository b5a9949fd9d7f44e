"""The command group `flyweight`: the exit codes and the options that its commands share.

Exit codes: 0 done; 1 done, and the answer is no (verify found damage, diff found differences);
2 the command line is wrong; 3 files are damaged or of no known format; 4 a path or version does
not exist; 5 source and target do not fit; 6 the operating system refused; 7 another process did
not answer, or refused; 8 the engine's state does not accept it, or it is busy; 70 a fault in
flyweight; 130 interrupted.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.markup import escape

import flyweight
from flyweight import errors
from flyweight.cli.output import err, set_json, wants_json
from flyweight.errors import FlyweightError
from flyweight.transports.tls import Tls

EXIT_NO, EXIT_OTHER, EXIT_FAULT, EXIT_INTERRUPTED = 1, 5, 70, 130
_EXIT_CODES: dict[type[FlyweightError], int] = {
    errors.SnapshotNotFound: 4,  # before FormatError, which it is too
    errors.VersionError: 4,
    errors.FormatError: 3,
    errors.StoreError: 6,
    errors.TransportError: 7,
    errors.LifecycleError: 8,
}

_SIZE = re.compile(r"(\d{1,18})\s*([KMGT]?)I?B?", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def exit_code(error: FlyweightError) -> int:
    """Return the exit code of a command that ends with this error."""
    codes = (code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
    return next(codes, EXIT_OTHER)


class _Command(click.Command):
    """A command with the option --json, which `output.show` and the errors below read."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.params.append(
            click.Option(
                ["--json"], is_flag=True, is_eager=True, expose_value=False, help="Print JSON.",
                callback=lambda context, _, value: set_json(context, value),
            )
        )  # fmt: skip


class _Commands(click.Group):
    """Turns errors into a line on standard error and an exit code."""

    command_class = _Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlyweightError as error:
            _fail(type(error).__name__, str(error), exit_code(error))
        except KeyboardInterrupt:
            _fail("Interrupted", "stopped; nothing half-written was left", EXIT_INTERRUPTED)
        except BrokenPipeError:
            sys.stderr.close()  # nobody reads our output any more; Python would complain at exit
            raise SystemExit(0) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # a fault of ours must not look like an answer
            traceback.print_exc()
            _fail(type(error).__name__, f"{error}: a fault in flyweight itself", EXIT_FAULT)


def _fail(kind: str, text: str, code: int) -> NoReturn:
    if wants_json():
        click.echo(json.dumps({"error": kind, "message": text, "exit_code": code}), err=True)
    else:
        err.print(f"[bold red]{kind}[/]: {escape(text)}")
    raise SystemExit(code)


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, so that a server can close in order."""
    is_over = threading.Event()
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda number, frame: is_over.set()) for each in kinds}
    try:
        yield is_over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flyweight.__version__, prog_name="flyweight")
def main() -> None:
    """Move a model's weights between files, trainers and inference engines."""


@main.command(
    cls=click.Command,
    hidden=True,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def demo() -> None:
    """Say where the demo is. It was a command of earlier versions."""
    raise click.UsageError(
        "the demo is an example, not a command: run make demo, or python examples/demo, in a "
        "checkout of the repository"
    )


# Options that several commands share.


def size(text: str) -> int:
    """Return a number of bytes: 268435456, 256M, 256MiB, 4G."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write 268435456, 256M or 4G")
    return int(match[1]) * _UNITS[match[2]]


class Seconds(click.FloatRange):
    """A finite number of seconds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


path_argument = click.argument("path", type=click.Path())
version_option = click.option("--version", type=click.IntRange(0), help="Which version of a run.")
memory_option = click.option(
    "--memory", "memory_bytes", type=size, default="256M", show_default=True,
    help="Extra memory to use at most.",
)  # fmt: skip
token_file_option = click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Your own file with a token, instead of the one that the server or publisher writes.",
)  # fmt: skip
once_option = click.option("--once", is_flag=True, help="Show the present status, and exit.")


def _tls_option(name: str, text: str) -> Callable[..., Any]:
    return click.option(f"--tls-{name}", type=click.Path(), metavar="FILE", help=text)


def tls_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for certificates. The command gets them as `tls`; None without any."""

    @wraps(command)
    def with_tls(
        *given: Any,
        tls_certificate: str | None,
        tls_key: str | None,
        tls_authority: str | None,
        **options: Any,
    ) -> None:
        tls = None
        if tls_certificate or tls_key or tls_authority:
            tls = Tls(certificate=tls_certificate, key=tls_key, authority=tls_authority)
        command(*given, tls=tls, **options)

    authority = _tls_option("authority", "Who must have signed the other side's certificate.")
    key = _tls_option("key", "The private key of --tls-certificate.")
    certificate = _tls_option(
        "certificate", "Encrypt connections to other hosts, and show them this certificate."
    )
    for option in (authority, key, certificate):
        with_tls = option(with_tls)
    return with_tls
