"""Opens a model: finds its files, describes it, and matches every weight before any is read.

Everything that can be wrong with a checkpoint is found here, from headers alone, before a byte
of device memory is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from leadframe.gguf_file import read_gguf
from leadframe.models.coverage import Found, cover, settle_tie, split_fused, text_names
from leadframe.models.gguf_config import gguf_architecture, gguf_generation, read_gguf_config
from leadframe.models.hf_config import read_hf_config
from leadframe.models.info import GenerationDefaults
from leadframe.models.locate import is_gguf, locate_model
from leadframe.models.model import DecoderModel, Model
from leadframe.models.safetensors_file import directory_weights
from leadframe.models.sources import StoredWeight
from leadframe.models.spec import DecoderSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, ready to be loaded.

    Attributes:
      model: its mathematics.
      sources: parameter name → where to read it; tied parameters share one source.
      tokenizer_path: the directory or GGUF file, for `load_tokenizer`.
      name: what to call the model when the user gives it no name.
      total_bytes: bytes in files of all weights that will be read.
      default_dtype: the element type that the authors saved, as a hint.
    """

    model: Model
    sources: Mapping[str, StoredWeight]
    tokenizer_path: Path
    name: str
    total_bytes: int
    default_dtype: str


def open_checkpoint(
    path: str | Path | None = None, *, max_model_len: int | None = None
) -> Checkpoint:
    """Opens a Hugging Face directory, a GGUF file, or the embedded default model.

    Args:
      path: a directory, a `.gguf` file, or the name of a repository that the local Hugging Face
        cache holds; None takes the default model.
      max_model_len: the longest sequence that the user asks for. Only models whose rotary
        frequencies depend on it look at it.

    Raises:
      ModelNotFound: nothing that looks like a model is there.
      UnsupportedModel: the model cannot be served.
      CheckpointError: a file is missing, damaged or inconsistent.
    """
    located = locate_model(path)
    if is_gguf(located):
        return _open_gguf(located)
    return _open_directory(located, max_model_len)


def _open_directory(directory: Path, max_model_len: int | None) -> Checkpoint:
    config = read_hf_config(directory, max_model_len)
    stored = text_names(directory_weights(directory))
    spec, found = settle_tie(config.spec, split_fused(config.spec, stored))
    name = directory.resolve().name
    return _checkpoint(directory, name, spec, found, config.generation, config.dtype)


def _open_gguf(path: Path) -> Checkpoint:
    # Here and not at the top: only GGUF models pay for the `gguf` package.
    from leadframe.models.gguf_weights import (
        ROPE_FACTORS,
        check_dequantizable,
        gguf_sources,
        rope_factors,
    )

    file = read_gguf(path)
    spec = read_gguf_config(file, rope_factors(file))
    check_dequantizable(file)
    found = gguf_sources(file, gguf_architecture(file), spec)
    found.pop(ROPE_FACTORS, None)
    return _checkpoint(path, path.stem, spec, found, gguf_generation(file), "float32")


def _checkpoint(
    path: Path,
    name: str,
    spec: DecoderSpec,
    found: Found,
    generation: GenerationDefaults,
    dtype: str,
) -> Checkpoint:
    sources = cover(path, spec, found)
    total = sum(source.num_bytes for source in {id(s): s for s in sources.values()}.values())
    model = DecoderModel(spec, sampleable(generation, spec.vocab_size, path), total)
    return Checkpoint(model, sources, path, name, total, dtype)


def sampleable(generation: GenerationDefaults, vocab_size: int, path: Path) -> GenerationDefaults:
    """Leaves out end-of-sequence ids that have no logit: none of them can ever be sampled."""
    ids = generation.eos_token_ids
    kept = tuple(i for i in ids if 0 <= i < vocab_size)
    if kept != ids:
        logger.warning(
            "%s: eos_token_id is %s; ids outside [0, %d) end nothing and are left out",
            path,
            list(ids),
            vocab_size,
        )
    return replace(generation, eos_token_ids=kept)
