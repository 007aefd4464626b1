"""What ranks do together, over gloo between threads, and whole models shared by them."""

import threading

import numpy as np
import pytest
import torch

from leadframe.errors import ConfigError, DeviceLost, Unsupported
from leadframe.models.info import GenerationDefaults
from leadframe.models.model import DecoderModel
from leadframe.models.spec import DecoderSpec, LayerSpec, RopeSpec
from leadframe.platform import AttnParams, KVLayerSpec, KVSpec, Limits, build_op_table, unpack
from leadframe.platform.batch import Bucket, StepBatch, packed_sizes
from leadframe_torch import Rank
from leadframe_torch.collectives import Collectives
from leadframe_torch.steps import RecordedStep

CPU = torch.device("cpu")


@pytest.fixture
def in_ranks(tmp_path):
    """Calls a function with each `Rank` of a group, in threads; returns the results."""

    def run(count, function):
        results = [None] * count

        def one(index):
            try:
                results[index] = function(Rank(index, count, str(tmp_path)))
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3])
def test_sums_and_joins(in_ranks, count, dtype):
    def exchange(rank):
        shared = Collectives(rank, CPU)
        x = (torch.arange(6.0).reshape(2, 3) + 10 * rank.index).to(dtype)
        before = x.clone()
        total, turned, joined = (
            shared.all_reduce(x), shared.all_reduce(x.T), shared.all_gather(x)
        )  # fmt: skip
        assert torch.equal(x, before), "an argument was changed"
        return total, turned, joined

    rows = [torch.arange(6.0).reshape(2, 3) + 10 * i for i in range(count)]
    for total, turned, joined in in_ranks(count, exchange):
        assert torch.equal(total, sum(rows).to(dtype))
        assert torch.equal(turned, total.T)
        assert torch.equal(joined, torch.cat(rows, -1).to(dtype))


def test_a_sum_does_not_depend_on_who_else_is_in_the_batch(in_ranks):
    """gloo's own sums do from three ranks on."""

    def exchange(rank):
        shared = Collectives(rank, CPU)
        x = torch.randn(7, 65, generator=torch.Generator().manual_seed(rank.index))
        return shared.all_reduce(x), torch.cat([shared.all_reduce(row) for row in x.split(1)])

    first = None
    for together, alone in in_ranks(3, exchange):
        assert torch.equal(together, alone)
        first = together if first is None else first
        assert torch.equal(together, first), "ranks disagree"


def test_a_shared_table_gives_the_rows_of_the_whole_one(in_ranks, rng):
    whole = torch.from_numpy(rng.standard_normal((12, 5), np.float32))
    ids = torch.tensor([0, 3, 4, 11, 7, -1, 99], dtype=torch.int32)

    def look_up(rank):
        embed = Collectives(rank, CPU).shared_embed(lambda table, ids: table[ids.long()])
        return embed(whole.chunk(rank.count)[rank.index], ids)

    for rows in in_ranks(3, look_up):
        assert torch.equal(rows, whole[ids.long().clamp(0, 11)])


def test_a_rank_that_leaves_is_missed(in_ranks):
    met = threading.Barrier(2)

    def exchange(rank):
        shared = Collectives(rank, CPU)
        shared.all_reduce(torch.ones(1))
        met.wait(30)
        if rank.index == 1:
            shared.close()
            return
        with pytest.raises(DeviceLost, match="rank 0 of 2 cannot reach the others"):
            shared.all_reduce(torch.ones(1))

    in_ranks(2, exchange)


def test_nothing_is_exchanged_before_it_is_needed(make_backend, tmp_path):
    make_backend(rank=Rank(0, 2, str(tmp_path))).close()
    assert not list(tmp_path.iterdir())


def test_one_rank_keeps_its_ops(make_backend):
    ops = make_backend(rank=Rank.of(Limits())).ops
    x = torch.ones(2)
    assert ops["all_reduce"](x) is x
    assert ops["all_gather"](x) is x


def test_ranks_exclude_traced_steps(make_backend):
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 2 with -o compile=step"):
        make_backend(rank=Rank(0, 2), compile_mode="step")


def test_kv_heads_divide_or_are_repeated_or_refused(make_backend):
    backend = make_backend(rank=Rank(0, 4))
    assert [backend.kv_heads(KVLayerSpec(heads, 8)) for heads in (8, 4, 2, 1)] == [2, 1, 1, 1]
    assert backend.kv_block_bytes(KVSpec((KVLayerSpec(8, 8),), 4)) == 2 * 4 * 2 * 8 * 4
    with pytest.raises(Unsupported, match="6 KV heads do not divide among 4 ranks"):
        backend.kv_heads(KVLayerSpec(6, 8))


