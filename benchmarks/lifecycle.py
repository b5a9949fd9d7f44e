"""How soon does an engine obey, how long does an update stop it, and what does waiting cost?

Four parts. `reaction`: from the moment a controller writes a request until the worker's process has
it, by the clock that both share, beside a worker that looks at an int32 in shared memory every 10 ms,
in turns with it; and a whole PAUSE until all ranks have answered. `pause`: how long requests wait
for an update of a shared-memory model, beside its verified copy alone. `idle`: what a worker takes of a
core while nobody asks. `health`: how soon `flyweight serve` says how an engine is while large updates
follow each other.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from measure import Child, llm_shapes, nbytes, record, spread

import flyweight as fw
from flyweight.lifecycle.cell import Cell, RankRecord, Request
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.states import Signal
from flyweight.lifecycle.weights import StoredWeights
from flyweight.lifecycle.worker import Worker

TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.01  # as the old workers did
BLOCK = 50  # signals to one contender before the other has its turn
Weights = dict[str, torch.Tensor]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    found = np.array(seconds) * 1e6
    row = {f"p{p}_us": round(float(np.percentile(found, p)), 1) for p in (50, 99)}
    return {**row, "max_us": round(float(found.max()), 1)}


def show(name: str, row: Mapping[str, float]) -> None:
    print(f"{name:44s}" + "".join(f"  {key} {value:>10}" for key, value in row.items()))


def sums(weights: Weights) -> list[int]:
    """A checksum of each tensor's bytes, which has nothing to do with our digest."""
    return [
        xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).reshape(-1).numpy())
        for tensor in weights.values()
    ]


# How soon a signal is heard.


def listener(path: str, name: str) -> dict[str, Callable[..., object]]:
    """A process that hears signals by a status cell, or by looking at a word of shared memory."""
    cell, memory = Cell(path), SharedMemory(name)
    cell.claim(0)
    words = memory.buf.cast("i")

    def hear_cell(first: int, count: int) -> list[float]:
        heard = []
        for number in range(first, first + count):
            request = cell.next_request(number - 1, TIMEOUT_SECONDS)
            heard.append(time.monotonic())
            assert request is not None
            assert request.number == number
            cell.write_record(0, RankRecord(pid=os.getpid(), taken=number, done=number))
        return heard

    def hear_poll(first: int, count: int) -> list[float]:
        heard = []
        for number in range(first, first + count):
            while words[0] != number:
                time.sleep(POLL_SECONDS)
            heard.append(time.monotonic())
            words[1] = number
        return heard

    def close() -> None:
        words.release()
        memory.close()
        cell.close()

    return {"cell": hear_cell, "poll": hear_poll, "close": close, "ready": lambda: None}


