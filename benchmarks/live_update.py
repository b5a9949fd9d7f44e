"""How long does it take to bring new weights from a trainer to replicas on its host?

The trainer is this process, each replica a process of its own that already asks when `publish` is
called. What is timed is all of `publish`: afterwards every replica has the weights, and with
verification has proved it. The limits are plain copies in this process between pages that were used
before: one, of one thread, for weights in shared memory, and two, in and out, for weights that are not.
A second limit, of all cores, is worked out: the bytes to copy and to digest over what all cores do at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
import xxhash
import zmq
from measure import Child, Runs, llm_shapes, llm_weights, nbytes, print_rows, record, spread

import flyweight as fw
from flyweight.digest import digest

MIB = 1 << 20
TIMEOUT_SECONDS = 60.0
ASK_SECONDS = 0.02  # what a replica is given to ask, before the clock starts
Weights = dict[str, torch.Tensor]


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).reshape(-1).numpy()


def sums(weights: Weights) -> list[int]:
    """A checksum of each tensor's bytes, which has nothing to do with our digest."""
    return [xxhash.xxh3_64_intdigest(as_bytes(tensor)) for tensor in weights.values()]


# What a replica does.


def replica(shapes: Mapping[str, tuple[int, ...]], queue: Any = None, pipe: str = "") -> dict[str, Callable[..., object]]:  # fmt: skip
    """A process with a model, and everything that can be done to it, by name."""
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    parameters = {name: as_bytes(tensor) for name, tensor in weights.items()}
    joined: dict[str, fw.Replica] = {}
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_SECONDS))
    if pipe:
        socket.connect(pipe)

    def join(address: str) -> None:
        joined[address] = fw.Replica(weights, address)

    def leave(address: str) -> None:
        joined.pop(address).close()

    def update(address: str, num_rounds: int = 1) -> tuple[float, str, str]:
        for _ in range(num_rounds):
            report = joined[address].update(timeout_seconds=TIMEOUT_SECONDS)
        return report.seconds, report.strategy, report.verified

    def take_torch() -> None:
        for name, tensor in queue.get(timeout=TIMEOUT_SECONDS).items():
            weights[name].copy_(tensor)

    def take_zmq() -> None:
        for into in parameters.values():
            np.copyto(into, np.frombuffer(socket.recv(copy=False), np.uint8))

    def echo(num_rounds: int) -> None:
        for _ in range(num_rounds):
            socket.send(socket.recv())

    def clear() -> None:
        for into in parameters.values():
            into.fill(0)

    return {
        "join": join, "leave": leave, "update": update, "take_torch": take_torch,
        "take_zmq": take_zmq, "echo": echo, "clear": clear, "sums": lambda: sums(weights),
    }  # fmt: skip


@dataclass
class Rounds:
    """One way to bring the weights over, and what its rounds told."""

    word: str
    """What the replicas are to do meanwhile."""
    words: tuple[object, ...]
    weights: Weights
    go: Callable[[], object]
    """Returns when all replicas have the weights."""
    replicas: Sequence[Child]
    runs: Runs = field(default_factory=Runs)
    told: list[Any] = field(default_factory=list)

    def run(self) -> None:
        for each in self.replicas:
            each.tell(self.word, *self.words)
        time.sleep(ASK_SECONDS)
        self.runs.add(lambda: self.told.append(self.go()))

    def settle(self) -> None:
        """Hear what replicas said, unless that was the end of the round itself."""
        if self.word == "update":
            self.told[-1] = self.told[-1], [each.answer(TIMEOUT_SECONDS) for each in self.replicas]

    def check(self) -> None:
        """Run once more, into cleared replicas, and compare every byte."""
        for each in self.replicas:
            each.ask("clear")
        for tensor in self.weights.values():
            tensor[0] += 1
        self.run()
        self.settle()
        expected = sums(self.weights)
        for each in self.replicas:
            assert each.ask("sums") == expected, f"other bytes by {self.word} {self.words}"
        self.runs.seconds.pop()
        self.runs.extra_bytes.pop()
        self.told.pop()

    def summary(self, total: int) -> dict[str, object]:
        row = self.runs.summary(total)
        row["seconds_median"] = round(statistics.median(self.runs.seconds), 4)
        if self.word == "update":
            reports = [report for report, _ in self.told]
            parts = [part for report in reports for part in report.replicas]
            updates = [update for _, each in self.told for update in each]
            row["strategy"], row["verified"] = updates[0][1:]
            row["replica"] = spread(seconds for seconds, _, _ in updates)
            row["replica_copy"] = spread(part.copy_seconds for part in parts)
            row["replica_verify"] = spread(part.verify_seconds for part in parts)
            row["publisher_digest"] = spread(report.digest_seconds for report in reports)
        return row


