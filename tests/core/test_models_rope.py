"""Behaviour 34: rotary frequencies of every spelling equal Transformers'."""

import json

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from leadframe.errors import UnsupportedModel
from leadframe.models import open_checkpoint
from leadframe.models.hf_config import read_hf_config
from leadframe.models.rope import RopeContext, rope_spec

ORIGINAL, LONGEST = 32, 128
SHAPE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FACTORS = np.linspace(1, 2, 16).tolist(), np.linspace(2, 5, 16).tolist()
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn-attention-factor": {"factor": 4.0, "attention_factor": 0.7},
    "yarn-mscale": {"factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-betas": {"factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.5},
    "yarn-step": {"factor": 4.0, "beta_fast": 1.5, "beta_slow": 1.5, "truncate": False},
    "yarn-untruncated": {"factor": 4.0, "truncate": False},
    "longrope": {"short_factor": FACTORS[0], "long_factor": FACTORS[1]},
    "longrope-attention-factor": {
        "short_factor": FACTORS[0],
        "long_factor": FACTORS[1],
        "attention_factor": 1.3,
    },
}
NEEDS_ORIGINAL = ("llama3", "yarn", "longrope")


def write_config(path, rope, **changes):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPE | rope | changes))
    return path


def parameters(name):
    kind = name.split("-")[0]
    params = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[name]}
    if kind in NEEDS_ORIGINAL:
        params["original_max_position_embeddings"] = ORIGINAL
    return params


def longest(name):
    """A config's max_position_embeddings; dynamic scaling starts beyond it."""
    return ORIGINAL if name == "dynamic" else LONGEST


def theirs(config, positions):
    """cos and sin [len(positions), head_dim / 2] of Transformers at the end of one sequence."""
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


def ours(spec, positions):
    angles = np.outer(positions, np.asarray(spec.inv_freq, np.float32)).astype(np.float32)
    return np.cos(angles) * spec.scaling, np.sin(angles) * spec.scaling


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [ORIGINAL, 4 * ORIGINAL + 1])
def test_cos_and_sin_equal_transformers(tmp_path, name, length):
    """At 0, 1, original - 1, original and 4 * original, as far as a sequence reaches."""
    rope = {"rope_parameters": parameters(name), "max_position_embeddings": longest(name)}
    write_config(tmp_path, rope)
    spec = read_hf_config(tmp_path, max_model_len=length).spec
    points = (0, 1, ORIGINAL - 1, ORIGINAL, 4 * ORIGINAL)
    positions = sorted({p for p in points if p < length} | {length - 1})
    want = theirs(transformers.AutoConfig.from_pretrained(tmp_path), positions)
    np.testing.assert_allclose(ours(spec.ropes[0], positions), want, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "wanted", "served"),
    [
        ("yarn", None, LONGEST),
        ("longrope", None, ORIGINAL),
        ("longrope", ORIGINAL, ORIGINAL),
        ("longrope", ORIGINAL + 1, LONGEST),
        ("dynamic", None, ORIGINAL),
        ("dynamic", 3 * ORIGINAL, 3 * ORIGINAL),
    ],
)
def test_longest_sequence_is_what_one_set_of_frequencies_serves(tmp_path, name, wanted, served):
    rope = {"rope_parameters": parameters(name), "max_position_embeddings": longest(name)}
    spec = read_hf_config(write_config(tmp_path, rope), max_model_len=wanted).spec
    assert spec.max_position_embeddings == served


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_old_spellings_mean_the_same(tmp_path, old):
    write_config(tmp_path, old)
    spec = read_hf_config(tmp_path).spec
    want = theirs(transformers.AutoConfig.from_pretrained(tmp_path), [0, 1, 100])
    np.testing.assert_allclose(ours(spec.ropes[0], [0, 1, 100]), want, atol=1e-5)
    halved = 2 if "linear" in str(old) else 1
    np.testing.assert_allclose(spec.ropes[0].inv_freq[0], 1 / halved)


def test_a_dictionary_per_layer_type(harness, tmp_path):
    """Gemma 3: sliding layers keep base 10,000 while full layers are scaled."""
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = harness.tiny("Gemma3Text", head_dim=16, num_hidden_layers=6, rope_parameters=rope)
    model = harness.random_model(config)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert {rope.inv_freq[0] for rope in checkpoint.model.spec.ropes} == {1.0, 1 / 8}
    ids = harness.random_ids(97)
    got = harness.Loaded(checkpoint).logits(ids)
    np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=3e-5)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "spiral"),
        ({"rope_type": "linear", "factor": 2.0, "twist": 3}, "twist"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
    ],
)
def test_what_is_not_known_is_refused_by_name(rope, named):
    where = RopeContext(head_dim=32, max_position_embeddings=LONGEST, context=ORIGINAL)
    params = {"rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **rope}
    if rope["rope_type"] == "linear":
        del params["original_max_position_embeddings"]
    with pytest.raises(UnsupportedModel, match=named):
        rope_spec(params, where)


def test_partial_rotation():
    where = RopeContext(head_dim=32, max_position_embeddings=LONGEST, context=LONGEST)
    whole = rope_spec({"rope_theta": 1e4}, where)
    half = rope_spec({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, where)
    assert len(whole.inv_freq) == 16
    assert len(half.inv_freq) == 8
    np.testing.assert_allclose(half.inv_freq, 1e4 ** -(np.arange(0, 16, 2) / 16), rtol=1e-6)
