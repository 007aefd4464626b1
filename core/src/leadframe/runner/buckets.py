"""Buckets: the few shapes that steps are padded to, where a backend wants few shapes.

Three kinds of backend, told apart by their capabilities alone:

- no graph, no static shapes: every step has its exact size;
- a graph, no static shapes: steps that only decode are padded to a shape that was made ready at
  start-up, however they sample: the backend records the layers of a shape once
  (`leadframe.platform.SplitStep`); every other step runs with its exact size, without a graph;
- static shapes: every step is padded to a member of a finite family. Decode-only steps and mixed
  steps have families of their own; a mixed step counts its decodes as chunk rows of one token
  (`num_decodes` 0), so that the number of decodes is no dimension of the family.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from leadframe.errors import InternalError
from leadframe.platform.batch import Bucket, SampleVariant
from leadframe.platform.capabilities import Capabilities
from leadframe.sampling_params import MAX_LOGPROBS

LOGPROB_COUNTS = (0, 5, MAX_LOGPROBS)
"""Values of `Bucket.num_logprobs`."""

_MIN_TOKENS = 16
_MIN_BLOCKS = 16
_MIN_EDITS = 16

_COMMON_WAYS: tuple[SampleVariant, ...] = ("greedy", "plain", "threshold")


def bucketed_logprobs(num_logprobs: int) -> int:
    """Rounds a number of log-probabilities up to one of a few."""
    return _round_up(num_logprobs, LOGPROB_COUNTS)


class BucketPolicy:
    """Which bucket a step runs in, and which are made ready at start-up.

    Args:
      caps: the backend's capabilities.
      max_num_seqs: most rows of a step.
      max_num_batched_tokens: most tokens of a step.
      max_model_len: most tokens of a sequence.
      block_size: tokens per block.
      enforce_eager: capture nothing; without effect where shapes are static.

    Attributes:
      decode_sizes: numbers of rows of decode-only steps; empty if none are padded.
      token_sizes: numbers of tokens of mixed steps; empty if none are padded.
      widths: widths of block tables; empty if none are padded.
    """

    def __init__(
        self,
        caps: Capabilities,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        *,
        enforce_eager: bool = False,
    ) -> None:
        self.is_static = caps.static_shapes
        self.decode_sizes: tuple[int, ...] = ()
        self.token_sizes: tuple[int, ...] = ()
        self.widths: tuple[int, ...] = ()
        self._max_num_seqs = max_num_seqs
        if self.is_static or (caps.graph != "none" and not enforce_eager):
            self.widths = _ladder(_MIN_BLOCKS, -(-max_model_len // block_size), 4)
            self.decode_sizes = _decode_sizes(max_num_seqs, fine=caps.graph == "record")
            if self.is_static:
                self.token_sizes = _ladder(_MIN_TOKENS, max_num_batched_tokens, 2)
            self._thin(caps.max_graphs)
        self._prepared = frozenset(self.all_buckets())

    def all_buckets(self) -> list[Bucket]:
        """Returns what start-up makes ready: every padded shape, with greedy sampling.

        Other ways of sampling share these shapes and are made ready when they are first used:
        that takes no time where their layers are shared too (`leadframe.platform.SplitStep`).
        Where shapes are static, even a head must be compiled: the usual ways to sample are there
        from the start, behind the greedy steps whose layers they share.
        """
        decode = [_decode_bucket(size, width) for size, width in self._grid(self.decode_sizes)]
        mixed = [self._mixed_bucket(size, width) for size, width in self._grid(self.token_sizes)]
        ways = _COMMON_WAYS if self.is_static else ("greedy",)
        return [replace(shape, sample=way) for way in ways for shape in decode + mixed]

    def common_buckets(self) -> list[Bucket]:
        """Returns the usual ways to sample, for each size of decode steps at one width.

        Heads that are not recorded build kernels when they first run, and know no width: start-up
        runs these once. Empty where shapes are static: `all_buckets` has them.
        """
        if self.is_static:
            return []
        shapes = [_decode_bucket(size, self.widths[0]) for size in self.decode_sizes]
        return [replace(shape, sample=way) for shape in shapes for way in _COMMON_WAYS]

    def bucket_for(self, needed: Bucket) -> Bucket:
        """Returns the bucket that a step runs in.

        Args:
          needed: the exact sizes of the step.

        Returns:
          A member of the finite family, or `needed` itself where the step runs without one.
        """
        if not self.widths:
            return needed
        only_decodes = needed.num_tokens == needed.num_decodes
        if only_decodes and self.decode_sizes:
            size = _round_up(needed.num_seqs, self.decode_sizes)
            shape = _decode_bucket(size, _round_up(needed.num_blocks, self.widths))
        elif self.is_static:
            size = _round_up(needed.num_tokens, self.token_sizes)
            shape = self._mixed_bucket(size, _round_up(needed.num_blocks, self.widths))
        else:
            return needed
        return self._with_sampling(shape, needed)

    def is_padded(self, bucket: Bucket) -> bool:
        """Whether a bucket is a member of the finite family, worth compiling or capturing.

        The others are exact sizes, which may never come again: run those without a graph, and do
        not keep what `compile` returns for them without a limit.
        """
        return self._greedy(bucket) in self._prepared

    def is_prepared(self, bucket: Bucket) -> bool:
        """Whether start-up made this bucket ready."""
        return bucket in self._prepared

    def _with_sampling(self, shape: Bucket, needed: Bucket) -> Bucket:
        """Adds to a padded shape what the step asks of the sampler, in few values."""
        variant: SampleVariant = needed.sample
        if variant == "skip" and self.is_static:
            variant = "greedy"
        num_scored = max(0, needed.num_logits - needed.num_seqs)
        num_logits = 0 if variant == "skip" else shape.num_seqs + _power_of_two(num_scored)
        num_edits = max(_MIN_EDITS, _power_of_two(needed.num_edits)) if needed.num_edits else 0
        return replace(
            shape,
            num_logits=num_logits,
            sample=variant,
            num_edits=num_edits,
            num_logprobs=needed.num_logprobs,
            num_mask_words=needed.num_mask_words,
        )

    def _greedy(self, bucket: Bucket) -> Bucket:
        return replace(
            bucket,
            sample="greedy",
            num_logits=bucket.num_seqs,
            num_edits=0,
            num_logprobs=None,
            num_mask_words=0,
        )

    def _mixed_bucket(self, num_tokens: int, width: int) -> Bucket:
        # A row has a token at least, so this many rows always suffice.
        num_seqs = min(num_tokens, self._max_num_seqs)
        return Bucket(num_tokens, num_seqs, 0, width, num_seqs)

    def _grid(self, sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
        return product(sizes, self.widths)

    def _thin(self, max_graphs: int | None) -> None:
        """Drops shapes until a backend's limit holds: widths first, then every other size."""
        if max_graphs is None:
            return
        while (len(self.decode_sizes) + len(self.token_sizes)) * len(self.widths) > max_graphs:
            if len(self.widths) > 1:
                self.widths = self.widths[1:]
            elif len(self.decode_sizes) > 1 or len(self.token_sizes) > 1:
                self.decode_sizes = _every_other(self.decode_sizes)
                self.token_sizes = _every_other(self.token_sizes)
            else:
                self.decode_sizes = ()
                return


def _decode_bucket(num_seqs: int, width: int) -> Bucket:
    return Bucket(num_seqs, num_seqs, num_seqs, width, num_seqs)


def _decode_sizes(maximum: int, *, fine: bool) -> tuple[int, ...]:
    """1, 2, 4, 8, ... maximum; if fine, also the sizes half-way between, from 16 on."""
    sizes = set(_ladder(1, maximum, 2))
    if fine:
        sizes |= {size * 3 // 2 for size in sizes if size >= 16}
    return tuple(sorted(size for size in sizes if size <= maximum))


def _ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... below `last`, and `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


def _every_other(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Drops half of the sizes; the largest stays."""
    return tuple(reversed(sizes[::-1][::2]))


def _power_of_two(value: int) -> int:
    """Rounds up to a power of two; 0 stays 0."""
    return 1 << (value - 1).bit_length() if value else 0


def _round_up(value: int, sizes: Sequence[int]) -> int:
    index = bisect_left(sizes, value)
    if index == len(sizes):
        raise InternalError(f"a step needs {value} of something, and the largest bucket is {sizes}")
    return sizes[index]
