"""What every benchmark needs: LLM-like weights, a clock with a memory gauge, and a record."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def llm_shapes(
    total_bytes: int, *, hidden: int = 2048, width: int = 2
) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder, layer after layer until `total_bytes` of `width`-byte elements."""
    inner, keys = hidden * 43 // 16, hidden // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, hidden)}
    total, layer = 32000 * hidden * width, 0
    while total < total_bytes:
        block = {
            "self_attn.q_proj.weight": (hidden, hidden), "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner), "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        for name, shape in block.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
            total += width * (shape[0] * (shape[1] if len(shape) > 1 else 1))
        layer += 1
    return shapes


def llm_weights(total_bytes: int, *, fill: bool = True) -> dict[str, torch.Tensor]:
    """bf16 tensors of those shapes, every page of them touched."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in llm_shapes(total_bytes).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        weights[name] = tensor.normal_(generator=generator) if fill else tensor.fill_(1)
    return weights


def nbytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def drop_cache(paths: Iterable[Path]) -> None:
    """Put files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm_cache(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    block = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


class MemoryGauge:
    """Watches this process's own memory from another process, so as not to slow it down.

    Its own is what the page cache cannot take back, private or shared: mapped files do not count.
    """

    _WATCH = """
import select, sys
path, peak = f"/proc/{sys.argv[1]}/status", 0
def anonymous():
    with open(path) as file:
        return sum(int(line.split()[1]) for line in file if line[:8] in ("RssAnon:", "RssShmem")) << 10
while True:
    peak = max(peak, anonymous())
    if select.select([sys.stdin], [], [], 0.005)[0]:
        if not sys.stdin.readline():
            break
        print(max(peak, anonymous()), flush=True)
        peak = 0
"""

    @cached_property
    def _child(self) -> subprocess.Popen[str]:
        """The watcher, which starts at the first reading."""
        words = [sys.executable, "-S", "-c", self._WATCH, str(os.getpid())]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def peak_bytes(self) -> int:
        """Return the highest reading since the last call."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())


GAUGE = MemoryGauge()


@dataclass
class Runs:
    """The repeats of one contender."""

    seconds: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)

    def add(self, work: Callable[[], object]) -> None:
        """Time one run, and watch its extra memory."""
        gc.collect()
        GAUGE.peak_bytes()
        before = GAUGE.peak_bytes()
        started = time.perf_counter()
        work()
        self.seconds.append(time.perf_counter() - started)
        self.extra_bytes.append(max(GAUGE.peak_bytes() - before, 0))

    def summary(self, total_bytes: int) -> dict[str, object]:
        rates = [total_bytes / 1e9 / seconds for seconds in self.seconds]
        return {
            "gb_per_second_median": round(statistics.median(rates), 3),
            "gb_per_second_min": round(min(rates), 3),
            "gb_per_second_max": round(max(rates), 3),
            "extra_mib_max": round(max(self.extra_bytes) / 2**20, 1),
            "seconds": [round(each, 4) for each in self.seconds],
        }


def print_rows(title: str, rows: dict[str, dict[str, object]], limit: float | None = None) -> None:
    """Print contenders beside each other; without another limit the first is that."""
    limit = limit or float(str(next(iter(rows.values()))["gb_per_second_median"]))
    print(f"\n{title}\n{'':32s} GB/s median (min..max)   of limit   extra MiB")
    for name, row in rows.items():
        row["of_limit"] = round(float(str(row["gb_per_second_median"])) / limit, 3)
        print(
            f"{name:32s} {row['gb_per_second_median']:6.2f} ({row['gb_per_second_min']:5.2f}..{row['gb_per_second_max']:5.2f})"
            f"          {row['of_limit']:5.2f}   {row['extra_mib_max']:8.1f}"
        )


class ChildFailed(Exception):
    """A command that raised in a child, with its traceback; or one that was not answered in time."""


class Child:
    """A process of its own, never forked, that answers commands; no wait for it is without end."""

    def __init__(
        self,
        commands: Callable[..., Mapping[str, Callable[..., object]]],
        *args: object,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start it: there `commands(*args)` is called once and tells what to call for each word."""
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self.name = commands.__name__
        self._process = context.Process(
            target=_answer, args=(theirs, commands, args), name=self.name, daemon=True
        )
        before = dict(os.environ)
        os.environ.update(env or {})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def tell(self, word: str, *args: object) -> None:
        """Give a command, whose answer must be fetched before the next one."""
        self._line.send((word, args))

    def answer(self, timeout_seconds: float) -> Any:
        if not self._line.poll(max(timeout_seconds, 0)):
            self._process.kill()  # an answer that comes late would be taken for the next one
            raise ChildFailed(f"{self.name} has not answered in {timeout_seconds:.0f} s")
        try:
            is_well, value = self._line.recv()
        except (EOFError, ConnectionError) as cause:
            raise ChildFailed(f"{self.name} is gone") from cause
        if not is_well:
            raise ChildFailed(f"{self.name}: {value}")
        return value

    def ask(self, word: str, *args: object, timeout_seconds: float = 60) -> Any:
        self.tell(word, *args)
        return self.answer(timeout_seconds)

    def close(self) -> None:
        """End it, by force if it does not end by itself."""
        self._line.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


def _answer(line: Connection, commands: Callable[..., Any], args: tuple[object, ...]) -> None:
    try:
        known = commands(*args)
        trouble = ""
    except Exception:
        known, trouble = {}, traceback.format_exc()
    while True:
        try:
            word, words = line.recv()
        except EOFError:  # the parent closed it, or is gone
            return
        try:
            reply = (False, trouble) if trouble else (True, known[word](*words))
        except Exception:
            reply = (False, traceback.format_exc())
        line.send(reply)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median of some seconds, and how far they spread, in milliseconds."""
    found = sorted(1000 * each for each in values)
    return {
        "median_ms": round(statistics.median(found), 3),
        "min_ms": round(found[0], 3),
        "max_ms": round(found[-1], 3),
    }


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if "model name" in line), "unknown")
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in ("flyweight", "numpy", "xxhash", "torch", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def record(
    question: str, result: dict[str, object], *packages: str, name: str | None = None
) -> None:
    """Keep a result, with all that is needed to ask again, and print where it is.

    name: the record's, if the benchmark has several; by default the benchmark's own.
    """
    entry = {
        "question": question,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(*packages),
        **result,
    }
    path = RESULTS / f"{name or Path(sys.argv[0]).stem}.json"
    path.write_text(json.dumps(entry, indent=1) + "\n")
    print(f"kept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
