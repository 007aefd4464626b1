"""Fixtures that several test areas share: a tiny seeded Llama, and engines that run it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from leadframe.engine import Engine
from leadframe.llm import LLM, engine_config
from leadframe.sampling_params import SamplingParams

TINY_VOCAB = 320
"""256 bytes, then tokens that only sampling produces, then </s>."""


def write_tiny_llama(
    path: Path, *, seed: int = 0, layers: int = 2, vocab: int = TINY_VOCAB
) -> Path:
    """Writes a seeded random Llama with a byte-level tokenizer as a Hugging Face directory."""
    hidden, heads, kv_heads, head_dim, inner = 32, 4, 2, 8, 64
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.25, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        weights |= {
            prefix + "self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
            prefix + "input_layernorm.weight": 1 + matrix(hidden) / 4,
            prefix + "post_attention_layernorm.weight": 1 + matrix(hidden) / 4,
        }
    weights["model.norm.weight"] = 1 + matrix(hidden) / 4
    weights["lm_head.weight"] = matrix(vocab, hidden)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": vocab - 1,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path, vocab)
    return path


def _write_tokenizer(path: Path, vocab: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: index for index, char in enumerate(alphabet)}
    ids |= {f"tok{index}": index for index in range(len(ids), vocab - 1)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    settings = {"eos_token": "</s>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a tiny seeded Llama."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def generate_small() -> Callable[..., list]:
    """Two prompts on the default model, two rows and sixteen tokens a step: for slow devices."""

    def generate(device: str, **sampling) -> list:
        settings = {
            "dtype": "float32",
            "max_num_seqs": 2,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "kv_cache_memory_bytes": 32 << 20,
        }
        params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
        with LLM(device=device, **settings) as llm:
            return llm.generate(["The capital of France is", "1, 1, 2, 3, 5, 8,"], params)

    return generate


class CheckedEngine(Engine):
    """An engine that audits scheduler and block pool after every step."""

    def advance(self, deliver):
        super().advance(deliver)
        self.check()


def checked_llm(model: str, **settings) -> LLM:
    """Makes an `LLM` over a `CheckedEngine`."""
    return LLM.from_engine(CheckedEngine.from_config(engine_config(model, **settings)))


@pytest.fixture
def tiny_llm(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """Makes audited engines for the tiny model; they are closed after the test."""
    made: list[LLM] = []

    def make(**settings) -> LLM:
        defaults = {"device": "reference", "block_size": 4, "num_blocks_override": 64}
        made.append(checked_llm(str(tiny_model), **(defaults | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
