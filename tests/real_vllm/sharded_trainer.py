"""One of two ranks of a trainer whose model is sharded by FSDP2; started by torchrun.

It publishes the second of two models, then the first, to a server, and prints its tokens.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM
from vllm_processes import Client

import flyweight as fw
from flyweight.engines.vllm import VllmEngine, publish_to

port, address, token_file, tls, *paths = sys.argv[1:]
tls = json.loads(tls)
server = Client(int(port))
dist.init_process_group("gloo")
whole = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in paths]
model = AutoModelForCausalLM.from_pretrained(paths[0])
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
token = Path(token_file).read_text() if token_file else None
encrypted = {"tls": fw.Tls(**tls)} if tls else {}
with fw.Publisher(model, address, token=token, **encrypted) as publisher:
    is_first = dist.get_rank() == 0
    engines = (
        [VllmEngine(server.address, publisher.address, token_file=token_file or None, tls=tls)]
        if is_first
        else []
    )
    for version, tensors in enumerate((whole[1], whole[0]), 1):
        with torch.no_grad():
            for name, shard in model.state_dict().items():
                shard.copy_(distribute_tensor(tensors[name], shard.device_mesh, shard.placements))
        results = publish_to(engines, publisher, version, timeout_seconds=60)
        for each in results:
            found = {"error": str(each.error), "tokens": server.tokens()}
            print("FOUND" + json.dumps(found), flush=True)
        dist.barrier()
dist.destroy_process_group()
