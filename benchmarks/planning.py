"""How long does a plan take for a trillion parameters, and how does that grow with the ranks?

The shapes are those of a mixture of experts with 61 layers, 384 experts and latent attention. The
trainer is cut into pipeline stages, experts dealt out and all else sharded by rows inside a stage;
the engine deals experts out over all its ranks and cuts attention by heads within eight of them.
One core does it; the whole plan is made, counted by pairs of ranks, and walked copy by copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from measure import record

from flyweight.plans.reshard import reshard
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.model_layout import ModelLayout

HIDDEN, DENSE, EXPERT, HEADS, LAYERS, EXPERTS = 7168, 18432, 2048, 64, 61, 384
MESHES = {8: ({"pp": 1, "dp": 8}, {"dp": 1, "tp": 4}), 64: ({"pp": 2, "dp": 32}, {"dp": 4, "tp": 8}),
          256: ({"pp": 8, "dp": 32}, {"dp": 16, "tp": 8})}  # fmt: skip


def model() -> dict[str, TensorSpec]:
    tensors: dict[str, TensorSpec] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = TensorSpec(DTYPES["bf16"], shape)

    add("model.embed_tokens.weight", 163840, HIDDEN)
    for layer in range(LAYERS):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"model.layers.{layer}.{norm}.weight", HIDDEN)
        add(f"{at}.q_a_proj.weight", 1536, HIDDEN)
        add(f"{at}.q_a_layernorm.weight", 1536)
        add(f"{at}.q_b_proj.weight", HEADS * 192, 1536)
        add(f"{at}.kv_a_proj_with_mqa.weight", 576, HIDDEN)
        add(f"{at}.kv_a_layernorm.weight", 512)
        add(f"{at}.kv_b_proj.weight", HEADS * 256, 512)
        add(f"{at}.o_proj.weight", HIDDEN, HEADS * 128)
        blocks = {mlp: DENSE} if layer == 0 else {f"{mlp}.shared_experts": EXPERT}
        if layer:
            add(f"{mlp}.gate.weight", EXPERTS, HIDDEN)
            add(f"{mlp}.gate.e_score_correction_bias", EXPERTS)
            blocks |= {f"{mlp}.experts.{expert}": EXPERT for expert in range(EXPERTS)}
        for block, width in blocks.items():
            add(f"{block}.gate_proj.weight", width, HIDDEN)
            add(f"{block}.up_proj.weight", width, HIDDEN)
            add(f"{block}.down_proj.weight", HIDDEN, width)
    add("model.norm.weight", HIDDEN)
    add("lm_head.weight", 163840, HIDDEN)
    return tensors


def trainer(mesh: dict[str, int]) -> ModelLayout:
    rules = [
        {"names": "model.layers.*.mlp.experts.*.**", "spread": {"0": "pp", "1": "dp"}},
        {"names": "model.layers.*.**", "spread": {"0": "pp"}, "cut": {"0": "dp"}},
        {"names": "**", "cut": {"0": ["pp", "dp"]}},
    ]
    return layout(mesh, rules)


def engine(mesh: dict[str, int]) -> ModelLayout:
    experts, attention = "model.layers.*.mlp.experts.*", "model.layers.*.self_attn"
    rules = [
        {"names": [f"{experts}.gate_proj.weight", f"{experts}.up_proj.weight"], "local": "model.layers.{0}.mlp.experts.w13",
         "stack": 1, "spread": {"1": ["dp", "tp"]}},
        {"names": f"{experts}.down_proj.weight", "local": "model.layers.{0}.mlp.experts.w2", "stack": 1, "spread": {"1": ["dp", "tp"]}},
        *({"names": f"{attention}.{name}.weight", "cut": {"0": "tp"}} for name in ("q_b_proj", "kv_b_proj")),
        {"names": f"{attention}.o_proj.weight", "cut": {"1": "tp"}},
        {"names": "model.layers.*.mlp.**.down_proj.weight", "cut": {"1": "tp"}},
        *({"names": f"{name}.weight", "cut": {"0": "tp"}} for name in ("model.embed_tokens", "lm_head")),
        {"names": "**"},
    ]  # fmt: skip
    return layout(mesh, rules)


def layout(mesh: dict[str, int], rules: list[dict[str, object]]) -> ModelLayout:
    return ModelLayout.from_json(json.dumps({"mesh": mesh, "rules": rules}))


def resident_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


def measure(num_ranks: int) -> dict[str, float]:
    """Plan once, in this process, and tell how long each step took and how much memory it left."""
    tensors = model()
    source, sink = map(lambda make, mesh: make(mesh), (trainer, engine), MESHES[num_ranks])
    base, clock = resident_bytes(), [time.perf_counter()]
    held, wanted = source.shards(tensors), sink.shards(tensors)
    clock.append(time.perf_counter())
    plan = reshard(held, wanted)
    clock.append(time.perf_counter())
    pairs = plan.pairs(dict.fromkeys(tensors, 16))
    clock.append(time.perf_counter())
    memory = resident_bytes() - base
    walked = sum(1 for _ in plan.copies())
    clock.append(time.perf_counter())
    mine = sink.shards(tensors, rank=1)
    own = reshard(source.shards(tensors, names=mine), mine)
    num_own = sum(1 for _ in own.copies())
    clock.append(time.perf_counter())
    given: dict[int, int] = {}
    for (rank, _), nbytes in pairs.items():
        given[rank] = given.get(rank, 0) + nbytes
    assert walked == plan.num_copies
    layouts, planned, counted, walked_seconds, own_seconds = (b - a for a, b in pairwise(clock))
    return {
        "source_ranks": source.num_ranks, "sink_ranks": sink.num_ranks, "tensors": len(tensors),
        "parameters": sum(spec.nbytes // 2 for spec in tensors.values()), "copies": plan.num_copies,
        "bytes_moved": sum(pairs.values()), "most_a_source_gives_over_the_mean": max(given.values()) * len(given) / sum(given.values()),
        "layout_seconds": layouts, "plan_seconds": planned, "pair_seconds": counted,
        "whole_seconds": layouts + planned + counted, "walk_seconds": walked_seconds,
        "own_part_seconds": own_seconds, "own_part_copies": num_own, "memory_mib": memory / 2**20,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        print(json.dumps(measure(options.ranks)))
        return
    rows = {}
    for num_ranks in MESHES:
        runs = []
        for _ in range(
            options.repeats
        ):  # a process of its own each, so that memory counts from zero
            words = [sys.executable, sys.argv[0], "--ranks", str(num_ranks)]
            done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
            runs.append(json.loads(done.stdout))
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row["whole_seconds_spread"] = [
            min(r["whole_seconds"] for r in runs),
            max(r["whole_seconds"] for r in runs),
        ]
        rows[f"{row['source_ranks']} to {row['sink_ranks']}"] = row
    print(
        f"{'ranks':>12s} {'copies':>9s} {'plan s':>7s} {'us/copy':>8s} {'walk s':>7s} {'own s':>6s} {'MiB':>6s}"
    )
    for name, row in rows.items():
        per_copy = 1e6 * row["whole_seconds"] / row["copies"]
        print(
            f"{name:>12s} {row['copies']:9d} {row['whole_seconds']:7.2f} {per_copy:8.2f} {row['walk_seconds']:7.2f} "
            f"{row['own_part_seconds']:6.2f} {row['memory_mib']:6.0f}"
        )
    record(str(__doc__).splitlines()[0], {"repeats": options.repeats, "plans": rows})


if __name__ == "__main__":
    main()
