"""Whatever value stands in a config, the model works or an error of the model names the field."""

import json
import shutil

import pytest
import transformers

from leadframe.errors import CheckpointError, ModelError, UnsupportedModel
from leadframe.models import open_checkpoint
from leadframe.models.config_fields import CONSUMED, NEUTRAL
from leadframe.models.config_values import FIELDS, GENERATION, ROPE
from leadframe.models.hf_config import read_hf_config

NAN, INF = float("nan"), float("inf")
NONSENSE = (
    None, True, False, 0, -1, 1.5, 2**62, 10**12, 10**400, 1e300, 1e-320, NAN, INF, -INF, "", "q",
    [], [1], ["q"], [None], [NAN], {}, {"a": 1}, {"rope_type": []}, {"full_attention": 3},
)  # fmt: skip
ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


@pytest.fixture
def tiny(tiny_model, tmp_path):
    """Opens the tiny Llama with fields of its config changed, or of another file."""
    for file in tiny_model.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tiny_model / "config.json").read_text())

    def open_changed(changes, file="config.json"):
        base = config if file == "config.json" else {}
        (tmp_path / file).write_text(json.dumps(base | changes))
        return open_checkpoint(tmp_path)

    return open_changed


def opens(tiny, changes, named, file="config.json"):
    """Whether the model opens; a refusal must be the model's, short, and name the field."""
    refusal = refusal_of(lambda: tiny(changes, file))
    assert len(refusal) < 1000
    assert not refusal or any(name in refusal for name in named), (changes, refusal)
    return not refusal


def refusal_of(call):
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


def test_every_consumed_field_has_a_kind():
    assert set(FIELDS) >= CONSUMED


@pytest.mark.parametrize("field", sorted(CONSUMED | set(FIELDS)))
def test_any_value_of_a_field_works_or_is_refused_by_name(tiny, field):
    elsewhere = {
        "attention_bias": "k_proj.bias",
        "hidden_activation": "hidden_act",
        "mlp_bias": "down_proj.bias",
        "num_key_value_heads": "k_proj",
        "rope_parameters": "rope parameters",
        "rope_scaling": "rope parameters",
    }
    for value in NONSENSE:
        opens(tiny, {field: value}, (field, elsewhere.get(field, field)))


@pytest.mark.parametrize("field", sorted(NEUTRAL | {"text_config", "vision_config", "zzz"}))
def test_any_value_of_a_field_that_changes_nothing_works_or_is_an_error_of_the_model(tiny, field):
    for value in NONSENSE:
        opens(tiny, {field: value}, ("",))


@pytest.mark.parametrize("kind", ROPES)
def test_any_rope_parameter_works_or_is_refused_by_name(tiny, kind):
    whole = {"rope_type": kind, "rope_theta": 10_000.0} | ROPES[kind]
    assert opens(tiny, {"rope_scaling": whole}, ())
    for field in ROPE:
        for value in NONSENSE:
            named = (field, "validate_rope" if value is None else "rotated", "parameters a are")
            opens(tiny, {"rope_scaling": whole | {field: value}}, named)


@pytest.mark.parametrize("field", GENERATION)
def test_any_generation_default_works_or_is_refused_by_name(tiny, field):
    for value in NONSENSE:
        opens(tiny, {field: value}, (field,), "generation_config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", NAN), ("rms_norm_eps", INF), ("rms_norm_eps", 0), ("rms_norm_eps", -1e-6),
        ("rope_theta", NAN), ("rope_theta", INF), ("eos_token_id", "q"), ("eos_token_id", [True]),
        ("hidden_size", 10**12), ("hidden_size", 32.0), ("num_attention_heads", True),
        ("vocab_size", -320), ("vocab_size", 10**12), ("head_dim", 0), ("head_dim", 10**12),
        ("num_hidden_layers", 2**40), ("max_position_embeddings", 10**12),
        ("sliding_window", -4), ("tie_word_embeddings", 1), ("attention_bias", "false"),
        ("rope_scaling", {"rope_type": "linear", "factor": NAN}), ("rope_scaling", [1]),
        ("rope_parameters", {"rope_theta": NAN}), ("partial_rotary_factor", NAN),
        ("torch_dtype", 32), ("text_config", {}),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_file_field_value_and_rule(tiny, field, value):
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {field}\S* is .+; it must be "):
        tiny({field: value})


def test_frequencies_that_are_not_finite_are_refused(tiny):
    """Each number is sound, and their product is not."""
    rope = {"rope_type": "longrope", "rope_theta": 1e-30} | ROPES["longrope"]
    with pytest.raises(UnsupportedModel, match="frequencies that are not finite"):
        tiny({"rope_scaling": rope | {"short_factor": [1e-30] * 4}})


def test_an_end_of_sequence_that_has_no_logit_is_left_out(tiny, caplog):
    generation = {"eos_token_id": [5, 320, -1, 10**12]}
    assert tiny(generation, "generation_config.json").model.info.eos_token_ids == (5,)
    assert "outside [0, 320)" in caplog.text


def test_json_too_deep_to_read_is_an_error_of_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("model_type", ["smollm3", "phi3", "qwen3", "gemma2", "gemma3"])
def test_nonsense_in_any_family_is_an_error_of_the_model_and_nothing_else(tmp_path, model_type):
    config = transformers.AutoConfig.for_model(model_type).get_text_config(decoder=True)
    fields = [f for f, v in config.to_dict().items() if f in CONSUMED or isinstance(v, int | dict)]
    text = {"model_type": config.model_type, "num_hidden_layers": 2}
    for field in fields:
        for value in (0, -1, 2**62, 1.5, NAN, True, "x", [1], {"rope_type": []}, None):
            nonsense = text | {field: value}
            if model_type != config.model_type:
                nonsense = {"model_type": model_type, "text_config": nonsense}
            (tmp_path / "config.json").write_text(json.dumps(nonsense))
            refusal = refusal_of(lambda: read_hf_config(tmp_path))
            assert (
                not refusal or "config.json" in refusal or field.removesuffix("ivation") in refusal
            )
