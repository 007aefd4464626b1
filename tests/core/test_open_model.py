"""Which implementation runs a model: the native file, a library's, or an error that says why."""

import json

import pytest

from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.models import check_backend, describe_impl, open_model
from leadframe.platform import AttnParams, KVLayerSpec, ModelFacts
from leadframe.platform.discovery import EntryPoint


class FakeImpl:
    family = "strings"
    facts = ModelFacts(
        architecture="FakeForCausalLM",
        vocab_size=320,
        hidden_size=8,
        max_position_embeddings=64,
        num_heads=2,
        kv_layers=(KVLayerSpec(2, 4),),
        attn=(AttnParams.of(0.5),),
        num_parameters=7,
        eos_token_ids=(3, 400),
    )

    def __init__(self, directory):
        self.directory = directory

    def load(self, backend, dtype, progress):
        return {"backend": backend, "dtype": dtype, "progress": progress}

    def forward(self, ops, weights, kv, arrays):
        return ("hidden", ops, weights, arrays), kv

    def logits(self, ops, weights, rows):
        return ("logits", ops, weights, rows)


POINT = EntryPoint("transformers", "leadframe-fake", "1", lambda: FakeImpl)


@pytest.fixture
def foreign(tiny_model, tmp_path):
    """Makes a directory of a model type without a native file."""

    def make(**changes):
        for file in tiny_model.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"model_type": "olmo2"} | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def test_auto_takes_the_native_file_where_there_is_one(tiny_model, foreign):
    assert describe_impl(open_model(tiny_model, points=[POINT])) == "native llama"
    other = open_model(foreign(), points=[POINT])
    assert describe_impl(other) == "Transformers' FakeForCausalLM"
    named = open_model(tiny_model, impl="transformers", points=[POINT])
    assert describe_impl(named) == "Transformers' FakeForCausalLM"
    with pytest.raises(UnsupportedModel, match=r"'olmo2'.*supported are llama"):
        open_model(foreign(), impl="leadframe", points=[POINT])


def test_what_the_core_sees_of_it(foreign):
    path = foreign()
    checkpoint = open_model(path, points=[POINT])
    model, facts = checkpoint.model, FakeImpl.facts
    assert model.info.kv_layers == facts.kv_layers
    assert model.info.max_position_embeddings == 64
    assert model.info.eos_token_ids == (319,)  # config.json's own
    assert checkpoint.total_bytes == (path / "model.safetensors").stat().st_size
    assert model.load("b", "float32", None) == {
        "backend": "b",
        "dtype": "float32",
        "progress": None,
    }
    assert model.forward("ops", {}, ["kv"], "arrays") == (("hidden", "ops", {}, "arrays"), ["kv"])
    assert model.logits("ops", {}, "rows") == ("logits", "ops", {}, "rows")


def test_ids_that_end_an_answer_come_from_the_library_where_no_file_names_them(foreign):
    checkpoint = open_model(foreign(eos_token_id=None), points=[POINT])
    assert checkpoint.model.info.eos_token_ids == (3,)  # 400 has no logit


def test_without_an_implementation_the_error_says_what_to_install(foreign):
    with pytest.raises(UnsupportedModel, match=r"'olmo2' has no native.*torch.*leadframe-cpu"):
        open_model(foreign(), points=[])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised.*awq"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_no_model_may_have_is_refused_before_the_library_is_asked(foreign, changes, reason):
    point = EntryPoint("transformers", "leadframe-fake", "1", lambda: pytest.fail("asked"))
    with pytest.raises(UnsupportedModel, match=reason):
        open_model(foreign(**changes), points=[point])


def test_weights_of_other_element_types_are_refused(foreign):
    path = foreign()
    entry = {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}
    header = json.dumps({"w": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0\0"
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="F8_E4M3"):
        open_model(path, points=[POINT])


def test_pickled_weights_are_refused(foreign):
    path = foreign()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        open_model(path, points=[POINT])


def test_gguf_files_have_no_other_implementation(tmp_path):
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match="GGUF"):
        open_model(file, impl="transformers", points=[POINT])


def test_it_runs_on_its_own_arrays_and_alone(tiny_model, foreign):
    check_backend(open_model(tiny_model), "numbers", 2)
    checkpoint = open_model(foreign(), points=[POINT])
    check_backend(checkpoint, "strings", 1)
    with pytest.raises(UnsupportedModel, match=r"strings's, and this device computes with numbers"):
        check_backend(checkpoint, "numbers", 1)
    with pytest.raises(UnsupportedModel, match="--tensor-parallel-size is 2"):
        check_backend(checkpoint, "strings", 2)
