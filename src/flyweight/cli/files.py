"""Commands for weights in files. They print what `verbs` return."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from flyweight.cli.app import EXIT_NO, main, memory_option, path_argument, size, version_option
from flyweight.cli.output import err, human, out, progress, show, table
from flyweight.errors import SnapshotNotFound
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs import compare, describe, find
from flyweight.verbs.convert import convert as convert_weights
from flyweight.verbs.plan import PlanReport
from flyweight.verbs.plan import plan as make_plan

FORMATS = ("snapshot", "hf", "dcp", "paddle", "safetensors", "pdparams")
_MAX_CELLS = 128


def _check_exists(path: str) -> None:
    if not os.path.isdir(path):
        raise SnapshotNotFound(f"{path!r} does not exist, or is not a directory")


@main.command()
@path_argument
@version_option
def inspect(path: str, version: int | None) -> None:
    """Show the tensors, sizes, dtypes, versions and files at PATH."""
    found = describe.inspect(path, version=version)
    show(found, lambda: _tree(found))


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
        text = f"[bold]{escape(leaf)}[/]  {tensor['dtype']}  {shape}  {human(tensor['nbytes'])}"
        if tensor["shards"] > 1:
            text += f"  in {tensor['shards']} shards"
        branches[".".join(path)].add(text)
    for alias, name in found["tied"].items():
        root.add(f"tied: {escape(alias)} is {escape(name)}")
    for name, value in found["values"].items():
        root.add(f"value: {escape(name)} = {escape(repr(value))}")
    return root


@main.command()
@path_argument
@version_option
@memory_option
def verify(path: str, **options: Any) -> None:
    """Read everything at PATH and compare it with its checksums and digests."""
    with progress():
        report = compare.verify(path, **options)

    def view() -> None:
        for line in report.damage:
            err.print(f"[bold red]damaged[/]: {escape(line)}")
        checked = f"{human(report.checked_bytes)} checked"
        if not report.checked_bytes:
            checked = f"{report.format} keeps no checksums: structure checked only"
        state = "whole" if report.is_whole else f"{len(report.damage)} damaged places"
        out.print(f"{escape(report.place)}: {state}, {report.num_tensors} tensors, {checked}")

    show({**asdict(report), "is_whole": report.is_whole}, view)
    if not report.is_whole:
        raise SystemExit(EXIT_NO)


@main.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
def diff(a: str, b: str) -> None:
    """Show which tensors of A and B differ, and by how much."""
    with progress():
        report = compare.diff(a, b)
    show({**asdict(report), "is_same": report.is_same}, lambda: _print_diff(report))
    if not report.is_same:
        raise SystemExit(EXIT_NO)


def _print_diff(report: compare.DiffReport) -> None:
    for side, names in (("A", report.only_a), ("B", report.only_b)):
        for name in names:
            out.print(f"only in {side}: {escape(name)}")
    for name, (left, right) in report.other_spec.items():
        out.print(f"other kind: {escape(name)}  {escape(left)} and {escape(right)}")
    if report.changed:
        rows = []
        for each in report.changed:
            distances = (
                d if d is None else f"{d:.3g}" for d in (each.max_distance, each.mean_distance)
            )
            rows.append((each.name, each.num_different, each.num_elements, *distances))
        out.print(table("tensor", "differ", "of", "largest", "mean", rows=rows))
    for name, (one, other) in report.changed_values.items():
        out.print(f"other value: {name}  {one!r} and {other!r}", markup=False)
    out.print(f"{report.num_same} tensors are the same")


def _pairs(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [each.partition("=") for each in values]
    if any(not old or not new for old, _, new in pairs):
        raise click.BadParameter("write OLD=NEW, as u16=bf16", param_hint="--assume")
    return {old: new for old, _, new in pairs}


@main.command()
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path())
@click.option("--to", type=click.Choice(FORMATS), required=True)
@click.option("--version", type=click.IntRange(0), help="The version to write, for snapshots.")
@click.option(
    "--assume", multiple=True, metavar="OLD=NEW", callback=_pairs,
    help="Give a dtype that a pickle does not say, as u16=bf16. May be repeated.",
)  # fmt: skip
@click.option("--part", "part_bytes", type=size, default="4G", show_default=True)
@memory_option
def convert(source: str, destination: str, **options: Any) -> None:
    """Write the weights at SOURCE to DESTINATION in another format, streaming."""
    with progress():
        report = convert_weights(source, destination, **options)

    def view() -> None:
        speed = f"{human(report.nbytes)} in {report.seconds:.1f} s, {report.gb_per_second:.2f} GB/s"
        out.print(f"{escape(report.place)}: {report.num_tensors} tensors, {speed}")
        if report.left_out:
            out.print(f"left out {len(report.left_out)} values that are not tensors")
        if report.told_as_integers:
            out.print(
                f"{len(report.told_as_integers)} tensors of a pickle were written as integers; if "
                f"they are bf16 or fp8, say so: --assume u16=bf16, --assume i8=f8_e4m3"
            )

    show({**asdict(report), "gb_per_second": report.gb_per_second}, view)


class _LayoutFile(click.File):
    """A JSON file of a mesh and rules."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with super().convert(value, param, ctx) as file:
            return ModelLayout.from_json(file.read(), repr(file.name))


