"""Seeded workloads: lists of token ids, the same for every engine that is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how much to generate for each.

    Attributes:
      name: "single", "batch" or "prefix".
      prompts: token ids.
      max_tokens: tokens to generate for each prompt, end-of-sequence ignored.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens in all."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens in all."""
        return len(self.prompts) * self.max_tokens


def _prompt(rng: np.random.Generator, length: int, vocab: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.integers(vocab[0], vocab[1], length))


def make_workload(
    name: str,
    vocab_size: int,
    *,
    num_requests: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Workload:
    """Builds one of the standard workloads.

    Args:
      name: "single" is one stream of 64 prompt tokens; "batch" is 32 requests of 32 to 256;
        "prefix" is 16 requests that share 512 tokens and have 32 of their own.
      vocab_size: ids are drawn from [vocab_size // 100, vocab_size).
      num_requests: overrides the number of requests.
      max_tokens: overrides the tokens to generate: 128, 64 and 32.
      seed: of the prompts.

    Raises:
      ValueError: the name is unknown.
    """
    rng = np.random.default_rng(seed)
    vocab = (vocab_size // 100, vocab_size)
    if name == "single":
        prompts = [_prompt(rng, 64, vocab) for _ in range(num_requests or 1)]
        return Workload(name, tuple(prompts), max_tokens or 128)
    if name == "batch":
        lengths = np.linspace(32, 256, num_requests or 32).astype(int)
        rng.shuffle(lengths)
        return Workload(name, tuple(_prompt(rng, n, vocab) for n in lengths), max_tokens or 64)
    if name == "prefix":
        shared = _prompt(rng, 512, vocab)
        prompts = [shared + _prompt(rng, 32, vocab) for _ in range(num_requests or 16)]
        return Workload(name, tuple(prompts), max_tokens or 32)
    raise ValueError(f"workload {name!r} is not one of single, batch, prefix")
