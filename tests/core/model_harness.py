"""Tiny random models of Transformers, and the logits of ours over the same weights.

Loaded through the `harness` fixture. Transformers in float32 is the oracle for everything here.
"""

from dataclasses import dataclass

import numpy as np
import torch
import transformers

from leadframe.models import load_weights
from leadframe.platform.backend import KVSpec
from leadframe.platform.batch import Bucket, unpack
from leadframe.platform.op_table import build_op_table
from leadframe.platform.reference.backend import ReferenceBackend

BLOCK = 4
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def tiny(name, **changes):
    """Returns a tiny config of a Transformers class, such as "Llama"."""
    return getattr(transformers, f"{name}Config")(**(TINY | changes))


def random_model(config, seed=0):
    """Builds a model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    centre = 0.0 if "gemma" in config.model_type else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.ndim == 1 and "norm" in name
            weight.normal_(centre if is_norm else 0.0, 0.2)
    model.tie_weights()
    return model


def random_ids(vocab_size, count=24, seed=1):
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def hf_logits(model, ids):
    """Returns Transformers' logits [len(ids), V] of a whole sequence."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@dataclass
class Loaded:
    """A checkpoint on the NumPy backend."""

    checkpoint: object
    dtype: str = "float32"

    def __post_init__(self):
        self.backend = ReferenceBackend()
        self.weights = load_weights(self.backend, self.checkpoint, self.dtype)
        self.ops = build_op_table(self.backend)

    def logits(self, ids, chunks=None):
        """Returns our logits [len(ids), V], computed in chunks of the given sizes."""
        model, count = self.checkpoint.model, len(ids)
        num_blocks = -(-count // BLOCK)
        spec = KVSpec(model.info.kv_layers, BLOCK, self.dtype)
        kv = self.backend.kv_alloc(spec, num_blocks + 1)
        table = np.random.default_rng(0).permutation(num_blocks) + 1
        parts, start = [], 0
        for size in chunks or [count]:
            arrays = one_row(ids[start : start + size], start, table)
            hidden, kv = model.forward(self.ops, self.weights, kv, arrays)
            parts.append(model.logits(self.ops, self.weights, hidden))
            start += size
        return np.concatenate(parts)


def one_row(ids, start, table):
    """The arrays of a step that runs tokens [start, start + len(ids)) of one sequence."""
    size, positions = len(ids), np.arange(start, start + len(ids))
    bucket = Bucket(size, 1, num_decodes=0, num_blocks=len(table), num_logits=size)
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    parts = [[0, size], [start + size], table, slots, positions, ids, np.arange(size)]
    ints = np.concatenate(parts).astype(np.int32)
    return unpack(bucket, ints, np.zeros(0, np.float32))