@main.command()
@click.argument("source", type=click.Path())
@click.option(
    "--into", type=_LayoutFile("rb"), required=True, metavar="LAYOUT",
    help="The layout to fill: a JSON file of a mesh and rules.",
)  # fmt: skip
@click.option(
    "--from", "source_layout", type=_LayoutFile("rb"), metavar="LAYOUT",
    help="The layout of ranks that hold the tensors of SOURCE, instead of its files.",
)  # fmt: skip
@click.option("--rank", type=click.IntRange(0), help="Plan for this sink rank only.")
@click.option("--copies", "has_copies", is_flag=True, help="With --json, list every copy.")
@version_option
@memory_option
def plan(source: str, has_copies: bool, **options: Any) -> None:
    """Show which rank would copy what to which, to fill a layout from SOURCE; nothing is copied."""
    report = make_plan(source, **options)
    show(report.record(has_copies=has_copies), lambda: _print_plan(report))


def _print_plan(report: PlanReport) -> None:
    ranks = range(report.num_sink_ranks)
    if len(report.sources) * len(ranks) <= _MAX_CELLS:
        cells = {(source, sink): human(nbytes) for source, sink, nbytes in report.pairs}
        rows = (
            (name, *(cells.get((index, sink)) for sink in ranks))
            for index, name in enumerate(report.sources)
        )
        out.print(table("from \\ to", *(f"rank {rank}" for rank in ranks), rows=rows))
    else:
        received = Counter[int]()
        for _, sink, nbytes in report.pairs:
            received[sink] += nbytes
        sides = {"a source gives": report.source_bytes, "a sink takes": list(received.values())}
        for what, amounts in sides.items():
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
    out.print(
        f"staging of a sink rank that takes them over the network: {human(report.staging_bytes)}"
    )


@main.command()
@path_argument
def versions(path: str) -> None:
    """List the committed versions of the run at PATH."""
    _check_exists(path)
    found: Any = describe.inspect_versions(path)

    def row(each: Mapping[str, Any]) -> tuple[object, ...]:
        if each["error"]:
            return each["version"], "", "", "", Text(each["error"], "red")
        parent = "" if each["parent"] is None else each["parent"]
        return each["version"], parent, each["num_tensors"], human(each["nbytes"]), each["time"]

    heads = ("version", "parent", "tensors", "size", "written")
    made = table(*heads, rows=map(row, found))
    show(found, lambda: made if found else f"{escape(path)} has no versions")


@main.command()
@path_argument
@click.option("--keep", type=click.IntRange(1), required=True, help="How many versions to keep.")
@click.option(
    "--damaged", "should_remove_damaged", is_flag=True,
    help="Remove versions that cannot be opened, too.",
)  # fmt: skip
def prune(path: str, **options: Any) -> None:
    """Remove all but the newest versions of the run at PATH, and what killed saves left.

    Only versions that can be opened count. The others are listed, and stay without --damaged.
    """
    _check_exists(path)
    removed = find.prune(path, **options)

    def view() -> None:
        for version, why in removed.damaged.items():
            what = "damaged, removed" if version in removed else "damaged, kept"
            err.print(f"[bold red]{what}[/]: version {version}: {escape(why)}")
        out.print(f"removed: {', '.join(map(str, removed)) or 'nothing'}")

    damaged = [{"version": version, "error": why} for version, why in removed.damaged.items()]
    show({"removed": list(removed), "damaged": damaged}, view)


@main.command()
@click.argument("path", type=click.Path(exists=True), required=False)
def doctor(path: str | None) -> None:
    """Show what is installed and what this machine can do, at PATH if given."""
    found: Any = describe.doctor(path)

    def text(key: str, value: object) -> str:
        if isinstance(value, dict):
            words = {None: "no", False: "no", True: "yes"}
            return ", ".join(f"{k} {words.get(v, v)}" for k, v in value.items())
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        return human(value) if key.endswith("bytes") and isinstance(value, int) else str(value)

    rows = [(key, text(key, value)) for key, value in found.items() if key != "network"]
    network = found["network"]
    rows.append(("network", f"{network['transport']}: {network['why']}"))
    show(found, lambda: table(rows=rows, show_header=False))


@main.command(cls=click.Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes this command in SHELL; see docs/cli.md."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "flyweight", "_FLYWEIGHT_COMPLETE").source())
