"""How fast is a model saved durably, checksums and digests included, beside the peers?

Every contender ends with its bytes on the disk: where it does not sync, the benchmark does. The
limit is plain unbuffered writes of the same bytes from reused memory, and a sync.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import Runs, llm_weights, nbytes, print_rows, record

import flyweight as fw

MIB = 1 << 20


def sync(path: Path) -> None:
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def plain_writes(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write all bytes unbuffered, two threads, 8 MiB at a time; tails of tensors rounded up."""
    jobs, at = [], 0
    for tensor in weights.values():
        memory = tensor.view(torch.uint8).reshape(-1).numpy()
        for start in range(0, len(memory), 8 * MIB):
            jobs.append((at, memory[start : start + 8 * MIB]))
            at += -(-len(jobs[-1][1]) // 4096) * 4096
    queue, lock = iter(jobs), threading.Lock()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, at)

    def work() -> None:
        bounce = mmap.mmap(-1, 8 * MIB)
        view = np.frombuffer(bounce, np.uint8)
        while True:
            with lock:
                job = next(queue, None)
            if job is None:
                return
            offset, memory = job
            view[: len(memory)] = memory
            os.pwrite(fd, memoryview(bounce)[: -(-len(memory) // 4096) * 4096], offset)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    os.fsync(fd)
    os.close(fd)


def contenders(weights: dict[str, torch.Tensor]) -> dict[str, Callable[[Path], object]]:
    import paddle
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    theirs = {
        name: paddle.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
        for name, tensor in weights.items()
    }
    return {
        "limit: plain writes": lambda path: plain_writes(path, weights),
        "flyweight": lambda path: fw.save(weights, path, version=1),
        "safetensors save_file + fsync": lambda path: (save_file(weights, path), sync(path)),
        "torch.save + fsync": lambda path: (torch.save(weights, path), sync(path)),
        "torch DCP": lambda path: dcp.save(dict(weights), checkpoint_id=path),
        "Paddle pickle + fsync": lambda path: (paddle.save(theirs, str(path)), sync(path)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", type=Path, help="where to write the files; a disk, not tmpfs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    weights = llm_weights(int(options.gib * 2**30))
    ways = contenders(weights)
    runs = {name: Runs() for name in ways}
    for repeat in range(options.repeats + 1):  # the first round warms up and is not kept
        if repeat == 1:
            runs = {name: Runs() for name in ways}
        for name, save in ways.items():
            place = Path(tempfile.mkdtemp(prefix="flyweight-bench-", dir=options.place))
            os.sync()
            runs[name].add(lambda save=save, path=place / "out": save(path))
            shutil.rmtree(place)
    total = nbytes(weights)
    rows = {name: each.summary(total) for name, each in runs.items()}
    print_rows(
        f"{total / 2**30:.1f} GiB, {len(weights)} tensors, {options.repeats} repeats, durable", rows
    )
    result: dict[str, object] = {
        "bytes": total,
        "tensors": len(weights),
        "repeats": options.repeats,
    }
    record(str(__doc__).splitlines()[0], {**result, "save": rows}, "safetensors", "paddlepaddle")


if __name__ == "__main__":
    main()