def reaction(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """Signals at random moments, to one contender and then to the other."""
    rng = random.Random(0)
    memory = SharedMemory(create=True, size=8)
    words = memory.buf.cast("i")
    path = str(place / "reaction.cell")
    child = Child(listener, path, memory.name)
    seconds: dict[str, list[float]] = {"cell": [], "poll": []}
    with Cell(path) as cell:
        cell.claim(None)

        def ask_cell(number: int) -> None:
            cell.write_request(Request(number=number, signal=Signal.PAUSE))

        def is_heard_cell(number: int) -> bool:
            slot = cell.record(0)
            return slot is not None and slot.done == number

        def ask_poll(number: int) -> None:
            words[0] = number

        asks = {"cell": ask_cell, "poll": ask_poll}
        is_heard = {"cell": is_heard_cell, "poll": lambda number: words[1] == number}
        try:
            child.ask("ready")
            for first in range(1, 1 + options.signals + BLOCK, BLOCK):
                for way, ask in asks.items():
                    child.tell(way, first, BLOCK)
                    asked = []
                    for number in range(first, first + BLOCK):
                        time.sleep(rng.uniform(0.5, 1.5) * POLL_SECONDS)  # so that it waits again
                        asked.append(time.monotonic())
                        ask(number)
                        while not is_heard[way](number):
                            time.sleep(0.0005)
                    heard = child.answer(TIMEOUT_SECONDS)
                    if first > 1:  # the first block is not kept
                        seconds[way] += [b - a for a, b in zip(asked, heard, strict=True)]
            child.ask("close")
        finally:
            child.close()
            words.release()
            memory.close()
            memory.unlink()
    rows = {
        "status cell": percentiles(seconds["cell"]),
        "int32 looked at every 10 ms": percentiles(seconds["poll"]),
    }
    print(f"\na signal, until the worker's process has it; {len(seconds['cell'])} of each")
    for name, row in rows.items():
        show(name, row)
    return {"signals": len(seconds["cell"]), "heard": rows, "pause": pauses(options, place)}


def rank(cell: str, store: str, rank: int, num_ranks: int, port: int) -> dict[str, Callable[..., object]]:  # fmt: skip
    """One rank of an engine whose model is so small that only the talk costs."""
    if num_ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
        torch.distributed.init_process_group("gloo")
    model = {"w": torch.zeros(100)}
    worker = Worker(
        ModelEngine(model),
        StoredWeights(model, store),
        cell,
        rank=rank,
        num_ranks=num_ranks,
        should_follow=False,
    )
    worker.start()
    return {"close": worker.close, "cpu": time.process_time}


def pauses(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """PAUSE and RESUME, each from the call until every rank has answered."""
    store = place / "store"
    fw.save({"w": torch.ones(100)}, store, version=1)
    rows: dict[str, object] = {}
    print(f"\nwhole operations, {options.pauses} of each")
    for num_ranks in options.ranks:
        path = place / f"pause{num_ranks}.cell"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        children = [
            Child(rank, str(path), str(store), number, num_ranks, port)
            for number in range(num_ranks)
        ]
        try:
            with Control(path, num_ranks) as control:
                until_there(control)

                def carried_out(signal: Signal, control: Control = control) -> float:
                    started = time.perf_counter()
                    operation = control.wait(control.start(signal), TIMEOUT_SECONDS)
                    assert operation.ending == "done", operation.reason
                    return time.perf_counter() - started

                carried_out(Signal.UPDATE)
                seconds: dict[Signal, list[float]] = {Signal.PAUSE: [], Signal.RESUME: []}
                for _ in range(options.pauses):
                    for signal, found in seconds.items():
                        found.append(carried_out(signal))
            for signal, found in seconds.items():
                name = f"{signal}, {num_ranks} rank{'s' * (num_ranks > 1)}"
                rows[name] = row = percentiles(found)
                show(name, row)
            for child in children:
                child.tell("close")
            for child in children:
                child.answer(TIMEOUT_SECONDS)
        finally:
            for child in children:
                child.close()
    return {"repeats": options.pauses, "operations": rows}


def until_there(control: Control) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all(each.is_alive for each in control.status().ranks):
        assert time.monotonic() < deadline, control.status().reason
        time.sleep(0.01)


# How long an update stops an engine.


def engine(shapes: Mapping[str, tuple[int, ...]], address: str, cell: str) -> dict[str, Callable[..., object]]:  # fmt: skip
    """An engine that follows its trainer, and one request after the other that asks it."""
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    served = ModelEngine(weights)
    replica = fw.Replica(weights, address)
    worker = Worker(served, replica, cell)
    worker.start()
    gaps, is_over = [0.0], threading.Event()

    def ask_on() -> None:
        """Ask about two thousand times a second, and note the longest that none was answered."""
        last = None
        while not is_over.is_set():
            try:
                with served.request(1.0):
                    now = time.perf_counter()
            except fw.FlyweightError:
                continue
            gaps[0] = max(gaps[0], now - (now if last is None else last))
            last = now
            time.sleep(0.0005)

    asking = threading.Thread(target=ask_on, daemon=True)
    asking.start()

    def finished(num_updates: int) -> dict[str, float]:
        """Return what the update of that number took, once it is over."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while worker.operations.num_rounds < num_updates or worker.operations.state != "SERVING":
            assert time.monotonic() < deadline, worker.operations.failure
            time.sleep(0.002)
        time.sleep(0.01)  # for the request that waited
        report = worker.operations.report
        assert report is not None
        gap, gaps[0] = gaps[0], 0.0
        return {
            "pause": worker.operations.pause_seconds,
            "no_answer": gap,
            "update": report.seconds,
            "copy": report.copy_seconds,
        }

    def close() -> None:
        is_over.set()
        asking.join(5)
        worker.close()
        replica.close()

    return {
        "finished": finished, "close": close, "sums": lambda: sums(weights),
        "cpu": time.process_time, "ready": lambda: None,
    }  # fmt: skip


def shared_weights(total: int) -> Weights:
    """Weights in shared memory, every page of them touched."""
    shapes = (
        {f"layers.{n}.weight": (256, 100) for n in range(max(total // 51200, 1))}
        if total < 200 << 20
        else llm_shapes(total)
    )
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator).share_memory_()
        for name, shape in shapes.items()
    }


def shapes_of(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def pause(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """Updates of models of several sizes, to an engine that is being asked all the time."""
    rows: dict[str, object] = {}
    print(f"\nan update, {options.repeats} of each; milliseconds")
    for mib in options.sizes_mib:
        weights = shared_weights(int(mib * 2**20))
        total = nbytes(weights)
        address = f"unix:{place}/pause{mib:g}"
        with fw.Publisher(weights, address) as publisher:
            child = Child(engine, shapes_of(weights), address, str(place / f"update{mib:g}.cell"))
            try:
                child.ask("ready")
                found = []
                for version in range(1, 3 + options.repeats):
                    for tensor in weights.values():
                        tensor[0] += 1
                    publisher.publish(version, num_replicas=1, timeout_seconds=TIMEOUT_SECONDS)
                    told = child.ask("finished", version)
                    if version > 2:  # the first ones map and prepare
                        found.append(told)
                assert child.ask("sums") == sums(weights), "other bytes"
                child.ask("close")
            finally:
                child.close()
        row: dict[str, Any] = {key: spread(each[key] for each in found) for key in found[0]}
        medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
        row["pause_of_copy"] = round(medians["pause"] / medians["copy"], 3)
        row["bytes"], row["tensors"] = total, len(weights)
        rows[f"{mib:g} MiB"] = row
        show(
            f"{mib:g} MiB",
            {
                **{key: row[key]["median_ms"] for key in found[0]},
                "pause/copy": row["pause_of_copy"],
            },
        )
    return {"repeats": options.repeats, "sizes": rows}


# What waiting costs.


def waiter(path: str) -> dict[str, Callable[..., object]]:
    """A process that waits for a request, in a thread, and does nothing else."""
    cell = Cell(path)

    def wait_on() -> None:
        while cell.next_request(0, 1.0) is None:
            pass

    threading.Thread(target=wait_on, daemon=True).start()
    return {"cpu": time.process_time}


def poller() -> dict[str, Callable[..., object]]:
    """A process that looks at a word of memory every 10 ms, in a thread."""
    word = bytearray(4)

    def wait_on() -> None:
        while struct.unpack_from("i", word)[0] == 0:
            time.sleep(POLL_SECONDS)

    threading.Thread(target=wait_on, daemon=True).start()
    return {"cpu": time.process_time}


def quiet_engine(address: str, cell: str) -> dict[str, Callable[..., object]]:
    """An engine that follows its trainer, and that nobody asks."""
    weights = {"w": torch.zeros(100)}
    replica = fw.Replica(weights, address)
    worker = Worker(ModelEngine(weights), replica, cell)
    worker.start()

    def close() -> None:
        worker.close()
        replica.close()

    return {"cpu": time.process_time, "close": close}


def idle(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """CPU time over wall time of processes that wait, all during the same seconds."""
    address = f"unix:{place}/idle"
    with fw.Publisher({"w": torch.zeros(100)}, address):
        children = {
            "waits for a request": Child(waiter, str(place / "idle.cell")),
            "whole worker, follows a trainer": Child(quiet_engine, address, str(place / "quiet.cell")),
            "int32 looked at every 10 ms": Child(poller),
        }  # fmt: skip
        try:
            for child in children.values():
                child.ask("cpu")  # it is up
            time.sleep(1.0)  # and has done what there is to do at the beginning
            before = {name: child.ask("cpu") for name, child in children.items()}
            started = time.monotonic()
            time.sleep(options.idle_seconds)
            seconds = time.monotonic() - started
            after = {name: child.ask("cpu") for name, child in children.items()}
            children["whole worker, follows a trainer"].ask("close")
        finally:
            for child in children.values():
                child.close()
    rows = {
        name: {"percent_of_a_core": round(100 * (after[name] - before[name]) / seconds, 3)}
        for name in children
    }
    print(f"\nwaiting, over {seconds:.0f} s")
    for name, row in rows.items():
        show(name, row)
    return {"seconds": round(seconds, 1), "waiting": rows}


# How soon health is answered.


def prober(host: str, port: int) -> dict[str, Callable[..., object]]:
    """A process that asks for health again and again, as a load balancer does."""

    def probe(seconds: float) -> list[tuple[float, int, str]]:
        found = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
            started = time.perf_counter()
            connection.request("GET", "/health")
            response = connection.getresponse()
            text = json.loads(response.read())["result"]
            found.append((time.perf_counter() - started, response.status, text))
            connection.close()
            time.sleep(0.01)
        return found

    return {"probe": probe}


def health(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """Health of an engine at rest, and then while it is updated without a stop."""
    weights = shared_weights(int(options.health_gib * 2**30))
    address, cell = f"unix:{place}/health", str(place / "health.cell")
    words = [sys.executable, "-m", "flyweight.cli", "serve", "--json", "--port", "0", "--run", str(place / "run"), "--replica", f"engine={cell}"]  # fmt: skip
    with (
        fw.Publisher(weights, address) as publisher,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server,
    ):
        child = Child(engine, shapes_of(weights), address, cell)
        try:
            assert server.stdout is not None
            served = json.loads(server.stdout.readline())["address"]
            host, port = served.removeprefix("http://").split(":")
            probe = Child(prober, host, int(port))
            try:
                child.ask("ready")
                publisher.publish(1, num_replicas=1, timeout_seconds=TIMEOUT_SECONDS)
                child.ask("finished", 1)
                at_rest = probe.ask("probe", options.health_seconds / 4)
                probe.tell("probe", options.health_seconds)
                deadline, version, rounds = time.monotonic() + options.health_seconds, 1, []
                while time.monotonic() < deadline:
                    version += 1
                    publisher.publish(version, num_replicas=1, timeout_seconds=TIMEOUT_SECONDS)
                    rounds.append(child.ask("finished", version)["update"])
                meanwhile = probe.answer(options.health_seconds + TIMEOUT_SECONDS)
                child.ask("close")
            finally:
                probe.close()
        finally:
            child.close()
            server.terminate()
    rows = {}
    print("\nGET /health")
    for name, found in {"at rest": at_rest, "while updates go on": meanwhile}.items():
        rows[name] = row = {**percentiles([seconds for seconds, _, _ in found]), "answers": len(found)}  # fmt: skip
        show(name, row)
    texts = [text for _, _, text in meanwhile]
    percents = [int(each[1]) for text in texts if (each := re.search(r"updating, (\d+) %", text))]
    codes = sorted({code for _, code, _ in meanwhile})
    between = [percent for percent in percents if 0 < percent < 100]
    print(
        f"{len(rounds)} updates of {nbytes(weights) / 2**20:.0f} MiB, codes {codes}, "
        f"{len(percents)} answers while updating, {len(between)} of them between 0 and 100 %"
    )
    return {
        "bytes": nbytes(weights),
        "updates": len(rounds),
        "update": spread(rounds),
        "latency": rows,
        "codes": codes,
        "answers_while_updating": len(percents),
        "answers_between_0_and_100_percent": len(between),
        "percents_seen": sorted(set(percents)),
    }


PARTS = {"reaction": reaction, "pause": pause, "idle": idle, "health": health}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--signals", type=int, default=2000)
    parser.add_argument("--pauses", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes-mib", type=float, nargs="+", default=[1, 256, 2048])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--health-gib", type=float, default=2.0)
    parser.add_argument("--health-seconds", type=float, default=20.0)
    parser.add_argument("--only", choices=PARTS, help="one part; keeps no record")
    parser.add_argument("--fast", action="store_true", help="tiny settings; keeps no record")
    options = parser.parse_args()
    if options.fast:
        options.signals, options.pauses, options.ranks = BLOCK, 20, [1, 2]
        options.sizes_mib, options.repeats, options.idle_seconds = [1, 32], 2, 1.0
        options.health_gib, options.health_seconds = 0.05, 2.0
    parts = {name: part for name, part in PARTS.items() if options.only in (None, name)}
    with tempfile.TemporaryDirectory(prefix="flyweight-bench-") as scratch:
        result = {name: part(options, Path(scratch)) for name, part in parts.items()}
    if not options.fast and options.only is None:
        record(str(__doc__).splitlines()[0], result, "starlette", "uvicorn")


if __name__ == "__main__":
    main()
