"""Builds a tokenizer from the vocabulary that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.tokenizer.tokenizer import TokenizerConfig

_KEY: Final = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level tokenizer splits text before it merges.

    Attributes:
      pattern: what a piece is; None is GPT-2's pattern.
      digits: every digit is a piece of its own.
      ignore_merges: a piece that is a token stays one, whatever the merges say.
      add_bos: a text starts with a first token where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Builds it for the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([*steps, to_bytes])


_LLAMA3_SPLITTING: Final = _Splitting(_LLAMA3, ignore_merges=True, add_bos=True)
_SPLITTINGS: Final[Mapping[str, _Splitting]] = {
    "default": _Splitting(),
    "gpt-2": _Splitting(),
    "smollm": _Splitting(digits=True),
    "llama-bpe": _LLAMA3_SPLITTING,
    "llama3": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    "qwen2": _Splitting(_QWEN2),
    "deepseek-r1-qwen": _Splitting(_QWEN2),
    "tekken": _Splitting(_TEKKEN, ignore_merges=True, add_bos=True),
}
"""By `tokenizer.ggml.pre`. Another way to split text gives other tokens, so others are refused.

The rules are llama.cpp's, which follow the original tokenizers.
"""


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, TokenizerConfig]:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Raises:
      CheckpointError: the vocabulary is missing or inconsistent.
      UnsupportedModel: its kind is not implemented.
    """
    tokens = _tokens(metadata)
    kind = metadata.get(_KEY + "model")
    add_bos = True
    if kind == "gpt2":
        splitting = _splitting(metadata)
        backend, add_bos = _byte_level(metadata, tokens, splitting), splitting.add_bos
    elif kind == "llama":
        tokens = _spelled(metadata, tokens)
        backend = _sentence_piece(metadata, tokens)
    else:
        raise UnsupportedModel(
            f"{_KEY}model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE): use the model's Hugging Face directory"
        )
    _add_special(backend, metadata, tokens)
    roles = {role: _token_at(metadata, tokens, key) for role, key in _ROLES.items()}
    special = {role: token for role, token in roles.items() if token is not None}
    _surround(
        backend,
        special.get("bos_token") if _flag(metadata, "add_bos_token", add_bos) else None,
        special.get("eos_token") if _flag(metadata, "add_eos_token", False) else None,
    )
    return backend, TokenizerConfig(special, _templates(metadata))


def _surround(backend: Tokenizer, first: str | None, last: str | None) -> None:
    """Makes `encode` put a first and a last token around a text."""
    ends = [token for token in (first, last) if token is not None]
    text = [f"{first}:0"] * (first is not None) + ["$A:0"] + [f"{last}:0"] * (last is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=text,
        pair=[*text, "$B:1"],
        special_tokens=[(t, backend.token_to_id(t)) for t in ends],
    )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(_KEY + "tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"the GGUF file has no vocabulary: {_KEY}tokens is missing")
    return tokens


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(_KEY + name, default))


def _token_at(metadata: Mapping[str, Any], tokens: Sequence[str], key: str) -> str | None:
    index = metadata.get(_KEY + key)
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    named = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return {name: metadata[key] for name, key in named.items() if metadata.get(key)}


def _splitting(metadata: Mapping[str, Any]) -> _Splitting:
    pre = str(metadata.get(_KEY + "pre", "default"))
    if pre not in _SPLITTINGS:
        raise UnsupportedModel(
            f"{_KEY}pre is {pre!r}; supported are {', '.join(_SPLITTINGS)}: use the model's "
            "Hugging Face directory"
        )
    return _SPLITTINGS[pre]


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], splitting: _Splitting
) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(_KEY + "merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _is_gemma(metadata: Mapping[str, Any]) -> bool:
    return str(metadata.get("general.architecture", "")).startswith("gemma")


def _spelled(metadata: Mapping[str, Any], tokens: list[str]) -> list[str]:
    """Gemma's runs of spaces are stored as spaces, and looked up as marks."""
    if not _is_gemma(metadata):
        return tokens
    return ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    gemma = _is_gemma(metadata)
    scores: Sequence[float] = metadata.get(_KEY + "scores") or ()
    if gemma:  # its scores do not follow the order of its merges; its ids do
        scores = range(0, -len(tokens), -1)
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{_KEY}scores has {len(scores)} entries for {len(tokens)} tokens; the file is corrupt"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _token_at(metadata, tokens, "unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, tokens, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = not gemma and _flag(metadata, "add_space_prefix", True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    if gemma:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    return backend


def _merges(
    vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Recovers the merges of a vocabulary: every pair that makes a token, best token first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = (
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        )
        local = sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked.extend((score, len(left), len(right), (left, right)) for left, right in local)
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [entry[3] for entry in ranked]


def _add_special(backend: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    kinds = metadata.get(_KEY + "token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{_KEY}token_type has {len(kinds)} entries for {len(tokens)} tokens; the file is "
            "corrupt"
        )
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED]
    )
