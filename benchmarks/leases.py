"""How long does an engine pause for new weights, by leases and by the conversation before them?

A trainer and an engine on one host, or on one GPU (`--device cuda`), are processes with a model each.
The pause is from the return of `before` to the end of `update`, by the engine's clock. The limit is
one plain copy of the same bytes: a loop over the tensors on the host, one flat copy on a device. What is
verified is read once more. Both ways take turns in one run; the table has medians of all turns but two.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure import Child, record, spread

SHAPES: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "1 MB": [((64, 256), 16)],
    "8 MB": [((1024, 1024), 4), ((512,), 42)],
    "20,000 of 16 KiB": [((8192,), 20_000)],
    "50,000 of 32 KiB": [((16384,), 50_000)],
    "512 MiB": [((4096, 4096), 16)],
    "Qwen3-8B": [
        ((4096, 4096), 72), ((1024, 4096), 72), ((128,), 72), ((12288, 4096), 108),
        ((4096,), 73), ((151936, 4096), 2),
    ],
}  # fmt: skip
HOST, DEVICE = ("1 MB", "20,000 of 16 KiB", "512 MiB"), ("8 MB", "50,000 of 32 KiB", "Qwen3-8B")
TURNS = 9
Commands = Mapping[str, Callable[..., object]]


def _shared(nbytes: int) -> torch.Tensor:
    file = os.memfd_create("weights")
    os.posix_fallocate(file, 0, nbytes)
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


def weights(model: str, device: str, *, is_shared: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a model in bf16, on the host one after the other in one file."""
    sizes = [shape for shape, count in SHAPES[model] for _ in range(count)]
    if device != "cpu":
        made = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in sizes]
    else:
        total = sum(2 * torch.Size(shape).numel() for shape in sizes)
        memory = _shared(total) if is_shared else torch.zeros(total, dtype=torch.uint8)
        parts = memory.view(torch.bfloat16).split([torch.Size(shape).numel() for shape in sizes])
        made = [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]
    return {f"layers.{number}.weight": tensor for number, tensor in enumerate(made)}


def _way(way: str) -> Any:
    if way == "leases":
        from flyweight import live

        return leasing
    import flyweight

    return flyweight


def trainer(model: str, device: str, way: str, address: str, verify: bool) -> Commands:
    made = weights(model, device, is_shared=True)
    option = {"verify": verify} if way == "leases" else {"should_verify": verify}
    publisher = _way(way).Publisher(made, address, **option)

    def publish(version: int) -> tuple[float, float]:
        for tensor in list(made.values())[::97]:
            tensor.fill_(version)
        if device != "cpu":
            torch.cuda.synchronize()
        started = time.perf_counter()
        report = publisher.publish(version, num_replicas=1, timeout_seconds=60)
        assert not report.failed, report
        return time.perf_counter() - started, report.digest_seconds

    return {"publish": publish, "waiting": lambda: bool(publisher.waiting)}


def engine(model: str, device: str, way: str, address: str) -> Commands:
    made = weights(model, device, is_shared=False)
    others = weights(model, "cpu", is_shared=False) if device == "cpu" else {}
    started = time.perf_counter()
    replica = _way(way).Replica(made, address, name="engine")
    join = time.perf_counter() - started

    def update(version: int) -> float:
        paused: list[float] = []
        replica.update(before=lambda _: paused.append(time.perf_counter()), timeout_seconds=60)
        pause = time.perf_counter() - paused[0]
        for tensor in list(made.values())[::97]:
            assert bool((tensor == version).all())
        return pause

    def plain_copy() -> float:
        if device == "cpu":
            started = time.perf_counter()
            for name, tensor in made.items():
                tensor.copy_(others[name])
            return time.perf_counter() - started
        total = sum(tensor.nbytes for tensor in made.values())
        sink, source = (torch.empty(total, dtype=torch.uint8, device=device) for _ in range(2))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sink.copy_(source)
        first.record()
        sink.copy_(source)
        last.record()
        last.synchronize()
        del sink, source
        torch.cuda.empty_cache()
        return float(first.elapsed_time(last)) / 1000

    return {"update": update, "plain_copy": plain_copy, "join": lambda: join}


def measure(model: str, device: str, *, verify: bool) -> dict[str, dict[str, Any]]:
    """Return the figures of both ways, which take turns."""
    pairs, rows = {}, {}
    for way in ("conversation", "leases"):
        address = f"unix:{tempfile.mkdtemp()}/policy"
        source = Child(trainer, model, device, way, address, verify)
        source.ask("waiting", timeout_seconds=120)
        sink = Child(engine, model, device, way, address)
        rows[way] = {"join_seconds": round(sink.ask("join", timeout_seconds=120), 3)}
        pairs[way] = source, sink
    found: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in pairs}
    for version in range(1, TURNS + 1):
        for way, (source, sink) in pairs.items():
            floor = sink.ask("plain_copy")
            sink.tell("update", version)
            while not source.ask("waiting"):
                pass
            publish, digest = source.ask("publish", version)
            found[way].append((sink.answer(60), publish, digest, floor))
    for way, (source, sink) in pairs.items():
        pause, publish, digest, floor = zip(*found[way][2:], strict=True)
        rows[way] |= {
            "pause": spread(pause),
            "publish": spread(publish),
            "digest": spread(digest),
            "plain copy": spread(floor),
        }
        limit, reached = (rows[way][name]["median_ms"] for name in ("plain copy", "pause"))
        rows[way]["plain copy over pause"] = round(limit / reached, 3)
        source.close()
        sink.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    results = {}
    for model in HOST if device == "cpu" else DEVICE:
        for verify in (False, True):
            name = f"{model}, {'verified' if verify else 'not verified'}"
            results[name] = measure(model, device, verify=verify)
            print(f"\n{name}: pause, publish, plain copy (ms), plain copy over pause, join (s)")
            for way, row in results[name].items():
                figures = [row[each]["median_ms"] for each in ("pause", "publish", "plain copy")]
                print(way, *figures, row["plain copy over pause"], row["join_seconds"])
    kept: dict[str, object] = {"turns": TURNS, "results": results}
    if device != "cpu":
        kept["gpu"] = torch.cuda.get_device_name()
    record(__doc__.splitlines()[0], kept, "triton", name=f"leases_{device}")


if __name__ == "__main__":
    main()
