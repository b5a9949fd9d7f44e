"""What is printed as it changes."""

import click

from flyweight.cli import main
from flyweight.cli.output import show_changes


def test_what_did_not_change_is_printed_once(capsys):
    with click.Context(main).scope():
        show_changes(["a", "a", "b", "a"], str.upper, str)
    assert capsys.readouterr().out == "A\nB\nA\n"
