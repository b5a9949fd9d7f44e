"""The status of a control server as tables: replicas, rounds and faults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from flyweight.cli.output import human, table

_STYLES = {"SERVING": "green", "FAILED": "bold red", "ABSENT": "bold red"}
_REPLICA_HEADS = (
    "replica", "rank", "process", "state", "version", "requests", "rounds", "GB/s", "pause ms",
    "step",
)  # fmt: skip
_ROUND_HEADS = ("round ended", "replica", "version", "bytes", "ms", "GB/s", "pause ms")
_NUM_ROUNDS, _NUM_FAULTS = 10, 3


def status_table(status: Mapping[str, Any]) -> Group:
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
