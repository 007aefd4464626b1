"""Group E: the real engine on the device under test.

The engine is imported when a case runs: loading the kit's groups must not need it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leadframe.conformance.case import Case
from leadframe.conformance.kit import Kit
from leadframe.conformance.tiny_checkpoint import VOCAB, write_checkpoint
from leadframe.platform import Backend
from leadframe.platform.reference.backend import ReferenceBackend

_COUNT = 10
_LENGTHS = (37, 5, 20, 16, 1)
_LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 96,
    "num_blocks_override": 40,
}
Tokens = list[list[int]]


def _prompts(kit: Kit) -> Tokens:
    rng = np.random.default_rng([kit.seed, 5])
    return [[int(t) for t in rng.integers(0, VOCAB - 1, n)] for n in _LENGTHS]


def _head_dim(kit: Kit) -> int:
    dims = kit.backend.caps.head_dims
    return 64 if dims is None else min(dims, key=lambda have: abs(have - 64))


def generate(kit: Kit, backend: Backend, sampled: bool = False, **settings: Any) -> Tokens:
    """Runs every prompt through an engine; returns the tokens of each.

    Args:
      kit: gives the seed and the head dim.
      backend: runs the model; the engine closes it.
      sampled: half of the requests draw instead of taking the argmax.
      **settings: as `leadframe.llm.engine_config` takes them.
    """
    from leadframe.engine import Engine
    from leadframe.llm import engine_config
    from leadframe.sampling_params import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), _head_dim(kit), kit.seed)
        engine = Engine.from_config(
            engine_config(str(path), **(_LIMITS | settings)), backend=backend
        )
    tokens: Tokens = []
    for i, prompt in enumerate(_prompts(kit)):
        is_drawn = sampled and i % 2 == 0
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


def _same(kit: Kit, what: str, got: Tokens, want: Tokens) -> None:
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        kit.check(
            one == other,
            f"{what}: request {i} generated {one}, expected {other}",
        )


def _against_reference(kit: Kit) -> None:
    """The same tokens as the NumPy backend's, when both compute in float32."""
    want = generate(kit, ReferenceBackend(), sampled=True, dtype="float32", block_size=16)
    _same(kit, "against the reference", generate(kit, kit.open(), True, dtype="float32"), want)


def _variants(kit: Kit) -> dict[str, dict[str, Any]]:
    size = kit.backend.caps.block_sizes[0]
    fewest = 1 + -(-96 // size)
    return {
        "chunks": {"max_num_batched_tokens": 8},
        "one-at-a-time": {"max_num_seqs": 1},
        "few-blocks": {"num_blocks_override": fewest + 1, "max_model_len": 96},
        "no-prefix-cache": {"enable_prefix_caching": False},
        "eager": {"enforce_eager": True},
    }


def _schedule(name: str) -> Callable[[Kit], None]:
    def run(kit: Kit) -> None:
        dtype = _dtype(kit)
        want = generate(kit, kit.open(), True, dtype=dtype)
        got = generate(kit, kit.open(), True, dtype=dtype, **_variants(kit)[name])
        _same(kit, name, got, want)

    return run


def _dtype(kit: Kit) -> str:
    """float32 where there is one: in 8 bits of mantissa, near-ties are common."""
    caps = kit.backend.caps
    both = [d for d in caps.compute_dtypes if d in caps.kv_dtypes]
    return "float32" if "float32" in both else both[0]


def _needs_float32(kit: Kit) -> str | None:
    is_float32 = _dtype(kit) == "float32"
    return None if is_float32 else "dtype float32 is not claimed"


_NAMES: Sequence[str] = ("chunks", "one-at-a-time", "few-blocks", "no-prefix-cache", "eager")

CASES = [
    Case("E.engine[against-reference]", _against_reference, "full", _needs_float32),
    *(Case(f"E.engine[{name}]", _schedule(name), "full", _needs_float32) for name in _NAMES),
]
