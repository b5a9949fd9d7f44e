"""Tiny models that vLLM serves: random Qwen2 weights in a Hugging Face directory, with a tokenizer."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TINY = {"hidden": 128, "inner": 256, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 512}


def weights(seed, *, hidden, inner, layers, heads, kv_heads, vocab):
    """Return random weights by Hugging Face's names."""
    random = torch.Generator().manual_seed(seed)
    size = hidden // heads

    def made(*shape, scale=0.05, mean=0.0):
        return torch.randn(*shape, generator=random) * scale + mean

    found = {"model.embed_tokens.weight": made(vocab, hidden, scale=1.0)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            found[f"{at}self_attn.{name}_proj.weight"] = made(rows * size, hidden)
            found[f"{at}self_attn.{name}_proj.bias"] = made(rows * size)
        found[f"{at}self_attn.o_proj.weight"] = made(hidden, heads * size)
        found[f"{at}mlp.gate_proj.weight"] = made(inner, hidden)
        found[f"{at}mlp.up_proj.weight"] = made(inner, hidden)
        found[f"{at}mlp.down_proj.weight"] = made(hidden, inner)
        found[f"{at}input_layernorm.weight"] = made(hidden, mean=1.0)
        found[f"{at}post_attention_layernorm.weight"] = made(hidden, mean=1.0)
    found["model.norm.weight"] = made(hidden, mean=1.0)
    found["lm_head.weight"] = made(vocab, hidden)
    return found


def make(path, seed, **size):
    """Write a model to a directory, and return its weights."""
    size = {**TINY, **size}
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size["hidden"],
        "intermediate_size": size["inner"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "vocab_size": size["vocab"],
        "max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    made = weights(seed, **size)
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    letters = {each: n + 2 for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<bos>": 0, "<eos>": 1, **letters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(path)
    return made
