"""The whole engine on a Llama of a real shape with random weights: speed, and where time goes.

Steps are held against the memory floor: every weight and every live key and value must be read
once a step. The host's gap is what a step takes beyond the device's own time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, Final

from gpu_common import Clock, Report, parser, prepare

_SHAPES: Final[dict[str, tuple[int, int, int, int, int, int, int]]] = {
    # hidden, inner, layers, heads, KV heads, head dim, vocabulary
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "toy": (32, 48, 2, 2, 1, 16, 320),
}
_DRAWN: Final = 1 << 20
_MOST_LAYERS: Final = 1000
_WARM_UP: Final = {"layers": 2, "blocks": 70_000}
"""Blocks for more than 2 GiB a layer, as in the measurement: AMD runs other code below that."""


def write_config(path: Path, shape: str, most_layers: int) -> None:
    """Writes config and a byte-level tokenizer, as a Hugging Face directory without weights."""
    from leadframe.conformance.tiny_checkpoint import write_checkpoint

    write_checkpoint(path, head_dim=16, seed=0)  # for its tokenizer
    (path / "model.safetensors").unlink()
    hidden, inner, layers, heads, kv_heads, head_dim, vocab = _SHAPES[shape]
    config = json.loads((path / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": min(layers, most_layers),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 256 if shape == "toy" else 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": shape == "1b",
    }
    (path / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class RandomWeight:
    """A weight that is made up when it is read: one block of numbers, repeated."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """Bytes that a file would hold."""
        return 2 * prod(self.shape)

    def read(self, index: Any = None) -> Any:
        """Returns small numbers of the shape."""
        import numpy as np

        drawn = small_numbers()
        whole = np.resize(drawn if len(self.shape) > 1 else drawn[:1] * 0 + 1, self.shape)
        return whole if index is None else whole[index]


@cache
def small_numbers() -> Any:
    """What random weights consist of, bfloat16."""
    import ml_dtypes
    import numpy as np

    drawn = np.random.default_rng(2).standard_normal(_DRAWN) * 0.02
    return drawn.astype(ml_dtypes.bfloat16)


def random_checkpoint(path: Path) -> Any:
    """A checkpoint of the directory's configuration whose weights are `RandomWeight`s."""
    from leadframe.models import Checkpoint
    from leadframe.models.hf_config import read_hf_config
    from leadframe.models.model import DecoderModel

    config = read_hf_config(path)
    model = DecoderModel(config.spec, config.generation)
    own = {name: p for name, p in model.parameters.items() if p.tied_to is None}
    sources = {name: RandomWeight(tuple(p.shape)) for name, p in own.items()}
    total = sum(source.num_bytes for source in sources.values())
    for name, parameter in model.parameters.items():
        sources.setdefault(name, sources.get(parameter.tied_to or "", RandomWeight(())))
    model = DecoderModel(config.spec, config.generation, total)
    return Checkpoint(model, sources, path, "random", total, "bfloat16")


