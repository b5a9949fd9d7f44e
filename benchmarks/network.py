"""How fast do updates over the network bring weights to replicas, against flat reads and the line?

`update`: one trainer, one replica, on loopback. Flat reads of the same bytes by two plain sockets take
turns with our updates, of a replica that reads and of one on the trainer's host.
`ranks`: the same with two trainer ranks and two engine ranks, which cut the tensors differently.
`line`: between two hosts (network namespaces) at 1 Gbit/s; the limit is what TCP leaves of that.
`fan-out`: 1 and 8 replicas, each on a host of its own at 400 Mbit/s, and what leaves the trainer.

Three times are kept of an update: that of the slowest replica, from the moment at which the version was
there to its commit; its pause, from the return of `before` to the end of `update`; and that of all of
`publish`, which includes the digests of the trainer. Every run checks what arrived.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flat_reads
import numpy as np
import torch
from measure import Child, record, spread

import flyweight as fw

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import netns

TIMEOUT_SECONDS = 120.0
ASK_SECONDS = 0.02  # what a replica is given to ask, before the clock starts
TOKEN = "a token of the benchmark"
COLUMNS = 1024
LOOPBACK = "127.0.0.1"
LINE_MBIT, FLEET_MBIT = 1000, 400
PAYLOAD = 1448 / 1514
"""The share of a full packet that is payload."""
KINDS: dict[str, tuple[bool, str]] = {
    "unverified": (False, "read"), "verified": (True, "read"),
    "verified, on the trainer's host": (True, "filled"),
}  # fmt: skip
"""Whether digests are compared, and the way of the bytes."""
Commands = dict[str, Callable[..., object]]


# What the processes do.


def model_of(nbytes: int, num_tensors: int, dim: int, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return equal tensors, or a rank's part of them if they are cut along a dim."""
    shape = [nbytes // num_tensors // 2 // COLUMNS, COLUMNS]
    size, offset = list(shape), [0, 0]
    size[dim] //= num_ranks
    offset[dim] = rank * size[dim]
    tensors = {f"layers.{i}.weight": torch.zeros(size, dtype=torch.bfloat16) for i in range(num_tensors)}  # fmt: skip
    if num_ranks == 1:
        return tensors
    return {name: fw.Sharded(tensor, shape, offset) for name, tensor in tensors.items()}


def tensors_of(model: Mapping[str, Any]) -> list[torch.Tensor]:
    return [getattr(each, "tensor", each) for each in model.values()]


def trainer(sizes: tuple[int, int], places: Mapping[str, str], rank: int, num_ranks: int, meeting: str) -> Commands:  # fmt: skip
    """A rank with a publisher of each kind."""
    model = model_of(*sizes, 0, rank, num_ranks)
    if num_ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks
        )
    options = {"token": TOKEN, "timeout_seconds": TIMEOUT_SECONDS}
    publishers = {
        kind: fw.Publisher(model, place, verify=KINDS[kind][0], **options)
        for kind, place in places.items()
    }

    def publish(kind: str, version: int, num_replicas: int) -> tuple[float, str]:
        started = time.perf_counter()
        report = publishers[kind].publish(version, num_replicas=num_replicas)
        seconds = time.perf_counter() - started
        assert not report.failed, str(report.failed[0].error)
        return seconds, str(report)

    def fill(value: int) -> None:
        for tensor in tensors_of(model):
            tensor.fill_(value)

    return {
        "addresses": lambda: {kind: each.address for kind, each in publishers.items()},
        "fill": fill, "publish": publish, "cpu": time.process_time,
        "close": lambda: [each.close() for each in publishers.values()],
    }  # fmt: skip


