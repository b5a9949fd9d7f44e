"""Models that differ in how vLLM holds their weights, and an `LLM` of each that is updated.

Called as a program, with the kind's name and what to find out: each needs a process of its own.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

from vllm_processes import ENVIRONMENT, LONGEST, OPTIONS, PROMPT

SAMPLING = {"temperature": 0, "ignore_eos": True, "detokenize": False}
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
    "tied experts": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 4,
            **EXPERTS,
            "tie_word_embeddings": True,
            "max_position_embeddings": LONGEST,
        },
    ),
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
    config = getattr(transformers, name)(**{**SIZES, **more})
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


class Kind:
    """Random models A and B of a kind, and an `LLM` in this process that has loaded A, after B.

    Set `ENVIRONMENT` before vLLM is imported.
    """

    def __init__(self, kind, place, names="BA"):
        from safetensors.torch import load_file

        self.place = Path(place)
        self.loaded, self.of_files, self.of_models = {}, {}, {}
        for name in names:
            path, self.llm = self.place / name, None
            gc.collect()  # vLLM allows one model at a time
            self.of_models[name] = make(kind, ord(name), path).state_dict()
            if kind == "latent attention":  # vLLM's loader of it knows no fused experts
                self.of_models[name] = unfused(self.of_models[name])
            self.of_files[name] = load_file(path / "model.safetensors")
            self.llm = loaded(path, kind)
            self.loaded[name] = tokens_of(self.llm)

    def updated(self, tensors, names, **how):
        """Return the tokens after an update to each of these models."""
        import flyweight as fw
        from flyweight.engines.vllm import VllmEngine

        live = {name: tensor.clone() for name, tensor in tensors["A"].items()}
        found = []
        with (
            tempfile.TemporaryDirectory() as place,
            fw.Publisher(live, f"unix:{place}/policy", keep="in_place") as publisher,
        ):
            self.engine = VllmEngine(self.llm, publisher.address, **how)
            for version, name in enumerate(names, 1):
                for each, tensor in live.items():
                    tensor.copy_(tensors[name][each])
                publisher.withdraw()
                publisher.publish(version)
                self.engine.update(version)
                found.append(tokens_of(self.llm))
        return found


def loaded(path, kind):
    """Return an `LLM` in this process that has loaded a model from its files."""
    from vllm import LLM

    # On CPUs with AMX, vLLM takes kernels for latent attention that refuse float32.
    latent = {"attention_backend": "CPU_MLA"} if kind == "latent attention" else {}
    return LLM(
        model=str(path),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        weight_transfer_config={"backend": "flyweight"},
        **latent,
        **OPTIONS,
    )


def tokens_of(llm):
    """Return the greedy tokens that follow the prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(**SAMPLING, max_tokens=32)
    prompts = [{"prompt_token_ids": PROMPT}]
    return list(llm.generate(prompts, sampling, use_tqdm=False)[0].outputs[0].token_ids)


def run(kind, check):
    """Do what a test of one kind asks for, and return what it found."""
    from flyweight.errors import FlyweightError

    with tempfile.TemporaryDirectory() as place:
        if check == "updates":
            found = Kind(kind, place)
            # The names of a model's tensors may differ from those in its checkpoint.
            files, models = (
                found.updated(each, "BAB") for each in (found.of_files, found.of_models)
            )
            return {"loaded": found.loaded, "files": files, "models": models}
        found, errors = Kind(kind, place, "A"), []
        for should_check_fit in (True, False):
            try:
                found.updated(found.of_files, "A", should_check_fit=should_check_fit)
            except FlyweightError as error:
                errors.append([type(error).__name__, str(error), str(found.engine.state)])
        return errors


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    print("FOUND" + json.dumps(run(*sys.argv[1:])), flush=True)
    os._exit(0)  # vLLM has nothing to end that the kernel does not
