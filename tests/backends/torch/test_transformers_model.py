"""Transformers' models with our paged attention, against Transformers with its own."""

import numpy as np
import pytest
import torch

from leadframe.conformance.batches import BatchSpec, Padding, Row, live_tokens, make_batch
from leadframe.errors import UnsupportedModel
from leadframe.platform import KVSpec, build_op_table, unpack
from leadframe_cpu.backend import CpuBackend
from leadframe_torch.transformers_model import TransformersModel, _attention

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


def _run(backend, model, spec, ids, kv):
    batch = make_batch(spec)
    arrays = unpack(batch.bucket, torch.from_numpy(batch.ints), torch.from_numpy(batch.floats))
    live = live_tokens(spec)
    arrays.token_ids[torch.from_numpy(live)] = torch.from_numpy(ids.astype(np.int32))
    ops = build_op_table(backend)
    with torch.inference_mode():
        hidden, kv = model.forward(ops, {}, kv, arrays)
        return model.logits(ops, {}, hidden[torch.from_numpy(live)]).numpy(), kv


@pytest.fixture(params=["torch", "cpu"])
def either_backend(request, backend):
    """Plain torch, or the CPU's packed weights and kernels."""
    return backend if request.param == "torch" else CpuBackend(threads=2, native="on")


@pytest.mark.parametrize("name", _configs())
def test_chunks_and_decodes_match_transformers(either_backend, saved, rng, name):
    backend = either_backend
    path, original = saved(name)
    model = TransformersModel(path)
    model.load(backend, "float32")
    kv = backend.kv_alloc(KVSpec(tuple(x.kv for x in model.layers), 4), 20)
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
        logits, kv = _run(backend, model, spec, tokens, kv)
        np.testing.assert_allclose(logits, exact, atol=2e-4 * np.abs(want).max())


def test_facts_come_from_what_the_layers_ask(saved):
    path, _ = saved("gemma2")
    model = TransformersModel(path)
    assert [x.attn.window for x in model.layers] == [6, None, 6]
    assert {x.attn.softcap for x in model.layers} == {50.0}
    assert {(x.num_heads, x.kv.num_kv_heads, x.kv.head_dim) for x in model.layers} == {(4, 2, 8)}
    assert model.layers[0].attn.features == {"window", "softcap"}
    assert model.num_parameters > 0


class FakeLayer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def _ask(module=None, mask=None, **asked):
    x = torch.zeros(1, 2, 3, 4)
    return _attention(module or FakeLayer(), x, x, x, mask, **asked)


def test_what_paged_attention_does_not_do_is_refused():
    with pytest.raises(UnsupportedModel, match="does not pass keywords"):
        _ask()
    with pytest.raises(UnsupportedModel, match="s_aux"):
        _ask(leadframe_step=object(), s_aux=torch.zeros(2))
    with pytest.raises(UnsupportedModel, match="mask"):
        _ask(leadframe_step=object(), mask=torch.zeros(1))
    both_ways = FakeLayer()
    both_ways.is_causal = False
    with pytest.raises(UnsupportedModel, match="not causal"):
        _ask(both_ways, leadframe_step=object())


def test_a_model_without_the_interface_is_refused(tmp_path):
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=101, state_size=4
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="native model file"):
        TransformersModel(tmp_path)
