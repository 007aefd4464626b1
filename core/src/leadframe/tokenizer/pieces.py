"""What each token adds to the text, as bytes that do not depend on its neighbours.

Both kinds of tokenizer that language models use decode token by token: byte-level BPE spells
bytes as letters, SentencePiece spells a space as "▁" and unknown bytes as "<0x41>". So text is
one UTF-8 decoding of joined bytes, whole or as it streams, and both are the same by construction.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Protocol

import tokenizers

from leadframe.errors import UnsupportedModel

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """How a kind of tokenizer spells text in its vocabulary."""

    @property
    def strips_first_space(self) -> bool:
        """Whether one space at the start of a whole text is not part of it."""

    def piece(self, token: str) -> bytes:
        """Returns the bytes that a token adds to the text."""


class ByteLevelSpelling:
    """Each byte is one letter of a fixed alphabet; what is not in it stands for itself."""

    strips_first_space = False

    def __init__(self) -> None:
        self._byte_of = _byte_level_alphabet()

    def piece(self, token: str) -> bytes:
        """Returns the bytes that a token adds to the text."""
        try:
            return bytes([self._byte_of[letter] for letter in token])
        except KeyError:
            return token.encode("utf-8")


class SentencePieceSpelling:
    """Text as it is, but for a mark that stands for a space and tokens that stand for a byte.

    Args:
      replacements: (what the vocabulary has, what the text has), applied in order.
      byte_tokens: "<0x41>" stands for a byte.
      strips_first_space: see `Spelling`.
    """

    def __init__(
        self, replacements: list[tuple[str, str]], byte_tokens: bool, strips_first_space: bool
    ) -> None:
        self._replacements, self._byte_tokens = replacements, byte_tokens
        self.strips_first_space = strips_first_space

    def piece(self, token: str) -> bytes:
        """Returns the bytes that a token adds to the text."""
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
        if match is not None:
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")


class WordSpelling:
    """Each token is a word; words are joined by spaces."""

    strips_first_space = True

    def piece(self, token: str) -> bytes:
        """Returns the bytes that a token adds to the text."""
        return b" " + token.encode("utf-8")


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling:
    """Reads from a tokenizer's decoder how it spells text.

    Raises:
      UnsupportedModel: the decoder is of a kind that needs more than one token at a time.
    """
    decoder = backend.decoder
    if decoder is None:
        return WordSpelling()
    steps = _flat(json.loads(decoder.__getstate__()))
    if any(step["type"] == "ByteLevel" for step in steps):
        return ByteLevelSpelling()
    kinds = [step["type"] for step in steps]
    unknown = set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip"}
    if unknown or not all(_is_understood(step) for step in steps):
        raise UnsupportedModel(
            f"the tokenizer's decoder {' → '.join(kinds)} is not supported; it must be ByteLevel, "
            "or Replace, ByteFallback, Fuse and Strip of one leading space"
        )
    replacements = [
        (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
    ]
    return SentencePieceSpelling(replacements, "ByteFallback" in kinds, "Strip" in kinds)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _is_understood(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    if step["type"] == "Strip":
        return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
    return True


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letters: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return letters
