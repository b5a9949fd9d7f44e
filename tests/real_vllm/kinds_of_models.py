"""Updates a vLLM of one kind of model, from A to B and back, and prints what it answers.

Called as a program, with the kind's name: each needs a process of its own.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

from vllm_processes import ENVIRONMENT, OPTIONS, PROMPT

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS = {
    "tied": ("Qwen2Config", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "experts": (
        "Qwen3MoeConfig",
        {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, **EXPERTS},
    ),
    "latent attention": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            **EXPERTS,
            "kv_lora_rank": 512,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 128,
            "n_group": 1,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_key_value_heads": 4,
        },
    ),
    "written by itself": (
        "GptOssConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


def make(kind, seed, path):
    """Write a random model of this kind to a directory; return the model."""
    import torch
    import transformers

    name, more = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 0.15) if each.dim() > 1 else each.add_(torch.randn_like(each) * 0.1)
    model.save_pretrained(path)
    return model


def unfused(tensors):
    """Return the tensors of a model with a view for each expert, as checkpoints name them."""
    tensors = dict(tensors)
    for name in [each for each in tensors if each.endswith("experts.gate_up_proj")]:
        at = name.removesuffix("gate_up_proj")
        pairs = zip(tensors.pop(name), tensors.pop(f"{at}down_proj"), strict=True)
        for number, (gate_up, down) in enumerate(pairs):
            gate, up = gate_up.chunk(2)
            for each, view in (("gate", gate), ("up", up), ("down", down)):
                tensors[f"{at}{number}.{each}_proj.weight"] = view
    return tensors


def run(kind, **how):
    """Return the tokens of A and B as vLLM loads them, and those after updates to B, A and B.

    Updates come from the tensors of a checkpoint and then from those of a model, whose names may
    differ.
    """
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)

    def tokens():
        prompts = [{"prompt_token_ids": PROMPT}]
        return list(llm.generate(prompts, sampling, use_tqdm=False)[0].outputs[0].token_ids)

    with tempfile.TemporaryDirectory() as place:
        loaded, of_files, of_models = {}, {}, {}
        for name, seed in (("B", 2), ("A", 1)):
            path, llm = Path(place, name), None
            gc.collect()  # vLLM allows one model at a time
            of_models[name] = make(kind, seed, path).state_dict()
            if kind == "latent attention":  # vLLM's loader of it knows no fused experts
                of_models[name] = unfused(of_models[name])
            of_files[name] = load_file(path / "model.safetensors")
            llm = LLM(
                model=str(path),
                skip_tokenizer_init=True,
                weight_transfer_config={"backend": "flyweight"},
                **OPTIONS,
            )
            loaded[name] = tokens()
        files = updated(llm, f"unix:{place}/files", of_files, tokens, how)
        models = updated(llm, f"unix:{place}/models", of_models, tokens, how)
        return {"loaded": loaded, "files": files, "models": models}


def updated(llm, address, tensors, tokens, how):
    """Return the tokens after updates to B, A and B, or the error that ended them."""
    import flyweight as fw
    from flyweight.engines.vllm import VllmEngine
    from flyweight.errors import FlyweightError

    live = {name: tensor.clone() for name, tensor in tensors["A"].items()}
    found = []
    with fw.Publisher(live, address) as publisher:
        engine = VllmEngine(llm, address, **how)
        for version, name in enumerate("BAB", 1):
            for each, tensor in live.items():
                tensor.copy_(tensors[name][each])
            publisher.withdraw()
            publisher.publish(version, stays=True)
            try:
                engine.update(version)
            except FlyweightError as error:
                return f"{type(error).__name__}: {error}; {engine.state}"
            found.append(tokens())
    return found


if __name__ == "__main__":
    kind, how = json.loads(sys.argv[1])
    print("FOUND" + json.dumps(run(kind, **how)), flush=True)
    os._exit(0)  # vLLM has nothing to end that the kernel does not
