"""Transformers' models with our paged attention, against Transformers with its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from leadframe.conformance.batches import BatchSpec, Padding, Row, live_tokens, make_batch
from leadframe.errors import CheckpointError, UnsupportedModel
from leadframe.platform import KVLayerSpec, KVSpec, build_op_table, unpack
from leadframe_cpu.backend import CpuBackend
from leadframe_torch.transformers_attention import Probe, ProbeMask, Step, attention
from leadframe_torch.transformers_layers import ATTRIBUTE, InProgress, OpLinear
from leadframe_torch.transformers_model import TransformersModel
from leadframe_torch.transformers_weights import WeightMover

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = COMMON | {"num_key_value_heads": 2}


def _configs():
    t = transformers
    return {
        "llama": t.LlamaConfig(**GROUPED),
        "gemma2": t.Gemma2Config(**GROUPED, head_dim=8, sliding_window=6),
        "gpt_neox": t.GPTNeoXConfig(**COMMON),
        "gpt2": t.GPT2Config(**COMMON),
        "opt": t.OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32),
        "stablelm": t.StableLmConfig(**GROUPED),
        # its router reads the type of a linear layer's weight
        "hunyuan_v1_moe": t.HunYuanMoEV1Config(**GROUPED, head_dim=8, num_experts=4, moe_topk=2),
        "olmoe": t.OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2),
        "granite": t.GraniteConfig(**GROUPED, logits_scaling=3.0, residual_multiplier=0.5),
        "cohere": t.CohereConfig(**GROUPED, logit_scale=0.2),
    }


@pytest.fixture
def saved(tmp_path):
    def make(name):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(
            _configs()[name], attn_implementation="eager"
        ).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return make


def _run(backend, model, weights, spec, ids, kv):
    batch = make_batch(spec)
    arrays = unpack(batch.bucket, torch.from_numpy(batch.ints), torch.from_numpy(batch.floats))
    live = live_tokens(spec)
    arrays.token_ids[torch.from_numpy(live)] = torch.from_numpy(ids.astype(np.int32))
    ops = build_op_table(backend)
    with torch.inference_mode():
        hidden, kv = model.forward(ops, weights, kv, arrays)
        return model.logits(ops, weights, hidden[torch.from_numpy(live)]).numpy(), kv


@pytest.fixture(params=["torch", "cpu"])
def either_backend(request, backend):
    """Plain torch, or the CPU's packed weights and kernels."""
    return backend if request.param == "torch" else CpuBackend(threads=2, native="on")


@pytest.mark.parametrize("name", _configs())
def test_chunks_and_decodes_match_transformers(either_backend, saved, rng, name):
    backend = either_backend
    path, original = saved(name)
    model = TransformersModel(path)
    weights = model.load(backend, "float32")
    kv = backend.kv_alloc(KVSpec(model.facts.kv_layers, 4), 20)
    ids = rng.integers(2, 101, (2, 14))
    with torch.inference_mode():
        want = original(torch.from_numpy(ids)).logits.numpy()
    tables = ((3, 1, 7, 2), (9, 4, 8, 5))
    # row 0 in chunks of 5 and 8 tokens, row 1 in one of 13; then both decode
    steps = [
        (BatchSpec((Row(5, 5, tables[0]),), 4, 0), ids[0, :5], want[0, :5]),
        (
            BatchSpec((Row(8, 13, tables[0]), Row(13, 13, tables[1])), 4, 0, Padding(tokens=2)),
            np.concatenate([ids[0, 5:13], ids[1, :13]]),
            np.concatenate([want[0, 5:13], want[1, :13]]),
        ),
        (
            BatchSpec((Row(1, 14, tables[0]), Row(1, 14, tables[1])), 4, 2, Padding(decodes=1)),
            ids[:, 13],
            want[:, 13],
        ),
    ]
    for spec, tokens, exact in steps:
        logits, kv = _run(backend, model, weights, spec, tokens, kv)
        np.testing.assert_allclose(logits, exact, atol=2e-4 * np.abs(want).max())


def test_facts_come_from_what_the_layers_ask(saved):
    path, original = saved("gemma2")
    facts = TransformersModel(path).facts
    assert [attn.window for attn in facts.attn] == [6, None, 6]
    assert {attn.softcap for attn in facts.attn} == {50.0}
    assert set(facts.kv_layers) == {KVLayerSpec(2, 8)}
    assert facts.num_heads == 4
    assert facts.attn[0].features == {"window", "softcap"}
    assert facts.num_parameters == sum(p.numel() for p in original.parameters())
    sizes = facts.vocab_size, facts.hidden_size, facts.max_position_embeddings
    assert sizes == (101, 32, 128)
    assert facts.eos_token_ids == (1,)
    assert facts.architecture == "Gemma2ForCausalLM"


