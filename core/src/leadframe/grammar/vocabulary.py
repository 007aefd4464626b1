"""A model's vocabulary as the grammar library takes it: the bytes of every token.

Taking the bytes from the tokenizer that also turns tokens into text makes both agree, whatever
file the vocabulary came from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from leadframe.errors import RequestError

_INSTALL = "pip install 'llguidance>=1.7,<2'"


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text."""

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a special token, which is not part of the text."""


def library() -> Any:
    """Imports llguidance.

    Raises:
      RequestError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            f"structured output needs llguidance, which this server lacks ({error}); "
            f"install it with {_INSTALL}"
        ) from error
    return llguidance


class _Tokens:
    """The tokens in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int
    ) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        """Spells a text; grammars that force nothing never need it."""
        return []


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A vocabulary as plain data, which can go to another process.

    Attributes:
      tokens: bytes of every token.
      special: ids that are not part of the text.
      ends: ids that stand for the end; at least one.
    """

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Returns it as arrays."""
        lengths = np.array([len(token) for token in self.tokens], np.int32)
        text = np.frombuffer(b"".join(self.tokens), np.uint8)
        return [lengths, text, np.array(self.special, np.int32), np.array(self.ends, np.int32)]

    @classmethod
    def from_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> TokenTable:
        """Turns them back."""
        lengths, text, special, ends = arrays
        stops = np.cumsum(lengths, dtype=np.int64).tolist()
        joined = text.tobytes()
        tokens = [joined[a:b] for a, b in zip([0, *stops], stops, strict=False)]
        return cls(tokens, special.tolist(), ends.tolist())


def read_tokens(
    vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Collection[int]
) -> TokenTable:
    """Reads a tokenizer.

    Args:
      vocabulary: the tokenizer.
      vocab_size: width of the logits; ids without a token are never allowed.
      eos_token_ids: tokens that stand for the end. Without one, an id past the logits does.
    """
    size = max(vocab_size, vocabulary.vocab_size)
    tokens = [vocabulary.token_bytes(i) for i in range(size)]
    special = {i for i in range(vocabulary.vocab_size) if vocabulary.is_special(i)}
    ends = sorted(eos_token_ids)
    if not ends:
        ends = [size]
        tokens.append(b"</s>")
    return TokenTable(tokens, sorted(special | set(ends)), ends)


def build_tokens(table: TokenTable) -> Any:
    """Builds llguidance's tokenizer. It takes 0.2 s for 49,152 tokens."""
    llguidance = library()
    wrapped = llguidance.TokenizerWrapper(_Tokens(table.tokens, table.special, table.ends[0]))
    return llguidance.LLTokenizer(wrapped, eos_token=table.ends)
