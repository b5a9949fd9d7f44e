"""How do time and memory grow with the number of tensors and with the number of bytes?

Slopes of straight lines through the medians, and how far the worst point is from its line. Also
how much slower fresh memory is than memory that was written before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import Runs, record

import flyweight as fw

GIB = 1 << 30


def line(xs: list[float], ys: list[float]) -> dict[str, object]:
    """Fit y = a + b x; small machines are noisy, so say how well it fits."""
    slope, start = np.polyfit(xs, ys, 1)
    fitted = start + slope * np.array(xs)
    worst = float(np.max(np.abs(fitted - ys) / np.array(ys)))
    r = float(np.corrcoef(xs, ys)[0, 1])
    return {
        "slope": float(slope),
        "start": float(start),
        "r": round(r, 4),
        "worst_ratio": round(worst, 3),
    }


def measured(weights: dict[str, np.ndarray], place: Path, repeats: int) -> dict[str, object]:
    saves, loads = Runs(), Runs()
    for _ in range(repeats):
        shutil.rmtree(place, ignore_errors=True)
        os.sync()
        saves.add(lambda: fw.save(weights, place))
        loads.add(lambda: fw.load(place, into=weights))
    shutil.rmtree(place)
    return {
        "save_seconds": round(statistics.median(saves.seconds), 4),
        "load_seconds": round(statistics.median(loads.seconds), 4),
        "save_extra_mib": round(max(saves.extra_bytes) / 2**20, 1),
        "load_extra_mib": round(max(loads.extra_bytes) / 2**20, 1),
    }


def fresh_memory_factor(nbytes: int = GIB) -> float:
    """Return how many times longer a copy into fresh pages takes than one into written pages."""
    source = np.ones(nbytes, np.uint8)
    ratios = []
    for _ in range(3):
        target = np.empty(nbytes, np.uint8)
        started = time.perf_counter()
        np.copyto(target, source)
        fresh = time.perf_counter() - started
        started = time.perf_counter()
        np.copyto(target, source)
        ratios.append(fresh / (time.perf_counter() - started))
        del target
    return round(statistics.median(ratios), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-gib", type=float, default=8.0)
    parser.add_argument("--place", type=Path, help="where to write the files; a disk, not tmpfs")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="flyweight-bench-", dir=options.place)) / "run"
    rows: dict[str, dict[str, object]] = {}
    try:
        counts = [1_000, 3_000, 10_000, 30_000, 100_000]
        memory = np.ones(256 << 20, np.uint8)
        for count in counts:  # the same bytes, cut ever finer
            step = len(memory) // count // 64 * 64
            weights = {f"layer.{i}.weight": memory[i * step : (i + 1) * step] for i in range(count)}
            rows[f"{count} tensors"] = measured(weights, place, options.repeats)
            print(f"{count:7d} tensors", rows[f"{count} tensors"], flush=True)
        del memory
        sizes = [g for g in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0) if g <= options.most_gib]
        for gib in sizes:
            block = np.ones(int(gib * GIB) // 32, np.uint8)
            weights = {f"layer.{i}.weight": block.copy() for i in range(32)}
            rows[f"{gib} GiB"] = measured(weights, place, options.repeats)
            print(f"{gib:7.1f} GiB    ", rows[f"{gib} GiB"], flush=True)
            del weights
    finally:
        shutil.rmtree(place.parent)
    slopes = {}
    for verb in ("save", "load"):
        seconds = [float(str(rows[f"{count} tensors"][f"{verb}_seconds"])) for count in counts]
        slopes[f"{verb}: seconds per 1000 tensors"] = line([c / 1000 for c in counts], seconds)
        extra = [float(str(rows[f"{count} tensors"][f"{verb}_extra_mib"])) for count in counts]
        slopes[f"{verb}: extra MiB per 1000 tensors"] = line([c / 1000 for c in counts], extra)
        seconds = [float(str(rows[f"{gib} GiB"][f"{verb}_seconds"])) for gib in sizes]
        slopes[f"{verb}: seconds per GiB"] = line(sizes, seconds)
    for name, fit in slopes.items():
        print(f"{name:34s} {fit['slope']:8.4f}  (start {fit['start']:.3f}, r {fit['r']})")
    factor = fresh_memory_factor()
    print(f"a copy into fresh memory takes {factor} times as long as one into written memory")
    result = {
        "repeats": options.repeats,
        "rows": rows,
        "slopes": slopes,
        "fresh_memory_factor": factor,
    }
    record(str(__doc__).splitlines()[0], result)


if __name__ == "__main__":
    main()
