"""Reads safetensors files and directories: headers, consistency, and lazily the tensors.

The format is eight bytes of header length, a JSON header, and the data. It is parsed here
because a weight must be a view of the mapped file: what a rank does not need is never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from leadframe.errors import CheckpointError
from leadframe.models.locate import pickled_weights
from leadframe.models.sources import NUMPY_DTYPES, MappedFile, PlainWeight

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES: Final = 100 << 20


def directory_weights(directory: Path) -> dict[str, PlainWeight]:
    """Lists every tensor that a directory's `model.safetensors`, or its index, names.

    Raises:
      CheckpointError: there are no weights, a shard is missing or damaged, or the weights are
        pickled.
    """
    if (directory / SINGLE).exists():
        return read_safetensors(directory / SINGLE)
    if (directory / INDEX).exists():
        return _sharded(directory)
    pickles = pickled_weights(directory)
    if pickles:
        raise CheckpointError(
            f"{directory} has pickled weights only ({pickles[0].name}); they can run code and are "
            "refused: save the model again with `save_pretrained`, which writes safetensors"
        )
    raise CheckpointError(
        f"{directory} has no weights: neither {SINGLE} nor {INDEX}; incomplete download?"
    )


def _sharded(directory: Path) -> dict[str, PlainWeight]:
    weight_map = _weight_map(directory / INDEX)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of {len(shards)} weight files: "
            f"{', '.join(missing[:8])}; incomplete download? fetch it again"
        )
    opened = {name: read_safetensors(directory / name) for name in shards}
    absent = sorted(name for name, shard in weight_map.items() if name not in opened[shard])
    if absent:
        raise CheckpointError(
            f"{directory / INDEX} lists tensors that their files lack: {', '.join(absent[:8])} "
            f"({len(absent)} in all); the checkpoint is inconsistent: fetch it again"
        )
    return {name: opened[shard][name] for name, shard in weight_map.items()}


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if any(Path(shard).name != shard for shard in weight_map.values()):
            raise ValueError("a shard lies outside the directory")
        return dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error}") from error


def read_safetensors(path: Path) -> dict[str, PlainWeight]:
    """Opens one file and checks that its header and its length agree.

    Raises:
      CheckpointError: it is truncated or corrupt.
    """
    try:
        size = path.stat().st_size
        if size < 8:
            raise CheckpointError(f"{path} has {size} bytes: it is truncated; fetch it again")
        file = MappedFile(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    header_bytes = int.from_bytes(file.view(0, 8).tobytes(), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path} announces a header of {header_bytes:,} bytes and has {size:,} in all; it is "
            "truncated or not a safetensors file: fetch it again"
        )
    entries = _entries(path, file.view(8, header_bytes).tobytes())
    start = 8 + header_bytes
    return {name: _weight(file, start, name, entry) for name, entry in entries.items()}


def _entries(path: Path, header: bytes) -> Mapping[str, Any]:
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise CheckpointError(f"{path} has a header that is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object")
    entries.pop("__metadata__", None)
    return entries


def _weight(file: MappedFile, start: int, name: str, entry: Any) -> PlainWeight:
    try:
        kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path}: tensor {name!r} has a broken header entry") from error
    dtype = _DTYPES.get(kind, kind)
    wanted = prod(shape) * NUMPY_DTYPES[dtype].itemsize if kind in _DTYPES else end - begin
    if min((begin, end - begin, *shape)) < 0 or end - begin != wanted:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} of shape {shape} and type {kind} needs {wanted:,} bytes "
            f"and is given {end - begin:,}; the file is corrupt"
        )
    if start + end > file.num_bytes:
        raise CheckpointError(
            f"{file.path} is truncated: tensor {name!r} ends at byte {start + end:,}, the file has "
            f"{file.num_bytes:,}; incomplete download? fetch it again"
        )
    return PlainWeight(file, start + begin, shape, dtype)
