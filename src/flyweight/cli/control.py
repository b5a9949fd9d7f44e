"""Commands that control engines: `serve` is the server, the others speak with one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import click
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from flyweight.cli import tokens
from flyweight.cli.client import DEFAULT_PORT, Client, host_and_port
from flyweight.cli.terminal import Seconds, err, json_option, main, out, show, until_told
from flyweight.cli.view import status_view
from flyweight.errors import FlyweightError, PeerRefused, TransferTimeout
from flyweight.lifecycle.control import ANSWER_SECONDS, Control

_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.2
_SPARE_SECONDS = ANSWER_SECONDS + 0.3
"""What the server gets beyond the time that its engine was given, to say how it ended."""

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

run_option = click.option(
    "--run", "directory", type=click.Path(path_type=Path), envvar="FLYWEIGHT_RUN",
    default=tokens.run_directory, metavar="DIRECTORY",
    help="Where servers leave their tokens.  [env: FLYWEIGHT_RUN]",
)  # fmt: skip
token_file_option = click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE",
    help="The file with a token of your own, instead of the one in the run directory.",
)  # fmt: skip
timeout_option = click.option(
    "--timeout", "timeout_seconds", type=Seconds(min=0.0, min_open=True, max=86_400.0),
    default=60.0, show_default=True, help="Seconds until an answer comes, at the latest.",
)  # fmt: skip
replica_option = click.option("--replica", metavar="NAME", help="Which; otherwise all of them.")
when_serving_option = click.option(
    "--when-serving", type=click.Choice(["drain", "refuse"]), default="drain", show_default=True,
    help="Finish requests that run, or refuse because of them.",
)  # fmt: skip


def _with_client(command: CommandT) -> CommandT:
    """Give a command what it takes to find a server."""
    for decorate in (
        json_option,
        token_file_option,
        run_option,
        click.argument(
            "address", envvar="FLYWEIGHT_SERVER", default=f"http://127.0.0.1:{DEFAULT_PORT}"
        ),
    ):
        command = decorate(command)
    return command


def _client(address: str, token_file: Path | None, directory: Path) -> Client:
    # By the environment, and not by an option: those are there for everybody to see.
    token = os.environ.get("FLYWEIGHT_TOKEN")
    if token and token_file is None:
        return Client(address, tokens.checked(token, "FLYWEIGHT_TOKEN"), "FLYWEIGHT_TOKEN")
    path = token_file
    if path is None:
        path = tokens.token_file(directory, host_and_port(address)[1])
    token = tokens.read(path)
    if token is None:
        raise PeerRefused(
            f"no server left a token at {str(path)!r}; start flyweight serve, say --token-file, or "
            f"set FLYWEIGHT_TOKEN"
        )
    return Client(address, token, repr(str(path)))


# The server.


@main.command()
@click.option(
    "--replica", "replicas", multiple=True, required=True, metavar="NAME=CELL[:RANKS]",
    help="A replica: its name, its status cell, and how many ranks it has. May be repeated.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True,
    help="0 takes any that is free.",
)  # fmt: skip
@click.option("--allow-remote", is_flag=True, help="Let --host be one that others can reach.")
@click.option(
    "--store", type=click.Path(), metavar="RUN", help="Where versions rest, to list them."
)
@run_option
@token_file_option
@json_option
def serve(
    *,
    replicas: tuple[str, ...],
    host: str,
    port: int,
    allow_remote: bool,
    store: str | None,
    directory: Path,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Control engines over HTTP, with a page, until interrupted."""
    # Only here: the other commands work without what a server needs.
    from flyweight.server.fleet import Fleet  # noqa: PLC0415
    from flyweight.server.http import HttpServer, Listener  # noqa: PLC0415

    parsed = [_replica(text) for text in replicas]
    with until_told() as is_over, ExitStack() as stack:
        listener = stack.enter_context(Listener(host, port, may_be_remote=allow_remote))
        if token_file is None:
            path = tokens.token_file(directory, listener.port)
            token = stack.enter_context(tokens.written(path))
        else:
            path, token = token_file, tokens.read_strong(token_file)
        with ExitStack() as on_failure:
            controls = [
                on_failure.enter_context(Control(cell, num_ranks, name=name))
                for name, cell, num_ranks in parsed
            ]
            fleet = Fleet(controls)
            on_failure.pop_all()  # they are the fleet's to close
        stack.callback(fleet.close)
        server = stack.enter_context(HttpServer(fleet, listener, token=token, store=store))
        page = f"{server.address}/#token={token}"
        if as_json:
            fields = {"address": server.address, "page": page, "token_file": str(path)}
            click.echo(json.dumps({"event": "serving", **fields, "replicas": fleet.names}))
        else:
            out.print(
                f"controlling {escape(', '.join(fleet.names))} at {server.address}; Ctrl-C ends "
                f"it\n"
                f"page: {page}\n"
                f"token: in {escape(str(path))}"
            )
        while not is_over.wait(_LOOK_SECONDS):  # for ever, on purpose: this is a server
            server.check()


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


# What speaks with it.


@main.command()
@_with_client
def status(**options: Any) -> None:
    """Show how the replicas of the server at ADDRESS stand."""
    as_json = options.pop("as_json")
    told = _client(**options).call("GET", "/status")
    show(told, as_json, lambda: out.print(status_view(told)))


