"""Times an attention kernel on the device, on a batch made for the purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from leadframe.platform.batch import Bucket, StepArrays
from leadframe.platform.capabilities import AttnParams
from leadframe_triton import attention
from leadframe_triton.arch import Arch
from leadframe_triton.launch import LaunchContext, TileKey, current_device
from leadframe_triton.tiles import Tile

_KV_HEADS: Final = 8
_WARM_UPS: Final = 3
_REPEATS: Final = 10
_LAUNCHES: Final = 8
"""Launches in a row, timed together: the host takes about as long to launch a kernel as a device
to run it, and only behind another one does that not count."""
_WINDOW: Final = 1024


@dataclass(frozen=True, slots=True)
class Load:
    """A batch of equal rows.

    Attributes:
      rows: sequences.
      new_tokens: tokens of each in this step.
      context: keys of each after this step.
      is_decode: rows of one token that the decode kernel takes.
    """

    rows: int
    new_tokens: int
    context: int
    is_decode: bool


LOADS: Final = {"decode": Load(32, 1, 2048, True), "ragged": Load(2, 1024, 2048, False)}


def arrays_of(load: Load, block_size: int, device: torch.device) -> StepArrays:
    """The step arrays of a load, with blocks in a shuffled order as in a running server."""
    per_row = -(-load.context // block_size)
    tokens = load.rows * load.new_tokens
    order = torch.randperm(load.rows * per_row, generator=torch.Generator().manual_seed(0))
    table = (order.to(torch.int32) + 1).view(load.rows, per_row).to(device)
    position = torch.arange(load.context - load.new_tokens, load.context, dtype=torch.int32)
    positions = position.repeat(load.rows).to(device)
    row = torch.arange(load.rows, device=device).repeat_interleave(load.new_tokens)
    block = table[row, positions.long() // block_size]
    decodes = load.rows if load.is_decode else 0
    start = torch.arange(load.rows + 1, dtype=torch.int32, device=device) * load.new_tokens
    lens = torch.full((load.rows,), load.context, dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    return StepArrays(
        bucket=Bucket(tokens, load.rows, decodes, per_row, 0, "skip"),
        query_start=start,
        seq_lens=lens,
        block_table=table,
        slots=(block * block_size + positions % block_size).to(torch.int32),
        positions=positions,
        token_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
        logits_idx=nothing,
    )


def cache_of(load: Load, shape: tuple[int, int, int], dtype: torch.dtype, device: Any) -> Tensor:
    """A KV layer that holds a load; shape is (block_size, kv_heads, head_dim)."""
    blocks = load.rows * -(-load.context // shape[0]) + 1
    return torch.randn((2, blocks, *shape), device=device, dtype=torch.float32).to(dtype)


class DeviceTimer:
    """Times one tile on a device with its own events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def __call__(self, arch: Arch, key: TileKey, tile: Tile) -> float:
        """Returns the seconds of a launch: the least of several means."""
        load = LOADS[key.kind]
        dtype = torch.float32 if key.element_bytes == 4 else torch.bfloat16
        arrays = arrays_of(load, key.block_size, self._device)
        kv = cache_of(load, (key.block_size, _KV_HEADS, key.head_dim), dtype, self._device)
        heads = _KV_HEADS * key.group
        q = torch.randn((arrays.bucket.num_tokens, heads, key.head_dim), device=self._device)
        params = AttnParams.of(key.head_dim**-0.5, window=_WINDOW if key.windowed else None)
        context, q = self.context(arch, tile), q.to(dtype)
        return self._shortest(lambda: attention.attention(context, q, kv, arrays, params))

    def context(self, arch: Arch, tile: Tile) -> LaunchContext:
        """What launches are bound to: one tile, on this device."""
        set_device = current_device(self._device)
        return LaunchContext(arch, choose_tile=lambda arch, key: tile, make_current=set_device)

    def _shortest(self, launch: Any) -> float:
        for _ in range(_WARM_UPS):
            launch()
        seconds: list[float] = []
        stream = self._module.current_stream(self._device)
        for _ in range(_REPEATS):
            begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            for _ in range(_LAUNCHES):
                launch()
            end.record(stream)
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
        return min(seconds)
