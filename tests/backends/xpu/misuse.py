"""Planted mistakes, each of which IPEX's kernels answer with a crash or a wrong result."""

from __future__ import annotations

from dataclasses import replace

from leadframe.platform import KVLayerSpec, KVSpec


class Bench:
    """A backend, its cache and a batch, so that a mistake is one changed argument."""

    def __init__(self, backend, case, cases, dtype):
        self.case, self.ops = case, backend.ops
        spec = KVSpec(
            (KVLayerSpec(case.kv_heads, case.dim),),
            case.block_size,
            str(dtype).removeprefix("torch."),
        )
        self.kv = backend.kv_alloc(spec, cases.num_blocks(case))[0]
        self.arrays = cases.step_arrays(case)
        tokens = self.arrays.bucket.num_tokens
        self.q = cases.random((tokens, case.heads, case.dim), 2, dtype)
        self.k = cases.random((tokens, case.kv_heads, case.dim), 3, dtype)

    def run(self, *, kv=None, q=None, k=None, **changed):
        kv = self.kv if kv is None else kv
        q, k = (own if given is None else given for own, given in ((self.q, q), (self.k, k)))
        plan = self.ops["plan"](replace(self.arrays, **changed), self.case.params)
        self.ops["kv_append"](kv, k, k, plan)
        return self.ops["attention"](q, kv, plan, self.case.params)

    def copy(self, name):
        return getattr(self.arrays, name).clone()


def _set(bench, name, index, value):
    array = bench.copy(name)
    array[index] = value
    return {name: array}


def _other_layout(bench):
    """The same shape with the layout of the other build."""
    return (
        bench.kv.transpose(2, 3).contiguous().transpose(2, 3)
        if bench.kv.is_contiguous()
        else (bench.kv.contiguous())
    )


MISUSE = {
    "slot -1": (lambda b: _set(b, "slots", 0, -1), r"slots\[0\] is -1"),
    "slot past the cache": (lambda b: _set(b, "slots", 2, 10**6), "slot 1000000 lies past"),
    "int64 slots": (lambda b: {"slots": b.copy("slots").long()}, "slots is torch.int64"),
    "int64 tables": (
        lambda b: {"block_table": b.copy("block_table").long()},
        "block_table is torch.int64",
    ),
    "int64 lengths": (lambda b: {"seq_lens": b.copy("seq_lens").long()}, "seq_lens is torch.int64"),
    "block -1": (lambda b: _set(b, "block_table", (1, 0), -1), "block_table holds -1"),
    "block past the cache": (lambda b: _set(b, "block_table", (1, 0), 999), "block 999 lies past"),
    "fewer slots than tokens": (lambda b: {"slots": b.copy("slots")[:-1]}, "slots has shape"),
    "strided table": (
        lambda b: {"block_table": b.copy("block_table").repeat_interleave(2, 1)[:, ::2]},
        "gaps between its elements",
    ),
    "more keys than the table covers": (lambda b: _set(b, "seq_lens", 0, 9999), "9999 keys"),
    "fewer keys than tokens": (lambda b: _set(b, "seq_lens", -1, 2), r"seq_lens\[\d+\] is 2"),
    "negative length": (lambda b: _set(b, "seq_lens", 0, -3), r"seq_lens\[0\] is -3"),
    "decode rows out of step": (
        lambda b: _set(b, "query_start", 1, 2),
        "decode row i owns token i",
    ),
    "more tokens than the batch": (lambda b: _set(b, "query_start", -1, 999), "999"),
    "the other layout": (lambda b: {"kv": _other_layout(b)}, "its strides are"),
    "cache without sides": (lambda b: {"kv": b.kv[0]}, "must come from kv_alloc"),
    "cache of another type": (lambda b: {"kv": b.kv.double()}, "the cache is torch.float64"),
    "queries of another dim": (lambda b: {"q": b.q[..., :-1]}, "q has shape"),
    "heads that do not divide": (lambda b: {"q": b.q[:, :-1]}, "q has shape"),
    "keys of another dim": (lambda b: {"k": b.k[..., :-1]}, "k has shape"),
    "keys of another type": (lambda b: {"k": b.k.double()}, "k is torch.float64"),
    "queries of another type": (lambda b: {"q": b.q.double()}, "q is torch.float64"),
}
"""name → (changed arguments of `Bench.run`, what the error says)"""