def test_nothing_but_weights_and_tables_is_reported_as_progress(backend, saved):
    path, original = saved("gpt_neox")
    seen = []
    TransformersModel(path).load(backend, "float32", lambda *step: seen.append(step))
    done, total = zip(*seen, strict=True)
    stored = sum(p.nbytes for p in original.parameters())
    assert set(total) == {total[-1]}
    assert stored <= total[-1] < 1.05 * stored
    assert list(done) == sorted(done)
    assert done[-1] == total[-1]


def test_a_tied_head_is_stored_once_where_weights_are_plain(make_backend, saved):
    path, original = saved("gemma2")
    held, tables = [], 2 * 4 * 4 * 4  # inverse frequencies and their originals, of two kinds
    for is_plain in (False, True):
        backend = make_backend()
        backend._caps = replace(backend.caps, plain_weights=is_plain)
        weights = TransformersModel(path).load(backend, "float32")
        held.append(backend.held.current)
        del weights
    assert 0 <= held[1] - sum(p.nbytes for p in original.parameters()) <= tables
    assert held[0] - held[1] == original.lm_head.weight.nbytes


class FakeLayer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def _causal(batch, head, query, key):
    return key <= query


def _windowed(batch, head, query, key):
    return (key <= query) & (key > query - 3)


def _chunked(batch, head, query, key):
    return (key <= query) & (key // 3 == query // 3)


def _chunked_late(batch, head, query, key):
    return (key <= query) & (key // 15 == query // 15)


def _ask(sees=_causal, running=None, is_causal=True, **asked):
    current, layer = InProgress(), FakeLayer()
    layer.is_causal = is_causal
    setattr(layer, ATTRIBUTE, current)
    x = torch.zeros(1, 2, 3, 4)
    mask = None if sees is None else ProbeMask(sees)
    running = Probe(None, 16) if running is None else running
    with current.over(running):
        return attention(layer, x, x, x, mask, **asked)


def test_what_paged_attention_does_not_do_is_refused():
    assert _ask()[0].shape == (1, 3, 2, 4)
    with pytest.raises(UnsupportedModel, match="s_aux"):
        _ask(s_aux=torch.zeros(2))
    with pytest.raises(UnsupportedModel, match="not causal"):
        _ask(is_causal=False)
    with pytest.raises(UnsupportedModel, match="mask of its own"):
        _ask(running=Step(None, None, []))


def test_a_mask_must_be_what_the_layer_asked_for():
    _ask(_windowed, sliding_window=3)
    for sees, asked in [
        (_windowed, {}),  # a layer that windows by its mask alone
        (_windowed, {"sliding_window": 4}),
        (_causal, {"sliding_window": 3}),
        (_chunked, {}),
        (_chunked, {"sliding_window": 3}),
        (_chunked_late, {}),
        (None, {}),
    ]:
        with pytest.raises(UnsupportedModel, match="mask"):
            _ask(sees, **asked)


def test_a_layer_that_attends_twice_is_refused():
    probe = Probe(None, 16)
    _ask(running=probe)
    with pytest.raises(UnsupportedModel, match="more than once"):
        _ask(running=probe)


def _refused():
    t = transformers
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return {
        "H1ForCausalLM: .* state beside": t.FalconH1Config(
            **GROUPED, mamba_d_ssm=32, mamba_n_heads=4
        ),
        "MambaForCausalLM: .* state beside": t.MambaConfig(hidden_size=32, num_hidden_layers=2),
        "position_ids": t.BartConfig(d_model=32, decoder_layers=2, is_decoder=True),
        "max_position_embeddings": t.BloomConfig(hidden_size=32, n_layer=2, n_head=4),
        "not causal": t.BertConfig(**COMMON),
        "mask that is something else": t.Llama4TextConfig(
            **GROUPED, head_dim=8, attention_chunk_size=4, num_local_experts=2
        ),
        "depend on its neighbours": t.LlamaConfig(**GROUPED, rope_parameters=rope),
    }


@pytest.mark.parametrize("reason", _refused())
def test_a_model_that_would_be_served_wrongly_is_refused(tmp_path, reason):
    _refused()[reason].save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        TransformersModel(tmp_path)


def test_layers_that_are_special_stay_what_they_are(backend):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.two = torch.nn.Linear(4, 4)
            self.kept = torch.nn.Linear(4, 4)
            self.other = torch.nn.Linear(4, 4, dtype=torch.bfloat16)

    model = Twice()
    WeightMover(backend, "float32", None).move(model, InProgress(), op_linears=True)
    assert isinstance(model.one, OpLinear)
    assert model.one is model.two is not model.kept
    assert type(model.other) is torch.nn.Linear  # in another type, which it converts to itself
    assert model.other.weight.dtype == torch.bfloat16


def test_weights_must_be_those_of_the_config(backend, saved):
    path, _ = saved("llama")
    model = TransformersModel(path)
    weights = load_file(path / "model.safetensors")
    some = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.1\.mlp\.up_proj"):
        model.load(backend, "float32")
    weights |= {"model.layers.1.mlp.up_proj.weight": some, "model.extra.weight": some.clone()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds model\.extra\.weight"):
        model.load(backend, "float32")
