"""Commands that control engines: `serve` is the control server, the others are its clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from flyweight.cli import tokens
from flyweight.cli.app import Seconds, main, once_option, token_file_option, until_signal
from flyweight.cli.client import DEFAULT_PORT, Client, host_and_port
from flyweight.cli.output import human, progress_of, show, show_changes, table
from flyweight.cli.vllm import given_vllm_options, update_vllm, vllm_options
from flyweight.errors import FlyweightError
from flyweight.lifecycle.control import ANSWER_SECONDS, Control
from flyweight.stores.private_file import check_token

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = ANSWER_SECONDS + 0.3
"""What the server gets beyond the engine's own timeout, to answer how it ended."""
_STYLES = {"SERVING": "green", "FAILED": "bold red", "ABSENT": "bold red"}
_REPLICA_HEADS = (
    "replica", "rank", "process", "state", "version", "requests", "rounds", "GB/s", "pause ms",
    "step",
)  # fmt: skip
_ROUND_HEADS = ("round ended", "replica", "version", "bytes", "ms", "GB/s", "pause ms")
_NUM_ROUNDS, _NUM_FAULTS = 10, 3

run_option = click.option(
    "--run", "directory", type=click.Path(path_type=Path), envvar="FLYWEIGHT_RUN",
    default=tokens.run_directory, metavar="DIRECTORY",
    help="Where servers write their tokens.  [env: FLYWEIGHT_RUN]",
)  # fmt: skip


# The server.


@main.command()
@click.option(
    "--replica", "replicas", multiple=True, required=True, metavar="NAME=CELL[:RANKS]",
    help="A replica: its name, its status cell, and its number of ranks. May be repeated.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True,
    help="0 takes any free port.",
)  # fmt: skip
@click.option("--allow-remote", is_flag=True, help="Allow a --host that other machines can reach.")
@click.option(
    "--store", type=click.Path(), metavar="RUN", help="A directory of snapshots, to list them."
)
@run_option
@token_file_option
def serve(
    *,
    replicas: tuple[str, ...],
    host: str,
    port: int,
    allow_remote: bool,
    store: str | None,
    directory: Path,
    token_file: Path | None,
) -> None:
    """Control engines over HTTP, with a page, until interrupted."""
    # Imported here: the other commands work without what a server needs.
    from flyweight.server.fleet import Fleet  # noqa: PLC0415
    from flyweight.server.http import HttpServer, listen  # noqa: PLC0415

    parsed = [_replica(text) for text in replicas]
    with until_signal() as is_over, ExitStack() as stack:
        listener = stack.enter_context(listen(host, port, may_be_remote=allow_remote))
        if token_file is None:
            path = tokens.path_for(directory, listener.getsockname()[1])
            token = stack.enter_context(tokens.server_token(path))
        else:
            path, token = token_file, tokens.read_strong(token_file)
        with ExitStack() as on_failure:
            controls = [
                on_failure.enter_context(Control(cell, num_ranks, name=name))
                for name, cell, num_ranks in parsed
            ]
            fleet = Fleet(controls)
            on_failure.pop_all()  # the fleet closes them from here on
        stack.callback(fleet.close)
        server = HttpServer(fleet, listener, is_over, host=host, token=token, store=store)
        page = f"{server.address}/#token={token}"
        data = {"event": "serving", "address": server.address, "page": page}
        show(
            {**data, "token_file": str(path), "replicas": fleet.names},
            lambda: (
                f"controlling {escape(', '.join(fleet.names))} at {server.address}; Ctrl-C ends it"
                f"\npage: {page}\ntoken: in {escape(str(path))}"
            ),
        )
        server.serve_until_over()


def _replica(text: str) -> tuple[str, str, int]:
    name, equals, place = text.partition("=")
    path, colon, count = place.rpartition(":")
    if not (colon and path and count.isascii() and count.isdecimal()):
        path, count = place, "1"
    if not name or not equals or not path or not name.isprintable() or len(count) > 6:
        raise click.BadParameter(
            f"{text!r} is not NAME=CELL or NAME=CELL:RANKS", param_hint="--replica"
        )
    return name, path, int(count)


# Its clients.


