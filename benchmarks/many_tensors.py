"""How long do a join and a round take for a model of very many small tensors?

The trainer and the engine are two processes of this host, each with its own model. A join is the
time from `Replica()` to the first commit, less one steady round; a round is what the replica
reports of itself. The limit is a plain loop of `copy_` over the same tensors in one process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Child, record, spread

import flyweight as fw

TIMEOUT_SECONDS = 120.0


def model(num_tensors: int, tensor_bytes: int, device: str, *, value: float) -> dict[str, torch.Tensor]:  # fmt: skip
    """Tensors of their own memory each, named like the experts of a mixture."""
    shape = (tensor_bytes // 2 // 64, 64)
    return {
        f"model.layers.{n // 800}.mlp.experts.{n % 800}.up_proj.weight": torch.full(
            shape, value, dtype=torch.bfloat16, device=device
        )
        for n in range(num_tensors)
    }


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def trainer(address: str, num_tensors: int, tensor_bytes: int, device: str, is_shared: bool) -> dict[str, Callable[..., object]]:  # fmt: skip
    weights = model(num_tensors, tensor_bytes, device, value=1.0)
    if is_shared and device == "cpu":  # one segment, as a trainer that shares memory has it
        whole = torch.empty(num_tensors, tensor_bytes // 2 // 64, 64, dtype=torch.bfloat16)
        whole.share_memory_()
        for n, name in enumerate(weights):
            weights[name] = whole[n].copy_(weights[name])
    publisher = fw.Publisher(weights, address)
    version = 0

    def publish(num_replicas: int = 1) -> tuple[float, float, str]:
        nonlocal version
        version += 1
        started = time.perf_counter()
        report = publisher.publish(
            version, num_replicas=num_replicas, timeout_seconds=TIMEOUT_SECONDS
        )
        assert not report.failed, str(report.failed[0].error)
        return time.perf_counter() - started, report.seconds, str(report)

    return {"publish": publish, "peak": peak_bytes, "close": publisher.close}


def engine(address: str, num_tensors: int, tensor_bytes: int, device: str) -> dict[str, Callable[..., object]]:  # fmt: skip
    weights = model(num_tensors, tensor_bytes, device, value=0.0)
    joined: dict[str, fw.Replica] = {}

    def join() -> tuple[float, float]:
        """Return the seconds from `Replica()` to the first commit, and of its round."""
        started = time.perf_counter()
        joined["it"] = fw.Replica(weights, address)
        report = joined["it"].update(timeout_seconds=TIMEOUT_SECONDS)
        return time.perf_counter() - started, report.seconds

    def update() -> tuple[float, float, float, str, str]:
        report = joined["it"].update(timeout_seconds=TIMEOUT_SECONDS)
        return report.seconds, report.copy_seconds, report.verify_seconds, report.strategy, report.verified  # fmt: skip

    def leave() -> None:
        joined.pop("it").close()

    def loop() -> float:
        """Return the seconds of a plain loop of `copy_` over the same tensors."""
        source = model(num_tensors, tensor_bytes, device, value=2.0)
        times = []
        for _ in range(5):
            if device != "cpu":
                torch.cuda.synchronize()
            started = time.perf_counter()
            for into, out in zip(weights.values(), source.values(), strict=True):
                into.copy_(out)
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    return {"join": join, "update": update, "leave": leave, "loop": loop, "peak": peak_bytes}


def measure(num_tensors: int, tensor_bytes: int, device: str, is_shared: bool, repeats: int) -> dict[str, object]:  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        address = f"unix:{Path(place) / 'at'}"
        publisher = Child(trainer, address, num_tensors, tensor_bytes, device, is_shared)
        before = publisher.ask("peak", timeout_seconds=TIMEOUT_SECONDS)
        replica = Child(engine, address, num_tensors, tensor_bytes, device)
        loop = replica.ask("loop", timeout_seconds=TIMEOUT_SECONDS)
        joins, rounds, publishes, growths = [], [], [], []
        for turn in range(repeats):
            replica.tell("join")
            publisher.ask("publish", timeout_seconds=TIMEOUT_SECONDS)
            total, _ = replica.answer(TIMEOUT_SECONDS)
            growths.append(publisher.ask("peak") - before)
            times = []
            for _ in range(5):
                replica.tell("update")
                time.sleep(0.05)
                wall, _, text = publisher.ask("publish", timeout_seconds=TIMEOUT_SECONDS)
                told = replica.answer(TIMEOUT_SECONDS)
                times.append(told[0])
                publishes.append(wall)
            rounds += times
            joins.append(total - statistics.median(times))
            print(f"turn {turn}: join {joins[-1]:.3f} s, round {statistics.median(times):.4f} s, {told}, {text}")  # fmt: skip
            replica.ask("leave")
        publisher.close()
        replica.close()
    steady = statistics.median(rounds)
    return {
        "tensors": num_tensors,
        "bytes_each": tensor_bytes,
        "device": device,
        "lane": "shared memory" if is_shared else "buckets",
        "join": spread(joins),
        "join_us_per_tensor": round(1e6 * statistics.median(joins) / num_tensors, 2),
        "round": spread(rounds),
        "publish": spread(publishes),
        "loop_of_copies_ms": round(1000 * loop, 2),
        "round_over_loop": round(steady / loop, 3),
        "publisher_growth_mib": round(max(growths) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[50_000, 100_000])
    parser.add_argument("--kib", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lanes", nargs="+", default=["shared", "buckets"])
    options = parser.parse_args()
    rows = []
    for num_tensors in options.tensors:
        for lane in options.lanes:
            row = measure(num_tensors, options.kib << 10, options.device, lane == "shared", options.repeats)  # fmt: skip
            rows.append(row)
            print(row)
    question = "How long do a join and a round take for very many small tensors?"
    record(question, {"rows": rows, "cpus_used": len(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
