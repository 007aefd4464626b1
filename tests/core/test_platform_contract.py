"""The contract's golden file: what changes it without a version bump fails here."""

import dataclasses
import inspect
import json
import os
from pathlib import Path

import pytest

import leadframe.platform as contract
from leadframe import errors
from leadframe.platform import (
    CONTRACT,
    ENTRY_POINT_GROUP,
    KERNEL_GROUP,
    MEMBERS,
    MODEL_IMPL_GROUP,
    OP_NAMES,
    OPTIONAL_HOOKS,
    REQUIRED_HOOKS,
    REQUIRED_OPS,
    Backend,
    CompiledStep,
    ModelImpl,
    Ops,
    SplitStep,
    WeightSource,
    hookspecs,
)

GOLDEN = Path(__file__).parent / "contract.json"
DATA = (
    "PlatformInfo",
    "Device",
    "Detection",
    "Limits",
    "OptionSpec",
    "KernelImpl",
    "ConformanceNotes",
    "MemoryInfo",
    "Capabilities",
    "AttnParams",
    "OpSpec",
    "Bucket",
    "StepArrays",
    "StepBatch",
    "Partition",
    "KVLayerSpec",
    "KVSpec",
    "WeightBlocks",
    "ModelFacts",
)


def _fields(kind):
    out = []
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING
        has_factory = field.default_factory is not dataclasses.MISSING
        default = " = ..." if has_default or has_factory else ""
        out.append(f"{field.name}: {field.type}{default}")
    return out


def _methods(protocol, names):
    out = {}
    for name in names:
        member = inspect.getattr_static(protocol, name)
        is_property = isinstance(member, property)
        text = "property" if is_property else str(inspect.signature(member))
        out[name] = text
    return out


def _public(protocol):
    return [name for name in vars(protocol) if not name.startswith("_")]


def describe():
    """Everything that a plugin can see, in order."""
    hooks = (*REQUIRED_HOOKS, *OPTIONAL_HOOKS)
    tree = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.PlatformError)
    }
    return {
        "contract": list(CONTRACT),
        "groups": [ENTRY_POINT_GROUP, KERNEL_GROUP, MODEL_IMPL_GROUP],
        "hooks": {name: str(inspect.signature(getattr(hookspecs, name))) for name in hooks},
        "members": _methods(Backend, MEMBERS),
        "compiled_step": {
            **CompiledStep.__annotations__,
            **_methods(CompiledStep, ["run", "close"]),
        },
        "split_step": _methods(SplitStep, ["__call__", "forward", "head"]),
        "weight_source": _methods(WeightSource, _public(WeightSource)),
        "model_impl": _methods(ModelImpl, _public(ModelImpl)),
        "required_ops": list(REQUIRED_OPS),
        "ops": _methods(Ops, OP_NAMES),
        "data": {name: _fields(getattr(contract, name)) for name in DATA},
        "errors": tree,
        "exports": sorted(contract.__all__),
    }


def test_the_contract_is_the_golden_file():
    """Regenerate with LEADFRAME_WRITE_GOLDEN=1, in the commit that bumps CONTRACT."""
    now = describe()
    if os.environ.get("LEADFRAME_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    changed = [key for key in now if json.dumps(now[key]) != json.dumps(golden.get(key))]
    assert not changed, (
        f"the platform contract changed in {changed} and CONTRACT is still {CONTRACT}: bump it "
        "in platform/version.py and regenerate tests/core/contract.json"
    )


def test_the_sizes_that_the_design_promises():
    assert len(REQUIRED_HOOKS) == 3
    assert len(REQUIRED_HOOKS) + len(OPTIONAL_HOOKS) <= 6
    assert len(MEMBERS) == 13
    assert set(_public(Backend)) == set(MEMBERS)
    assert len(REQUIRED_OPS) == 3
    package = Path(contract.__file__).parent / "reference"
    lines = sum(len(path.read_text().splitlines()) for path in package.glob("*.py"))
    assert lines <= 400


def test_all_is_complete_and_true():
    imported = {
        name
        for name, value in vars(contract).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert imported == set(contract.__all__)


@pytest.mark.parametrize("name", [*REQUIRED_HOOKS, *OPTIONAL_HOOKS])
def test_every_hook_is_documented(name):
    assert len(inspect.getdoc(getattr(hookspecs, name))) > 30
    guide = Path(__file__).parents[2] / "docs/backends/hooks.md"
    assert f"`{name}" in guide.read_text()
