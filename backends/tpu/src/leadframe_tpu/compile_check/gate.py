"""What must hold for a compiled step. Pure functions of the compiler's own report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from leadframe_tpu.program import ProgramMemory

_INSTRUCTION: Final = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.*?) (?P<op>[a-z][a-z\-]*)\("
)
_ARRAY: Final = re.compile(r"\b(?P<dtype>[a-z]+\d+)\[(?P<dims>[\d,]+)\](?:\{(?P<layout>[^}]*)\})?")
_ON_CHIP: Final = "S(1)"
_OF_WEIGHT: Final = re.compile(r"(?:copy|transpose)\(%(?P<name>weights__[\w.]+)")
_WEIGHT: Final = re.compile(r"%(?P<name>weights__[\w.]+) = \w+\[[\d,]+\]\{(?P<order>[\d,]+)")
_LARGE: Final = 1 << 20
"""Elements of a weight that cost something to copy."""

_KERNEL: Final = 'custom_call_target="tpu_custom_call"'

_PASSES_ON: Final = frozenset(
    {"parameter", "get-tuple-element", "tuple", "bitcast", "call", "while", "conditional"}
)
"""Instructions that hand an array on without touching its bytes."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a step must look like.

    Attributes:
      kernels: kernel name → how often it must be called.
      cache_dtype: XLA's name of the cache's element type.
      cache_elements: elements of each layer's cache on one device.
      cache_bytes: bytes of the whole cache on one device.
      hbm_bytes: memory of the device.
      has_cache: whether it is given the cache, and so must donate it.
      all_reduces: how many sums over the ranks there must be at least.
      all_gathers: the same of what ranks put together.
    """

    kernels: Mapping[str, int]
    cache_dtype: str
    cache_elements: tuple[int, ...]
    cache_bytes: int
    hbm_bytes: int
    has_cache: bool = True
    all_reduces: int = 0
    all_gathers: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's cache, on average."""
        return self.cache_bytes // len(self.cache_elements)


@dataclass(frozen=True, slots=True)
class _Instruction:
    op: str
    result: str
    line: str

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(dtype, dimensions, layout) of every array of the result."""
        for found in _ARRAY.finditer(self.result):
            dims = tuple(int(dim) for dim in found["dims"].split(","))
            yield found["dtype"], dims, found["layout"] or ""


def problems_of(text: str, memory: ProgramMemory, wanted: Expectation) -> list[str]:
    """Lists everything that is wrong with a compiled step.

    Args:
      text: the optimised program.
      memory: what the compiler says it needs.
      wanted: what it must look like.
    """
    instructions = list(_instructions(text))
    return [
        *_missing_kernels(instructions, wanted),
        *_cache_copies(instructions, wanted),
        *_weight_copies(instructions),
        *_memory_problems(memory, wanted),
        *_missing_exchanges(instructions, wanted),
    ]


def _instructions(text: str) -> Iterator[_Instruction]:
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found:
            yield _Instruction(found["op"], found["type"], line)


def _missing_kernels(instructions: list[_Instruction], wanted: Expectation) -> Iterator[str]:
    calls = [i.line for i in instructions if i.op == "custom-call" and _KERNEL in i.line]
    for name, count in wanted.kernels.items():
        found = sum(f"/{name}/" in line for line in calls)
        if found < count:
            yield f"kernel {name!r} is called {found} times, not {count}"


def _cache_copies(instructions: list[_Instruction], wanted: Expectation) -> Iterator[str]:
    """Anything but a kernel that makes an array as large as a layer's cache."""
    made = Counter(
        i.op
        for i in instructions
        if i.op not in _PASSES_ON
        and not (i.op == "custom-call" and _KERNEL in i.line)
        and any(
            dtype == wanted.cache_dtype and prod(dims) in wanted.cache_elements
            for dtype, dims, _ in i.arrays()
        )
    )
    for op, count in sorted(made.items()):
        yield f"{count} {op} of an array as large as a layer's cache"


def _weight_copies(instructions: list[_Instruction]) -> Iterator[str]:
    """A weight that is stored one way and read another; fetching it as it is on chip is no copy."""
    parameters = (_WEIGHT.search(i.line) for i in instructions if i.op == "parameter")
    orders = {found["name"]: found["order"] for found in parameters if found}
    for i in instructions:
        found = _OF_WEIGHT.search(i.line) if i.op in ("copy", "transpose") else None
        if found is None:
            continue
        for _, dims, layout in i.arrays():
            order = layout.partition(":")[0]
            is_fetch = _ON_CHIP in layout and orders.get(found["name"], order) == order
            if prod(dims) >= _LARGE and not is_fetch:
                yield f"{i.op} of a whole weight {dims}"


def _memory_problems(memory: ProgramMemory, wanted: Expectation) -> Iterator[str]:
    cache_bytes = wanted.cache_bytes if wanted.has_cache else 0
    if memory.donated != cache_bytes:
        yield f"{memory.donated:,} bytes are donated; the cache has {cache_bytes:,}"
    if memory.scratch > wanted.layer_bytes // 2:
        half = wanted.layer_bytes // 2
        yield f"{memory.scratch:,} bytes of scratch; half of a layer's cache is {half:,}"
    if memory.total > wanted.hbm_bytes:
        yield f"{memory.total:,} bytes in all; the chip has {wanted.hbm_bytes:,}"


def _missing_exchanges(instructions: list[_Instruction], wanted: Expectation) -> Iterator[str]:
    found = Counter(i.op.removesuffix("-start") for i in instructions)
    if found["all-reduce"] < wanted.all_reduces:
        yield f"{found['all-reduce']} sums over the ranks; there must be {wanted.all_reduces}"
    if found["all-gather"] < wanted.all_gathers:
        yield f"{found['all-gather']} gathers over the ranks; there must be {wanted.all_gathers}"


def lowering_problems(text: str, num_layers: int) -> list[str]:
    """Lists what is wrong with a step that was lowered for TPUs but not compiled.

    It says nothing about layouts, copies or memory.

    Args:
      text: the lowered program.
      num_layers: layers whose cache is donated; 0 for a head.
    """
    out = []
    for name in ("kv_append", "paged_attention") if num_layers else ():
        if f'kernel_name = "{name}"' not in text and f"@{name}" not in text:
            out.append(f"kernel {name!r} is not called")
    if num_layers and "tpu_custom_call" not in text:
        out.append("there is no TPU kernel")
    donated = text.count("tf.aliasing_output") + text.count("jax.buffer_donor")
    if donated != num_layers:
        out.append(f"{donated} arrays are donated; there are {num_layers} layers")
    return out