@main.command()
@replica_option
@timeout_option
@_with_client
def pause(*, replica: str | None, timeout_seconds: float, **options: Any) -> None:
    """Have engines stand still, once the requests that run are finished."""
    _ask("/v1/pause", replica, timeout_seconds, {}, options)


@main.command()
@replica_option
@timeout_option
@_with_client
def resume(*, replica: str | None, timeout_seconds: float, **options: Any) -> None:
    """Have engines that stand still serve again."""
    _ask("/v1/resume", replica, timeout_seconds, {}, options)


@main.command()
@click.option(
    "--tags", default="weights,kv_cache", show_default=True, help="What to give back, by commas."
)
@when_serving_option
@replica_option
@timeout_option
@_with_client
def clear(
    *, tags: str, when_serving: str, replica: str | None, timeout_seconds: float, **options: Any
) -> None:
    """Have engines give memory back; `update` or `restore` brings it back."""
    asked = {"tags": tags, "when_serving": when_serving}
    _ask("/v1/sleep", replica, timeout_seconds, asked, options)


@main.command()
@click.option(
    "--tags", default="weights,kv_cache", show_default=True, help="What to have again, by commas."
)
@replica_option
@timeout_option
@_with_client
def restore(*, tags: str, replica: str | None, timeout_seconds: float, **options: Any) -> None:
    """Have engines take back the memory that was cleared, and the newest version in it."""
    _ask("/v1/wakeup", replica, timeout_seconds, {"tags": tags}, options)


@main.command()
@click.option("--version", type=click.IntRange(0), help="Which; otherwise wait for a newer one.")
@when_serving_option
@replica_option
@timeout_option
@_with_client
def update(
    *,
    version: int | None,
    when_serving: str,
    replica: str | None,
    timeout_seconds: float,
    **options: Any,
) -> None:
    """Have engines take a version over: a newer one than they hold, or the one asked for."""
    asked: dict[str, object] = {"when_serving": when_serving}
    if version is not None:
        asked["version"] = version
    _ask("/v1/update_weights", replica, timeout_seconds, asked, options)


def _ask(
    path: str,
    replica: str | None,
    timeout_seconds: float,
    asked: Mapping[str, object],
    options: dict[str, Any],
) -> None:
    as_json = options.pop("as_json")
    client = _client(**options)
    asked = {**asked, "timeout": timeout_seconds}
    if replica is not None:
        asked["replica"] = replica
    result = _Call(client, path, asked, timeout_seconds + _SPARE_SECONDS).result()

    def view() -> None:
        for each in result["replicas"]:
            version = "no version" if each["version"] is None else f"version {each['version']}"
            out.print(
                f"{escape(each['replica'])}: {each['state']}, {version}; {each['operation']} took "
                f"{1000 * each['seconds']:.1f} ms"
            )

    show(result, as_json, view)


class _Call:
    """A call that takes a while, made in a thread so that a terminal sees how far it is."""

    def __init__(
        self, client: Client, path: str, asked: Mapping[str, object], timeout_seconds: float
    ) -> None:
        self._client, self._path, self._asked = client, path, asked
        self._timeout_seconds = timeout_seconds
        self._deadline = monotonic() + timeout_seconds
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._client.call(
                "POST", self._path, self._asked, timeout_seconds=self._timeout_seconds
            )
        except BaseException as error:  # raised where the result is asked for
            self._error = error

    def result(self) -> Any:
        if err.is_terminal:
            self._show()
        self._thread.join(max(self._deadline - monotonic(), 0.0) + _SPARE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TransferTimeout(f"no answer from {self._client.address}")
        return self._result

    def _show(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
        )
        with Progress(*columns, console=err, transient=True) as bars:
            tasks: dict[str, TaskID] = {}
            self._thread.join(_POLL_SECONDS)
            while self._thread.is_alive():
                with suppress(FlyweightError):  # how the operation ends is told by its own call
                    self._update(bars, tasks)
                self._thread.join(_POLL_SECONDS)

    def _update(self, bars: Progress, tasks: dict[str, TaskID]) -> None:
        left = max(self._deadline - monotonic(), _POLL_SECONDS)
        for each in self._client.call("GET", "/status", timeout_seconds=left)["replicas"]:
            name = each["name"]
            if name not in tasks:
                tasks[name] = bars.add_task(escape(name), total=100, words="")
            bars.update(tasks[name], completed=each["percent"], words=each["state"])


@main.command()
@click.option("--once", is_flag=True, help="Show how things stand now, and end.")
@_with_client
def top(*, once: bool, **options: Any) -> None:
    """Show the replicas of the server at ADDRESS as they change."""
    as_json = options.pop("as_json")
    client = _client(**options)
    if once:
        told = client.call("GET", "/status")
        show(told, as_json, lambda: out.print(status_view(told)))
        return
    if as_json or not out.is_terminal:
        for told in client.events():
            show(told, as_json, lambda told=told: out.print(status_view(told)))  # type: ignore[misc]
        return
    with Live(console=out, transient=False) as live:
        for told in client.events():
            live.update(status_view(told))
