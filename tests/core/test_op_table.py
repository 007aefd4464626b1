"""Resolution of ops: order, reasons, and what a step may call."""

from dataclasses import replace

import numpy as np
import pytest

from leadframe.errors import ConfigError, Unsupported
from leadframe.platform import OP_NAMES, Capabilities, KernelImpl, OpSpec, build_op_table
from leadframe.platform.reference.backend import ReferenceBackend


class _Partial(ReferenceBackend):
    """Implements the required ops and `linear`, which serves only float32."""

    caps = Capabilities(
        family="numpy",
        plain_weights=True,
        why_not=lambda spec: "no float64" if spec.dtype == "float64" else None,
    )

    @property
    def ops(self):
        names = ("kv_append", "attention", "kv_copy", "linear")
        return {name: super(_Partial, self).ops[name] for name in names}


def _by_op(table):
    return {choice.op: choice for choice in table.choices}


def _kernel(name, priority, why_not=lambda spec: None, op="linear"):
    return KernelImpl(op, name, lambda *args: name, why_not, priority)


def test_backend_ops_come_before_references():
    table = build_op_table(_Partial(), platform="mine")
    chosen = _by_op(table)
    assert set(chosen) == set(OP_NAMES)
    assert chosen["linear"].implementation == "mine"
    assert chosen["rms_norm"].implementation == "reference"


def test_an_objection_passes_on_with_its_reason():
    specs = [OpSpec("linear", "float32"), OpSpec("linear", "float64")]
    choice = _by_op(build_op_table(_Partial(), specs, platform="mine"))["linear"]
    assert choice.implementation == "reference"
    assert choice.passed_over == (("mine", "no float64"),)
    assert "not mine: no float64" in build_op_table(_Partial(), specs, platform="mine").report()


class _Packing(_Partial):
    """Stores weights for its own `linear`; anything may be in them."""

    caps = replace(_Partial.caps, plain_weights=False)


@pytest.mark.parametrize("fallback", ["device", "host"])
def test_a_definition_never_reads_weights_that_were_packed(fallback):
    specs = [OpSpec("linear", "float64")]
    with pytest.raises(Unsupported) as caught:
        build_op_table(_Packing(), specs, fallback=fallback)
    assert str(caught.value).startswith(
        "linear is not supported for dtype float64: backend: no float64; reference: weights may "
        "be packed for the device's own linear"
    )
    with pytest.raises(Unsupported, match="packed"):
        build_op_table(_Packing(), order={"linear": ["reference"]})
    assert _by_op(build_op_table(_Packing()))["embed"].implementation == "reference"


def test_a_spec_says_what_it_has():
    features = frozenset({"window", "softcap"})
    spec = OpSpec("attention", "float16", head_dim=64, block_size=16, features=features)
    assert str(spec) == "dtype float16, head_dim 64, block_size 16, features softcap, window"


def test_kernels_stand_above_or_below_by_priority():
    over, under = _kernel("over", 5), _kernel("under", -1)
    table = build_op_table(_Partial(), kernels=[under, over])
    assert table.linear() == "over"
    specs = [OpSpec("linear", "float64")]
    assert build_op_table(_Partial(), specs, [under]).linear() == "under"
    refuses = _kernel("over", 5, lambda spec: "wrong chip")
    choice = _by_op(build_op_table(_Partial(), kernels=[refuses]))["linear"]
    assert choice.passed_over == (("over", "wrong chip"),)


def test_the_users_order_is_exactly_what_is_tried():
    kernels = [_kernel("fast", 5)]
    table = build_op_table(_Partial(), kernels=kernels, order={"linear": ["reference"]})
    assert _by_op(table)["linear"].implementation == "reference"
    with pytest.raises(Unsupported, match="no float64"):
        build_op_table(
            _Partial(), [OpSpec("linear", "float64")], order={"linear": ["mine"]}, platform="mine"
        )


@pytest.mark.parametrize(
    ("order", "message"),
    [({"linaer": ["x"]}, "did you mean 'linear'"), ({"linear": ["fsat"]}, "did you mean 'fast'")],
)
def test_a_name_that_does_not_exist_is_an_error(order, message):
    with pytest.raises(ConfigError, match=message):
        build_op_table(_Partial(), kernels=[_kernel("fast", 5)], order=order)


def test_required_ops_have_no_fallback():
    specs = [OpSpec("attention", "float64")]
    for fallback in ("device", "host"):
        with pytest.raises(Unsupported, match="attention"):
            build_op_table(_Partial(), specs, fallback=fallback)


def test_the_host_serves_only_when_asked():
    backend = _Partial()
    order = {"softcap": ["host"]}
    with pytest.raises(ConfigError):
        build_op_table(backend, order=order)
    table = build_op_table(backend, order=order, fallback="host")
    x = backend.upload(np.float32([1, 2]))
    np.testing.assert_allclose(table.softcap(x, 2.0), 2 * np.tanh(np.float32([0.5, 1])), rtol=1e-6)


def test_an_unknown_op_of_the_table_says_what_was_meant():
    with pytest.raises(AttributeError, match="rms_norm"):
        _ = build_op_table(_Partial()).rms_nrom


def test_the_report_is_plain_data():
    rows = build_op_table(_Partial(), platform="mine").as_json()
    assert rows[0] == {"op": "kv_append", "implementation": "mine", "passed_over": ()}