def publishing(publisher: fw.Publisher, weights: Weights, replicas: Sequence[Child]) -> Rounds:
    """Rounds of a publisher; its replicas join."""
    for each in replicas:
        each.ask("join", publisher.address)
    versions = iter(range(1, 1 << 30))

    def go() -> object:
        report = publisher.publish(
            next(versions), num_replicas=len(replicas), timeout_seconds=TIMEOUT_SECONDS
        )
        assert len(report.replicas) == len(replicas), report
        assert not report.failed, report.failed[0].error
        return report

    return Rounds("update", (publisher.address,), weights, go, replicas)


def in_turn(ways: Mapping[str, Rounds | Callable[[], object]], repeats: int) -> dict[str, Runs]:
    """Run each way in turn, after two rounds that are not kept; check bytes at the end."""
    runs = {name: Runs() for name in ways}
    for repeat in range(repeats + 2):
        for name, way in ways.items():
            if isinstance(way, Rounds):
                if repeat == 2:
                    way.runs, way.told = Runs(), []
                way.run()
                way.settle()
                runs[name] = way.runs
            else:
                if repeat == 2:
                    runs[name] = Runs()
                runs[name].add(way)
    for way in ways.values():
        if isinstance(way, Rounds):
            way.check()
    return runs


# What the machine can do.


def copy(into: Weights, source: Weights) -> None:
    for name, tensor in source.items():
        np.copyto(as_bytes(into[name]), as_bytes(tensor))


