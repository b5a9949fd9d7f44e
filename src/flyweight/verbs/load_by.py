"""Load by: hand the tensors of files to an engine's own loader, which places them itself.

Whole tensors are read and checked before the loader gets them, a bounded number of bytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from flyweight.adapters.loader import Loader
from flyweight.errors import FlyweightError, SpecError, TransportError, listed
from flyweight.events import Event, listening
from flyweight.formats.stored import Stored
from flyweight.verbs.load import LoadReport, load

_BATCH_BYTES = 256 << 20


def load_by(
    loader: Loader, stored: Stored, show: Callable[[float], None] = lambda done: None
) -> LoadReport:
    """Hand all tensors of opened files to a loader, in the order that it chooses.

    Raises TransportError if it leaves tensors, and what the loader itself raises.

    Args:
        show: called with how much is done, from 0 to 1.
    """
    specs = dict(loader.choose(stored.manifest.tensors))
    if not specs:
        raise SpecError(f"{stored.store.place!r} holds no tensors")
    started, names, reports = perf_counter(), list(specs), list[LoadReport]()
    num_taken = 0
    failure: FlyweightError | None = None

    def tensors() -> Generator[tuple[str, Any], None, None]:
        nonlocal num_taken, failure
        total = max(sum(spec.nbytes for spec in specs.values()), 1)
        done = 0
        while num_taken < len(names):
            fresh: dict[str, Any] = {}
            nbytes = 0
            for name in names[num_taken:]:
                if fresh and nbytes + specs[name].nbytes > _BATCH_BYTES:
                    break
                fresh[name], nbytes = loader.fresh(specs[name])[0], nbytes + specs[name].nbytes
            try:
                reports.append(load(stored, into=fresh, extra="report"))
            except FlyweightError as error:  # which the loader may catch, or wrap
                failure = error
                raise
            done += nbytes
            show(done / total)
            for name in list(fresh):
                num_taken += 1
                yield name, fresh.pop(name)  # which is the loader's alone from here on

    given = tensors()
    try:
        loader.load(given)
    except Exception:
        if failure is None:
            raise
    finally:
        given.close()
    if failure is not None:
        raise failure
    if left := names[num_taken:]:
        raise TransportError(
            f"the loader took {num_taken} of {len(names)} tensors; it left {listed(left)}"
        )
    counts = ("num_tensors", "nbytes", "read_bytes", "checked_bytes")
    sums = {name: sum(getattr(each, name) for each in reports) for name in counts}
    return replace(reports[-1], **sums, unused=[], seconds=perf_counter() - started)


@contextmanager
def showing_progress(show: Callable[[float], None]) -> Iterator[None]:
    """Within the block, call `show` with how much of a `load` is done, from 0 to 1.

    It hears of any load in this process: two loads at once only show a wrong progress.
    """

    def hear(event: Event) -> None:
        if event.kind == "progress" and event.fields.get("verb") == "load":
            done, total = event.fields["done_bytes"], event.fields["total_bytes"]
            if isinstance(done, int) and isinstance(total, int) and total:
                show(done / total)

    with listening(hear):
        yield
