"""Commands for weights on the move: `publish` serves a snapshot, `watch` looks on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from flyweight.cli import tokens
from flyweight.cli.terminal import (
    Seconds,
    human,
    json_option,
    main,
    out,
    until_told,
    version_option,
)
from flyweight.errors import PeerRefused
from flyweight.events import Event, listening
from flyweight.live.lanes import STRATEGIES, Strategy
from flyweight.live.messages import News
from flyweight.live.publisher import Publisher
from flyweight.live.watch import record
from flyweight.live.watch import watch as watch_publisher
from flyweight.verbs.find import open_source

token_file_option = click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE",
    help="A file with the token, instead of the one that lies in ADDRESS.",
)  # fmt: skip
_SHOWN = ("replica.joined", "replica.lost", "serve.done")


@main.command()
@click.argument("path", metavar="SNAPSHOT", type=click.Path())
@click.option("--on", "address", required=True, metavar="ADDRESS", help="unix:DIRECTORY")
@click.option("--hold", is_flag=True, help="Keep one copy in shared memory: faster for many.")
@click.option("--strategy", type=click.Choice(STRATEGIES), default="auto", show_default=True)
@click.option("--as-version", type=click.IntRange(0), help="The number to serve it as.")
@version_option
@token_file_option
@json_option
def publish(
    *,
    path: str,
    address: str,
    hold: bool,
    strategy: Strategy,
    as_version: int | None,
    version: int | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Serve the weights at SNAPSHOT to whoever asks at ADDRESS, until interrupted."""
    token = None if token_file is None else tokens.read_or_make(token_file)
    with (
        open_source(path, version=version) as stored,
        until_told() as is_over,
        listening(lambda event: _tell(event, as_json, is_over)),
        Publisher(
            stored, address, hold=hold, strategy=strategy, version=as_version, token=token
        ) as publisher,
    ):
        manifest = stored.manifest
        if as_json:
            fields = {"address": publisher.address, "version": publisher.version}
            click.echo(json.dumps({"event": "serving", **fields, "nbytes": manifest.nbytes}))
        else:
            out.print(
                f"serving version {publisher.version} of {escape(path)} at "
                f"{escape(publisher.address)}: {len(manifest.tensors)} tensors, "
                f"{human(manifest.nbytes)}; Ctrl-C ends it"
            )
        is_over.wait()  # for ever, on purpose: this is a server


def _tell(event: Event, as_json: bool, is_over: threading.Event) -> None:
    if event.kind not in _SHOWN:
        return
    try:
        if as_json:
            click.echo(json.dumps({"event": event.kind, **event.fields}))
        else:
            words = "  ".join(f"{key} {value}" for key, value in event.fields.items())
            out.print(f"{event.kind}: {words}", markup=False)
    except BrokenPipeError:  # nobody listens any more: whoever started us has gone
        is_over.set()


@main.command()
@click.argument("address")
@click.option("--once", is_flag=True, help="Show how things stand now, and end.")
@click.option(
    "--timeout", "timeout_seconds", type=Seconds(min=0.0, min_open=True), default=10.0,
    show_default=True, help="Seconds to wait for a publisher.",
)  # fmt: skip
@token_file_option
@json_option
def watch(
    *, address: str, once: bool, timeout_seconds: float, token_file: Path | None, as_json: bool
) -> None:
    """Show versions, replicas and speed at ADDRESS as they happen."""
    news = _news(address, token_file, timeout_seconds)
    if as_json or once or not out.is_terminal:
        last = None
        for each in news:
            told = record(each)
            if told != last:
                if as_json:
                    click.echo(json.dumps(told))
                else:
                    out.print(_view(each))
            last = told
            if once:
                return
        return
    with Live(console=out, transient=False) as live:
        for each in news:
            live.update(_view(each))


def _news(address: str, token_file: Path | None, timeout_seconds: float) -> Iterator[News]:
    token = None if token_file is None else tokens.read(token_file)
    if token is None and token_file is not None:
        raise PeerRefused(f"there is no token file {str(token_file)!r}; see publish --token-file")
    try:
        yield from watch_publisher(address, token=token, timeout_seconds=timeout_seconds)
    except PeerRefused as error:
        if token_file is not None:
            error.note(f"the token is that of --token-file {str(token_file)!r}")
        raise


def _view(news: News) -> Group:
    version = "no version yet" if news.version is None else f"version {news.version}"
    speed = f"{news.nbytes / 1e9 / news.seconds:.1f} GB/s" if news.seconds else ""
    words = (news.state, human(news.nbytes) if news.nbytes else "", speed, news.strategy)
    table = Table("replica", "process", "state", "version", "bytes", "ms", "error", box=None)
    for each in news.replicas:
        table.add_row(
            escape(each.name),
            str(each.pid),
            each.state,
            "-" if each.version is None else str(each.version),
            human(each.nbytes),
            f"{1000 * each.seconds:.1f}",
            escape(each.error.partition("\n")[0]),
        )
    return Group(f"{version}  {'  '.join(filter(None, words))}", table)