class EngineBench:
    """One engine over a random model.

    Args:
      device: the `--device` value.
      shape: a key of the shapes.
      eager: capture nothing.
      is_small: a few layers and blocks, for what depends on neither.
    """

    def __init__(
        self, device: str, shape: str, *, eager: bool = False, is_small: bool = False
    ) -> None:
        from leadframe.engine import Engine
        from leadframe.llm import engine_config

        sizes = {"max_num_seqs": 64, "max_model_len": 4096}
        if shape == "toy":
            sizes = {"max_num_seqs": 4, "max_model_len": 64, "num_blocks_override": 40}
        elif is_small:
            sizes["num_blocks_override"] = _WARM_UP["blocks"]
        self._max_model_len = sizes["max_model_len"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            write_config(path, shape, _WARM_UP["layers"] if is_small else _MOST_LAYERS)
            config = engine_config(str(path), device=device, enforce_eager=eager, **sizes)
            self.checkpoint = random_checkpoint(path)
            self.engine = Engine.from_config(config, checkpoint=self.checkpoint)
        self._ids = iter(range(10**9))
        self._runner = self.engine.parts.runner
        self._batches: list[Any] = []
        self._run_step = self._runner._run
        self._runner._run = self._watch

    def _watch(self, batch: Any, on_launch: Any) -> Any:
        """Remembers the last batch, to run its step again alone."""
        self._batches = [batch]
        return self._run_step(batch, on_launch)

    def start_up(self) -> dict[str, object]:
        """The start-up ledger."""
        return self.engine.ledger.to_json()

    def decode(self, rows: int, prompt: int, steps: int) -> dict[str, float]:
        """Times decode steps of `rows` sequences, which all go on until they are aborted.

        The first of them decode while others' prompts are still being read.
        """
        self._add(rows, prompt, self._max_model_len - prompt)
        prefill = self._until(lambda: self.engine.num_waiting == 0 and self._all_decode())
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self.engine.advance(lambda outputs: None)
            times.append(time.perf_counter() - started)
        middle = sorted(times)[len(times) // 2]
        self.engine.abort_all()
        gap = self.host_gap(middle)
        return {
            "rows": rows,
            "prompt_tokens": prompt,
            "prefill_seconds": prefill,
            "step_milliseconds": round(1e3 * middle, 3),
            "tokens_per_second": round(rows / middle, 1),
            **({} if gap is None else {"host_gap_microseconds": round(1e6 * gap, 1)}),
        }

    def _add(self, rows: int, prompt: int, tokens: int) -> None:
        from leadframe.sampling_params import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        for _ in range(rows):
            index = next(self._ids)
            ids = [(index * 31 + 7 * position) % 250 for position in range(prompt)]
            self.engine.add_request(f"bench-{index}", ids, params)

    def _until(self, done: Any) -> float:
        started = time.perf_counter()
        for _ in range(100_000):
            self.engine.step()
            if done():
                break
        return round(time.perf_counter() - started, 4)

    def _all_decode(self) -> bool:
        running = self.engine.parts.scheduler.running
        return all(request.num_computed_tokens >= request.num_prompt_tokens for request in running)

    def host_gap(self, step_seconds: float) -> float | None:
        """Seconds that a step takes beyond the device's part; None where there is no graph."""
        step = self._runner._step_for(self._batches[-1].bucket).step  # past its guard
        replay = getattr(step, "replay", None)
        if replay is None:
            return None
        device = self._runner.backend.unguarded.device
        return step_seconds - Clock(device).seconds(replay, graph=False)

    def close(self) -> None:
        """Frees the device."""
        self.engine.close()


def floor_seconds(bench: EngineBench, rows: int, context: int, bandwidth: float) -> float:
    """The least that a decode step can take: all weights and the live KV, read once."""
    info = bench.checkpoint.model.info
    kv = sum(2 * 2 * layer.num_kv_heads * layer.head_dim for layer in info.kv_layers)
    return (bench.checkpoint.total_bytes + rows * context * kv) / bandwidth


def read_bandwidth(toy: bool) -> float:
    """Bytes a second of reading, from a copy."""
    import torch

    if toy:
        return 1e9
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / Clock(source.device).seconds(lambda: target.copy_(source))


def warm(args: Any) -> None:
    """Compiles what a shape's steps need, and leaves it in Triton's cache for the measurement."""
    bench = EngineBench(args.device, "toy" if args.toy else args.shape, is_small=True)
    bench.decode(2, 8, 2)
    bench.close()


def run(args: Any, report: Report) -> None:
    """Measures one shape captured, then eagerly."""
    shape = "toy" if args.toy else args.shape
    bandwidth = report.attempt("copy_bytes_per_second", lambda: read_bandwidth(args.toy)) or 1.0
    loads = [(2, 8, 3)] if args.toy else [(1, 128, 60), (16, 512, 40), (64, 512, 40)]
    # Loading 16 GB a second time costs more than the comparison is worth.
    for mode in ("captured",) if shape == "8b" else ("captured", "eager"):
        bench = EngineBench(args.device, shape, eager=mode == "eager")
        report.attempt(f"start_up_{mode}", bench.start_up)
        report.put(weight_bytes=bench.checkpoint.total_bytes, capacity=bench.engine.capacity_line)
        for rows, prompt, steps in loads if mode == "captured" else loads[:2]:
            row = report.attempt(f"{mode}_{rows}", partial(bench.decode, rows, prompt, steps))
            if row is not None:
                least = floor_seconds(bench, rows, prompt, bandwidth)
                row["floor_milliseconds"] = round(1e3 * least, 3)
                row["step_over_floor"] = round(row["step_milliseconds"] / 1e3 / least, 2)
                report.put()
        bench.close()


def main() -> None:
    """Runs the stage."""
    made = parser(__doc__)
    made.add_argument("--shape", choices=sorted(_SHAPES), default="1b")
    args = made.parse_args()
    prepare(args.device)
    if args.warm:
        return warm(args)
    return run(args, Report(args.report))


if __name__ == "__main__":
    sys.exit(main())
