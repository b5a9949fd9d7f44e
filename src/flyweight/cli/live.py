"""Commands for live weights.

`publish` serves a snapshot, `relay` passes a publisher's versions on to the engines of a host,
`watch` shows a publisher's news.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import click
from rich.console import Group
from rich.markup import escape

from flyweight.cli import tokens
from flyweight.cli.app import (
    Seconds,
    main,
    once_option,
    size,
    tls_options,
    token_file_option,
    until_signal,
    version_option,
)
from flyweight.cli.output import human, out, print_json, show, show_changes, table, wants_json
from flyweight.errors import PeerRefused
from flyweight.events import Event, listening
from flyweight.live import News, Publisher, Relay, record
from flyweight.live import watch as watch_publisher
from flyweight.transports.address import TcpAddress, parse_address
from flyweight.transports.tls import Tls
from flyweight.verbs.find import open_source

_READER_EVENTS = ("replica.joined", "replica.lost", "serve.done")
_RELAY_EVENTS = (*_READER_EVENTS, "relay.serving", "update.done", "update.failed")


@main.command()
@click.argument("path", metavar="SNAPSHOT", type=click.Path())
@click.option(
    "--on", "address", required=True, metavar="ADDRESS",
    help="unix:DIRECTORY, or tcp://HOST:PORT for replicas on other hosts.",
)  # fmt: skip
@click.option("--as-version", type=click.IntRange(0), help="The version number to serve it as.")
@version_option
@token_file_option
@tls_options
def publish(
    *,
    path: str,
    address: str,
    as_version: int | None,
    version: int | None,
    token_file: Path | None,
    tls: Tls | None,
) -> None:
    """Serve the weights at SNAPSHOT to replicas at ADDRESS, until interrupted."""
    _check_options(address, token_file=token_file, tls=tls)
    token = None if token_file is None else tokens.read_or_create(token_file)
    as_json = wants_json()
    with (
        open_source(path, version=version) as stored,
        until_signal() as is_over,
        listening(lambda event: _print_event(event, _READER_EVENTS, as_json, is_over)),
        Publisher(stored, address, version=as_version, token=token, tls=tls) as publisher,
    ):
        data = {"event": "serving", "address": publisher.address, "version": publisher.version}
        nbytes, num_tensors = stored.manifest.nbytes, len(stored.manifest.tensors)
        show(
            {**data, "nbytes": nbytes},
            lambda: (
                f"serving version {publisher.version} of {escape(path)} at "
                f"{escape(publisher.address)}: {num_tensors} tensors, {human(nbytes)}; Ctrl-C "
                f"ends it"
            ),
        )
        is_over.wait()  # without a deadline, on purpose: this is a server


@main.command()
@click.argument("address")
@click.option("--on", required=True, metavar="ADDRESS", help="Where this host's engines connect.")
@click.option("--name", help="Its name at the publisher.")
@click.option(
    "--staging", "staging_bytes", type=size, metavar="SIZE",
    help="The most memory that it may take; half of what is free by default.",
)  # fmt: skip
@token_file_option
@tls_options
def relay(
    *,
    address: str,
    on: str,
    name: str | None,
    staging_bytes: int | None,
    token_file: Path | None,
    tls: Tls | None,
) -> None:
    """Follow the publisher at ADDRESS, and serve its versions to engines, until interrupted.

    Engines connect to the address of --on as to a publisher. Run one relay per host: it holds one
    copy of the model in shared memory, which they map.
    """
    _check_options(address, on, token_file=token_file, tls=tls)
    as_json = wants_json()
    token = _token(token_file)
    made = Relay(address, on, token=token, tls=tls, name=name, staging_bytes=staging_bytes)
    with (
        _naming_token_file(token_file),
        until_signal() as is_over,
        listening(lambda event: _print_event(event, _RELAY_EVENTS, as_json, is_over)),
        ThreadPoolExecutor(1) as thread,
    ):
        running = thread.submit(made.run)
        running.add_done_callback(lambda _: is_over.set())
        is_over.wait()  # without a deadline, on purpose: this is a server
        made.stop()
        running.result()


def _print_event(
    event: Event, kinds: Sequence[str], as_json: bool, is_over: threading.Event
) -> None:
    if event.kind not in kinds:
        return
    try:
        if as_json:
            print_json({"event": event.kind, **event.fields})
        else:
            words = "  ".join(f"{key} {value}" for key, value in event.fields.items())
            out.print(f"{event.kind}: {words}", markup=False)
    except BrokenPipeError:  # the process that reads our output has gone
        is_over.set()


@main.command()
@click.argument("address")
@once_option
@click.option(
    "--timeout", "timeout_seconds", type=Seconds(min=0.0, min_open=True), default=10.0,
    show_default=True, help="Seconds to wait for a publisher.",
)  # fmt: skip
@token_file_option
@tls_options
def watch(
    *,
    address: str,
    once: bool,
    timeout_seconds: float,
    token_file: Path | None,
    tls: Tls | None,
) -> None:
    """Show the version and the replicas of the publisher at ADDRESS as they change."""
    _check_options(address, token_file=token_file, tls=tls)
    news = _news(address, token_file, tls, timeout_seconds)
    if once:
        for each in islice(news, 1):
            show(record(each), partial(_news_table, each))
    else:
        show_changes(news, _news_table, record)


def _check_options(*addresses: str, token_file: Path | None, tls: Tls | None) -> None:
    """Raise a usage error for a tcp address without a token, or certificates without one."""
    far = [each for each in addresses if isinstance(parse_address(each), TcpAddress)]
    if far and token_file is None:
        raise click.UsageError(f"{far[0]} needs a token that both sides know: --token-file FILE")
    if tls is not None and not far:
        here = " and ".join(addresses)
        raise click.UsageError(f"--tls options are for tcp addresses; {here} is on this host")


def _news(
    address: str, token_file: Path | None, tls: Tls | None, timeout_seconds: float
) -> Iterator[News]:
    token = _token(token_file)
    with _naming_token_file(token_file):
        yield from watch_publisher(address, token=token, tls=tls, timeout_seconds=timeout_seconds)


def _token(token_file: Path | None) -> str | None:
    """Return the token with which a command connects to a publisher."""
    if token_file is None:
        return None
    return tokens.read(token_file, "copy the publisher's; publish --token-file makes one")


@contextmanager
def _naming_token_file(token_file: Path | None) -> Iterator[None]:
    """Name the file to a user whose command the publisher refuses."""
    try:
        yield
    except PeerRefused as error:
        if token_file is not None:
            error.note(f"the token is that of --token-file {str(token_file)!r}")
        raise


def _news_table(news: News) -> Group:
    version = "no version yet" if news.version is None else f"version {news.version}"
    heads = ("replica", "rank", "process", "state", "version", "ms", "error")
    rows = (
        (
            each.name,
            each.rank,
            each.pid,
            each.state,
            each.version,
            f"{1000 * each.seconds:.1f}",
            each.error.partition("\n")[0],
        )
        for each in news.replicas
    )
    return Group(f"{version}  {news.state}", table(*heads, rows=rows))
