"""The step is written over ops alone, and runs unchanged on one rank's share of a model."""

import ast
import dataclasses
import inspect
import threading

import numpy as np
import pytest

from leadframe.models import decoder, open_checkpoint
from leadframe.models.spec import DecoderSpec, LayerSpec, RopeSpec
from leadframe.platform.backend import KVLayerSpec, KVSpec, Partition
from leadframe.platform.op_table import build_op_table
from leadframe.platform.ops import OP_NAMES
from leadframe.platform.reference.backend import ReferenceBackend

OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub)
FUNCTIONS = {"zip", "enumerate", "rope_name"}
METHODS = {"reshape", "get", "append"}
FIELDS = {
    *(f.name for spec in (DecoderSpec, LayerSpec, RopeSpec) for f in dataclasses.fields(spec)),
    *(f.name for f in dataclasses.fields(decoder._Step)),
    *("positions", "token_ids", "bucket", "num_tokens", "norm", "add_norm", "heads"),
}


def offences(source):
    """What a step's source does to arrays besides ops, + - * /, slicing and reshape."""
    tree = ast.parse(source)
    local = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    bound = {"gated"}
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        for node in (n for statement in function.body for n in ast.walk(statement)):
            if isinstance(node, ast.BinOp | ast.UnaryOp | ast.AugAssign):
                if not isinstance(node.op, (*OPERATORS, ast.Not)):
                    yield ast.unparse(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id not in local | classes | FUNCTIONS | bound:
                    yield ast.unparse(node)
            elif isinstance(node, ast.Attribute):
                if node.attr not in FIELDS | METHODS | set(OP_NAMES) | {"ops"}:
                    yield ast.unparse(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield ast.unparse(node)


def test_the_decoder_uses_ops_plain_operators_slicing_and_reshape_only():
    assert list(offences(inspect.getsource(decoder))) == []
    for node in ast.parse(inspect.getsource(decoder)).body:
        if isinstance(node, ast.Import):
            pytest.fail(ast.unparse(node))
        if isinstance(node, ast.ImportFrom):
            allowed = ("__future__", "collections.abc", "dataclasses", "typing", "leadframe.")
            assert node.module.startswith(allowed)


@pytest.mark.parametrize(
    "body",
    [
        "x @ w",
        "x ** 2",
        "x.sum()",
        "x.T",
        "x.shape[0]",
        "np.exp(x)",
        "x.astype('float32')",
        "ops.spiral(x)",
        "int(x)",
        "x // 2",
        "x & 1",
    ],
)
def test_the_reader_of_the_syntax_tree_notices(body):
    assert list(offences(f"def step(ops, x, w):\n    return {body}"))


class Group:
    """Ranks in threads that sum and concatenate over each other's arrays."""

    def __init__(self, size):
        self.size, self.slots, self.barrier = size, [None] * size, threading.Barrier(size)

    def exchange(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait(timeout=60)
        values = list(self.slots)
        self.barrier.wait(timeout=60)
        return values


def share(array, partition, rank, size):
    """A rank's part by the definition of `Partition`: whole heads, repeated when they are few."""
    if partition.axis is None:
        return array
    if partition.heads is None:
        return np.array_split(array, size, partition.axis)[rank]
    heads = np.split(array, partition.heads, partition.axis)
    assert heads[0].shape[partition.axis] == partition.unit
    heads = [h for h in heads for _ in range(max(1, size // partition.heads))]
    count = len(heads) // size
    return np.concatenate(heads[rank * count : (rank + 1) * count], partition.axis)


def run_rank(harness, checkpoint, group, rank, ids, out):
    backend, model = ReferenceBackend(), checkpoint.model
    weights = {name: backend.upload(value) for name, (value, _) in model.constants.items()}
    for name, parameter in model.parameters.items():
        partition = Partition() if parameter.role == "embed" else parameter.partition
        whole = checkpoint.sources[name].read()
        weights[name] = backend.upload(share(whole, partition, rank, group.size))
    ops = build_op_table(backend)
    ops.all_reduce = lambda x: sum(group.exchange(rank, x))
    ops.all_gather = lambda x: np.concatenate(group.exchange(rank, x), -1)
    kv_heads = max(1, model.info.kv_layers[0].num_kv_heads // group.size)
    layers = (KVLayerSpec(kv_heads, model.info.kv_layers[0].head_dim),) * len(model.info.kv_layers)
    kv = backend.kv_alloc(KVSpec(layers, harness.BLOCK), 8)
    arrays = harness.one_row(ids, 0, np.arange(1, 8))
    hidden, _ = model.forward(ops, weights, kv, arrays)
    out[rank] = model.logits(ops, weights, hidden)


@pytest.mark.parametrize(
    ("kind", "changes", "size"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 96}, 2),
        ("Llama", {"vocab_size": 96}, 4),  # two KV heads for four ranks: heads are repeated
        ("Gemma3Text", {"head_dim": 16, "num_key_value_heads": 1, "vocab_size": 96}, 2),
    ],
)
def test_tensor_parallel_ranks_agree_with_the_whole_model(harness, tmp_path, kind, changes, size):
    model = harness.random_model(harness.tiny(kind, **changes))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    ids, group, out = harness.random_ids(96), Group(size), [None] * size
    ranks = [
        threading.Thread(target=run_rank, args=(harness, checkpoint, group, rank, ids, out))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    for logits in out:
        np.testing.assert_allclose(logits, harness.hf_logits(model, ids), atol=5e-5)
