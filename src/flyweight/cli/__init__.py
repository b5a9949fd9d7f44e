"""The command line. Commands read arguments and print; the work is done in the other rooms."""

from flyweight.cli import control, files, live
from flyweight.cli.app import exit_code, main, size
from flyweight.cli.output import human

__all__ = ["control", "exit_code", "files", "human", "live", "main", "size"]
