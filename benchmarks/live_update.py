"""For how long does an engine pause for new weights from a trainer on its host, or on its GPU?

A trainer and its engines are processes with a model each. The pause is from the return of `before` to
the end of `update`, by the engine's clock; of several engines the longest counts. The limit is one plain
copy of the same bytes: a loop over the tensors on the host, by one thread, which lets ours, by all cores,
be faster; one flat copy on a device (`--device cuda`).
What is verified is read once more. Beside it is a peer, written anew from its description: vLLM packs
tensors into one buffer that both processes map, in lock-step, and verifies nothing. Its pause is all of
it, as the engine writes from the first buffer on.

All ways take turns in one run. `publish` is by the trainer's clock and has its digests, which come
before the pause. A join is what `Replica()` and its first update take longer than a steady update.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import Child, record, spread
from torch.multiprocessing.reductions import reduce_tensor

import flyweight as fw

SHAPES: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "1 MB": [((256, 100), 20)],
    "8 MB": [((1024, 1024), 4), ((512,), 42)],
    "20,000 of 16 KiB": [((8192,), 20_000)],
    "50,000 of 32 KiB": [((16384,), 50_000)],
    "512 MiB": [((4096, 4096), 16)],
    "Qwen3-8B": [
        ((4096, 4096), 72), ((1024, 4096), 72), ((128,), 72), ((12288, 4096), 108),
        ((4096,), 73), ((151936, 4096), 2),
    ],
}  # fmt: skip
TIMEOUT_SECONDS = 120.0
PACKED_BYTES = 1 << 30  # vLLM's default
WARM_UP = 2
Commands = Mapping[str, Callable[..., object]]
Weights = dict[str, torch.Tensor]


@dataclass
class Way:
    """One way to bring the weights over, and what its turns took."""

    name: str
    transport: str = "mapped"
    verify: bool = True
    cast: bool = False
    num_engines: int = 1
    is_peer: bool = False
    turns: list[dict[str, float]] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)


def ways_of(model: str, device: str) -> list[Way]:
    ways = [
        Way("mapped, not verified", verify=False),
        Way("mapped"),
        Way("filled, not verified", "filled", verify=False),
        Way("filled", "filled"),
    ]
    if model not in ("512 MiB", "Qwen3-8B"):
        return ways
    ways += [Way("packed, as vLLM's", is_peer=True), Way("cast from float32", cast=True)]
    several = (4,) if device == "cuda" else (2, 4, 8)
    for num in several:
        ways += [
            Way(f"{num} engines, not verified", verify=False, num_engines=num),
            Way(f"{num} engines", num_engines=num),
        ]
    return ways


def weights_of(model: str, device: str, dtype: torch.dtype, *, is_shared: bool) -> Weights:
    """Return the tensors of a model, on the host one after the other in one file."""
    shapes = [shape for shape, count in SHAPES[model] for _ in range(count)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if device != "cpu":
        made = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    else:
        nbytes = dtype.itemsize * sum(sizes)
        if is_shared:
            file = os.memfd_create("weights")
            os.posix_fallocate(file, 0, nbytes)
            memory = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8)
        parts = memory.view(dtype).split(sizes)
        made = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return {f"layers.{number}.weight": tensor for number, tensor in enumerate(made)}


def buckets(weights: Weights) -> Iterator[list[tuple[str, int, int]]]:
    """Cut a model into lists of (name, start, bytes) that fit into the peer's buffer."""
    found: list[tuple[str, int, int]] = []
    at = 0
    for name, tensor in weights.items():
        if found and at + tensor.nbytes > PACKED_BYTES:
            yield found
            found, at = [], 0
        found.append((name, at, tensor.nbytes))
        at += tensor.nbytes
    yield found


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def trainer(model: str, device: str, line: Connection) -> Commands:
    torch.set_num_threads(1)
    weights: dict[torch.dtype, Weights] = {}
    opened: dict[str, tuple[fw.Publisher, Weights]] = {}
    buffer: list[torch.Tensor] = []

    def held(dtype: torch.dtype) -> Weights:
        if dtype not in weights:
            weights[dtype] = weights_of(model, device, dtype, is_shared=True)
        return weights[dtype]

    def opens(address: str, verify: bool, cast: bool) -> None:
        mine = held(torch.float32 if cast else torch.bfloat16)
        opened[address] = fw.Publisher(mine, address, verify=verify), mine

    def change(address: str, version: int) -> None:
        for tensor in list(opened[address][1].values())[:: 97 if version % 9 else 1]:
            tensor.fill_(version)
        synchronize(device)

    def publish(address: str, version: int, num_engines: int) -> dict[str, float]:
        started = time.perf_counter()
        report = opened[address][0].publish(
            version, num_replicas=num_engines, timeout_seconds=TIMEOUT_SECONDS
        )
        seconds = time.perf_counter() - started
        assert not report.failed, report
        return {"publish": seconds, "digest": report.digest_seconds}

    def pack(version: int) -> dict[str, float]:
        mine = held(torch.bfloat16)
        plan = list(buckets(mine))
        if not buffer:
            size = max(sum(nbytes for _, _, nbytes in each) for each in plan)
            made = torch.empty(size, dtype=torch.uint8, device=device)
            buffer.append(made if device != "cpu" else made.share_memory_())
        for tensor in mine.values():
            tensor.fill_(version)
        synchronize(device)
        started = time.perf_counter()
        for each in plan:
            for name, at, nbytes in each:
                buffer[0][at : at + nbytes].copy_(mine[name].view(-1).view(torch.uint8))
            synchronize(device)
            line.send((reduce_tensor(buffer[0]), each))
            assert line.poll(TIMEOUT_SECONDS)
            line.recv()
        seconds = time.perf_counter() - started
        return {"publish": seconds, "pause": seconds}

    return {
        "open": opens, "change": change, "publish": publish, "pack": pack,
        "waiting": lambda address: len(opened[address][0].waiting),
        "num_buckets": lambda: len(list(buckets(held(torch.bfloat16)))),
        "close": lambda address: opened.pop(address)[0].close(),
    }  # fmt: skip


