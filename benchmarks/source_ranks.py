"""Do two ranks that hold a model together feed an engine as fast as one rank with all of it?

The trainer has one rank with whole tensors, or two with half of the rows of each, as FSDP2 cuts
them. The engine has two ranks, which hold the other dim in halves, as tensor parallel layers do.
All ranks are processes of this host. Both trainers take turns, and the ratio is that of each turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Child, llm_shapes, record, spread

import flyweight as fw

TIMEOUT_SECONDS = 120.0
ENGINE_RANKS = 2


def part(shape: tuple[int, ...], dim: int, rank: int, num_ranks: int, is_shared: bool) -> object:
    """Return a rank's part of a tensor that is cut along a dim; whole if it cannot be cut."""
    if num_ranks == 1 or dim >= len(shape) or shape[dim] % num_ranks:
        return torch.ones(shape, dtype=torch.bfloat16)
    size = list(shape)
    size[dim] //= num_ranks
    offset = [0] * len(shape)
    offset[dim] = rank * size[dim]
    tensor = torch.full(size, 1.0 + rank, dtype=torch.bfloat16)
    return fw.Sharded(tensor.share_memory_() if is_shared else tensor, shape, offset)


def trainer(address: str, total_bytes: int, rank: int, num_ranks: int, transport: str) -> dict[str, Callable[..., object]]:  # fmt: skip
    is_shared = transport == "mapped"
    shapes = llm_shapes(total_bytes)
    model = {name: part(shape, 0, rank, num_ranks, is_shared) for name, shape in shapes.items()}
    if is_shared:
        model = {n: e if isinstance(e, fw.Sharded) else e.share_memory_() for n, e in model.items()}
    publisher = fw.Publisher(model, address, rank=rank, world_size=num_ranks)
    version = 0

    def publish() -> tuple[float, int, str]:
        nonlocal version
        version += 1
        report = publisher.publish(version, num_replicas=1, timeout_seconds=TIMEOUT_SECONDS)
        assert not report.failed, str(report.failed[0].error)
        return report.seconds, report.nbytes, str(report)

    return {"publish": publish, "close": publisher.close}


def engine(
    address: str, total_bytes: int, rank: int, transport: Any
) -> dict[str, Callable[..., object]]:
    shapes = llm_shapes(total_bytes)
    model = {name: part(shape, 1, rank, ENGINE_RANKS, False) for name, shape in shapes.items()}
    replica = fw.Replica(
        model, address, name="engine", transport=transport, rank=rank, world_size=ENGINE_RANKS
    )

    def update() -> float:
        report = replica.update(timeout_seconds=TIMEOUT_SECONDS)
        assert report.verified == "live"
        return report.seconds

    return {"update": update, "close": replica.close}


class Job:
    """A trainer and its engine."""

    def __init__(self, place: str, total_bytes: int, num_ranks: int, transport: str) -> None:
        address = f"unix:{Path(place) / str(num_ranks)}"
        ranks = range(num_ranks)
        self.sources = [Child(trainer, address, total_bytes, rank, num_ranks, transport) for rank in ranks]  # fmt: skip
        self.engines = [Child(engine, address, total_bytes, rank, transport) for rank in range(ENGINE_RANKS)]  # fmt: skip

    def update(self) -> tuple[float, float, int]:
        """Return the seconds of an update on the slower engine rank, of the publish, and the bytes."""
        for each in self.engines:
            each.tell("update")
        time.sleep(0.05)
        for each in self.sources:
            each.tell("publish")
        published, nbytes, self.report = self.sources[0].answer(TIMEOUT_SECONDS)
        for each in self.sources[1:]:
            each.answer(TIMEOUT_SECONDS)
        return max(each.answer(TIMEOUT_SECONDS) for each in self.engines), published, nbytes

    def close(self) -> None:
        for each in (*self.engines, *self.sources):
            each.close()


def measure(total_bytes: int, transport: str, repeats: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        jobs = {num_ranks: Job(place, total_bytes, num_ranks, transport) for num_ranks in (1, 2)}
        times: dict[int, list[float]] = {1: [], 2: []}
        publishes: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(repeats + 1):
            for num_ranks, job in jobs.items():
                seconds, published, nbytes = job.update()
                if turn:  # the first one makes plans and maps memory
                    times[num_ranks].append(seconds)
                    publishes[num_ranks].append(published)
            print(transport, *(f"{n} ranks: {t[-1]:.3f} s" for n, t in times.items() if t))
        print(*(job.report for job in jobs.values()), sep="\n")
        for job in jobs.values():
            job.close()
    ratios = [one / two for one, two in zip(times[1], times[2], strict=True)]
    return {
        "transport": transport,
        "bytes": nbytes,
        "one_rank": spread(times[1]),
        "two_ranks": spread(times[2]),
        "publish_by_one_rank": spread(publishes[1]),
        "publish_by_two_ranks": spread(publishes[2]),
        "gb_per_second": {n: round(nbytes / statistics.median(t) / 1e9, 2) for n, t in times.items()},
        "throughput_of_two_ranks_over_one": {
            "median": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transports", nargs="+", default=["mapped", "filled"])
    given = parser.parse_args()
    rows = []
    for transport in given.transports:
        rows.append(measure(given.mib << 20, transport, given.repeats))
        print(rows[-1])
    question = "Do two trainer ranks feed an engine of two ranks as fast as one does?"
    record(question, {"repeats": given.repeats, "rows": rows})


if __name__ == "__main__":
    main()
