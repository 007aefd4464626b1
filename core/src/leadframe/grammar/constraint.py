"""A grammar, and how far one request's output has come in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""One bit a token: bit t % 32 of word t // 32."""


class GrammarConstraint:
    """Says which tokens may not come next. Its state depends on the output alone.

    Args:
      matcher: llguidance's, at the start of the output.
      renew: makes another one, which shares no memory with the first.
      num_words: W, words that the logits take.
      inside: tokens that the logits have, as many words as the matcher writes.
      withheld: tokens that are allowed only where no other is: end-of-sequence tokens of a
        request that ignores them; as many words.

    Attributes:
      error: why no further token can be judged; the request has to end.
    """

    def __init__(
        self,
        matcher: Any,
        renew: Callable[[], Any],
        num_words: int,
        inside: Words,
        withheld: Words,
    ) -> None:
        self.error: str | None = None
        self._matcher, self._renew, self._is_own = matcher, renew, False
        self._output: list[int] = []
        self._num_words, self._inside, self._withheld = num_words, inside, withheld
        self._mask: Words | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the output matches and nothing can follow it."""
        return self.error is None and bool(self._matcher.is_stopped())

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Reads the tokens of the output that it has not read yet."""
        fresh = list(output_token_ids[len(self._output) :])
        if not fresh or self.error is not None:
            return
        self._mask = None
        self._output += fresh
        if not self._matcher.consume_tokens(fresh):
            self._start_over()

    def mask(self) -> Words:
        """Returns the tokens that may not come next, int32 [W].

        It is computed once for each token of the output. Once there is an `error` it is all
        zeros, which forbid nothing.
        """
        if self._mask is None and self.error is None:
            self._compute()
        return np.zeros(self._num_words, np.int32) if self._mask is None else self._mask

    def _compute(self) -> None:
        allowed = np.zeros(len(self._inside), np.int32)
        target = allowed.ctypes.data, allowed.nbytes
        self._matcher.unsafe_compute_mask_ptr(*target)
        if self._matcher.is_error():
            self._start_over()
            if self.error is not None:
                return
            self._matcher.unsafe_compute_mask_ptr(*target)
            if self._matcher.is_error():
                self._fail()
                return
        allowed &= self._inside
        if (allowed & ~self._withheld).any():
            allowed &= ~self._withheld
        if allowed.any():
            self._mask = ~allowed[: self._num_words]
        else:
            self.error = "no token of the vocabulary can follow in the grammar"

    def _start_over(self) -> None:
        """Repeats the output with a matcher of its own, once.

        Matchers of one grammar share a lexer, whose memory is bounded: what others put there must
        not decide how this request ends.
        """
        if not self._is_own:
            self._is_own, self._matcher = True, self._renew()
            if self._matcher.consume_tokens(self._output):
                return
        self._fail()

    def _fail(self) -> None:
        reason = str(self._matcher.get_error()).splitlines() or [""]
        self.error = f"the grammar cannot go on: {reason[0][:200]}"


def words_of(token_ids: Iterable[int], num_words: int) -> Words:
    """Returns words in which the bits of some tokens are set."""
    flags = np.zeros(num_words * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)
