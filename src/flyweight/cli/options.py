"""Options and argument types that several commands share."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path
from typing import Any

import click

_SIZE = re.compile(r"(\d{1,18})\s*([KMGT]?)I?B?", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType[int]):
    """A number of bytes: 268435456, 256M, 256MiB, 4G."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        match = _SIZE.fullmatch(str(value).strip().upper())
        if match is None:
            self.fail(f"{value!r} is not a size; write 268435456, 256M or 4G", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class Seconds(click.FloatRange):
    """A finite number of seconds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


path_argument = click.argument("path", type=click.Path())
version_option = click.option("--version", type=click.IntRange(0), help="Which version of a run.")
memory_option = click.option(
    "--memory", "memory_bytes", type=Size(), default="256M", show_default=True,
    help="Extra memory to use at most.",
)  # fmt: skip
token_file_option = click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Your own file with a token, instead of the one that the server or publisher writes.",
)  # fmt: skip
once_option = click.option("--once", is_flag=True, help="Show the present status, and exit.")
