"""The view of a control server's status: replicas, rounds and what went wrong, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from flyweight.cli.terminal import human

_STYLES = {"SERVING": "green", "FAILED": "bold red", "ABSENT": "bold red"}
_SHOWN = 10


def status_view(told: Mapping[str, Any]) -> Group:
    """Return what `/status` tells, as tables."""
    replicas = Table(
        "replica", "rank", "process", "state", "version", "requests", "rounds", "GB/s", "pause ms",
        "step", box=None,
    )  # fmt: skip
    reasons = []
    for each in told["replicas"]:
        if not each["ranks"]:
            replicas.add_row(escape(each["name"]), "", "", _state(each["state"]))
        for rank in each["ranks"]:
            replicas.add_row(
                escape(each["name"]),
                str(rank["rank"]),
                str(rank["pid"]) if rank["pid"] else "-",
                _state(rank["state"]),
                _version(rank),
                str(rank["num_running"]),
                str(rank["num_rounds"]),
                f"{rank['nbytes'] / 1e9 / max(rank['round_seconds'], 1e-9):.2f}",
                f"{1000 * rank['pause_seconds']:.1f}",
                escape(_step(each, rank)),
            )
        if each["reason"]:
            reasons.append(f"[red]{escape(each['name'])}: {escape(each['reason'])}[/]")
    parts: list[Table | str] = [replicas, *reasons]
    if told["rounds"]:
        parts += ["", _rounds(told["rounds"])]
    for fault in told["faults"][-3:]:
        what = f"{_clock(fault['time'])} {fault['replica']}: {fault['error']}: {fault['reason']}"
        parts.append(f"[red]{escape(what)}[/]")
    return Group(*parts)


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("round ended", "replica", "version", "bytes", "ms", "GB/s", "pause ms", box=None)
    for each in reversed(rounds[-_SHOWN:]):
        table.add_row(
            _clock(each["time"]),
            escape(each["replica"]),
            "-" if each["version"] is None else str(each["version"]),
            human(each["nbytes"]),
            f"{1000 * each['seconds']:.1f}",
            f"{each['gb_per_second']:.2f}",
            f"{1000 * each['pause_seconds']:.1f}",
        )
    return table


def _version(rank: Mapping[str, Any]) -> str:
    if rank["version"] is None:
        return "-"
    back = rank["went_back_from"]
    return str(rank["version"]) + ("" if back is None else f" [yellow](back from {back})[/]")


def _state(state: str) -> str:
    return f"[{_STYLES.get(state, 'yellow')}]{state}[/]"


def _step(replica: Mapping[str, Any], rank: Mapping[str, Any]) -> str:
    operation = replica["operation"]
    words = [rank["step"], f"{rank['percent']:.0f} %" if rank["state"] == "UPDATING" else ""]
    return " ".join(filter(None, (*words, operation and operation["id"])))


def _clock(time: float | None) -> str:
    if time is None:
        return "before"
    return datetime.fromtimestamp(time).astimezone().strftime("%H:%M:%S")
