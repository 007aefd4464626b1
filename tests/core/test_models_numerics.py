"""Logits of every family equal Transformers' over the same random weights."""

import numpy as np
import pytest
import torch

from leadframe.models import open_checkpoint
from leadframe.models.hf_config import read_hf_config

CASES = {
    "llama": ("Llama", {}),
    "llama3-rope": ("Llama", {"rope_parameters": "llama3"}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 6}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "phi3": ("Phi3", {"sliding_window": 6, "pad_token_id": 0}),
    "phi3-longrope": (
        "Phi3",
        {
            "hidden_size": 64,
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [2.0] * 6,
            },
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 6,
            "sliding_window_pattern": 3,
        },
    ),
}


def build(harness, name):
    kind, changes = CASES[name]
    if changes.get("rope_parameters") == "llama3":
        changes = {**changes, "rope_parameters": harness.LLAMA3_ROPE}
    return harness.random_model(harness.tiny(kind, **changes))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(harness, tmp_path, name):
    model = build(harness, name)
    model.save_pretrained(tmp_path)
    ids = harness.random_ids(model.config.vocab_size)
    want = harness.hf_logits(model, ids)
    loaded = harness.Loaded(open_checkpoint(tmp_path))
    np.testing.assert_allclose(loaded.logits(ids), want, atol=3e-5)
    # Behaviours 37 and 38: the same when the prompt comes in chunks, over window edges too.
    np.testing.assert_allclose(loaded.logits(ids, [1, 3, 9, 11]), want, atol=3e-5)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 11])
def test_window_of_four_sees_four_keys_in_every_chunking(harness, tmp_path, chunk):
    """Behaviour 38: window 4, prompt 11."""
    model = harness.random_model(harness.tiny("Mistral", sliding_window=4))
    model.save_pretrained(tmp_path)
    ids = harness.random_ids(97, 11)
    sizes = [chunk] * (11 // chunk) + [11 % chunk] * (11 % chunk > 0)
    got = harness.Loaded(open_checkpoint(tmp_path)).logits(ids, sizes)
    np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=3e-5)


@pytest.mark.parametrize(("window", "kept"), [(63, 63), (64, None), (4096, None)])
def test_a_window_as_wide_as_the_context_is_none(harness, tmp_path, window, kept):
    """A backend without windows can serve such a model."""
    harness.tiny("Mistral", sliding_window=window).save_pretrained(tmp_path)
    spec = read_hf_config(tmp_path).spec
    assert {layer.attn.window for layer in spec.layers} == {kept}


def test_head_dim_is_the_configs_not_hidden_over_heads(harness, tmp_path):
    """Behaviour 35: hidden 64, heads 4, head_dim 32."""
    model = harness.random_model(harness.tiny("Llama", hidden_size=64, head_dim=32))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.model.info.kv_layers[0].head_dim == 32
    assert checkpoint.model.parameters["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    ids = harness.random_ids(97)
    got = harness.Loaded(checkpoint).logits(ids)
    np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=3e-5)


def test_information_that_the_engine_plans_with(harness, tmp_path):
    config = harness.tiny("Gemma3Text", head_dim=16, sliding_window=6, eos_token_id=[1, 5])
    harness.random_model(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    info = checkpoint.model.info
    assert (info.architecture, info.vocab_size, info.hidden_size) == ("gemma3_text", 97, 32)
    assert (info.num_heads, info.max_position_embeddings) == (4, 64)
    assert [layer.num_kv_heads for layer in info.kv_layers] == [2, 2, 2]
    assert [params.window for params in info.attn] == [6, 6, 6]
    assert info.attn[0].features == {"window"}
    assert info.eos_token_ids == (1, 5)
    assert info.weight_bytes == checkpoint.total_bytes == 4 * info.num_parameters
    assert checkpoint.default_dtype == "float32"


def test_embedding_scale_is_rounded_to_the_models_dtype(harness, tmp_path):
    """Transformers rounds sqrt(hidden) to the weights' dtype; frequencies stay float32."""
    harness.random_model(harness.tiny("Gemma3Text", head_dim=16)).save_pretrained(tmp_path)
    constants = open_checkpoint(tmp_path).model.constants
    value, dtype = constants["embed_scale"]
    assert dtype is None
    np.testing.assert_allclose(value, [32**0.5])
    assert {constants[f"rope.{i}.inv_freq"][1] for i in range(2)} == {"float32"}


def test_two_rotary_embeddings_where_layers_differ_and_one_where_not(harness, tmp_path):
    config = harness.tiny("Gemma3Text", head_dim=16, num_hidden_layers=6)
    harness.random_model(config).save_pretrained(tmp_path / "two")
    harness.random_model(harness.tiny("Llama")).save_pretrained(tmp_path / "one")
    two = open_checkpoint(tmp_path / "two").model.spec
    assert [layer.rope for layer in two.layers] == [two.layers[0].rope] * 5 + [two.layers[5].rope]
    assert len(two.ropes) == 2
    assert len(open_checkpoint(tmp_path / "one").model.spec.ropes) == 1


def test_float64_run_is_close_to_float32_oracle(harness, tmp_path):
    """The same step in float64 is the oracle of the kit; it must differ by rounding only."""
    model = harness.random_model(harness.tiny("Llama"))
    model.save_pretrained(tmp_path)
    ids = harness.random_ids(97)
    exact = harness.Loaded(open_checkpoint(tmp_path), "float64").logits(ids)
    assert exact.dtype == np.float64
    with torch.no_grad():
        want = model.double()(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(exact, want, atol=3e-6)