def engine(model: str, device: str, name: str, line: Connection | None) -> Commands:
    torch.set_num_threads(1)
    mine = weights_of(model, device, torch.bfloat16, is_shared=False)
    others: Weights = {}
    joined: dict[str, fw.Replica] = {}

    def join(address: str, transport: Any, cast: bool) -> float:
        started = time.perf_counter()
        joined[address] = fw.Replica(mine, address, name=name, transport=transport, cast=cast)
        return time.perf_counter() - started

    def update(address: str, version: int) -> dict[str, float]:
        paused: list[float] = []
        report = joined[address].update(
            before=lambda _: paused.append(time.perf_counter()), timeout_seconds=TIMEOUT_SECONDS
        )
        pause = time.perf_counter() - paused[0]
        for tensor in list(mine.values())[:: 97 if version % 9 else 1]:
            assert bool((tensor == version).all())
        return {
            "pause": pause, "update": report.seconds, "fetch": report.fetch_seconds,
            "verify": report.verify_seconds,
        }  # fmt: skip

    def plain_copy() -> float:
        if device == "cpu":
            if not others:
                others.update(weights_of(model, device, torch.bfloat16, is_shared=False))
            started = time.perf_counter()
            for key, tensor in mine.items():
                tensor.copy_(others[key])
            return time.perf_counter() - started
        total = sum(tensor.nbytes for tensor in mine.values())
        part = min(total, 2 << 30)  # four engines of a large model leave no room for all of it
        if not others:  # kept: memory that is freed costs the next copy of anybody its addresses
            for key in ("sink", "source"):
                others[key] = torch.empty(part, dtype=torch.uint8, device=device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        others["sink"].copy_(others["source"])
        first.record()
        others["sink"].copy_(others["source"])
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000 * total / part

    def unpack(num_buckets: int, version: int) -> None:
        assert line is not None
        last = None  # kept, so that the buffer stays mapped from bucket to bucket
        for _ in range(num_buckets):
            assert line.poll(TIMEOUT_SECONDS)
            (rebuild, args), layout = line.recv()
            last = rebuild(*args)
            for key, at, nbytes in layout:
                tensor = mine[key]
                tensor.copy_(last[at : at + nbytes].view(tensor.dtype).view(tensor.shape))
            synchronize(device)
            line.send(True)
        del last
        assert all(bool((tensor == version).all()) for tensor in mine.values())

    return {
        "join": join, "update": update, "plain_copy": plain_copy, "unpack": unpack,
        "leave": lambda address: joined.pop(address).close(),
    }  # fmt: skip


class Bench:
    """A trainer and engines with one model, and what can be done with them."""

    def __init__(self, model: str, device: str, num_engines: int, place: str) -> None:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self._place = place
        self.trainer = Child(trainer, model, device, ours)
        self.engines = [
            Child(engine, model, device, f"engine {n}", theirs if n == 0 else None)
            for n in range(num_engines)
        ]

    def measure(self, ways: Sequence[Way], turns: int) -> dict[str, Any]:
        copies = []
        for turn in range(WARM_UP + turns):
            copy = self.engines[0].ask("plain_copy", timeout_seconds=TIMEOUT_SECONDS)
            if turn >= WARM_UP:
                copies.append(copy)
            for way in ways:
                found = self._packed(way, turn + 1) if way.is_peer else self._updated(way, turn + 1)
                if turn >= WARM_UP:
                    way.turns.append(found)
        for way in ways:
            if not way.is_peer:
                self._close(way)
        limit = statistics.median(copies)
        return {"plain copy": spread(copies), **{way.name: summary(way, limit) for way in ways}}

    def _at(self, way: Way) -> str:
        return f"unix:{self._place}/{''.join(each for each in way.name if each.isalnum())}"

    def _updated(self, way: Way, version: int) -> dict[str, float]:
        address, engines = self._at(way), self.engines[: way.num_engines]
        if version == 1:
            self.trainer.ask("open", address, way.verify, way.cast)
            for each in engines:
                took = each.ask("join", address, way.transport, way.cast)
                way.joins.append(took)
        self.trainer.ask("change", address, version)
        for each in engines:
            each.tell("update", address, version)
        while self.trainer.ask("waiting", address) < len(engines):
            pass
        published = self.trainer.ask(
            "publish", address, version, len(engines), timeout_seconds=TIMEOUT_SECONDS
        )
        answers = [each.answer(TIMEOUT_SECONDS) for each in engines]
        found = {key: max(each[key] for each in answers) for key in answers[0]}
        if version == 1:
            way.joins = [each + found["update"] for each in way.joins]
        return found | published

    def _packed(self, way: Way, version: int) -> dict[str, float]:
        num_buckets = self.trainer.ask("num_buckets", timeout_seconds=TIMEOUT_SECONDS)
        self.engines[0].tell("unpack", num_buckets, version)
        found: dict[str, float] = self.trainer.ask("pack", version, timeout_seconds=TIMEOUT_SECONDS)
        self.engines[0].answer(TIMEOUT_SECONDS)
        return found

    def _close(self, way: Way) -> None:
        for each in self.engines[: way.num_engines]:
            each.ask("leave", self._at(way))
        self.trainer.ask("close", self._at(way))

    def close(self) -> None:
        for each in (*self.engines, self.trainer):
            each.close()


def summary(way: Way, limit: float) -> dict[str, Any]:
    row: dict[str, Any] = {key: spread(each[key] for each in way.turns) for key in way.turns[0]}
    copies = way.num_engines * 1000 * limit
    row["plain copies over pause"] = round(copies / row["pause"]["median_ms"], 3)
    if way.joins:
        steady = statistics.median(each["update"] for each in way.turns)
        row["join_seconds"] = round(max(way.joins) - steady, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=SHAPES)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small model; keeps no record")
    options = parser.parse_args()
    on_host = ["1 MB", "20,000 of 16 KiB", "512 MiB"]
    on_device = ["8 MB", "50,000 of 32 KiB", "Qwen3-8B"]
    models = options.models or (on_host if options.device == "cpu" else on_device)
    if options.quick:
        models, options.turns = ["1 MB"], 3
    results: dict[str, Any] = {}
    for model in models:
        ways = ways_of(model, options.device)
        with tempfile.TemporaryDirectory(prefix="flyweight-bench-") as place:
            most = max(way.num_engines for way in ways)
            bench = Bench(model, options.device, most, str(Path(place)))
            try:
                results[model] = bench.measure(ways, options.turns)
            finally:
                bench.close()
        copy = results[model]["plain copy"]["median_ms"]
        print(f"\n{model}: plain copy {copy} ms\n{'':28s}{'pause':>10s}{'of limit':>10s}{'publish':>10s}{'digest':>10s}{'join s':>8s}")  # fmt: skip
        for way in ways:
            row = results[model][way.name]
            cells = [f"{row[key]['median_ms']:10.2f}" if key in row else " " * 10 for key in ("publish", "digest")]  # fmt: skip
            print(f"{way.name:28s}{row['pause']['median_ms']:10.2f}{row['plain copies over pause']:10.2f}{''.join(cells)}{row.get('join_seconds', float('nan')):8.2f}")  # fmt: skip
    if not options.quick:
        kept: dict[str, object] = {"turns": options.turns, "results": results}
        if options.device == "cuda":
            kept["gpu"] = torch.cuda.get_device_name()
        name = "live_update" if options.device == "cpu" else "live_update_cuda"
        record(str(__doc__).splitlines()[0], kept, "triton", name=name)


if __name__ == "__main__":
    main()
