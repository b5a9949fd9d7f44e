"""For how long does a save stop training, in the background and not?

The model is on the GPU if there is one. A save in the background returns after one copy to staging
memory; the limit is that copy alone, into memory that was used before: on the CPU by one `copy_` for each
tensor, from a GPU into one pinned block.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
from measure import Runs, llm_weights, nbytes, print_rows, record

import flyweight as fw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", type=Path, help="where to write the files; a disk, not tmpfs")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: t.to(device) for name, t in llm_weights(int(options.gib * 2**30)).items()}
    total = nbytes(weights)
    copies = {
        name: torch.empty_like(t, device="cpu", pin_memory=device == "cuda").fill_(0)
        for name, t in weights.items()
    }
    root = Path(tempfile.mkdtemp(prefix="flyweight-bench-", dir=options.place))
    runs = {"limit: one copy": Runs(), "background": Runs(), "not in the background": Runs()}

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    whole_seconds = []
    for repeat in range(options.repeats + 1):  # the first round makes the staging and is not kept
        if repeat == 1:
            runs = {name: Runs() for name in runs}
            whole_seconds.clear()
        runs["limit: one copy"].add(copy)
        handles: list[fw.verbs.background.BackgroundSave] = []
        started = time.perf_counter()
        runs["background"].add(lambda h=handles: h.append(fw.save(weights, root, background=True)))
        handles[0].wait(600)
        whole_seconds.append(time.perf_counter() - started)
        runs["not in the background"].add(lambda: fw.save(weights, root))
        fw.prune(root, keep=1)
    rows = {name: each.summary(total) for name, each in runs.items()}
    print_rows(f"training stops, {total / 2**30:.1f} GiB on the {device}", rows)
    shutil.rmtree(root)
    result: dict[str, object] = {"bytes": total, "device": device, "repeats": options.repeats}
    if device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    result["seconds_until_durable"] = [round(each, 3) for each in whole_seconds]
    record(str(__doc__).splitlines()[0], {**result, "save": rows})


if __name__ == "__main__":
    main()
