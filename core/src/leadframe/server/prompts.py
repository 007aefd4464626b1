"""Text → token ids, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from leadframe.errors import PromptTooLong, RequestError
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
    """Tokenises prompts and renders chats in threads, so that the event loop stays free.

    Tokenising lets other threads run; reading and writing JSON does not, so that is done by one
    thread: the event loop then waits for one such piece of work at most.

    Args:
      tokenizer: the model's.
      max_model_len: a prompt that cannot fit it is refused here: at the latest before the engine
        looks at each of its tokens, and if it can be seen so before it is tokenised.
      chat_template: replaces the model's own.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, chat_template: str | None = None
    ) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * _longest_token(tokenizer)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="leadframe-text")
        self._json = ThreadPoolExecutor(1, thread_name_prefix="leadframe-json")

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._json.shutdown(wait=False, cancel_futures=True)

    async def run_json(self, fn: Callable[[], T]) -> T:
        """Runs a function that reads or writes a large body, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._json, fn)

    async def _run(self, fn: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn)

    async def completion(self, prompts: Sequence[Prompt], add_special: bool) -> list[ReadPrompt]:
        """Returns the prompts of a completion as token ids.

        Raises:
          RequestError: a prompt is empty.
          PromptTooLong: a prompt is longer than the context.
        """

        def read() -> list[ReadPrompt]:
            return [self._read(prompt, add_special) for prompt in prompts]

        if sum(map(len, prompts)) <= _INLINE_CHARS:
            return read()
        return await self._run(read)

    async def tokens(self, text: str, add_special: bool) -> list[int]:
        """Returns the ids of a text, without asking whether a request with them would fit.

        Raises:
          PromptTooLong: it is longer than anything that the context can hold.
        """
        self._check_chars(len(text), "prompt")
        return await self._run(lambda: self._tokenizer.encode(text, add_special))

    async def chat(self, body: ChatBody | TokenizeBody) -> ReadPrompt:
        """Renders a conversation with the chat template.

        Raises:
          RequestError: there is no template, or it refuses the conversation.
          PromptTooLong: the conversation is longer than the context.
        """
        messages = body.messages or []
        kwargs = body.chat_template_kwargs if isinstance(body, ChatBody) else {}
        size = sum(len(message.content or "") for message in messages)

        self._check_chars(size, "messages")

        def render() -> ReadPrompt:
            return ReadPrompt(self._render(messages, body.add_generation_prompt, kwargs))

        return render() if size <= _INLINE_CHARS else await self._run(render)

    def _read(self, prompt: Prompt, add_special: bool) -> ReadPrompt:
        if isinstance(prompt, str):
            self._check_chars(len(prompt), "prompt")
            read = ReadPrompt(self._tokenizer.encode(prompt, add_special), prompt)
        else:
            read = ReadPrompt(prompt)
        if not read.token_ids:
            raise RequestError("a prompt is empty; give at least one token", param="prompt")
        self._check_tokens(len(read.token_ids), "prompt")
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
        self._check_tokens(len(ids), "messages")
        return ids

    def _check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self._max_chars:
            raise PromptTooLong(
                f"the prompt has {num_chars} characters, more than {self._max_model_len} tokens, "
                "the context, can spell; shorten the prompt",
                param=param,
            )

    def _check_tokens(self, num_tokens: int, param: str) -> None:
        if num_tokens > self._max_model_len:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and the context holds {self._max_model_len}, "
                "prompt and output together; shorten the prompt",
                param=param,
            )


def _longest_token(tokenizer: Tokenizer) -> int:
    """Returns how many characters a token can stand for, with room for what is normalised away."""
    return 4 * max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
