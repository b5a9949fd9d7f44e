"""The control server of the demo: `flyweight serve`, in a process that exits with its parent."""

from processes import exit_with_parent

from flyweight.cli import main

if __name__ == "__main__":
    exit_with_parent()
    main()
