"""The control server: a fleet of replicas over HTTP, with a page, metrics and an event stream.

Needs the extra `flyweight[server]`. Nothing here is in a round's way: engines go on by
themselves whether a server runs, is killed, or was never started.
"""

from importlib.util import find_spec

from flyweight.errors import MissingDependency

_needed = ("starlette", "uvicorn", "prometheus_client")
_missing = [name for name in _needed if find_spec(name) is None]
if _missing:
    raise MissingDependency(
        f"the control server needs {', '.join(_missing)}; pip install 'flyweight[server]'"
    )
