"""Text to token ids and back, and conversations to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import tokenizers

from leadframe.errors import RequestError
from leadframe.tokenizer.chat_template import ChatTemplate, Message
from leadframe.tokenizer.pieces import spelling_of

_TOOL_USE: Final = "tool_use"
_DEFAULT: Final = "default"
_MAX_COMPILED: Final = 8
_MAX_ID: Final = 2**32


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What a model's files say about its tokenizer besides the vocabulary.

    Attributes:
      special_tokens: role → text, such as "bos_token" → "<s>"; templates may name them.
      chat_templates: name → Jinja text; "default" is the one that is used.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """A vocabulary with its rules.

    Safe to use from several threads.

    Args:
      backend: the vocabulary, merges and pre-tokenizer.
      config: special tokens and templates.

    Attributes:
      vocab_size: ids that the tokenizer knows, added tokens included.
      bos_token_id: the id that starts a text, if there is one.
      eos_token_id: the id that ends a text, if there is one.
      strips_first_space: decoding drops one space at the start of a whole text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._config = backend, config
        self._spelling = spelling_of(backend)
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self._compiled: dict[str, ChatTemplate] = {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.strips_first_space = self._spelling.strips_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
          text: special tokens that are spelled out in it become their ids.
          add_special_tokens: add what the model expects around a text, such as a first token.
        """
        # Unlike `encode`, the batch call lets other threads run, and it computes no offsets.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        pieces = [
            self.token_bytes(i)
            for i in token_ids
            if not (skip_special_tokens and self.is_special(i))
        ]
        text = b"".join(pieces).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Returns the ids of a conversation.

        The template writes every special token that the model expects, so none is added.

        Args:
          messages: what was said, each with a `role`.
          add_generation_prompt: end with the start of the answer.
          tools: JSON schemas of functions that the model may call.
          chat_template: Jinja text to use instead of the model's own.
          variables: what else the template may look at.

        Raises:
          RequestError: there is no template, or it refused or failed.
        """
        template = self._template(chat_template, bool(tools))
        text = template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return self.encode(text, add_special_tokens=False)

    @property
    def chat_template(self) -> str | None:
        """The model's own template, if it has one."""
        return self._config.chat_templates.get(_DEFAULT)

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a special token, which is not part of the text."""
        return token_id in self._special

    def special_token_id(self, text: str) -> int | None:
        """Returns the id of the special token that is spelled exactly so."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._special else None

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone; a part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text; none for an id that is not known."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < _MAX_ID else None
            if token is None:
                return b""
            piece = self._pieces[token_id] = self._spelling.piece(token)
        return piece

    def _id_of(self, role: str) -> int | None:
        text = self._config.special_tokens.get(role)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id

    def _template(self, given: str | None, has_tools: bool) -> ChatTemplate:
        templates = self._config.chat_templates
        own = templates.get(_TOOL_USE) if has_tools else None
        source = given or own or templates.get(_DEFAULT)
        if source is None:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or "
                "use /v1/completions",
                param="messages",
            )
        if source not in self._compiled:
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            self._compiled[source] = ChatTemplate(source, self._config.special_tokens)
        return self._compiled.get(source) or ChatTemplate(source, self._config.special_tokens)
