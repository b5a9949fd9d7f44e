"""How fast are weights loaded in place into a GPU, beside safetensors and torch.load?

The limits: one copy of the same bytes from pinned memory, and reading the same files into pinned
memory. A load through staging can be no faster than the slower of the two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
from pathlib import Path

import torch
from measure import Runs, drop_cache, llm_weights, nbytes, print_rows, record, warm_cache

import flyweight as fw

MIB = 1 << 20


def read_into_pinned(path: Path, threads: int = 8) -> None:
    size = path.stat().st_size
    jobs, lock = iter(range(0, size, 8 * MIB)), threading.Lock()
    fd = os.open(path, os.O_RDONLY)

    def work() -> None:
        block = memoryview(torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True).numpy())
        while True:
            with lock:
                start = next(jobs, None)
            if start is None:
                return
            os.preadv(fd, [block[: min(8 * MIB, size - start)]], start)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    os.close(fd)


def main() -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", type=Path)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="flyweight-bench-", dir=options.place))
    try:
        weights = llm_weights(int(options.gib * 2**30))
        total = nbytes(weights)
        target = {name: torch.ones_like(t, device="cuda") for name, t in weights.items()}
        pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(total, dtype=torch.uint8, device="cuda")
        st = place / "model.safetensors"
        save_file(weights, st)
        torch.save(weights, place / "model.pt")
        fw.save(weights, place / "run", version=1)
        part = next(place.glob("run/*/*.safetensors"))

        def safetensors_copy() -> None:
            with safe_open(st, "pt", device="cuda:0") as file:
                for name, tensor in target.items():
                    tensor.copy_(file.get_tensor(name))

        def torch_load() -> None:
            found = torch.load(place / "model.pt", mmap=True, weights_only=True)
            for name, tensor in target.items():
                tensor.copy_(found[name])

        ways = {
            "limit: pinned to device": (lambda: device.copy_(pinned, non_blocking=True), []),
            "limit: read into pinned": (lambda: read_into_pinned(part), [part]),
            "flyweight, checked": (lambda: fw.load(place / "run", into=target), [part]),
            "flyweight, unchecked": (lambda: fw.load(place / "run", into=target, should_verify=False), [part]),
            "safetensors safe_open + copy": (safetensors_copy, [st]),
            "torch.load(mmap) + copy": (torch_load, [place / "model.pt"]),
        }  # fmt: skip
        result: dict[str, object] = {
            "bytes": total, "tensors": len(weights), "repeats": options.repeats,
            "gpu": torch.cuda.get_device_name(),
        }  # fmt: skip
        for heat in ("warm", "cold"):
            runs = {name: Runs() for name in ways}
            for repeat in range(options.repeats + 1):
                if repeat == 1:
                    runs = {name: Runs() for name in ways}
                for name, (load, files) in ways.items():
                    (warm_cache if heat == "warm" else drop_cache)(files)
                    torch.cuda.synchronize()
                    runs[name].add(lambda load=load: (load(), torch.cuda.synchronize()))
                    if repeat == 0 and not name.startswith("limit"):
                        assert all(torch.equal(weights[n], t.cpu()) for n, t in target.items()), (
                            name
                        )
                        for tensor in target.values():
                            tensor.zero_()
            rows = {name: each.summary(total) for name, each in runs.items()}
            best = min(
                float(str(rows[n]["gb_per_second_median"])) for n in rows if n.startswith("limit")
            )
            title = f"{heat}, {total / 2**30:.1f} GiB to {torch.cuda.get_device_name()}"
            print_rows(title, rows, best)
            result[heat] = rows
        record(str(__doc__).splitlines()[0], result, "safetensors")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
