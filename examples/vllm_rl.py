"""A small loop of reinforcement learning: vLLM generates, torch trains the same model.

    make test-vllm                                  # once: makes the environment .venv-vllm
    .venv-vllm/bin/python examples/vllm_rl.py

Two processes. A vLLM server writes texts with the policy, this process rewards even tokens and
improves the policy, and Flyweight moves its weights into the server after each step. Then the
server's greedy tokens are compared with those of another vLLM, freshly loaded from the snapshot of
the same step. On a machine with GPUs leave out the variables of `ENVIRONMENT` and `--dtype`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import flyweight as fw
from flyweight.engines.vllm import VllmEngine

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 24
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that control updates
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--steps", type=int, default=6)
    words.add_argument("--samples", type=int, default=64, help="texts for each step")
    words.add_argument("--checks", type=int, default=2, help="snapshots to load afresh")
    options = words.parse_args()
    with tempfile.TemporaryDirectory(prefix="fw") as directory:
        is_good = learn(options, Path(directory))
    sys.exit(0 if is_good else 1)


def learn(options: argparse.Namespace, directory: Path) -> bool:
    """Train the policy, and return whether it got better and vLLM always had its weights."""
    policy = made_policy(directory / "policy")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    rewards, greedy = [], {}
    with Server(directory / "policy", directory / "log") as server:
        publisher = fw.Publisher(policy, f"unix:{directory}/run", keep="in_place")
        engine = VllmEngine(server.address, publisher.address, in_flight="keep")
        for step in range(1, options.steps + 1):
            texts = server.generate(options.samples, temperature=1.0, seed=step)
            rewards.append(improve(policy, optimizer, texts))
            publisher.publish(step)  # engines may read it, until `withdraw`
            report = engine.update(step)
            publisher.withdraw()
            greedy[step] = server.generate(1, temperature=0.0)[0]
            fw.save(policy, directory / "snapshots", version=step)
            print(
                f"step {step}  reward {rewards[-1]:.2f}  {report.nbytes / 1e6:.1f} MB into vLLM, "
                f"all checked, no requests for "
                f"{1000 * engine.operations.pause_seconds:.0f} ms",
                flush=True,
            )
        publisher.close()
    results = {"the reward rose": rewards[-1] > rewards[0]}
    for step in sorted(greedy)[-options.checks :] if options.checks else ():
        place = directory / f"step-{step}"
        fw.convert(fw.open(directory / "snapshots", version=step), place, to="hf")
        policy.config.save_pretrained(place)
        is_same = freshly_loaded(place) == greedy[step]
        results[f"vLLM, freshly loaded from snapshot {step}, answers the same"] = is_same
    for claim, is_so in results.items():
        print(f"{'yes' if is_so else 'NO '}  {claim}", flush=True)
    return all(results.values())


def made_policy(place: Path) -> Qwen2ForCausalLM:
    """Return a tiny policy; a vLLM server can start from its directory."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    policy = Qwen2ForCausalLM(config).float()
    policy.save_pretrained(place)
    letters = {each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(place)
    return policy


def improve(policy: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, texts: list) -> float:
    """Take one step of policy gradient on texts; return their mean reward: even tokens."""
    tokens = torch.tensor(texts)
    reward = (tokens % 2 == 0).float().mean(dim=1)
    whole = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), tokens], dim=1)
    logits = policy(whole).logits[:, len(PROMPT) - 1 : -1]
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    loss = -(advantage[:, None] * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(reward.mean())


class Server:
    """A vLLM server in a process of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address, self._model, self._log = f"http://127.0.0.1:{port}", str(model), log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self._model),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", "67108864"),
            *("--weight-transfer-config", json.dumps({"backend": "flyweight"})),
        ]
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 240
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit(f"vLLM did not start:\n{self._log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                return self
            except OSError:
                time.sleep(0.2)

    def __exit__(self, *raised: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait(20)

    def generate(self, count: int, *, temperature: float, seed: int = 0) -> list[list[int]]:
        """Return the tokens of some texts."""
        body = {
            "model": self._model, "prompt": PROMPT, "n": count, "max_tokens": NUM_TOKENS,
            "temperature": temperature, "ignore_eos": True, "return_token_ids": True,
            "seed": seed,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [each["token_ids"] for each in json.load(answer)["choices"]]


def freshly_loaded(model: Path) -> list[int]:
    """Return the greedy tokens of another vLLM, which loads the model from its files."""
    script = f"""
from vllm import LLM, SamplingParams
llm = LLM({str(model)!r}, dtype="float32", enforce_eager=True, max_model_len=512,
          kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True)
how = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True, detokenize=False)
found = llm.generate([{{"prompt_token_ids": {PROMPT}}}], how, use_tqdm=False)
print("TOKENS", list(found[0].outputs[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **ENVIRONMENT}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"vLLM did not load {model}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.rpartition("TOKENS")[2])


if __name__ == "__main__":
    main()