def replica(sizes: tuple[int, int], addresses: Mapping[str, str], rank: int, num_ranks: int, name: str) -> Commands:  # fmt: skip
    """A rank of an engine, with a replica of each kind."""
    model = model_of(*sizes, 1, rank, num_ranks)
    ranks = {"rank": rank, "world_size": num_ranks} if num_ranks > 1 else {}
    joined = {
        kind: fw.Replica(model, address, token=TOKEN, name=name, transport=KINDS[kind][1], **ranks)
        for kind, address in addresses.items()
    }

    def update(kind: str) -> tuple[float, float]:
        paused: list[float] = []
        report = joined[kind].update(
            before=lambda _: paused.append(time.perf_counter()), timeout_seconds=TIMEOUT_SECONDS
        )
        pause = time.perf_counter() - paused[0]
        assert report.transport == KINDS[kind][1], report.transport
        assert report.verified == ("live" if KINDS[kind][0] else "nothing"), report.verified
        return report.seconds, pause

    def holds(value: int) -> bool:
        bits = torch.tensor(value).to(torch.bfloat16).view(torch.int16)
        return all(bool((tensor.view(torch.int16) == bits).all()) for tensor in tensors_of(model))

    return {
        "update": update, "holds": holds, "cpu": time.process_time, "ready": lambda: None,
        "close": lambda: [each.close() for each in joined.values()],
    }  # fmt: skip


def flat_source(nbytes: int, ip: str) -> Commands:
    memory = np.zeros(nbytes, np.uint8)
    port = flat_reads.serve_sockets(memory, ip)
    return {"port": lambda: port, "fill": memory.fill, "cpu": time.process_time}


def flat_sink(nbytes: int, ip: str, port: int) -> Commands:
    memory = np.zeros(nbytes, np.uint8)
    sockets = flat_reads.SocketReader(memory, ip, port, TIMEOUT_SECONDS)

    def read() -> float:
        started = time.perf_counter()
        sockets.read()
        return time.perf_counter() - started

    return {"read": read, "holds": lambda value: bool((memory == value).all()), "cpu": time.process_time}  # fmt: skip


def free_port() -> int:
    """Return a port of the loopback that was free just now."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def on_host(host: netns.Host, commands: Callable[..., Commands], *args: object) -> Commands:
    host.enter()
    return commands(*args)


# How they are started, and what each contender does.


@dataclass
class Contender:
    """One way to bring the bytes over, and what its runs took."""

    sources: Sequence[Child]
    sinks: Sequence[Child]
    run: Callable[[int], dict[str, float]]
    """Brings the bytes over, under a number; returns seconds, the first of them to be compared."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: list[float] = field(default_factory=list)
    host: netns.Host | None = None
    """Where bytes are counted as they leave."""
    sent_bytes: list[int] = field(default_factory=list)

    def take_turn(self, number: int) -> None:
        """Run once, and check that the bytes are those that the sources had just then."""
        for each in self.sources:
            each.ask("fill", number)
        cpu, sent = self._cpu(), self._sent()
        for what, seconds in self.run(number).items():
            self.seconds.setdefault(what, []).append(seconds)
        self.sent_bytes.append(self._sent() - sent)
        self.cpu_seconds.append(self._cpu() - cpu)
        assert all(each.ask("holds", number) for each in self.sinks), "other bytes arrived"

    def _cpu(self) -> float:
        return sum(
            each.ask("cpu", timeout_seconds=TIMEOUT_SECONDS)
            for each in (*self.sources, *self.sinks)
        )

    def _sent(self) -> int:
        return self.host.sent_bytes() if self.host else 0

    def forget(self) -> None:
        self.seconds, self.cpu_seconds, self.sent_bytes = {}, [], []

    def summary(self, nbytes: int) -> dict[str, object]:
        first = next(iter(self.seconds.values()))
        return {
            **{what: spread(each) for what, each in self.seconds.items()},
            "runs": {what: [round(one, 4) for one in each] for what, each in self.seconds.items()},
            "gb_per_second_median": round(nbytes / statistics.median(first) / 1e9, 4),
            "gb_per_second_best": round(nbytes / min(first) / 1e9, 4),
            "cpu_seconds_per_gib": round(statistics.median(self.cpu_seconds) / nbytes * 2**30, 3),
        }


