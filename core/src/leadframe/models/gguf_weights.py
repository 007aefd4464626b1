"""Weights of a GGUF file under their Hugging Face names, dequantised when they are read.

A GGUF file is not a copy of the checkpoint: llama.cpp renames every tensor, permutes the rows
of q and k for its own rotation and shifts Gemma's norms. Each is undone here, per architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from leadframe.errors import UnsupportedModel
from leadframe.gguf_file import GGUFFile, TensorInfo
from leadframe.models.gguf_blocks import weight_blocks
from leadframe.models.gguf_config import Architecture
from leadframe.models.sources import Index, MappedFile, PlainWeight, StoredWeight, whole_index
from leadframe.models.spec import EMBED, FINAL_NORM, LM_HEAD, DecoderSpec, layer_prefix
from leadframe.platform.backend import WeightBlocks

ROPE_FACTORS: Final = "rope_freqs.weight"

_PLAIN: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GROUP_BLOCKS: Final = 2048
"""Blocks dequantised at a time: enough to amortise NumPy's calls, few enough to stay in cache."""

_TOP: Final = {
    "token_embd.weight": EMBED,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix of quantised blocks along its last axis.

    Attributes:
      file: where it is.
      info: its place, shape and type.
    """

    file: MappedFile
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape once dequantised."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """What `read` returns."""
        return "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.info.num_bytes

    def read(self, index: Index | None = None) -> npt.NDArray[Any]:
        """Dequantises the blocks that a slice covers, and no others."""
        return self.read_rows(None, index)

    def read_rows(
        self, order: npt.NDArray[np.int64] | None, index: Index | None
    ) -> npt.NDArray[Any]:
        """Like `read`, of the weight whose row i is row order[i] of this one."""
        kind = GGMLQuantizationType[self.info.type_name]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        columns = whole_index(self.shape, index)[-1]
        raw = self._raw(order, index)
        values = _dequantize(raw, kind, block_bytes).reshape(*raw.shape[:-1], -1)
        start = columns.start - columns.start // block * block
        return values[..., start : start + len(columns) * columns.step : columns.step]

    def read_blocks(self, index: Index | None = None) -> WeightBlocks | None:
        """Reads a slice as integers, scales and offsets, if it is made of whole blocks."""
        return self.blocks_of_rows(None, index)

    def blocks_of_rows(
        self, order: npt.NDArray[np.int64] | None, index: Index | None
    ) -> WeightBlocks | None:
        """Like `read_blocks`, of the weight whose row i is row order[i] of this one."""
        block = GGML_QUANT_SIZES[GGMLQuantizationType[self.info.type_name]][0]
        columns = whole_index(self.shape, index)[-1]
        if len(self.shape) != 2 or columns.start % block or len(columns) % block:
            return None
        return weight_blocks(self._raw(order, index), self.info.type_name)

    def _raw(
        self, order: npt.NDArray[np.int64] | None, index: Index | None
    ) -> npt.NDArray[np.uint8]:
        """The stored blocks that a slice touches, [..., bytes]."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.info.type_name]]
        *lead, columns = whole_index(self.shape, index)
        raw = self.file.view(self.info.offset, self.info.num_bytes)
        raw = raw.reshape(*self.shape[:-1], -1)
        first, last = columns.start // block, -(-columns.stop // block)
        raw = raw[..., first * block_bytes : last * block_bytes]
        for axis, rows in enumerate(lead):
            wanted = slice(rows.start, rows.stop, rows.step)
            if axis == 0 and order is not None:
                raw = raw[order[wanted]]
            else:
                raw = raw[(slice(None),) * axis + (wanted,)]
        return raw


def _dequantize(
    raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, block_bytes: int
) -> npt.NDArray[np.float32]:
    """Dequantises whole blocks; float32, flat.

    `gguf` works on 16 rows at a time, so the rows it is shown decide how much that is.
    """
    blocks = np.ascontiguousarray(raw).reshape(-1, block_bytes)
    width = _GROUP_BLOCKS // 16
    whole = len(blocks) // width * width
    parts = [blocks[:whole].reshape(-1, width * block_bytes), blocks[whole:].reshape(1, -1)]
    done = [quants.dequantize(part, kind).reshape(-1) for part in parts if part.size]
    return done[0] if len(done) == 1 else np.concatenate(done)


@dataclass(frozen=True, slots=True)
class PermutedWeight:
    """A weight, or a bias, whose rows llama.cpp reordered.

    Attributes:
      stored: what is in the file.
      order: row i of this weight is row order[i] of `stored`.
    """

    stored: PlainWeight | QuantizedWeight
    order: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """What `read` returns."""
        return self.stored.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.stored.num_bytes

    def read(self, index: Index | None = None) -> npt.NDArray[Any]:
        """Gathers the rows of a slice."""
        if isinstance(self.stored, QuantizedWeight):
            return self.stored.read_rows(self.order, index)
        rows, *rest = index or (slice(None),)
        gathered = self.stored.read()[self.order[rows]]
        return gathered[(slice(None), *rest)]

    def read_blocks(self, index: Index | None = None) -> WeightBlocks | None:
        """Like `read`, as integers, scales and offsets."""
        if not isinstance(self.stored, QuantizedWeight):
            return None
        return self.stored.blocks_of_rows(self.order, index)


@dataclass(frozen=True, slots=True)
class ShiftedWeight:
    """A norm weight that was written with a constant added.

    Attributes:
      stored: what is in the file.
      shift: what was added.
    """

    stored: PlainWeight | QuantizedWeight
    shift: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """What `read` returns."""
        return "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.stored.num_bytes

    def read(self, index: Index | None = None) -> npt.NDArray[Any]:
        """Returns the slice without the shift."""
        return self.stored.read(index).astype(np.float32) - np.float32(self.shift)


def gguf_sources(file: GGUFFile, arch: Architecture, spec: DecoderSpec) -> dict[str, StoredWeight]:
    """Returns every tensor of the file under its Hugging Face name, or its own if it has none."""
    mapped = MappedFile(file.path)
    sources: dict[str, StoredWeight] = {}
    for info in file.tensors.values():
        name = hf_name(info.name, spec.sandwich_norms)
        stored = _stored(mapped, info)
        source: StoredWeight = stored
        heads = _rotated_heads(name, spec) if arch.permuted else None
        if heads is not None:
            source = PermutedWeight(stored, _hf_row_order(info.shape[0], heads))
        elif arch.norm_shift and "norm." in name:
            source = ShiftedWeight(stored, arch.norm_shift)
        sources[name] = source
    return sources


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """Reads the divisors of the rotary frequencies, which Llama 3.1 files carry as a tensor."""
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    values = _stored(MappedFile(file.path), info).read().astype(np.float64)
    return tuple(values.reshape(-1).tolist())


def hf_name(name: str, sandwich_norms: bool) -> str:
    """Returns the Hugging Face name of a GGUF tensor; the same name if it has none."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    index, leaf, kind = match.groups()
    table: Mapping[str, str] = {**_LAYER, **_SANDWICH} if sandwich_norms else _LAYER
    return f"{layer_prefix(int(index))}{table[leaf]}.{kind}" if leaf in table else name


def _stored(mapped: MappedFile, info: TensorInfo) -> PlainWeight | QuantizedWeight:
    if info.type_name in _PLAIN:
        return PlainWeight(mapped, info.offset, info.shape, _PLAIN[info.type_name])
    return QuantizedWeight(mapped, info)


def check_dequantizable(file: GGUFFile) -> None:
    """Checks that every element type in the file can be read.

    Raises:
      UnsupportedModel: one cannot.
    """
    for kind in {info.type_name for info in file.tensors.values()} - set(_PLAIN):
        block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
        try:
            quants.dequantize(np.zeros((1, block_bytes), np.uint8), GGMLQuantizationType[kind])
        except NotImplementedError:
            raise UnsupportedModel(
                f"{file.path} has tensors of type {kind}, which the `gguf` package cannot read; "
                "choose another quantisation of the model"
            ) from None


def _rotated_heads(name: str, spec: DecoderSpec) -> int | None:
    if ".self_attn.q_proj." in name:
        return spec.num_heads
    return spec.num_kv_heads if ".self_attn.k_proj." in name else None


def _hf_row_order(num_rows: int, heads: int) -> npt.NDArray[np.int64]:
    """llama.cpp pairs rows 2i and 2i + 1 of a head, Hugging Face rows i and i + R/2."""
    rows = np.arange(num_rows).reshape(heads, -1, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