def copy_by_all(into: Weights, source: Weights) -> None:
    """One plain copy, cut over all cores."""
    num_cpus = len(os.sched_getaffinity(0))

    def part(number: int) -> None:
        for name, tensor in source.items():
            sink, data = as_bytes(into[name]), as_bytes(tensor)
            low, high = (len(data) * each // num_cpus for each in (number, number + 1))
            np.copyto(sink[low:high], data[low:high])

    threads = [threading.Thread(target=part, args=(n,)) for n in range(num_cpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def digest_rates(total: int, repeats: int) -> dict[str, object]:
    """GB/s of one core over memory that is in no cache."""
    data = np.random.default_rng(0).integers(0, 255, total, np.uint8)
    rates = {}
    for name, work in {"digest": digest, "xxh3": xxhash.xxh3_64_intdigest}.items():
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            work(data)
            seconds.append(time.perf_counter() - started)
        for how, value in (("", statistics.median(seconds[1:])), ("_best", min(seconds[1:]))):
            rates[f"{name}_gb_per_second_of_one_core{how}"] = round(total / 1e9 / value, 2)
    return rates


@dataclass(frozen=True)
class Cores:
    """What all cores did at once at best, in GB/s: other work on the machine lowers no limit."""

    copy: float
    digest: float

    def limit(self, total: int, copies: float, digests: float) -> float:
        """Return the seconds for so many copies and digests of `total` bytes."""
        return total / 1e9 * (copies / self.copy + digests / self.digest)


# The three parts.


def one_replica(options: argparse.Namespace, place: Path) -> tuple[dict[str, object], Cores]:
    """Rounds of a large model beside plain copies and what others do."""
    total = int(options.gib * 2**30)
    private = llm_weights(total)
    shared = {name: tensor.clone().share_memory_() for name, tensor in private.items()}
    spare = {name: torch.zeros_like(tensor) for name, tensor in private.items()}
    total = nbytes(private)
    queue = torch.multiprocessing.get_context("spawn").Queue()
    pipe = f"ipc://{place}/bytes"
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.bind(pipe)
    child = Child(replica, llm_shapes(total), queue, pipe)
    publishers: list[fw.Publisher] = []

    def ours(weights: Weights, strategy: str, **more: Any) -> Rounds:
        address = f"unix:{place}/policy{len(publishers)}"
        publishers.append(fw.Publisher(weights, address, transport=strategy, **more))
        return publishing(publishers[-1], weights, [child])

    def by_torch() -> None:
        queue.put(shared)
        child.answer(TIMEOUT_SECONDS)

    def by_zmq() -> None:
        for tensor in private.values():
            socket.send(as_bytes(tensor), copy=False)
        child.answer(TIMEOUT_SECONDS)

    ways: dict[str, Rounds | Callable[[], object]] = {
        "limit: one memcpy": lambda: copy(spare, shared),
        "mapped": ours(shared, "mapped", should_verify=False),
        "mapped, verified": ours(shared, "mapped"),
        "torch.multiprocessing queue": Rounds("take_torch", (), shared, by_torch, [child]),
        "limit: two memcpys": lambda: (copy(shared, private), copy(spare, shared)),
        "host buckets": ours(private, "host", should_verify=False),
        "host buckets, verified": ours(private, "host"),
        "hold": ours(private, "auto", hold=True, should_verify=False),
        "hold, verified": ours(private, "auto", hold=True),
        "ZMQ bytes": Rounds("take_zmq", (), private, by_zmq, [child]),
        "memcpy by all cores": lambda: copy_by_all(spare, private),
    }
    try:
        runs = in_turn(ways, options.repeats)
    finally:
        child.close()
        for publisher in publishers:
            publisher.close()
        socket.close()
    rows = {
        name: way.summary(total) if isinstance(way, Rounds) else runs[name].summary(total)
        for name, way in ways.items()
    }
    rates = digest_rates(min(total, 256 * MIB), options.repeats)
    num_cpus = len(os.sched_getaffinity(0))
    cores = Cores(
        copy=float(str(rows["memcpy by all cores"]["gb_per_second_max"])),
        digest=num_cpus * float(str(rates["digest_gb_per_second_of_one_core_best"])),
    )
    found: dict[str, object] = {"bytes": total, "tensors": len(private), **rates}
    found["memcpy by all cores"] = rows["memcpy by all cores"]
    names = list(ways)
    groups = {"one copy": names[:4], "two copies": names[4:10]}
    for copies, (title, group) in enumerate(groups.items(), start=1):
        some = {name: rows[name] for name in group}
        limit = statistics.median(runs[group[0]].seconds)
        for name in group[1:]:
            digests = 2 if name.endswith("verified") else 0
            seconds = float(str(rows[name]["seconds_median"]))
            rows[name]["of_plain_copies"] = round(seconds / limit, 3)
            of_all = cores.limit(total, copies, digests)
            rows[name]["limit_of_all_cores_seconds"] = round(of_all, 4)
            rows[name]["of_limit_of_all_cores"] = round(seconds / of_all, 3)
        print_rows(f"{title}, {total / 2**30:.1f} GiB to one replica", some)
        for name in group[1:]:
            row = rows[name]
            print(
                f"{name:32s} {row['of_plain_copies']:5.2f} times the plain copies,"
                f" {row['of_limit_of_all_cores']:5.2f} times the limit of all cores"
            )
        found[title] = some
    print(f"digest of one core {rates['digest_gb_per_second_of_one_core']} GB/s, "
          f"memcpy of all cores {cores.copy} GB/s at best")  # fmt: skip
    return found, cores


def control(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """Rounds of a model so small that only the talk costs."""
    shapes = {f"layers.{n}.weight": (256, 100) for n in range(20)}
    pipe = f"ipc://{place}/echo"
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_SECONDS))
    socket.bind(pipe)
    child = Child(replica, shapes, None, pipe)
    rows: dict[str, object] = {}

    def kept(name: str, seconds: Sequence[float]) -> None:
        found = np.array(seconds) * 1e6
        row = {f"p{p}_us": round(float(np.percentile(found, p)), 1) for p in (50, 99)}
        rows[name] = {**row, "max_us": round(float(found.max()), 1)}
        print(f"{name:32s} p50 {row['p50_us']:7.1f} us   p99 {row['p99_us']:7.1f} us   max {found.max():7.1f} us")  # fmt: skip

    print(f"\nwhole publish() of 1 MB in 20 tensors, {options.rounds} rounds")
    try:
        child.ask("clear")  # it is up
        child.tell("echo", options.rounds)
        seconds = []
        for _ in range(options.rounds):
            started = time.perf_counter()
            socket.send(b"." * 64)
            socket.recv()
            seconds.append(time.perf_counter() - started)
        child.answer(TIMEOUT_SECONDS)
        kept("ZMQ, there and back", seconds)
        for strategy in ("host", "mapped"):
            for should_verify in (False, True):
                weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}  # fmt: skip
                if strategy == "mapped":
                    weights = {name: tensor.share_memory_() for name, tensor in weights.items()}
                name = f"{strategy}{', verified' if should_verify else ''}"
                address = f"unix:{place}/{strategy}{should_verify}"
                with fw.Publisher(
                    weights, address, transport=strategy, should_verify=should_verify
                ) as publisher:
                    rounds = publishing(publisher, weights, [child])
                    child.tell("update", publisher.address, 20 + options.rounds)
                    for _ in range(20):
                        rounds.go()
                    seconds, inner = [], []
                    for _ in range(options.rounds):
                        started = time.perf_counter()
                        report = rounds.go()
                        seconds.append(time.perf_counter() - started)
                        inner.append(report.seconds)  # type: ignore[attr-defined]
                    child.answer(TIMEOUT_SECONDS)
                    kept(name, seconds)
                    kept(f"{name}, without the wait", inner)
                    rounds.check()
                    child.ask("leave", publisher.address)
    finally:
        child.close()
        socket.close()
    return {"bytes": 20 * 256 * 100 * 2, "rounds": options.rounds, "publish": rows}


def many_replicas(options: argparse.Namespace, place: Path, cores: Cores) -> dict[str, object]:
    """The same weights to more and more replicas at once."""
    private = llm_weights(int(options.each_mib * MIB))
    shared = {name: tensor.clone().share_memory_() for name, tensor in private.items()}
    total = nbytes(private)
    children = [Child(replica, llm_shapes(total)) for _ in range(max(options.replicas))]
    rows: dict[str, object] = {}
    print(f"\n{total / MIB:.0f} MiB to each of several replicas\n{'':32s} seconds median (min..max)  GB/s in all   of limit")  # fmt: skip
    try:
        for num in options.replicas:
            for strategy, weights in (("host", private), ("mapped", shared)):
                for should_verify in (False, True):
                    name = f"{num} {strategy}{', verified' if should_verify else ''}"
                    with fw.Publisher(
                        weights,
                        f"unix:{place}/{name.replace(' ', '').replace(',', '')}",
                        transport=strategy,
                        should_verify=should_verify,
                    ) as publisher:
                        rounds = publishing(publisher, weights, children[:num])
                        in_turn({name: rounds}, options.repeats)
                        row = rounds.summary(num * total)
                        for child in children[:num]:
                            child.ask("leave", publisher.address)
                    copies = num + (strategy == "host")
                    limit = cores.limit(total, copies, (1 + num) * should_verify)
                    median = float(str(row["seconds_median"]))
                    row["limit_of_all_cores_seconds"] = round(limit, 4)
                    row["of_limit_of_all_cores"] = round(median / limit, 3)
                    rows[name] = row
                    low, high = min(rounds.runs.seconds), max(rounds.runs.seconds)
                    print(f"{name:32s} {median:6.3f} ({low:6.3f}..{high:6.3f})       {row['gb_per_second_median']:6.2f}        {row['of_limit_of_all_cores']:5.2f} times")  # fmt: skip
    finally:
        for child in children:
            child.close()
    return {"bytes_each": total, "tensors": len(private), "rounds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--each-mib", type=float, default=512.0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=2000, help="of the small model")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small sizes; keeps no record")
    options = parser.parse_args()
    if options.quick:
        options.gib, options.each_mib, options.rounds, options.repeats = 0.25, 160, 100, 3
        options.replicas = [1, 2]
    with tempfile.TemporaryDirectory(prefix="flyweight-bench-") as scratch:
        one, cores = one_replica(options, Path(scratch))
        result: dict[str, object] = {"repeats": options.repeats, "one replica": one}
        result["control"] = control(options, Path(scratch))
        result["several replicas"] = many_replicas(options, Path(scratch), cores)
    if not options.quick:
        record(str(__doc__).splitlines()[0], result, "pyzmq")


if __name__ == "__main__":
    main()
