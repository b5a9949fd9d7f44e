"""What commands print: data as JSON or in words, tables, progress bars and sizes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from flyweight.events import Event, listening

_JSON = "flyweight.json"
ItemT = TypeVar("ItemT")


def _console(*, stderr: bool) -> Console:
    # A pipe or a file has no width to cut lines at.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 10_000
    # Paths and names may contain text that looks like an emoji (run:x:1).
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=width, emoji=False)


out, err = _console(stderr=False), _console(stderr=True)


def set_json(context: click.Context, value: bool) -> None:
    """Remember whether the user gave --json."""
    context.meta[_JSON] = value


def wants_json() -> bool:
    """Return whether the user gave --json. Only for the thread that runs the command."""
    return bool(click.get_current_context().meta.get(_JSON))


def show(data: Any, view: Callable[[], RenderableType | None]) -> None:
    """Print data as JSON if the user gave --json; otherwise what `view` returns for people."""
    if wants_json():
        print_json(data)
    elif (shown := view()) is not None:
        out.print(shown)


def print_json(data: Any) -> None:
    """Print data as one line of JSON."""
    click.echo(json.dumps(_without_nan(data), allow_nan=False))


def _without_nan(data: Any) -> Any:
    """Return the same data with infinities and NaN as text: JSON has no numbers for them."""
    if isinstance(data, Mapping):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(value) for value in data]
    return str(data) if isinstance(data, float) and not isfinite(data) else data


def show_changes(
    items: Iterable[ItemT],
    view: Callable[[ItemT], RenderableType],
    record: Callable[[ItemT], Any] = lambda item: item,
) -> None:
    """Show each item that comes: in place on a terminal, else one after the other if it changed."""
    if out.is_terminal and not wants_json():
        with Live(console=out) as live:
            for item in items:
                live.update(view(item))
        return
    last = None
    for item in items:
        data = record(item)
        if data != last:
            show(data, partial(view, item))
        last = data


def table(*heads: str, rows: Iterable[Sequence[object]], show_header: bool = True) -> Table:
    """Return a table. A cell is text without markup, a rich Text, or None, shown as '-'."""
    made = Table(*heads, box=None, show_header=show_header)
    for row in rows:
        cells = ("-" if cell is None else cell for cell in row)
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    return made


def human(nbytes: float) -> str:
    """Return a number of bytes as people write it: 3.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@contextmanager
def progress() -> Iterator[None]:
    """Show a bar for each verb that reports progress inside the block. On a terminal only."""
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

        def update(event: Event) -> None:
            if event.kind != "progress":
                return
            verb = str(event.fields["verb"])
            if verb not in tasks:
                tasks[verb] = bars.add_task(verb, total=event.fields["total_bytes"])  # type: ignore[arg-type]
            bars.update(tasks[verb], completed=event.fields["done_bytes"])  # type: ignore[arg-type]

        with listening(update):
            yield


@contextmanager
def progress_of(
    states: Callable[[], Iterable[tuple[str, float, str]]], *, every_seconds: float
) -> Iterator[None]:
    """Show a bar for each name that `states` returns while the block runs. On a terminal only.

    states: returns names, how much is done from 0 to 1, and words; called again and again.
    """
    if not err.is_terminal:
        yield
        return
    is_over, tasks = threading.Event(), dict[str, TaskID]()

    def poll() -> None:
        while not is_over.wait(every_seconds):
            for name, done, words in states():
                if name not in tasks:
                    tasks[name] = bars.add_task(escape(name), total=1.0, words="")
                bars.update(tasks[name], completed=done, words=words)

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=err, transient=True) as bars:
        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(every_seconds)  # a status that does not come must not delay the answer
