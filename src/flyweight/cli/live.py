"""Commands for live weights.

`publish` serves a snapshot, `relay` passes a publisher's versions on to the engines of a host,
`watch` shows a publisher's news, `keys` writes keys for encryption.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.markup import escape

from flyweight.cli import tokens
from flyweight.cli.app import (
    Seconds,
    main,
    once_option,
    token_file_option,
    until_signal,
    version_option,
)
from flyweight.cli.output import human, out, print_json, show, show_changes, table, wants_json
from flyweight.errors import PeerRefused
from flyweight.events import Event, listening
from flyweight.live import (
    TRANSPORTS,
    CurveClient,
    CurveKeys,
    CurveServer,
    News,
    Publisher,
    Relay,
    TcpAddress,
    parse_address,
    record,
)
from flyweight.live import watch as watch_publisher
from flyweight.verbs.find import open_source

_server_key_option = click.option(
    "--server-key", type=click.Path(path_type=Path), metavar="FILE",
    help="The NAME.pub of a publisher that encrypts messages.",
)  # fmt: skip
_SHOWN_EVENTS = ("replica.joined", "replica.lost", "serve.done")
_RELAY_EVENTS = (
    *_SHOWN_EVENTS,
    *("relay.serving", "update.done", "update.failed", "update.went_back", "serving.failed"),
)


@main.command()
@click.argument("path", metavar="SNAPSHOT", type=click.Path())
@click.option(
    "--on", "address", required=True, metavar="ADDRESS",
    help="unix:DIRECTORY, or tcp://HOST:PORT for replicas on other hosts.",
)  # fmt: skip
@click.option("--hold", is_flag=True, help="Keep one copy in shared memory: faster for many.")
@click.option(
    "--strategy", "transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True
)
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Encrypt messages to other hosts with this NAME.key, which flyweight keys writes.",
)  # fmt: skip
@click.option("--as-version", type=click.IntRange(0), help="The version number to serve it as.")
@version_option
@token_file_option
def publish(
    *,
    path: str,
    address: str,
    as_version: int | None,
    version: int | None,
    token_file: Path | None,
    key_file: Path | None,
    **options: Any,
) -> None:
    """Serve the weights at SNAPSHOT to replicas at ADDRESS, until interrupted."""
    _check_tcp(address, token_file, key_file, "--key-file")
    token = None if token_file is None else tokens.read_or_create(token_file)
    curve = None if key_file is None else CurveServer(CurveKeys.read(key_file))
    as_json = wants_json()
    with (
        open_source(path, version=version) as stored,
        until_signal() as is_over,
        listening(lambda event: _print_event(event, _SHOWN_EVENTS, as_json, is_over)),
        Publisher(
            stored, address, version=as_version, token=token, curve=curve, **options
        ) as publisher,
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
@token_file_option
@_server_key_option
def relay(
    *, address: str, on: str, name: str | None, token_file: Path | None, server_key: Path | None
) -> None:
    """Follow the publisher at ADDRESS, and serve its versions to engines, until interrupted.

    Engines connect to the address of --on as to a publisher. Run one relay per host: it holds one
    copy of the model in shared memory, which they map.
    """
    _check_tcp(address, token_file, server_key, "--server-key")
    _check_tcp(on, token_file, None, "")
    if server_key is not None and isinstance(parse_address(on), TcpAddress):
        raise click.UsageError(
            f"a relay does not encrypt messages at {on}, and --server-key is given; serve at "
            f"--on unix:DIRECTORY"
        )
    as_json = wants_json()
    token, curve = _secrets(token_file, server_key)
    made = Relay(address, on, token=token, curve=curve, name=name)
    with (
        _naming_secrets(token_file, server_key),
        until_signal() as is_over,
        listening(lambda event: _print_event(event, _RELAY_EVENTS, as_json, is_over)),
        ThreadPoolExecutor(1) as thread,
    ):
        running = thread.submit(made.run)
        running.add_done_callback(lambda _: is_over.set())
        is_over.wait()  # without a deadline, on purpose: this is a server
        made.stop()
        running.result()


@main.command()
@click.argument("directory", type=click.Path())
@click.option("--name", default="flyweight", show_default=True, help="The name of the files.")
def keys(directory: str, name: str) -> None:
    """Write a new pair of keys to DIRECTORY: NAME.key, which is secret, and NAME.pub."""
    made = CurveKeys.make()
    secret = made.write(directory, name)
    public = secret.with_suffix(".pub")
    show(
        {"key": str(secret), "pub": str(public), "public": made.public},
        lambda: (
            f"wrote {escape(str(secret))}, which stays on this host, and {escape(str(public))}, "
            f"for the other side: {escape(made.public)}"
        ),
    )


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
@_server_key_option
def watch(
    address: str,
    once: bool,
    timeout_seconds: float,
    token_file: Path | None,
    server_key: Path | None,
) -> None:
    """Show versions, replicas and speed of the publisher at ADDRESS as they change."""
    _check_tcp(address, token_file, server_key, "--server-key")
    news = _news(address, token_file, server_key, timeout_seconds)
    if once:
        for each in islice(news, 1):
            show(record(each), partial(_news_table, each))
    else:
        show_changes(news, _news_table, record)


def _check_tcp(address: str, token_file: Path | None, key: Path | None, key_option: str) -> None:
    """Raise a usage error for a tcp address without a token, or keys for one that is not."""
    is_tcp = isinstance(parse_address(address), TcpAddress)
    if is_tcp and token_file is None:
        raise click.UsageError(f"{address} needs a token that both sides know: --token-file FILE")
    if key is not None and not is_tcp:
        raise click.UsageError(f"{key_option} is for tcp addresses; {address} is on this host")


def _news(
    address: str, token_file: Path | None, server_key: Path | None, timeout_seconds: float
) -> Iterator[News]:
    token, curve = _secrets(token_file, server_key)
    with _naming_secrets(token_file, server_key):
        yield from watch_publisher(
            address, token=token, curve=curve, timeout_seconds=timeout_seconds
        )


def _secrets(
    token_file: Path | None, server_key: Path | None
) -> tuple[str | None, CurveClient | None]:
    """Return what a command connects to a publisher with."""
    token = None
    if token_file is not None:
        token = tokens.read(token_file, "copy the publisher's; publish --token-file makes one")
    return token, None if server_key is None else CurveClient(CurveKeys.read_public(server_key))


@contextmanager
def _naming_secrets(token_file: Path | None, server_key: Path | None) -> Iterator[None]:
    """Name the files to a user whose command the publisher refuses."""
    try:
        yield
    except PeerRefused as error:
        if token_file is not None:
            error.note(f"the token is that of --token-file {str(token_file)!r}")
        if server_key is not None:
            error.note(f"its public key is that of --server-key {str(server_key)!r}")
        raise


def _news_table(news: News) -> Group:
    version = "no version yet" if news.version is None else f"version {news.version}"
    speed = f"{news.nbytes / 1e9 / news.seconds:.1f} GB/s" if news.seconds else ""
    words = (news.state, human(news.nbytes) if news.nbytes else "", speed, news.strategy)
    heads = ("replica", "process", "state", "version", "bytes", "ms", "error")
    rows = (
        (
            each.name,
            each.pid,
            each.state,
            each.version,
            human(each.nbytes),
            f"{1000 * each.seconds:.1f}",
            each.error.partition("\n")[0],
        )
        for each in news.replicas
    )
    return Group(f"{version}  {'  '.join(filter(None, words))}", table(*heads, rows=rows))
