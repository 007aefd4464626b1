"""A tiny seeded Llama as a Hugging Face directory, for cases that run the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCAB = 320
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 64, 96, 2, 4, 2


def write_checkpoint(path: Path, head_dim: int, seed: int) -> Path:
    """Writes config, weights and a byte-level tokenizer; returns the directory.

    Args:
      path: an existing directory.
      head_dim: a head dim that the backend takes.
      seed: of the weights.
    """
    from safetensors.numpy import save_file

    save_file(_weights(head_dim, np.random.default_rng(seed)), path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path)
    return path


def _weights(head_dim: int, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        drawn: npt.NDArray[np.float32] = rng.standard_normal((rows, columns), np.float32)
        return drawn * np.float32(1.5 / np.sqrt(columns))

    ones = np.ones(_HIDDEN, np.float32)
    out = {"model.embed_tokens.weight": matrix(VOCAB, _HIDDEN) * 5, "model.norm.weight": ones}
    out["lm_head.weight"] = matrix(VOCAB, _HIDDEN)
    for i in range(_LAYERS):
        layer = f"model.layers.{i}."
        out |= {
            f"{layer}self_attn.q_proj.weight": matrix(_HEADS * head_dim, _HIDDEN),
            f"{layer}self_attn.k_proj.weight": matrix(_KV_HEADS * head_dim, _HIDDEN),
            f"{layer}self_attn.v_proj.weight": matrix(_KV_HEADS * head_dim, _HIDDEN),
            f"{layer}self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * head_dim),
            f"{layer}mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{layer}mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{layer}mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            f"{layer}input_layernorm.weight": ones,
            f"{layer}post_attention_layernorm.weight": ones,
        }
    return out


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: index for index, char in enumerate(alphabet)}
    ids |= {f"tok{index}": index for index in range(len(ids), VOCAB - 1)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


__all__ = ["VOCAB", "write_checkpoint"]
