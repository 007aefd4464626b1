"""The ops a model is written over: names, signatures and meaning.

Three are required of every backend; each of the others has a reference over `Backend.xp`. The
reference is the definition: where this text and the reference differ, the reference is right and
the text is a bug. Accumulation is in float32 (float64 in the kit's oracle) for every dtype.

Shapes: T tokens, H query heads, K KV heads, D head dim, N rows, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from leadframe.platform.backend import Array, KVLayer
from leadframe.platform.batch import StepArrays
from leadframe.platform.capabilities import AttnParams

REQUIRED_OPS: Final = ("kv_append", "attention", "kv_copy")
"""Ops that every backend implements itself."""

RopeTable = tuple[Array, Array]
"""cos and sin, each [T, R/2] where R is the number of rotated dimensions of a head."""


class Ops(Protocol):
    """The op table that a model's step receives."""

    # --- required -----------------------------------------------------------------------

    def kv_append(self, kv_d: KVLayer, k: Array, v: Array, plan: Any) -> KVLayer:
        """Writes K and V [T, K, D] to the slots of the batch and returns the new handle.

        Padded tokens have slot 0 and land in the null block; several may.
        """

    def attention(self, q: Array, kv: KVLayer, plan: Any, params: AttnParams) -> Array:
        """Causal paged attention over the cache, after `kv_append` of the same tokens.

        Token t at position p of its row sees keys [0, p] of that row, or the last
        `params.window` of them. Query head h reads KV head h // (H // K). What unread slots
        hold, NaN and infinities included, has no influence. Rows with seq_len 0 are finite.

        Args:
          q: [T, H, D].
          kv: this layer's handle.
          plan: what `plan` returned for these `params`.
          params: constants of the layer.

        Returns:
          [T, H, D] in q's dtype.
        """

    def kv_copy(
        self, kv_d: KVLayer, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]
    ) -> KVLayer:
        """Copies block src[i] to block dst[i], host arrays; the sets do not overlap."""

    # --- optional: attention planning ---------------------------------------------------

    def plan(self, batch: StepArrays, params: AttnParams) -> Any:
        """Prepares what `kv_append` and `attention` need from the batch.

        Called once per distinct `AttnParams` per step. The reference returns the batch.
        """

    # --- optional: layers ---------------------------------------------------------------

    def embed(self, table: Array, token_ids: Array) -> Array:
        """Rows of the embedding table [V, E] at int32 [T]; returns [T, E].

        Ids outside [0, V) are clamped: padding may hold anything.
        """

    def take_rows(self, x: Array, rows: Array) -> Array:
        """Rows of x [T, E] at int32 [N]; returns [N, E]."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """X [T, in] times weight [out, in] transposed, plus bias [out]; returns [T, out]."""

    def rms_norm(self, x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
        """X / sqrt(mean(x², last axis) + eps) * (offset + weight), over any leading axes."""

    def add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, offset: float = 0.0
    ) -> tuple[Array, Array]:
        """Returns (rms_norm(x + residual), x + residual)."""

    def rope_table(self, positions: Array, inv_freq: Array, scaling: float = 1.0) -> RopeTable:
        """Cos and sin of positions int32 [T] times inv_freq float32 [R/2], times `scaling`."""

    def rope(self, x: Array, table: RopeTable) -> Array:
        """Rotates the first R dimensions of each head of x [T, H, D].

        Dimension i pairs with i + R/2 (the Hugging Face layout, not the interleaved one).
        """

    def silu_mul(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up."""

    def gelu_mul(self, gate: Array, up: Array) -> Array:
        """gelu(gate) * up, with the tanh approximation."""

    def softcap(self, x: Array, cap: float) -> Array:
        """Cap * tanh(x / cap)."""

    # --- optional: sampling -------------------------------------------------------------

    def finite_rows(self, logits: Array) -> Array:
        """Bool [N]: whether every logit of a row [N, V] is finite."""

    def edit_logits(
        self, logits_d: Array, ids: Array, scale: Array, add: Array, keep_only: Array
    ) -> Array:
        """Applies penalties, biases and masks to some tokens of each row.

        For each row n and edit a, with x the logit of token ids[n, a]: x becomes
        (x / scale if x > 0 else x * scale) + add. Where keep_only[n] is 1, every token that is
        not in ids[n] becomes -inf. Equal ids in a row carry equal edits.

        Args:
          logits_d: float32 [N, V].
          ids: int32 [N, A].
          scale: float32 [N, A].
          add: float32 [N, A]; -inf forbids a token.
          keep_only: int32 [N].
        """

    def mask_logits(self, logits_d: Array, mask: Array) -> Array:
        """Sets the tokens of each row whose bit is set to -inf.

        Args:
          logits_d: [N, V].
          mask: int32 [N, ceil(V / 32)]; bit t % 32 of word t // 32 is token t, and the sign bit
            is bit 31. Bits from V on mean nothing. At least one token of each row stays.
        """

    def argmax(self, logits: Array) -> Array:
        """int32 [N]: the first index of the largest logit of each row [N, V]."""

    def sample(
        self,
        logits: Array,
        temperature: Array,
        uniform: Array,
        min_p: Array,
        top_k: Array | None,
        top_p: Array | None,
        variant: Literal["plain", "threshold", "sort"],
    ) -> tuple[Array, Array]:
        """Draws one token a row by inverting the CDF in vocabulary order.

        Rows with temperature 0 take the argmax. Otherwise p = softmax(logits / temperature);
        tokens with p < min_p * max(p) are dropped; then all but the top_k largest; then, of the
        renormalised rest, all outside the smallest set of largest tokens whose mass reaches
        top_p. Equal logits stay or go together. The token drawn is the first whose cumulative
        mass over the kept tokens, in vocabulary order, exceeds uniform times the whole kept
        mass; never one that was dropped.

        "plain" ignores top_k and top_p. "threshold" looks for them among the 1,024 largest
        logits of a row; "sort" among all.

        Args:
          logits: float32 [N, V].
          temperature: float32 [N].
          uniform: float32 [N] in [0, 1).
          min_p: float32 [N], 0 is off.
          top_k: int32 [N], 0 is off.
          top_p: float32 [N], 1 is off.
          variant: where top_k and top_p look for their threshold.

        Returns:
          int32 [N] tokens, and bool [N]: False where "threshold" could not decide top_k or
          top_p from its candidates, so that the token must be drawn again with "sort".
        """

    def topk_logprobs(
        self, logits: Array, targets: Array, k: int
    ) -> tuple[Array, Array, Array | None, Array | None]:
        """Log-probabilities of the raw logits.

        Args:
          logits: [N, V].
          targets: int32 [N].
          k: how many of the best to return; a bucket value, may be 0.

        Returns:
          float32 [N] log-probability of the target; int32 [N] its rank, 1 for the best (one
          plus the number of strictly larger logits); int32 [N, k] ids and float32 [N, k]
          log-probabilities of the best, best first; None for both when k is 0.
        """

    # --- optional: tensor parallelism ---------------------------------------------------

    def all_reduce(self, x: Array) -> Array:
        """Sum of x over the ranks; the identity for one rank."""

    def all_gather(self, x: Array) -> Array:
        """Concatenation of x over the ranks along the last axis; the identity for one rank."""


OP_NAMES: Final = tuple(
    name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")
)
"""Every op of the contract, in the order above."""

OpFunction = Callable[..., Any]