class Recorder:
    """Records by keeping the function: a replay runs it into the recorded result."""

    bytes = 0

    def record(self, function):
        self.function, self.result = function, function()
        return self, self.result

    def replay(self):
        for name, value in self.function()[0].items():
            self.result[0][name].copy_(value)

    def close(self):
        self.function = self.result = None


def test_ranks_record_and_replay_together(make_backend, in_ranks):
    """Recording runs a step on padding, and so exchanges: every rank must do it."""
    bucket = Bucket(2, 1, 0, 1, num_logits=0, sample="skip")

    def run(rank):
        backend = make_backend(rank=rank, graphs=Recorder())

        def step(weights, kv, arrays):
            own = arrays.token_ids.float() * (1 + rank.index)
            return {"total": backend.ops["all_reduce"](own)}, kv

        compiled = backend.compile(step, bucket, {}, [])
        assert isinstance(compiled, RecordedStep)
        totals = []
        for ids in ([1, 2], [30, 40]):
            ints = np.zeros(packed_sizes(bucket)[0], np.int32)
            unpack(bucket, ints, None).token_ids[:] = ids
            outputs, _ = compiled.run(StepBatch(bucket, ints, np.zeros(0, np.float32), 2, 1, 2), [])
            totals.append(backend.download(outputs["total"]).tolist())
        return totals

    assert in_ranks(2, run) == [[[3, 6], [90, 120]]] * 2


# --- whole models ---------------------------------------------------------------------------

BLOCK = 4
ROPE = RopeSpec(tuple(10000.0 ** -(np.arange(4) / 4)))
BASE = {
    "architecture": "tiny",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "layers": (LayerSpec(AttnParams.of(8**-0.5)),) * 2,
    "ropes": (ROPE,),
    "max_position_embeddings": 64,
    "norm_eps": 1e-5,
}
GEMMA = {
    "num_kv_heads": 1,
    "layers": (
        LayerSpec(AttnParams.of(0.3, window=5, softcap=20.0)),
        LayerSpec(AttnParams.of(0.3, softcap=20.0)),
    ),
    "norm_offset": 1.0,
    "activation": "gelu",
    "embed_scale": 32**0.5,
    "final_softcap": 15.0,
    "qk_norm": True,
    "sandwich_norms": True,
    "tied": True,
}
FAMILIES = {
    "llama": ({}, 2),
    "kv-heads-repeated": ({"tied": True}, 4),
    "odd": ({"num_heads": 6, "num_kv_heads": 3, "hidden_size": 48}, 3),
    "qwen": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tied": True}, 2),
    "gemma": (GEMMA, 2),
}


def host_weights(model):
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(p.shape) / np.sqrt(p.shape[-1])).astype(np.float32)
        for name, p in model.parameters.items()
        if p.tied_to is None
    }


def logits(backend, model, host):
    """Logits of a sequence of 9 tokens, in a chunk of 8 and a decode."""
    weights = {n: backend.upload(v, d or "float32") for n, (v, d) in model.constants.items()}
    for name, parameter in model.parameters.items():
        source = host[parameter.tied_to or name]
        weights[name] = backend.upload(source, "float32", parameter.partition, parameter.role)
    kv = backend.kv_alloc(KVSpec(model.info.kv_layers, BLOCK), 4)
    ops, table, out = build_op_table(backend), np.array([3, 1, 2]), []
    for start, size in ((0, 8), (8, 1)):
        positions = np.arange(start, start + size)
        slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
        is_decode = size == 1
        bucket = Bucket(size, 1, int(is_decode), num_blocks=3, num_logits=size)
        ids = positions * 11 % 96
        parts = [[0, size], [start + size], table, slots, positions, ids, np.arange(size)]
        ints = torch.from_numpy(np.concatenate(parts).astype(np.int32))
        hidden, kv = model.forward(ops, weights, kv, unpack(bucket, ints, torch.zeros(0)))
        out.append(backend.download(model.logits(ops, weights, hidden)))
    return np.concatenate(out)


@pytest.mark.parametrize(("changes", "count"), FAMILIES.values(), ids=FAMILIES)
def test_ranks_compute_what_one_device_computes(make_backend, in_ranks, changes, count):
    model = DecoderModel(DecoderSpec(**(BASE | changes)), GenerationDefaults())
    host = host_weights(model)
    want = logits(make_backend(), model, host)
    found = in_ranks(count, lambda rank: logits(make_backend(rank=rank), model, host))
    assert want.std() > 0.1
    for one in found:
        np.testing.assert_allclose(one, want, atol=1e-4)
