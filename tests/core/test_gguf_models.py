"""Behaviour 39: a GGUF file gives the logits of the Hugging Face model that it was made from."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from leadframe.errors import CheckpointError, ModelError, UnsupportedModel
from leadframe.gguf_file import TensorInfo
from leadframe.models import open_checkpoint
from leadframe.models.gguf_weights import QuantizedWeight
from leadframe.models.sources import MappedFile

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
        },
    ),
}


def permuted(weight, heads):
    """What llama.cpp's converter does to q and k of Llama models."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_tensors(model, arch):
    """Yields (name, array) of a model as llama.cpp's converter writes them."""
    config = model.config
    leaves = LEAVES | (SANDWICH if arch in ("gemma2", "gemma3") else {})
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch.startswith("gemma") and "norm" in name:
            array = array + 1
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            array = permuted(array, heads)
        if name not in TOP:
            _, _, layer, leaf = name.split(".", 3)
            leaf, suffix = leaf.rsplit(".", 1)
            yield f"blk.{layer}.{leaves[leaf]}.{suffix}", array
        else:
            yield TOP[name], array


def write(path, model, arch, kind=None, extra=(), tensors=()):
    """Writes a model as a GGUF file, matrices quantised as `kind`."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(7)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    for key, value in extra:
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(key, value)
    for name, array in [*gguf_tensors(model, arch), *tensors]:
        if kind is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make(harness, name, **changes):
    kind, fixed = CASES[name]
    config = harness.tiny(kind, **({"intermediate_size": 64} | fixed | changes))
    model = harness.random_model(config)
    with torch.no_grad():
        for bias in (b for n, b in model.named_parameters() if n.endswith("bias")):
            bias.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_and_the_logits_equal_the_original(harness, tmp_path, name):
    model, arch = make(harness, name), name.split("-")[0]
    path = write(tmp_path / "model.gguf", model, arch)
    checkpoint, original = open_checkpoint(path), model.state_dict()
    assert checkpoint.sources.keys() == original.keys()
    for key, source in checkpoint.sources.items():
        np.testing.assert_allclose(source.read(), original[key], atol=3e-7, err_msg=key)
    ids = harness.random_ids(97)
    got = harness.Loaded(checkpoint).logits(ids)
    np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=5e-5)
    assert checkpoint.model.info.eos_token_ids == (7,)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.F16, Kind.BF16])
def test_quantised_tensors_equal_what_transformers_reads(harness, tmp_path, name, kind):
    model, arch = make(harness, name), name.split("-")[0]
    path = write(tmp_path / "model.gguf", model, arch, kind)
    want = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    sources = open_checkpoint(path).sources
    assert want.keys() >= {key for key in sources if key != "lm_head.weight"}
    for key, tensor in want.items():
        got, original = sources[key].read().astype(np.float32), model.state_dict()[key].numpy()
        np.testing.assert_array_equal(got, tensor.float().numpy(), err_msg=key)
        cosine = (got * original).sum() / np.linalg.norm(got) / np.linalg.norm(original)
        assert cosine > 0.99, key


def test_rope_factors_of_llama_3_are_applied(harness, tmp_path):
    """Llama 3.1 files carry frequencies' divisors as a tensor, which is not a parameter."""
    model = make(harness, "llama", rope_parameters=harness.LLAMA3_ROPE)
    base = 10000.0 ** -(np.arange(0, 8, 2) / 8)
    factors = base / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 4
    extra = [("rope_freqs.weight", factors)]
    path = write(tmp_path / "model.gguf", model, "llama", tensors=extra)
    checkpoint, ids = open_checkpoint(path), harness.random_ids(97)
    got = harness.Loaded(checkpoint).logits(ids)
    np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=5e-5)
    assert "rope_freqs.weight" not in checkpoint.sources


@pytest.mark.parametrize(
    ("rope", "extra"),
    [
        ({"rope_type": "linear", "factor": 4.0}, [("llama.rope.scaling.factor", 4.0)]),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            [
                ("llama.rope.scaling.factor", 4.0),
                ("llama.rope.scaling.original_context_length", 16),
            ],
        ),
    ],
)
def test_rope_scaling_in_the_metadata(harness, tmp_path, rope, extra):
    model = make(harness, "llama", rope_parameters={"rope_theta": 10000.0, **rope})
    extra = [("llama.rope.scaling.type", rope["rope_type"]), *extra]
    path = write(tmp_path / "model.gguf", model, "llama", extra=extra)
    ids = harness.random_ids(97)
    got = harness.Loaded(open_checkpoint(path)).logits(ids)
    np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=5e-5)


@pytest.mark.parametrize(
    ("arch", "layers", "scale"),
    [("gemma2", 46, 8**-0.5), ("gemma2", 2, 16**-0.5), ("gemma3", 62, 8**-0.5)],
)
def test_the_largest_gemmas_scale_by_hidden_size_over_heads(harness, tmp_path, arch, layers, scale):
    """llama.cpp knows them by their number of layers: 27B models."""
    model = make(harness, arch, num_hidden_layers=layers)
    path = write(tmp_path / "model.gguf", model, arch)
    assert open_checkpoint(path).model.info.attn[0].scale == pytest.approx(scale)


