"""Commands for weights at rest: everything they print they got as data from `verbs`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

import click
from click.shell_completion import get_completion_class
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from flyweight.cli.terminal import (
    EXIT_NO,
    Size,
    err,
    human,
    json_option,
    main,
    memory_option,
    out,
    progress,
    show,
    version_option,
)
from flyweight.errors import SnapshotNotFound
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs import describe
from flyweight.verbs.compare import diff as diff_weights
from flyweight.verbs.compare import verify as verify_weights
from flyweight.verbs.convert import convert as convert_weights
from flyweight.verbs.find import prune as prune_versions
from flyweight.verbs.planning import PlanReport
from flyweight.verbs.planning import plan as make_plan

FORMATS = ("snapshot", "hf", "dcp", "paddle", "safetensors", "pdparams")
MAX_CELLS = 128


def _check_there(path: str) -> None:
    if not os.path.isdir(path):
        raise SnapshotNotFound(f"{path!r} is not there, or no directory")


@main.command()
@click.argument("path", type=click.Path())
@version_option
@json_option
def inspect(path: str, version: int | None, as_json: bool) -> None:
    """Show what rests at PATH: tensors, sizes, dtypes, versions, parts."""
    found = describe.inspect(path, version=version)
    show(found, as_json, lambda: out.print(_tree(found)))


def _tree(found: Mapping[str, Any]) -> Tree:
    title = f"[bold]{escape(found['place'])}[/]  {found['format']}"
    if found["version"] is not None:
        title += f" version {found['version']}"
    root = Tree(f"{title}  {found['num_tensors']} tensors, {human(found['nbytes'])}")
    if found["versions"]:
        root.add(f"versions: {', '.join(map(str, found['versions']))}")
    if found["writer"]:
        root.add("written by: " + escape(", ".join(f"{k} {v}" for k, v in found["writer"].items())))
    files = root.add(f"files: {len(found['files'])}")
    for name, nbytes in found["files"].items():
        files.add(f"{escape(name)}  {human(nbytes)} of tensors")
    root.add("dtypes: " + ", ".join(f"{k} {human(v)}" for k, v in found["dtypes"].items()))
    branches: dict[str, Tree] = {"": root.add("tensors")}
    for name, tensor in found["tensors"].items():
        *path, leaf = name.split(".")
        for depth in range(len(path)):
            full = ".".join(path[: depth + 1])
            if full not in branches:
                branches[full] = branches[".".join(path[:depth])].add(escape(path[depth]))
        shape = " × ".join(map(str, tensor["shape"])) or "scalar"
        cut = f"  in {tensor['shards']} shards" if tensor["shards"] > 1 else ""
        branches[".".join(path)].add(
            f"[bold]{escape(leaf)}[/]  {tensor['dtype']}  {shape}  {human(tensor['nbytes'])}{cut}"
        )
    for alias, name in found["tied"].items():
        root.add(f"tied: {escape(alias)} is {escape(name)}")
    for name, value in found["values"].items():
        root.add(f"value: {escape(name)} = {escape(repr(value))}")
    return root


@main.command()
@click.argument("path", type=click.Path())
@version_option
@memory_option
@json_option
def verify(path: str, version: int | None, memory_bytes: int, as_json: bool) -> None:
    """Read everything at PATH and compare it with its checksums and digests."""
    with progress():
        report = verify_weights(path, version=version, memory_bytes=memory_bytes)

    def view() -> None:
        for line in report.damage:
            err.print(f"[bold red]damaged[/]: {escape(line)}")
        checked = (
            f"{human(report.checked_bytes)} checked"
            if report.checked_bytes
            else (f"{report.format} keeps no checksums: structure checked only")
        )
        state = "whole" if report.is_whole else f"{len(report.damage)} damaged places"
        out.print(f"{escape(report.place)}: {state}, {report.num_tensors} tensors, {checked}")

    show({**asdict(report), "is_whole": report.is_whole}, as_json, view)
    if not report.is_whole:
        raise SystemExit(EXIT_NO)


@main.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Show which tensors of A and B differ, and by how much."""
    with progress():
        report = diff_weights(a, b)

    def view() -> None:
        for side, names in (("A", report.only_a), ("B", report.only_b)):
            for name in names:
                out.print(f"only in {side}: {escape(name)}")
        for name, (left, right) in report.other_spec.items():
            out.print(f"other kind: {escape(name)}  {escape(left)} and {escape(right)}")
        if report.changed:
            table = Table("tensor", "differ", "of", "largest", "mean", box=None)
            for each in report.changed:
                distances = (
                    "-" if d is None else f"{d:.3g}"
                    for d in (each.max_distance, each.mean_distance)
                )
                table.add_row(
                    escape(each.name), str(each.num_different), str(each.num_elements), *distances
                )
            out.print(table)
        for name, (one, other) in report.changed_values.items():
            out.print(f"other value: {name}  {one!r} and {other!r}", markup=False)
        out.print(f"{report.num_same} tensors are the same")

    show({**asdict(report), "is_same": report.is_same}, as_json, view)
    if not report.is_same:
        raise SystemExit(EXIT_NO)


