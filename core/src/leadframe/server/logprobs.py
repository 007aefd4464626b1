"""Log-probabilities in OpenAI's two shapes, and the extra one for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from leadframe.engine.outputs import TokenLogprobs
from leadframe.tokenizer import Detokenizer, Tokenizer

JsonObject = dict[str, object]


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> JsonObject:
    """Returns the `logprobs` object of a chat choice."""
    content = []
    for entry in entries:
        item = _chat_entry(tokenizer, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_chat_entry(tokenizer, t, lp) for t, lp in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> JsonObject:
    """`token` shows a part of a character as U+FFFD; `bytes` has what it really is."""
    text, data = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
    return {"token": text, "logprob": logprob, "bytes": data}


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completion choice, chunk by chunk.

    Args:
      tokenizer: names the tokens.
      context: tokens that come before the text of the choice.
      skip_special_tokens: special tokens take no room in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, list(context), skip_special_tokens)
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprobs]) -> JsonObject:
        """Returns the object for the next tokens.

        `text_offset` counts the characters that were whole before a token, from the start of
        the text, echo included.
        """
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([entry.token_id]))
        return {
            "tokens": [self._tokenizer.token_text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_top(self._tokenizer, entry) for entry in entries],
            "text_offset": offsets,
        }


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float] | None:
    """Maps texts to log-probabilities; where two tokens share a text the likelier one stays."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(tokenizer.token_text(token_id), logprob)
    return top


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]
) -> list[dict[str, JsonObject] | None]:
    """Returns one object a prompt token, keyed by token id; null for the first."""
    result: list[dict[str, JsonObject] | None] = []
    for entry in entries:
        if entry.logprob is None:
            result.append(None)
            continue
        ranked = [(t, lp, rank) for rank, (t, lp) in enumerate(entry.top, 1)]
        if entry.token_id not in {t for t, _, _ in ranked}:
            ranked.append((entry.token_id, entry.logprob, entry.rank or 0))
        result.append({str(t): _ranked(tokenizer, t, lp, rank) for t, lp, rank in ranked})
    return result


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> JsonObject:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
