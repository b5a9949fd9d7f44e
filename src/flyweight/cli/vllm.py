"""`flyweight update --from`: loads a checkpoint of any format into running vLLM servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.markup import escape

from flyweight.cli import tokens
from flyweight.cli.app import exit_code, size
from flyweight.cli.output import human, progress_of, show
from flyweight.errors import FlyweightError
from flyweight.live import Publisher
from flyweight.transports.address import TcpAddress, parse_address
from flyweight.verbs.find import open_source

_POLL_SECONDS = 0.1
_OPTIONS = (
    click.option(
        "--as-version", type=click.IntRange(0), metavar="N",
        help="vLLM: the version number of a checkpoint that has none.",
    ),
    click.option(
        "--in-flight", type=click.Choice(["wait", "abort", "keep"]), default="wait",
        show_default=True,
        help="vLLM: running requests finish, end, or go on with the new weights.",
    ),
    click.option(
        "--staging", "staging_bytes", type=size,
        help="vLLM: the most memory of each worker for what it receives and checks before the "
        "pause. By default all together take half of what is free.",
    ),
    click.option(
        "--on", "place", metavar="ADDRESS",
        help="vLLM: where its workers read the weights, tcp://HOST:0 if they are on other hosts. "
        "Then --token-file must exist on those hosts too.",
    ),
)  # fmt: skip


def vllm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of updates of vLLM servers."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_vllm_options() -> list[str]:
    """Return which of those options the user gave."""
    context = click.get_current_context()
    names = {
        "as_version": "--as-version",
        "in_flight": "--in-flight",
        "staging_bytes": "--staging",
        "place": "--on",
    }
    given = click.core.ParameterSource.COMMANDLINE
    return [option for name, option in names.items() if context.get_parameter_source(name) is given]


def update_vllm(
    servers: Sequence[str],
    path: str,
    *,
    version: int | None,
    as_version: int | None,
    in_flight: Any,
    staging_bytes: int | None,
    place: str | None,
    timeout_seconds: float,
    token_file: Path | None,
) -> None:
    """Load the weights at a path into vLLM servers, and show how each of them ended."""
    # Imported here: the other commands need nothing of engines.
    from flyweight.engines.vllm import EngineUpdate, VllmEngine, update_all  # noqa: PLC0415

    is_tcp = place is not None and isinstance(parse_address(place), TcpAddress)
    if is_tcp and token_file is None:
        raise click.UsageError(f"{place} needs a token that both sides know: --token-file FILE")
    if len(set(servers)) < len(servers):
        raise click.UsageError("an address is given twice")
    with ExitStack() as stack:
        stored = stack.enter_context(open_source(path, version=version))
        if place is None:
            place = f"unix:{stack.enter_context(TemporaryDirectory(prefix='flyweight-'))}/policy"
        token = None if token_file is None else tokens.read_or_create(token_file)
        number = stored.manifest.version if as_version is None else as_version
        publisher = stack.enter_context(Publisher(stored, place, version=as_version, token=token))
        engines: list[VllmEngine] = []
        results: dict[str, EngineUpdate] = {}
        for server in servers:
            try:
                engine = VllmEngine(
                    server,
                    publisher.address,
                    name=server,
                    in_flight=in_flight,
                    staging_bytes=staging_bytes,
                    token_file=None if token_file is None else str(token_file.absolute()),
                )
                engines.append(engine)
            except FlyweightError as error:
                results[server] = EngineUpdate(server, error=error)
        states = lambda: [(each.name, each.progress, each.step) for each in engines]  # noqa: E731
        with progress_of(states, every_seconds=_POLL_SECONDS):
            ended = update_all(engines, publisher.version, timeout_seconds=timeout_seconds)
    results.update({each.name: each for each in ended})
    shown = [results[server] for server in servers]
    data = {"version": number, "path": path, "engines": [_record(each) for each in shown]}
    show(data, lambda: "\n".join(map(_line, shown)))
    errors = [each.error for each in shown if each.error is not None]
    if errors:
        raise SystemExit(exit_code(errors[0]))


def _record(result: Any) -> dict[str, Any]:
    report, error = result.report, result.error
    return {
        "engine": result.name,
        "state": None if result.state is None else str(result.state),
        "version": None if report is None else report.version,
        "nbytes": 0 if report is None else report.nbytes,
        "seconds": 0.0 if report is None else report.seconds,
        "pause_seconds": result.pause_seconds,
        "verified": None if report is None else report.verified,
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else str(error),
    }


def _line(result: Any) -> str:
    name = escape(result.name)
    if result.error is not None:
        return f"{name}: [bold red]{type(result.error).__name__}[/]: {escape(str(result.error))}"
    report = result.report
    return (
        f"{name}: {result.state}, version {report.version}; {human(report.nbytes)} checked and "
        f"loaded, no requests for {1000 * result.pause_seconds:.0f} ms"
    )
