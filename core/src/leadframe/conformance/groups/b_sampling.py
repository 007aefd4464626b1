"""Group B: sampling. For equal logits and uniforms, every backend draws the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from leadframe.conformance.case import Case
from leadframe.conformance.groups.b_layers import in_step
from leadframe.conformance.kit import ORACLE, Kit

_VOCABS = (50, 1500, 5000, 150_001)
_ROWS, _FEW_ROWS = 48, 6
_LARGE = 100_000
"""Vocabularies from here on take few rows."""
_EDGE = 1e-4  # how near to a boundary of the CDF a draw may differ


def draw_rows(rng: np.random.Generator, vocab: int, variant: str) -> dict[str, npt.NDArray[Any]]:
    """Random logits and sampling parameters for a batch of rows."""
    is_plain, rows = variant == "plain", _FEW_ROWS if vocab >= _LARGE else _ROWS

    def pick(*values: float) -> npt.NDArray[np.float32]:
        return rng.choice(np.array(values, np.float32), rows)

    return {
        "logits": (rng.standard_normal((rows, vocab)) * 4).astype(np.float32),
        "temperature": pick(0, 0.3, 1, 2),
        "uniform": (rng.integers(0, 2**24, rows) * 2.0**-24).astype(np.float32),
        "min_p": pick(0, 0, 0.02, 0.3),
        "top_k": pick(*((0,) if is_plain else (0, 1, 5, 40, vocab))).astype(np.int32),
        "top_p": pick(*((1,) if is_plain else (1, 0.95, 0.5, 0.01))),
    }


def draw(kit: Kit, rows: dict[str, npt.NDArray[Any]], variant: str) -> tuple[Any, Any]:
    """Draws on the backend; returns tokens and covered."""
    arrays = {name: kit.backend.upload(host) for name, host in rows.items()}
    names = ("logits", "temperature", "uniform", "min_p", "top_k", "top_p")
    tokens, covered = in_step(
        kit, lambda ops, a: ops.sample(*(a[name] for name in names), variant), arrays
    )
    return tokens, covered.astype(bool)


def _exact(rows: dict[str, npt.NDArray[Any]], variant: str) -> tuple[Any, Any]:
    with np.errstate(all="ignore"):
        return ORACLE["sample"](**rows, variant=variant)  # type: ignore[no-any-return]


def _near_edge(rows: dict[str, npt.NDArray[Any]], row: int, variant: str) -> bool:
    """Whether a slightly different uniform draws another token: rounding may decide."""
    near = {name: np.repeat(host[row : row + 1], 2, axis=0) for name, host in rows.items()}
    near["uniform"] = np.clip(near["uniform"] + np.array([-_EDGE, _EDGE]), 0, 1 - 2.0**-24)
    near["uniform"] = near["uniform"].astype(np.float32)
    tokens, _ = _exact(near, variant)
    return bool(tokens[0] != tokens[1])


def _sample(kit: Kit, vocab: int, variant: str) -> None:
    rows = draw_rows(kit.rng, vocab, variant)
    tokens, covered = draw(kit, rows, variant)
    want, exact_covered = _exact(rows, variant)
    kit.check(tokens.dtype == np.int32, f"tokens are {tokens.dtype}, not int32")
    kit.same("covered", covered, exact_covered.astype(bool))
    wrong = [
        i
        for i in np.flatnonzero((tokens != want) & covered)
        if not _near_edge(rows, int(i), variant)
    ]
    kit.check(
        not wrong,
        f"{variant} drew {tokens[wrong[:3]]} in rows {wrong[:3]}, expected {want[wrong[:3]]}",
    )


def _never_dropped(kit: Kit, variant: str) -> None:
    """With the largest uniform, rounding must not draw a token that was dropped."""
    rng, vocab = kit.rng, 1537
    rows = draw_rows(rng, vocab, "plain")
    rows["logits"][:, rng.choice(vocab, 700, replace=False)] = -np.inf
    rows["temperature"][:] = 1.0
    rows["uniform"][:] = 1 - 2.0**-24
    rows["uniform"][::2] = 0.0
    rows["min_p"][:] = 1e-3
    tokens, _ = draw(kit, rows, variant)
    drawn = rows["logits"][np.arange(_ROWS), tokens]
    floor = rows["logits"].max(axis=1) + np.log(1e-3) - 1e-4
    kit.check(bool((drawn >= floor).all()), f"{variant} drew a token that min_p drops")


def _uncovered(kit: Kit, variant: str) -> None:
    """Flat rows: 1,024 candidates cannot decide a wide top_p or top_k, and must say so."""
    vocab = 4000
    rows = draw_rows(kit.rng, vocab, "plain")
    rows["logits"][:] = np.linspace(0, 0.01, vocab, dtype=np.float32)
    rows["temperature"][:], rows["min_p"][:] = 1, 0
    rows["top_k"] = np.where(np.arange(_ROWS) % 3 == 0, 2000, 0).astype(np.int32)
    rows["top_p"] = np.where(np.arange(_ROWS) % 3 == 1, 0.9, 1).astype(np.float32)
    _, covered = draw(kit, rows, variant)
    want = np.arange(_ROWS) % 3 == 2 if variant == "threshold" else np.ones(_ROWS, bool)
    kit.same("covered", covered, want)


def _ties(kit: Kit) -> None:
    """Equal logits stay or go together."""
    rows = draw_rows(kit.rng, 64, "plain")
    rows["logits"][:] = -5.0
    rows["logits"][:, [3, 9, 40]] = 2.0
    rows["temperature"][:], rows["min_p"][:] = 1, 0
    rows["top_k"] = np.full(_ROWS, 2, np.int32)
    rows["uniform"] = (np.arange(_ROWS) / _ROWS).astype(np.float32)
    for variant in ("threshold", "sort"):
        tokens, _ = draw(kit, rows, variant)
        want, _ = _exact(rows, variant)
        kit.same("tokens among ties", tokens, want)


def _greedy(kit: Kit) -> None:
    rng = kit.rng
    logits = rng.standard_normal((_ROWS, 3000)).astype(np.float32)
    logits[:5, 17] = logits[:5, 2900] = 9.0
    logits[5] = -3.0
    array = kit.backend.upload(logits)
    (tokens,) = in_step(kit, lambda ops, a: ops.argmax(a["x"]), {"x": array})
    kit.check(tokens.dtype == np.int32, f"argmax is {tokens.dtype}, not int32")
    kit.same("argmax, first of ties", tokens, np.argmax(logits, axis=1).astype(np.int32))


def _greedy_large(kit: Kit) -> None:
    """The largest logit in the last of a large vocabulary's blocks, and anywhere."""
    logits = kit.rng.standard_normal((_FEW_ROWS, _VOCABS[-1])).astype(np.float32)
    logits[0, -1] = logits[1, -2] = logits[1, -1] = 9.0
    array = kit.backend.upload(logits)
    (tokens,) = in_step(kit, lambda ops, a: ops.argmax(a["x"]), {"x": array})
    kit.same("argmax", tokens, np.argmax(logits, axis=1).astype(np.int32))


