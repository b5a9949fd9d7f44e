"""torchrun for the examples of the docs: one process imports torch, and every rank is a fork of it.

    python tests/torchrun.py --standalone --nproc-per-node NUM_RANKS SCRIPT

Thirteen ranks that import torch one by one take longer than all other examples together.
"""

import argparse
import os
import runpy
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does; before torch has threads that a fork lacks
import torch.distributed.tensor  # noqa: F401

from rank_processes import end_with, free_ports


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--standalone", action="store_true", required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    options = parser.parse_args()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)[0]),
        WORLD_SIZE=str(options.nproc_per_node),
    )  # fmt: skip
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads, a fork has one"
    ranks = [fork(options.script, rank) for rank in range(options.nproc_per_node)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    return int(any(codes))


def fork(script, rank):
    """Run a script as one rank, in a fork; return its process number."""
    child = os.fork()
    if child:
        return child

    def run():
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        return 0

    return end_with(run)


if __name__ == "__main__":
    sys.exit(main())
