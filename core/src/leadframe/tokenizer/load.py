"""Loads the tokenizer of a model directory or of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import tokenizers

from leadframe.errors import CheckpointError, ModelNotFound
from leadframe.gguf_file import read_gguf
from leadframe.tokenizer.gguf_vocabulary import build_gguf_tokenizer, surround
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
    texts = _special_texts({**_json(directory / "special_tokens_map.json"), **settings})
    file = directory / "tokenizer.json"
    if file.exists():
        backend = _from_file(file)
        _mark_special(backend, texts)
        if "add_bos_token" in settings or "add_eos_token" in settings:
            first = texts.get("bos_token") if settings.get("add_bos_token") else None
            last = texts.get("eos_token") if settings.get("add_eos_token") else None
            surround(backend, first, last)
    else:
        backend = _through_transformers(directory)
    return backend, TokenizerConfig(texts, _templates(directory, settings))


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


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for role in _ROLES:
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[role] = text
    return texts


def _mark_special(backend: tokenizers.Tokenizer, texts: Mapping[str, str]) -> None:
    """Tokens with a role are special even where tokenizer.json does not say so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys(texts.values())
            if text not in known and backend.token_to_id(text) is not None
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
