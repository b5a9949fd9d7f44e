"""How fast are weights loaded in place, from a warm and from a cold page cache, beside the peers?

The limit is the best of plain reads and windowed mapping of the same bytes into the same memory,
at the best number of threads; when cold, unbuffered reads too. Contenders take turns, so that
a noisy minute hits them all.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import Runs, drop_cache, llm_weights, nbytes, print_rows, record, warm_cache

import flyweight as fw
from flyweight.digest import digest

Weights = dict[str, torch.Tensor]
MIB = 1 << 20


def flat_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).reshape(-1).numpy()


class Limit:
    """Moves the bytes of one file into the target's memory, and does nothing else."""

    def __init__(self, path: Path, target: Weights) -> None:
        self.path = path
        with fw.open(path) as source:
            extents = sorted(source.manifest.extents, key=lambda extent: extent.offset)
        self.places = [(extent.offset, flat_bytes(target[extent.name])) for extent in extents]

    def run(self, threads: int, way: str) -> None:
        jobs = iter(
            [
                (offset + start, memory[start : start + 8 * MIB])
                for offset, memory in self.places
                for start in range(0, len(memory), 8 * MIB)
            ]
        )
        lock = threading.Lock()
        flags = os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0)
        fd = os.open(self.path, flags)

        def work() -> None:
            bounce = mmap.mmap(-1, 8 * MIB + 8192)
            while True:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                getattr(self, way)(fd, *job, bounce)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(600)
        os.close(fd)

    @staticmethod
    def read(fd: int, offset: int, memory: np.ndarray, _: mmap.mmap) -> None:
        os.preadv(fd, [memoryview(memory)], offset)

    @staticmethod
    def map(fd: int, offset: int, memory: np.ndarray, _: mmap.mmap) -> None:
        below = offset % 4096
        with mmap.mmap(
            fd, below + len(memory), mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - below
        ) as view:
            source = np.frombuffer(view, np.uint8)
            np.copyto(memory, source[below:])
            del source

    @staticmethod
    def direct(fd: int, offset: int, memory: np.ndarray, bounce: mmap.mmap) -> None:
        below = offset % 4096
        reach = -(-(below + len(memory)) // 4096) * 4096
        view = memoryview(bounce)[:reach]
        os.preadv(fd, [view], offset - below)
        np.copyto(memory, np.frombuffer(view, np.uint8)[below : below + len(memory)])


def copy_all(found: Weights, target: Weights) -> None:
    for name, tensor in target.items():
        tensor.copy_(found[name])


def contenders(
    place: Path, weights: Weights, target: Weights
) -> dict[str, tuple[Callable[[], object], list[Path]]]:
    """Return, by name, how to load and from which files; writes those files."""
    import paddle
    import torch.distributed.checkpoint as dcp
    from fastsafetensors import fastsafe_open
    from runai_model_streamer import SafetensorsStreamer
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    st, pt = place / "model.safetensors", place / "model.pt"
    save_file(weights, st)
    torch.save(weights, pt)
    fw.save(weights, place / "run", version=1)
    dcp.save(dict(weights), checkpoint_id=place / "dcp")
    theirs = {
        name: paddle.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))
        for name, t in weights.items()
    }
    paddle.save(theirs, str(place / "pickle.pdparams"))
    paddle.save(theirs, str(place / "safe.pdparams"), safetensors=True)
    del theirs
    paddle_target = {
        name: paddle.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))
        for name, t in target.items()
    }

    def safe_open_copy() -> None:
        with safe_open(st, "pt") as file:
            for name, tensor in target.items():
                tensor.copy_(file.get_tensor(name))

    def runai() -> None:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(st))
            for name, tensor in streamer.get_tensors():
                target[name].copy_(tensor)

    def fastsafetensors() -> None:
        with fastsafe_open(filenames=[str(st)], nogds=True, device="cpu") as file:
            for name, tensor in target.items():
                tensor.copy_(file.get_tensor(name))

    def paddle_load(file: str, **options: bool) -> Callable[[], None]:
        def load() -> None:
            found = paddle.load(str(place / file), **options)
            for name, tensor in paddle_target.items():
                paddle.assign(
                    found[name].view("bfloat16")
                    if "uint16" in str(found[name].dtype)
                    else found[name],
                    tensor,
                )

        return load

    run = place / "run" / "v0000000001"
    parts = sorted(run.glob("*.safetensors"))
    pickled, safe = [place / "pickle.pdparams"], [place / "safe.pdparams"]
    return {
        "flyweight, checked": (lambda: fw.load(run, into=target), parts),
        "flyweight, unchecked": (lambda: fw.load(run, into=target, should_verify=False), parts),
        "flyweight, safetensors file": (lambda: fw.load(st, into=target), [st]),
        "flyweight, .pdparams pickle": (lambda: fw.load(pickled[0], into=target), pickled),
        "safetensors safe_open + copy": (safe_open_copy, [st]),
        "safetensors load_file + copy": (lambda: copy_all(load_file(st), target), [st]),
        "torch.load(mmap) + copy": (lambda: copy_all(torch.load(pt, mmap=True, weights_only=True), target), [pt]),
        "runai-model-streamer": (runai, [st]),
        "fastsafetensors": (fastsafetensors, [st]),
        "Paddle safetensors": (paddle_load("safe.pdparams", safetensors=True), safe),
        "Paddle pickle": (paddle_load("pickle.pdparams"), pickled),
        "torch DCP": (lambda: dcp.load(dict(target), checkpoint_id=place / "dcp"), sorted((place / "dcp").glob("*.distcp"))),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", type=Path, help="where to write the files; a disk, not tmpfs")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="flyweight-bench-", dir=options.place))
    logging.disable(logging.INFO)  # a peer tells its whole life at every load
    try:
        weights = llm_weights(int(options.gib * 2**30))
        target = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
        total = nbytes(weights)
        digests = {name: digest(flat_bytes(tensor)) for name, tensor in weights.items()}
        ways = contenders(place, weights, target)
        del weights
        limit = Limit(ways["flyweight, checked"][1][0], target)
        kinds = [
            ("read", 1),
            ("read", 2),
            ("map", 1),
            ("map", 2),
            ("direct", 1),
            ("direct", 2),
            ("direct", 4),
        ]
        result: dict[str, object] = {
            "bytes": total,
            "tensors": len(digests),
            "repeats": options.repeats,
        }
        for heat in ("warm", "cold"):
            prepare = warm_cache if heat == "warm" else drop_cache
            runs = {name: Runs() for name in ways}
            limits = {
                f"limit: {way}, {threads} threads": Runs()
                for way, threads in kinds
                if heat == "cold" or way != "direct"
            }
            for repeat in range(options.repeats + 1):  # the first round warms up and is not kept
                for name in limits:
                    way, threads = name.removeprefix("limit: ").split(", ")
                    prepare([limit.path])
                    limits[name].add(lambda w=way, t=threads: limit.run(int(t.split()[0]), w))
                for name, (load, files) in ways.items():
                    for tensor in target.values():
                        tensor.view(torch.uint8).reshape(-1)[::4096] = 7
                    prepare(files)
                    runs[name].add(load)
                    if repeat == 0:
                        wrong = [
                            n for n, t in target.items() if digest(flat_bytes(t)) != digests[n]
                        ]
                        assert not wrong, f"{name} left {len(wrong)} tensors wrong"
                if repeat == 0:
                    runs = {name: Runs() for name in ways}
                    limits = {name: Runs() for name in limits}
            rows = {name: each.summary(total) for name, each in {**limits, **runs}.items()}
            best = max(
                statistics.median(total / 1e9 / s for s in each.seconds) for each in limits.values()
            )
            title = f"{heat}, {total / 2**30:.1f} GiB, {len(digests)} tensors, {options.repeats} repeats"
            print_rows(title, rows, best)
            result[heat] = rows
        record(
            str(__doc__).splitlines()[0], result,
            "safetensors", "paddlepaddle", "fastsafetensors", "runai-model-streamer",
        )  # fmt: skip
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