@pytest.mark.parametrize(
    "extra",
    [
        ("llama.attention.layer_norm_rms_epsilon_", "x"),
        ("llama.attention.sliding_window", "wide"),
        ("llama.final_logit_softcapping", "x"),
        ("llama.rope.freq_base_swa", -1.0),
        ("llama.rope.scaling.factor", "x"),
    ],
)
def test_metadata_of_a_wrong_type_is_an_error_that_names_it(harness, tmp_path, extra):
    key, _ = extra
    scaling = [("llama.rope.scaling.type", "linear")] if "scaling" in key else []
    path = write(tmp_path / "m.gguf", make(harness, "llama"), "llama", extra=[*scaling, extra])
    with pytest.raises(ModelError, match=key.rsplit(".", 1)[-1]):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("arch", "extra", "said"),
    [
        ("mamba", [], "architecture 'mamba'; supported GGUF architectures are llama"),
        ("llama", [("llama.expert_count", 8)], "llama.expert_count = 8"),
        ("llama", [("llama.logit_scale", 0.5)], "llama.logit_scale"),
        ("llama", [("llama.rope.scaling.type", "spiral")], "spiral"),
    ],
)
def test_what_is_not_implemented_is_refused(harness, tmp_path, arch, extra, said):
    path = write(tmp_path / "model.gguf", make(harness, "llama"), arch, extra=extra)
    with pytest.raises(UnsupportedModel, match=said):
        open_checkpoint(path)


def test_a_tensor_without_a_use_is_named(harness, tmp_path):
    extra = [("blk.0.attn_sinks.weight", np.ones(4))]
    path = write(tmp_path / "model.gguf", make(harness, "llama"), "llama", tensors=extra)
    with pytest.raises(CheckpointError, match=r"holds blk\.0\.attn_sinks"):
        open_checkpoint(path)


def test_a_damaged_file_is_an_error_of_the_model_and_nothing_else(harness, tmp_path):
    """Flip bytes all over the header: the file opens, or a typed error says why it does not."""
    path = write(tmp_path / "model.gguf", make(harness, "llama"), "llama", Kind.Q8_0)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    start = gguf.GGUFReader(path).data_offset
    said = []
    for _ in range(300):
        damaged = bytearray(data)
        for place in rng.integers(0, start, 2):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ModelError as error:
            said.append(str(error))
    assert len(said) > 100
    assert max(map(len, said)) < 2000


QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", [*QUANTISED, "IQ4_XS"])
def test_slices_of_quantised_weights_equal_slices_of_the_whole(tmp_path, name):
    kind = Kind[name]
    block, block_bytes = gguf.constants.GGML_QUANT_SIZES[kind]
    rng, shape = np.random.default_rng(0), (48, 2 * 256)
    raw = rng.integers(0, 60, (shape[0], shape[1] // block * block_bytes)).astype(np.uint8)
    (tmp_path / "raw").write_bytes(b"head" + raw.tobytes())
    info = TensorInfo("x", shape, name, 4, raw.nbytes)
    weight = QuantizedWeight(MappedFile(tmp_path / "raw"), info)
    want = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(weight.read(), want)
    for rows, columns in [((3, 7), (0, 512)), ((0, 48), (100, 300)), ((47, 48), (511, 512))]:
        index = (slice(*rows), slice(*columns))
        np.testing.assert_array_equal(weight.read(index), want[index])
    order = rng.permutation(48)
    got = weight.read_rows(order, (slice(5, 9), slice(64, 128)))
    np.testing.assert_array_equal(got, want[order][5:9, 64:128])


def test_a_slice_dequantises_only_its_blocks(tmp_path, monkeypatch):
    raw = np.zeros((64, 8 * 34), np.uint8)
    (tmp_path / "raw").write_bytes(raw.tobytes())
    info = TensorInfo("x", (64, 256), "Q8_0", 0, raw.nbytes)
    weight, sizes = QuantizedWeight(MappedFile(tmp_path / "raw"), info), []
    original = gguf.quants.dequantize
    monkeypatch.setattr(
        "leadframe.models.gguf_weights.quants.dequantize",
        lambda part, kind: sizes.append(part.nbytes) or original(part, kind),
    )
    weight.read((slice(8, 16), slice(32, 96)))
    assert sum(sizes) == 8 * 2 * 34


def test_only_the_architecture_decides_what_a_model_has(harness, tmp_path):
    """Behaviour 37: a Qwen3 file without its q and k norms is incomplete, not another model."""
    model = make(harness, "qwen3")
    path = tmp_path / "model.gguf"
    full = dict(gguf_tensors(model, "qwen3"))
    model.state_dict = lambda: {
        name: tensor
        for name, tensor in torch.nn.Module.state_dict(model).items()
        if "_norm." not in name
    }
    assert len(full) > len(dict(gguf_tensors(model, "qwen3")))
    write(path, model, "qwen3")
    with pytest.raises(CheckpointError, match=r"lacks .*k_norm"):
        open_checkpoint(path)


def test_names_of_a_directory_that_holds_one_file(harness, tmp_path):
    write(tmp_path / "tiny.Q8_0.gguf", make(harness, "llama"), "llama", Kind.Q8_0)
    (tmp_path / "notes.json").write_text(json.dumps({}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.name == "tiny.Q8_0"
    assert checkpoint.tokenizer_path == tmp_path / "tiny.Q8_0.gguf"
    assert checkpoint.total_bytes < 4 * checkpoint.model.info.num_parameters / 3