class Processes(ExitStack):
    """The processes of a question; they end with it."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.sizes = (options.mib << 20, options.tensors)
        self._scratch = self.enter_context(tempfile.TemporaryDirectory(prefix="flyweight-bench-"))

    def start(self, host: netns.Host | str, commands: Callable[..., Commands], *args: object) -> Child:  # fmt: skip
        """Start a process on a host, or on this one as if it were a host of that name."""
        if isinstance(host, str):
            child = Child(commands, *args, env={"FLYWEIGHT_HOST": host})
        else:
            child = Child(on_host, host, commands, *args, env={"FLYWEIGHT_HOST": host.name})
        self.callback(child.close)
        return child

    def flat(self, source_host: netns.Host | str, sink_host: netns.Host | str, ip: str) -> dict[str, Contender]:  # fmt: skip
        """Return the flat reads."""
        source = self.start(source_host, flat_source, self.sizes[0], ip)
        port = source.ask("port", timeout_seconds=TIMEOUT_SECONDS)
        sink = self.start(sink_host, flat_sink, self.sizes[0], ip, port)

        def read(number: int) -> dict[str, float]:
            return {"seconds": sink.ask("read", timeout_seconds=TIMEOUT_SECONDS)}

        return {"flat, sockets": Contender([source], [sink], read)}

    def updates(
        self, source_host: netns.Host | str, sink_hosts: Sequence[netns.Host | str], ip: str,
        *, num_ranks: int = 1, kinds: Sequence[str] = ("unverified", "verified"),
    ) -> dict[str, Contender]:  # fmt: skip
        """Return our updates: of a replica on each host, all of which have as many ranks."""
        name = secrets.token_hex(4)
        places = {kind: f"tcp://{ip}:{free_port() if num_ranks > 1 else 0}" for kind in kinds}
        meeting = f"{self._scratch}/{name}.meeting"
        trainers = [self.start(source_host, trainer, self.sizes, places, rank, num_ranks, meeting) for rank in range(num_ranks)]  # fmt: skip
        addresses = trainers[0].ask("addresses", timeout_seconds=TIMEOUT_SECONDS)
        engines = [
            self.start(host, replica, self.sizes, addresses, rank, num_ranks, f"engine{i}")
            for i, host in enumerate(sink_hosts)
            for rank in range(num_ranks)
        ]
        for child in engines:
            child.ask("ready", timeout_seconds=TIMEOUT_SECONDS)

        def run(kind: str, version: int) -> dict[str, float]:
            for child in engines:
                child.tell("update", kind)
            time.sleep(ASK_SECONDS)
            for child in trainers:
                child.tell("publish", kind, version, len(sink_hosts))
            (published, self.report), *_ = [each.answer(TIMEOUT_SECONDS) for each in trainers]
            took, paused = zip(*(each.answer(TIMEOUT_SECONDS) for each in engines), strict=True)
            return {
                "seconds": max(took),
                "pause_seconds": max(paused),
                "publish_seconds": published,
            }

        return {
            f"update, {kind}": Contender(
                trainers, engines, lambda number, kind=kind: run(kind, number)
            )
            for kind in kinds
        }


def in_turn(contenders: Mapping[str, Contender], repeats: int) -> None:
    """Let each run once, and again; the first turn makes connections and plans, and is not kept."""
    for turn in range(repeats + 1):
        names = list(contenders)[:: 1 if turn % 2 else -1]  # none always follows the same one
        for name in names:
            contenders[name].take_turn(turn + 1)
        if turn == 0:
            for each in contenders.values():
                each.forget()


def ratios(one: Contender, other: Contender) -> dict[str, object]:
    """Return the speed of one over that of the other, by medians and by the best runs."""
    base = other.seconds["seconds"]
    return {
        what: {
            "median": round(statistics.median(base) / statistics.median(each), 3),
            "best": round(min(base) / min(each), 3),
        }
        for what, each in one.seconds.items()
    }


def compared(contenders: dict[str, Contender], nbytes: int, repeats: int) -> dict[str, Any]:
    """Let contenders take turns, print a line for each, and return what is kept of them."""
    in_turn(contenders, repeats)
    rows: dict[str, Any] = {}
    flat = {name: each for name, each in contenders.items() if name.startswith("flat")}
    for name, each in contenders.items():
        row = rows[name] = each.summary(nbytes)
        row["speed_over"] = {base: ratios(each, flat[base]) for base in flat if base != name}
        over = [f"{all_of['seconds']['median']:.2f} of {base}" for base, all_of in row["speed_over"].items()]  # fmt: skip
        print(f"{name:25s} {row['gb_per_second_median']:7.4f} GB/s (best {row['gb_per_second_best']:.4f})   {row['cpu_seconds_per_gib']:.2f} CPU s/GiB  ", *over)  # fmt: skip
    return {"bytes": nbytes, "repeats": repeats, "rows": rows}


# The questions.


def ask_update(options: argparse.Namespace, num_ranks: int = 1) -> dict[str, object]:
    with Processes(options) as processes:
        flat = processes.flat("trainer", "engine", LOOPBACK)
        ours = processes.updates("trainer", ["engine"], LOOPBACK, num_ranks=num_ranks)
        ours |= processes.updates(
            "trainer", ["trainer"], LOOPBACK, num_ranks=num_ranks, kinds=[*KINDS][2:]
        )
        result = compared(flat | ours, processes.sizes[0], options.repeats)
        return {**result, "report": processes.report}


def ask_ranks(options: argparse.Namespace) -> dict[str, object]:
    return ask_update(options, num_ranks=2)


def ask_line(options: argparse.Namespace) -> dict[str, object]:
    limit = LINE_MBIT * 1e6 / 8 * PAYLOAD
    with netns.two_hosts() as (a, b), Processes(options) as processes:
        for host in (a, b):
            host.rate(LINE_MBIT)
        contenders = processes.flat(a, b, a.ip) | processes.updates(a, [b], a.ip)
        result = compared(contenders, processes.sizes[0], options.repeats)
    result["limit_gb_per_second"] = round(limit / 1e9, 4)
    result["of_limit"] = {
        name: {
            what: round(processes.sizes[0] / statistics.median(seconds) / limit, 3)
            for what, seconds in each.seconds.items()
            if what != "pause_seconds"
        }
        for name, each in contenders.items()
    }
    print(result["of_limit"])
    return result


def ask_fan_out(options: argparse.Namespace) -> dict[str, object]:
    with (
        netns.fleet(max(options.replicas), rate=FLEET_MBIT) as (host, members),
        Processes(options) as processes,
    ):
        contenders = {}
        for num in options.replicas:
            (each,) = processes.updates(host, members[:num], host.ip, kinds=["verified"]).values()
            each.host = host
            contenders[f"{num} replicas"] = each
        result = compared(contenders, processes.sizes[0], options.repeats)
    first = next(iter(contenders.values()))
    for name, each in contenders.items():
        row = result["rows"][name]
        row["sent_by_trainer_over_model"] = [round(sent / processes.sizes[0], 3) for sent in each.sent_bytes]  # fmt: skip
        row["times_over_first"] = {
            what: round(statistics.median(seconds) / statistics.median(first.seconds[what]), 3)
            for what, seconds in each.seconds.items()
        }
        print(f"{name:12s} {row['seconds']} sent {row['sent_by_trainer_over_model']} times the model; took {row['times_over_first']} times the first")  # fmt: skip
    return {"mbit_per_second_each": FLEET_MBIT, **result}


QUESTIONS = {
    "update": (ask_update, 1024, 9), "ranks": (ask_ranks, 1024, 9),
    "line": (ask_line, 256, 3), "fan-out": (ask_fan_out, 128, 3),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--mib", type=int, help="the size of the model")
    parser.add_argument("--tensors", type=int, default=256)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8], help="of fan-out")
    parser.add_argument("--json", action="store_true", help="keep a record")
    options = parser.parse_args()
    ask, mib, repeats = QUESTIONS[options.question]
    options.mib = mib if options.mib is None else options.mib
    options.repeats = repeats if options.repeats is None else options.repeats
    if (options.mib << 20) % (4 * COLUMNS * options.tensors):
        parser.error(f"{options.mib} MiB are not {options.tensors} tensors of rows that can be cut")
    result = {"tensors": options.tensors, **ask(options)}
    if options.json:
        name = f"network_{options.question.replace('-', '_')}"
        record(str(__doc__).splitlines()[0], result, name=name)


if __name__ == "__main__":
    main()
