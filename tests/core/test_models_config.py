"""A config field that would change the mathematics is consumed or refused, never ignored."""

import dataclasses
import json

import pytest
import transformers
from transformers import PreTrainedConfig

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.models.config_fields import CONSUMED, NEUTRAL
from leadframe.models.hf_config import FAMILIES, read_hf_config

SHAPE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(path, **changes):
    (path / "config.json").write_text(json.dumps(SHAPE | changes))
    return read_hf_config(path)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_every_config_class_is_accounted_for(model_type):
    """A field that a new Transformers adds fails here before it can be ignored in silence."""
    config = transformers.AutoConfig.for_model(model_type).get_text_config(decoder=True)
    own = {field.name for field in dataclasses.fields(config)}
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    assert own - base - CONSUMED - NEUTRAL - {"use_bidirectional_attention"} == set()


@pytest.mark.parametrize(
    "field",
    [
        {"logits_scaling": 8.0},
        {"residual_multiplier": 0.22},
        {"attn_logit_softcap": 50.0},
        {"num_experts": 8},
        {"use_qk_norm": True},
        {"alibi": True},
        {"attention_chunk_size": 8192},
        {"rope_interleaved": True},
        {"clip_qkv": 8.0},
    ],
)
def test_an_unknown_field_that_sounds_like_mathematics_is_refused(tmp_path, field):
    with pytest.raises(UnsupportedModel, match=next(iter(field))):
        read(tmp_path, **field)


def test_bidirectional_gemma_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        read(tmp_path, model_type="gemma3_text", head_dim=8, use_bidirectional_attention=True)


@pytest.mark.parametrize(
    "field",
    [
        {"is_llama_config": True},
        {"rope_interleaved": False},
        {"transformers.js_config": {"dtype": "q4"}},
        {"unsloth_version": "2026.1"},
        {"_attn_implementation_autoset": True},
        {"alibi": None},
        {"pretraining_tp": 2},
    ],
)
def test_what_changes_nothing_is_let_through(tmp_path, field):
    assert read(tmp_path, **field).spec.num_heads == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, **changes)


def test_unknown_layer_type_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel):
        read(tmp_path, model_type="qwen3", layer_types=["full_attention", "linear_attention"])


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00"])
def test_a_damaged_config_is_an_error_of_the_checkpoint(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_generation_defaults_and_where_eos_comes_from(tmp_path):
    given = {"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    generation = read(tmp_path, eos_token_id=7).generation
    assert generation.eos_token_ids == (2, 5)
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.6, 0.9, None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert read(tmp_path, eos_token_id=7).generation.eos_token_ids == (7,)


def test_sampling_defaults_of_a_greedy_model_are_ignored(tmp_path):
    given = {"do_sample": False, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert read(tmp_path).generation.temperature is None
