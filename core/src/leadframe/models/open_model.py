"""Decides what runs a model: a native model file, or a library's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from leadframe.errors import UnsupportedModel
from leadframe.models.checkpoint import Checkpoint, open_checkpoint, sampleable
from leadframe.models.config_values import GENERATION, check_values
from leadframe.models.hf_config import (
    FAMILIES,
    read_generation,
    read_json,
    refuse_deep,
    refuse_quantised,
)
from leadframe.models.library_model import LibraryModel
from leadframe.models.locate import is_gguf, locate_model
from leadframe.models.safetensors_file import directory_weights
from leadframe.models.sources import NUMPY_DTYPES
from leadframe.platform.discovery import EntryPoint, find_entry_point, installed_entry_points
from leadframe.platform.version import MODEL_IMPL_GROUP

ModelImplName = Literal["auto", "leadframe", "transformers"]

_LIBRARY: Final = "transformers"
_WHOLE_DTYPES: Final = ("I64", "I32", "I16", "I8", "U8", "BOOL")
"""What safetensors calls element types of tables that are not weights."""


def open_model(
    path: str | Path | None = None,
    *,
    impl: ModelImplName = "auto",
    max_model_len: int | None = None,
    points: Sequence[EntryPoint] | None = None,
) -> Checkpoint:
    """Opens a model with the implementation that the user chose.

    Args:
      path: as for `open_checkpoint`.
      impl: "leadframe" takes native model files only, "transformers" Transformers' own code, "auto"
        a native file where there is one and else Transformers.
      max_model_len: the longest sequence that the user asks for.
      points: the model implementations to choose from; None looks for what is installed.

    Raises:
      ModelNotFound: nothing that looks like a model is there.
      UnsupportedModel: the model cannot be served, or not by that implementation.
      CheckpointError: a file is missing, damaged or inconsistent.
    """
    located = locate_model(path)
    if impl == "leadframe" or (impl == "auto" and (is_gguf(located) or _is_native(located))):
        return open_checkpoint(located, max_model_len=max_model_len)
    if is_gguf(located):
        raise UnsupportedModel(
            f"--model-impl transformers reads Hugging Face directories, and {located} is a GGUF "
            "file; leave it at auto, which serves GGUF files natively"
        )
    return _open_library(located, _reason(located, impl), points)


def _is_native(directory: Path) -> bool:
    return str(read_json(directory / "config.json").get("model_type")) in FAMILIES


def _reason(directory: Path, impl: ModelImplName) -> str:
    if impl == "transformers":
        return "--model-impl is transformers"
    model_type = str(read_json(directory / "config.json").get("model_type"))[:64]
    return (
        f"model type {model_type!r} has no native model file (there are {', '.join(FAMILIES)}), so "
        "Transformers' own model must run it"
    )


def _open_library(
    directory: Path, asked_for: str, points: Sequence[EntryPoint] | None
) -> Checkpoint:
    path = directory / "config.json"
    raw = read_json(path)
    refuse_quantised(raw)
    text = raw.get("text_config")
    raw_text = text if isinstance(text, dict) else raw
    refuse_deep(raw_text)
    for given in (raw, raw_text):
        check_values(given, {"eos_token_id": GENERATION["eos_token_id"]}, path)
    generation = read_generation(directory, raw, raw_text)
    total = _stored_bytes(directory)
    points = installed_entry_points(MODEL_IMPL_GROUP) if points is None else points
    point = find_entry_point(_LIBRARY, points)
    if point is None:
        raise UnsupportedModel(
            f"{asked_for}, and nothing that is installed can do so: it needs a backend whose "
            "arrays are torch's, such as leadframe-cpu"
        )
    impl = point.load()(directory)
    if not generation.eos_token_ids:
        generation = replace(generation, eos_token_ids=impl.facts.eos_token_ids)
    generation = sampleable(generation, impl.facts.vocab_size, directory)
    model = LibraryModel(impl, generation, total, asked_for)
    name = directory.resolve().name
    return Checkpoint(model, {}, directory, name, total, str(raw_text.get("dtype") or "float32"))


def _stored_bytes(directory: Path) -> int:
    """Returns the bytes of all weight files, whose headers are found to be sound.

    Raises:
      CheckpointError: they are missing, damaged or pickled.
      UnsupportedModel: a tensor has an element type that is not read.
    """
    stored = directory_weights(directory)
    for name, weight in stored.items():
        if weight.dtype not in NUMPY_DTYPES and weight.dtype not in _WHOLE_DTYPES:
            raise UnsupportedModel(
                f"{directory}: {name} has element type {weight.dtype}; supported are "
                f"{', '.join(NUMPY_DTYPES)} (quantised models are served from GGUF)"
            )
    return sum({w.file.path: w.file.num_bytes for w in stored.values()}.values())


def check_backend(checkpoint: Checkpoint, family: str, ranks: int) -> None:
    """Checks that a backend can run what was opened.

    Args:
      checkpoint: the model.
      family: the backend's arrays.
      ranks: the size of the tensor-parallel group.

    Raises:
      UnsupportedModel: it cannot.
    """
    model = checkpoint.model
    if not isinstance(model, LibraryModel):
        return
    if model.family != family:
        raise UnsupportedModel(
            f"{model.asked_for}; that needs a backend whose arrays are {model.family}'s, and this "
            f"device computes with {family}; choose another --device (`leadframe devices` lists "
            "them), or a model that has a native model file"
        )
    if ranks > 1:
        raise UnsupportedModel(
            f"{model.asked_for}; that runs on one device, and --tensor-parallel-size is {ranks}; "
            "set it to 1"
        )


def describe_impl(checkpoint: Checkpoint) -> str:
    """Says in a few words what runs a model."""
    architecture = checkpoint.model.info.architecture
    if isinstance(checkpoint.model, LibraryModel):
        return f"Transformers' {architecture}"
    return f"native {architecture}"
