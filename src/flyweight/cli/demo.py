"""The command `demo`: prints the story of a trainer and engines that are killed, as it happens."""

from __future__ import annotations

import json
import signal
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from flyweight.cli.terminal import EXIT_NO, Seconds, human, json_option, main, out

_BAR = 20
_SHOWN_STEPS = 20


@main.command()
@click.option("--steps", "num_steps", type=click.IntRange(12, 10_000), help="How long to train.")
@click.option(
    "--seconds", type=Seconds(min=5.0, max=3600.0),
    help="Come to the end after about so long, whatever the steps.",
)  # fmt: skip
@click.option(
    "--engines", "num_engines", type=click.IntRange(1, 8), default=2, show_default=True,
    help="How many engines serve.",
)  # fmt: skip
@click.option("--fast", "is_fast", is_flag=True, help="A smaller policy and task: some 15 s.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--run", type=click.Path(path_type=Path), metavar="DIRECTORY",
    help="Leave snapshots and status cells here; otherwise nothing is left.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535),
    help="Show the control server's page there while it runs; 0 takes any port that is free.",
)  # fmt: skip
@click.option("--open", "should_open", is_flag=True, help="Open that page in a browser.")
@json_option
def demo(
    *,
    num_steps: int | None,
    seconds: float | None,
    num_engines: int,
    is_fast: bool,
    seed: int,
    run: Path | None,
    port: int | None,
    should_open: bool,
    as_json: bool,
) -> None:
    """Train a small policy with live engines, and kill some of them. Needs torch.

    Ends with 0 only if every engine holds, bit for bit, what the trainer holds, the reward rose
    and all that was killed came back.
    """
    # Only here: the other commands work without torch.
    from flyweight.demo.story import Plot, play  # noqa: PLC0415

    plot = Plot(
        is_fast=is_fast,
        num_steps=num_steps,
        seconds=seconds,
        num_engines=num_engines,
        seed=seed,
        run=run,
        port=0 if port is None and should_open else port,
    )
    narrator = _Narrator()

    def hear(event: str, fields: Mapping[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps({"event": event, **fields}))
        else:
            narrator.hear(event, fields)
        if event == "page" and should_open:
            webbrowser.open(Path(fields["opener"]).as_uri())

    with _ended_in_order():
        is_well = play(plot, hear)
    if not is_well:
        raise SystemExit(EXIT_NO)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Take a request to end, and a terminal that goes away, as Ctrl-C: nothing is left behind."""
    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, signal.default_int_handler) for each in kinds}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Narrator:
    """Prints a line for each event, and of steps only some."""

    def __init__(self) -> None:
        self._every = 1

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        tell = getattr(self, f"_{event}", None)
        text = None if tell is None else tell(fields)
        if text:
            out.print(f"[dim]{fields['seconds']:6.1f} s[/]  {text}")

    def _began(self, fields: Mapping[str, Any]) -> str:
        self._every = max(fields["num_steps"] // _SHOWN_STEPS, 1)
        engines = f"{fields['num_engines']} engine{'s' if fields['num_engines'] > 1 else ''}"
        return (
            f"a trainer and {engines}, each a process: to say "
            f"{fields['num_digits']} digits backwards, by policy gradient, in "
            f"{fields['num_steps']} steps"
        )

    def _page(self, fields: Mapping[str, Any]) -> str:
        return f"page: {escape(fields['page'])}"

    def _trainer(self, fields: Mapping[str, Any]) -> str:
        who = f"trainer, process {fields['pid']}"
        if fields["recovered"] is None:
            size = f"{fields['num_parameters'] / 1e6:.1f} M parameters"
            return f"{who}, begins with {size} and publishes version {fields['version']}"
        return (
            f"[green]{who}, goes on from snapshot {fields['recovered']}[/] at step "
            f"{fields['step']}, and publishes it as version {fields['version']}"
        )

    def _example(self, fields: Mapping[str, Any]) -> str:
        return f"engine-1 answers  [bold]{fields['text']}[/]"

    def _step(self, fields: Mapping[str, Any]) -> str | None:
        if fields["step"] % self._every:
            return None
        reward = fields["reward"]
        filled = round(_BAR * reward)
        bar = f"[green]{'█' * filled}[/][dim]{'░' * (_BAR - filled)}[/]"
        pauses = [f"{name} {ms:.1f} ms" for name, ms in sorted(fields["pauses_ms"].items())]
        return (
            f"step {fields['step']:3d}  reward {reward:.2f} {bar}  version {fields['version']:3d}: "
            f"{human(fields['nbytes'])} in {fields['publish_ms']:.0f} ms, paused "
            f"{', '.join(pauses) or 'none'}"
        )

    def _saved(self, fields: Mapping[str, Any]) -> str:
        return f"[dim]snapshot of version {fields['version']} in {fields['ms']:.0f} ms[/]"

    def _killed(self, fields: Mapping[str, Any]) -> str:
        who = f"[bold red]SIGKILL[/] {fields['process']}, process {fields['pid']}"
        if fields["process"] != "trainer":
            return f"{who}, which held version {fields['version']}"
        engines = ", ".join(
            f"{name} {state}" + ("" if held is None else f" with {held}")
            for (name, state), held in zip(
                fields["engines"].items(), fields["held"].values(), strict=True
            )
        )
        return f"{who}, in the middle of publishing version {fields['version']}: {engines}"

    def _restarted(self, fields: Mapping[str, Any]) -> str:
        return f"{fields['process']} is started again, empty, as process {fields['pid']}"

    def _back(self, fields: Mapping[str, Any]) -> str:
        where = "from the snapshot" if fields["origin"] == "snapshot" else "live"
        return (
            f"[green]{fields['process']} is back[/] {fields['after_seconds']:.1f} s after the "
            f"kill: version {fields['version']} {where}"
        )

    def _caught_up(self, fields: Mapping[str, Any]) -> str:
        return f"[green]{fields['process']} has caught up[/]: version {fields['version']} live"

    def _failed(self, fields: Mapping[str, Any]) -> str:
        reason = fields["reason"].partition("\n")[0]
        return f"[red]{fields['process']} FAILED and serves nothing[/], half-way: {escape(reason)}"

    def _stayed(self, fields: Mapping[str, Any]) -> str:
        who, version = f"[green]{fields['process']}", fields["version"]
        if fields["was_taken"]:
            return f"{who} serves version {version}[/]: it had taken it whole"
        if not fields["was_touched"]:
            return f"{who} still serves version {version}[/], whole: it had not been touched"
        after = f"{fields['after_seconds']:.1f} s after the kill"
        return f"{who} healed by itself[/], {after}: version {version} from the snapshot"

    def _answered(self, fields: Mapping[str, Any]) -> str:
        count, versions = sum(fields["num_answered"].values()), fields["versions"]
        return (
            f"{count} requests were answered in {fields['absent_seconds']:.1f} s without a "
            f"trainer, with version {' and '.join(map(str, versions))}"
        )

    def _ended(self, fields: Mapping[str, Any]) -> None:
        heads = ("replica", "version", "rounds", "pause ms, median", "max", "GB/s", "answers")
        table = Table(*heads, "restarts", "bit for bit", box=None)
        for row in fields["replicas"]:
            table.add_row(
                row["name"],
                _number(row["version"], 0),
                str(row["num_rounds"]),
                _number(row["median_pause_ms"], 1),
                _number(row["max_pause_ms"], 1),
                _number(row["gb_per_second"], 2),
                str(row["num_answered"]),
                str(row["num_restarts"]),
                "[green]yes[/]" if row["is_same"] else "[bold red]NO[/]",
            )
        out.print(table)
        for claim, holds in fields["claims"].items():
            out.print(f"  {'[green]yes[/]' if holds else '[bold red]NO[/] '}  {escape(claim)}")
        for row in fields["replicas"]:
            if row["differing"]:
                out.print(f"  {row['name']} differs in {escape(', '.join(row['differing'][:5]))}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
