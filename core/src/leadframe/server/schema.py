"""Request bodies. Types are strict, and a field that is not understood is refused by name.

Nothing is accepted and silently left out: a field of OpenAI's API is served, or is known to
change nothing (`IGNORED`), or is accepted only with the value that asks for nothing (`NEUTRAL`),
or is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from leadframe.platform.names import did_you_mean
from leadframe.sampling_params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from leadframe.server.fields import (
    INT32,
    INT64,
    MAX_BAD_WORDS,
    MAX_MESSAGES,
    MAX_N,
    MAX_PARTS,
    Count,
    FirstError,
    LogitBias,
    Name,
    Number,
    Prompts,
    Stop,
    TokenId,
    TokenIds,
    bad,
)
from leadframe.server.structured import ResponseFormat, StructuredField

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that concern accounts, storage or routing, never the output."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Fields that are not served, with the values that ask for nothing, as None always does."""

_NO_TOOLS = "tool calling is not served; leave it out"
_UNSERVED: Mapping[str, str] = {
    **dict.fromkeys(("function_call", "functions", "tool_call_id", "tool_choice"), _NO_TOOLS),
    **dict.fromkeys(("tool_calls", "tools"), _NO_TOOLS),
    **{
        f"guided_{kind}": f"use 'structured_outputs', such as {{\"{kind}\": ...}}"
        for kind in ("choice", "grammar", "json", "regex")
    },
    "chat_template": "start the server with --chat-template, or leave it out",
}
"""What to do about a field that is not served, where that is more than to leave it out."""

_KNOWN_UNSERVED = frozenset(
    {
        *NEUTRAL,
        *_UNSERVED,
        "audio",
        "continuous_usage_stats",
        "logprob_token_ids",
        "prediction",
        "reasoning_effort",
        "return_tokens_as_token_ids",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "verbosity",
        "web_search_options",
    }
)


class Body(BaseModel):
    """A request body. Fields beyond the declared ones are sorted out by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL

    @model_validator(mode="after")
    def _check_extra(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.ignored or self._asks_nothing(name, value):
                continue
            raise bad(_refusal(name, type(self)), name)
        return self

    def _asks_nothing(self, name: str, value: object) -> bool:
        if name == "length_penalty" and type(value) is float:
            return value == 1
        return any(type(value) is type(v) and value == v for v in self.neutral.get(name, ()))


def _refusal(name: str, model: type[Body]) -> str:
    shown = repr(name[:64])
    if name in _KNOWN_UNSERVED:
        which = "with this value" if name in model.neutral else ""
        advice = _UNSERVED.get(name, "leave it out")
        return f"parameter {shown} is not supported {which}".rstrip() + f"; {advice}"
    hint = did_you_mean(name[:64], model.model_fields) or "; leave it out"
    return f"unknown parameter {shown}{hint}"


class StreamOptions(Body):
    """What a stream carries besides tokens."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"continuous_usage_stats": (False,)}

    include_usage: bool = False


class SamplingBody(Body):
    """Fields that completions and chat share; ranges of numbers are checked by SamplingParams."""

    ignored: ClassVar[frozenset[str]] = IGNORED

    model: Name | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Stop | None = None
    stop_token_ids: (
        Annotated[list[TokenId], FirstError(), Field(max_length=MAX_STOP_TOKEN_IDS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], FirstError(), Field(max_length=1024)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1024)]],
            FirstError(),
            Field(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-INT32 - 1, le=INT32)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @property
    def num_choices(self) -> int:
        """Choices that each prompt gets."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options needs stream; set stream to true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs cannot be streamed; leave one out", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        if self.response_format is not None and self.structured_outputs is not None:
            raise bad("response_format and structured_outputs: give one", "structured_outputs")
        return self


class CompletionBody(SamplingBody):
    """The body of POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens is 0; it must be at least 1 unless echo is set", "max_tokens")
        return self


def _read_content(value: Any) -> str | None:
    """Joins the text parts of a message."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise bad(f"must be a string or a list of 1 to {MAX_PARTS} parts of type text")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = repr(kind)[:64]
            raise bad(f"part {index} has type {shown}; this model takes parts of type 'text'")
        if not isinstance(part.get("text"), str):
            raise bad(f"part {index} has no string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _read_role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise bad(f"is {value!r}, and tool calling is not served; give results as role 'user'")
    return value


class Message(Body):
    """One message of a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"tool_calls": ([],)}

    role: Annotated[
        Literal["system", "developer", "user", "assistant"], BeforeValidator(_read_role)
    ]
    content: Annotated[str | None, BeforeValidator(_read_content)] = None
    name: Name | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None:
            raise bad("content is missing; it must be a string or parts of type text")
        return self

    def for_template(self) -> dict[str, str]:
        """Returns the message as chat templates know it; "developer" is "system" to them."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        return message if self.name is None else {**message, "name": self.name}


Messages = Annotated[list[Message], FirstError(), Field(min_length=1, max_length=MAX_MESSAGES)]
TemplateValue = bool | Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | float | str | None
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "messages",
        "return_dict",
        "self",
        "tokenize",
        "tools",
    }
)


def _read_template_kwargs(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > 32:
        raise bad("must be an object of at most 32 values")
    for key, item in value.items():
        if not key.isidentifier() or key.startswith("_") or key in _RESERVED_KWARGS:
            raise bad(f"has the key {key[:64]!r}, which a request may not set")
        if not isinstance(item, bool | int | float | str | None) or len(str(item)) > 1024:
            raise bad(f"{key[:64]!r} must be a string, a number, a boolean or null")
    return value


class ChatBody(SamplingBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[
        dict[str, TemplateValue], BeforeValidator(_read_template_kwargs)
    ] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        if 0 in (self.max_tokens, self.max_completion_tokens):
            raise bad("max_completion_tokens is 0; it must be at least 1", "max_tokens")
        return self

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None fills the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TokenizeBody(Body):
    """The body of POST /tokenize: text, or messages that the chat template renders."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise bad("give either prompt or messages", "prompt")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: Name | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
