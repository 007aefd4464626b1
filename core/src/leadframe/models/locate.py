"""Finds the model that a user named. Nothing is ever downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from leadframe.errors import CheckpointError, ModelNotFound
from leadframe.models.default_model import default_model_path

_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")


def locate_model(path: str | Path | None) -> Path:
    """Returns the `.gguf` file or the Hugging Face directory that `path` means.

    Raises:
      ModelNotFound: there is none.
      CheckpointError: the path is a single weight file that cannot be served.
    """
    if path is None:
        return default_model_path()
    given = Path(path).expanduser()
    if given.is_dir():
        return _in_directory(given)
    if given.is_file():
        return _as_file(given)
    cached = _cached_snapshot(str(path))
    if cached is not None:
        return _in_directory(cached)
    raise ModelNotFound(_absent(str(path)))


def is_gguf(path: Path) -> bool:
    """Whether a located model is a GGUF file."""
    return path.is_file()


def pickled_weights(directory: Path) -> list[Path]:
    """Lists weight files of formats that can run code when they are read."""
    return sorted(file for pattern in _PICKLES for file in directory.glob(pattern))


def _in_directory(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    has_config = (directory / "config.json").exists()
    if has_config and (not files or any(directory.glob("*.safetensors"))):
        return directory
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise ModelNotFound(f"{directory} holds {len(files)} GGUF files; name one of {names}")
    raise ModelNotFound(f"{directory} is not a model: it has no config.json and no .gguf file")


def _as_file(file: Path) -> Path:
    if file.suffix == ".gguf":
        return file
    if _starts_with(file, b"GGUF"):
        return file
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file} is one weight file; name its directory, {file.parent}")
    raise CheckpointError(
        f"{file} is not a GGUF file; models are .gguf files or Hugging Face directories with "
        "safetensors (pickled weights are refused: they can run code)"
    )


def _starts_with(file: Path, magic: bytes) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(magic)) == magic
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _absent(path: str) -> str:
    if _REPOSITORY.fullmatch(path):
        return (
            f"there is no directory {path!r}, and no complete copy of a repository of that name in "
            "the local Hugging Face cache; only local models are served and nothing is "
            f"downloaded: run `hf download {path}` first, or name a path"
        )
    return f"there is no model at {path!r}; name a Hugging Face directory or a .gguf file"


def _cached_snapshot(name: str) -> Path | None:
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        return None
    # Here and not at the top: nobody who names a path pays for it.
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # its stricter rules for names
        return None
    return Path(found).parent if isinstance(found, str) else None