@main.command()
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path())
@click.option("--to", type=click.Choice(FORMATS), required=True)
@click.option("--version", type=click.IntRange(0), help="The version to write, for snapshots.")
@click.option(
    "--assume", multiple=True, metavar="OLD=NEW",
    help="Tell a dtype that a pickle cannot, as u16=bf16. May be repeated.",
)  # fmt: skip
@click.option("--part", "part_bytes", type=Size(), default="4G", show_default=True)
@memory_option
@json_option
def convert(
    *,
    source: str,
    destination: str,
    to: Any,
    version: int | None,
    assume: tuple[str, ...],
    part_bytes: int,
    memory_bytes: int,
    as_json: bool,
) -> None:
    """Write the weights at SOURCE to DESTINATION in another format, streaming."""
    pairs = [each.partition("=") for each in assume]
    if any(not old or not new for old, _, new in pairs):
        raise click.BadParameter("write OLD=NEW, as u16=bf16", param_hint="--assume")
    with progress():
        report = convert_weights(
            source,
            destination,
            to=to,
            version=version,
            assume={old: new for old, _, new in pairs},
            part_bytes=part_bytes,
            memory_bytes=memory_bytes,
        )

    def view() -> None:
        speed = f"{human(report.nbytes)} in {report.seconds:.1f} s, {report.gb_per_second:.2f} GB/s"
        out.print(f"{escape(report.place)}: {report.num_tensors} tensors, {speed}")
        if report.left_out:
            out.print(f"left out {len(report.left_out)} values that are no tensors")
        if report.told_as_integers:
            out.print(
                f"{len(report.told_as_integers)} tensors of a pickle were written as integers; if "
                f"they are bf16 or fp8, say so: --assume u16=bf16, --assume i8=f8_e4m3"
            )

    show({**asdict(report), "gb_per_second": report.gb_per_second}, as_json, view)


@main.command()
@click.argument("source", type=click.Path())
@click.option(
    "--into", type=click.File("rb"), required=True, metavar="LAYOUT",
    help="The layout to fill: a JSON file of a mesh and rules.",
)  # fmt: skip
@click.option(
    "--from", "source_layout", type=click.File("rb"), metavar="LAYOUT",
    help="Ranks that hold the tensors SOURCE names, instead of its files.",
)  # fmt: skip
@click.option("--rank", type=click.IntRange(0), help="Plan this sink rank's own part only.")
@click.option("--copies", "has_copies", is_flag=True, help="Every single copy too, for --json.")
@version_option
@memory_option
@json_option
def plan(
    *,
    source: str,
    into: BinaryIO,
    source_layout: BinaryIO | None,
    rank: int | None,
    has_copies: bool,
    version: int | None,
    memory_bytes: int,
    as_json: bool,
) -> None:
    """Show who would copy what to whom to fill a layout from SOURCE; no byte moves."""
    report = make_plan(
        source,
        into=_layout(into),
        source_layout=None if source_layout is None else _layout(source_layout),
        rank=rank,
        version=version,
        memory_bytes=memory_bytes,
    )
    show(report.record(has_copies=has_copies), as_json, lambda: _show_plan(report))


def _layout(file: BinaryIO) -> ModelLayout:
    return ModelLayout.from_json(file.read(), repr(file.name))


