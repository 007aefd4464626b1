"""The platform contract: everything that the author of a backend needs, and nothing else.

A backend imports from here, from `leadframe.errors`, and from no other package of Leadframe.
"""

from leadframe.errors import (
    AmbiguousDevice,
    BackendBug,
    CompileError,
    ContractViolation,
    DeviceLost,
    DeviceNotFound,
    DeviceOOM,
    IncompatibleContract,
    LeadframeError,
    PlatformError,
    PlatformNotInstalled,
    PluginLoadError,
    Unsupported,
)
from leadframe.platform.backend import (
    KV,
    MEMBERS,
    Array,
    Backend,
    BlockWeightSource,
    CompiledStep,
    KVLayer,
    KVLayerSpec,
    KVSpec,
    Partition,
    StepFunction,
    WeightBlocks,
    WeightRole,
    WeightSource,
)
from leadframe.platform.batch import (
    Bucket,
    SampleVariant,
    StepArrays,
    StepBatch,
    float_fields,
    int_fields,
    packed_sizes,
    unpack,
)
from leadframe.platform.capabilities import AttnParams, Capabilities, OpSpec
from leadframe.platform.first_party import FIRST_PARTY, install_hint
from leadframe.platform.guard import guard
from leadframe.platform.hookspecs import OPTIONAL_HOOKS, REQUIRED_HOOKS, hookimpl, hookspec
from leadframe.platform.host_memory import host_memory
from leadframe.platform.info import (
    ConformanceNotes,
    Detection,
    Device,
    KernelImpl,
    Limits,
    MemoryInfo,
    OptionSpec,
    PlatformInfo,
    PlatformKind,
    contract_text,
)
from leadframe.platform.listing import DeviceRow, format_devices, list_devices
from leadframe.platform.model_impl import ModelFacts, ModelImpl, OpenModelImpl
from leadframe.platform.namespace import ArrayNamespace
from leadframe.platform.op_table import OpChoice, OpTable, build_op_table
from leadframe.platform.ops import OP_NAMES, REQUIRED_OPS, Ops, RopeTable
from leadframe.platform.plugin import Plugin
from leadframe.platform.reference_ops import reference_ops
from leadframe.platform.selection import Selection, create_backend, select_device
from leadframe.platform.validate import validate_backend
from leadframe.platform.version import (
    CONTRACT,
    ENTRY_POINT_GROUP,
    KERNEL_GROUP,
    MODEL_IMPL_GROUP,
)

__all__ = [
    "CONTRACT",
    "ENTRY_POINT_GROUP",
    "FIRST_PARTY",
    "KERNEL_GROUP",
    "KV",
    "MEMBERS",
    "MODEL_IMPL_GROUP",
    "OPTIONAL_HOOKS",
    "OP_NAMES",
    "REQUIRED_HOOKS",
    "REQUIRED_OPS",
    "AmbiguousDevice",
    "Array",
    "ArrayNamespace",
    "AttnParams",
    "Backend",
    "BackendBug",
    "BlockWeightSource",
    "Bucket",
    "Capabilities",
    "CompileError",
    "CompiledStep",
    "ConformanceNotes",
    "ContractViolation",
    "Detection",
    "Device",
    "DeviceLost",
    "DeviceNotFound",
    "DeviceOOM",
    "DeviceRow",
    "IncompatibleContract",
    "KVLayer",
    "KVLayerSpec",
    "KVSpec",
    "KernelImpl",
    "LeadframeError",
    "Limits",
    "MemoryInfo",
    "ModelFacts",
    "ModelImpl",
    "OpChoice",
    "OpSpec",
    "OpTable",
    "OpenModelImpl",
    "Ops",
    "OptionSpec",
    "Partition",
    "PlatformError",
    "PlatformInfo",
    "PlatformKind",
    "PlatformNotInstalled",
    "Plugin",
    "PluginLoadError",
    "RopeTable",
    "SampleVariant",
    "Selection",
    "StepArrays",
    "StepBatch",
    "StepFunction",
    "Unsupported",
    "WeightBlocks",
    "WeightRole",
    "WeightSource",
    "build_op_table",
    "contract_text",
    "create_backend",
    "float_fields",
    "format_devices",
    "guard",
    "hookimpl",
    "hookspec",
    "host_memory",
    "install_hint",
    "int_fields",
    "list_devices",
    "packed_sizes",
    "reference_ops",
    "select_device",
    "unpack",
    "validate_backend",
]
