"""Loads the tokenizer of a model directory or of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import tokenizers

from leadframe.errors import CheckpointError, ModelNotFound
from leadframe.gguf_file import read_gguf
from leadframe.tokenizer.gguf_vocabulary import build_gguf_tokenizer
from leadframe.tokenizer.tokenizer import Tokenizer, TokenizerConfig

_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: a directory with `tokenizer.json` or another file that Transformers knows, or a GGUF
        file.
      chat_template: Jinja text that replaces the model's own.

    Raises:
      ModelNotFound: there is no tokenizer.
      CheckpointError: its files are damaged.
      UnsupportedModel: its kind is not implemented.
    """
    path = Path(path)
    if path.is_file():
        backend, config = build_gguf_tokenizer(read_gguf(path).metadata)
    else:
        backend, config = _from_directory(path)
    if chat_template is not None:
        config = replace(config, chat_templates={"default": chat_template})
    return Tokenizer(backend, config)


def _from_directory(directory: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    settings = _json(directory / "tokenizer_config.json")
    settings = {**_json(directory / "special_tokens_map.json"), **settings}
    roles = {role: text for role in _ROLES if (text := _text(settings.get(role))) is not None}
    file = directory / "tokenizer.json"
    if file.exists():
        backend = _from_file(file)
        _mark_special(backend, roles.values())
    else:
        backend = _through_transformers(directory)
    return backend, TokenizerConfig(roles, _templates(directory, settings))


def _from_file(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _through_transformers(directory: Path) -> tokenizers.Tokenizer:
    # Here and not at the top: it takes seconds, and only old models need it.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            directory, use_fast=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a converter of some old format raises
        raise ModelNotFound(
            f"{directory} has no tokenizer.json, and no other tokenizer could be loaded: "
            f"{str(error)[:300]}"
        ) from error
    backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    return backend


def _json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    """A token is written as its text, or as an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Tokens with a role are special even where tokenizer.json does not say so."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys(texts)
            if text not in special and backend.token_to_id(text) is not None
        ]
    )


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Newer places win over older ones, as in Transformers."""
    templates: dict[str, str] = {}
    for given in (
        settings.get("chat_template"),
        _json(directory / "chat_template.json").get("chat_template"),
    ):
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            templates.update({entry["name"]: entry["template"] for entry in given})
    file = directory / "chat_template.jinja"
    if file.exists():
        templates["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates
