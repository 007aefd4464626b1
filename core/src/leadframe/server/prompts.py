"""Text → token ids, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from leadframe.errors import RequestError
from leadframe.server.fields import Prompt
from leadframe.server.schema import ChatBody, Message, TokenizeBody
from leadframe.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_CHARS = 4096
"""A text this short is tokenised sooner than a thread is woken."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the engine takes it.

    Attributes:
      token_ids: at least one.
      text: what the client sent, when it was text.
    """

    token_ids: list[int]
    text: str | None = None


class PromptReader:
    """Tokenises prompts and renders chats in a small pool of threads.

    Args:
      tokenizer: the model's.
      chat_template: replaces the model's own.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="leadframe-text")

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, fn: Callable[[], T]) -> T:
        """Runs a function in the pool, so that the event loop stays free."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn)

    async def completion(self, prompts: Sequence[Prompt], add_special: bool) -> list[ReadPrompt]:
        """Returns the prompts of a completion as token ids.

        Raises:
          RequestError: a prompt is empty.
        """

        def read() -> list[ReadPrompt]:
            return [self._read(prompt, add_special) for prompt in prompts]

        if sum(map(len, prompts)) <= _INLINE_CHARS:
            return read()
        return await self.run(read)

    async def chat(self, body: ChatBody | TokenizeBody) -> ReadPrompt:
        """Renders a conversation with the chat template.

        Raises:
          RequestError: there is no template, or it refuses the conversation.
        """
        messages = body.messages or []
        kwargs = body.chat_template_kwargs if isinstance(body, ChatBody) else {}
        size = sum(len(message.content or "") for message in messages)

        def render() -> ReadPrompt:
            return ReadPrompt(self._render(messages, body.add_generation_prompt, kwargs))

        return render() if size <= _INLINE_CHARS else await self.run(render)

    def _read(self, prompt: Prompt, add_special: bool) -> ReadPrompt:
        if isinstance(prompt, str):
            read = ReadPrompt(self._tokenizer.encode(prompt, add_special), prompt)
        else:
            read = ReadPrompt(prompt)
        if not read.token_ids:
            raise RequestError("a prompt is empty; give at least one token", param="prompt")
        return read

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            chat_template=self._chat_template,
            **kwargs,
        )
        if not ids:
            raise RequestError("the chat template made no token", param="messages")
        return ids
