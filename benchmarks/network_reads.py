"""How fast does our reader of another host's memory by NIXL read, and what does it cost?

    python benchmarks/network_reads.py [MIB] [REPEATS]

Beside it plain sockets and NIXL's own flat reads (`flat_reads.py`), over loopback, in one run, one
after the other: ratios are what counts. CPU time is that of all processes that take part.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import flat_reads
import numpy as np
from measure import Child, record

from flyweight.memory import Buffer, Bytes
from flyweight.transports.network_engines import engines_here
from flyweight.transports.nixl_reads import NixlReader
from flyweight.transports.read_server import ReadServer

HERE = "127.0.0.1"
TIMEOUT_SECONDS = 60.0


def pattern(nbytes: int) -> Bytes:
    return np.arange(nbytes // 8, dtype=np.uint64).view(np.uint8)


def source(nbytes: int) -> dict[str, Callable[..., object]]:
    """The process that is read from: by sockets, by NIXL in it, by NIXL in a process of its own."""
    server = ReadServer("nixl", address=HERE)
    buffer = server.allocate(nbytes)
    memory = buffer.items()
    memory[:] = pattern(nbytes)
    port = flat_reads.serve_sockets(memory, HERE)
    flat = flat_reads.NixlServer(memory) if engines_here().nixl else None
    return {
        "port": lambda: port,
        "flat": lambda: flat and flat.description,
        "pump": lambda: flat and flat.start(),
        "rest": lambda: flat and flat.stop(),
        "served": lambda: (server.describe(), server.place(buffer)),
        "cpu": lambda: cpu_seconds(os.getpid()) + cpu_seconds(server.pid),
        "close": server.close,
    }


def cpu_seconds(pid: int | None) -> float:
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def by_readers(served: tuple[bytes, bytes], into: Bytes, num_readers: int) -> Callable[[], None]:
    description, place = served
    readers = [NixlReader(description, address=HERE) for _ in range(num_readers)]

    def read(reader: NixlReader, start: int, length: int) -> None:
        target = Buffer.of(into[start : start + length])
        reader.read(place, start, target, timeout_seconds=TIMEOUT_SECONDS)

    work = list(zip(readers, flat_reads.parts(len(into), num_readers), strict=True))
    return lambda: flat_reads.together(
        [lambda a=reader, b=part: read(a, *b) for reader, part in work], TIMEOUT_SECONDS
    )


class Contenders:
    """The ways to read all of the source's memory, by name."""

    def __init__(self, child: Child, nbytes: int) -> None:
        self._child, self._expected = child, pattern(nbytes)
        self._into = np.zeros(nbytes, np.uint8)
        sockets = flat_reads.SocketReader(self._into, HERE, child.ask("port"), TIMEOUT_SECONDS)
        self.work: dict[str, Callable[[], object]] = {"two plain sockets": sockets.read}
        self._needs_pump: set[str] = set()
        if described := child.ask("flat"):
            flat = flat_reads.NixlReader(self._into, described, TIMEOUT_SECONDS)
            self.work |= {
                "NIXL, one agent": lambda: flat.read(1),
                "NIXL, two agents": lambda: flat.read(2),
            }
            self._needs_pump = set(self.work) - {"two plain sockets"}
            served = child.ask("served")
            self.work |= {
                "NixlReader": by_readers(served, self._into, 1),
                "two NixlReaders": by_readers(served, self._into, 2),
            }

    def measured(self, name: str) -> tuple[float, float]:
        """Return the seconds of one read and its CPU seconds, after a check of every byte."""
        self._into[:] = 0
        if name in self._needs_pump:
            self._child.ask("pump")
        theirs, ours = self._child.ask("cpu"), time.process_time()
        started = time.perf_counter()
        self.work[name]()
        seconds = time.perf_counter() - started
        cpu = time.process_time() - ours + self._child.ask("cpu") - theirs
        if name in self._needs_pump:
            self._child.ask("rest")
        assert np.array_equal(self._into, self._expected), f"other bytes by {name}"
        return seconds, cpu


def summary(nbytes: int, found: list[tuple[float, float]], limit: float) -> dict[str, object]:
    seconds, cpu = [each for each, _ in found], [each for _, each in found]
    median = statistics.median(seconds)
    return {
        "gb_per_second_median": round(nbytes / median / 1e9, 3),
        "gb_per_second_min": round(nbytes / max(seconds) / 1e9, 3),
        "gb_per_second_max": round(nbytes / min(seconds) / 1e9, 3),
        "of_one_agent_median": round(limit / median, 3),
        "cpu_seconds_per_gib": round(statistics.mean(cpu) / nbytes * 2**30, 3),
        "seconds": [round(each, 4) for each in seconds],
    }


def main(mib: int = 256, repeats: int = 9) -> None:
    nbytes = mib << 20
    child = Child(source, nbytes)
    contenders = Contenders(child, nbytes)
    names = list(contenders.work)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-1, repeats):  # the first round warms everything up
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            found = contenders.measured(name)
            if number >= 0:
                runs[name].append(found)
    base = runs.get("NIXL, one agent", runs[names[0]])
    limit = statistics.median(seconds for seconds, _ in base)
    rows = {name: summary(nbytes, found, limit) for name, found in runs.items()}
    for name, row in rows.items():
        print(
            f"{name:20s} {row['gb_per_second_median']:6.2f} GB/s ({row['gb_per_second_min']:.2f}.."
            f"{row['gb_per_second_max']:.2f}), {row['of_one_agent_median']:.2f} of one agent, "
            f"{row['cpu_seconds_per_gib']:.2f} CPU s/GiB"
        )
    child.ask("close")
    child.close()
    question = "How fast does our reader of memory by NIXL read over TCP, and what does it cost?"
    result: dict[str, object] = {"bytes": nbytes, "repeats": repeats, "loopback": rows}
    record(question, result, flat_reads.nixl_package())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
