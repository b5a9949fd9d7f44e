"""The policy: a small transformer over digits, and its task, to say a prompt backwards.

An answer is rewarded digit by digit. Each digit is compared with the same digit of the other
answers to its prompt, so nothing but samples and their rewards is ever learned from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from flyweight.demo.setting import Setting
from flyweight.digest import digest

Digits = NDArray[np.uint8]

_NUM_HEADS = 4
_START = 10
"""The token between prompt and answer."""


class _Block(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = torch.nn.LayerNorm(width)
        self.queries_keys_values = torch.nn.Linear(width, 3 * width)
        self.attended = torch.nn.Linear(width, width)
        self.before_mlp = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: Any, cache: list[Any] | None) -> Any:
        num_rows, length, width = x.shape
        queries, keys, values = (
            each.view(num_rows, length, _NUM_HEADS, width // _NUM_HEADS).transpose(1, 2)
            for each in self.queries_keys_values(self.before_attention(x)).chunk(3, -1)
        )
        if cache is not None:
            if cache:
                keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
            cache[:] = keys, values
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
        x = x + self.attended(found.transpose(1, 2).reshape(num_rows, length, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Policy(torch.nn.Module):  # type: ignore[misc]
    """A decoder-only transformer: digits in, how likely each digit comes next out."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.num_digits = setting.num_digits
        self.tokens = torch.nn.Embedding(_START + 1, setting.width)
        self.places = torch.nn.Embedding(2 * setting.num_digits + 1, setting.width)
        self.blocks = torch.nn.ModuleList(_Block(setting.width) for _ in range(setting.num_layers))
        self.norm = torch.nn.LayerNorm(setting.width)
        self.head = torch.nn.Linear(setting.width, 10)

    def forward(self, tokens: Any, caches: list[list[Any]] | None = None, start: int = 0) -> Any:
        """Return the logits of the digit after each token; with caches, tokens from `start` on."""
        x = self.tokens(tokens) + self.places(torch.arange(start, start + tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x))


def empty_policy(setting: Setting) -> Policy:
    """Return a policy that knows nothing: every weight is 0."""
    policy = Policy(setting)
    with torch.no_grad():
        for each in policy.parameters():
            each.zero_()
    return policy


def generate(policy: Policy, prompts: Digits, seed: int) -> Digits:
    """Return one sampled answer to each prompt."""
    generator = torch.Generator().manual_seed(seed)
    caches: list[list[Any]] = [[] for _ in policy.blocks]
    tokens, start, answers = _started(prompts), 0, []
    with torch.no_grad():
        for _ in range(policy.num_digits):
            logits = policy(tokens, caches, start)[:, -1]
            start += tokens.shape[1]
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            answers.append(tokens)
    found: Digits = torch.cat(answers, 1).numpy().astype(np.uint8)
    return found


def rewards(prompts: Digits, answers: Digits) -> NDArray[np.float32]:
    """Return 1 for each digit that is right, and 0 for each that is not."""
    right: NDArray[np.float32] = (answers == prompts[:, ::-1]).astype(np.float32)
    return right


def improve(policy: Policy, optimizer: Any, prompts: Digits, answers: Digits, group: int) -> float:
    """Take one policy-gradient step, and return the mean reward of the answers.

    Answers to one prompt stand together, `group` of them.
    """
    earned = rewards(prompts, answers)
    grouped = earned.reshape(-1, group, earned.shape[1])
    advantages = torch.from_numpy(
        (grouped - grouped.mean(1, keepdims=True)) / (earned.std() + 1e-3)
    )
    said = torch.from_numpy(answers.astype(np.int64))
    logits = policy(torch.cat([_started(prompts), said[:, :-1]], 1))[:, prompts.shape[1] :]
    chances = logits.log_softmax(-1).gather(2, said.unsqueeze(-1)).squeeze(-1)
    loss = -(advantages.reshape(chances.shape) * chances).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(earned.mean())


def digests(policy: Policy) -> dict[str, int]:
    """Return a number for each weight, from its live memory: equal only if every bit is."""
    return {
        name: digest(each.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for name, each in policy.state_dict().items()
    }


def _started(prompts: Digits) -> Any:
    tokens = torch.from_numpy(prompts.astype(np.int64))
    return torch.cat([tokens, torch.full((len(tokens), 1), _START)], 1)
