"""Runs the kernels on a simulated TPU that detects races and uninitialised reads.

Run as a script, in a process of its own: a wrong semaphore hangs the simulator. Prints one JSON
object, plant → verdict; a verdict is "clean", "races", "wrong" or the name of an exception.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental.pallas import tpu as pltpu

from leadframe.platform.batch import Bucket, packed_sizes, unpack
from leadframe.platform.capabilities import AttnParams
from leadframe_tpu import attention_ops
from leadframe_tpu.kernels import append, attention, work
from leadframe_tpu.kernels.layout import KVBlocks

BUCKET = Bucket(num_tokens=14, num_seqs=5, num_decodes=3, num_blocks=6, num_logits=5)
BLOCK, HEADS, KV_HEADS, DIM, BLOCKS = 8, 2, 1, 64, 24
PARAMS = AttnParams.of(DIM**-0.5, window=30)


def make_batch() -> np.ndarray:
    """Two decodes and a padded one, a chunk that ends inside its second tile, a padded row."""
    ints = np.zeros(packed_sizes(BUCKET)[0], np.int32)
    arrays = unpack(BUCKET, ints, None)
    arrays.query_start[:] = [0, 1, 2, 3, 13, 13]
    arrays.seq_lens[:] = [41, 7, 0, 30, 0]
    arrays.block_table[:4] = 1 + np.arange(24).reshape(4, 6) % 23
    positions = [(0, 40), (1, 6), *((3, p) for p in range(20, 30))]
    for token, (row, position) in zip([0, 1, *range(3, 13)], positions, strict=True):
        block = arrays.block_table[row, position // BLOCK]
        arrays.slots[token] = block * BLOCK + position % BLOCK
    return ints


def solve(ints: np.ndarray, interpret: object) -> tuple[np.ndarray, np.ndarray]:
    """Appends and attends."""
    rng = np.random.default_rng(0)
    tokens = BUCKET.num_tokens
    q = rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, tokens, KV_HEADS, DIM)).astype(np.float32)
    cache = rng.standard_normal((BLOCKS, BLOCK, 2 * DIM)).astype(np.float32)

    def step(ints: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = unpack(BUCKET, ints, None)
        plan = attention_ops.plan(batch, PARAMS)
        kv = KVBlocks(cache, DIM, KV_HEADS)
        kv = attention_ops.kv_append(kv, k, v, plan, interpret=interpret)
        return attention_ops.attention(q, kv, plan, PARAMS, interpret=interpret), kv.data

    out, cache = jax.jit(step)(ints, cache)
    return np.asarray(out), np.asarray(cache)[1:]


def _watch_detectors() -> list[RaceDetectionState]:
    """Collects the race detectors that are made from now on; each kernel has its own."""
    made: list[RaceDetectionState] = []

    def make(**kwargs: int) -> RaceDetectionState:
        made.append(RaceDetectionState(**kwargs))
        return made[-1]

    simulator.RaceDetectionState = make
    return made


def verdict(
    ints: np.ndarray, wanted: tuple[np.ndarray, np.ndarray], mode: str, calls: int = 2
) -> str:
    """Runs once on the simulator."""
    simulator.reset_tpu_interpret_mode_state()
    detectors = _watch_detectors()
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode=mode
    )
    try:
        got = solve(ints, params)
    except Exception as error:
        return type(error).__name__
    assert len(detectors) == calls, "one for each call of a kernel"
    if any(detector.races_found for detector in detectors):
        return "races"
    close = all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, wanted, strict=True))
    return "clean" if close else "wrong"


def _one_half(refs, shape, tile, panel, half, act, move=attention._move_panel):
    move(refs, shape, tile, panel, half * 0, act)


def _no_write_wait(refs, written, wanted):
    return jax.numpy.maximum(written, wanted)


PLANTS = {
    "one half of the buffer for both panels": (attention, "_move_panel", _one_half),
    "no wait for panels and queries": (attention, "_wait", lambda copy: None),
    "no wait for writes": (append, "_finish_writes", _no_write_wait),
    "runs never wait for each other": (work, "_must_wait", lambda place: place * 0),
}


def crowd(ints: np.ndarray) -> np.ndarray:
    """Makes tokens rewrite each other's rows, so that runs must wait."""
    ints = ints.copy()
    arrays = unpack(BUCKET, ints, None)
    arrays.slots[3:13] = 160 + np.array([0, 2, 4, 6, 1, 3, 5, 7, 9, 8])
    return ints


def main() -> None:
    attention._MAX_PANEL_KEYS = 16  # several panels in a short context
    ints = make_batch()
    inputs = {"batch": ints, "crowded": crowd(ints)}
    wanted = {name: solve(value, True) for name, value in inputs.items()}
    found = {}
    if sys.argv[1] == "clean":
        for name, value in inputs.items():
            for mode in ("on_wait", "eager"):
                found[f"{name}, {mode}"] = verdict(value, wanted[name], mode)
        work.MAX_TABLE_INTS = 2 * BUCKET.num_blocks  # three calls write one output
        found["split"] = verdict(ints, wanted["batch"], "on_wait", calls=4)
    for name, (module, attribute, fault) in PLANTS.items() if sys.argv[1] == "planted" else ():
        sound = getattr(module, attribute)
        setattr(module, attribute, fault)
        found[name] = verdict(inputs["crowded"], wanted["crowded"], "on_wait")
        setattr(module, attribute, sound)
    print(json.dumps(found))


main()
