"""Group I: what is claimed is exercised elsewhere; what is not claimed must be refused here."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

from leadframe.conformance.attention_cases import Shape
from leadframe.conformance.case import Case, matches
from leadframe.conformance.groups.b_attention import fit
from leadframe.conformance.kit import Kit
from leadframe.conformance.loading import open_again
from leadframe.conformance.open_kit import LIMITS
from leadframe.errors import BackendBug, LeadframeError
from leadframe.platform import OP_NAMES, KVLayerSpec, KVSpec, OpSpec

_FEATURES = ("window", "softcap")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int4")


def _refused(kit: Kit, what: str, spec: OpSpec) -> None:
    reason = kit.backend.caps.why_not(spec)
    kit.check(
        isinstance(reason, str) and bool(reason.strip()),
        f"{what} is not claimed, and why_not({spec}) is {reason!r}: it must say why",
    )


def _accepted(kit: Kit, what: str, spec: OpSpec) -> None:
    reason = kit.backend.caps.why_not(spec)
    kit.check(reason is None, f"{what} is claimed, and why_not({spec}) says {reason!r}")


def _base(kit: Kit) -> OpSpec:
    return fit(kit, Shape()).op_spec


def _features(kit: Kit) -> None:
    for name in _FEATURES:
        spec = replace(_base(kit), features=frozenset({name}))
        is_claimed = name in kit.backend.caps.attention_features
        (_accepted if is_claimed else _refused)(kit, f"attention feature {name!r}", spec)


def _future_feature(kit: Kit) -> None:
    """A feature that did not exist when the backend was written is never accepted."""
    for name in ("sinks", "a feature of the future"):
        if name not in kit.backend.caps.attention_features:
            spec = replace(_base(kit), features=frozenset({name}))
            _refused(kit, f"attention feature {name!r}", spec)


def _known_features(kit: Kit) -> None:
    """Claiming a feature that the kit does not know claims what nobody has checked."""
    unknown = kit.backend.caps.attention_features - set(_FEATURES)
    kit.check(not unknown, f"claims attention features that contract 1.0 has not: {unknown}")


def _dtypes(kit: Kit) -> None:
    caps = kit.backend.caps
    for dtype in _DTYPES:
        spec = replace(_base(kit), dtype=dtype, kv_dtype=None)
        is_claimed = dtype in caps.compute_dtypes
        (_accepted if is_claimed else _refused)(kit, f"dtype {dtype}", spec)


def _kv_dtypes(kit: Kit) -> None:
    caps = kit.backend.caps
    for dtype in _DTYPES:
        if dtype not in caps.kv_dtypes:
            spec = KVSpec((KVLayerSpec(1, _base(kit).head_dim or 64),), caps.block_sizes[0], dtype)
            kit.raises(LeadframeError, f"kv_alloc in {dtype}", partial(_alloc, kit, spec))


def _alloc(kit: Kit, spec: KVSpec) -> Any:
    return kit.backend.kv_alloc(spec, 2)


def _head_dims(kit: Kit) -> None:
    dims = kit.backend.caps.head_dims
    for dim in (16, 72, 96, 512):
        if dims is not None and dim not in dims:
            _refused(kit, f"head dim {dim}", replace(_base(kit), head_dim=dim))
    for dim in dims or ():
        _accepted(kit, f"head dim {dim}", replace(_base(kit), head_dim=dim))


def _block_sizes(kit: Kit) -> None:
    for size in kit.backend.caps.block_sizes:
        _accepted(kit, f"block size {size}", replace(_base(kit), block_size=size))
    for size in (3, 7, 48):
        if size not in kit.backend.caps.block_sizes:
            _refused(kit, f"block size {size}", replace(_base(kit), block_size=size))


def _own_ops(kit: Kit) -> None:
    """`why_not` has no objection to what a backend implements, in the dtype it likes best."""
    for op in kit.backend.ops:
        if op in OP_NAMES and op != "attention":
            _accepted(kit, f"op {op!r}", OpSpec(op, dtype=kit.dtype))


def _table(kit: Kit) -> None:
    """Every op resolves; the report says to what."""
    kit.metrics["op_table"] = {c.op: c.implementation for c in kit.table.choices}
    kit.check(len(kit.table.choices) == len(OP_NAMES), "an op did not resolve")


def _notes(kit: Kit) -> None:
    """Every note carries its reason."""
    notes = kit.notes
    empty = [p for p, why in {**notes.unsupported, **notes.expected_failures}.items() if not why]
    empty += [key for key, (_, why) in notes.tolerances.items() if not why]
    kit.check(not empty, f"notes without a reason: {empty}")
    from leadframe.conformance.groups import all_cases

    ids = [case.id for case in all_cases()]
    patterns = [*notes.unsupported, *notes.expected_failures]
    stale = [p for p in patterns if not any(matches(case_id, p) for case_id in ids)]
    kit.check(not stale, f"notes that match no case: {stale}")


def _stable_caps(kit: Kit) -> None:
    backend = getattr(kit.backend, "unguarded", kit.backend)
    kit.check(backend.caps is backend.caps, "caps is not the same object every time")


def _too_many_ranks(kit: Kit) -> None:
    """More devices than are claimed are refused, if only by not claiming them then either.

    Without a plugin there is nothing that could be asked for them.
    """
    most = kit.backend.caps.tensor_parallel
    if not kit.probe_args:
        return
    with tempfile.TemporaryDirectory() as folder:
        limits = replace(LIMITS, tensor_parallel_size=most + 1, rendezvous=folder)
        try:
            _, backend = open_again(kit.probe_args, limits)
        except BackendBug:
            raise
        except LeadframeError:
            return
        says = backend.caps.tensor_parallel
        backend.close()
    kit.check(
        says <= most,
        f"tensor_parallel is {most}, and {says} once {most + 1} devices are asked for",
    )


CASES = [
    Case("I.features[claimed-or-refused]", _features),
    Case("I.features[future]", _future_feature),
    Case("I.features[known]", _known_features),
    Case("I.dtypes[compute]", _dtypes),
    Case("I.dtypes[kv]", _kv_dtypes),
    Case("I.head_dims[claimed-or-refused]", _head_dims),
    Case("I.block_sizes[claimed-or-refused]", _block_sizes),
    Case("I.ops[own]", _own_ops),
    Case("I.ops[table]", _table),
    Case("I.ranks[too-many]", _too_many_ranks),
    Case("I.notes[reasons]", _notes),
    Case("I.caps[stable]", _stable_caps),
]
