"""What native paged attention needs from a batch, prepared once per step and `AttnParams`.

Native kernels divide by zero for a row without keys, take lengths as prefix sums, and write
outside the cache for a slot of -1. The plan gives them rows that have keys, sums, and slots
that were checked; where lengths lie on a device nothing is read from it, so that a plan can be
part of a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leadframe.platform.batch import StepArrays
from leadframe_torch import AttentionPlan
from leadframe_xpu.guard import HostFacts, check_batch, read_facts


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A batch in the terms of native kernels.

    Attributes:
      arrays: the batch.
      torch: the plan of leadframe_torch's attention, for when that serves.
      slots: [T], of the index type that the kernels take.
      kv_lens: int32 [S], keys of each row; at least its number of tokens, so never 0 for a row
        that owns a token.
      kv_starts: int32 [S + 1], prefix sums of `kv_lens`.
      is_padding: bool [D], decode rows whose output is not theirs; None when there is none.
      max_query: no row has more tokens.
      facts: what was read on the host; None when the batch lies on a device.
    """

    arrays: StepArrays
    torch: AttentionPlan
    slots: Tensor
    kv_lens: Tensor
    kv_starts: Tensor
    is_padding: Tensor | None
    max_query: int
    facts: HostFacts | None

    @property
    def owns_every_token(self) -> bool:
        """Whether kernels will write every row of the output; False when that is not known."""
        return self.facts is not None and self.facts.num_owned == self.arrays.bucket.num_tokens


def plan_batch(
    batch: StepArrays, torch_plan: AttentionPlan, slot_dtype: torch.dtype, *, may_read: bool
) -> PagedPlan:
    """Prepares a batch.

    Args:
      batch: the step's arrays.
      torch_plan: what leadframe_torch made of the same batch.
      slot_dtype: the index type of slots that the kernels take.
      may_read: the arrays lie on the host, where reading them costs nothing.

    Raises:
      ContractViolation: an array has another type or shape, or, where they may be read, a
        value that kernels would follow out of their memory.
    """
    check_batch(batch)
    facts = read_facts(batch) if may_read else None
    if facts is None:
        # -1 cannot be seen without waiting for the device; there it lands in the null block
        batch = replace(batch, slots=batch.slots.clamp(min=0))
    kv_lens = torch.maximum(batch.seq_lens, batch.query_start.diff())
    kv_starts = torch.zeros_like(batch.query_start)
    kv_starts[1:] = kv_lens.cumsum(0)
    return PagedPlan(
        arrays=batch,
        torch=torch_plan,
        slots=batch.slots.to(slot_dtype),
        kv_lens=kv_lens,
        kv_starts=kv_starts,
        is_padding=_padding(batch, facts),
        max_query=_max_query(batch, facts),
        facts=facts,
    )


def _padding(batch: StepArrays, facts: HostFacts | None) -> Tensor | None:
    first = batch.bucket.num_decodes
    if first == 0 or (facts is not None and not facts.has_padded_decode):
        return None
    is_padding: Tensor = batch.seq_lens[:first] == 0
    return is_padding


def _max_query(batch: StepArrays, facts: HostFacts | None) -> int:
    if facts is not None:
        return facts.max_query
    return max(1, batch.bucket.num_tokens - batch.bucket.num_decodes)


def finish(out: Tensor, plan: PagedPlan) -> Tensor:
    """Zeroes the output of padded decode rows, which read whatever the null block holds."""
    if plan.is_padding is not None:
        rows = out[: plan.is_padding.shape[0]]
        rows.masked_fill_(plan.is_padding.view(-1, 1, 1), 0.0)
    return out
