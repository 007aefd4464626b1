"""Group E: the real engine on the device under test.

The engine is imported when a case runs: loading the kit's groups must not need it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from leadframe.conformance.case import Case
from leadframe.conformance.kit import Kit
from leadframe.conformance.tiny_checkpoint import VOCAB, write_checkpoint
from leadframe.platform import Backend
from leadframe.platform.reference.backend import ReferenceBackend

_COUNT = 10
_LENGTHS = (37, 5, 20, 16, 1)
if TYPE_CHECKING:
    from leadframe.config import EngineConfig

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a case varies; the defaults are the run that it is compared with."""

    dtype: str = "float32"
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 48
    num_blocks: int = 40
    block_size: int | None = None
    prefix_caching: bool = True
    eager: bool = False
    device: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1

    def config(self, model: str) -> EngineConfig:
        """Builds the engine's configuration."""
        from leadframe.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig

        return EngineConfig(
            model=model,
            dtype=self.dtype,
            max_model_len=96,
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                enable_prefix_caching=self.prefix_caching,
                num_blocks_override=self.num_blocks,
            ),
            device=DeviceConfig(
                device=self.device,
                options=self.options,
                enforce_eager=self.eager,
                tensor_parallel_size=self.ranks,
            ),
        )


def _prompts(seed: int) -> Tokens:
    rng = np.random.default_rng([seed, 5])
    return [[int(t) for t in rng.integers(0, VOCAB - 1, n)] for n in _LENGTHS]


def head_dim(kit: Kit) -> int:
    """The head dim of the model: the nearest to 64 that the backend takes."""
    dims = kit.backend.caps.head_dims
    return 64 if dims is None else min(dims, key=lambda have: abs(have - 64))


def generate(kit: Kit, backend: Backend, settings: Settings) -> Tokens:
    """Runs every prompt through an engine; returns the tokens of each.

    Args:
      kit: gives the seed and the head dim.
      backend: runs the model; the engine closes it.
      settings: how the engine is set up.
    """
    return run_engine(settings, head_dim(kit), kit.seed, backend)


def run_engine(settings: Settings, dim: int, seed: int, backend: Backend | None = None) -> Tokens:
    """Runs every prompt; half of the requests draw, the others take the argmax.

    Args:
      settings: how the engine is set up.
      dim: the model's head dim.
      seed: of the weights and the prompts.
      backend: runs the model; the engine closes it. None creates the one of the settings' device.
    """
    from leadframe.engine import Engine
    from leadframe.sampling_params import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), dim, seed)
        engine = Engine.from_config(settings.config(str(path)), backend=backend)
    tokens: Tokens = []
    for i, prompt in enumerate(_prompts(seed)):
        is_drawn = i % 2 == 0
        params = SamplingParams(
            temperature=0.8 if is_drawn else 0.0,
            top_p=0.9 if is_drawn else 1.0,
            seed=i,
            max_tokens=_COUNT,
            ignore_eos=True,
        )
        engine.add_request(str(i), prompt, params)
        tokens.append([])
    while engine.has_work:
        for output in engine.step():
            tokens[int(output.request_id)].extend(output.token_ids)
        engine.check()
    engine.close()
    return tokens


def same_tokens(kit: Kit, what: str, got: Tokens, want: Tokens) -> None:
    """Fails unless every request generated the same tokens."""
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        kit.check(
            one == other,
            f"{what}: request {i} generated {one}, expected {other}",
        )


def _against_reference(kit: Kit) -> None:
    """The same tokens as the NumPy backend's, when both compute in float32."""
    want = generate(kit, ReferenceBackend(), Settings())
    same_tokens(kit, "against the reference", generate(kit, kit.open(), Settings()), want)


def _variants(kit: Kit) -> dict[str, Settings]:
    fewest = 1 + -(-96 // kit.backend.caps.block_sizes[0])
    return {
        "chunks": Settings(max_num_batched_tokens=8),
        "one-at-a-time": Settings(max_num_seqs=1),
        "few-blocks": Settings(num_blocks=fewest + 1),
        "no-prefix-cache": Settings(prefix_caching=False),
        "eager": Settings(eager=True),
    }


def _schedule(name: str) -> Callable[[Kit], None]:
    def run(kit: Kit) -> None:
        want = generate(kit, kit.open(), Settings())
        got = generate(kit, kit.open(), _variants(kit)[name])
        same_tokens(kit, name, got, want)

    return run


def needs_float32(kit: Kit) -> str | None:
    """In 8 bits of mantissa near-ties are common, and equal tokens no fair demand."""
    caps = kit.backend.caps
    has_it = "float32" in caps.compute_dtypes and "float32" in caps.kv_dtypes
    return None if has_it else "dtype float32 is not claimed"


_NAMES: Sequence[str] = ("chunks", "one-at-a-time", "few-blocks", "no-prefix-cache", "eager")

CASES = [
    Case("E.engine[against-reference]", _against_reference, "full", needs_float32),
    *(Case(f"E.engine[{name}]", _schedule(name), "full", needs_float32) for name in _NAMES),
]
