"""Turns tokens into text as they come, in constant time a token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final

from leadframe.tokenizer.tokenizer import Tokenizer

_MAX_PENDING_BYTES: Final = 3
"""The most bytes of a UTF-8 character that can be there while it is not complete."""


class Detokenizer:
    """The text of one output.

    Pushed text and the rest that `finish` returns, joined, are what decoding prompt and output
    together adds to the text of the prompt. Half a character is held back until it is whole, or
    cannot become one.

    Args:
      tokenizer: gives the bytes of each token.
      prompt_token_ids: what comes before; the output may complete its last character.
      skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self._piece(token_id) + tail
            if len(tail) > _MAX_PENDING_BYTES:
                break
        self._at_start = tokenizer.strips_first_space and not tail
        self._decoder.decode(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        added = b"".join([self._piece(token_id) for token_id in token_ids])
        return self._opened(self._decoder.decode(added))

    def finish(self) -> str:
        """Ends the text and returns what stands for a character that was never completed."""
        return self._opened(self._decoder.decode(b"", final=True))

    def _piece(self, token_id: int) -> bytes:
        if self._skip and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _opened(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")
