"""The step: layers, then logits and sampling, as pure functions over the op table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from leadframe.platform.backend import KV, Array
from leadframe.platform.batch import Bucket, StepArrays
from leadframe.platform.ops import Ops


class StepModel(Protocol):
    """What a step needs of a model."""

    def forward(
        self, ops: Ops, weights: Mapping[str, Array], kv: KV, arrays: StepArrays
    ) -> tuple[Array, KV]:
        """Returns the final hidden states [T, E] and the new KV."""

    def logits(self, ops: Ops, weights: Mapping[str, Array], rows: Array) -> Array:
        """Returns the logits [N, V] of hidden rows [N, E]."""


class ModelStep:
    """The pure step `(weights, kv_d, arrays) -> (outputs, kv)` of one model; a `SplitStep`.

    Args:
      model: its layers and its logits.
      ops: the op table.
    """

    def __init__(self, model: StepModel, ops: Ops) -> None:
        self._model, self._ops = model, ops

    def __call__(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Array], KV]:
        """Runs layers and head."""
        hidden, kv = self.forward(weights, kv_d, arrays)
        return self.head(weights, hidden, arrays), kv

    def forward(
        self, weights: Mapping[str, Array], kv_d: KV, arrays: StepArrays
    ) -> tuple[dict[str, Array], KV]:
        """Returns "hidden", the final hidden states [T, E]."""
        hidden, kv = self._model.forward(self._ops, weights, kv_d, arrays)
        return {"hidden": hidden}, kv

    def head(
        self, weights: Mapping[str, Array], hidden: Mapping[str, Array], arrays: StepArrays
    ) -> dict[str, Array]:
        """Computes logits, and samples from them.

        Returns:
          Each only where the bucket asks for it: "tokens" int32 [S], "covered" bool [S], "finite"
          bool [L]; for sampled rows "logprob" [S], "rank" [S], "top_ids" [S, k], "top_logprobs"
          [S, k]; and the same four with the prefix "scored_" for the L - S rows of prompt
          log-probabilities.
        """
        ops, bucket = self._ops, arrays.bucket
        if bucket.num_logits == 0:
            return {}
        rows = ops.take_rows(hidden["hidden"], arrays.logits_idx)
        logits = self._model.logits(ops, weights, rows)
        outputs = {"finite": ops.finite_rows(logits)}
        _sample(ops, logits[: bucket.num_seqs], arrays, outputs)
        if bucket.num_logits > bucket.num_seqs:
            scored, targets = logits[bucket.num_seqs :], arrays.targets[bucket.num_seqs :]
            _logprobs(ops, scored, targets, bucket, outputs, "scored_")
        return outputs


def _sample(ops: Ops, raw: Array, arrays: StepArrays, outputs: dict[str, Any]) -> None:
    bucket = arrays.bucket
    logits = raw
    if bucket.num_logprobs is not None and (bucket.num_edits or bucket.num_mask_words):
        # Edits may reuse their input, and log-probabilities are of the raw logits.
        logits = raw + 0.0
    if bucket.num_edits:
        edits = (arrays.edit_ids, arrays.edit_scale, arrays.edit_add, arrays.keep_only)
        logits = ops.edit_logits(logits, *edits)
    if bucket.num_mask_words:
        logits = ops.mask_logits(logits, arrays.token_mask)
    if bucket.sample == "greedy" or bucket.sample == "skip":
        outputs["tokens"] = ops.argmax(logits)
    else:
        outputs["tokens"], outputs["covered"] = ops.sample(
            logits,
            arrays.temperature,
            arrays.uniform,
            arrays.min_p,
            arrays.top_k,
            arrays.top_p,
            bucket.sample,
        )
    if bucket.num_logprobs is not None:
        _logprobs(ops, raw, outputs["tokens"], bucket, outputs, "")


def _logprobs(
    ops: Ops, raw: Array, targets: Array, bucket: Bucket, outputs: dict[str, Any], prefix: str
) -> None:
    k = bucket.num_logprobs or 0
    logprob, rank, top_ids, top_logprobs = ops.topk_logprobs(raw, targets, k)
    outputs[prefix + "logprob"], outputs[prefix + "rank"] = logprob, rank
    if k:
        outputs[prefix + "top_ids"], outputs[prefix + "top_logprobs"] = top_ids, top_logprobs
