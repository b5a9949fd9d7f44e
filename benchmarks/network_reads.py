"""How fast are flat reads of memory from another process over TCP, and what do they cost?

    python benchmarks/network_reads.py [MIB] [REPEATS]

Everything over loopback, in one run, one contender after the other: ratios are what counts. NIXL's
own reads have the same settings of UCX as ours. CPU time is that of all processes that take part.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from measure import Child, record

from flyweight.memory import Buffer, Bytes
from flyweight.transports.network_engines import engines_here
from flyweight.transports.nixl_agent import PAUSE_SECONDS, Agent
from flyweight.transports.nixl_reads import NixlReader
from flyweight.transports.read_server import ReadServer

HERE = "127.0.0.1"
STREAMS = 2
TIMEOUT_SECONDS = 60.0


def pattern(nbytes: int) -> Bytes:
    return np.arange(nbytes // 8, dtype=np.uint64).view(np.uint8)


def source(nbytes: int) -> dict[str, Callable[..., object]]:
    """The process that is read from: by sockets, by NIXL in it, by NIXL in a process of its own."""
    server = ReadServer("nixl", address=HERE)
    buffer = server.allocate(nbytes)
    data = buffer.items()
    data[:] = pattern(nbytes)
    listener = socket.create_server((HERE, 0))
    agents: list[Agent] = []

    def send() -> None:
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=send_parts, args=(peer,), daemon=True).start()

    def send_parts(peer: socket.socket) -> None:
        while request := peer.recv(16, socket.MSG_WAITALL):
            offset, size = np.frombuffer(request, np.int64).tolist()
            peer.sendall(memoryview(data)[offset : offset + size])

    def pump() -> None:
        while True:
            for agent in agents:
                agent.pump()
            time.sleep(PAUSE_SECONDS)

    def flat(num_agents: int) -> list[tuple[bytes, int]]:
        """Return what readers need to read the same memory by NIXL without us."""
        while len(agents) < num_agents:
            agents.append(Agent(address=HERE))
        described = [
            agent.describe(agent.register(buffer.address, nbytes), with_connection=True)
            for agent in agents
        ]
        threading.Thread(target=pump, daemon=True).start()
        return [(each, buffer.address) for each in described]

    threading.Thread(target=send, daemon=True).start()
    return {
        "port": lambda: listener.getsockname()[1],
        "flat": flat,
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


def together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def by_sockets(child: Child, into: Bytes) -> Callable[[], None]:
    port = child.ask("port")
    peers = [socket.create_connection((HERE, port), TIMEOUT_SECONDS) for _ in range(STREAMS)]
    part = len(into) // STREAMS

    def read(number: int) -> None:
        peers[number].sendall(np.array([number * part, part], np.int64).tobytes())
        view = memoryview(into)[number * part : (number + 1) * part]
        while view:
            view = view[peers[number].recv_into(view) :]

    return lambda: together([lambda each=each: read(each) for each in range(STREAMS)])  # type: ignore[misc]


def by_nixl(described: list[tuple[bytes, int]], into: Bytes) -> Callable[[], None]:
    """NIXL's own flat read: one transfer per agent."""
    agents = []
    for text, _ in described:
        agent = Agent(address=HERE)
        peer = agent.know(text)
        agent.register(into.ctypes.data, len(into))
        agents.append((agent, peer))
    part = len(into) // len(agents)

    def read(number: int) -> None:
        agent, peer = agents[number]
        at = number * part
        started = agent.start_read(peer, described[number][1] + at, into.ctypes.data + at, part)
        while not agent.is_done(started):
            time.sleep(PAUSE_SECONDS)

    return lambda: together([lambda each=each: read(each) for each in range(len(agents))])  # type: ignore[misc]


def by_readers(served: tuple[bytes, bytes], into: Bytes, num_readers: int) -> Callable[[], None]:
    description, place = served
    readers = [NixlReader(description, address=HERE) for _ in range(num_readers)]
    part = len(into) // num_readers

    def read(number: int) -> None:
        at = number * part
        target = Buffer.of(into[at : at + part])
        readers[number].read(place, at, target, timeout_seconds=TIMEOUT_SECONDS)

    return lambda: together([lambda each=each: read(each) for each in range(num_readers)])  # type: ignore[misc]


def measured(
    work: Callable[[], None], child: Child, into: Bytes, expected: Bytes
) -> tuple[float, float]:
    """Return the seconds of one read and its CPU seconds, after a check of every byte."""
    into[:] = 0
    before, ours = child.ask("cpu"), time.process_time()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    cpu = time.process_time() - ours + child.ask("cpu") - before
    assert np.array_equal(into, expected), "other bytes"
    return seconds, cpu


def main(mib: int = 256, repeats: int = 9) -> None:
    nbytes = mib << 20
    child, into, expected = Child(source, nbytes), np.zeros(nbytes, np.uint8), pattern(nbytes)
    contenders = {"two plain sockets": by_sockets(child, into)}
    if engines_here().nixl:
        flat = child.ask("flat", 2)
        served = child.ask("served")
        contenders |= {
            "NIXL, one agent": by_nixl(flat[:1], into),
            "NIXL, two agents": by_nixl(flat, into),
            "NixlReader": by_readers(served, into, 1),
            "two NixlReaders": by_readers(served, into, 2),
        }
    for work in contenders.values():
        measured(work, child, into, expected)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(repeats):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(measured(contenders[name], child, into, expected))
    rows: dict[str, object] = {}
    limit = statistics.median(seconds for seconds, _ in runs["two plain sockets"])
    for name, found in runs.items():
        seconds = [each for each, _ in found]
        median = statistics.median(seconds)
        rows[name] = row = {
            "gb_per_second_median": round(nbytes / median / 1e9, 3),
            "gb_per_second_min": round(nbytes / max(seconds) / 1e9, 3),
            "gb_per_second_max": round(nbytes / min(seconds) / 1e9, 3),
            "of_two_sockets": round(limit / median, 3),
            "cpu_seconds_per_gib": round(
                sum(cpu for _, cpu in found) / repeats / nbytes * 2**30, 3
            ),
            "seconds": [round(each, 4) for each in seconds],
        }
        print(
            f"{name:20s} {row['gb_per_second_median']:6.2f} GB/s ({row['gb_per_second_min']:.2f}.."
            f"{row['gb_per_second_max']:.2f}), {row['of_two_sockets']:.2f} of two sockets, "
            f"{row['cpu_seconds_per_gib']:.2f} CPU s/GiB"
        )
    child.ask("close")
    child.close()
    question = (
        "How fast are flat reads of another process's memory over TCP, and what do they cost?"
    )
    record(question, {"bytes": nbytes, "repeats": repeats, "loopback": rows}, "nixl-cu12")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