def _with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that find a server, and call the command with a Client for it."""

    @click.argument(
        "address", envvar="FLYWEIGHT_SERVER", default=f"http://127.0.0.1:{DEFAULT_PORT}"
    )
    @run_option
    @token_file_option
    @wraps(command)
    def with_client(address: str, token_file: Path | None, directory: Path, **options: Any) -> None:
        command(_client(address, token_file, directory), **options)

    return with_client


def _client(address: str, token_file: Path | None, directory: Path) -> Client:
    # From the environment, not from an option: everybody can list the options of a process.
    token = os.environ.get("FLYWEIGHT_TOKEN")
    if token and token_file is None:
        return Client(address, check_token(token, "FLYWEIGHT_TOKEN"), "FLYWEIGHT_TOKEN")
    path = token_file or tokens.path_for(directory, host_and_port(address)[1])
    remedy = "start flyweight serve, say --token-file, or set FLYWEIGHT_TOKEN"
    return Client(address, tokens.read(path, remedy), repr(str(path)))


def _print_status(client: Client) -> None:
    status = client.call("GET", "/status")
    show(status, lambda: _status_table(status))


@main.command()
@_with_client
def status(client: Client) -> None:
    """Show the status of the replicas of the server at ADDRESS."""
    _print_status(client)


@main.command()
@once_option
@_with_client
def top(client: Client, once: bool) -> None:
    """Show the replicas of the server at ADDRESS as they change."""
    if once:
        _print_status(client)
    else:
        show_changes(client.events(), _status_table)


def _operation(name: str, route: str, description: str, *options: Any) -> None:
    """Define a command that sends its options to a route, and shows how the operation ended."""

    @_with_client
    def command(client: Client, **options: Any) -> None:
        _carry_out(client, route, **options)

    for option in reversed((*options, _REPLICA, _TIMEOUT)):
        command = option(command)
    main.command(name, help=description)(command)


def _carry_out(client: Client, route: str, **options: Any) -> None:
    query = {key: value for key, value in options.items() if value is not None}
    timeout_seconds = options["timeout"] + _ANSWER_SECONDS
    with _progress_of(client):
        result = client.call("POST", route, query, timeout_seconds=timeout_seconds)
    show(result, lambda: _result_lines(result))


def _tags(description: str) -> Any:
    default = "weights,kv_cache"
    return click.option("--tags", default=default, show_default=True, help=description)


_REPLICA = click.option("--replica", metavar="NAME", help="Which replica; all without it.")
_TIMEOUT = click.option(
    "--timeout", type=Seconds(min=0.0, min_open=True, max=86_400.0), default=60.0,
    show_default=True, help="Seconds to wait for an answer.",
)  # fmt: skip
_WHEN_SERVING = click.option(
    "--when-serving", type=click.Choice(["drain", "refuse"]), default="drain", show_default=True,
    help="If requests are running: wait for them, or refuse.",
)  # fmt: skip
_VERSION = click.option(
    "--version", type=click.IntRange(0), help="Which version; without it, wait for a newer one."
)
_operation("pause", "/v1/pause", "Pause engines, once their running requests have finished.")
_operation("resume", "/v1/resume", "Let paused engines serve again.")
_operation(
    "clear", "/v1/sleep", "Release memory of engines; `update` or `restore` brings it back.",
    _tags("What to release, separated by commas."), _WHEN_SERVING,
)  # fmt: skip
_operation(
    "restore", "/v1/wakeup", "Allocate cleared memory again, and load the newest version into it.",
    _tags("What to restore, separated by commas."),
)  # fmt: skip


@main.command()
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1, envvar="FLYWEIGHT_SERVER")
@click.option(
    "--from", "path", type=click.Path(), metavar="PATH",
    help="Load this snapshot or checkpoint into the vLLM servers at ADDRESS...",
)  # fmt: skip
@_VERSION
@_WHEN_SERVING
@vllm_options
@_REPLICA
@_TIMEOUT
@run_option
@token_file_option
def update(
    *,
    addresses: tuple[str, ...],
    path: str | None,
    version: int | None,
    timeout: float,
    token_file: Path | None,
    directory: Path,
    replica: str | None,
    when_serving: str,
    **options: Any,
) -> None:
    """Update engines to a newer version than they hold, or to the given one.

    ADDRESS is that of a control server. With --from, the weights at PATH go into the vLLM servers
    at ADDRESS...: http://HOST:PORT each, started with the weight transfer backend "flyweight".
    """
    if path is not None:
        if not addresses:
            raise click.UsageError("--from needs the addresses of vLLM servers: http://HOST:PORT")
        update_vllm(
            addresses,
            path,
            version=version,
            timeout_seconds=timeout,
            token_file=token_file,
            **options,
        )
        return
    if len(addresses) > 1:
        raise click.UsageError("one control server has all its engines: one ADDRESS, or --from")
    if given := given_vllm_options():
        raise click.UsageError(f"{', '.join(given)} is for vLLM servers, with --from")
    address = addresses[0] if addresses else f"http://127.0.0.1:{DEFAULT_PORT}"
    client = _client(address, token_file, directory)
    _carry_out(
        client,
        "/v1/update_weights",
        version=version,
        when_serving=when_serving,
        replica=replica,
        timeout=timeout,
    )


def _result_lines(result: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{escape(each['replica'])}: {each['state']}, "
        f"{'no version' if each['version'] is None else 'version ' + str(each['version'])}; "
        f"{each['operation']} took {1000 * each['seconds']:.1f} ms"
        for each in result["replicas"]
    )


def _progress_of(client: Client) -> AbstractContextManager[None]:
    """Show the progress of each replica while a block runs. On a terminal only."""

    def states() -> Iterator[tuple[str, float, str]]:
        with suppress(FlyweightError):  # the operation's own call reports what goes wrong
            for each in client.call("GET", "/status")["replicas"]:
                yield each["name"], each["percent"] / 100, each["state"]

    return progress_of(states, every_seconds=_POLL_SECONDS)


# Tables.


def _status_table(status: Mapping[str, Any]) -> Group:
    """Return the answer of `/status` as tables."""
    replicas = status["replicas"]
    rows = [_replica_row(each, rank) for each in replicas for rank in each["ranks"] or [{}]]
    parts: list[RenderableType] = [table(*_REPLICA_HEADS, rows=rows)]
    parts += [Text(f"{e['name']}: {e['reason']}", "red") for e in replicas if e["reason"]]
    if status["rounds"]:
        rounds = reversed(status["rounds"][-_NUM_ROUNDS:])
        parts += ["", table(*_ROUND_HEADS, rows=map(_round_row, rounds))]
    for fault in status["faults"][-_NUM_FAULTS:]:
        what = f"{_clock(fault['time'])} {fault['replica']}: {fault['error']}: {fault['reason']}"
        parts.append(Text(what, "red"))
    return Group(*parts)


def _replica_row(replica: Mapping[str, Any], rank: Mapping[str, Any]) -> tuple[object, ...]:
    if not rank:
        return replica["name"], "", "", _state(replica["state"])
    version = Text("-" if rank["version"] is None else str(rank["version"]))
    if rank["version"] is not None and rank["went_back_from"] is not None:
        version.append(f" (back from {rank['went_back_from']})", "yellow")
    operation = replica["operation"]
    percent = f"{rank['percent']:.0f} %" if rank["state"] == "UPDATING" else ""
    words = rank["step"], percent, operation and operation["id"]
    return (
        replica["name"],
        rank["rank"],
        rank["pid"] or None,
        _state(rank["state"]),
        version,
        rank["num_running"],
        rank["num_rounds"],
        f"{rank['nbytes'] / 1e9 / max(rank['round_seconds'], 1e-9):.2f}",
        f"{1000 * rank['pause_seconds']:.1f}",
        " ".join(filter(None, words)),
    )


def _round_row(each: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        _clock(each["time"]),
        each["replica"],
        each["version"],
        human(each["nbytes"]),
        f"{1000 * each['seconds']:.1f}",
        f"{each['gb_per_second']:.2f}",
        f"{1000 * each['pause_seconds']:.1f}",
    )


def _state(state: str) -> Text:
    return Text(state, _STYLES.get(state, "yellow"))


def _clock(time: float | None) -> str:
    if time is None:
        return "before"
    return datetime.fromtimestamp(time).astimezone().strftime("%H:%M:%S")