def _finite(kit: Kit) -> None:
    logits = np.zeros((5, 300), np.float32)
    logits[1, 299], logits[2, 0], logits[3, 150] = np.nan, np.inf, -np.inf
    array = kit.backend.upload(logits)
    (got,) = in_step(kit, lambda ops, a: ops.finite_rows(a["x"]), {"x": array})
    kit.same("finite_rows", got.astype(bool), np.array([True, False, False, False, True]))


def _edits(kit: Kit) -> None:
    rng = kit.rng
    rows, vocab, edits = 6, 200, 4
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    ids = np.stack([rng.choice(vocab, edits, replace=False) for _ in range(rows)]).astype(np.int32)
    scale = rng.uniform(0.5, 2, (rows, edits)).astype(np.float32)
    add = rng.standard_normal((rows, edits)).astype(np.float32)
    add[0, 0] = -np.inf
    ids[1, 1], scale[1, 1], add[1, 1] = ids[1, 0], scale[1, 0], add[1, 0]
    keep = np.array([0, 0, 1, 0, 1, 0], np.int32)
    host = {"x": logits, "i": ids, "s": scale, "a": add, "k": keep}
    arrays = {name: kit.backend.upload(value) for name, value in host.items()}
    (got,) = in_step(
        kit, lambda ops, a: ops.edit_logits(a["x"], a["i"], a["s"], a["a"], a["k"]), arrays
    )
    want = ORACLE["edit_logits"](logits.astype(np.float64), ids, scale, add, keep)
    kit.same("masked logits", np.isneginf(got), np.isneginf(want))
    kept = np.isfinite(want)
    kit.close_to("edit_logits", got[kept], want[kept], "float32")


