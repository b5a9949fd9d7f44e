"""The command line. It reads arguments and prints; what is done is done elsewhere."""

from flyweight.cli import at_rest, control, live
from flyweight.cli.terminal import Size, exit_code, human, main

__all__ = ["Size", "at_rest", "control", "exit_code", "human", "live", "main"]
