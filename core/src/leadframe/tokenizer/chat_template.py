"""Renders chat templates: programs out of a model's files, run in Jinja's immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from leadframe.errors import RequestError

MAX_PROMPT_CHARS: Final = 16 << 20
"""Where rendering stops: far above any context, far below what would exhaust memory."""

Message = Mapping[str, Any]


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks assistant text for training and adds nothing."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, closed to names that reach into Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_attribute(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


class ChatTemplate:
    """One compiled template.

    Args:
      source: Jinja text.
      tokens: special tokens that templates name, such as `bos_token`.

    Raises:
      RequestError: it is not a valid template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Jinja's parser, or Python's compiler behind it
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise RequestError(
                f"the chat template is not valid: {where}{str(error)[:300]}",
                param="chat_template",
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """Returns the text of a conversation.

        Raises:
          RequestError: the template refused the messages or failed on them, or the text is
            longer than `MAX_PROMPT_CHARS`.
        """
        context = {
            **self._tokens,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _bounded(self._template, context)
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything that Python can
            reason = f"{type(error).__name__}: {error}"[:500]
            raise RequestError(
                f"the chat template failed on these messages ({reason})", param="messages"
            ) from error


def _bounded(template: jinja2.Template, context: Mapping[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(context):
        size += len(part)
        if size > MAX_PROMPT_CHARS:
            raise RequestError(
                f"the chat template produced more than {MAX_PROMPT_CHARS:,} characters; send "
                "shorter messages",
                param="messages",
            )
        parts.append(part)
    return "".join(parts)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum")
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
