"""One random attention problem per seed."""

from __future__ import annotations

import numpy as np

from leadframe.conformance.attention_cases import Shape
from leadframe.conformance.batches import Padding
from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_attention import fit, run_shape
from leadframe.conformance.groups.b_exact import run_exact
from leadframe.conformance.kit import Kit

_GROUPS: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (8, 1), (9, 3))


_HEAD_DIMS = (16, 32, 64, 80, 128)


def random_shape(kit: Kit, rng: np.random.Generator) -> Shape:
    """Draws sizes within what the backend claims."""
    caps = kit.backend.caps
    dims = np.array(caps.head_dims or _HEAD_DIMS)
    heads, kv_heads = _GROUPS[rng.integers(0, len(_GROUPS))]
    num_decodes = int(rng.integers(0, 6))
    num_chunks = int(rng.integers(0 if num_decodes else 1, 4))
    chunks = []
    for _ in range(num_chunks):
        tokens = int(rng.integers(1, 40))
        chunks.append((tokens, tokens + int(rng.integers(0, 60)) * int(rng.integers(0, 2))))
    windows: list[int | None] = [None]
    if "window" in caps.attention_features:
        windows.append(int(rng.integers(1, 50)))
    return Shape(
        heads=heads,
        kv_heads=kv_heads,
        dim=int(rng.choice(dims)),
        block_size=int(rng.choice(np.array(caps.block_sizes))),
        decodes=tuple(int(n) for n in rng.integers(1, 120, num_decodes)),
        chunks=tuple(chunks),
        padding=_random_padding(rng),
        window=windows[rng.integers(0, len(windows))],
        shares=bool(rng.integers(0, 2)),
    )


def _random_padding(rng: np.random.Generator) -> Padding:
    if rng.integers(0, 3) == 0:
        return Padding()
    return Padding(*(int(n) for n in rng.integers(0, 5, 4)))


def _fuzz(kit: Kit) -> None:
    rng = kit.rng
    shape = fit(kit, random_shape(kit, rng))
    kit.metrics["shape"] = repr(shape)
    run_shape(kit, shape, float(rng.choice([np.nan, np.inf, 1e30])), bool(rng.integers(0, 2)))
    if shape.dim >= 64:
        run_exact(kit, shape, "random")


FUZZ = Case("B.fuzz[seed]", _fuzz, "full")

__all__ = ["FUZZ", "random_shape"]