def _masks(kit: Kit, vocab: int) -> None:
    """Random masks, an empty one and one that leaves a single token; bits past V are noise."""
    rows, words = 6, -(-vocab // 32)
    logits = kit.rng.standard_normal((rows, vocab)).astype(np.float32)
    is_masked = kit.rng.random((rows, words * 32)) < 0.5
    is_masked[0], is_masked[1] = False, True
    is_masked[1, vocab - 1] = False
    mask = np.packbits(is_masked, axis=1, bitorder="little").view("<i4").astype(np.int32)
    want = np.where(is_masked[:, :vocab], np.float32(-np.inf), logits)
    arrays = {"x": kit.backend.upload(logits), "m": kit.backend.upload(mask)}
    (got,) = in_step(kit, lambda ops, a: ops.mask_logits(a["x"], a["m"]), arrays)
    kit.same("mask_logits", got, want)


def _logprobs(kit: Kit, k: int, vocab: int = 2500) -> None:
    rng = kit.rng
    logits = (rng.standard_normal((9, vocab)) * 5).astype(np.float32)
    logits[0, [3, 4]] = 30.0
    targets = rng.integers(0, vocab, 9).astype(np.int32)
    targets[0] = 4
    arrays = {"x": kit.backend.upload(logits), "t": kit.backend.upload(targets)}
    got = in_step(kit, lambda ops, a: ops.topk_logprobs(a["x"], a["t"], k), arrays)
    want = ORACLE["topk_logprobs"](logits, targets, k)
    kit.check(len(got) == (4 if k else 2), f"topk_logprobs returned {len(got)} arrays for k={k}")
    kit.close_to("topk_logprobs", got[0], want[0].astype(np.float64), "float32")
    kit.same("rank of the target", got[1], want[1])
    if k:
        kit.same("ids of the best", np.sort(got[2], axis=1), np.sort(want[2], axis=1))
        kit.close_to("topk_logprobs", got[3], want[3].astype(np.float64), "float32")


def _case(vocab: int, variant: str) -> Case:
    tier = "core" if vocab <= 1500 else "full"
    return Case(
        f"B.sample[{variant}-{vocab}]",
        lambda kit: _sample(kit, vocab, variant),
        tier,  # type: ignore[arg-type]
    )


def _dropped_case(variant: str) -> Case:
    return Case(f"B.sample[never-dropped-{variant}]", lambda kit: _never_dropped(kit, variant))


def _covered_case(variant: str) -> Case:
    return Case(f"B.sample[covered-{variant}]", lambda kit: _uncovered(kit, variant))


CASES = [
    *(_case(vocab, variant) for vocab in _VOCABS for variant in ("plain", "threshold", "sort")),
    *(_dropped_case(variant) for variant in ("plain", "threshold", "sort")),
    *(_covered_case(variant) for variant in ("threshold", "sort")),
    Case("B.sample[ties]", _ties),
    Case("B.argmax[ties]", _greedy),
    Case("B.argmax[150001]", _greedy_large, "full"),
    Case("B.finite_rows[non-finite]", _finite),
    Case("B.edit_logits[all]", _edits),
    Case("B.mask_logits[96]", lambda kit: _masks(kit, 96)),
    Case("B.mask_logits[1500]", lambda kit: _masks(kit, 1500)),
    Case("B.mask_logits[150001]", lambda kit: _masks(kit, 150_001), "full"),
    Case("B.topk_logprobs[0]", lambda kit: _logprobs(kit, 0)),
    Case("B.topk_logprobs[20]", lambda kit: _logprobs(kit, 20)),
    Case("B.topk_logprobs[20-of-150001]", lambda kit: _logprobs(kit, 20, 150_001), "full"),
]