def _show_plan(report: PlanReport) -> None:
    given, taken = report.source_bytes, Counter[int]()
    for _, sink, nbytes in report.pairs:
        taken[sink] += nbytes
    if len(report.sources) * report.num_sink_ranks <= MAX_CELLS:
        table = Table("from \\ to", *(f"rank {n}" for n in range(report.num_sink_ranks)), box=None)
        cells = {(source, sink): human(nbytes) for source, sink, nbytes in report.pairs}
        for index, name in enumerate(report.sources):
            row = (cells.get((index, sink), "-") for sink in range(report.num_sink_ranks))
            table.add_row(escape(name), *row)
        out.print(table)
    else:
        per_rank = (("a source gives", given), ("a sink takes", list(taken.values())))
        for what, amounts in per_rank:
            low, high = human(min(amounts, default=0)), human(max(amounts, default=0))
            out.print(f"{what} {low} to {high}; {len(amounts)} of them")
        out.print(f"{len(report.pairs)} pairs of ranks; all of them with --json")
    out.print(
        f"{report.num_copies} copies of {report.num_tensors} tensors, {human(report.nbytes)} in "
        f"all, planned in {report.seconds:.2f} s"
    )
    out.print(
        f"peak memory of a sink rank: {human(report.peak_bytes)}, of which "
        f"{human(report.extra_bytes)} are extra"
    )


@main.command()
@click.argument("path", type=click.Path())
@json_option
def versions(path: str, as_json: bool) -> None:
    """List the committed versions of the run at PATH."""
    _check_there(path)
    lines = describe.inspect_versions(path)

    def view() -> None:
        table = Table("version", "parent", "tensors", "size", "written", box=None)
        for line in lines:
            if line["error"]:
                table.add_row(
                    str(line["version"]), "", "", "", f"[red]{escape(str(line['error']))}[/]"
                )
            else:
                parent = "" if line["parent"] is None else str(line["parent"])
                size = human(float(str(line["nbytes"])))
                table.add_row(
                    str(line["version"]), parent, str(line["num_tensors"]), size, str(line["time"])
                )
        out.print(table if lines else f"{escape(path)} has no versions")

    show(lines, as_json, view)  # type: ignore[arg-type]


@main.command()
@click.argument("path", type=click.Path())
@click.option("--keep", type=click.IntRange(1), required=True, help="How many versions stay.")
@click.option("--damaged", is_flag=True, help="Remove versions that do not open, too.")
@json_option
def prune(path: str, keep: int, damaged: bool, as_json: bool) -> None:
    """Remove all but the newest versions of the run at PATH, and what killed saves left.

    Only versions that open count; those that do not are listed, and stay without --damaged.
    """
    _check_there(path)
    gone = prune_versions(path, keep=keep, should_remove_damaged=damaged)

    def view() -> None:
        for version, why in gone.damaged.items():
            what = "damaged, removed" if version in gone else "damaged, kept"
            err.print(f"[bold red]{what}[/]: version {version}: {escape(why)}")
        out.print(f"removed: {', '.join(map(str, gone)) or 'nothing'}")

    found = [{"version": version, "error": why} for version, why in gone.damaged.items()]
    show({"removed": list(gone), "damaged": found}, as_json, view)


@main.command()
@click.argument("path", type=click.Path(exists=True), required=False)
@json_option
def doctor(path: str | None, as_json: bool) -> None:
    """Show what is installed and what this machine can do, at PATH if given."""
    found = describe.doctor(path)

    def view() -> None:
        table = Table(show_header=False, box=None)
        for key, value in found.items():
            if isinstance(value, dict):
                words = (
                    f"{k} {'no' if v in (None, False) else 'yes' if v is True else v}"
                    for k, v in value.items()
                )
                text = ", ".join(words)
            elif key.endswith("bytes") and isinstance(value, int):
                text = human(value)
            else:
                text = (
                    ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
                )
            table.add_row(key, escape(text))
        out.print(table)

    show(found, as_json, view)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes this command in SHELL; see docs/cli.md."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "flyweight", "_FLYWEIGHT_COMPLETE").source())


@main.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def demo() -> None:
    """Say where the demo is. It was a command of earlier versions."""
    raise click.UsageError(
        "the demo is an example, not a command: run make demo, or python examples/demo, in a "
        "checkout of the repository"
    )
