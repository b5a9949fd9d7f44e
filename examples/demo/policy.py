"""The policy: a small transformer that learns to repeat the digits of a prompt backwards.

It learns from rewards alone: each digit of an answer is right or wrong, and is compared with the
same digit of the other answers to its prompt.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from flyweight.digest import digest

_NUM_HEADS = 4
_START = 10  # the token between prompt and answer


class _Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_attention = torch.nn.LayerNorm(width)
        self.queries_keys_values = torch.nn.Linear(width, 3 * width)
        self.attended = torch.nn.Linear(width, width)
        self.norm_mlp = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x, cache):
        num_rows, length, width = x.shape
        queries, keys, values = (
            each.view(num_rows, length, _NUM_HEADS, width // _NUM_HEADS).transpose(1, 2)
            for each in self.queries_keys_values(self.norm_attention(x)).chunk(3, -1)
        )
        if cache is not None:
            if cache:
                keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
            cache[:] = keys, values
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
        x = x + self.attended(found.transpose(1, 2).reshape(num_rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Policy(torch.nn.Module):
    """A decoder-only transformer: tokens in, logits of the next digit out."""

    def __init__(self, size):
        super().__init__()
        self.num_digits = size.num_digits
        self.tokens = torch.nn.Embedding(_START + 1, size.width)
        self.positions = torch.nn.Embedding(2 * size.num_digits + 1, size.width)
        self.blocks = torch.nn.ModuleList(_Block(size.width) for _ in range(size.num_layers))
        self.norm = torch.nn.LayerNorm(size.width)
        self.head = torch.nn.Linear(size.width, 10)

    def forward(self, tokens, caches=None, start=0):
        """Return the logits of each next digit; the caches hold `start` tokens from before."""
        x = self.tokens(tokens) + self.positions(torch.arange(start, start + tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x))


def generate(policy, prompts, seed):
    """Return one sampled answer to each prompt; both are arrays of digits, one row each."""
    generator = torch.Generator().manual_seed(seed)
    caches = [[] for _ in policy.blocks]
    tokens, start, answers = _with_start(prompts), 0, []
    with torch.no_grad():
        for _ in range(policy.num_digits):
            logits = policy(tokens, caches, start)[:, -1]
            start += tokens.shape[1]
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            answers.append(tokens)
    return torch.cat(answers, 1).numpy().astype(np.uint8)


def improve(policy, optimizer, prompts, answers, num_samples):
    """Take one policy-gradient step, and return the mean reward of the answers.

    The `num_samples` answers to one prompt are neighbours.
    """
    rewards = (answers == prompts[:, ::-1]).astype(np.float32)
    grouped = rewards.reshape(-1, num_samples, rewards.shape[1])
    advantages = (grouped - grouped.mean(1, keepdims=True)) / (rewards.std() + 1e-3)
    targets = torch.from_numpy(answers.astype(np.int64))
    logits = policy(torch.cat([_with_start(prompts), targets[:, :-1]], 1))[:, prompts.shape[1] :]
    log_probs = logits.log_softmax(-1).gather(2, targets.unsqueeze(-1)).squeeze(-1)
    loss = -(torch.from_numpy(advantages).reshape(log_probs.shape) * log_probs).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def digests(policy):
    """Return a digest of the live memory of each weight: equal only if every bit is."""
    return {
        name: digest(each.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for name, each in policy.state_dict().items()
    }


def _with_start(prompts):
    tokens = torch.from_numpy(prompts.astype(np.int64))
    return torch.cat([tokens, torch.full((len(tokens), 1), _START)], 1)
