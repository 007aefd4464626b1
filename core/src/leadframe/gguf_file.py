"""Reads the header of a GGUF file: metadata, and where each tensor's bytes are.

The whole header is validated against the length of the file before anything is used, so that a
truncated or corrupt file is an error here and never a fault later. The reader of the `gguf`
package takes seconds for the strings of a vocabulary; this one takes milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from leadframe.errors import CheckpointError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMS: Final = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and how it is stored.

    Attributes:
      name: llama.cpp's name.
      shape: outermost dimension first, as NumPy writes it.
      type_name: the GGML type, such as "Q4_1".
      offset: first byte, from the start of the file.
      num_bytes: bytes that it takes.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A validated header.

    Attributes:
      path: the file.
      metadata: key → number, bool, string or list.
      tensors: name → where it is.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset = path, data, 0

    def take(self, size: int) -> int:
        """Moves past `size` bytes and returns where they start."""
        start = self.offset
        if size > len(self.data) - start:
            raise CheckpointError(
                f"{self.path} ends inside its header: {size:,} bytes wanted at {start:,}, the file "
                f"has {len(self.data):,}; incomplete download? fetch it again"
            )
        self.offset = start + size
        return start

    def scalar(self, code: str) -> Any:
        """Reads one number."""
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """Reads one string."""
        size = self.scalar("<Q")
        start = self.take(size)
        return self._decode(start, start + size)

    def texts(self, count: int) -> list[str]:
        """Reads `count` strings; this loop is most of the time that opening a file takes."""
        self.take(8 * count)
        self.offset -= 8 * count
        data, offset, limit, out = self.data, self.offset, len(self.data), []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = offset + 8
            if end <= limit:
                end += length_at(data, offset)[0]
            if end > limit:
                self.offset = offset
                self.take(end - offset)
            out.append(data[offset + 8 : end])
            offset = end
        self.offset = offset
        try:
            return [raw.decode("utf-8") for raw in out]
        except UnicodeDecodeError as error:
            raise self._not_text(offset) from error

    def value(self, kind: int) -> Any:
        """Reads one metadata value of a type code."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        raise CheckpointError(
            f"{self.path} has a metadata value of unknown type {kind} at byte {self.offset:,}; the "
            "file is corrupt, or newer than this reader"
        )

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return self.texts(count)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.take(struct.calcsize(code) * count)
            return list(struct.unpack_from(f"<{count}{code[1]}", self.data, start))
        raise CheckpointError(f"{self.path} has a nested array in its metadata; not supported")

    def _decode(self, start: int, end: int) -> str:
        try:
            return self.data[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._not_text(start) from error

    def _not_text(self, offset: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} has a string that is not UTF-8 before byte {offset:,}; it is corrupt"
        )


def read_gguf(path: Path) -> GGUFFile:
    """Reads and validates the header of a GGUF file.

    Raises:
      CheckpointError: it is not a GGUF file, is truncated or corrupt, or is one part of several.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(
                    f"{path} is not a GGUF file: it does not start with {MAGIC!r}"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(path, data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    cursor.take(4)
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path} has GGUF version {version}; versions {VERSIONS[0]} to {VERSIONS[-1]}, little "
            "endian, are supported: convert it again with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = _metadata(path, cursor, num_keys)
    if metadata.get("split.count", 1) != 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts; merge them first with "
            "`llama-gguf-split --merge`"
        )
    raw = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path} has alignment {alignment!r}; the file is corrupt")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {info.name: info for info in _located(path, raw, start, len(cursor.data))}
    if len(tensors) != len(raw):
        raise CheckpointError(f"{path} has a tensor of the same name twice; the file is corrupt")
    return GGUFFile(path, metadata, tensors)


def _metadata(path: Path, cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        value = cursor.value(cursor.scalar("<I"))
        if key in metadata:
            raise CheckpointError(f"{path} has the key {key!r} twice; the file is corrupt")
        metadata[key] = value
    return metadata


_TensorHeader = tuple[str, tuple[int, ...], int, int]


def _tensor_header(cursor: _Cursor) -> _TensorHeader:
    name, num_dims = cursor.text(), cursor.scalar("<I")
    if num_dims > _MAX_DIMS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has {num_dims} dimensions, the limit is {_MAX_DIMS}; "
            "the file is corrupt"
        )
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")


def _located(
    path: Path, headers: list[_TensorHeader], start: int, file_bytes: int
) -> Iterator[TensorInfo]:
    # Here and not at the top: the `gguf` package costs 80 ms, which a tokenizer need not pay twice.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for name, shape, type_code, offset in headers:
        try:
            kind = GGMLQuantizationType(type_code)
        except ValueError:
            raise CheckpointError(
                f"{path}: tensor {name!r} has unknown type {type_code}; update the `gguf` package"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise CheckpointError(
                f"{path}: tensor {name!r} has rows of {shape[-1]} elements, not a multiple of "
                f"{block} as {kind.name} needs; the file is corrupt"
            )
        info = TensorInfo(
            name, shape, kind.name, start + offset, prod(shape) // block * block_bytes
        )
        if info.offset + info.num_bytes > file_bytes:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends at byte "
                f"{info.offset + info.num_bytes:,}, the file has {file_bytes:,}; incomplete "
                "download? fetch it again"
            )
        yield info
