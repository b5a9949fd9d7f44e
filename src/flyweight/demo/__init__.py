"""The demo: a small reinforcement-learning loop on the CPU, of real processes that are killed.

Needs torch. `story` starts the others and tells what happens; `trainer` and `engine` are
processes of their own, which know each other by an address, status cells and sockets only.
"""

from importlib.util import find_spec

from flyweight.errors import MissingDependency

if find_spec("torch") is None:
    raise MissingDependency("the demo needs torch; pip install 'flyweight[torch]'")
