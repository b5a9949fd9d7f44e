"""What does it cost a save to digest every replica, over comparing samples?

All ranks hold the whole model, the most there can be to compare: each writes its share and digests the
rest. Saves of both kinds alternate; a ratio is of two that follow each other. In the background the time
is that of the call alone, for which training pauses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from measure import llm_weights, nbytes, record, spread

import flyweight as fw


def timed(weights: dict[str, object], root: Path, check: str, *, background: bool) -> float:
    """Save once, all ranks together, and return the seconds of the slowest."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        os.sync()
    dist.barrier()
    started = time.perf_counter()
    handle = fw.save_state_dict(weights, root, background=background, check_replicas=check)
    dist.barrier()
    seconds = time.perf_counter() - started
    if background:
        handle.wait(600)
    return seconds


def measure_ranks(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    weights = llm_weights(int(options.gib * 2**30))
    found: dict[str, object] = {"bytes": nbytes(weights), "ranks": dist.get_world_size()}
    for title, background in (("save", False), ("call of a save in the background", True)):
        seconds: dict[str, list[float]] = {"sampled": [], "digest": []}
        for repeat in range(options.repeats + 1):  # the first round warms up and is not kept
            for check in sorted(seconds, reverse=repeat % 2 == 0):  # neither is always the first
                took = timed(weights, options.place / "run", check, background=background)
                seconds[check].append(took)
        kept = {check: each[1:] for check, each in seconds.items()}
        ratios = [b / a for a, b in zip(kept["sampled"], kept["digest"], strict=True)]
        found[title] = {
            **{check: spread(each) for check, each in kept.items()},
            "digest_over_sampled": {
                "median": round(statistics.median(ratios), 3),
                "min": round(min(ratios), 3),
                "max": round(max(ratios), 3),
            },
        }
    if dist.get_rank() == 0:
        (options.place / "found.json").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--place", type=Path, help="where to write the files; a disk, not tmpfs")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.is_rank:
        measure_ranks(options)
        return
    with tempfile.TemporaryDirectory(prefix="flyweight-bench-", dir=options.place) as scratch:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.ranks]
        words += [sys.argv[0], "--is-rank", "--place", scratch]
        words += ["--gib", options.gib, "--repeats", options.repeats]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        subprocess.run([sys.executable, *map(str, words)], check=True, timeout=1800, env=env)
        found = json.loads(Path(scratch, "found.json").read_text())
    print(json.dumps(found, indent=1))
    record(str(__doc__).splitlines()[0], {"repeats": options.repeats, **found})


if __name__ == "__main__":
    main()
